"""The layer whose backward needs less memory: values, who has its input, where it is used. The rest: test_consumer.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memkit
import memkit.functional as M

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INPUTS = {
    "vector": lambda: torch.randn(48),
    "rows": lambda: torch.randn(7, 48),
    "more dimensions": lambda: torch.randn(3, 1, 5, 48),
    "none": lambda: torch.randn(4, 0, 48),
    "transposed": lambda: torch.randn(48, 7).t(),
    "one in two": lambda: torch.randn(6, 96)[:, ::2],
    "expanded": lambda: torch.randn(1, 48).expand(5, 48),
}


def gradients(linear: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    leaves = [each.detach().requires_grad_() for each in inputs]
    out = linear(*[leaves[0] * 1, *leaves[1:]])
    grad = torch.linspace(-1, 1, out.numel()).to(out.dtype).view_as(out)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("name", INPUTS)
def test_stock_s(name: str, with_bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [INPUTS[name](), torch.randn(20, 48), torch.randn(20)][: 3 if with_bias else 2]
    inputs = [each.to(dtype) for each in inputs]
    for mine, other in zip(gradients(M.linear, *inputs), gradients(F.linear, *inputs), strict=True):
        if name == "transposed":  # stock makes the gradient in that order of memory
            torch.testing.assert_close(mine, other)
        else:
            assert torch.equal(mine, other)


class FromNumpy(torch.autograd.Function):
    """Gives memory that is not PyTorch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, array: np.ndarray) -> Tensor:
        array[:] = x.detach().numpy()
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def of(how: str, x: Tensor, held: list[Any]) -> Tensor:
    """A new tensor whose values somebody needs after the layer's backward, if only as `held`."""
    h = x * 3
    if how == "held":
        held.append(h)
    elif how == "a view is held":
        held.append(h.detach()[1:])
    elif how == "of other memory":
        held.append(np.empty(tuple(x.shape), np.float32))
        return FromNumpy.apply(x, held[0])  # type: ignore[no-any-return]
    return h


@pytest.mark.parametrize("how", ["held", "a view is held", "of other memory"])
def test_what_others_hold_is_not_overwritten(how: str) -> None:
    held: list[Any] = []
    x, weight = torch.randn(64, 48, requires_grad=True), torch.randn(20, 48, requires_grad=True)
    out = M.linear(of(how, x, held), weight)
    seen = held[0] if how == "of other memory" else held[0].detach().numpy()
    before = seen.copy()
    out.sum().backward()
    np.testing.assert_array_equal(seen, before)


def test_what_another_node_saved_is_not_overwritten() -> None:
    x = torch.randn(64, 48, requires_grad=True)
    weights = [torch.randn(20, 48, requires_grad=True) for _ in range(2)]

    def found(linear: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        h = x * 3
        out = linear(h, weights[0]) + linear(h, weights[1]) + h.exp().sum()
        del h
        return torch.autograd.grad(out.square().sum(), (x, *weights))

    for mine, other in zip(found(M.linear), found(F.linear), strict=True):
        torch.testing.assert_close(mine, other)


def test_a_graph_that_is_kept_gives_the_same_again() -> None:
    x, weight = torch.randn(64, 48, requires_grad=True), torch.randn(20, 48, requires_grad=True)
    out = M.linear(x * 3, weight).sum()
    first = torch.autograd.grad(out, (x, weight), retain_graph=True)
    second = torch.autograd.grad(out, (x, weight), retain_graph=True)
    for mine, other in zip(second, first, strict=True):
        assert torch.equal(mine, other)


def test_what_hooks_hold_is_not_overwritten() -> None:
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    x, weight = torch.randn(64, 48, requires_grad=True), torch.randn(20, 48, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, saved.__getitem__):
        out = M.linear(x * 3, weight)
    before = [each.detach().clone() for each in saved]
    out.sum().backward()
    for mine, other in zip(saved, before, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("dims", [2, 3])
def test_the_gradient_takes_the_memory_of_an_input_that_nobody_holds(dims: int) -> None:
    x = torch.randn(512, 1024, requires_grad=True)
    weight = torch.randn(32, 1024, requires_grad=True)
    shape = x.shape if dims == 2 else (2, 256, 1024)

    def peak(linear: Callable[..., Tensor]) -> int:
        def step() -> None:
            torch.autograd.grad(linear((x + 1).view(shape), weight).sum(), (x, weight))

        step()
        return memkit.memory.measure(step).peak

    size = x.numel() * 4
    assert peak(F.linear) > 1.9 * size
    assert peak(M.linear) < 1.3 * size


def test_frozen_weights_keep_no_input() -> None:
    x = torch.randn(512, 1024, requires_grad=True)
    weight, bias = torch.randn(32, 1024), torch.randn(32, requires_grad=True)
    saved = [
        memkit.memory.measure(lambda f=f: f(x * 3, weight, bias).sum()).saved for f in (F.linear, M.linear)
    ]
    assert saved[0] == saved[1]
    mine, other = (
        torch.autograd.grad(f(x, weight, bias).square().sum(), (x, bias)) for f in (M.linear, F.linear)
    )
    assert all(map(torch.equal, mine, other))


def test_a_part_of_other_memory_is_left_to_its_gradient_alone() -> None:
    class Part(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.ones(100, *x.shape)[50]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad

    x, weight = torch.randn(64, 48, requires_grad=True), torch.randn(20, 48, requires_grad=True)
    M.linear(Part.apply(x), weight).sum().backward()
    assert x.grad is not None
    assert x.grad.untyped_storage().nbytes() < 2 * x.numel() * 4


def test_module() -> None:
    ours, stock = memkit.nn.Linear(48, 20), nn.Linear(48, 20)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(2, 48)
    assert torch.equal(ours(x), stock(x))


def test_bad_input() -> None:
    x, weight = torch.randn(2, 3), torch.randn(4, 3)
    for call, error, text in (
        (lambda: M.linear("x", weight), TypeError, "linear: expected input to be a Tensor, got str"),  # type: ignore[arg-type]
        (lambda: M.linear(x.int(), weight), TypeError, "linear: expected float32"),
        (lambda: M.linear(x, weight.double()), TypeError, "linear: expected a weight of the input's dtype"),
        (lambda: M.linear(x, weight[0]), ValueError, "linear: expected a weight of 2 dimensions"),
        (lambda: M.linear(x[:, :2], weight), ValueError, "linear: expected 3 features"),
        (lambda: M.linear(x[0, 0], weight), ValueError, "linear: expected an input of at least 1 dimension"),
        (lambda: M.linear(x, weight, x), ValueError, r"linear: expected a bias of shape \[4\]"),
    ):
        with pytest.raises(error, match=text):
            call()


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


def test_swap_in_lean() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Feed(), Feed())
    x = torch.randn(2048, 64)

    def step() -> list[Tensor]:
        out = model(x)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), tuple(model.parameters()))]

    peaks, results = [], []
    for ops in (["gelu"], ["gelu", "linear"]):
        memkit.swap(model, sample=x, lean="call", ops=ops)
        step()
        found = memkit.memory.measure(step)
        peaks.append(found.peak)
        results.append(found.result)
        assert isinstance(model[0].down, memkit.nn.Linear) == ("linear" in ops)
        assert type(model[0].up) is nn.Linear
        memkit.unswap(model)
        assert type(model[0].down) is nn.Linear
    for mine, other in zip(*results, strict=True):
        assert torch.equal(mine, other)
    assert peaks[0] - peaks[1] > 0.9 * 2048 * 512 * 4
    memkit.swap(model, sample=x)
    assert type(model[0].down) is nn.Linear  # without lean() nothing is made again


def test_swapped_under_what_stays_stock_s() -> None:
    """Autocast, hooks, a weight that is none of nn.Linear's own, a small input: nothing of memkit's runs."""
    model = Feed()
    memkit.swap(model, lean=True)
    x = torch.randn(2048, 64, requires_grad=True)

    def runs(context: Any, x: Tensor = x) -> bool:
        names: set[str] = set()
        with context, memkit.lean():
            todo = [model(x).grad_fn]
        while todo:
            node = todo.pop()
            if node is not None:
                names.add(node.name())
                todo += [before for before, _ in node.next_functions]
        return any("_linear_backward" in name for name in names)

    plain = torch.enable_grad
    assert runs(plain())
    assert not runs(torch.autocast("cpu", torch.bfloat16))
    assert not runs(plain(), x[:64])
    handle = model.down.register_forward_hook(lambda *_: None)
    assert not runs(plain())
    handle.remove()
    assert runs(plain())
    model.down.weight.requires_grad_(False)
    assert not runs(plain())


def test_a_parametrization_of_a_swapped_layer_is_evaluated_once() -> None:
    class Counts(nn.Module):
        calls = 0

        def forward(self, weight: Tensor) -> Tensor:
            self.calls += 1
            return weight * 2

    model, x = Feed(), torch.randn(2048, 64)
    memkit.swap(model, lean=True)
    nn.utils.parametrize.register_parametrization(model.down, "weight", counts := Counts())
    counts.calls = 0
    with memkit.lean():
        model(x).sum().backward()
    assert counts.calls == 1

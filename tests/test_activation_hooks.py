"""What activations save for backward, as saved-tensor hooks see it: how many bytes, in which order, brought back how."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activation_cases import BRANCHES, CASES, generator, keep, modes, ours, stock
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import memkit.functional as M
from memkit._reference import value_and_gradient


def saved_bytes(forward: Callable[[], Tensor], besides: list[Tensor]) -> int:
    """Bytes that autograd keeps for backward, each storage once, without those of `besides`."""
    known = {t.untyped_storage().data_ptr() for t in besides}
    sizes: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return t.detach()

    with saved_tensors_hooks(pack, lambda t: t):
        out = forward()
        kept = sum(sizes.values())
        del out
    return kept


KEPT = {  # bytes an element between two Linear layers in bfloat16: stock, memkit in place
    "gelu": (F.gelu, M.gelu, 4, 2.125),
    "gelu(tanh)": (
        lambda h: F.gelu(h, approximate="tanh"),
        lambda h, **k: M.gelu(h, "tanh", **k),
        4,
        2.125,
    ),
    "silu": (F.silu, M.silu, 4, 2.125),
    "mish": (F.mish, M.mish, 4, 2.125),
    "hardswish": (F.hardswish, M.hardswish, 4, 2.125),
    "quick_gelu": (None, M.quick_gelu, None, 2.125),
    "relu": (F.relu, M.relu, 2, 2),
    "relu_squared": (lambda h: F.relu(h).square(), M.relu_squared, 4, 2),
    "elu": (F.elu, M.elu, 4, 2),
    "sigmoid": (torch.sigmoid, M.sigmoid, 2, 2),
    "softplus": (F.softplus, M.softplus, 4, 2),
}


@pytest.mark.parametrize("name", KEPT)
def test_bytes_saved_between_two_linear_layers(name: str) -> None:
    stock, ours, stock_bytes, our_bytes = KEPT[name]
    n = 256
    first, second = nn.Linear(n, n).bfloat16(), nn.Linear(n, n).bfloat16()
    x = torch.randn(n, n, dtype=torch.bfloat16)
    besides = [x, *first.parameters(), *second.parameters()]

    def bytes_of(act: Callable[[Tensor], Tensor]) -> float:
        return saved_bytes(lambda: second(act(first(x))), besides) / (n * n)

    assert bytes_of(lambda h: ours(h, inplace=True)) == our_bytes
    assert bytes_of(lambda h: ours(h, inplace="auto")) == our_bytes
    assert bytes_of(lambda h: ours(h, save="output")) == our_bytes
    assert bytes_of(lambda h: ours(h, save="input")) == 4
    if stock is not None:
        assert bytes_of(stock) == stock_bytes


def test_bytes_saved_with_a_bias() -> None:
    """The biased input is never kept: stock's add and gelu keep it beside the output."""
    n = 256
    first, second = nn.Linear(n, n, bias=False), nn.Linear(n, n)
    bias, x = nn.Parameter(torch.randn(n)), torch.randn(n, n)
    besides = [x, bias, *first.parameters(), *second.parameters()]
    kept = saved_bytes(lambda: second(M.bias_act(first(x), bias, inplace=True)), besides)
    assert kept == n * n * 4 + n * n // 8


def test_nothing_is_saved_without_a_gradient() -> None:
    x = torch.randn(100)
    for mode in ("input", "output"):
        assert saved_bytes(lambda mode=mode: M.gelu(x, save=mode), []) == 0
        leaf = torch.randn(100, requires_grad=True)
        with torch.no_grad():
            assert saved_bytes(lambda mode=mode, leaf=leaf: M.gelu(leaf, save=mode), []) == 0


@pytest.mark.parametrize(("case", "mode"), [(c, m) for c in CASES for m in modes(c)], ids=str)
def test_the_hooks_see_every_saved_tensor(case: str, mode: str) -> None:
    seen: list[tuple[torch.dtype, tuple[int, ...]]] = []

    def pack(t: Tensor) -> Tensor:
        seen.append((t.dtype, tuple(t.shape)))
        return t.detach()

    leaf = torch.randn(9, 7, requires_grad=True)
    x = leaf * 1
    with saved_tensors_hooks(pack, lambda t: t):
        ours(case, mode)(x)
    bits = (torch.uint8, (8,))
    if "bit" in mode:
        assert seen == [bits]
    else:
        assert seen == [(torch.float32, (9, 7)), *([bits] if mode != "input" and case in BRANCHES else [])]


def through_numpy() -> AbstractContextManager[Any]:
    """What offloading to a file does: bytes and shape, no strides."""
    return saved_tensors_hooks(lambda t: t.detach().contiguous().numpy().copy(), torch.from_numpy)


def as_save_on_cpu_pins() -> AbstractContextManager[Any]:
    """What save_on_cpu(pin_memory=True) does: a contiguous copy, whatever the order was."""
    return saved_tensors_hooks(lambda t: torch.empty(t.size(), dtype=t.dtype).copy_(t), lambda t: t)


def other_order() -> AbstractContextManager[Any]:
    """Comes back with the strides reversed."""

    def unpack(t: Tensor) -> Tensor:
        axes = list(range(t.dim()))[::-1]
        return t.permute(axes).contiguous().permute(axes)

    return saved_tensors_hooks(lambda t: t.detach().clone(), unpack)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "a part": lambda x: x[:, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "mode"), [(name, mode) for name in ("silu", "relu") for mode in modes(name)]
)
@pytest.mark.parametrize("hooks", [save_on_cpu, through_numpy, as_save_on_cpu_pins, other_order])
def test_tensors_come_back_in_another_order(hooks: Any, name: str, mode: str, layout: str) -> None:
    x = torch.randn(3, 6, 5, 4, generator=generator())
    x = x.sign() * (x.abs() + 1.4)  # away from the minimum
    weight = torch.randn(LAYOUTS[layout](x).shape, generator=generator(1))
    bias = torch.randn(weight.size(1), generator=generator(2)) / 10

    def run(act: Callable[[Tensor], Tensor]) -> Tensor:
        return value_and_gradient(lambda leaf: act(LAYOUTS[layout](leaf * 1)), x, weight)[1]

    with hooks():
        got = run(ours(name, mode))
        biased = run(lambda h: M.bias_act(h, bias, name, dim=1, **keep(mode)))
    torch.testing.assert_close(got, run(stock(name)), rtol=1e-5, atol=1e-5)
    want = run(lambda h: stock(name)(h + bias[:, None, None]))
    torch.testing.assert_close(biased, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("unpack", "text"),
    [
        (lambda t: t.double() if t.is_floating_point() else t, "expected a saved tensor like the gradient"),
        (lambda t: t[:1], "expected"),
        (lambda t: t.float(), "expected .* contiguous bytes of bits"),
    ],
)
def test_hooks_that_bring_back_something_else(unpack: Callable[[Tensor], Tensor], text: str) -> None:
    x = torch.randn(9, 7, requires_grad=True)
    with saved_tensors_hooks(lambda t: t.detach(), unpack):
        y = M.gelu(x, save="output")
    with pytest.raises(RuntimeError, match=f"^gelu: {text}"):
        y.sum().backward()


def test_module_and_tensor_hooks_see_the_right_gradients() -> None:
    def gradients(act: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        seen: list[Tensor] = []
        x = torch.randn(4, 5, requires_grad=True)
        h = x * 2
        h.register_hook(lambda g: seen.append(g.clone()))
        y = act(h)
        y.retain_grad()
        y.register_hook(lambda g: seen.append(g.clone()))
        y.grad_fn.register_hook(lambda gi, go: seen.append(gi[0].clone()))
        y.grad_fn.register_prehook(lambda go: seen.append(go[0].clone()))
        (y * torch.randn(4, 5)).sum().backward()
        return [*seen, y.grad, x.grad]

    want = gradients(F.silu)
    for save in ("input", "output"):
        got = gradients(lambda h, save=save: M.silu(h, save=save))
        assert len(got) == len(want)
        for mine, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    in_place = gradients(lambda h: M.relu(h, inplace=True))
    for mine, theirs in zip(in_place, gradients(F.relu_), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_hooks_that_keep_or_change_gradients() -> None:
    """A gradient that Python holds is not overwritten, and one that a hook replaced is used."""
    kept: list[Tensor] = []
    x = torch.randn(50, requires_grad=True)
    y = M.tanh(x * 1, inplace=True)
    y.register_hook(lambda g: kept.append(g))
    z = y * 3
    z.register_hook(lambda g: g * 2)
    z.sum().backward()
    assert torch.equal(kept[0], torch.full((50,), 6.0))
    torch.testing.assert_close(x.grad, 6 * (1 - x.tanh() ** 2))

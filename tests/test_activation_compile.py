"""Activations in torch.compile and torch.export: values, gradients, what in place changes, every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from activation_cases import BIT_MODES, CASES, MODES, generator, keep, modes
from torch import Tensor, nn

import memkit.functional as M
import memkit.nn
from memkit import _reference

BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
backends = pytest.mark.parametrize("backend", BACKENDS)
dynamic = pytest.mark.parametrize("dynamic", [False, True])


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def values(*shape: int, seed: int = 0) -> Tensor:
    """Away from minima and kinks, on both sides."""
    random = torch.rand(2, *shape, generator=generator(seed))
    return (0.1 + 0.3 * random[0]) * torch.where(random[1] < 0.5, -4, 4)


def compile(
    function: Callable[..., Any], backend: str = "aot_eager", dynamic: bool = False
) -> Callable[..., Any]:
    return torch.compile(function, backend=backend, dynamic=dynamic, fullgraph=True)


def check(
    mine: Callable[[Tensor], tuple[Tensor, ...]],
    stock: Callable[[Tensor], tuple[Tensor, ...]],
    x: Tensor,
    strides: bool = True,
) -> None:
    """Every output, and the gradient of all of them."""

    def run(f: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[tuple[Tensor, ...], Tensor]:
        leaf = x.detach().clone().requires_grad_()
        outs = f(leaf)
        weights = [torch.randn(out.shape, generator=generator(i)) for i, out in enumerate(outs)]
        return outs, torch.autograd.grad(outs, leaf, weights)[0]

    got, slope = run(mine)
    want, want_slope = run(stock)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5, msg=lambda m, i=i: f"output {i}: {m}")
        assert not strides or a.stride() == b.stride()
    torch.testing.assert_close(slope, want_slope, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for a, b in zip(mine(x), want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x * 2,
    "channels_last": lambda x: (x * 2).contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: (x * 2).transpose(1, 3),
    "a part": lambda x: (x * 2)[:, ::2],
    "flat": lambda x: (x * 2).flatten(1),
}


@backends
@dynamic
@pytest.mark.parametrize("mode", MODES + BIT_MODES)
def test_layouts(mode: str, dynamic: bool, backend: str) -> None:
    """All in one graph: tanh (no bits) and silu (bits), or what keeps nothing but bits."""
    arguments = keep(mode)
    two = ((M.relu6, F.relu6), (M.leaky_relu, F.leaky_relu))
    functions = two if mode in BIT_MODES else ((M.tanh, torch.tanh), (M.silu, F.silu))

    def ours(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(f(make(x), **arguments) * 2 for make in LAYOUTS.values() for f, _ in functions)

    def stock(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(f(make(x)) * 2 for make in LAYOUTS.values() for _, f in functions)

    compiled = compile(ours, backend, dynamic)
    check(compiled, stock, values(4, 6, 5, 7), strides=False)
    if dynamic:
        check(compiled, stock, values(3, 4, 9, 2), strides=False)
        check(
            compiled, stock, values(2, 8, 3, 3).contiguous(memory_format=torch.channels_last), strides=False
        )


@dynamic
def test_every_function(dynamic: bool) -> None:
    """One graph with all of them, in all modes: in place, or out of place."""
    calls = [(CASES[case], mode) for case in CASES for mode in modes(case) if ("inplace" in mode) != dynamic]

    def ours(x: Tensor) -> tuple[Tensor, ...]:
        outs = []
        for (name, params), mode in calls:
            outs.append(getattr(M, name)(x * 1, **params, **keep(mode)))
        return tuple(outs)

    def stock(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(_reference.stock(name, x, **params) for (name, params), _ in calls)

    check(compile(ours, dynamic=dynamic), stock, values(9, 7))


@backends
@dynamic
def test_in_place_writes_the_input(dynamic: bool, backend: str) -> None:
    compiled = compile(lambda x: M.silu(x, inplace=True) + 1, backend, dynamic)
    x = values(6, 8)
    h = x.clone()
    out = compiled(h)
    torch.testing.assert_close(h, F.silu(x))
    torch.testing.assert_close(out, F.silu(x) + 1)

    leaf = x.clone().requires_grad_()
    h = leaf * 1
    out = compiled(h)
    torch.testing.assert_close(h, F.silu(x))
    (got,) = torch.autograd.grad((out * h).sum(), leaf)
    (want,) = torch.autograd.grad(((F.silu(leaf) + 1) * F.silu(leaf)).sum(), leaf)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@backends
@dynamic
def test_in_place_on_a_view_changes_the_base(dynamic: bool, backend: str) -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        h = x * 2
        M.silu(h[:, ::2], inplace=True)
        return (h * 3,)

    def stock(x: Tensor) -> tuple[Tensor, ...]:
        h = x * 2
        return (torch.stack([F.silu(h[:, ::2]), h[:, 1::2]], -1).flatten(1) * 3,)

    check(compile(f, backend, dynamic), stock, values(6, 8))
    check(f, stock, values(6, 8))


@backends
@dynamic
def test_bias(dynamic: bool, backend: str) -> None:
    bias, row = values(6, seed=1), values(7, seed=2)

    def f(x: Tensor) -> tuple[Tensor, ...]:
        nhwc = (x * 2).contiguous(memory_format=torch.channels_last)
        return (
            M.bias_act(x * 2, row, inplace=True),
            M.bias_act(nhwc, bias, "silu", dim=1, inplace=True) * 2,
            M.bias_act(x, bias, "elu", dim=1, alpha=0.5, save="output"),
            M.bias_act(x.transpose(1, 2), bias, dim=2, save="output"),
        )

    def stock(x: Tensor) -> tuple[Tensor, ...]:
        column = bias[:, None, None]
        return (
            F.gelu(x * 2 + row),
            F.silu(x * 2 + column) * 2,
            F.elu(x + column, 0.5),
            F.gelu(x + column).transpose(1, 2),
        )

    check(compile(f, backend, dynamic), stock, values(4, 6, 5, 7), strides=False)


@backends
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_network_trains_as_stock(backend: str, layout: torch.memory_format) -> None:
    """Convolutions may change the layout that the compiler sees; the bits must follow."""

    def build(n: Any, **keep: Any) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            n.SiLU(**keep),
            nn.Conv2d(16, 16, 3, padding=1, groups=16),
            n.Hardswish(**keep),
            nn.Conv2d(16, 8, 1),
            n.ReLU(**keep),
            nn.Flatten(),
            nn.Linear(8 * 64, 12),
            n.ELU(**keep),
            nn.Linear(12, 4),
        )

    x = torch.randn(4, 3, 8, 8, generator=generator()).contiguous(memory_format=layout)
    target = torch.tensor([0, 1, 2, 3])

    def losses(net: nn.Module, forward: Callable[[Tensor], Tensor]) -> list[float]:
        net.to(memory_format=layout)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        history = []
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(forward(x), target)
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        return history

    net = build(nn)
    want = losses(net, net)
    for arguments in ({"inplace": True}, {"save": "output"}, {}):
        net = build(memkit.nn, **arguments)
        assert losses(net, compile(net, backend)) == pytest.approx(want, rel=1e-4)


def test_operators_called_directly() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        h = x * 2
        return torch.ops.memkit.silu_(h) * 2, torch.ops.memkit.bias_act(x, x[0], "relu")

    def stock(x: Tensor) -> tuple[Tensor, ...]:
        return F.silu(x * 2) * 2, F.relu(x + x[0])

    for dynamic in (False, True):
        check(compile(f, dynamic=dynamic), stock, values(6, 8))


def test_errors_in_compiled_functions() -> None:
    x = values(6, 8)
    for call, text in (
        (lambda x: M.gelu(x, inplace=True), "leaf"),
        (lambda x: M.gelu(x, save="both"), "expected save"),
        (lambda x: M.gelu(x, inplace="yes"), "expected inplace"),
        (lambda x: M.gelu(x * 1, inplace=True, save="input"), "in place, got 'input'"),
        (lambda x: M.leaky_relu(x * 1, -0.1, inplace=True), "one slope for each output"),
        (lambda x: M.bias_act(x, x[0, :3]), "expected a bias of shape"),
    ):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=text):
            compile(call)(x.clone().requires_grad_())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(8, 16), memkit.nn.GELU(inplace=True), nn.Linear(16, 4)
        self.last = memkit.nn.ReLU(inplace="auto")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.act(self.first(x))))


@pytest.mark.parametrize("strict", [False, True])
@dynamic
def test_export(strict: bool, dynamic: bool) -> None:
    net, x = Net(), torch.randn(6, 8)
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},) if dynamic else None
    exported = torch.export.export(net, (x,), dynamic_shapes=shapes, strict=strict)
    y = torch.randn(9, 8) if dynamic else x
    torch.testing.assert_close(exported.module()(y), net(y))
    assert any("memkit" in str(node.target) for node in exported.graph.nodes)


def test_autocast_in_a_compiled_function() -> None:
    net, x = Net(), torch.randn(6, 8)

    def step(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return net(x)

    out = compile(step)(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, step(x), rtol=2e-2, atol=2e-2)
    out.float().sum().backward()
    assert net.first.weight.grad.dtype == torch.float32

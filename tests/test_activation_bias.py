"""bias_act: every function, the bias along every dimension, every layout; values and both gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from activation_cases import BRANCHES, CASES, HALVES, MODES, generator, keep, modes
from torch import Tensor

import memkit.functional as M
from memkit import _reference


def values(*shape: int, seed: int = 0) -> Tensor:
    """In steps of 1/128, of which float32 holds sums exactly; away from minima and kinks once the bias is added."""
    random = torch.rand(2, *shape, generator=generator(seed), dtype=torch.float64)
    return ((1.875 + random[0] * 0.75) * torch.where(random[1] < 0.5, -1, 1)).mul(128).round().div(128)


def biases(n: int) -> Tensor:
    return (torch.rand(n, generator=generator(n), dtype=torch.float64) * 0.5 - 0.25).mul(128).round().div(128)


def gradients(
    function: Callable[[Tensor, Tensor], Tensor], x: Tensor, bias: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    x, bias = x.detach().requires_grad_(), bias.detach().requires_grad_()
    out = function(x, bias)
    return out.detach(), *torch.autograd.grad(out, (x, bias), weight.to(out.dtype))


def check(
    case: str,
    mode: str,
    x: Tensor,
    dim: int,
    layout: Callable[[Tensor], Tensor] = lambda x: x,
    **tolerance: float,
) -> None:
    """The layout is made inside the graph, from float32 values, and `dim` is the layout's."""
    name, params = CASES[case]
    act, params = ("gelu_tanh", {}) if case == "gelu(tanh)" else (name, params)
    bias = biases(layout(x).size(dim))
    weight = torch.randn(layout(x).shape, generator=generator(2), dtype=torch.float64)

    def ours(x: Tensor, b: Tensor) -> Tensor:
        return M.bias_act(layout(x * 1), b, act, dim=dim, **keep(mode), **params)

    def reference(x: Tensor, b: Tensor) -> Tensor:
        return _reference.reference(name, layout(x), b, dim, **CASES[case][1])

    got = gradients(ours, x.float(), bias.float(), weight.float())
    want = gradients(reference, x, bias, weight.float())
    for mine, truth, what in zip(got, want, ("value", "gradient of the input", "of the bias"), strict=True):
        limits = tolerance or {"rtol": 1e-5, "atol": 2e-5}
        torch.testing.assert_close(mine.double(), truth, **limits, msg=lambda m, what=what: f"{what}: {m}")


@pytest.mark.parametrize(("case", "mode"), [(c, m) for c in CASES for m in modes(c)], ids=str)
def test_every_function(case: str, mode: str) -> None:
    for dim in (-1, 0, 1, -2):
        check(case, mode, values(5, 9, 7), dim)
    check(case, mode, values(17), 0)
    check(case, mode, values(2, 3, 4, 5, 6), 2)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "permuted": lambda x: x.permute(3, 0, 2, 1),
    "a part": lambda x: x[:, 1::2, :, 2:],
    "channels_last, a part": lambda x: x.contiguous(memory_format=torch.channels_last)[:, 1:4],
    "channels_last, one channel": lambda x: x[:, :1].contiguous(memory_format=torch.channels_last),
    "channels_last, one pixel": lambda x: x[:, :, :1, :1].contiguous(memory_format=torch.channels_last),
    "one row": lambda x: x[:1, :, :1],
}


@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, mode: str, dim: int) -> None:
    for case in ("silu", "tanh"):
        check(case, mode, values(4, 6, 10, 11), dim, LAYOUTS[layout], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dim", [1, -4])
def test_channels_last_3d(mode: str, dim: int) -> None:
    def layout(x: Tensor) -> Tensor:
        return x.contiguous(memory_format=torch.channels_last_3d)

    check("silu", mode, values(2, 5, 3, 4, 6), dim, layout, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES[:2])
def test_an_expanded_input(mode: str) -> None:
    check("silu", mode, values(4, 1, 5), 1, lambda x: x.expand(4, 3, 5), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((0, 5), 1), ((0, 5), 0), ((3, 0), 1), ((1, 1), 0), ((40_003, 3), 1), ((3, 40_003), 0), ((100_003,), 0)],
)
def test_sizes(mode: str, shape: tuple[int, ...], dim: int) -> None:
    check("silu", mode, values(*shape), dim, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("mode", MODES)
def test_layouts_of_the_bias(mode: str) -> None:
    x, memory = values(6, 8).float(), biases(32).float()
    for bias in (
        memory[::4],
        memory[:1].expand(8),
        memory[3:11],
        memory.flip(0)[:8],
        memory.view(4, 8).t()[:, 1],
    ):
        got = gradients(lambda x, b: M.bias_act(x * 1, b, "silu", **keep(mode)), x, bias, torch.ones(6, 8))
        want = gradients(lambda x, b: torch.nn.functional.silu(x + b), x, bias, torch.ones(6, 8))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_halves(case: str, dtype: torch.dtype) -> None:
    """At most twice stock's error, the largest and the root mean square; stock rounds the sum before the function."""
    name, params = CASES[case]
    act, given = ("gelu_tanh", {}) if case == "gelu(tanh)" else (name, params)
    x = torch.randn(500, 64, generator=generator(), dtype=torch.float64).to(dtype)
    bias = torch.randn(64, generator=generator(1), dtype=torch.float64).to(dtype)
    weight = torch.randn(500, 64, generator=generator(2), dtype=torch.float64).to(dtype)
    exactly = x.double(), bias.double(), weight.double()
    want = gradients(lambda x, b: _reference.reference(name, x, b, **params), *exactly)
    theirs = gradients(lambda x, b: _reference.stock(name, x, b, **params), x, bias, weight)
    for mode in modes(case)[:1] if case in BRANCHES else modes(case):
        mine = gradients(
            lambda x, b, mode=mode: M.bias_act(x * 1, b, act, **keep(mode), **given), x, bias, weight
        )
        for got, other, truth in zip(mine, theirs, want, strict=True):
            assert got.dtype == dtype
            slack = torch.finfo(dtype).eps * truth.abs().max()
            error, stock_error = (got - truth).abs(), (other - truth).abs()
            assert error.max() <= 2 * stock_error.max() + slack
            assert error.square().mean() <= 4 * stock_error.square().mean()


@pytest.mark.parametrize("mode", MODES)
def test_gradients_of_one_of_the_two(mode: str) -> None:
    x, bias = values(6, 8).float(), biases(8).float()

    def slopes(x: Tensor, b: Tensor, of: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return torch.autograd.grad(function(x, b).sum(), of)[0]

    for grads_of in (0, 1):
        arguments = [x.clone(), bias.clone()]
        leaf = arguments[grads_of].requires_grad_()
        got = slopes(*arguments, leaf, lambda x, b: M.bias_act(x.clone(), b, "silu", **keep(mode)))
        want = slopes(*arguments, leaf, lambda x, b: torch.nn.functional.silu(x + b))
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_in_place_on_an_input_without_gradient_and_a_bias_with_one() -> None:
    x, bias = values(6, 8).float(), biases(8).float().requires_grad_()
    h = x.clone()
    out = M.bias_act(h, bias, "tanh", inplace=True)
    assert out is h
    assert out.requires_grad
    torch.testing.assert_close(out, torch.tanh(x + bias))


@pytest.mark.parametrize("name", ["gelu", "relu", "leaky_relu", "softplus"])
def test_the_operator(name: str) -> None:
    """torch.ops takes the parameters as a list, with the same defaults."""
    x, bias = values(6, 8).float(), biases(8).float()
    want = _reference.stock(name, x, bias)
    torch.testing.assert_close(torch.ops.memkit.bias_act(x, bias, name), want)
    torch.testing.assert_close(torch.ops.memkit.bias_act_(x.clone(), bias, name), want)
    given = list(_reference.ACTIVATIONS[name].defaults.values()) if name != "gelu" else []
    torch.testing.assert_close(torch.ops.memkit.bias_act(x, bias, name, dim=1, params=given), want)

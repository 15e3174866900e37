"""Gradients of gradients (gradient penalties, steps within steps): as exact as stock's, and hardly more memory."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_cases import normal
from torch import Tensor, nn

import memkit
import memkit.functional as M
from memkit.memory import measure

f32, f64, bf16 = torch.float32, torch.float64, torch.bfloat16
Function = Callable[[Tensor], Tensor]


def penalty(function: Function, x: Tensor, parameters: list[Tensor]) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = function(x).to(torch.promote_types(x.dtype, f32))
    (first,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
    loss = first.to(out.dtype).square().sum()
    return [g for g in torch.autograd.grad(loss, [x, *parameters], allow_unused=True) if g is not None]


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    return max(
        float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)
    )


ACTS: dict[str, tuple[nn.Module, dict[str, float]]] = {
    "relu": (nn.ReLU(), {}),
    "leaky_relu": (nn.LeakyReLU(0.2), {"negative_slope": 0.2}),
    "hardtanh": (nn.Hardtanh(-0.5, 0.7), {"min_val": -0.5, "max_val": 0.7}),
    "silu": (nn.SiLU(), {}),
    "gelu": (nn.GELU(), {}),
}


@pytest.mark.parametrize("kind", ["images", "channels last", "strided", "plain", "evaluation", "rows"])
@pytest.mark.parametrize("dtype", [f64, f32, bf16], ids=str)
@pytest.mark.parametrize("act", ACTS)
def test_batch_norms_with_an_activation(
    act: str, dtype: torch.dtype, kind: str, device: torch.device
) -> None:
    module, params = ACTS[act]
    x = normal((64, 8) if kind == "rows" else (4, 8, 6, 5), f64, 0).to(device, dtype)
    if kind == "channels last":
        x = x.contiguous(memory_format=torch.channels_last)
    if kind == "strided":
        x = x.repeat(1, 1, 1, 2)[..., ::2]
    # Beside an input of 2 bytes an element a batch norm takes float32.
    wide = torch.promote_types(dtype, f32)
    weight, bias = (normal((8,), f64, i, mean=1, scale=0.3).to(device, wide).requires_grad_() for i in (1, 2))
    given = [] if kind == "plain" else [weight, bias]
    mean, var = (normal((8,), f64, i, mean=i - 3, scale=0.1).to(device) for i in (3, 5))
    training = kind != "evaluation"

    def of(norm: Callable[..., Tensor], to: torch.dtype) -> list[Tensor]:
        def function(x: Tensor) -> Tensor:
            return norm(x, mean.to(to), var.to(to), *(t.to(to) for t in given), training=training)

        return penalty(function, x.double() if to == f64 else x, given)

    def stock(*args: Tensor, training: bool) -> Tensor:
        return module(F.batch_norm(*args, training=training))

    exact = of(stock, f64)
    found = of(functools.partial(M.batch_norm_act, act=act, **params), wide)
    if kind == "strided":  # where stock's own kernel is wrong
        x = x.contiguous()
    theirs = of(stock, wide)
    assert [g.dtype for g in found] == [g.dtype for g in theirs]
    assert error(found, exact) <= 2 * error(theirs, exact) + (1e-13 if dtype == f64 else 0)


@pytest.mark.parametrize("shape", [(0, 4, 6), (0, 4)], ids=str)
@pytest.mark.parametrize("act", ["relu", "silu", None])
@pytest.mark.parametrize("training", [True, False])
def test_an_empty_batch(shape: tuple[int, ...], act: str | None, training: bool) -> None:
    weight, mean, var = torch.rand(3, 4).unbind()
    weight.requires_grad_()

    def function(x: Tensor) -> Tensor:
        return M.batch_norm_act(x, mean, var, weight, training=training, act=act)

    x = torch.rand(shape).requires_grad_()
    (first,) = torch.autograd.grad(function(x).sum(), x, torch.ones(()).requires_grad_(), create_graph=True)
    assert first.shape == shape
    found = torch.autograd.grad(first.sum(), [x, weight], allow_unused=True)
    assert all(g is None or not g.any() for g in found)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("act", ["relu", "leaky_relu"])
def test_what_a_slope_of_two_values_does_not_depend_on_has_a_gradient_of_zero(
    act: str, training: bool
) -> None:
    """Or an optimizer would leave it out of its step."""
    params = ACTS[act][1]
    mean, var = torch.zeros(3), torch.ones(3)

    def second(stock: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        x, weight, bias = (torch.rand(s).requires_grad_() for s in ((4, 3, 5), (3,), (3,)))
        given = x, mean.clone(), var.clone(), weight, bias
        if stock:
            out = ACTS[act][0](F.batch_norm(*given, training=training))
        else:
            out = M.batch_norm_act(*given, training=training, act=act, **params)
        (first,) = torch.autograd.grad(out.sin().sum(), x, create_graph=True)
        (other,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        leaves = [x, weight, bias]
        return [
            g
            for one in (first, other)
            for g in torch.autograd.grad(one.square().sum(), leaves, retain_graph=True, allow_unused=True)
        ]

    for mine, theirs in zip(second(False), second(True), strict=True):
        assert (mine is None) == (theirs is None)
        torch.testing.assert_close(mine, theirs)


def test_strides_of_dimensions_of_one() -> None:
    """With which stock's kernel goes wrong."""
    x = normal((1, 4, 1, 5), f64, 0)
    strided = torch.empty_strided(x.shape, (20, 1, 40, 4), dtype=f64).copy_(x)
    weight, bias = (normal((4,), f64, i, mean=1, scale=0.3).requires_grad_() for i in (1, 2))

    def function(x: Tensor) -> Tensor:
        return M.batch_norm_act(x, None, None, weight, bias, training=True, act="silu")

    for one, other in zip(*(penalty(function, t, [weight, bias]) for t in (strided, x)), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("packing", ["gate_up", "up_gate", "interleaved"])
def test_batched_gradients_of_packed_gates(packing: Any) -> None:
    x = torch.randn(3, 8, dtype=f64, requires_grad=True)
    basis = torch.eye(12, dtype=f64).view(12, 3, 4)
    (batched,) = torch.autograd.grad(
        M.swiglu(x, packing=packing), x, basis, is_grads_batched=True, create_graph=True
    )
    alone = [torch.autograd.grad(M.swiglu(x, packing=packing), x, one)[0] for one in basis]
    torch.testing.assert_close(batched, torch.stack(alone))


@pytest.mark.parametrize("dtype", [bf16, torch.float16], ids=str)
def test_norms_of_two_bytes(dtype: torch.dtype, device: torch.device) -> None:
    x = normal((4, 8, 6, 5), f64, 0).to(device, dtype)
    weight, bias = (
        normal((8,), f64, i, mean=1, scale=0.3).to(device, dtype).requires_grad_() for i in (1, 2)
    )

    def of(norm: Callable[..., Tensor], to: torch.dtype) -> list[Tensor]:
        return penalty(lambda x: norm(x, 2, weight.to(to), bias.to(to)), x.to(to), [weight, bias])

    exact = of(F.group_norm, f64)
    assert error(of(M.group_norm, dtype), exact) <= 2 * error(of(F.group_norm, dtype), exact)


def discriminator(
    norm: Callable[[], nn.Module], act: Callable[[], nn.Module], convolves: bool
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Conv2d(16, 16, 3, padding=1) if convolves else nn.Linear(128, 128), norm(), act()]
    return nn.Sequential(*layers)


def peaks(stock: nn.Module, x: Tensor, autocast: bool = False) -> tuple[int, int]:
    ours = copy.deepcopy(stock)
    with torch.autocast("cpu", bf16, enabled=autocast):
        memkit.swap(ours, sample=x)
    assert {type(m) for m in ours.modules()} != {type(m) for m in stock.modules()}

    def peak(model: nn.Module) -> int:
        def step() -> None:
            with torch.autocast("cpu", bf16, enabled=autocast):
                penalty(model, x, list(model.parameters()))

        step()
        return measure(step, device="cpu").peak

    return peak(ours), peak(stock)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize(("act", "most"), [(nn.ReLU, 1.2), (nn.LeakyReLU, 1.1), (nn.SiLU, 0.8)])
def test_memory_of_batch_norms(act: Callable[[], nn.Module], most: float, kind: str) -> None:
    torch.manual_seed(0)
    dtype = bf16 if kind == "bfloat16" else f32
    stock = discriminator(lambda: nn.BatchNorm2d(16), act, convolves=True).to(dtype)
    ours, theirs = peaks(stock, torch.randn(16, 16, 16, 16, dtype=dtype), kind == "autocast")
    assert ours <= most * theirs


def test_memory_of_group_norms() -> None:
    torch.manual_seed(0)
    stock = discriminator(lambda: nn.GroupNorm(4, 16), nn.ReLU, convolves=True).to(bf16)
    ours, theirs = peaks(stock, torch.randn(16, 16, 16, 16, dtype=bf16))
    assert ours <= 1.02 * theirs


def test_memory_of_layer_norms() -> None:
    torch.manual_seed(0)
    stock = discriminator(lambda: nn.LayerNorm(128), nn.ReLU, convolves=False)
    ours, theirs = peaks(stock, torch.randn(2048, 128))
    assert ours <= 1.1 * theirs


FUNCTIONS: dict[str, tuple[Function, Function]] = {
    "silu": (functools.partial(M.silu, save="input"), F.silu),
    "gelu": (functools.partial(M.gelu, save="input"), F.gelu),
    "mish": (functools.partial(M.mish, save="input"), F.mish),
    "quick_gelu": (functools.partial(M.quick_gelu, save="input"), lambda h: h * torch.sigmoid(1.702 * h)),
    "softplus": (M.softplus, F.softplus),
    "tanh": (M.tanh, torch.tanh),
    "relu": (M.relu, F.relu),
    "leaky_relu": (M.leaky_relu, F.leaky_relu),
    "relu_squared": (M.relu_squared, lambda h: F.relu(h).square()),
    "swiglu": (lambda h: M.swiglu(h, h.flip(1)), lambda h: F.silu(h) * h.flip(1)),
    "geglu": (lambda h: M.geglu(h, h.flip(1)), lambda h: F.gelu(h) * h.flip(1)),
    "packed": (lambda h: M.swiglu(torch.cat([h, h], 1)), lambda h: F.silu(h) * h),
    "softmax": (lambda h: M.softmax(h, -1), lambda h: F.softmax(h, -1)),
    "log_softmax": (lambda h: M.log_softmax(h, -1), lambda h: F.log_softmax(h, -1)),
    "bias_act": (
        lambda h: M.bias_act(h, h[0].detach(), "silu", save="input"),
        lambda h: F.silu(h + h[0].detach()),
    ),
}


def between_layers(function: Function, dtype: torch.dtype, depth: int, device: torch.device) -> list[Tensor]:
    torch.manual_seed(0)
    x = torch.randn(256, 128, dtype=f64).to(device, dtype)
    weights = [(torch.randn(128, 128, dtype=f64) / 11).to(device, dtype) for _ in range(depth)]
    given = [weight.requires_grad_() for weight in weights]

    def layers(h: Tensor) -> Tensor:
        for weight in given:
            h = function(h @ weight)
        return h

    return penalty(layers, x, given)


functions = pytest.mark.parametrize("name", FUNCTIONS)
two_dtypes = pytest.mark.parametrize("dtype", [f32, bf16], ids=str)


@two_dtypes
@functions
def test_functions_between_layers(name: str, dtype: torch.dtype, device: torch.device) -> None:
    ours, stock = FUNCTIONS[name]
    exact = between_layers(stock, f64, 1, device)
    found, theirs = (error(between_layers(f, dtype, 1, device), exact) for f in (ours, stock))
    assert found <= 2 * theirs


@two_dtypes
@functions
def test_memory_of_functions_between_layers(name: str, dtype: torch.dtype) -> None:
    cpu = torch.device("cpu")
    ours, stock = (
        measure(lambda f=f: between_layers(f, dtype, 4, cpu), device=cpu).peak for f in FUNCTIONS[name]
    )
    assert ours <= 1.02 * stock

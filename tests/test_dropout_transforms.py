"""Dropout under double backward, function transforms, compilers and autocast."""

from __future__ import annotations

import pytest
import torch
import torch._functorch.config as functorch
from dropout_cases import SEED, seeded
from torch import Tensor, nn

import memkit.functional as M


def test_gradcheck() -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    r = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    b = torch.randn(7, dtype=torch.float64, requires_grad=True)
    check, second = torch.autograd.gradcheck, torch.autograd.gradgradcheck
    for function, args in (
        (lambda x: seeded(lambda: M.dropout(x, 0.4)), (x,)),
        (lambda x: seeded(lambda: M.alpha_dropout(x, 0.4, True)), (x,)),
        (lambda x, b, r: seeded(lambda: M.bias_dropout_add(x, b, r, 0.4)), (x, b, r)),
        (lambda x, b: seeded(lambda: M.act_dropout(x, "tanh", 0.4, bias=b)), (x, b)),
        (lambda x, b: seeded(lambda: M.act_dropout(x, "gelu", 0.4, bias=b, save="input")), (x, b)),
    ):
        assert check(function, args)
        assert second(function, args)


def test_transforms() -> None:
    x = torch.ones(6, 50)
    slope = torch.func.grad(lambda t: M.dropout(t, 0.5).sum())(x)
    assert set(slope.unique().tolist()) == {0.0, 2.0}
    same = torch.vmap(lambda t: M.dropout(t, 0.5), randomness="same")(x)
    assert (same == same[0]).all()
    assert set(same.unique().tolist()) == {0.0, 2.0}
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda t: M.dropout(t, 0.5))(x)
    with pytest.raises(NotImplementedError, match="randomness='same'"):
        torch.vmap(lambda t: M.dropout(t, 0.5), randomness="different")(x)
    value, tangent = torch.func.jvp(lambda t: M.dropout(t, 0.5), (x,), (x * 3,))
    torch.testing.assert_close(tangent, value * 3)


def test_batched_gradients_in_another_memory_order() -> None:
    x = torch.ones(50, 6).t().requires_grad_()
    y, rows = M.dropout(x, 0.5), torch.arange(3 * 300.0).view(3, 6, 50)
    (got,) = torch.autograd.grad(y, x, rows, is_grads_batched=True)
    torch.testing.assert_close(got, rows * y.detach())


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    weight = torch.randn(64, 64, requires_grad=True)

    def network(x: Tensor, residual: Tensor) -> Tensor:
        h = M.act_dropout(x @ weight, "gelu", 0.5, save="output")
        return M.dropout_add(h, residual, 0.25) + M.dropout(h, 0.5, inplace="auto")

    compiled = torch.compile(network, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    x, residual = torch.randn(32, 64), torch.randn(32, 64)
    got, wanted = (seeded(lambda f=f: f(x, residual)) for f in (compiled, network))
    torch.testing.assert_close(got, wanted)
    grads = [torch.autograd.grad(each.square().sum(), weight)[0] for each in (got, wanted)]
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("budget", [0.5, 0.1])
def test_a_compiler_that_keeps_less_keeps_the_seeds(budget: float) -> None:
    """Backward against differences; dropout_linear and dropout draw theirs in Python and in C++."""
    inner, outer = (torch.randn(32, 32, dtype=torch.float64, requires_grad=True) for _ in range(2))
    x, weight = torch.randn(16, 32, dtype=torch.float64), torch.linspace(-1, 1, 32, dtype=torch.float64)

    def network(x: Tensor) -> Tensor:
        h = M.dropout_linear(x @ inner, outer, p=0.5, act="gelu")
        return (M.dropout(h, 0.5).square() * weight).sum()

    with functorch.patch(activation_memory_budget=budget):
        compiled = torch.compile(network, fullgraph=True, backend="aot_eager_decomp_partition")
        gradients = torch.autograd.grad(seeded(lambda: compiled(x)), (inner, outer))
    for parameter, gradient in zip((inner, outer), gradients, strict=True):
        with torch.no_grad():
            step = torch.randn_like(parameter) * 1e-6
            parameter.add_(step)
            after = seeded(lambda: compiled(x))
            parameter.sub_(2 * step)
            before = seeded(lambda: compiled(x))
            parameter.add_(step)
        torch.testing.assert_close((gradient * step).sum(), (after - before) / 2, rtol=1e-5, atol=0)


def test_compiled_transforms() -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def slopes(x: Tensor) -> Tensor:
        return torch.vmap(torch.func.grad(lambda t: M.dropout(t, 0.5).sum()), randomness="same")(x)

    found = slopes(torch.ones(6, 50))
    assert (found == found[0]).all()
    assert set(found.unique().tolist()) == {0.0, 2.0}


def test_opcheck() -> None:
    seed = torch.tensor(SEED)
    drop = [0.3, 1 / 0.7, 0.0, 0.0]
    for grad in (False, True):
        x = torch.randn(9, 14, requires_grad=grad)
        for op, residual in (("identity", torch.randn(9, 14)), ("identity", None), ("silu", None)):
            args = (x, None, -1, op, (), "auto", residual, seed, drop)
            torch.library.opcheck(torch.ops.memkit._activation.default, args)
    x, grads = torch.randn(9, 14), torch.randn(9, 14)
    torch.library.opcheck(
        torch.ops.memkit._dropout_mask.default, ((3, 5), seed, drop), {"dtype": torch.float32}
    )
    out, bits = torch.ops.memkit._activation_with_bits(x, None, -1, "silu", (), seed, drop)
    backward = (grads, out, None, -1, bits, "silu", (), True, seed, drop)
    torch.library.opcheck(torch.ops.memkit._activation_backward.default, backward)
    meta = torch.ops.memkit.dropout(torch.empty(3, 4, device="meta"), 0.5)
    assert (meta.shape, meta.is_meta) == ((3, 4), True)


def test_autocast_adds_as_stock() -> None:
    """A Linear's bfloat16 output to a float32 stream: the sum has the stream's dtype."""
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        y = seeded(lambda: M.dropout_add(linear(x), x, 0.5))
        z = seeded(lambda: M.bias_dropout_add(linear(x), linear.bias, x, 0.5))
    assert y.dtype == z.dtype == torch.float32
    assert M.dropout_add(torch.randn(4, 8), torch.randn(8), 0.5).shape == (4, 8)
    with pytest.raises(ValueError, match="expected, in place, a residual of the input's shape"):
        M.dropout_add(torch.randn(4, 8), torch.randn(8), 0.5, inplace=True)

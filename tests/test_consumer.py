"""Operators and the layers that consume them as one node: as exact as their parts, and as stock."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from consumer_cases import CASES, IN, OUT, ROWS, cases, kinds, seeded, tensors, with_gradients
from norm_cases import assert_as_good_as_stock
from torch import Tensor

import memkit.functional as M
from memkit.memory import measure

LOW = [torch.float32, torch.float16, torch.bfloat16]


@cases
def test_the_bits_of_the_parts(name: str) -> None:
    case = CASES[name]
    leaves = tensors(case, torch.float32)
    for mine, parts in zip(
        with_gradients(case.ours, leaves), with_gradients(case.parts, leaves), strict=True
    ):
        assert torch.equal(mine, parts)
    with torch.no_grad():
        assert torch.equal(case.ours(*leaves), case.parts(*leaves))


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.stock])
def test_as_exact_as_stock(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    leaves = tensors(case, dtype)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    grad = torch.randn_like(case.ours(*leaves))
    want = with_gradients(case.stock, exact, grad.double())
    mine, theirs = (with_gradients(f, leaves, grad) for f in (case.ours, case.stock))
    names = " ".join(f"t{i}" for i in range(len(mine)))
    assert_as_good_as_stock(names, mine, theirs, want, units=1)


@kinds
def test_gradcheck(name: str) -> None:
    case, leaves = CASES[name], tensors(CASES[name], torch.float64)
    batched = "batch_norm" not in name and "dropout" not in name
    assert torch.autograd.gradcheck(case.ours, leaves, check_batched_grad=batched, fast_mode=True)
    assert torch.autograd.gradgradcheck(case.ours, leaves, fast_mode=True)


def test_derivatives_of_inputs_made_from_each_other() -> None:
    x = torch.randn(4, IN, dtype=torch.float64, requires_grad=True)
    w = torch.randn(OUT, IN, dtype=torch.float64, requires_grad=True)
    for function in (
        lambda x, w: M.glu_linear(x, x * 2, w),
        lambda x, w: M.norm_linear(x, w * x.sum(), norm_weight=x[0]),
        lambda x, w: sum(M.norm_linear(x, [w, w * 2, w], norm="rms_norm")),
        lambda x, w: M.batch_norm_act(x, None, None, x[0], x[1], True, act="silu") @ w.t(),
    ):
        assert torch.autograd.gradgradcheck(function, (x, w), fast_mode=True)


def test_several_layers_of_one_norm() -> None:
    """As query, key and value are: one gradient of the norm's result, and layers without a gradient of their own."""
    x = torch.randn(5, ROWS, IN, requires_grad=True)
    weights = [torch.randn(n, IN, requires_grad=True) for n in (8, 4, 6)]
    bias = torch.randn(4, requires_grad=True)
    scale = torch.randn(IN, requires_grad=True)
    leaves = [x, *weights, bias, scale]

    def ours() -> tuple[Tensor, ...]:
        return M.norm_linear(x, weights, [None, bias, None], norm="rms_norm", norm_weight=scale)

    def parts(x: Tensor, a: Tensor, b: Tensor, c: Tensor, bias: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        h = F.rms_norm(x, (IN,), scale)
        return F.linear(h, a), F.linear(h, b, bias), F.linear(h, c)

    outs, exact = ours(), [t.detach().double().requires_grad_() for t in leaves]
    grads = [torch.randn_like(out) for out in outs]
    want = torch.autograd.grad(parts(*exact), exact, [g.double() for g in grads])
    theirs = torch.autograd.grad(parts(*leaves), leaves, grads)
    mine = torch.autograd.grad(outs, leaves, grads)
    assert_as_good_as_stock("x a b c bias scale", list(mine), list(theirs), list(want), units=1)

    found = torch.autograd.grad(ours()[0].sum(), leaves, allow_unused=True)
    assert [g is None for g in found] == [False, False, True, True, True, False]
    (got,) = torch.autograd.grad(ours()[2].square().sum(), [x])
    (want_x,) = torch.autograd.grad(parts(*leaves)[2].square().sum(), [x])
    torch.testing.assert_close(got, want_x, rtol=1e-4, atol=1e-4)
    assert measure(lambda: ours()).saved == 4 * 5 * ROWS  # x is from before


def test_frozen_weights_and_inputs() -> None:
    """No gradient that nobody asked for; nothing is made again for a weight without one."""
    x, w, b = tensors(CASES["gelu"], torch.float32)
    for wanted in ([True, False, False], [False, True, False], [False, False, True], [True, False, True]):
        leaves = [t.detach().requires_grad_(on) for t, on in zip((x, w, b), wanted, strict=True)]
        asked = [t for t, on in zip(leaves, wanted, strict=True) if on]
        mine, parts = (
            torch.autograd.grad(f(*leaves).square().sum(), asked)
            for f in (CASES["gelu"].ours, CASES["gelu"].parts)
        )
        assert all(torch.equal(a, b) for a, b in zip(mine, parts, strict=True))
    images, w, b, scale, shift = tensors(CASES["batch_norm"], torch.float32)
    for wanted in ([images], [scale, shift], [b], [w]):
        mine, parts = (
            torch.autograd.grad(f(images, w, b, scale, shift).square().sum(), wanted)
            for f in (CASES["batch_norm"].ours, CASES["batch_norm"].parts)
        )
        assert all(torch.equal(a, b) for a, b in zip(mine, parts, strict=True))


def test_layouts() -> None:
    base = torch.randn(6, 5, 8, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    for make in (
        lambda x: x.transpose(0, 1),
        lambda x: x[:, ::2],
        lambda x: x[:1].expand(4, 5, 8),
        lambda x: x[0, 0],
        lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
        lambda x: x[:0],
    ):
        for ours, parts in (
            (lambda x: M.act_linear(x, w), lambda x: F.linear(M.gelu(x), w)),
            (seeded(lambda x: M.dropout_linear(x, w)), seeded(lambda x: F.linear(M.dropout(x), w))),
            (
                seeded(lambda x: M.dropout_linear(x, w, act="silu")),
                seeded(lambda x: F.linear(M.act_dropout(x, "silu", save="input"), w)),
            ),
            (lambda x: M.glu_linear(x, x * 2, w), lambda x: F.linear(M.swiglu(x, x * 2), w)),
            (lambda x: M.norm_linear(x, w), lambda x: F.linear(F.layer_norm(x, (8,)), w)),
        ):
            mine, want = (f(make(base)) for f in (ours, parts))
            torch.testing.assert_close(mine, want)
            for grad in (
                torch.randn(mine.shape, dtype=torch.float64),
                torch.ones(3, dtype=torch.float64).expand_as(mine),
            ):
                for a, b in zip(
                    *(torch.autograd.grad(y, [base, w], grad, retain_graph=True) for y in (mine, want)),
                    strict=True,
                ):
                    torch.testing.assert_close(a, b)


@pytest.mark.parametrize("training", [True, False])
def test_channels_last_stays(training: bool) -> None:
    case = CASES["batch_norm relu" if training else "batch_norm eval"]
    leaves = tensors(case, torch.float32)
    leaves[0] = leaves[0].detach().contiguous(memory_format=torch.channels_last).requires_grad_()
    out = case.ours(*leaves)
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert torch.autograd.grad(out.sum(), leaves[0])[0].is_contiguous(memory_format=torch.channels_last)
    for a, b in zip(with_gradients(case.ours, leaves), with_gradients(case.parts, leaves), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("momentum", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("grad", [True, False])
def test_running_statistics_move_once_and_as_in_the_norm(
    grad: bool, kind: torch.dtype, momentum: float, device: torch.device
) -> None:
    """In the forward, each in its own dtype; backward computes the norm again, and leaves them alone."""
    x = torch.randn(4, 300, 5, 5, device=device).add(2).requires_grad_(grad)
    w = torch.randn(3, 300, 1, 1, device=device, requires_grad=True)
    (mean, variance), parts = (
        [torch.zeros(300, device=device), torch.ones(300, device=device, dtype=kind)] for _ in range(2)
    )
    for step in range(2):
        y = M.norm_act_conv2d(x, w, running_mean=mean, running_var=variance, training=True, momentum=momentum)
        M.batch_norm_act(x, *parts, training=True, momentum=momentum)
        y.sum().backward()
        assert mean._version == variance._version == step + 1
    for ours, theirs in zip((mean, variance), parts, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_an_error_moves_no_running_statistics() -> None:
    mean, variance, x = torch.zeros(6), torch.ones(6), torch.randn(4, 6, 5, 5)
    for weight in (torch.randn(3, 5, 1, 1), torch.randn(3, 6, 9, 9)):
        with pytest.raises((ValueError, RuntimeError)):
            M.norm_act_conv2d(x, weight, running_mean=mean, running_var=variance, training=True)
    assert mean._version == variance._version == 0
    assert mean.count_nonzero() == 0


def test_running_statistics() -> None:
    x, w = torch.randn(4, 6, 5, 5), torch.randn(3, 6, 1, 1)
    ours, parts = ((torch.zeros(6), torch.ones(6)) for _ in range(2))
    for _ in range(2):
        M.norm_act_conv2d(x, w, running_mean=ours[0], running_var=ours[1], training=True, momentum=0.3)
        F.batch_norm(x, *parts, training=True, momentum=0.3)
    for a, b in zip(ours, parts, strict=True):
        torch.testing.assert_close(a, b)

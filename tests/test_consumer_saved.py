"""What operators and their layers as one node keep for backward, and what their backward may write into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from consumer_cases import CASES, IN, OUT, ROWS, kinds, linear, tensors, with_gradients
from norm_cases import assert_as_good_as_stock
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import memkit
import memkit.functional as M
from memkit.memory import measure


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gelu", "gelu dropout", "swiglu", "layer_norm", "rms_norm", "batch_norm"])
def test_bytes_under_autocast(name: str, stream: torch.dtype) -> None:
    """The inputs as they arrive, and no cast of them, or a norm's result; the layer computes in bfloat16."""
    case = CASES[name]
    leaves = tensors(case, torch.float32)
    inputs = 2 if name == "swiglu" else 1
    made = [t.detach().to(stream).requires_grad_() for t in leaves[:inputs]]

    def call() -> Tensor:
        return case.ours(*(t * 1 for t in made), *leaves[inputs:])

    with torch.autocast("cpu", torch.bfloat16):
        call()  # the weights' casts are autocast's from now on
        saved = measure(call).saved
        out = call()
    rows = ROWS * 3
    beside = {"layer_norm": 8 * rows, "rms_norm": 4 * rows, "batch_norm": 16 * 8, "gelu dropout": 8}.get(
        name, 0
    )
    assert out.dtype == torch.bfloat16
    from_result = name == "rms_norm" and stream == torch.float32  # layer_norm's bias is too large here
    assert saved == sum(t.numel() * (2 if from_result else t.itemsize) for t in made) + beside
    wanted = [*made, *leaves[inputs:]]
    for t, grad in zip(wanted, torch.autograd.grad(out.float().square().sum(), wanted), strict=True):
        assert (grad.dtype, grad.shape) == (t.dtype, t.shape)


def test_autocast_is_what_the_parts_are() -> None:
    for name in (
        "gelu",
        "silu",
        "swiglu",
        "layer_norm",
        "rms_norm",
        "biased gelu",
        "gelu dropout",
        "batch_norm",
    ):
        case, leaves = CASES[name], tensors(CASES[name], torch.float32)
        # What to keep is the norm's own choice, as it is the consumer's.
        chosen = linear(lambda x, w: M.rms_norm(x, (IN,), w, 1e-6), 1)
        with torch.autocast("cpu", torch.bfloat16):
            mine, parts = (f(*leaves) for f in (case.ours, chosen if name == "rms_norm" else case.parts))
        assert torch.equal(mine, parts), name
        for a, b in zip(
            *(torch.autograd.grad(y.float().square().sum(), leaves) for y in (mine, parts)), strict=True
        ):
            assert torch.equal(a, b), name
    with torch.autocast("cpu", torch.bfloat16):  # backward inside, float64 as it is
        M.act_linear(*tensors(CASES["gelu"], torch.float32)).float().sum().backward()
        assert M.act_linear(*tensors(CASES["gelu"], torch.float64)).dtype == torch.float64


NORMS = pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])


def norm_leaves(name: str, bias: float = 0.5) -> list[Tensor]:
    """A float32 stream, a layer, and norm weights of both signs, the biases up to ``bias`` times as large."""
    leaves = [t.detach() for t in tensors(CASES[name], torch.float32)]
    weight = torch.sign(leaves[3]) * (0.5 + leaves[3].abs())
    scaled = [weight, *(bias * weight * torch.tanh(t) for t in leaves[4:])]
    return [t.requires_grad_() for t in (leaves[0] * 1.0, *leaves[1:3], *scaled)]


@NORMS
def test_a_norm_of_a_wide_stream_keeps_its_result(name: str) -> None:
    """Half as large as the input, where the weights allow the gradient from it; often and by any hook."""
    case, leaves = CASES[name], norm_leaves(name)
    numel, rows = leaves[0].numel(), leaves[0].numel() // IN
    before = linear(lambda x, *p: getattr(M, name)(x, (IN,), *p, eps=1e-5 if len(p) > 1 else 1e-6), 1)

    def saved(leaves: list[Tensor]) -> int:
        return measure(lambda: case.ours(leaves[0] * 1, *leaves[1:])).saved

    with torch.autocast("cpu", torch.bfloat16):
        saved(leaves)  # the weights' casts are autocast's from now on
        assert saved(leaves) == 2 * numel + 4 * rows
        if name == "layer_norm":
            large = norm_leaves(name, 4)
            saved(large)
            assert saved(large) == 4 * numel + 8 * rows
        out, parts = case.ours(*leaves), before(*leaves)
    assert torch.equal(out, parts)
    grad = torch.randn_like(out)
    first, again, want = (torch.autograd.grad(y, leaves, grad, retain_graph=True) for y in (out, out, parts))
    for a, b, c in zip(first, again, want, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    with torch.autocast("cpu", torch.bfloat16), save_on_cpu():
        hooked = case.ours(*leaves)
    assert all(map(torch.equal, torch.autograd.grad(hooked, leaves, grad), first))
    for i, each in enumerate(first):  # one alone
        assert torch.equal(torch.autograd.grad(out, leaves[i], grad, retain_graph=True)[0], each)


@NORMS
def test_a_kept_result_is_as_exact_as_stock(name: str) -> None:
    case, leaves = CASES[name], norm_leaves(name, 1)

    def found(function: Any) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            out = function(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    exact = [t.detach().double().requires_grad_() for t in leaves]
    grad = torch.randn(3, ROWS, OUT).bfloat16()
    want = with_gradients(case.stock, exact, grad.double())
    names = " ".join(f"t{i}" for i in range(len(want)))
    assert_as_good_as_stock(names, found(case.ours), found(case.stock), want, units=1)


@NORMS
def test_a_kept_result_has_second_derivatives(name: str) -> None:
    case, leaves = CASES[name], norm_leaves(name)
    seconds = []
    for function, x in ((case.ours, leaves[0]), (case.ours, leaves[0] * 1), (case.parts, leaves[0])):
        with torch.autocast("cpu", torch.bfloat16):
            out = function(x, *leaves[1:]).float()
        slope = torch.autograd.grad(out.square().sum(), [x, leaves[3]], create_graph=True)
        seconds.append(torch.autograd.grad(sum(s.square().sum() for s in slope), leaves))
    for mine in seconds[:2]:
        for a, b in zip(mine, seconds[2], strict=True):
            assert (a - b).norm() < 0.03 * b.norm()


def test_peak_of_backward() -> None:
    """The result, its gradient and the input's lie one after the other in one memory."""
    n = 1 << 8
    x = torch.randn(8 * n, n, requires_grad=True)
    w = torch.randn(1, n, requires_grad=True)
    out = M.act_linear(x, w)
    size = x.numel() * 4
    assert measure(lambda: torch.autograd.grad(out.sum(), [x, w])).peak < 1.1 * size
    gate, up = x * 1, x * 2
    out = M.glu_linear(gate, up, w)
    del gate, up
    assert measure(lambda: torch.autograd.grad(out.sum(), w)).peak < 1.1 * size
    gate, up = x * 1, x * 2
    out = M.glu_linear(gate, up, w)
    del gate, up
    assert measure(lambda: torch.autograd.grad(out.sum(), x)).peak < 2.1 * size


def test_running_statistics_may_run_on() -> None:
    """Evaluation keeps copies, so that a training step may come before its backward."""
    case, leaves = CASES["batch_norm eval"], tensors(CASES["batch_norm eval"], torch.float32)
    mean, variance = torch.zeros(8), torch.ones(8)
    x, w, b, *affine = leaves
    out = M.norm_act_conv2d(
        x,
        w,
        b,
        2,
        (1, 2),
        1,
        2,
        running_mean=mean,
        running_var=variance,
        norm_weight=affine[0],
        norm_bias=affine[1],
    )
    mean.add_(1)
    grad = torch.ones_like(out)
    mine, parts = (
        torch.autograd.grad(out, leaves, grad),
        torch.autograd.grad(case.parts(*leaves), leaves, grad),
    )
    assert all(torch.equal(a, b) for a, b in zip(mine, parts, strict=True))


def test_gate_and_up_are_written_over_only_where_nobody_sees_it() -> None:
    x = torch.randn(64, 64, requires_grad=True)
    w = torch.randn(8, 64, requires_grad=True)
    for retain, keep, other in (
        (False, False, False),
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ):
        gate, up = x * 2, x * 3
        before = gate.detach().clone()
        loss = M.glu_linear(gate, up, w).sum() + (gate.sin().sum() + up.exp().sum() if other else 0)
        kept = gate if keep else None
        del gate, up
        (slope,) = torch.autograd.grad(loss, x, retain_graph=retain)
        gate, up = x * 2, x * 3
        want = F.linear(F.silu(gate) * up, w).sum() + (gate.sin().sum() + up.exp().sum() if other else 0)
        torch.testing.assert_close(slope, torch.autograd.grad(want, x)[0])
        if kept is not None:
            assert torch.equal(kept.detach(), before)
        if retain:
            assert torch.equal(torch.autograd.grad(loss, x)[0], slope)
        with pytest.raises(RuntimeError, match="second time"):
            torch.autograd.grad(loss, x)


def test_what_is_kept_must_not_change() -> None:
    h = torch.randn(4, IN, requires_grad=True) * 1
    out = M.act_linear(h, torch.randn(OUT, IN, requires_grad=True))
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@kinds
def test_hooks_checkpoint_and_lean(name: str) -> None:
    case, leaves = CASES[name], tensors(CASES[name], torch.float32)

    def body(*t: Tensor) -> Tensor:
        return case.ours(M.gelu(t[0]), *t[1:])

    want = with_gradients(body, leaves)

    def offloaded(*t: Tensor) -> Tensor:
        with save_on_cpu():
            return body(*t)

    def lean(*t: Tensor) -> Tensor:
        with memkit.lean():
            return body(*t)

    def checkpointed(*t: Tensor) -> Tensor:
        return checkpoint(lean, *t, use_reentrant=False)

    for function in (offloaded, lean, checkpointed):
        for a, b in zip(with_gradients(function, leaves), want, strict=True):
            assert torch.equal(a, b)


def test_dropout_follows_memory_that_hooks_change() -> None:
    x = torch.randn(6, 5, 8, requires_grad=True)
    w = torch.randn(3, 8, requires_grad=True)

    def call(hooks: bool, act: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        h = x.transpose(0, 1) * 1
        assert not h.is_contiguous()
        if not hooks:
            out = M.dropout_linear(h, w, act=act)
        else:
            with save_on_cpu():
                out = M.dropout_linear(h, w, act=act)
        return list(torch.autograd.grad(out.square().sum(), [x, w]))

    for act in (None, "gelu"):
        for a, b in zip(call(True, act), call(False, act), strict=True):
            torch.testing.assert_close(a, b)

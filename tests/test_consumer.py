"""Operators and the layers that consume them as one node: exact, what is kept, AMP, transforms, compilers, and modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from consumer_cases import CASES, IN, KINDS, OUT, ROWS, linear, seeded, tensors, with_gradients
from norm_cases import assert_as_good_as_stock
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import memkit
import memkit.functional as M
from memkit.memory import measure

cases = pytest.mark.parametrize("name", CASES)
kinds = pytest.mark.parametrize("name", KINDS)
LOW = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# -- exactness -------------------------------------------------------------------------------------------------------------


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


def test_running_statistics() -> None:
    x, w = torch.randn(4, 6, 5, 5), torch.randn(3, 6, 1, 1)
    ours, parts = ((torch.zeros(6), torch.ones(6)) for _ in range(2))
    for _ in range(2):
        M.norm_act_conv2d(x, w, running_mean=ours[0], running_var=ours[1], training=True, momentum=0.3)
        F.batch_norm(x, *parts, training=True, momentum=0.3)
    for a, b in zip(ours, parts, strict=True):
        torch.testing.assert_close(a, b)


# -- what is kept ----------------------------------------------------------------------------------------------------------


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


# -- transforms and compilers ----------------------------------------------------------------------------------------------


@kinds
def test_transforms(name: str) -> None:
    case, leaves = CASES[name], [t.detach() for t in tensors(CASES[name], torch.float64)]
    torch.testing.assert_close(
        torch.func.grad(lambda *t: case.ours(*t).sum())(*leaves),
        torch.func.grad(lambda *t: case.parts(*t).sum())(*leaves),
    )
    tangents = tuple(torch.ones_like(t) for t in leaves)
    mine, parts = (torch.func.jvp(f, tuple(leaves), tangents) for f in (case.ours, case.parts))
    torch.testing.assert_close(mine, parts)
    if "batch_norm" in name or "dropout" in name or "conv" in name:
        return
    inputs = 2 if name in ("swiglu", "reglu") else 1
    dims = (0,) * inputs + (None,) * (len(leaves) - inputs)
    torch.testing.assert_close(torch.vmap(case.ours, dims)(*leaves), case.parts(*leaves))
    weights = leaves[inputs].expand(3, *leaves[inputs].shape)
    dims = tuple(0 if i == inputs else None for i in range(len(leaves)))
    many = torch.vmap(case.ours, dims)(*leaves[:inputs], weights, *leaves[inputs + 1 :])
    torch.testing.assert_close(many[2], case.parts(*leaves))


def test_vmap_and_dropout() -> None:
    x, w, b = (t.detach() for t in tensors(CASES["dropout"], torch.float32))
    same = torch.vmap(lambda x: M.dropout_linear(x, torch.eye(IN)), randomness="same")(torch.ones_like(x))
    assert (same == same[0]).all()
    assert set(same.unique().tolist()) == {0.0, 2.0}
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(lambda x: M.dropout_linear(x, w, b))(x)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic: bool) -> None:
    """One operator in the graph, forward and backward, that keeps what the eager one keeps."""
    for name in ("gelu", "swiglu", "batch_norm") if dynamic else ("gelu dropout", "interleaved", "rms_norm"):
        case, leaves = CASES[name], tensors(CASES[name], torch.float32)
        torch._dynamo.reset()
        raw = (lambda x, w, b: M.dropout_linear(x, w, b, 0.4, act="gelu")) if "dropout" in name else case.ours
        compiled = torch.compile(raw, fullgraph=True, dynamic=dynamic, backend="aot_eager")
        got, want = (with_gradients(seeded(f), leaves) for f in (compiled, raw))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        with torch.autocast("cpu", torch.bfloat16):
            assert seeded(compiled)(*leaves).dtype == torch.bfloat16


def test_compiled_networks() -> None:
    x = torch.randn(6, 16, requires_grad=True)
    for make in (lambda: memkit.nn.MLP(16, dropout=0.2), lambda: memkit.nn.GatedMLP(16, 64, dropout=0.2)):
        model = make()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        got, want = (
            with_gradients(seeded(lambda x, *_, f=f: f(x)), [x, *model.parameters()])
            for f in (compiled, model)
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_compiled_keeps_one_tensor() -> None:
    x = torch.randn(64, IN, requires_grad=True)
    w1, w2 = torch.randn(256, IN, requires_grad=True), torch.randn(8, 256, requires_grad=True)
    compiled = torch.compile(lambda x: M.act_linear(F.linear(x, w1), w2), fullgraph=True, backend="aot_eager")
    compiled(x)
    assert measure(lambda: compiled(x)).saved == 64 * 256 * 4


@kinds
def test_opcheck(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the operator with the arguments that the case gives it."""
    case, seen = CASES[name], []
    real = torch.ops.memkit._consumer.default

    class Spy:
        _consumer = type("op", (), {"default": staticmethod(lambda *a: seen.append(a) or real(*a))})

    monkeypatch.setattr("memkit.functional._consumer.torch.ops", type("ops", (), {"memkit": Spy}))
    case.ours(*tensors(case, torch.float32))
    monkeypatch.undo()
    torch.library.opcheck(real, seen[0])
    inputs, op, act, packing, numbers, weights, biases, conv = seen[0]
    outs, statistics = real(*seen[0])
    wanted = [t is not None and t.is_floating_point() for t in (*inputs, *weights, *biases)]
    if op == "batch_norm":
        wanted[3:5] = [False, False]

    def bare(ts: list[Any]) -> list[Any]:
        return [t if t is None else t.detach() for t in ts]

    backward = (
        bare([torch.ones_like(o) for o in outs]),
        bare(inputs),
        bare(statistics),
        op,
        act,
        packing,
        numbers,
    )
    torch.library.opcheck(
        torch.ops.memkit._consumer_backward.default, (*backward, bare(weights), conv, wanted)
    )


# -- refusals --------------------------------------------------------------------------------------------------------------


def test_bad_input() -> None:
    x, w = torch.randn(4, 6), torch.randn(3, 6)
    image = torch.randn(2, 6, 4, 4)
    for call, error, message in (
        (
            lambda: M.act_linear(x, torch.randn(3, 5)),
            ValueError,
            r"linear: expected 5 features, got \[4, 6\]",
        ),
        (
            lambda: M.act_linear(x, w, torch.randn(4)),
            ValueError,
            r"linear: expected a bias of shape \[3\], got \[4\]",
        ),
        (lambda: M.act_linear(x, w.double()), TypeError, "linear: expected a weight of the input's dtype"),
        (lambda: M.act_linear(x, w[0]), ValueError, "linear: expected a weight of 2 dimensions"),
        (lambda: M.act_linear(x, w, act="swish"), ValueError, "activation: expected one of"),
        (
            lambda: M.act_linear(x, w, act="elu", beta=1.0),
            TypeError,
            r"act_linear: expected parameters \['alpha'\]",
        ),
        (lambda: M.act_linear(x.long(), w), TypeError, "expected float32, float64, float16 or bfloat16"),
        (lambda: M.act_linear(x, w, act_bias=torch.randn(3)), ValueError, r"expected a bias of shape \[6\]"),
        (lambda: M.act_linear(torch.tensor(1.0), w), ValueError, "expected an input of"),
        (
            lambda: M.act_linear(x, [w, w], [None]),
            ValueError,
            "expected a bias or None for each of 2 weights",
        ),
        (lambda: M.act_linear(x, []), ValueError, "expected a bias or None for each weight"),
        (
            lambda: M.dropout_linear(x, w, p=1.5),
            ValueError,
            r"dropout_linear: expected a probability p in \[0, 1\]",
        ),
        (lambda: M.glu_linear(x, x[:2], w), ValueError, "glu: expected gate and up of one shape"),
        (lambda: M.glu_linear(x, x, w, packing="halves"), ValueError, "glu: expected packing"),
        (lambda: M.norm_linear(x, w, norm="batch"), ValueError, "norm_linear: expected norm"),
        (
            lambda: M.norm_linear(x, w, norm_weight=torch.ones(5)),
            ValueError,
            "layer_norm: expected a weight of shape",
        ),
        (lambda: M.act_conv2d(x, w), ValueError, "act_conv2d: expected an input .N, C, H, W."),
        (lambda: M.norm_act_conv2d(x, w), ValueError, "norm_act_conv2d: expected an input of 4 dimensions"),
        (
            lambda: M.norm_act_conv2d(image, w),
            ValueError,
            "expected running_mean and running_var outside training",
        ),
        (
            lambda: M.norm_act_conv2d(image, w, training=True),
            ValueError,
            "conv2d: expected a weight of 4 dimensions",
        ),
        (
            lambda: M.norm_act_conv2d(image, torch.randn(2, 5, 1, 1), training=True),
            ValueError,
            "conv2d: expected 5 features",
        ),
        (
            lambda: M.norm_act_conv2d(image, torch.randn(2, 6, 1, 1), padding="same", training=True),
            ValueError,
            "norm_act_conv2d: expected padding of one or two whole numbers",
        ),
        (
            lambda: M.norm_act_conv2d(image[:1, :, :1, :1], torch.randn(2, 6, 1, 1), training=True),
            ValueError,
            "norm_act_conv2d: expected more than 1 value per channel",
        ),
        (
            lambda: torch.ops.memkit._consumer([x], "softmax", "", "", [], [w], [None], []),
            ValueError,
            "_consumer: expected op",
        ),
        (
            lambda: torch.ops.memkit._consumer([x], "glu", "silu", "gate_up", [], [w], [None], []),
            ValueError,
            "_consumer: glu: expected 2 inputs",
        ),
    ):
        with pytest.raises(error, match=message):
            call()


def test_edges() -> None:
    w, b = torch.randn(3, 6, requires_grad=True), torch.randn(3, requires_grad=True)
    for shape in ((0, 6), (2, 0, 6), (6,)):
        x = torch.randn(shape, requires_grad=True)
        out, *grads = with_gradients(lambda x, w, b: M.act_linear(x, w, b), [x, w, b])
        assert out.shape == (*shape[:-1], 3)
        assert [g.shape for g in grads] == [x.shape, w.shape, b.shape]
    x = torch.randn(4, 6)
    x[1, 2], x[2, 3] = torch.nan, torch.inf
    out = M.act_linear(x, w)
    assert out[[0, 3]].isfinite().all()
    assert out[1].isnan().all()
    assert torch.equal(M.dropout_linear(x[:1], w, training=False), F.linear(x[:1], w))
    many = M.dropout_linear(x[:1], [w, w], [b, None], training=False)
    assert torch.equal(many[0], F.linear(x[:1], w, b))
    assert torch.equal(many[1], F.linear(x[:1], w))
    assert torch.equal(M.dropout_linear(x[:1], w, p=1.0), torch.zeros(1, 3))
    mine, parts = (
        seeded(f)()
        for f in (
            lambda: M.dropout_linear(x[:1], w, generator=torch.Generator().manual_seed(3)),
            lambda: F.linear(M.dropout(x[:1], generator=torch.Generator().manual_seed(3)), w),
        )
    )
    assert torch.equal(mine, parts)


# -- modules ---------------------------------------------------------------------------------------------------------------


def usual(kind: str) -> nn.Module:
    """An implementation as models have it."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if kind == "mlp":
                self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)
            else:
                self.gate_proj, self.up_proj = nn.Linear(16, 64, bias=False), nn.Linear(16, 64, bias=False)
                self.down_proj = nn.Linear(64, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            if kind == "mlp":
                return self.fc2(F.gelu(self.fc1(x)))
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    return Plain()


@pytest.mark.parametrize("kind", ["mlp", "gated"])
def test_networks(kind: str) -> None:
    theirs = usual(kind)
    mine = memkit.nn.MLP(16) if kind == "mlp" else memkit.nn.GatedMLP(16, 64)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 7, 16, requires_grad=True)
    a, b = mine(x), theirs(x)
    torch.testing.assert_close(a, b)
    grads = [torch.autograd.grad(y.square().sum(), [x, *m.parameters()]) for y, m in ((a, mine), (b, theirs))]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    hidden = 5 * 7 * 64 * 4
    assert measure(lambda: mine(x)).saved == hidden * (1 if kind == "mlp" else 2)
    mine.dropout, mine.out_dropout = 0.3, 0.2
    assert torch.equal(mine.eval()(x), a)
    mine.train()
    assert measure(lambda: mine(x)).saved == hidden * (1 if kind == "mlp" else 2) + 16
    last = mine.fc2 if kind == "mlp" else mine.down_proj

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        y = mine(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *mine.parameters()])]

    fused = run()
    seen: list[Any] = []
    handle = last.register_forward_hook(
        lambda *a: seen.append(a)
    )  # the layer is called, and all else is the same
    for got, want in zip(run(), fused, strict=True):
        torch.testing.assert_close(got, want)
    assert len(seen) == 1
    handle.remove()
    assert "dropout=0.3" in repr(mine)
    with pytest.raises(ValueError, match="expected a dropout probability"):
        type(mine)(16, dropout=2.0)


def test_layers() -> None:
    x, up = torch.randn(4, 16), torch.randn(4, 16)
    for layer, want in (
        (memkit.nn.ActLinear(16, 3, act="silu"), lambda m: F.linear(M.silu(x), m.weight, m.bias)),
        (
            memkit.nn.ActLinear(16, 3, False, "leaky_relu", negative_slope=0.2),
            lambda m: F.linear(M.leaky_relu(x, 0.2), m.weight),
        ),
        (
            memkit.nn.DropoutLinear(16, 3, p=0.3, act="gelu").eval(),
            lambda m: F.linear(M.gelu(x), m.weight, m.bias),
        ),
        (memkit.nn.GLULinear(16, 3), lambda m: F.linear(M.swiglu(x, up), m.weight, m.bias)),
    ):
        assert isinstance(layer, nn.Linear)
        assert layer.state_dict().keys() == nn.Linear(16, 3, layer.bias is not None).state_dict().keys()
        got = layer(x, up) if isinstance(layer, memkit.nn.GLULinear) else layer(x)
        assert torch.equal(got, want(layer))
        assert "in_features=16" in repr(layer)
    drops = memkit.nn.DropoutLinear(16, 3, p=0.5)
    assert torch.equal(
        *(seeded(f)() for f in (lambda: drops(x), lambda: F.linear(M.dropout(x), drops.weight, drops.bias)))
    )


def test_norm_linear_module() -> None:
    x = torch.randn(4, 16)
    for norm in (nn.LayerNorm(16), nn.RMSNorm(16), memkit.nn.RMSNorm(16)):
        heads = [nn.Linear(16, n) for n in (4, 2)]
        module = memkit.nn.NormLinear(norm, *heads)
        for got, head in zip(module(x), heads, strict=True):
            torch.testing.assert_close(got, head(norm(x)))
        heads[0].register_forward_hook(lambda *a: a[2] * 0)
        assert not module(x)[0].any()
        assert torch.is_tensor(memkit.nn.NormLinear(norm, heads[1])(x))

    class Shifted(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    shifted = Shifted(16)
    torch.testing.assert_close(memkit.nn.NormLinear(shifted, heads[1])(x), heads[1](shifted(x)))
    with pytest.raises(TypeError, match="NormLinear: expected a LayerNorm or RMSNorm"):
        memkit.nn.NormLinear(nn.LayerNorm((4, 4)), heads[0])
    with pytest.raises(ValueError, match="NormLinear: expected at least one Linear"):
        memkit.nn.NormLinear(norm)


def test_norm_act_conv_module() -> None:
    x = torch.randn(4, 6, 5, 5)
    for momentum in (0.1, None):
        ours, theirs = (nn.BatchNorm2d(6, momentum=momentum) for _ in range(2))
        module = memkit.nn.NormActConv2d(ours, 6, 3, 3, padding=1)
        for _ in range(2):
            torch.testing.assert_close(
                module(x),
                F.conv2d(F.relu(theirs(x)), module.weight, module.bias, padding=1),
                rtol=1e-4,
                atol=1e-5,
            )
        for key, value in theirs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[key], value)
        module.eval(), theirs.eval()
        torch.testing.assert_close(
            module(x),
            F.conv2d(F.relu(theirs(x)), module.weight, module.bias, padding=1),
            rtol=1e-4,
            atol=1e-5,
        )
    norm = memkit.nn.BatchNorm2d(6, act="silu")
    module = memkit.nn.NormActConv2d(norm, 6, 3, 1, act="gelu_tanh")
    want = F.conv2d(F.gelu(norm(x), approximate="tanh"), module.weight, module.bias)
    torch.testing.assert_close(module(x), want, rtol=1e-4, atol=1e-5)
    for options in ({"padding": "same"}, {"padding_mode": "reflect", "padding": 1}):
        with pytest.raises(
            ValueError, match="NormActConv2d: expected padding_mode 'zeros' and padding in numbers"
        ):
            memkit.nn.NormActConv2d(nn.BatchNorm2d(6), 6, 3, 3, **options)


def test_unknown_activations_are_refused_at_once() -> None:
    makes: dict[str, Callable[[], nn.Module]] = {
        "activation: expected one of gelu": lambda: memkit.nn.MLP(4, act="swish"),
        "glu: expected act 'silu'": lambda: memkit.nn.GatedMLP(4, 8, act="swish"),
        "activation: expected one of gelu, silu": lambda: memkit.nn.ActLinear(4, 4, act="swish"),
    }
    for text, make in makes.items():
        with pytest.raises(ValueError, match=text):
            make()
    with torch.device("meta"):
        assert memkit.nn.MLP(4, act="relu").fc1.weight.is_meta

"""Operators and their layers as one node under function transforms and compilers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from consumer_cases import CASES, IN, cases, kinds, seeded, tensors, with_gradients
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import memkit
import memkit.functional as M
from memkit.memory import measure


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


@cases
def test_jit_trace(name: str) -> None:
    """For other values than those that were traced, and for other batches."""
    case = CASES[name]
    inputs = 2 if name in ("swiglu", "reglu") else 1
    traced = torch.jit.trace(case.ours, tuple(tensors(case, torch.float64)), check_trace=False)
    leaves = tensors(case, torch.float64, seed=1)
    got, want = (with_gradients(seeded(f), leaves) for f in (traced, case.ours))
    torch.testing.assert_close(got, want)
    leaves[:inputs] = [torch.cat([t, t]) for t in leaves[:inputs]]
    torch.testing.assert_close(seeded(traced)(*leaves), seeded(case.ours)(*leaves))


def test_fx_symbolic_trace() -> None:
    x, w, b = tensors(CASES["gelu"], torch.float32)
    for function in (
        lambda x, w, b: M.act_linear(x, w, b, "silu"),
        lambda x, w, b: torch.cat(M.norm_linear(x, [w, w], [b, None], eps=1e-5), -1),
        lambda x, w, b: M.dropout_linear(x, w, b, 0.0),
    ):
        traced = torch.fx.symbolic_trace(function)
        torch.testing.assert_close(traced(x, w, b), function(x, w, b), rtol=0, atol=0)
    for model in (memkit.nn.MLP(IN), memkit.nn.GatedMLP(IN), memkit.nn.ActLinear(IN, 8)):
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x), model(x), rtol=0, atol=0)


def test_a_traced_gradient_is_called_with_what_has_a_graph() -> None:
    leaves = tensors(CASES["gelu"], torch.float32)

    def slopes(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(M.act_linear(x, w, b).sum(), [x, w, b])

    torch.testing.assert_close(make_fx(slopes)(*leaves)(*leaves), slopes(*leaves))


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
def test_modes_and_subclasses_see_the_operator(name: str) -> None:
    """As they see those of torch: nothing goes past them into C++."""
    case, seen = CASES[name], []
    run, given = seeded(case.ours), tensors(case, torch.float32)

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Subclass(torch.Tensor):
        pass

    expected = run(*given)
    with Mode():
        found = run(*given)
    assert torch.ops.memkit._consumer.default in seen
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    found = run(*(x.detach().as_subclass(Subclass) for x in given))
    assert type(found) is Subclass
    torch.testing.assert_close(found.as_subclass(torch.Tensor), expected, rtol=0, atol=0)


@kinds
def test_opcheck(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the operator with the arguments that the case gives it."""
    case, seen = CASES[name], []
    real = torch.ops.memkit._consumer.default

    monkeypatch.setattr("memkit._C.norm_act_conv2d", lambda *_: None)  # the entry past the other
    monkeypatch.setattr("memkit.functional._consumer._consumer", lambda name, *a: seen.append(a) or real(*a))
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

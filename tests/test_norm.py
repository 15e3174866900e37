"""LayerNorm and RMSNorm, with a residual and without: exactness, layouts, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_cases import (
    KINDS,
    LOW,
    assert_as_good_as_stock,
    inputs,
    normal,
    ops,
    ours,
    saves,
    stock,
    weights,
)
from torch import Tensor

import memkit
import memkit.functional as M
from memkit._reference_norm import run


@pytest.mark.parametrize("columns", [1000, 4100])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", LOW, ids=str)
@saves
@ops
def test_as_exact_as_stock(op: str, save: str, dtype: torch.dtype, kind: str, columns: int) -> None:
    tensors = [inputs(kind, (64, columns), dtype), *weights(op, columns, dtype)]
    grads = [normal((64, columns), dtype, 3)]
    want = run(stock(op, columns), tensors, grads, torch.float64)
    theirs = run(stock(op, columns), tensors, grads)
    mine = run(ours(op, columns, save=save), tensors, grads)
    assert_as_good_as_stock("y input weight bias"[: 14 if op == "rms_norm" else None], mine, theirs, want)


@pytest.mark.parametrize("dtype", LOW, ids=str)
@ops
def test_where_auto_keeps_the_output_it_is_as_exact_as_stock(op: str, dtype: torch.dtype) -> None:
    """Biases as large as the weights, which is as far as it goes; beyond, the input is kept."""
    columns = 512
    for ratio, kept in ((1.0, "output"), (2.0, "input" if op == "layer_norm" else "output")):
        tensors = [inputs("normal", (256, columns), dtype), *weights(op, columns, dtype, ratio)]
        grads = [normal((256, columns), dtype, 3)]
        want = run(stock(op, columns), tensors, grads, torch.float64)
        theirs = run(stock(op, columns), tensors, grads)
        function = ours(op, columns)
        assert M.norm_saves(function(*(t.requires_grad_() for t in tensors))) == kept
        mine = run(function, tensors, grads)
        assert_as_good_as_stock("y input weight bias"[: 14 if op == "rms_norm" else None], mine, theirs, want)


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 7, 8, 16])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@ops
def test_short_rows_are_as_exact_as_stock(op: str, dtype: torch.dtype, columns: int) -> None:
    """Of one or two elements without centring, the gradient is what is left of numbers far larger."""
    tensors = [inputs("normal", (2000, columns), dtype), *weights(op, columns, dtype)]
    grads = [normal((2000, columns), dtype, 3)]
    want = run(stock(op, columns), tensors, grads, torch.float64)[:2]
    theirs = run(stock(op, columns), tensors, grads)[:2]
    function = ours(op, columns)
    kept = "input" if op == "rms_norm" and columns < 8 else "output"
    assert M.norm_saves(function(*(t.requires_grad_() for t in tensors))) == kept
    mine = run(function, tensors, grads)[:2]
    assert_as_good_as_stock("y input", mine, theirs, want)


@saves
@ops
def test_float64(op: str, save: str) -> None:
    for columns in (1, 7, 32, 2049, 5000):
        tensors = [inputs("normal", (5, columns), torch.float64), *weights(op, columns, torch.float64)]
        grads = [normal((5, columns), torch.float64, 3)]
        mine, want = (
            run(ours(op, columns, save=save), tensors, grads),
            run(stock(op, columns), tensors, grads),
        )
        for a, b in zip(mine, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_large_mean_does_not_spoil_the_variance() -> None:
    """Where the sum of squares loses every digit: mean 1e4 times the deviation."""
    x = (1e4 + torch.randn(8, 3000, dtype=torch.float64)).float()
    want = F.layer_norm(x.double(), (3000,))
    error = (M.layer_norm(x, (3000,)).double() - want).abs().max().item()
    assert error < 1e-3
    x = torch.full((2, 4096), 3.3)  # no variance at all
    assert M.layer_norm(x, (4096,)).abs().max() < 1e-3


@pytest.mark.parametrize("columns", [256, 1000, 2048, 5000])
def test_first_elements_far_from_the_others(columns: int) -> None:
    """Their mean does not serve for the row, whose variance would lose up to five bits."""
    x = normal((50, columns), torch.float64, 0)
    x[:, :64] += 1e4
    tensors = [x.float(), *weights("layer_norm", columns, torch.float32)]
    grads = [normal((50, columns), torch.float32, 3)]
    want = run(stock("layer_norm", columns), tensors, grads, torch.float64)
    mine = run(ours("layer_norm", columns), tensors, grads)
    theirs = run(stock("layer_norm", columns), tensors, grads)
    assert_as_good_as_stock("y input weight bias", mine, theirs, want, 0.25)


@pytest.mark.parametrize("at", [0, 100])
@pytest.mark.parametrize("others", [20.0, 60.0, 150.0])
@ops
@pytest.mark.parametrize("columns", [1024, 2049, 16384, 262144])
def test_one_value_above_all_others(op: str, others: float, at: int, columns: int) -> None:
    """What is added to its square rounds alike in a row that repeats itself: sixteen units in the last place at most."""
    x = others * torch.tensor([1.0, -1.0]).repeat((columns + 1) // 2)[:columns]
    x[at] = 1e5
    tensors = [x[None], *weights(op, columns, torch.float32)]
    want = stock(op, columns)(*(each.double() for each in tensors))
    mine = ours(op, columns)(*tensors)
    worst = (mine.double() - want).abs().max() / want.abs().max()
    assert worst < 16 * torch.finfo(torch.float32).eps


@pytest.mark.parametrize("columns", [100, 256, 3000])
@pytest.mark.parametrize("at", [0, 63, -1])
def test_squares_that_overflow_leave_a_row_finite(columns: int, at: int) -> None:
    """As in PyTorch, where that depends on the place."""
    x = normal((4, columns), torch.float32, 0)
    x[1, at] = 3e38
    assert M.layer_norm(x, (columns,)).isfinite().all()


@pytest.mark.parametrize(
    ("columns", "dtype", "off"),
    [
        (1024, torch.float32, 6e17),
        (1024, torch.float32, 1e18),
        (4096, torch.bfloat16, 1e18),
        (256, torch.float64, 1e153),
    ],
)
def test_squares_that_overflow_about_the_first_elements_alone(
    columns: int, dtype: torch.dtype, off: float
) -> None:
    x = normal((4, columns), dtype, 0)
    x[1, :64] += off
    torch.testing.assert_close(M.layer_norm(x, (columns,)), F.layer_norm(x, (columns,)))


@ops
def test_statistics_are_kept_for_backward_alone(op: str) -> None:
    """Without gradients a norm allocates its output, in place nothing."""
    x, weight, norm = torch.randn(64, 8), torch.ones(8), getattr(M, op)
    with torch.no_grad():
        assert memkit.memory.measure(lambda: norm(x, (8,), weight)).allocations == 1
        assert memkit.memory.measure(lambda: norm(x, (8,), weight, inplace=True)).allocations == 0


@pytest.mark.parametrize("op", ["add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@saves
def test_with_a_residual_as_exact_as_stock(op: str, dtype: torch.dtype, save: str) -> None:
    columns = 768
    tensors = [normal((40, columns), dtype, 0), normal((40, columns), dtype, 4), *weights(op, columns, dtype)]
    grads = [normal((40, columns), dtype, 3), normal((40, columns), dtype, 5)]
    want = run(stock(op, columns), tensors, grads, torch.float64)
    theirs = run(stock(op, columns), tensors, grads)
    mine = run(ours(op, columns, save=save), tensors, grads)
    names = "y sum input residual weight bias"
    # The sum is rounded before it is normalised, in both: that is the error of most.
    assert_as_good_as_stock(names if op == "add_layer_norm" else names[:-5], mine, theirs, want, units=1)


@saves
@ops
def test_many_rows(op: str, save: str) -> None:
    """The gradients of weight and bias are sums over more rows than a thread gets at once."""
    tensors = [inputs("normal", (20_000, 16), torch.float32), *weights(op, 16, torch.float32)]
    grads = [normal((20_000, 16), torch.float32, 3, mean=1)]
    want = run(stock(op, 16), tensors, grads, torch.float64)
    mine, theirs = run(ours(op, 16, save=save), tensors, grads), run(stock(op, 16), tensors, grads)
    assert_as_good_as_stock("y input weight bias"[: 14 if op == "rms_norm" else None], mine, theirs, want)
    again = run(ours(op, 16, save=save), tensors, grads)
    assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))


@ops
def test_missing_parameters_and_shapes(op: str) -> None:
    x = normal((3, 4, 5, 6), torch.float32, 0)
    for dims in (1, 2, 3, 4):
        shape = tuple(x.shape[-dims:])
        torch.testing.assert_close(getattr(M, op)(x, shape), getattr(F, op)(x, shape), rtol=1e-5, atol=1e-5)
    if op == "layer_norm":
        bias = normal((6,), torch.float32, 1).requires_grad_()
        got, want = (f(x, (6,), None, bias) for f in (M.layer_norm, F.layer_norm))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        (a,), (b,) = (torch.autograd.grad(y.square().sum(), bias) for y in (got, want))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@ops
@saves
def test_layouts(op: str, save: str) -> None:
    base = normal((6, 5, 8), torch.float64, 0)
    for make in (
        lambda x: x.transpose(0, 1),
        lambda x: x[:, ::2],
        lambda x: x[..., 1:],
        lambda x: x[:1].expand(4, 5, 8),
    ):
        columns = make(base).shape[-1]
        tensors = [base, *weights(op, columns, torch.float64)]

        def of(function: Callable[..., Any], make: Callable[[Tensor], Tensor] = make) -> Callable[..., Any]:
            return lambda x, *rest: function(make(x), *rest)

        grads = [normal(tuple(make(base).shape), torch.float64, 3)]
        mine = run(of(ours(op, columns, save=save)), tensors, grads)
        for a, b in zip(mine, run(of(stock(op, columns)), tensors, grads), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@ops
@saves
def test_nothing_to_normalise(op: str, save: str) -> None:
    for shape in ((0, 4), (3, 0), (0, 0), (2, 0, 4)):
        tensors = [torch.randn(shape), *weights(op, shape[-1], torch.float32)]
        out, grad_input, *grads = run(ours(op, shape[-1], save=save), tensors, [torch.ones(shape)])
        assert out.shape == grad_input.shape == shape
        assert all(not g.any() for g in grads)


@ops
def test_nan_and_infinity_stay_in_their_row(op: str) -> None:
    x = normal((4, 50), torch.float32, 0)
    x[1, 3], x[2, 4] = math.nan, math.inf
    got = getattr(M, op)(x, (50,))
    assert got[[0, 3]].isfinite().all()
    assert got[1].isnan().all()
    assert not got[2].isfinite().all()


@ops
def test_weights_of_another_dtype(op: str) -> None:
    """float32 weights beside a half input, as stock PyTorch has it; their gradients are float32."""
    for dtype in (torch.float16, torch.bfloat16):
        tensors = [normal((30, 64), dtype, 0), *weights(op, 64, torch.float32)]
        grads = [normal((30, 64), dtype, 3)]
        want = run(stock(op, 64), tensors, grads, torch.float64)
        theirs, mine = run(stock(op, 64), tensors, grads), run(ours(op, 64), tensors, grads)
        assert_as_good_as_stock("y input weight bias"[: 14 if op == "rms_norm" else None], mine, theirs, want)
        leaves = [t.requires_grad_() for t in tensors]
        assert M.norm_saves(ours(op, 64)(*leaves)) == "input"  # the output would blur the float32 gradients


@ops
@pytest.mark.parametrize("save", ["input", "output"])
def test_float64_beside_other_parameters(op: str, save: str) -> None:
    """And the reverse: computed in the input's precision, the gradients of the parameters' dtype and in their room."""
    for dtype, other in (
        (torch.float64, torch.float32),
        (torch.float64, torch.bfloat16),
        (torch.float32, torch.float64),
    ):
        tensors, grads = (
            [normal((5, 4096), dtype, 0), *weights(op, 4096, other)],
            [normal((5, 4096), dtype, 3)],
        )
        same = [t.to(dtype) for t in tensors]
        got, want = (run(ours(op, 4096, save=save), each, grads) for each in (tensors, same))
        for a, b, like in zip(got, want, [tensors[0], *tensors], strict=True):
            assert a.dtype == like.dtype
            torch.testing.assert_close(a, b.to(like.dtype), rtol=0, atol=0)


def test_a_residual_of_another_dtype() -> None:
    x, residual = normal((4, 8), torch.bfloat16, 0), normal((4, 8), torch.float32, 1)
    for inplace in (False, True, "auto"):
        normed, total = M.add_rms_norm(x, residual.clone(), (8,), inplace=inplace)
        assert normed.dtype == total.dtype == torch.float32
        torch.testing.assert_close(total, x + residual)
    with pytest.raises(TypeError, match=r"^add_rms_norm: expected, in place, a residual that holds the sum"):
        M.add_rms_norm(residual, x, (8,), inplace=True)
    with torch.autocast("cpu", torch.bfloat16):
        normed, total = M.add_rms_norm(x, residual, (8,))
    assert (normed.dtype, total.dtype) == (torch.bfloat16, torch.float32)


def test_unused_results_get_no_gradient() -> None:
    x, residual = (normal((4, 8), torch.float64, i).requires_grad_() for i in (0, 1))
    weight = torch.ones(8, dtype=torch.float64, requires_grad=True)
    _, total = M.add_rms_norm(x, residual, (8,), weight)
    grads = torch.autograd.grad(total.sum(), (x, residual, weight), allow_unused=True)
    assert torch.equal(grads[0], torch.ones(4, 8, dtype=torch.float64))
    assert torch.equal(grads[1], grads[0])
    assert grads[2] is None
    normed, _ = M.add_rms_norm(x, residual, (8,), weight)
    assert torch.autograd.grad(normed.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize(
    ("error", "text", "make"),
    [
        (ValueError, r"last dimensions are .*7.*, got \[4, 8\]", lambda x: M.layer_norm(x, (7,))),
        (ValueError, "last dimensions are", lambda x: M.layer_norm(x, ())),
        (TypeError, "a tuple or list of numbers, got int", lambda x: M.layer_norm(x, 8)),
        (TypeError, "an int, got str", lambda x: M.layer_norm(x, ("a",))),
        (ValueError, "an int of 64 bits, got a larger one", lambda x: M.layer_norm(x, (2**70,))),
        (ValueError, "last dimensions are", lambda x: M.layer_norm(x, (2, 4, 8))),
        (ValueError, r"a weight of shape \[8\], got \[7\]", lambda x: M.layer_norm(x, (8,), torch.ones(7))),
        (
            ValueError,
            r"a bias of shape \[8\], got \[1\]",
            lambda x: M.layer_norm(x, (8,), None, torch.ones(1)),
        ),
        (TypeError, "float16 or bfloat16, got torch.int64", lambda x: M.layer_norm(x.long(), (8,))),
        (TypeError, "float16 or bfloat16", lambda x: M.layer_norm(x, (8,), torch.ones(8).long())),
        (
            TypeError,
            "weight and bias of one dtype",
            lambda x: M.layer_norm(x, (8,), torch.ones(8), torch.ones(8).half()),
        ),
        (RuntimeError, "dense", lambda x: M.layer_norm(x.to_sparse(), (8,))),
        (RuntimeError, "one device", lambda x: M.layer_norm(x, (8,), torch.ones(8, device="meta"))),
        (
            ValueError,
            "save 'auto', 'input' or 'output'",
            lambda x: M.layer_norm(x.requires_grad_(), (8,), save="x"),
        ),
        (ValueError, "inplace True, False or 'auto'", lambda x: M.layer_norm(x, (8,), inplace="x")),
        (TypeError, "to be a Tensor", lambda x: M.layer_norm(None, (8,))),
        (ValueError, r"one shape, got \[4, 8\] and \[8\]", lambda x: M.add_layer_norm(x, x[0], (8,))),
    ],
)
def test_errors_say_what_was_expected(
    error: type[Exception], text: str, make: Callable[[Tensor], Any]
) -> None:
    with pytest.raises(error, match=f"^(add_)?layer_norm: expected .*{text}"):
        make(normal((4, 8), torch.float32, 0))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("inplace", [False, True, "auto"])
@pytest.mark.parametrize("op", ["layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("save", ["bit", "x"])
def test_save_is_checked_in_every_call(op: str, inplace: bool | str, grad: bool, save: str) -> None:
    function = getattr(M, op)
    tensors = [normal((4, 8), torch.float32, i) for i in range(2 if op.startswith("add_") else 1)]
    x = tensors[0].requires_grad_(grad)
    with pytest.raises(ValueError, match=rf"norm: expected save 'auto', 'input' or 'output', got '{save}'"):
        function(x * 1, *tensors[1:], (8,), inplace=inplace, save=save)
    with pytest.raises(ValueError, match="expected save"):  # beyond eager mode's entry
        torch.func.vmap(lambda *rows: function(*rows, (8,), save=save))(*tensors)


def test_backward_twice_is_refused() -> None:
    x = normal((4, 8), torch.float32, 0).requires_grad_()
    out = M.layer_norm(x, (8,))
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()

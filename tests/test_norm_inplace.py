"""LayerNorm and RMSNorm in place, and where that is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from norm_cases import (
    DTYPES,
    normal,
    ops,
    ours,
    stock,
    weights,
)
from torch import Tensor

import memkit.functional as M
from memkit._reference_norm import run


@ops
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_in_place(op: str, dtype: torch.dtype) -> None:
    columns = 96
    tensors = [normal((7, columns), dtype, 0), *weights(op, columns, dtype)]
    grads = [normal((7, columns), dtype, 3)]
    function = ours(op, columns, inplace=True)

    def overwrite(x: Tensor, *rest: Tensor) -> Tensor:
        h = x.clone()
        out = function(h, *rest)
        assert out is h
        return out

    expected = run(ours(op, columns, save="output"), tensors, grads)
    for a, b in zip(run(overwrite, tensors, grads), expected, strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        h = tensors[0].clone()
        assert function(h, *tensors[1:]) is h
        assert torch.equal(h, expected[0])
        part = torch.zeros(7, 2 * columns, dtype=dtype)
        view = part[:, ::2]
        view.copy_(tensors[0])
        function(view, *tensors[1:])
        assert torch.equal(part[:, ::2], expected[0])
        assert not part[:, 1::2].any()


def test_in_place_auto() -> None:
    weight = torch.ones(8, requires_grad=True)
    x = normal((4, 8), torch.float32, 0).requires_grad_()
    h = x * 1
    pointer = h.data_ptr()
    assert M.rms_norm(h, (8,), weight, inplace="auto").data_ptr() == pointer
    h = x * 1
    other = h.detach()
    assert M.rms_norm(h, (8,), weight, inplace="auto").data_ptr() != h.data_ptr()
    del other
    h = x.exp()  # keeps its output
    assert M.rms_norm(h, (8,), weight, inplace="auto").data_ptr() != h.data_ptr()
    with torch.no_grad():
        weight[2] = 0
    h = x * 1
    assert M.rms_norm(h, (8,), weight, inplace="auto").data_ptr() != h.data_ptr()


def test_in_place_is_refused_where_a_gradient_would_suffer() -> None:
    x = normal((4, 8), torch.float32, 0).requires_grad_()
    weight, bias = torch.ones(8), torch.zeros(8)
    with pytest.raises(RuntimeError, match=r"^layer_norm: expected, in place, .*a leaf that requires grad"):
        M.layer_norm(x, (8,), weight, bias, inplace=True)
    h = x.exp()
    with pytest.raises(RuntimeError, match=r"^layer_norm: expected, in place, .*ExpBackward0"):
        M.layer_norm(h, (8,), weight, bias, inplace=True)
    h = x * 1
    before = h.clone()
    with pytest.raises(ValueError, match=r"^layer_norm: expected, in place, weights at least as large"):
        M.layer_norm(h, (8,), weight, bias + 2, inplace=True)
    with pytest.raises(ValueError, match=r"^layer_norm: expected, in place, finite weights other than 0"):
        M.layer_norm(h, (8,), weight * 0, bias, inplace=True)
    with pytest.raises(
        ValueError, match=r"^layer_norm: expected save 'auto' or 'output' in place, got 'input'"
    ):
        M.layer_norm(h, (8,), weight, bias, inplace=True, save="input")
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(TypeError, match="an input of the output's dtype"),
    ):
        M.layer_norm(h, (8,), weight, bias, inplace=True)
    with pytest.raises(RuntimeError, match="a weight in memory of its own"):
        M.layer_norm(h, (8,), h[0].detach(), bias, inplace=True)
    assert torch.equal(h, before)
    M.layer_norm(h, (8,), weight, bias, inplace=True)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        h.sum().backward()


@pytest.mark.parametrize("op", ["add_layer_norm", "add_rms_norm"])
@pytest.mark.parametrize("save", ["auto", "input"])
def test_the_residual_stream_in_place(op: str, save: str) -> None:
    """Several layers over one stream: with the output kept it is overwritten again and again."""
    columns = 32
    parameters = weights(op, columns, torch.float64)
    tensors = [normal((5, columns), torch.float64, 0), normal((5, columns), torch.float64, 4), *parameters]
    inplace: Any = True if save == "auto" else "auto"

    def stream(function: Callable[..., Any]) -> Callable[..., Any]:
        def run_stream(x: Tensor, residual: Tensor, *rest: Tensor) -> Tensor:
            residual = residual * 1
            for _ in range(3):
                normed, residual = function(x, residual, *rest)
                x = normed.sin()
            return normed * residual

        return run_stream

    grads = [normal((5, columns), torch.float64, 3)]
    mine = run(stream(ours(op, columns, inplace=inplace, save=save)), tensors, grads)
    for a, b in zip(mine, run(stream(stock(op, columns)), tensors, grads), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    x, residual = (t.clone().requires_grad_() for t in tensors[:2])
    h = residual * 1
    assert ours(op, columns, inplace=True, save=save)(x, h, *parameters)[1] is h
    following = ours(op, columns, inplace=True, save=save)
    if save == "auto":
        assert following(x, h, *parameters)[1] is h
    else:
        with pytest.raises(RuntimeError, match="keeps it for its backward"):
            following(x, h, *parameters)

"""Softmax and its logarithm with a scale and a mask in the same pass, in place where wanted, that keep their output alone.

``softmax`` and ``log_softmax`` take the arguments of ``torch.nn.functional``; the others by keyword:

``scale``
    The input is multiplied by it first.
``mask``
    As in ``torch.nn.functional.scaled_dot_product_attention``: bool, where True takes part, or floating point, which is
    added to the scaled input; of a shape that expands to the input's. One that requires grad is given its gradient by stock
    operators.
``causal``
    The input is [..., queries, keys], and query i sees the keys up to i, counted from the first of each: as ``is_causal``
    of ``scaled_dot_product_attention``.
``inplace``
    ``False``: a new tensor. ``True``: the input's memory is overwritten; raises where that would corrupt a value or a
    gradient. ``"auto"``: overwritten where autograd and reference counts prove that nothing else needs the input.

Where a mask or ``causal`` leaves nothing of a row, softmax is 0, as in ``scaled_dot_product_attention``, and log_softmax
-infinity, and the gradient 0; without either a row of -infinity is NaN, as in stock. The gradient of log_softmax is 0
wherever a mask made the result -infinity.

Backward keeps the output, which may not be changed in place afterwards, and writes the gradient over the incoming one where
nobody else can see it. Computed in float32 (float64 in float64), float16 and bfloat16 rounded once. In those the gradient
of log_softmax, g - e^y sum(g), is that of the rounded y, off by u |y| e^y |sum(g)| beside its own rounding, u being half the
dtype's epsilon: as stock's is, unless a mask of float32 makes stock keep a y of float32. Under autocast on a GPU, where
stock gives float32, softmax keeps the input's dtype, which the next matrix product wants anyway, and log_softmax gives
float32; ``dtype`` says otherwise.

Shapes: any; the result is contiguous. The last dimension is the fast one. ``IndexError``: a dim that is none.
``ValueError``: a mask that does not expand, ``causal`` along another dim than the last. ``TypeError``: another dtype; in
place with another ``dtype``. ``RuntimeError``: in place refused, a device or layout memkit has no kernel for.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import _C
from .._sharding import call
from ._activation import Inplace, check_inplace
from ._shared import check_tensor, describe

__all__ = ["log_softmax", "softmax"]


def softmax(
    input: Tensor,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    inplace: Inplace = False,
) -> Tensor:
    """e^z / sum of e^z along ``dim``, with z = scale · input + mask (Bridle 1990)."""
    return _call("softmax", input, dim, dtype, scale, mask, causal, inplace)


def log_softmax(
    input: Tensor,
    dim: int | None = None,
    dtype: torch.dtype | None = None,
    *,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: bool = False,
    inplace: Inplace = False,
) -> Tensor:
    """z - log of the sum of e^z along ``dim``, with z = scale · input + mask (Bridle 1990)."""
    return _call("log_softmax", input, dim, dtype, scale, mask, causal, inplace)


def _call(
    op: str,
    input: Tensor,
    dim: int | None,
    dtype: torch.dtype | None,
    scale: float,
    mask: Tensor | None,
    causal: bool,
    inplace: Inplace,
) -> Tensor:
    """Straight into C++; through torch.ops where a compiler traces or a tensor subclass intercepts. Functional there, with
    a copy in place."""
    log = op == "log_softmax"
    if dim is None:  # what torch.nn.functional takes, with its warning
        check_tensor(op, "input", input)
        if not is_dynamo_compiling():
            warnings.warn(f"Implicit dimension choice for {op} has been deprecated: give dim=", stacklevel=3)
        dim = 0 if input.dim() in (0, 1, 3) else 1
    if not is_dynamo_compiling():
        result = _C.softmax(input, dim, mask, scale, causal, log, dtype, inplace)
        if result is not None:
            return result
    check_inplace(op, inplace)
    if dtype is None:
        widens = log and input.dtype != torch.float64 and input.is_cuda and torch.is_autocast_enabled("cuda")
        dtype = torch.float32 if widens else input.dtype
    if inplace is True and dtype != input.dtype:
        raise TypeError(
            f"{op}: expected, in place, an input of the output's dtype {dtype}, got {input.dtype}"
        )
    out: Tensor = call("_softmax", input, dim, mask, scale, causal, log, dtype)
    return input.copy_(out) if inplace is True else out


describe(
    (softmax, log_softmax),
    """
    Shapes: any; the result has the input's, and is contiguous. ``dtype``: the result's, by default the input's. ``mask``:
    bool, where True takes part, or numbers that are added; of a shape that expands to the input's. ``causal``: query i of
    [..., queries, keys] sees the keys up to i. ``inplace``: False, True or "auto". Where nothing of a row is left, softmax
    is 0 and log_softmax -infinity.

    ``IndexError``: a dim that is none. ``ValueError``: a mask that does not expand, ``causal`` along another dim than the
    last, an unknown ``inplace``. ``TypeError``: another dtype; in place with another ``dtype``. ``RuntimeError``: in place
    refused, a device or layout without a kernel.
    """,
)

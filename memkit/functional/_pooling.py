"""Max pooling that keeps one byte an element of its result for backward: where in its window each maximum was found.

Stock keeps its input, of which backward asks nothing but the shape, and eight bytes an element of the result. Four bytes
where a window has more than 256 elements. Shapes: [N, C, H, W] or [C, H, W], channels last too; float32, float64, float16
and bfloat16, gradients added up in float32 (float64 in float64). The maximum of a window with a NaN is NaN, as in stock.

As stock, with its errors: other dtypes, windows of more than 2^20 elements, ``return_indices=True``, compiled and traced
calls, function transforms (``torch.func``, forward mode), and tensor subclasses. Second derivatives are stock's.
"""

from __future__ import annotations

from operator import index
from typing import Any, cast

import torch.nn.functional as F
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import _C
from ._shared import describe

__all__ = ["max_pool2d"]

Numbers = tuple[int, ...]
Size = int | Numbers


def max_pool2d(
    input: Tensor,
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """Arguments, result and errors of ``torch.nn.functional.max_pool2d``, which serves what is not said here.

    Keeps a byte an element of the result for backward, four where a window has more than 256 elements.
    """
    if (
        isinstance(input, Tensor)
        and type(ceil_mode) is bool
        and not (return_indices or is_dynamo_compiling())
    ):
        window = _numbers(kernel_size, () if stride is None else stride, padding, dilation)
        if window and (result := _C.max_pool2d(input, *window, ceil_mode)) is not None:
            return result
    stock: Any = F.max_pool2d
    return cast(Tensor, stock(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices))


def _numbers(*sizes: Any) -> tuple[Numbers, Numbers, Numbers, Numbers] | None:
    """NumPy's and tensors' too. None where something is no number: stock says so in its own words."""
    kernel, stride, padding, dilation = sizes
    # What follows is a third of the call's time.
    if type(kernel) is type(stride) is type(padding) is type(dilation) is int:
        return (kernel,), (stride,), (padding,), (dilation,)
    each = [size if isinstance(size, (tuple, list)) else (size,) for size in sizes]
    if any(type(number) is bool for size in each for number in size):
        return None
    try:
        kernel, stride, padding, dilation = (tuple(map(index, size)) for size in each)
    except TypeError:
        return None
    return kernel, stride, padding, dilation


describe(
    (max_pool2d,),
    """
    Shapes: [N, C, H, W] or [C, H, W], channels last too. ``RuntimeError``: sizes that do not fit. ``TypeError``: sizes that
    are no numbers.
    """,
)

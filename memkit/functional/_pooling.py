"""Max pooling that keeps two bytes an element of its result for backward: where in its window each maximum was found.

Stock keeps its input, of which backward asks nothing but the shape, and eight bytes an element of the result. Values and
gradients are stock's to the bit; stock's kernels make both. Shapes: [N, C, H, W] or [C, H, W]; any dtype and device
that stock takes, and its errors.

As stock: what needs no gradient, ``return_indices=True``, compiled and traced calls and function transforms
(``torch.func``, forward mode), tensor subclasses, and bytes kept where a window spans more than 2^15 elements of its
image (eight for each place then, still without the input).
"""

from __future__ import annotations

from operator import index
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch.autograd import forward_ad
from torch.compiler import is_compiling

__all__ = ["max_pool2d"]

Pair = int | tuple[int, ...]


def max_pool2d(
    input: Tensor,
    kernel_size: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    dilation: Pair = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor:
    """Arguments and result of ``torch.nn.functional.max_pool2d``; errors are stock's."""
    window = None
    if not return_indices and _keeps_places(input):
        window = _window(kernel_size, stride, padding, dilation, ceil_mode)
    if window is None:
        stock: Any = F.max_pool2d
        return cast(Tensor, stock(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices))
    return cast(Tensor, _MaxPool2d.apply(input, window))


class Window(NamedTuple):
    """As ATen's operators take it."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil_mode: bool

    def dtype_of_places(self, width: int) -> torch.dtype:
        """Of places counted in an image of that width from the window's first element."""
        (high, wide), (down, along) = self.kernel, self.dilation
        furthest = down * (high - 1) * width + along * (wide - 1)
        return torch.int16 if furthest <= torch.iinfo(torch.int16).max else torch.int64

    def first_places(self, width: int, places: Tensor) -> Tensor:
        """Where in the image each window begins, in its padding too: [rows, columns] of the result."""
        rows, columns = (
            torch.arange(size, device=places.device) * step - pad
            for size, step, pad in zip(places.shape[-2:], self.stride, self.padding, strict=True)
        )
        return rows[:, None] * width + columns


def _window(
    kernel: Pair, stride: Pair | None, padding: Pair, dilation: Pair, ceil_mode: Any
) -> Window | None:
    """None where something is not what stock takes, which says so in its own words."""
    if stride is None or (isinstance(stride, (tuple, list)) and not stride):
        stride = kernel
    if type(ceil_mode) is not bool:
        return None
    try:
        return Window(_pair(kernel), _pair(stride), _pair(padding), _pair(dilation), ceil_mode)
    except (TypeError, ValueError):
        return None


def _pair(size: Pair) -> tuple[int, int]:
    """Two numbers, of NumPy's or a tensor's too."""
    sizes = size if isinstance(size, (tuple, list)) else (size,)
    first, second = (*sizes, *sizes) if len(sizes) == 1 else sizes
    if bool in (type(first), type(second)):
        raise TypeError
    return index(first), index(second)


def _keeps_places(input: Tensor) -> bool:
    """Whether backward will come, and nobody looks on: no compiler, which chooses itself what to keep, no tracer."""
    jit: Any = torch.jit
    levels: Any = forward_ad
    return (
        (type(input) is Tensor or type(input) is nn.Parameter)
        and torch.is_grad_enabled()
        and input.requires_grad
        and input.layout == torch.strided
        and not is_compiling()
        and not jit.is_tracing()
        and not _is_transforming()
        and levels._current_level < 0
    )


def _is_transforming() -> bool:
    functorch: Any = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None


def _is_batched(grad: Tensor) -> bool:
    """Whether it is several gradients (``is_grads_batched=True``), which vmap's interpreters are not told of."""
    functorch: Any = torch._C._functorch
    return bool(functorch.is_legacy_batchedtensor(grad))


class _MaxPool2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, window: Window) -> Tensor:
        output, places = torch.ops.aten.max_pool2d_with_indices(input, *window)
        width = input.shape[-1]
        places -= window.first_places(width, places)
        ctx.save_for_backward(places.to(window.dtype_of_places(width)))
        ctx.window, ctx.shape, ctx.format = window, input.shape, suggest_memory_format(input)
        return cast(Tensor, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (places,) = ctx.saved_tensors
        places = places + ctx.window.first_places(ctx.shape[-1], places)
        like = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=ctx.format)
        backward: Any = torch.ops.aten.max_pool2d_with_indices_backward
        if torch.is_grad_enabled() or _is_transforming() or _is_batched(grad):
            return backward(grad, like, *ctx.window, places), None
        # Of the input it asks the shape alone: the gradient's own memory may stand for it.
        return backward.grad_input(grad, like, *ctx.window, places, grad_input=like), None

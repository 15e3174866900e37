"""Max pooling that keeps two bytes an element of its result for backward: where in its window each maximum was found.

Stock keeps its input, of which backward asks nothing but the shape, and eight bytes an element of the result. Values and
gradients are stock's to the bit; stock's kernels make both. Shapes: [N, C, H, W] or [C, H, W]; any dtype and device
that stock takes, and its errors.

As stock: what needs no gradient, ``return_indices=True``, compiled and traced calls and function transforms
(``torch.func``, forward mode), tensor subclasses, and bytes kept where a window spans more than 2^15 elements of its
image (eight for each place then, still without the input).
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
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
    if return_indices or not _keeps_places(input):
        stock: Any = F.max_pool2d
        return cast(Tensor, stock(input, kernel_size, stride, padding, dilation, ceil_mode, return_indices))
    steps = kernel_size if stride is None or stride in ((), []) else stride
    return cast(Tensor, _MaxPool2d.apply(input, Window(kernel_size, steps, padding, dilation, ceil_mode)))


class Window(NamedTuple):
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    ceil_mode: bool

    def dtype_of_places(self, width: int) -> torch.dtype:
        """Of places counted in an image of that width from the window's first element."""
        (high, wide), (down, along) = _pair(self.kernel), _pair(self.dilation)
        furthest = down * (high - 1) * width + along * (wide - 1)
        return torch.int16 if furthest <= torch.iinfo(torch.int16).max else torch.int64

    def first_places(self, width: int, places: Tensor) -> Tensor:
        """Where in the image each window begins, in its padding too: [rows, columns] of the result."""
        rows, columns = (
            torch.arange(size, device=places.device) * step - pad
            for size, step, pad in zip(
                places.shape[-2:], _pair(self.stride), _pair(self.padding), strict=True
            )
        )
        return rows[:, None] * width + columns


def _pair(size: Pair) -> tuple[int, int]:
    return (size[0], size[-1]) if isinstance(size, (tuple, list)) else (size, size)


def _keeps_places(input: Tensor) -> bool:
    """Whether backward will come, and nobody looks on: no compiler, which chooses itself what to keep, no tracer."""
    functorch: Any = torch._C._functorch
    jit: Any = torch.jit
    levels: Any = forward_ad
    return (
        torch.is_grad_enabled()
        and input.requires_grad
        and (type(input) is Tensor or type(input) is nn.Parameter)
        and input.layout == torch.strided
        and not is_compiling()
        and not jit.is_tracing()
        and functorch.peek_interpreter_stack() is None
        and levels._current_level < 0
    )


class _MaxPool2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, window: Window) -> Tensor:
        output, places = torch.ops.aten.max_pool2d_with_indices(input, *_lists(window))
        width = input.shape[-1]
        # Narrowed before the difference, which is small, is taken: both wrap around alike.
        dtype = window.dtype_of_places(width)
        first = window.first_places(width, places).to(dtype)
        ctx.save_for_backward(places.to(dtype).sub_(first))
        ctx.window, ctx.shape = window, input.shape
        ctx.format = torch.contiguous_format
        if input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last):
            ctx.format = torch.channels_last
        return cast(Tensor, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        places = ctx.saved_tensors[0].long()
        places += ctx.window.first_places(ctx.shape[-1], places)
        like = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=ctx.format)
        backward: Any = torch.ops.aten.max_pool2d_with_indices_backward
        return backward(grad, like, *_lists(ctx.window), places), None


def _lists(window: Window) -> tuple[Any, ...]:
    """As torch.ops takes them."""
    sizes = (_pair(size) for size in window[:-1])
    return (*sizes, window.ceil_mode)

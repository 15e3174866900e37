"""Max pooling that keeps where each maximum was found, two bytes an element of the result, and nothing else.

Stock keeps its input, of which backward asks nothing but the shape, and eight bytes an element of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling


class Window(NamedTuple):
    """As torch.nn.MaxPool2d holds them, two numbers each."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    ceil_mode: bool

    @classmethod
    def of(cls, module: Any) -> Window:
        return cls(
            _pair(module.kernel_size),
            _pair(module.stride),
            _pair(module.padding),
            _pair(module.dilation),
            bool(module.ceil_mode),
        )


def _dtype_of_places(window: Window, width: int) -> torch.dtype:
    """Of places in a window, counted in an image of that width from the window's first element."""
    (high, wide), (down, along) = window.kernel, window.dilation
    furthest = down * (high - 1) * width + along * (wide - 1)
    return torch.int16 if furthest <= torch.iinfo(torch.int16).max else torch.int64


def is_plain_call() -> bool:
    """Whether nobody looks on: no compiler, which chooses itself what to keep, no tracer, and no function transform."""
    functorch: Any = torch._C._functorch
    jit: Any = torch.jit
    levels: Any = forward_ad
    return not (
        is_compiling()
        or jit.is_tracing()
        or functorch.peek_interpreter_stack() is not None
        or levels._current_level >= 0
    )


def max_pool2d(input: Tensor, window: Window) -> Tensor:
    """What torch.nn.functional.max_pool2d gives, of [N, C, H, W] or [C, H, W]."""
    return _MaxPool2d.apply(input, window)  # type: ignore[no-any-return]


class _MaxPool2d(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, window: Window) -> Tensor:
        output, places = torch.ops.aten.max_pool2d_with_indices(input, *window)
        width = input.shape[-1]
        places -= _first_places(window, width, places)
        ctx.save_for_backward(places.to(_dtype_of_places(window, width)))
        ctx.window, ctx.shape = window, input.shape
        ctx.format = torch.contiguous_format
        if input.dim() == 4 and input.is_contiguous(memory_format=torch.channels_last):
            ctx.format = torch.channels_last
        return output  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        window: Window = ctx.window
        places = ctx.saved_tensors[0].long()
        places += _first_places(window, ctx.shape[-1], places)
        like = torch.empty(ctx.shape, dtype=grad.dtype, device=grad.device, memory_format=ctx.format)
        backward: Any = torch.ops.aten.max_pool2d_with_indices_backward
        return backward(grad, like, *window, places), None


def _first_places(window: Window, width: int, places: Tensor) -> Tensor:
    """Where each window begins, in its padding too: [rows, columns] of the result."""
    rows, columns = (
        torch.arange(size, device=places.device) * step - pad
        for size, step, pad in zip(places.shape[-2:], window.stride, window.padding, strict=True)
    )
    return rows[:, None] * width + columns


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[-1])

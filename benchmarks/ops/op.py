"""What an op is to the benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from common import normal
from torch import Tensor

Function = Callable[..., Any]


@dataclass(frozen=True)
class Size:
    """Makes tensors of `elements` elements, others than an earlier call with another seed made."""

    elements: int
    dtype: torch.dtype
    device: str
    seed: int = 0

    def normal(self, *shape: int, part: int = 0) -> Tensor:
        """Standard normal, of `shape`; one dimension may be -1. `part` tells the tensors of one call apart."""
        known = self.elements if -1 in shape else torch.Size(shape).numel()
        return normal(known, self.dtype, self.device, 16 * self.seed + part).view(shape)


@dataclass(frozen=True)
class Op:
    """`stock`, `memkit` and, where memkit can work in the first input's memory, `in_place`: functions of the tensors that
    `inputs` makes, several sets of them for small sizes, and of those that `parameters` makes, once. Gradients are asked for
    all inputs and for the parameters that require them. `passes`: how many tensors of the size the forward reads or writes
    at the least.
    """

    stock: Function
    memkit: Function
    in_place: Function | None
    inputs: Callable[[Size], Sequence[Tensor]]
    parameters: Callable[[Size], Sequence[Tensor]] = lambda size: ()
    passes: int = 2
    least: int = 1  # elements that the shape takes


def flat(size: Size) -> list[Tensor]:
    return [size.normal(-1)]


def with_in_place(
    stock: Function, memkit: Function, inputs: Callable[[Size], Sequence[Tensor]], **rest: Any
) -> Op:
    """memkit's function takes `inplace=`."""
    return Op(stock, memkit, partial(memkit, inplace=True), inputs, **rest)

"""Where a layer may be called otherwise than on the numbers that it is verified with, and do something else there.

Of other shapes, without gradients or with frozen parameters, under autocast: that is tried of every class once. Which sizes
and dtypes decide, its code says: the numbers in it, and whether it asks for a shape or a dtype and branches.
"""

from __future__ import annotations

import dis
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..types import innermost_of
from .match import Match
from .reads import FUNCTIONS_LOOKED_AT, methods_of, numbers_read
from .twin import numbers
from .writes import codes_of

OF_SHAPES = frozenset({"dim", "len", "ndim", "ndimension", "nelement", "numel", "shape", "size"})
OF_DTYPES = frozenset({"dtype", "element_size", "is_floating_point", "itemsize", "type"})
OF_GRADIENTS = frozenset(
    {"grad_fn", "is_grad_enabled", "is_inference_mode_enabled", "is_leaf", "requires_grad"}
)
OF_AUTOCAST = frozenset({"autocast", "get_autocast_dtype", "is_autocast_cpu_enabled", "is_autocast_enabled"})
OF_MODES = OF_GRADIENTS | OF_AUTOCAST | {"is_contiguous", "stride"}
DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64
NAMES_OF_DTYPES = frozenset({"bfloat16", "double", "float16", "float64", "half"})
LARGEST_SIZE, LARGEST_OF_A_SIZE, LARGEST_INPUT = 4096, 2**20, 2**24
SIZES = 16
"""So many are tried at most."""


class Asks(NamedTuple):
    """What a class's code may ask of what it is given, to go by that."""

    shapes: bool
    dtypes: bool
    modes: bool
    sizes: frozenset[int]
    """Numbers in the code."""

    @property
    def goes_by_them(self) -> bool:
        return self.shapes or self.dtypes or self.modes


_asks: WeakKeyDictionary[type[nn.Module], dict[str, Asks]] = WeakKeyDictionary()


def asks_of(cls: type[nn.Module], method: str = "forward") -> Asks:
    cls = innermost_of(cls)
    known = _asks.setdefault(cls, {})
    if method not in known:
        known[method] = _asks_of(cls, method)
    return known[method]


def _asks_of(cls: type[nn.Module], method: str) -> Asks:
    names: set[str] = set()
    sizes: set[int] = set()
    branches = slices = False
    for code in _all_codes(cls, method):
        names.update(code.co_names)
        for step in dis.get_instructions(code):
            branches = branches or _decides(step.opname)
            slices = slices or "SLICE" in step.opname
            if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT", "RETURN_CONST"):
                sizes.update(_numbers_in(step.argval))
    shapes, sizes = bool(names & OF_SHAPES) and branches, {size for size in sizes if size <= LARGEST_SIZE}
    return Asks(
        shapes,
        bool(names & OF_DTYPES and (branches or names & NAMES_OF_DTYPES)),
        bool(names & OF_MODES and branches),
        frozenset(sizes if shapes or slices else ()),
    )


def _all_codes(cls: type[nn.Module], method: str) -> Iterator[CodeType]:
    """That of its own methods and of the functions of its file."""
    todo, seen = [function for function, _ in methods_of(cls, method)], set[FunctionType]()
    while todo and len(seen) < FUNCTIONS_LOOKED_AT:
        function = todo.pop()
        if function in seen:
            continue
        seen.add(function)
        for code in codes_of(function.__code__):
            yield code
            for name in code.co_names:
                todo += [own for own, _ in methods_of(cls, name)]
                other = function.__globals__.get(name)
                if isinstance(other, FunctionType) and other.__globals__ is function.__globals__:
                    todo.append(other)


def _decides(operation: str) -> bool:
    return operation in ("COMPARE_OP", "CONTAINS_OP", "IS_OP") or (
        "JUMP" in operation and "_IF_" in operation
    )


def _numbers_in(held: Any) -> Iterator[int]:
    if isinstance(held, slice):
        held = held.start, held.stop, held.step
    if isinstance(held, tuple | frozenset):
        for each in held:
            yield from _numbers_in(each)
    elif type(held) is int and held > 0:
        yield held


class Place(NamedTuple):
    """What is around a call. ``inputs``, ``parameters``: whether those require gradients."""

    inputs: bool = True
    parameters: bool = True
    gradients: bool = True
    autocast: bool = False
    """Else it is as it was."""


HERE = Place()
"""By which a call is told from others of the same surroundings."""


def sizes_of(module: nn.Module, match: Match) -> frozenset[int]:
    """Numbers of its own that its code reads."""
    read = numbers_read(module, match.method).values()
    return frozenset(value for value in read if type(value) is int and 0 < value <= LARGEST_SIZE)


def features_of(module: nn.Module, match: Match) -> frozenset[int]:
    """Sizes of all that it holds, which its own numbers may be, without deciding anything."""
    held = (*module.parameters(), *module.buffers(), *match.probe)
    return frozenset(size for tensor in held for size in tensor.shape)


def other_shapes(match: Match, asks: Asks, sizes: Iterable[int] = ()) -> Iterator[tuple[Tensor, ...]]:
    """Probes of other shapes than the match's. ``sizes``: numbers that decide, beside those in the code."""
    yield from _parts(match.probe)
    shape = match.probe[0].shape
    shapes: list[tuple[int, ...]] = []
    if asks.shapes and len(shape) == 3:  # as an image's channels, rows may be turned into columns
        width = shape[-1]
        shapes += [(width, width), (2, width, width), (1, width, 2, width)]
    wanted = {*asks.sizes, *sizes} if asks.sizes or asks.shapes else set[int]()
    lengths = sorted({length for size in wanted for length in (size, size + 1)})
    for length in lengths[:SIZES]:
        shapes += [
            each for each in _of_length(length, shape) if torch.Size(each).numel() <= LARGEST_OF_A_SIZE
        ]
    for each in shapes:
        if torch.Size(each).numel() <= LARGEST_INPUT:
            yield tuple(numbers(each, x) for x in match.probe)


def _of_length(length: int, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """As many rows, in each way, or an image as high and wide."""
    yield length, *shape[1:]
    if len(shape) == 3:
        yield shape[0], length, shape[2]
    if len(shape) > 3:
        yield *shape[:2], *(length for _ in shape[2:])


def _parts(probe: tuple[Tensor, ...]) -> Iterator[tuple[Tensor, ...]]:
    """One of them, some of it, and two of them."""
    yield tuple(x[:1] for x in probe)
    yield tuple(x[0] for x in probe)
    if probe[0].dim() > 2:
        yield tuple(x[:, :1] for x in probe)
        yield tuple(x[0, 0] for x in probe)
    if probe[0].dim() > 3:
        yield tuple(x[..., :1, :] for x in probe)
    yield tuple(torch.stack([x, x.flip(0)], 1) for x in probe)
    yield tuple(torch.stack([x, x.flip(0)], 1)[None] for x in probe)
    yield tuple(x.transpose(0, -1).contiguous().transpose(0, -1) for x in probe)

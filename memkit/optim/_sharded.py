"""Parameters that are DTensors: a step works on each rank's part of them, and its state is sharded as they are.

8-bit moments of a DTensor have blocks along the rank's part. Their scales are a DTensor of the parameter's placements with a
dimension more: (pieces of the parameter along each of its dimensions, blocks of a piece). A piece is what a rank holds, or a
single row where all that is sharded are rows of whole blocks. Rows are the same pieces on any number of ranks, so that they
can be resharded; of others the shapes differ where the parts do, so that nobody reads scales by the wrong parts. As shapes
say it all, whole codes and scales can be read without the mesh that they were made on.
"""

# Parts of torch are untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .._sharding import is_dtensor, seed_here
from ._quantize import BLOCK_SIZES, dequantize


def check(op: str, param: Any) -> None:
    if any(p.is_partial() for p in param.placements):
        raise TypeError(
            f"{op}: expected parameters that are sharded or replicated, got one with {param.placements}"
        )


def place(param: Any) -> tuple[Any, ...]:
    """Parameters of one place are stepped together: those of one device, and of one set of ranks that hold the same."""
    if not is_dtensor(param):
        return (param.device,)
    return param.device, param.device_mesh, tuple(not p.is_replicate() for p in param.placements)


def local(x: Tensor) -> Tensor:
    """What this rank holds of a DTensor; to be called without grad mode, where it is no new node."""
    part: Tensor = x.to_local() if is_dtensor(x) else x  # type: ignore[attr-defined]
    return part


def with_storage_of_its_own(x: Tensor) -> Tensor:
    """The same memory. A DTensor takes over its part's storage offset, and with one can be neither copied nor saved."""
    start = x.storage_offset() * x.itemsize
    storage = x.untyped_storage()[start : start + x.numel() * x.itemsize]
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(storage, 0, x.shape, x.stride())


def distributed(part: Tensor, param: Any, shape: Sequence[int]) -> Tensor:
    """A tensor of that shape in param's placements, of which this rank holds `part`."""
    if not is_dtensor(param):
        return part
    from torch.distributed.tensor import DTensor

    part = with_storage_of_its_own(part)
    stride = param.stride() if shape == param.shape else torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, param.device_mesh, param.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def gradient(op: str, param: Any) -> Tensor:
    """What this rank holds of a DTensor's gradient, which is redistributed where its placements are others.

    ``RuntimeError``: a plain tensor, another mesh, or a part that is not like the parameter's.
    """
    grad = param.grad
    if not is_dtensor(grad):
        raise RuntimeError(f"{op}: expected a DTensor as gradient of a DTensor, got a plain Tensor")
    mesh = param.device_mesh
    if grad.device_mesh != mesh:
        raise RuntimeError(
            f"{op}: expected a gradient on its parameter's mesh, {mesh}, got {grad.device_mesh}"
        )
    if grad.placements != param.placements:
        param.grad = grad.redistribute(mesh, param.placements)
    part, held = local(param.grad), local(param)
    wide = [x.dtype is torch.float64 for x in (held, part)]
    if part.shape != held.shape or wide[0] != wide[1]:
        expected, got = (f"{x.dtype} {list(x.shape)}" for x in (held, part))
        raise RuntimeError(f"{op}: expected a gradient like its parameter, here {expected}, got {got}")
    return part.resolve_neg()


class ShardedList:
    """A `_C.StepList` of DTensors of one place: each step is one of what this rank holds of them."""

    def __init__(self, op: str, params: list[Any], state: list[list[Tensor]]) -> None:
        self.op, self.params, self.state = op, params, state

    def collect(self) -> ShardedStep:
        return ShardedStep(self, [i for i, param in enumerate(self.params) if param.grad is not None])

    def collect_one(self, index: int) -> ShardedStep:
        return ShardedStep(self, [index])

    def lies_as_parameters(self) -> bool:
        """As when the lists were made: a DTensor's part does not change its strides."""
        return True


class ShardedStep:
    """A `_C.Step` of them."""

    @torch.no_grad()
    def __init__(self, all: ShardedList, picked: list[int]) -> None:
        self._op, self._params = all.op, [all.params[i] for i in picked]
        self._state = [[each[i] for i in picked] if each else [] for each in all.state]
        self._grads = [gradient(all.op, param) for param in self._params]

    def __len__(self) -> int:
        return len(self._params)

    @torch.no_grad()
    def check(self, block: int) -> None:
        _C.check_step(self._op, [local(param) for param in self._params], self._grads, self._state, block)

    def adamw(self, *numbers: Any) -> None:
        names = "lr", "lr_tensor", "beta1", "beta2", "eps", "weight_decay", "maximize"
        self._step(torch.ops.memkit._adamw_, names, numbers)

    def sgd(self, *numbers: Any) -> None:
        names = "lr", "lr_tensor", "momentum", "dampening", "weight_decay", "nesterov", "maximize"
        self._step(torch.ops.memkit._sgd_, names, numbers)

    @torch.no_grad()
    def _step(self, op: Any, names: Sequence[str], numbers: Sequence[Any]) -> None:
        *head, stochastic, grad_scale, found_inf = numbers
        op(
            [local(param) for param in self._params],
            self._grads,
            *self._state,
            **dict(zip((*names, "block_size"), head, strict=True)),
            seed=self._seed() if stochastic else None,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )
        # Of the DTensors; the operator has counted their parts'.
        torch.autograd.graph.increment_version(self._params)
        self._grads = []

    def _seed(self) -> Tensor:
        """Ranks that hold the same round alike, or they would drift apart; others not."""
        device, mesh, sharded = place(self._params[0])
        limits = torch.iinfo(torch.int64)
        return seed_here(torch.randint(limits.min, limits.max, (), device=device), mesh, sharded)


# -- 8 bits


def _splits(param: Any) -> list[int]:
    """Into how many parts each dimension goes."""
    splits = [1] * param.ndim
    for m, p in enumerate(param.placements):
        if not p.is_replicate():
            splits[p.dim] *= param.device_mesh.size(m)
    return splits


def _has_whole_rows(param: Any, block: int) -> bool:
    return max(_splits(param)[1:], default=1) == 1 and param.numel() // param.size(0) % block == 0


def takes_blocks(param: Any, block: int) -> bool:
    """Whether 8 bits are possible: in C order and, where a dimension is split twice, into parts of one size."""
    if not is_dtensor(param):
        return True
    twice = [
        sum(not p.is_replicate() and p.dim == dim for p in param.placements) > 1 for dim in range(param.ndim)
    ]
    uneven = any(two and size % n for two, size, n in zip(twice, param.shape, _splits(param), strict=True))
    return param.is_contiguous() and (_has_whole_rows(param, block) or not uneven)


def scale_shape(param: Any, block: int) -> tuple[int, ...]:
    """Of all ranks' scales together."""
    if not is_dtensor(param):
        return (-(-param.numel() // block),)
    pieces = _splits(param)
    if _has_whole_rows(param, block):
        pieces = [param.size(0), *pieces[1:]]
    piece = prod(-(-size // n) for size, n in zip(param.shape, pieces, strict=True))
    return (*pieces, -(-piece // block))


def local_scale_shape(param: Any, block: int) -> tuple[int, ...]:
    """Of this rank's; the last blocks stay unused where its part is smaller than others."""
    shape = scale_shape(param, block)
    if not is_dtensor(param):
        return shape
    rows = local(param).size(0) if _has_whole_rows(param, block) else 1
    return (rows, *(1 for _ in shape[1:-1]), shape[-1])


def used_scales(part: Tensor, scale: Tensor, block: int) -> Tensor:
    """A scale a block of `part`, as the operator takes them."""
    return local(scale).view(-1)[: -(-part.numel() // block)]


def operands(
    param: Tensor, entry: Mapping[str, Tensor], scales: Sequence[str], block: int
) -> Mapping[str, Tensor]:
    """A parameter's state, as the operator takes it."""
    if not is_dtensor(param):
        return entry
    found = {name: local(x) for name, x in entry.items()}
    part = local(param)
    found.update((name, used_scales(part, entry[name], block)) for name in scales if name in entry)
    return found


def saved_block(param: Any, codes: Any, scale: Any, block: int) -> int | None:
    """The block size of loaded codes, if they are cut up as param is on this rank."""
    for x in (codes, scale):
        if is_dtensor(x) != is_dtensor(param):
            return None
        if is_dtensor(x) and (x.device_mesh, x.placements) != (param.device_mesh, param.placements):
            return None
    sizes = (block, *BLOCK_SIZES)
    return next((size for size in sizes if tuple(scale.shape) == scale_shape(codes, size)), None)


def whole(x: Any) -> Tensor:
    found: Tensor = x.full_tensor() if is_dtensor(x) else x
    return found


def dequantize_whole(codes: Tensor, scale: Tensor) -> Tensor | None:
    """float32 numbers of plain codes whose scales are of a plain tensor or of a DTensor; None where they do not fit."""
    pieces = list(scale.shape[:-1]) or [1] * codes.ndim
    if len(pieces) != codes.ndim or min(pieces) < 1:
        return None
    sizes = [-(-size // n) for size, n in zip(codes.shape, pieces, strict=True)]
    block = next((b for b in BLOCK_SIZES if -(-prod(sizes) // b) == scale.size(-1)), None)
    if block is None:
        return None
    if scale.ndim == 1:
        return dequantize(codes, scale, block)
    if pieces[0] == codes.size(0) and max(pieces[1:], default=1) == 1 and prod(sizes) % block == 0:  # rows
        return dequantize(codes.contiguous(), scale.flatten(), block)
    out = torch.zeros(codes.shape, dtype=torch.float32, device=codes.device)
    for index in product(*(range(n) for n in pieces)):
        where = tuple(slice(i * size, (i + 1) * size) for i, size in zip(index, sizes, strict=True))
        piece = codes[where].contiguous()
        out[where] = dequantize(piece, scale[index][: -(-piece.numel() // block)], block)
    return out


def part_of(value: Any, param: Any) -> Tensor:
    """What this rank holds of `param`, of a value that is whole or sharded in whatever way."""
    if not is_dtensor(param):
        return whole(value)
    from torch.distributed.tensor import DTensor, Replicate

    mesh = param.device_mesh
    if not is_dtensor(value) or value.device_mesh != mesh:
        value = DTensor.from_local(whole(value), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return local(value.redistribute(mesh, param.placements))

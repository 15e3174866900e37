"""Where the moments live: views of one flat buffer for each device and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._sharding import is_dtensor
from ..pool import Pool
from ._quantize import MIN_ELEMENTS, dequantize, quantize
from ._sharded import (
    dequantize_whole,
    distributed,
    local,
    local_scale_shape,
    part_of,
    saved_block,
    scale_shape,
    takes_blocks,
    used_scales,
    whole,
    with_storage_of_its_own,
)

ALIGNMENT = 64  # bytes
Key = tuple[torch.device, torch.dtype]


class FlatBuffers:
    """Room is reserved first, then taken all at once."""

    def __init__(self) -> None:
        self._sizes: dict[Key, int] = {}
        self._buffers: dict[Key, Tensor] = {}

    def reserve(self, device: torch.device, dtype: torch.dtype, numel: int) -> tuple[Key, int]:
        key = (device, dtype)
        unit = ALIGNMENT // dtype.itemsize
        start = -(-self._sizes.get(key, 0) // unit) * unit
        self._sizes[key] = start + numel
        return key, start

    def allocate(self, pool: Pool | None, op: str) -> None:
        for device, _ in self._sizes:
            if pool is not None and pool.device != device:
                raise ValueError(
                    f"{op}: expected parameters on the pool's device, {pool.device}, got one on {device}"
                )
        for (device, dtype), size in self._sizes.items():
            if pool is None:
                buffer = torch.zeros(size, dtype=dtype, device=device)
            else:
                buffer = pool.empty(size, dtype=dtype, tag=op).zero_()
            self._buffers[device, dtype] = buffer

    def view(self, place: tuple[Key, int], like: Tensor) -> Tensor:
        """Of the shape of `like`, and of its strides where it is dense."""
        key, start = place
        stride = like.stride()
        if not like.is_contiguous() and torch.empty_like(like, device="meta").stride() != stride:
            stride = torch.empty(like.shape, device="meta").stride()
        return self._buffers[key].as_strided(like.shape, stride, start)

    def flat(self, place: tuple[Key, int], numel: int) -> Tensor:
        key, start = place
        return self._buffers[key][start : start + numel]


@dataclass(frozen=True)
class Moment:
    """A name in the state, and how it is kept in 8 bits, if it can be."""

    name: str
    code: torch.dtype | None
    late: bool = False
    """A state may lack it, whose option came after its last step: it starts from 0."""

    @property
    def scale(self) -> str:
        return self.name + "_scale"


def storage_dtype(param: Tensor, state_dtype: Any, moment: Moment, block: int) -> torch.dtype:
    if param.dtype is torch.float64:
        return torch.float64
    if state_dtype == "8bit":
        fits = param.numel() >= MIN_ELEMENTS and takes_blocks(param, block)
        return moment.code if moment.code and fits else torch.float32
    dtype: torch.dtype = state_dtype or param.dtype
    return dtype


def make_state(
    wanted: Mapping[Tensor, tuple[dict[str, Any], tuple[Moment, ...], Any, int]], pool: Pool | None, op: str
) -> None:
    """Adds to each parameter's entry the moments that it lacks, and a step; wanted: entry, moments, state_dtype, block."""
    buffers = FlatBuffers()
    places: list[tuple[dict[str, Any], str, tuple[Key, int], Tensor, Tensor, tuple[int, ...]]] = []
    steps: dict[torch.device, list[tuple[Tensor, dict[str, Any]]]] = {}
    for param, (entry, moments, state_dtype, block) in wanted.items():
        if "step" not in entry:
            entry["step"] = None  # the first key, as in torch
            steps.setdefault(param.device, []).append((param, entry))
        part = local(param)
        for moment in moments:
            if moment.name in entry:
                continue
            dtype = storage_dtype(param, state_dtype, moment, block)
            place = buffers.reserve(param.device, dtype, part.numel())
            places.append((entry, moment.name, place, part, param, tuple(param.shape)))
            if dtype is moment.code:
                scale = torch.empty(local_scale_shape(param, block), device="meta")
                place = buffers.reserve(param.device, torch.float32, scale.numel())
                places.append((entry, moment.scale, place, scale, param, scale_shape(param, block)))
    firsts = {device: buffers.reserve(device, torch.float32, len(all)) for device, all in steps.items()}
    try:
        buffers.allocate(pool, op)
    except BaseException:
        for entries in steps.values():
            for _, entry in entries:
                del entry["step"]
        raise
    for entry, name, place, like, param, shape in places:
        entry[name] = distributed(buffers.view(place, like), param, shape)
    for device, entries in steps.items():
        each = buffers.flat(firsts[device], len(entries)).unbind()
        for (param, entry), step in zip(entries, each, strict=True):
            entry["step"] = with_storage_of_its_own(step) if is_dtensor(param) else step


def check_loaded(
    param: Tensor, loaded: Mapping[str, Any], moments: tuple[Moment, ...], coded: bool, op: str
) -> None:
    """``coded``: what was saved has its large moments in 8 bits."""
    for moment in moments:
        value = loaded.get(moment.name)
        if not isinstance(value, Tensor) or value.shape != param.shape:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{op}: expected {moment.name} of shape {list(param.shape)}, got {got}")
        if not value.is_floating_point() and value.dtype is not moment.code:
            raise ValueError(f"{op}: expected {moment.name} of floating point, got {value.dtype}")
        if value.dtype in (torch.int8, torch.uint8) and not isinstance(loaded.get(moment.scale), Tensor):
            raise ValueError(f"{op}: expected {moment.scale} with {moment.name} in 8 bits, got none")
        if coded and value.is_floating_point() and moment.code and _are_codes(value, moment.code):
            raise ValueError(
                f"{op}: expected {moment.name} and {moment.scale} as they were saved, in 8 bits, got the codes as "
                f"{value.dtype}: load into an optimizer of state_dtype='8bit', whose state_dict() this one takes"
            )


@torch.no_grad()
def _are_codes(value: Tensor, code: torch.dtype) -> bool:
    """torch.distributed.checkpoint copies codes into numbers without a word. Every block has the largest code of all."""
    part = local(value)
    if not part.numel() or part.abs().amax() != torch.iinfo(code).max:
        return False
    return torch.equal(part, part.round())


def fill(
    param: Tensor,
    entry: dict[str, Any],
    loaded: Mapping[str, Any],
    moments: tuple[Moment, ...],
    block: int,
    op: str,
) -> None:
    """Copies loaded state into an entry, converting it to the entry's dtypes and placements."""
    part = local(param)
    for moment in moments:
        target = local(entry[moment.name])
        coded = target.dtype in (torch.int8, torch.uint8)
        scale = used_scales(part, entry[moment.scale], block) if coded else target
        value = loaded[moment.name].detach().to(target.device)
        if value.dtype in (torch.int8, torch.uint8):
            saved = loaded[moment.scale].detach().to(target.device)
            size = saved_block(param, value, saved, block)
            if size is None:
                value = dequantize_whole(whole(value), saved := whole(saved))
                if value is None:
                    shapes = f"{list(loaded[moment.name].shape)} and {list(saved.shape)}"
                    raise ValueError(f"{op}: expected {moment.name} and scales of its blocks, got {shapes}")
            else:
                value = local(value)
                saved = used_scales(value, saved, size)
                if value.dtype is target.dtype and size == block and value.stride() == target.stride():
                    target.copy_(value)
                    scale.copy_(saved)
                    continue
                value = distributed(dequantize(value, saved, size), param, tuple(param.shape))
        value = part_of(value, param)
        if coded:
            ordered = torch.empty_like(target, dtype=torch.float32).copy_(value)
            quantize(ordered, target, scale, block)
        else:
            target.copy_(value)
    entry["step"].fill_(
        float(loaded.get("step", 1))
    )  # torch.optim.SGD counts none: a buffer is there from step 1 on

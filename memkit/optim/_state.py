"""Where the moments live: views of one flat buffer for each device and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..pool import Pool
from ._quantize import MIN_ELEMENTS, dequantize, quantize

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

    @property
    def scale(self) -> str:
        return self.name + "_scale"


def storage_dtype(param: Tensor, state_dtype: Any, moment: Moment) -> torch.dtype:
    if param.dtype is torch.float64:
        return torch.float64
    if state_dtype == "8bit":
        return moment.code if moment.code and param.numel() >= MIN_ELEMENTS else torch.float32
    dtype: torch.dtype = state_dtype or param.dtype
    return dtype


def make_state(
    wanted: Mapping[Tensor, tuple[dict[str, Any], tuple[Moment, ...], Any, int]], pool: Pool | None, op: str
) -> None:
    """Adds to each parameter's entry the moments that it lacks, and a step; wanted: entry, moments, state_dtype, block."""
    buffers = FlatBuffers()
    places: list[tuple[dict[str, Any], str, tuple[Key, int], Tensor | int]] = []
    steps: dict[torch.device, list[dict[str, Any]]] = {}
    for param, (entry, moments, state_dtype, block) in wanted.items():
        if "step" not in entry:
            entry["step"] = None  # the first key, as in torch
            steps.setdefault(param.device, []).append(entry)
        for moment in moments:
            if moment.name in entry:
                continue
            dtype = storage_dtype(param, state_dtype, moment)
            places.append((entry, moment.name, buffers.reserve(param.device, dtype, param.numel()), param))
            if dtype is moment.code:
                blocks = -(-param.numel() // block)
                place = buffers.reserve(param.device, torch.float32, blocks)
                places.append((entry, moment.scale, place, blocks))
    firsts = {device: buffers.reserve(device, torch.float32, len(all)) for device, all in steps.items()}
    try:
        buffers.allocate(pool, op)
    except BaseException:
        for entries in steps.values():
            for entry in entries:
                del entry["step"]
        raise
    for entry, name, place, like in places:
        entry[name] = buffers.view(place, like) if isinstance(like, Tensor) else buffers.flat(place, like)
    for device, entries in steps.items():
        for entry, step in zip(entries, buffers.flat(firsts[device], len(entries)).unbind(), strict=True):
            entry["step"] = step


def check_loaded(param: Tensor, loaded: Mapping[str, Any], moments: tuple[Moment, ...], op: str) -> None:
    for moment in moments:
        value = loaded.get(moment.name)
        if not isinstance(value, Tensor) or value.shape != param.shape:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{op}: expected {moment.name} of shape {list(param.shape)}, got {got}")
        if value.dtype in (torch.int8, torch.uint8) and not isinstance(loaded.get(moment.scale), Tensor):
            raise ValueError(f"{op}: expected {moment.scale} with {moment.name} in 8 bits, got none")


def fill(entry: dict[str, Any], loaded: Mapping[str, Any], moments: tuple[Moment, ...], block: int) -> None:
    """Copies loaded state into an entry, converting it to the entry's dtypes."""
    for moment in moments:
        target, value = entry[moment.name], loaded[moment.name].detach().to(entry[moment.name].device)
        if value.dtype in (torch.int8, torch.uint8):
            scale = loaded[moment.scale].to(target.device)
            saved_block = next(
                size for size in (block, 256, 128, 64) if -(-value.numel() // size) == scale.numel()
            )
            if value.dtype is target.dtype and saved_block == block and value.stride() == target.stride():
                target.copy_(value)
                entry[moment.scale].copy_(scale)
                continue
            value = dequantize(value, scale, saved_block)
        if target.dtype in (torch.int8, torch.uint8):
            ordered = torch.empty_like(target, dtype=torch.float32).copy_(value)
            quantize(ordered, target, entry[moment.scale], block)
        else:
            target.copy_(value)
    entry["step"].fill_(
        float(loaded.get("step", 1))
    )  # torch.optim.SGD counts none: a buffer is there from step 1 on

"""A pool's blocks in the format of torch.cuda.memory._snapshot(), which PyTorch's memory viewers open."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

# As memkit._C.Pool.chunks() gives them.
Block = tuple[int, int, int, str, int, str, str]  # address, size, requested, state, lane, tag, stack
Chunk = tuple[int, int, list[Block]]  # address, size, blocks

_STATES = {"live": "active_allocated", "parked": "active_pending_free", "free": "inactive"}


def frames(stack: str) -> list[tuple[str, int, str]]:
    """File, line and function of each frame, innermost first."""
    lines = [line.split("\t") for line in stack.splitlines()]
    return [(file, int(number), name) for file, number, name in lines]


def write(chunks: Sequence[Chunk], device: torch.device, path: Path) -> None:
    index = device.index or 0
    segments = [_segment(chunk, index) for chunk in chunks]
    # The viewers draw events. What led here is not known: so one for each chunk and living block, in address order.
    trace: list[dict[str, Any]] = []
    for segment in segments:
        trace.append(_event("segment_alloc", segment["address"], segment["total_size"], []))
    for segment in segments:
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                trace.append(_event("alloc", block["address"], block["size"], block["frames"]))
    for time, event in enumerate(trace):
        event["time_us"] = time
    traces: list[list[dict[str, Any]]] = [[] for _ in range(index)] + [trace]
    data = {
        "segments": segments,
        "device_traces": traces,
        "allocator_settings": {},
        "external_annotations": [],
    }
    with path.open("wb") as file:
        pickle.dump(data, file)


def _segment(chunk: Chunk, device: int) -> dict[str, Any]:
    address, size, blocks = chunk
    described = [_block(block) for block in blocks]
    live = [block for block in described if block["state"] == "active_allocated"]
    return {
        "device": device,
        "address": address,
        "total_size": size,
        "allocated_size": sum(block["size"] for block in live),
        "active_size": sum(block["size"] for block in described if block["state"] != "inactive"),
        "requested_size": sum(block["requested_size"] for block in live),
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "is_expandable": False,
        "frames": [],
        "blocks": described,
    }


def _block(block: Block) -> dict[str, Any]:
    address, size, requested, state, _, tag, stack = block
    found = [{"filename": file, "line": line, "name": name} for file, line, name in frames(stack)]
    if tag:
        found.insert(0, {"filename": "tag", "line": 0, "name": tag})
    return {
        "address": address,
        "size": size,
        "requested_size": requested if state == "live" else 0,
        "state": _STATES[state],
        "frames": found,
    }


def _event(action: str, address: int, size: int, found: list[dict[str, Any]]) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": found, "time_us": 0}

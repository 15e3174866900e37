"""What the pool's tests share; the fixture `pool` is in conftest."""

from __future__ import annotations

import os

import torch

from memkit import Pool


def inside(pool: Pool, tensor: torch.Tensor) -> bool:
    """Whether the tensor's memory is the pool's."""
    address = tensor.untyped_storage().data_ptr()
    return any(start <= address < start + size for start, size, _ in pool._core.chunks())


def resident() -> int:
    """Bytes of this process's memory that are backed."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

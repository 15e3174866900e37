"""CUDA devices by name."""

from __future__ import annotations

import torch


def cuda_device(op: str, named: torch.device) -> torch.device:
    """`named`, a device of type cuda, with its index: the current one's where it has none. ValueError: not there."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (named.index or 0) >= count:
        raise ValueError(
            f"{op}: expected a CUDA device that PyTorch sees, of which there are {count}, got {str(named)!r}"
        )
    return named if named.index is not None else torch.device("cuda", torch.cuda.current_device())

"""What users give a pool, and what a pool tells them."""

from __future__ import annotations

import gc
import math
import operator
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import SupportsIndex

import torch

from ._devices import cuda_device
from ._pool_snapshot import frames

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_LARGEST = 2**62


def parse_size(size: int | str, op: str, what: str = "size") -> int:
    """Bytes from an int or text: "4096", "1.5 GiB", "100MB"."""
    nbytes: float = -1
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", size)
        unit = _UNITS.get(match[2].upper()) if match else None
        if match and unit:
            number = Decimal(match[1]) if len(match[1]) < 40 else Decimal("Infinity")
            nbytes = math.ceil(number * unit) if number.is_finite() else math.inf
    elif isinstance(size, SupportsIndex) and not isinstance(size, bool):
        nbytes = operator.index(size)
    else:
        raise TypeError(f'{op}: expected {what} as bytes or text like "512MiB", got {type(size).__name__}')
    if not 1 <= nbytes <= _LARGEST:
        raise ValueError(
            f'{op}: expected {what} as bytes from 1 to 2**62 or text like "512MiB", got {repr(size)[:60]}'
        )
    return int(nbytes)


def parse_device(device: torch.device | str, pin_memory: bool) -> torch.device:
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"Pool: expected a device like 'cpu' or 'cuda:0', got {device!r}") from None
    if target.type == "cuda":
        target = cuda_device("Pool", target)
    elif target.type != "cpu":
        raise ValueError(f"Pool: expected a device of type cpu or cuda, got {str(target)!r}")
    if pin_memory and target.type != "cpu":
        raise ValueError(f"Pool: expected device 'cpu' with pin_memory=True, got {str(target)!r}")
    return torch.device("cpu") if target.type == "cpu" else target


def held_text(held: Sequence[tuple[str, int, str, int]]) -> str:
    names = []
    for tag, nbytes, _, address in held[:5]:
        shapes = _shapes_at(address)
        names.append(f"{tag or 'untagged'}, {f'{shapes}, ' if shapes else ''}{size_text(nbytes)}")
    text = (
        f"Pool.scope: expected no living tensor of the scope at its end, got {len(held)}: {'; '.join(names)}"
    )
    text += ", ..." if len(held) > 5 else ""
    for tag, _, stack, _ in held[:5]:
        if stack:
            lines = [f"  {file}:{line} in {name}" for file, line, name in frames(stack)]
            text += f"\n{tag or 'untagged'}, made at (innermost first)\n" + "\n".join(lines)
    return text


def _shapes_at(address: int) -> str:
    """Of the Python tensors that live in the storage at this address: a search through all objects, for errors only."""
    shapes = []
    for found in gc.get_objects():
        if type(found) in (torch.Tensor, torch.nn.Parameter):
            try:
                if found.untyped_storage().data_ptr() == address:
                    shapes.append(f"{tuple(found.shape)} {found.dtype}")
            except RuntimeError:  # no storage
                continue
    return " and ".join(sorted(set(shapes))[:3])


def count_text(number: int, name: str) -> str:
    """ "1 block", "2,000 blocks"."""
    return f"{number:,} {name if number == 1 else name + 's'}"


def size_text(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(nbytes) < 1024:  # 1023.9 KiB are 0.9999 MiB, not 1024 KiB
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"

"""Timing that survives a busy machine: contenders take turns, so that a drift hits all of them."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def seconds(work: Callable[[], object], device: str) -> float:
    """Wall time of one call, with the GPU's queue empty before and after."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def until_interrupted(result: dict[str, Any]) -> Iterator[None]:
    """Ctrl-C, or the SIGINT of a time limit, ends the measurements alone: what there is by then is reported and written."""
    try:
        yield
    except KeyboardInterrupt:
        result["interrupted"] = True
        print("interrupted: what follows was measured until then", file=sys.stderr)


def balanced(names: Sequence[str], turn: int) -> list[str]:
    """`names` in the order of this turn: over 2 len(names) turns all are first, last and behind each other equally often.

    What one leaves in the caches and to the allocator its successor finds (Williams 1949, designs balanced for the
    estimation of residual effects of treatments).
    """
    count = len(names)
    zigzag = ((place + 1) // 2 if place % 2 else -(place // 2) for place in range(count))
    order = [names[(step + turn) % count] for step in zigzag]
    return order[::-1] if turn // count % 2 else order


def interleave(
    contenders: Mapping[str, Callable[[], float]], repeats: int, warm: int = 1, first: int = 0
) -> dict[str, list[float]]:
    """Each contender's times over `repeats` rounds, in which each runs once, after `warm` untimed rounds.

    `first` rounds have gone before: whose turn it is to begin goes on from there.
    """
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(first - warm, first + repeats):
        for name in balanced(names, turn):
            taken = contenders[name]()
            if turn >= first:
                times[name].append(taken)
    return times


def ratio(times: Sequence[float], reference: Sequence[float]) -> float:
    """Median of the rounds' own ratios: within a round both ran seconds apart, so slow drift cancels."""
    return statistics.median(a / b for a, b in zip(times, reference, strict=True))


def summary(times: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    return {
        "seconds": statistics.median(times),
        "fastest": min(times),
        "ratio": ratio(times, reference),
        "rounds": len(times),
    }

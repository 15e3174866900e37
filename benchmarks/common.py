"""What the op benchmarks share: sets of buffers to run over, clocks for both devices, rounds in turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from memkit.bench.timing import interleave, ratio

# One timed sample runs over several buffers, so that it lasts long enough to be timed.
CPU_ELEMENTS = 1 << 20
CPU_BUFFERS = 64


@dataclass(frozen=True)
class Contender:
    """`prepare` makes the arguments of every call of one sample, untimed; `call` is timed on each of them."""

    prepare: Callable[[], Sequence[tuple[Any, ...]]]
    call: Callable[..., object]


def buffer_count(elements: int, dtype: torch.dtype, device: str) -> int:
    """On a GPU as many as fill its L2 cache twice: each call then reads its input from memory."""
    if device == "cuda":
        cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        return max(1, -(-2 * cache // (elements * dtype.itemsize)))
    return max(1, min(CPU_BUFFERS, CPU_ELEMENTS // elements))


def normal(elements: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(elements, dtype=dtype, device=device, generator=generator)


def sample(contender: Contender, device: str) -> float:
    """Seconds per call until the device is done, averaged over one pass over the prepared arguments."""
    if device != "cuda":
        return host_sample(contender, device)
    arguments = contender.prepare()
    call = contender.call
    torch.cuda.synchronize()  # or the launches would hide behind the preparation's kernels
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for each in arguments:
        call(*each)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / len(arguments)


def host_sample(contender: Contender, device: str) -> float:
    """Seconds per call until the call returns, whatever a GPU still has to do."""
    arguments = contender.prepare()
    call = contender.call
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for each in arguments:
        call(*each)
    return (time.perf_counter() - begin) / len(arguments)


def measure(
    contenders: Mapping[str, Contender],
    device: str,
    budget: float,
    clock: Callable[[Contender, str], float] = sample,
    least: int = 4,
    most: int = 60,
) -> dict[str, list[float]]:
    """Samples of all contenders in turns: as many rounds as `budget` seconds allow, `least` to `most`."""
    timers = {name: lambda c=each: clock(c, device) for name, each in contenders.items()}
    begin = time.perf_counter()
    interleave(timers, repeats=1, warm=0)
    warm_round = time.perf_counter() - begin
    rounds = max(least, min(most, int(budget / warm_round)))
    return interleave(timers, rounds, warm=0)


def ratios(times: Mapping[str, Sequence[float]], reference: str) -> dict[str, float]:
    return {name: ratio(taken, times[reference]) for name, taken in times.items()}

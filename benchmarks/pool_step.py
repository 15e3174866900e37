"""A training step whose memory comes from a pool, against stock: time, and the memory that it adds to weights and optimizer
state. The step is one of the models that `memkit bench` trains.

    python benchmarks/pool_step.py BATCH                 # bytes by which the process grows over a stock step on the CPU
    python benchmarks/pool_step.py BATCH DEVICE VARIANT  # of steps with sequences of varying length, as JSON

Stock's memory is, on the CPU, the growth of the resident set in a process of its own, whose free memory went back to the
system just before; on a GPU what its caching allocator reserves for a step after empty_cache(), and what the segments of
weights have left.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import memkit
from memkit.bench import models, train
from memkit.bench.options import Options
from memkit.bench.timing import interleave, ratio, seconds

LENGTHS = 40  # steps, each with sequences of a length of its own
VARIANTS = {
    "cpu": {"stock": "", "pool.use()": ""},
    "cuda": {"stock": "", "stock, expandable segments": "expandable_segments:True", "pool.use()": ""},
}
"""Settings of PyTorch's caching allocator."""
PRECISION = 1 << 20  # bytes, of the least memory that a pool gets through a step with


def training_step(batch: int, device: str, model: str = "gpt") -> Callable[..., None]:
    """A step of stock training, warm: its optimizer state exists. Of sequences that are cut, where a length is given."""
    options = Options(models=(model,), device=device, dtype="float32", batch=batch)
    torch.manual_seed(options.seed)
    if model == "gpt":
        tokens = torch.randint(options.vocab, (batch, options.seq_len + 1))
        data = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    else:
        data = (torch.randn(batch, 1, 8, 8), torch.randint(10, (batch,)))
    sizes = (options.vocab, options.layers, options.d_model, options.heads, options.seq_len)
    build = {"gpt": lambda: models.GPT(*sizes), "cnn": lambda: models.CNN(10)}[model]
    task = train.Task(model, build, [data], None, learning_rate=1e-3).to(device, torch.float32)
    variant = train.Variant("eager", (), task, options)

    def step(length: int | None = None) -> None:
        variant.optimizer.zero_grad(set_to_none=True)  # of a step that ran out of memory
        inputs, targets = task.batches[0]
        variant.step((inputs, targets) if length is None else (inputs[:, :length], targets[:, :length]))

    step()
    return step


def status(field: str) -> int:
    """Bytes that the kernel tells of this process: VmRSS, VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


def resident_growth(work: Callable[[], object]) -> int:
    """The most by which this process grows meanwhile."""
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    work()
    return status("VmHWM") - before


def resident_peak(batch: int) -> int:
    """Of a stock step on the CPU, in this process."""
    step = training_step(batch, "cpu")
    step()
    return resident_growth(step)


def resident_peak_apart(batch: int) -> int | None:
    """In a process of its own; None where the kernel does not tell."""
    command = [sys.executable, __file__, str(batch)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return int(done.stdout.split()[-1]) if done.returncode == 0 else None


def cached_peak(step: Callable[[], None]) -> int:
    """What stock's caching allocator holds for a step beside weights and optimizer state."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_reserved() - before


def varying(batch: int, device: str, variant: str) -> dict[str, int]:
    """Over steps of varying length, in this process: bytes that are alive at most, and that are reserved."""
    step = training_step(batch, device)
    lengths = random.Random(0).choices(range(32, Options().seq_len + 1), k=LENGTHS)
    pool = memkit.Pool(1 << 20, device) if variant == "pool.use()" else None

    def work() -> None:
        for length in lengths:
            with pool.use() if pool else contextlib.nullcontext():
                step(length)

    gc.collect()
    found = {}
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        found = {
            "live": torch.cuda.max_memory_allocated() - before,
            "reserved": torch.cuda.max_memory_reserved() - before,
        }
    else:
        grown = resident_growth(lambda: found.update(live=memkit.memory.measure(work, device=device).peak))
        found["reserved"] = grown
    return found | ({"reserved": pool.stats().reserved_peak} if pool else {})


def varying_apart(batch: int, device: str) -> dict[str, dict[str, int]]:
    """Each variant in a process of its own, as PyTorch reads its settings when it starts."""
    found = {}
    for variant, settings in VARIANTS[device].items():
        environment = {**os.environ, "PYTORCH_ALLOC_CONF": settings, "PYTORCH_CUDA_ALLOC_CONF": settings}
        command = [sys.executable, __file__, str(batch), device, variant]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
        found[variant] = json.loads(done.stdout.splitlines()[-1])
    return found


def least(step: Callable[[], None], low: int, device: str) -> int:
    """The smallest pool, to PRECISION, that a step gets through use() with; `low` bytes are known to be needed."""

    def enough(size: int) -> bool:
        try:
            with memkit.Pool(size, device, grow=False) as pool, pool.use():
                step()
        except memkit.PoolExhausted:
            return False
        return True

    high = low
    while not enough(high):
        low, high = high, high + max(high // 32, PRECISION)
    while high - low > PRECISION:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def run(rounds: int, batch: int, device: str) -> dict[str, Any]:
    step = training_step(batch, device)
    plan = memkit.Pool(1 << 20).record(step) if device == "cpu" else None  # plans are for the CPU
    measured = memkit.memory.measure(step, device=device)
    live = plan.lower_bound if plan else measured.peak
    needed = least(step, live, device)
    pool = memkit.Pool(needed, device)

    def in_pool() -> None:
        with pool.use():
            step()

    contenders = {"stock": step, "pool.use()": in_pool}
    if plan:
        planned = memkit.Pool(plan.height)

        def in_plan() -> None:
            with planned.replay(plan):
                step()

        contenders["pool.replay()"] = in_plan
    times = interleave({k: lambda work=v: seconds(work, device) for k, v in contenders.items()}, rounds)
    reserved = {
        "stock": cached_peak(step) if device == "cuda" else resident_peak_apart(batch),
        "pool.use()": max(needed, pool.stats().reserved_peak),
    }
    pool.check()
    found: dict[str, Any] = {
        "batch": batch,
        "rounds": rounds,
        "allocations": len(plan.buffers) if plan else measured.allocations,
        "live_bytes": live,
    }
    if plan:
        with planned.replay(plan) as replay:
            step()
        reserved["pool.replay()"] = max(plan.height, planned.stats().reserved_peak)
        planned.check()
        found |= {"served_by_plan": replay.served, "plan_bytes": plan.height}
    return found | {
        "seconds": {each: statistics.median(taken) for each, taken in times.items()},
        "ratio": {each: ratio(taken, times["stock"]) for each, taken in times.items()},
        "reserved_bytes": reserved,
        "reserved_to_live": {each: n and n / live for each, n in reserved.items()},
    }


if __name__ == "__main__":
    rows, *variants = sys.argv[1:]
    print(json.dumps(varying(int(rows), *variants)) if variants else resident_peak(int(rows)))

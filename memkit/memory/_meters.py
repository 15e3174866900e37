"""Where the numbers come from: the tap on the CPU, torch's own counters and allocator history on CUDA.

`mark` is called while a storage is alive, `is_new` after the end: did it get its memory since the start?
"""

from __future__ import annotations

import threading
import time
from typing import Any, ClassVar, NamedTuple

import torch

from .. import _C


class Counts(NamedTuple):
    live: int
    peak: int
    allocations: int


class CpuMeter:
    """Exact: every allocation of CPU tensor storage in the process, on any thread, inside kernels too."""

    def __init__(self, samples: int = 0) -> None:
        self._samples = samples

    def start(self) -> None:
        self._tap = _C.Tap(self._samples)

    def stop(self) -> None:
        self._tap.stop()

    def synchronize(self) -> None:
        """The CPU is never ahead of itself."""

    def counts(self) -> Counts:
        live, peak, allocations = self._tap.read()
        return Counts(live, peak, allocations)

    def samples(self) -> list[tuple[float, int]]:
        return self._tap.samples()

    def mark(self, storage: _C.StorageRef) -> bool:
        return self._tap.covers(storage.key)

    def is_new(self, mark: bool) -> bool:
        return mark


class CudaMeter:
    """Counts from `torch.cuda.memory_stats`, events from torch's allocator history, switched on for it.

    Bytes are requested ones, before the allocator rounds them up, as on the CPU. The allocator backend
    "cudaMallocAsync" keeps no such count: there they are allocated ones, and there is no history.
    """

    _lock = threading.Lock()
    _running: ClassVar[list[CudaMeter]] = []

    def __init__(self, device: torch.device) -> None:
        self._device = device
        native = torch.cuda.get_allocator_backend() == "native"
        self._bytes = "requested_bytes.all." if native else "allocated_bytes.all."
        self._events: list[dict[str, Any]] = []

    def start(self) -> None:
        self.synchronize()
        # Left alone where the user records already: the newest part of that history is as good.
        self._switch_off = not torch._C._cuda_isHistoryEnabled()
        if self._switch_off:
            torch.cuda.memory._record_memory_history("all", context=None, stacks="python", clear_history=True)
        # Before the counters are read: that takes longer than the clocks of torch and Python differ.
        self._began = time.time_ns() // 1000
        with self._lock:
            stats = self._read_peak()
            self._running.append(self)
            self._live = self._peak = stats[self._bytes + "current"]
        self._allocations = stats["allocation.all.allocated"]

    def stop(self) -> None:
        with self._lock:
            stats = self._read_peak()
            self._running.remove(self)
        self._counts = Counts(
            live=stats[self._bytes + "current"] - self._live,
            peak=self._peak - self._live,
            allocations=stats["allocation.all.allocated"] - self._allocations,
        )
        traces = torch.cuda.memory._snapshot(self._device)["device_traces"]
        for event in traces[self._device.index] if traces else ():
            if event["time_us"] >= self._began and event["action"] in ("alloc", "free_requested"):
                self._events.append(event)
        if self._switch_off:
            torch.cuda.memory._record_memory_history(None)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def counts(self) -> Counts:
        return self._counts

    def samples(self) -> list[tuple[float, int]]:
        live = 0
        samples = [(0.0, 0)]
        for event in self._events:
            live += event["size"] if event["action"] == "alloc" else -event["size"]
            samples.append(((event["time_us"] - self._began) / 1e6, live))
        return samples

    def mark(self, storage: _C.StorageRef) -> tuple[int, int]:
        return storage.address, time.time_ns() // 1000

    def is_new(self, mark: tuple[int, int]) -> bool:
        address, marked = mark
        events = [event for event in self._events if event["addr"] == address]
        if not events or events[0]["action"] == "alloc":
            return bool(events)
        # Something older lived there first: whose time was it? The clocks differ by microseconds, but between the
        # last save of the old and the next allocation at its address lies all of backward.
        return any(event["action"] == "alloc" and event["time_us"] <= marked for event in events)

    def _read_peak(self) -> dict[str, Any]:
        """The counters. Torch keeps one peak: each reading hands it to the running meters and resets it."""
        stats = torch.cuda.memory_stats(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        for meter in self._running:
            if meter._device == self._device:
                meter._peak = max(meter._peak, stats[self._bytes + "peak"])
        return stats


Meter = CpuMeter | CudaMeter

"""What one call needs: `measure` for the numbers, `timeline` for the curve."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from .._devices import cuda_device
from .._lean import is_lean, lean, without_lean
from ._meters import CpuMeter, CudaMeter, Meter
from ._saved import SavedStorages

R = TypeVar("R")

# A timeline of the CPU holds at most so many points; beyond, of neighbours the higher one stays.
TIMELINE_POINTS = 1 << 16


@dataclass(frozen=True)
class Measurement(Generic[R]):
    """What a call needed. Bytes are above what was there at its start. Equal if all counts are."""

    peak: int
    """Most bytes alive at any moment of the call."""
    live: int
    """Bytes alive after it, `result` included. Negative if it freed more than it kept."""
    saved: int
    """Bytes it saved for backward: each storage once, none from before the call (parameters, inputs)."""
    allocations: int
    seconds: float = field(compare=False)
    """Wall time until the device is done. The hooks behind `saved` cost some microseconds a saved tensor."""
    result: R = field(compare=False, repr=False)
    saved_total: int
    """As `saved`, with the storages from before the call."""
    device: torch.device

    def __str__(self) -> str:
        time = f"{self.seconds * 1e3:.3g} ms" if self.seconds < 0.9995 else f"{self.seconds:.2f} s"
        return (
            f"peak {_size(self.peak)}, live {_size(self.live)}, saved {_size(self.saved)}, "
            f"{self.allocations} allocations, {time} on {self.device}"
        )


def measure(
    fn: Callable[..., R], *args: Any, device: torch.device | str | None = None, **kwargs: Any
) -> Measurement[R]:
    """Calls `fn(*args, **kwargs)` once and says what it needed.

    Args:
        fn: what to measure. Its error propagates, and nothing stays switched on.
        device: whose memory. By default CUDA if a tensor among the arguments or the parameters of `fn` is
            there, else the CPU if there is any such tensor, else CUDA if this process has used it, else the
            CPU.

    On the CPU the counts are exact: all tensor storage that torch's allocator hands out in this process, on
    every thread and inside kernels, as requested bytes. It does not see memory from elsewhere (numpy
    arrays, shared or pinned memory, `torch.UntypedStorage(n)`), nor memory allocated before memkit was
    imported. On CUDA the counts are torch's (requested bytes) for that device, and its peak counters are
    reset.

    Calls may be nested, in `fn` or in other threads: each sees all memory of the process. `saved` sees what
    the calling thread saves, except tensors that go to hooks set inside `fn` (offloading), and what is gone
    again when backward begins. Of a checkpointed block it sees the inputs. Hooks around the call keep
    working, :class:`memkit.lean` too, and what that drops does not count. `torch.func.grad` inside `fn`
    refuses saved-tensor hooks and raises: use `timeline`, which sets none.

    Example:
        >>> m = memkit.memory.measure(lambda: model(x).sum().backward())
        >>> print(m.peak, m.saved)
    """
    meter, target = _meter("measure", fn, args, kwargs, device)
    recorder = SavedStorages(meter, target)
    inside = lean() if is_lean() else nullcontext()  # within, so that what it drops is not counted
    with _Running(meter), without_lean(), recorder.hooks(), inside:
        begin = time.perf_counter()
        result = fn(*args, **kwargs)
        meter.synchronize()
        seconds = time.perf_counter() - begin
    counts = meter.counts()
    saved, saved_total = recorder.close()
    return Measurement(
        peak=counts.peak,
        live=counts.live,
        saved=saved,
        allocations=counts.allocations,
        seconds=seconds,
        result=result,
        saved_total=saved_total,
        device=target,
    )


def timeline(
    fn: Callable[..., Any], *args: Any, device: torch.device | str | None = None, **kwargs: Any
) -> list[tuple[float, int]]:
    """Calls `fn(*args, **kwargs)` once and returns its memory as a curve of (seconds, bytes above the start).

    One point for each allocation and each release, after it, from (0.0, 0) on. On the CPU long calls are
    thinned out to `TIMELINE_POINTS`, peaks kept. On CUDA time is the program's, which runs ahead of the
    kernels. What is seen, and `device`: as in `measure`.
    """
    meter, _ = _meter("timeline", fn, args, kwargs, device, samples=TIMELINE_POINTS)
    with _Running(meter):
        fn(*args, **kwargs)
        meter.synchronize()
    return meter.samples()


class _Running:
    """Runs a meter for the length of a `with`."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __enter__(self) -> None:
        gc.collect()  # garbage of earlier code, or it might be freed inside
        self._meter.start()

    def __exit__(self, *error: object) -> None:
        self._meter.stop()


def _meter(
    name: str,
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    device: torch.device | str | None,
    samples: int = 0,
) -> tuple[Meter, torch.device]:
    if not callable(fn):
        raise TypeError(f"{name}: expected a callable, got {type(fn).__name__}")
    try:
        target = _guess_device(fn, args, kwargs) if device is None else torch.device(device)
        known = target.type in ("cpu", "cuda")
    except (TypeError, RuntimeError):
        known = False
    if not known:
        raise ValueError(f"{name}: expected device None, 'cpu' or 'cuda', got {device!r}")
    if target.type == "cpu":
        return CpuMeter(samples), torch.device("cpu")
    target = cuda_device(name, target)
    return CudaMeter(target), target


def _guess_device(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    devices = [leaf.device for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    module = getattr(fn, "__self__", fn)
    if isinstance(module, torch.nn.Module):
        devices += [parameter.device for parameter in module.parameters()]
    for device in devices:
        if device.type == "cuda":
            return device
    used_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.device("cuda" if used_cuda and not devices else "cpu")


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"

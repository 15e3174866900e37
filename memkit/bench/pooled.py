"""A training step whose memory comes from a pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import memkit
from memkit import memory

R = TypeVar("R")


class Pooled(Generic[R]):
    """Calls `step` as `how` says: "use", under `pool.use()`, or "plan", recorded once and replayed.

    The first call runs as ever, for the optimizer makes its state there. The second tells how large the pool must be. From
    the third on, which are those that count, the pool serves.
    """

    def __init__(self, step: Callable[..., R], how: str, device: str) -> None:
        self._step = step
        self._how = how
        self._device = device
        self._calls = 0
        self._served = self._fell_back = 0

    def __call__(self, *args: Any) -> R:
        self._calls += 1
        if self._calls == 1:
            return self._step(*args)
        if self._calls == 2:
            return self._prepare(*args)
        if self._how == "use":
            with self._pool.use():
                return self._step(*args)
        with self._pool.replay(self._plan) as replay:
            result = self._step(*args)
        self._served += replay.served
        self._fell_back += replay.fell_back
        return result

    def _prepare(self, *args: Any) -> R:
        if self._how == "use":
            measured = memory.measure(self._step, *args, device=self._device)
            size = (
                measured.peak * 9 // 8
            )  # for what sizes are rounded up to, and gaps; it grows where that is not enough
            self._pool = memkit.Pool(size, self._device)
            return measured.result
        kept: list[R] = []
        self._plan = memkit.plan.record(lambda: kept.append(self._step(*args)))
        self._pool = memkit.Pool(self._plan.height, self._device)
        return kept[0]

    def to_dict(self) -> dict[str, Any]:
        """Of the steps so far, in bytes and allocations."""
        found: dict[str, Any] = {"how": self._how, "reserved_bytes": self._pool.stats().reserved_peak}
        if self._how == "plan":
            found |= {
                "height_bytes": self._plan.height,
                "gap": self._plan.gap,
                "planned": len(self._plan.buffers),
                "served": self._served,
                "fell_back": self._fell_back,
            }
        return found

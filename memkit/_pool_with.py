"""What `with` can say of a pool: scope, use, replay, tag."""

from __future__ import annotations

import warnings
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from . import _C
from ._pool_text import count_text, held_text
from .plan import Plan, Plans

if TYPE_CHECKING:
    from .pool import Pool


class _Within:
    """What `with` blocks of a pool share."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._core: _C.Pool = pool._core


def _leave(
    op: str, entered: list[Any], kind: type[BaseException] | None
) -> _C.PoolUse | _C.PoolReplay | None:
    """Leaves the last one entered, in whatever order. Another error goes first, but a generator's end tells nobody."""
    left = entered[-1].leave() if entered else None
    one = None if left is None else entered.pop()
    if not left and kind in (None, GeneratorExit):
        raise RuntimeError(
            f"{op}: expected a use() that this thread is in, got one of another thread, or one that was left before"
            if left is None
            else f"{op}: expected to leave the innermost use() of this thread first, got an outer one: it has ended"
        )
    return one


class PoolScope(_Within):
    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._numbers: list[int] = []

    def __enter__(self) -> Pool:
        self._numbers.append(self._core.enter_scope())
        return self._pool

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        scopes: int = 0
        held: list[tuple[str, int, str, int]] = []
        for number in self._numbers[::-1]:  # of several threads, perhaps
            scopes, held = self._core.leave_scope(number)
            if scopes:
                self._numbers.remove(number)
                break
        if kind not in (None, GeneratorExit):
            return
        if scopes == 0:
            raise RuntimeError("Pool.scope: expected a scope that this thread is in, got one that has ended")
        if scopes > 1:
            raise RuntimeError(
                "Pool.scope: expected to leave the innermost scope of this thread first, got an outer one: all ended"
            )
        if held:
            raise RuntimeError(held_text(held))


class PoolUse(_Within):
    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        if pool.pin_memory:
            raise ValueError("Pool.use: expected a pool of ordinary memory, got one with pin_memory=True")
        self._entered: list[_C.PoolUse] = []

    def __enter__(self) -> Pool:
        use = _C.PoolUse(self._core)
        use.enter()
        self._entered.append(use)
        return self._pool

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _leave("Pool.use", self._entered, kind)
        if kind is torch.OutOfMemoryError and (refusal := self._core.refusal(str(error))) is not None:
            raise refusal from error  # torch's own error is what torch's kernels know


class PoolReplay(_Within):
    """One `with pool.replay(plan)`; its numbers are those of the step, once it has ended."""

    planned: int = 0
    """Allocations in the plan."""
    served: int = 0
    """Allocations that got the plan's place."""
    fell_back: int = 0
    """Allocations that came from the pool instead."""
    mismatch: str = ""
    """What the first of those was, and what the plan expected."""

    def __init__(self, pool: Pool, plan: Plan | Plans, signature: Any) -> None:
        super().__init__(pool)
        if isinstance(plan, Plans):
            self.plan = plan.get(signature)
        elif isinstance(plan, Plan):
            self.plan = plan
        else:
            raise TypeError(f"Pool.replay: expected a Plan or Plans, got {type(plan).__name__}")
        if pool.pin_memory:
            raise ValueError("Pool.replay: expected a pool of ordinary memory, got one with pin_memory=True")
        self._known = pool._replays
        self._entered: list[_C.PoolUse | _C.PoolReplay] = []
        self._replay: _C.PoolReplay | None = None
        if self.plan is not None:
            self._replay = self._known.get(self.plan)
            if self._replay is None:
                slots = [
                    (b.size, offset) for b, offset in zip(self.plan.buffers, self.plan.offsets, strict=True)
                ]
                self._replay = _C.PoolReplay(self._core, slots, self.plan.height, self.plan.alignment)
                self._known[self.plan] = self._replay

    def __repr__(self) -> str:
        planned = count_text(self.planned, "allocation")
        text = f"PoolReplay({planned} planned, {self.served} served, {self.fell_back} fell back"
        return f"{text}: {self.mismatch})" if self.mismatch else f"{text})"

    def __enter__(self) -> PoolReplay:
        if self.plan is not None and self._replay is not None:
            self._known.setdefault(
                self.plan, self._replay
            )  # an equal plan's entry may have died with that plan
        step = self._replay or _C.PoolUse(self._core)
        step.enter()
        self._entered.append(step)
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        step = _leave("Pool.replay", self._entered, kind)
        if isinstance(step, _C.PoolReplay):
            self.planned, self.served, self.fell_back, self.mismatch = step.step()
            if self.plan and self.fell_back and kind is None and self.plan not in self._pool._warned:
                self._pool._warned.add(self.plan)
                warnings.warn(
                    f"Pool.replay: {count_text(self.fell_back, 'allocation')} of the step did not go by the plan and came "
                    f"from the pool; the first: {self.mismatch}; a plan holds for one shape: record one for each, of a "
                    "later step than the optimizer's first (memkit.Plans, docs/pool.md)",
                    RuntimeWarning,
                    stacklevel=2,
                )


class PoolTag(_Within):
    def __init__(self, pool: Pool, name: str) -> None:
        super().__init__(pool)
        if not isinstance(name, str) or not name:
            raise ValueError(f"Pool.tag: expected a name, got {name!r}")
        self._name = name
        self._numbers: list[int] = []

    def __enter__(self) -> Pool:
        self._numbers.append(self._core.push_tag(self._name))
        return self._pool

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        number = next((n for n in self._numbers[::-1] if self._core.pop_tag(n)), None)
        if number is not None:
            self._numbers.remove(number)
        elif kind in (None, GeneratorExit):
            raise RuntimeError("Pool.tag: expected a tag that this thread is in, got one that has ended")

"""Allocation plans: where each buffer of a step goes, worked out once, before the step runs again.

A training step repeats: its allocations come in the same order with the same sizes. `record` notes them and solves
for offsets at which buffers that are alive together never overlap, in as little storage as can be found. A plan is
data: `pool.replay(plan)` serves from it, `memkit plan show` prints and draws it.
"""

from __future__ import annotations

import csv
import gc
import hashlib
import json
import math
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from . import _C, __version__
from ._pool_text import count_text, size_text

__all__ = ["Buffer", "Plan", "Plans", "read_trace", "record", "signature_of", "trace"]

R = TypeVar("R")

FORMAT = 1  # of the files
LIMIT = 2**63 - 1
ALIGNMENT = 64  # bytes: torch's on the CPU


class Buffer(NamedTuple):
    """`size` bytes, alive in the half-open interval [lower, upper) of any clock."""

    size: int
    lower: int
    upper: int


@dataclass(frozen=True, repr=False)
class Plan:
    """Buffers in the order of their allocation, and the offset of each. Bytes throughout.

    Always sound: making one checks every number, with a verifier that shares no code with the solver, and raises
    ValueError (TypeError for another type) where something is wrong.
    """

    buffers: tuple[Buffer, ...]
    offsets: tuple[int, ...]
    alignment: int
    """A power of two; offsets are multiples of it."""
    height: int
    """The storage it needs: the highest end of a buffer, sizes rounded up to the alignment."""
    lower_bound: int
    """The most bytes alive at once, sizes rounded up: no plan needs less."""
    method: str
    """What found it; for the reader."""
    optimal: bool
    """No plan is lower: the bound is met, or the search has left nothing out."""
    signature: Any = None
    """What it is a plan for, as JSON knows it: text, numbers, lists, dicts."""
    torch: str = field(default_factory=lambda: str(torch.__version__))
    memkit: str = __version__
    _hash: int = field(init=False, compare=False, default=0)

    def __post_init__(self) -> None:
        buffers = tuple(Buffer(*_integers("buffer", b)) for b in self.buffers)
        object.__setattr__(self, "buffers", buffers)
        object.__setattr__(self, "offsets", _integers("offsets", self.offsets))
        object.__setattr__(self, "signature", json.loads(_canonical(self.signature)))
        for name in ("method", "torch", "memkit"):
            _expect(isinstance(getattr(self, name), str), f"text as {name}", getattr(self, name), TypeError)
        _expect(isinstance(self.optimal, bool), "a bool as optimal", self.optimal, TypeError)
        _integers("alignment, height, lower_bound", (self.alignment, self.height, self.lower_bound))
        _check_buffers("Plan", buffers, self.alignment)
        why = _C.check_plan(buffers, self.offsets, self.alignment)
        _expect(why is None, "offsets that keep buffers alive together apart", why)
        height, bound = _height(buffers, self.offsets, self.alignment), _most_alive(buffers, self.alignment)
        _expect(self.height == height, f"the height {height}", self.height)
        _expect(self.lower_bound == bound, f"the lower bound {bound}", self.lower_bound)
        _expect(self.optimal or height > bound, "optimal at the lower bound", self.optimal)
        object.__setattr__(self, "_hash", hash((self.buffers, self.offsets, self.alignment)))

    def __hash__(self) -> int:
        return self._hash

    @property
    def gap(self) -> float:
        """How far the height lies above the lower bound, as a share of it; 0.0 at the bound."""
        return (self.height - self.lower_bound) / self.lower_bound if self.lower_bound else 0.0

    def __str__(self) -> str:
        bound = "no plan is lower" if self.optimal else f"{self.gap:.2%} above what is alive at most"
        return (
            f"{count_text(len(self.buffers), 'buffer')} in {size_text(self.height)}, {bound} ({self.method})"
        )

    def __repr__(self) -> str:
        return f"Plan({self})"

    @classmethod
    def solve(
        cls,
        buffers: Iterable[tuple[int, int, int]],
        *,
        alignment: int = ALIGNMENT,
        budget: float = 1.0,
        seed: int = 0,
        signature: Any = None,
    ) -> Plan:
        """The lowest plan found within about `budget` seconds; at the lower bound it stops at once.

        Args:
            buffers: (size, lower, upper) of each: bytes, and the interval [lower, upper) it is alive in.
            alignment: of the offsets in bytes, a power of two.
            budget: seconds; a first plan is made whatever it is. Other threads run meanwhile.
            seed: the same gives the same plan, unless time ran out elsewhere.
            signature: what to find the plan by, as JSON knows it.

        Raises TypeError for a buffer that is not three ints, ValueError for a negative size, a lifetime that ends
        before it starts, and for sizes that do not add up within 63 bits.

        Example:
            >>> Plan.solve([(100, 0, 2), (50, 1, 4), (100, 2, 3)]).offsets
            (0, 128, 0)
        """
        rows = _rows("Plan.solve", buffers)
        alignment, seed = operator.index(alignment), operator.index(seed)
        _check_buffers("Plan.solve", rows, alignment)
        if not (math.isfinite(budget) and budget >= 0):
            raise ValueError(f"Plan.solve: expected a budget of 0 seconds or more, got {budget!r}")
        if not 0 <= seed < 2**64:
            raise ValueError(f"Plan.solve: expected a seed of 64 bits, got {seed}")
        offsets, height, bound, optimal, method, _ = _C.solve_plan(rows, alignment, budget, seed)
        return cls(rows, tuple(offsets), alignment, height, bound, method, optimal, signature)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes JSON, whole or not at all, and makes the folder where it is missing."""
        _write(path, {"kind": "memkit-plan", "format": FORMAT, **self._fields()})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads what `save` wrote; ValueError where the file was cut off or changed, or is another format's."""
        return _read(path, "memkit-plan", cls._of, "Plan.load")

    def _fields(self) -> dict[str, Any]:
        return {
            "memkit": self.memkit,
            "torch": self.torch,
            "signature": self.signature,
            "method": self.method,
            "optimal": self.optimal,
            "alignment": self.alignment,
            "height": self.height,
            "lower_bound": self.lower_bound,
            "sizes": [b.size for b in self.buffers],
            "lowers": [b.lower for b in self.buffers],
            "uppers": [b.upper for b in self.buffers],
            "offsets": list(self.offsets),
        }

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> Plan:
        columns = [_integers(name, fields.pop(name)) for name in ("sizes", "lowers", "uppers")]
        lengths = [len(column) for column in columns]
        _expect(len(set(lengths)) == 1, "sizes, lowers and uppers of one length", lengths)
        return cls(buffers=tuple(map(Buffer, *columns)), **fields)


class Plans(Mapping[Any, Plan]):
    """Plans by their signature: one for each shape that a step is run with.

    Example:
        >>> plans = Plans()
        >>> for batch in batches:
        ...     plan = plans.get(signature_of(batch))
        ...     if plan is None:
        ...         plans.add(record(step, batch))
        ...     else:
        ...         with pool.replay(plan):
        ...             step(batch)
    """

    def __init__(self, plans: Iterable[Plan] = ()) -> None:
        self._plans: dict[str, Plan] = {}
        for plan in plans:
            self.add(plan)

    def add(self, plan: Plan) -> None:
        """In the place of one that has the same signature."""
        self._plans[_canonical(plan.signature)] = plan

    @property
    def height(self) -> int:
        """Bytes that hold any one of them."""
        return max((plan.height for plan in self.values()), default=0)

    def __getitem__(self, signature: Any) -> Plan:
        plan = self._plans.get(_canonical(signature))
        if plan is None:
            raise KeyError(signature)
        return plan

    def __eq__(self, other: object) -> bool:
        return self._plans == other._plans if isinstance(other, Plans) else NotImplemented

    def __repr__(self) -> str:
        buffers = sum(len(plan.buffers) for plan in self.values())
        gap = max((plan.gap for plan in self.values()), default=0.0)
        return (
            f"Plans({len(self)} of {count_text(buffers, 'buffer')} together, any in {size_text(self.height)}, "
            f"at most {gap:.2%} above what is alive at most)"
        )

    def __iter__(self) -> Iterator[Any]:
        return (plan.signature for plan in self._plans.values())

    def __len__(self) -> int:
        return len(self._plans)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes all of them into one JSON file, whole or not at all."""
        _write(
            path, {"kind": "memkit-plans", "format": FORMAT, "plans": [p._fields() for p in self.values()]}
        )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plans:
        """Reads what `save` wrote, with the checks of `Plan.load`."""
        return _read(path, "memkit-plans", lambda f: cls(map(Plan._of, f["plans"])), "Plans.load")


def trace(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Buffer]:
    """Calls `fn(*args, **kwargs)` once and returns its allocations in order: CPU tensor storage, requested bytes.

    Those of the calling thread, on which the backward of a CPU step runs too; other threads leave no trace. The clock
    counts these allocations and their releases. What `fn` leaves alive, its result included, lives until the end;
    releases of what is older are ignored. Python's garbage collector is off meanwhile: a plan must not count on it.
    An error of `fn` propagates.
    """
    _check_callable(fn, "trace")
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    recorder = _C.Recorder()
    try:
        _kept = fn(*args, **kwargs)
        recorder.stop()
    finally:
        recorder.stop()
        if collecting:
            gc.enable()
    return [Buffer(*row) for row in recorder.buffers()]


def record(
    fn: Callable[..., Any],
    *args: Any,
    alignment: int = ALIGNMENT,
    budget: float = 1.0,
    signature: Any = None,
    **kwargs: Any,
) -> Plan:
    """Calls `fn(*args, **kwargs)` once, as `trace` does, and plans its allocations, as `Plan.solve` does.

    Record a step that is like those to come: not the first, in which the optimizer makes its state. `signature` is by
    default `signature_of(*args, **kwargs)`.

    Example:
        >>> step(batch)
        >>> plan = memkit.plan.record(step, batch)
        >>> print(plan.height, plan.gap)
    """
    _check_callable(fn, "record")
    if signature is None:
        signature = signature_of(*args, **kwargs)  # before fn changes its arguments
    return Plan.solve(trace(fn, *args, **kwargs), alignment=alignment, budget=budget, signature=signature)


def signature_of(*args: Any, **kwargs: Any) -> list[Any]:
    """Dtypes and shapes of tensors, plain values as they are, types of anything else: what a plan depends on."""
    return [_describe(args), _describe(kwargs)] if kwargs else [_describe(args)]


def read_trace(path: str | os.PathLike[str]) -> list[Buffer]:
    """A CSV file with columns named lower, upper and size (bytes), a buffer a row; other columns are left alone."""
    with open(
        path, newline="", encoding="utf-8-sig", errors="replace"
    ) as file:  # spreadsheets write a mark first
        rows = csv.DictReader(file)
        columns = rows.fieldnames or []
        if not {"size", "lower", "upper"} <= set(columns):
            raise ValueError(
                f"read_trace: {path}: expected columns size, lower and upper, got {', '.join(columns)}"
            )
        buffers = []
        for row in rows:
            try:
                buffers.append(Buffer(int(row["size"]), int(row["lower"]), int(row["upper"])))
            except (TypeError, ValueError):
                raise ValueError(
                    f"read_trace: {path}: expected whole numbers in line {rows.line_num}, got {dict(row)}"
                ) from None
    return buffers


def _check_callable(fn: Any, name: str) -> None:
    if not callable(fn):
        raise TypeError(f"{name}: expected a callable, got {type(fn).__name__}")


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, Mapping):
        return {str(key): _describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_describe(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return type(value).__qualname__


# Checks


def _expect(good: bool, expected: str, got: object, error: type[Exception] = ValueError) -> None:
    if not good:
        raise error(f"Plan: expected {expected}, got {got if isinstance(got, str) else repr(got)}")


def _integers(name: str, values: Any) -> tuple[int, ...]:
    _expect(isinstance(values, (list, tuple)), f"a list as {name}", type(values).__name__, TypeError)
    for value in values:
        _expect(type(value) is int, f"whole numbers as {name}", value, TypeError)
        _expect(-LIMIT <= value <= LIMIT, f"numbers of 63 bits as {name}", value)
    return tuple(values)


def _rows(op: str, buffers: Iterable[tuple[int, int, int]]) -> tuple[Buffer, ...]:
    rows: list[Buffer] = []
    for row in buffers:
        try:
            numbers = [operator.index(number) for number in row]
        except TypeError:
            numbers = []
        if len(numbers) != 3:
            raise TypeError(
                f"{op}: expected buffer {len(rows)} to be three ints (size, lower, upper), got {row!r:.100}"
            )
        rows.append(Buffer(*numbers))
    return tuple(rows)


def _check_buffers(op: str, buffers: tuple[Buffer, ...], alignment: int) -> None:
    if not (0 < alignment <= 2**40 and alignment & (alignment - 1) == 0):
        raise ValueError(f"{op}: expected a power of two as alignment, got {alignment}")
    total = 0
    for i, (size, lower, upper) in enumerate(buffers):
        if size < 0 or upper < lower:
            raise ValueError(
                f"{op}: expected buffer {i} with a size of 0 or more and an end not before its start, "
                f"got size {size}, lower {lower} and upper {upper}"
            )
        if not (lower >= -LIMIT and upper <= LIMIT):
            raise ValueError(f"{op}: expected times of 63 bits for buffer {i}, got {lower} and {upper}")
        total += -(-size // alignment) * alignment
    if total > LIMIT:
        raise ValueError(f"{op}: expected sizes that add up within 63 bits, got {total}")


def _height(buffers: tuple[Buffer, ...], offsets: tuple[int, ...], alignment: int) -> int:
    ends = (
        offset + -(-b.size // alignment) * alignment
        for b, offset in zip(buffers, offsets, strict=True)
        if b.size and b.lower < b.upper
    )
    return max(ends, default=0)


def _most_alive(buffers: tuple[Buffer, ...], alignment: int) -> int:
    changes = []
    for size, lower, upper in buffers:
        rounded = -(-size // alignment) * alignment
        changes += [(lower, rounded), (upper, -rounded)] if lower < upper else []
    live = most = 0
    for _, change in sorted(changes):  # at one time what dies before what is born
        live += change
        most = max(most, live)
    return most


# Files


def _canonical(value: Any) -> str:
    try:
        return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"Plan: expected a signature that JSON can hold, got {type(value).__name__}: {error}"
        ) from None


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(content).encode()).hexdigest()


def _write(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.partial")
    lines = ",\n".join(f" {json.dumps(key)}: {_canonical(value)}" for key, value in content.items())
    try:
        partial.write_text(f'{{\n{lines},\n "sha256": "{_digest(content)}"\n}}\n', encoding="utf-8")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _read(path: str | os.PathLike[str], kind: str, make: Callable[[dict[str, Any]], R], op: str) -> R:
    data = Path(path).read_bytes()
    try:
        content = json.loads(data)
        _expect(isinstance(content, dict), "a JSON object", type(content).__name__)
        _expect(content.get("kind") == kind, f"a file of kind {kind}", content.get("kind"))
        _expect(content.get("format") == FORMAT, f"format {FORMAT}", content.get("format"))
        digest = content.pop("sha256", None)
        _expect(digest == _digest(content), "the content that its sha256 names", "a file changed since")
        del content["kind"], content["format"]
        return make(content)
    except UnicodeDecodeError:
        raise ValueError(f"{op}: {path}: expected a text file, got other bytes") from None
    except RecursionError:
        raise ValueError(
            f"{op}: {path}: expected a JSON object of {kind}, got one nested too deeply"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{op}: {path}: expected a JSON object, got text that is none ({error})") from None
    except (ValueError, TypeError, KeyError) as error:
        missing = isinstance(error, KeyError)
        text = f"expected the field {error}, got none" if missing else str(error).removeprefix("Plan: ")
        raise ValueError(f"{op}: {path}: {text}") from None

"""What swap did, a row for each place where it looked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..memory.measure import _size

HEAD = ("path", "before", "after", "saved", "bytes", "remark")
UNPROVEN = "not proven: pass sample="
"""In a row's reason where a sample could prove more."""
NOTHING = (
    "no activation, norm, dropout, pooling, attention or feed-forward network of which swap could keep less; of what a "
    "forward calls as a function (torch.nn.functional.relu) it sees little"
)


@dataclass(frozen=True)
class Row:
    """A place where swap looked: a module, or a function that a layer holds."""

    path: str
    """Where it is in the model; all places, where there are several."""
    before: str
    after: str
    """"in place" (out of place in calls where that would be unsafe), "output" or "bit" (out of place) or "unchanged"."""
    saved: str
    """What backward computes the slope from."""
    bytes_before: int | None
    """What it kept for backward on the sample beside what its neighbours keep; None without a sample."""
    bytes_after: int | None
    reason: str
    """Why it was left unchanged, is not in place, or changed only in some dtypes: the table's last column."""

    @property
    def changed(self) -> bool:
        return self.after != "unchanged"


@dataclass(frozen=True)
class SwapReport:
    """Prints as a table."""

    rows: tuple[Row, ...]
    saved_before: int | None = None
    """Bytes the whole model saved for backward on the sample, measured before and after; None without a sample."""
    saved_after: int | None = None
    note: str = ""
    lean: bool | Literal["call"] = False
    """What `swap` was called with. With True the bytes are those inside `memkit.lean()`."""

    @property
    def changed(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.changed)

    @property
    def left(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.changed)

    @property
    def bytes_before(self) -> int | None:
        return _sum(row.bytes_before for row in self.rows)

    @property
    def bytes_after(self) -> int | None:
        return _sum(row.bytes_after for row in self.rows)

    def by_module(self) -> dict[str, tuple[int, int]]:
        """Bytes before and after, added up over the sites in each module; "" is the model. A shared site counts once."""
        found: dict[str, tuple[int, int]] = {}
        for row in self.rows:
            parts = row.path.split(", ")[0].split(".")
            for depth in range(len(parts) + 1):
                path = ".".join(parts[:depth])
                before, after = found.get(path, (0, 0))
                found[path] = before + (row.bytes_before or 0), after + (row.bytes_after or 0)
        return found

    def _keeps_no_less(self, row: Row) -> bool:
        """With lean others may, for which its result is made again."""
        if self.lean or row.bytes_before is None or row.bytes_after is None:
            return False
        return row.bytes_after >= row.bytes_before

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "rows": [asdict(row) for row in self.rows],
            "changed": len(self.changed),
            "left": len(self.left),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "saved_before": self.saved_before,
            "saved_after": self.saved_after,
            "note": self.note,
            "lean": self.lean,
            "modules": {path: list(counts) for path, counts in self.by_module().items()},
        }

    def __str__(self) -> str:
        if not self.rows:
            return f"nothing to change: {self.note or NOTHING}"
        lines = [
            HEAD,
            *((r.path or "(the model)", r.before, r.after, r.saved, _change(r), r.reason) for r in self.rows),
        ]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = [
            "  ".join(f"{cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        ]
        table.insert(1, "  ".join("-" * width for width in widths))
        total = f"{len(self.changed)} of {len(self.rows)} sites changed"
        if not self.changed:
            total += ": the last column says why"
        if alike := sum(map(self._keeps_no_less, self.changed)):
            total += f", {alike} of them without keeping less"
        if self.saved_before is not None and self.saved_after is not None:
            total += f"; saved for backward {_size(self.saved_before)} → {_size(self.saved_after)}"
        if self.lean is True and self.changed:
            total += "; the saving holds inside memkit.lean()"
        if not self.note and any(UNPROVEN in row.reason for row in self.rows):
            total += "; swap(model, sample=...) with a batch as the model takes it can prove more"
        return "\n".join([*table, total + (f"; {self.note}" if self.note else "")])

    __repr__ = __str__


def _change(row: Row) -> str:
    if row.bytes_before is None or row.bytes_after is None:
        return "-"
    return f"{_size(row.bytes_before)} → {_size(row.bytes_after)}"


def _sum(parts: Iterator[int | None]) -> int | None:
    counts = [part for part in parts if part is not None]
    return sum(counts) if counts else None

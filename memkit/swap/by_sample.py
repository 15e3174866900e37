"""Swaps a model by what a run of it on a sample shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from . import change
from .find import ON_REQUEST, OPS, Found, find
from .library import dropped, served
from .prove import prove
from .report import Row, SwapReport
from .sites import Decision, Decisions
from .trial import TOLERANCE, WIDER, Outcome, Trial, exact_convolutions
from .types import HALVES


def swap_by_sample(
    model: nn.Module, sample: Any, names: frozenset[str], exact: bool, lean: bool | str
) -> SwapReport:
    """Changes all that these names mean, if the model stays the one it was; else what of it can be changed together."""
    report, refusal = _tried_whole(model, sample, names, exact, lean)
    return _without_culprits(model, sample, names, exact, lean, report) if refusal else report


def _without_culprits(
    model: nn.Module, sample: Any, names: frozenset[str], exact: bool, lean: bool | str, whole: SwapReport
) -> SwapReport:
    """Of a model that was refused as a whole: by halves of the names, those with which it is not."""
    kept: frozenset[str] = frozenset()
    report, state = whole, change.undo(model)
    refused: dict[tuple[str, str, int], Row] = {}

    def extent(names: frozenset[str]) -> list[int]:
        return [len(part) for part in vars(find(model, names, exact, bool(lean))).values()]

    def are_taken(more: Sequence[str]) -> bool:
        nonlocal kept, report, state
        found, refusal = _tried_whole(model, sample, kept.union(more), exact, lean)
        done = change.undo(model)
        if not refusal:
            kept, report, state = kept.union(more), found, done
        elif len(more) == 1:
            refused.update(_by_place(found))
        return not refusal

    def take(more: Sequence[str]) -> None:
        """Of what is refused together."""
        half = len(more) // 2
        for part in (more[:half], more[half:]) if half else ():
            if not are_taken(part):
                take(part)

    if lean != "call" or are_taken(()):  # the model by itself, which asks for what is dropped
        every = extent(names)
        # In this order what changes with others comes after them: a batch norm after its activation.
        take([n for n in (*OPS, *ON_REQUEST) if n in names and extent(names - {n}) != every])
    change.redo(state)
    rows = _by_place(whole) | refused
    if report is not whole:
        rows |= _by_place(report)
    return replace(report, rows=tuple(rows.values()))


def _by_place(report: SwapReport) -> dict[tuple[str, str, int], Row]:
    """Of a place there may be several."""
    seen: Counter[tuple[str, str]] = Counter()
    found: dict[tuple[str, str, int], Row] = {}
    for row in report.rows:
        place = row.path, row.before
        found[row.path, row.before, seen[place]] = row
        seen[place] += 1
    return found


def _tried_whole(
    model: nn.Module, sample: Any, names: frozenset[str], exact: bool, lean: bool | str
) -> tuple[SwapReport, str]:
    """What was done, and why nothing was, where that has to do with all of it."""
    trial, found = Trial(model, sample), find(model, names, exact, bool(lean))
    decisions, dtypes, idle = prove(trial, found.sites, found.norms, exact, bool(lean))
    found.in_lean = [(module, twin) for module, twin in found.in_lean if module not in idle]
    changes = any(decision.proof for decision in decisions.values()) or found.changes_others
    if not changes and lean != "call":
        return SwapReport(found.rows(decisions)), ""
    # Elements dropped are not the same: compared without those dropouts, counted with them.
    dropouts = [site.module for site, d in decisions.items() if d.proof and "dropout" in site.name]

    def change_over() -> None:
        change.apply_all(trial.model, decisions, found, lean)
        trial.in_lean = lean is True  # with "call" the model is by itself

    def change_back() -> None:
        change.undo(trial.model)
        trial.in_lean = False

    stock = trial.run("stock", dropouts)
    before = trial.run("stock, with dropout").saved if dropouts else stock.saved
    served.difference_update(found.may_be_idle)
    swapped, error = _tried(trial, change_over, dropouts)
    if swapped is None:
        change_back()
        refusal = f"the swapped model raises on the sample: {error}"
        return SwapReport(_refused(decisions, found, refusal), before, before), refusal
    found.note_idle()
    dtypes = dtypes or {parameter.dtype for parameter in trial.model.parameters()}
    tolerance = max((TOLERANCE.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    note = "" if torch.is_grad_enabled() else "autograd was off, so gradients were not compared"
    if not (note or stock.gradients):
        note = "nothing requires a gradient, so no gradients were compared and nothing is saved"
    if not stock.has_finite_output:
        note = "each output on the sample holds NaN or infinity, so outputs were not compared"
    if not swapped.agrees_with(stock, tolerance):
        # Rounding may be what a model with kinks, or a norm over few values, makes much of. Then stock does it too.
        change_back()
        tolerance = _widened(trial, stock, dropouts, tolerance)
        change_over()
    narrow = _narrow(trial, dtypes)
    exact_alike = partial(_exact_alike, trial, stock, swapped, dropouts, narrow, change_over, change_back)
    if not swapped.agrees_with(stock, tolerance) and not (narrow in HALVES and exact_alike()):
        change_back()
        repeats = stock.agrees_with(trial.run("stock, again", dropouts), tolerance)
        # A kink that rounding crosses lies elsewhere on a sample whose numbers are a little others.
        nearby = 0.01, 0.02
        theirs = [_disturbed(trial, "stock, its sample changed", dropouts, x) for x in nearby if repeats]
        change_over()
        ours = [_disturbed(trial, "swapped, its sample changed", dropouts, x) for x in nearby if repeats]
        if not repeats:
            note = "stock does not repeat itself on the sample, so values were not compared"
        elif not (
            all(a and b and a.agrees_with(b, tolerance) for a, b in zip(ours, theirs, strict=True))
            or (narrow not in HALVES and exact_alike())
        ):
            change_back()
            refusal = "values or gradients of the swapped model differ on the sample"
            return SwapReport(_refused(decisions, found, refusal), before, before, note), refusal
    if found.heads and (why := _why_logits(trial, found, dropouts, tolerance)):
        change_back()
        found.keep_logits(why)
        change_over()
    after = swapped.saved
    if dropouts or found.dropouts:
        dropped.difference_update(found.dropouts)
        after = trial.run("swapped, with dropout", drops=True).saved
        found.note_dropped()
    if before is not None and after is not None and after > 1.02 * before:
        change_back()
        refusal = "swapped, the model would keep more on the sample"
        return SwapReport(_refused(decisions, found, refusal), before, before, note), refusal
    if found.heads:  # a long batch gains by that what a short one does not
        after = trial.run("swapped, without logits", drops=True, logits=False).saved
    return SwapReport(found.rows(decisions), before, after, note), ""


def _why_logits(trial: Trial, found: Found, dropouts: Sequence[nn.Module], tolerance: float) -> str:
    """Why a language model goes on returning them; nothing if its loss and gradients are the same without."""
    served.difference_update(found.heads)
    trial.but_logits = True
    try:
        kept = trial.run("swapped, logits not compared", dropouts)
        without = trial.run("swapped, without logits", dropouts, logits=False)
    except Exception as error:
        return f"without logits the model raises on the sample: {type(error).__name__}: {error}"
    finally:
        trial.but_logits = False
    if not (served.issuperset(found.heads) and kept.gradients):
        return "on the sample, no step of training with labels"
    return (
        ""
        if without.agrees_with(kept, tolerance)
        else "without logits, values or gradients differ on the sample"
    )


def _tried(
    trial: Trial, change_over: Callable[[], None], dropouts: Sequence[nn.Module]
) -> tuple[Outcome | None, str]:
    """The outcome of the swapped model, or what it raises, which stock did not."""
    change_over()
    try:
        return trial.run("swapped", dropouts), ""
    except Exception as error:
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _disturbed(trial: Trial, phase: str, dropouts: Sequence[nn.Module], noise: float) -> Outcome | None:
    """Nothing where the model takes no other numbers."""
    try:
        return trial.run(phase, dropouts, noise)
    except Exception:
        return None


def _widened(trial: Trial, stock: Outcome, dropouts: Sequence[nn.Module], tolerance: float) -> float:
    """For what the stock model makes of rounding alone, up to a bound."""
    for noise in (1e-3 * tolerance, 1e-2 * tolerance):
        rounded = _disturbed(trial, "stock, its sample rounded", dropouts, noise)
        while rounded and not rounded.agrees_with(stock, tolerance / 2) and tolerance < 0.25:
            tolerance *= 2
    return tolerance


def _narrow(trial: Trial, dtypes: Collection[torch.dtype]) -> torch.dtype | None:
    """The dtype that the model computes in, or of several the one that rounds most; None where there is no wider one."""
    device = trial.device().type
    if torch.is_autocast_enabled(device):
        dtypes = {torch.get_autocast_dtype(device)}
    return max((dtype for dtype in dtypes if dtype in WIDER), key=TOLERANCE.__getitem__, default=None)


def _exact_alike(
    trial: Trial,
    stock: Outcome,
    swapped: Outcome,
    dropouts: Sequence[nn.Module],
    narrow: torch.dtype | None,
    change_over: Callable[[], None],
    change_back: Callable[[], None],
) -> bool:
    """Whether a model whose dtype leaves nothing of its gradients to compare (in half precision a deep network with batch
    norms, as it is initialised; in float32 one with norms over two values) agrees with the stock one in a wider one, and
    has none that is farther from that than twice as far as the stock one's, whose sample is rounded in several ways."""
    if narrow is None:
        return False
    wide, device = WIDER[narrow], trial.device().type
    tolerance = TOLERANCE[wide]
    rounded = [stock]
    try:
        exact = trial.widened(wide)
        if exact is None:
            return False
        with torch.autocast(device, enabled=False), exact_convolutions(trial.device()):
            ours = exact.run(f"swapped, in {wide}", dropouts)
        change_back()
        for share in (0.01, 0.02, 0.04):
            rounded.append(trial.run("stock, its sample rounded", dropouts, noise=share * TOLERANCE[narrow]))
        change.undo(exact.model)
        exact.in_lean = False
        with torch.autocast(device, enabled=False), exact_convolutions(trial.device()):
            theirs = exact.run(f"stock, in {wide}", dropouts)
            if not ours.agrees_with(theirs, tolerance):
                tolerance = _widened(exact, theirs, dropouts, tolerance)
    except Exception:  # it needs the dtype that it has, or more memory than there is
        return False
    finally:
        change_back()
        change_over()
    return ours.agrees_with(theirs, tolerance) and swapped.is_as_near(rounded, theirs, TOLERANCE[narrow])


def _refused(decisions: Decisions, found: Found, reason: str) -> tuple[Row, ...]:
    """For all that would have been changed."""
    found.others = [
        replace(row, after="unchanged", reason=reason) if row.changed else row for row in found.others
    ]
    return found.rows(
        {
            site: Decision(None, reason if d.proof else d.reason, d.bytes_before, d.bytes_before)
            for site, d in decisions.items()
        }
    )

"""The README's short table of single parts: what each takes of stock's time and memory, from the newest results."""

from __future__ import annotations

import statistics
from typing import Any

Result = dict[str, Any]
COLUMNS = ("", "time to stock's", "memory to stock's")


def rows(
    activation: Result | None, loss: Result | None, optim: Result | None, pool: Result | None
) -> list[list[str]]:
    """Of the parts that were measured on a device."""
    found: list[list[str]] = []
    if activation:
        found += _activations(activation["cases"])
    if loss:
        case = max(loss["linear"], key=lambda each: (each["classes"], each["dtype"] == "float32"))
        peak = case["peak"]
        name = f"`linear_cross_entropy`, {case['rows']:,} rows, {case['classes']:,} classes, {case['dtype']}"
        found.append(_row(name, case["ratio"]["memkit"], peak["memkit"] / peak["stock"]))
    if optim:
        case = next(each for each in optim["steps"] if each["rule"] == "adamw")
        state = case["state_bytes"]
        for name, text in {"memkit": "", "memkit 8bit": ', `state_dtype="8bit"`'}.items():
            text = f"`memkit.optim.AdamW`{text}, to the fused one; its state"
            found.append(_row(text, case["ratio"][name], state[name] / state["fused"]))
    if pool:
        for case in pool["calls"]:
            if case["case"] in ("make and drop 4 KiB", "make, fill and drop 64 MiB"):
                found.append(_row(f"pool: {case['case']}", case["ratio"]["pool"]))
        name, step = "pool.use()", pool["step"]
        if name in step["ratio"]:
            memory = step["reserved_bytes"]
            text = "a training step of the gpt in `pool.use()`, what it reserves"
            known = memory[name] and memory["stock"]  # not in a short run
            share = memory[name] / memory["stock"] if known else None
            found.append(_row(text, step["ratio"][name], share))
    return found


def _activations(cases: list[Result]) -> list[list[str]]:
    """The geometric mean over functions, dtypes and sizes."""
    found = []
    for mode in ("forward", "forward+backward"):
        for contender, text in {"memkit": "", "memkit_inplace": " in place"}.items():
            ratios = [
                each["ratio"][contender]
                for each in cases
                if each["mode"] == mode and contender in each["ratio"]
            ]
            if ratios:
                mean = statistics.geometric_mean(ratios)
                found.append(_row(f"activations{text}, {mode}, geometric mean of {len(ratios)} cases", mean))
    return found


def _row(name: str, time: float, memory: float | None = None) -> list[str]:
    return [name, f"{time:.2f}×", "" if memory is None else f"{memory:.2f}×"]

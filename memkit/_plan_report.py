"""`memkit plan show`: plans as text and as a picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ._pool_text import count_text
from .bench.report import size, text_table
from .plan import Plan, Plans

WIDTH = 100  # of a signature, in characters


def load(path: Path) -> list[Plan]:
    """The plans of a file, whether of `Plan.save` or of `Plans.save`."""
    try:
        several = json.loads(path.read_bytes()).get("kind") == "memkit-plans"
    except (ValueError, AttributeError, RecursionError):
        several = False  # Plan.load says what is wrong
    return list(Plans.load(path).values()) if several else [Plan.load(path)]


def summary(plan: Plan) -> str:
    signature = json.dumps(plan.signature, ensure_ascii=False)
    if len(signature) > WIDTH:
        signature = signature[: WIDTH - 1] + "…"
    proven = " (no plan is lower)" if plan.optimal else ""
    lines = {
        "signature": signature,
        "buffers": f"{len(plan.buffers)}, aligned to {plan.alignment} B",
        "bound": f"{_exact(plan.lower_bound)}, the most alive at once",
        "size": _exact(plan.height),
        "gap": f"{plan.gap:.2%}{proven}",
        "method": plan.method,
        "made by": f"memkit {plan.memkit}, torch {plan.torch}",
    }
    return "\n".join(f"{name:<10} {line}" for name, line in lines.items())


def text(plan: Plan, biggest: int = 10) -> str:
    """The summary and a table of the biggest buffers, in the order of the plan's allocations within a size."""
    order = sorted(range(len(plan.buffers)), key=lambda i: -plan.buffers[i].size)[: max(biggest, 0)]
    body = [
        [str(i), size(b.size), str(plan.offsets[i]), f"[{b.lower}, {b.upper})"]
        for i, b in ((i, plan.buffers[i]) for i in order)
    ]
    table = text_table(("buffer", "size", "offset", "alive"), body)
    return f"{summary(plan)}\n\n{table}" if body else summary(plan)


def draw(plans: Sequence[Plan], path: Path) -> None:
    """A panel for each plan: buffers as boxes, time to the right, addresses upwards; the bytes alive as a line."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure

    # Without pyplot: no display is asked for and no global state is left behind.
    figure = Figure(figsize=(10, 5.5 * max(len(plans), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    colours = [colormaps["tab20"](i) for i in range(20)]
    for axes, plan in zip(figure.subplots(max(len(plans), 1), squeeze=False)[:, 0], plans, strict=False):
        boxes, fills = [], []
        for i, (b, offset) in enumerate(zip(plan.buffers, plan.offsets, strict=True)):
            low, high = offset / 2**20, (offset + b.size) / 2**20
            boxes.append([(b.lower, low), (b.upper, low), (b.upper, high), (b.lower, high)])
            fills.append(colours[i % len(colours)])
        axes.add_collection(PolyCollection(boxes, facecolors=fills, edgecolors="#00000060", linewidths=0.2))
        times, alive = _alive(plan)
        axes.plot(times, alive, color="black", linewidth=1, drawstyle="steps-post", label="alive")
        axes.axhline(
            plan.lower_bound / 2**20, color="#d62728", linewidth=1, linestyle="--", label="most alive at once"
        )
        axes.set_xlim(min(times, default=0), max(max(times, default=1), min(times, default=0) + 1))
        axes.set_ylim(0, max(plan.height, 1) / 2**20 * 1.04)
        axes.set_title(
            f"{count_text(len(plan.buffers), 'buffer')} in {size(plan.height)}, gap {plan.gap:.2%}"
        )
        axes.set_xlabel("time: allocations and releases")
        axes.set_ylabel("address, MiB")
        axes.legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=120, format="png", metadata={"Software": "memkit"})


def _alive(plan: Plan) -> tuple[list[int], list[float]]:
    changes: dict[int, int] = {}
    for b in plan.buffers:
        changes[b.lower] = changes.get(b.lower, 0) + b.size
        changes[b.upper] = changes.get(b.upper, 0) - b.size
    times, alive, live = sorted(changes), [], 0
    for time in times:
        live += changes[time]
        alive.append(live / 2**20)
    return times, alive


def _exact(count: int) -> str:
    return f"{size(count)} ({count} B)" if count >= 1024 else size(count)

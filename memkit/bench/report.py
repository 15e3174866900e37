"""The benchmark's results as a table, a plot and a JSON file, from nothing but the results."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

KIND = "memkit-bench"
FORMAT = 1

COLUMNS = (
    "model",
    "variant",
    "peak of a step",
    "saved for backward",
    "step time",
    "final loss",
    "max loss difference",
    "accuracy",
    "inference peak",
    "inference time",
)
LABELS = {"eager": "stock eager", "compile": "torch.compile", "memkit": "memkit"}
POOLED = {"use": "memkit in a pool", "plan": "memkit by a plan"}
COLOURS = {"eager": "#7f7f7f", "compile": "#1f77b4", "memkit": "#d62728"}


def rows(result: dict[str, Any]) -> list[list[str]]:
    """The one table: a row for each model and variant, in COLUMNS."""
    table = []
    for model, found in result["models"].items():
        reference = found["variants"]["eager"]
        masked = _with_other_masks(result, model)
        for name, variant in found["variants"].items():
            head = [model, label(name, variant)]
            if "error" in variant:
                table.append([*head, f"did not run: {variant['error']}", *[""] * (len(COLUMNS) - 3)])
                continue
            inference = variant["inference"]
            table.append(
                [
                    *head,
                    _bytes(variant["peak_bytes"], reference["peak_bytes"]),
                    _bytes(variant["saved_bytes"], reference["saved_bytes"]),
                    f"{variant['step']['ratio']:.2f}×",
                    f"{variant['loss_final']:.4f}",
                    _difference(variant["loss_max_difference"], name in masked),
                    f"{variant['accuracy']:.1%}" if "accuracy" in variant else "",
                    _bytes(inference["peak_bytes"], reference["inference"]["peak_bytes"]),
                    f"{inference['ratio']:.2f}×",
                ]
            )
    return table


def _difference(loss: float, masked: bool) -> str:
    text = f"{loss:.1e}" if loss else "0"
    return f"{text} (other dropout masks)" if masked else text


def _with_other_masks(result: dict[str, Any], model: str) -> list[str]:
    """The variants whose dropout drops other elements than stock's."""
    options = result["options"]
    ingredients = options["ingredients"]
    if model != "gpt" or not options.get("dropout") or "dropouts" not in ingredients:
        return []
    names = [name for name in result["models"][model]["variants"] if name not in ("eager", "compile")]
    return names[ingredients.index("dropouts") :] if options.get("ablation") else names


def label(name: str, variant: dict[str, Any]) -> str:
    return POOLED[variant["pool"]["how"]] if "pool" in variant else LABELS.get(name, name)


def text_table(columns: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell. A cell with only empty ones behind it may run over them."""
    widths = [len(column) for column in columns]
    for row in body:
        reason = next((i for i in range(len(row)) if row[i] and not any(row[i + 1 :])), None)
        for i, cell in enumerate(row):
            if i != reason or i == len(row) - 1:
                widths[i] = max(widths[i], len(cell))
    lines = [columns, ["-" * width for width in widths], *body]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def markdown_table(columns: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in body]
    lines = [list(columns), ["---"] * len(columns), *escaped]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def origin(result: dict[str, Any]) -> str:
    """One sentence: hardware, versions, date, commit."""
    hardware, versions = result["hardware"], result["versions"]
    vectors = f" ({hardware['vectors']})" if "vectors" in hardware else ""
    where = f"{hardware['cpu']}{vectors}, {hardware['threads']} threads"
    if hardware["device"] == "cuda":
        where = f"{hardware['gpu']} (CUDA {versions['cuda']}), {where}"
    commit = result.get("commit")
    made = f", commit {commit[:10]}{'-dirty' if commit.endswith('-dirty') else ''}" if commit else ""
    return (
        f"{where}, {hardware['system']}; PyTorch {versions['torch']}, Python {versions['python']}, "
        f"memkit {versions['memkit']}; {result['date'][:10]}{made}."
    )


def conditions(result: dict[str, Any]) -> str:
    """What was trained and how to read the table."""
    options = result["options"]
    parts = []
    for model, found in result["models"].items():
        shape = "×".join(map(str, found["input_shape"]))
        parts.append(
            f"{model}: {found['parameters'] / 1e6:.1f} M parameters, batch {shape}, {found['steps']} steps"
        )
        memkit = found["variants"].get("memkit", {})
        swap = memkit.get("swap")
        if swap:
            parts[-1] += f", {swap['changed']} of {len(swap['rows'])} layers swapped"
        if "pool" in memkit:
            parts[-1] += f", {_pool(memkit['pool'])}"
    precision = f"{options['dtype']}{' autocast' if options['amp'] else ''}"
    return (
        f"{'; '.join(parts)}; {precision}, seed {options['seed']}. Bytes are above the start of the step "
        "(weights and optimizer state not counted); saved for backward is what the forward keeps, parameters "
        "not counted. Times are ratios to stock eager: the median over interleaved warm steps of a round's "
        f"own ratio.{_compiled(result)}{_masks(result)}"
    )


def _compiled(result: dict[str, Any]) -> str:
    if not any("compile" in found["variants"] for found in result["models"].values()):
        return ""
    return (
        " torch.compile draws PyTorch's dropout masks (fallback_random), hence the same; its compilation is not in the "
        "step time."
    )


def _masks(result: dict[str, Any]) -> str:
    """What a difference of losses means where memkit draws masks."""
    if not any(_with_other_masks(result, model) for model in result["models"]):
        return ""
    return (
        f" The gpt drops {result['options']['dropout']:.0%}, and memkit's dropout draws masks of its own: so its losses "
        "differ as stock's do under another seed of its masks; --dropout 0 compares them step by step."
    )


def full_text(result: dict[str, Any]) -> str:
    return "\n\n".join([text_table(COLUMNS, rows(result)), conditions(result), origin(result)])


def plot(result: dict[str, Any], path: Path) -> None:
    """Memory over one training step, a panel for each model, a line for each variant."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # Without pyplot: no display is asked for and no global state is left behind.
    found = result["models"]
    figure = Figure(figsize=(6.5 * len(found), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (model, measured) in zip(
        figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True
    ):
        for name, variant in measured["variants"].items():
            if "error" in variant:
                continue
            # Each over its own length: step times stand in the table, shapes are to be compared here.
            length = max(variant["timeline"][-1][0], 1e-9)
            share = [100 * seconds / length for seconds, _ in variant["timeline"]]
            mib = [above / 2**20 for _, above in variant["timeline"]]
            text = f"{label(name, variant)}, peak {size(variant['peak_bytes'])}"
            axes.plot(share, mib, label=text, color=COLOURS.get(name), linewidth=1.4, drawstyle="steps-post")
        axes.set_title(model)
        axes.set_xlabel("one training step, % of its time")
        axes.set_ylabel("MiB above its start")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower center", fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, metadata={"Software": "memkit"})


def write_json(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, ensure_ascii=False)
    # A list of numbers on one line: a file that can be read, and compared line by line.
    text = re.sub(r"\[([\s\d.,eE+-]+)\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)
    path.write_text(text + "\n", encoding="utf-8")


def size(count: float) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count:.0f} B"


def _pool(pool: dict[str, Any]) -> str:
    if pool["how"] == "use":
        return f"memkit's steps run inside pool.use(), with {size(pool['reserved_bytes'])} in the pool"
    served = pool["served"] / max(1, pool["served"] + pool["fell_back"])
    return (
        f"memkit's steps run inside pool.replay(): {served:.1%} of their allocations get their places from a plan of "
        f"{pool['planned']:,} in {size(pool['height_bytes'])}, {pool['gap']:.2%} above what is alive at most"
    )


def _bytes(count: int, reference: int) -> str:
    if count == reference or not reference:
        return size(count)
    return f"{size(count)} ({(count - reference) / reference:+.0%})"

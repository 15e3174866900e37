"""Writes the tables of README.md from the results files: nothing in them is typed by hand.

    memkit bench --json benchmarks/results/bench-cpu.json
    python benchmarks/bench_activation.py --json
    python benchmarks/report.py                 # fills README.md; --check only says whether it is up to date

A table stands between `<!-- table:NAME -->` and `<!-- /table:NAME -->`; TABLES lists the names. The newest
results file of a kind and device counts.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memkit.bench import report

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BENCH, ACTIVATION = report.KIND, "memkit-activation"

Result = dict[str, Any]
Results = dict[tuple[str, str], Result]  # (kind, device) -> the newest

CONTENDERS = {
    "memkit": "memkit",
    "memkit_inplace": "memkit in place",
    "reused": "stock, output reused",
    "compiled": "torch.compile",
}

# What is built, the tests that cover it on the CPU, its CUDA kernels (None: Python over both), and the
# benchmark that runs it on a GPU.
FEATURES = (
    ("activations and `bias_act`", "tests/test_activation.py", "csrc/cuda/activation_forward.cu", ACTIVATION),
    ("`memkit.nn`, `memkit.swap`", "tests/test_swap.py", None, BENCH),
    ("`memkit.Pool`", "tests/test_pool.py", "csrc/torch/pool_cuda.cpp", "memkit-pool"),
    ("`memkit.memory`", "tests/test_memory.py", None, BENCH),
    ("`memkit bench`", "tests/test_bench.py", None, BENCH),
)


class ReportError(Exception):
    pass


def load(folder: Path) -> Results:
    found: Results = {}
    for file in sorted(folder.glob("*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        key = (result["kind"], result["hardware"]["device"])
        if key not in found or result["date"] > found[key]["date"]:
            found[key] = result
    return found


def of_kind(results: Results, kind: str) -> list[Result]:
    """CPU first, then CUDA."""
    found = [results[key] for key in sorted(results) if key[0] == kind]
    if not found:
        raise ReportError(f"report: expected a results file of kind {kind} in {RESULTS.name}/, got none")
    return found


def bench_table(results: Results) -> str:
    parts = []
    for result in of_kind(results, BENCH):
        table = report.markdown_table(report.COLUMNS, report.rows(result))
        parts += [table, report.conditions(result), report.origin(result)]
    return "\n\n".join(parts)


def activation_table(results: Results) -> str:
    """A row for each op: its geometric mean over sizes and dtypes."""
    return _condensed(results, "op", lambda case: f"`{case['op']}`")


def sizes_table(results: Results) -> str:
    """A row for each dtype and size: the geometric mean over the ops."""
    return _condensed(results, "elements", lambda case: f"{case['dtype']}, {case['size']}")


def overhead_table(results: Results) -> str:
    """Nanoseconds a call on 8 elements, the median over the ops."""
    parts = []
    columns = ["", "stock", "memkit", "stock in place", "memkit in place"]
    for result in of_kind(results, ACTIVATION):
        body = []
        for grad in (False, True):
            rows = [row["nanoseconds"] for row in result["overhead"] if row["grad"] is grad]
            cells = []
            for name in ("stock", "memkit", "stock_inplace", "memkit_inplace"):
                known = [ns[name] for ns in rows if name in ns]
                cells.append(f"{statistics.median(known):.0f} ns" if known else "")
            body.append([f"{'with' if grad else 'without'} grad", *cells])
        text = "A call on 8 elements, the median over the activations."
        parts += [report.markdown_table(columns, body), f"{text} {report.origin(result)}"]
    return "\n\n".join(parts)


def support_table(results: Results) -> str:
    body = []
    for name, tests, kernels, kind in FEATURES:
        if not (ROOT / tests).exists():
            continue
        gpu = results.get((kind, "cuda"))
        if gpu:
            cuda = f"run on {gpu['hardware']['gpu']}, {gpu['date'][:10]}"
        elif kernels is None:
            cuda = "not yet run on a GPU"
        elif (ROOT / kernels).exists():
            cuda = "compiled, not yet run on a GPU"
        else:
            cuda = "no"
        body.append([name, "tested", cuda])
    return report.markdown_table(["", "CPU", "CUDA"], body)


TABLES: dict[str, Callable[[Results], str]] = {
    "bench": bench_table,
    "activation": activation_table,
    "activation-sizes": sizes_table,
    "overhead": overhead_table,
    "support": support_table,
}


def _condensed(results: Results, head: str, label: Callable[[Result], str]) -> str:
    parts = []
    for result in of_kind(results, ACTIVATION):
        modes = list(dict.fromkeys(case["mode"] for case in result["cases"]))
        columns = [head, *(f"{mode}: {text}" for mode in modes for text in CONTENDERS.values())]
        groups: dict[str, list[Result]] = {}
        for case in result["cases"]:
            groups.setdefault(label(case), []).append(case)
        body = []
        for name, cases in groups.items():
            row = [name]
            for mode in modes:
                for contender in CONTENDERS:
                    chosen = [c["ratio"] for c in cases if c["mode"] == mode and contender in c["ratio"]]
                    mean = statistics.geometric_mean([each[contender] for each in chosen]) if chosen else None
                    row.append(f"{mean:.2f}×" if mean else "")
            body.append(row)
        options = result["options"]
        over = f"Sizes {', '.join(options['sizes'])}; {', '.join(options['dtypes'])}; torch.compile "
        over += "for each size." if options["static"] else "once for all sizes (dynamic=True)."
        text = f"Time as a ratio to stock eager, the geometric mean over a row's cases. {over}"
        parts += [report.markdown_table(columns, body), f"{text} {report.origin(result)}"]
    return "\n\n".join(parts)


def render(text: str, results: Results) -> str:
    """`text` with every marked table rewritten; rendering twice changes nothing."""
    marks = re.findall(r"<!-- (/?)table:([\w-]+) -->", text)
    opened, closed = marks[::2], marks[1::2]
    if [("/", name) for _, name in opened] != closed or any(slash for slash, _ in opened):
        raise ReportError(f"report: expected every table mark closed before the next, got {marks}")

    def filled(match: re.Match[str]) -> str:
        name = match[1]
        if name not in TABLES:
            raise ReportError(f"report: expected a table of {', '.join(TABLES)}, got {name}")
        return f"<!-- table:{name} -->\n{TABLES[name](results)}\n<!-- /table:{name} -->"

    return re.sub(r"<!-- table:([\w-]+) -->.*?<!-- /table:\1 -->", filled, text, flags=re.DOTALL)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", nargs="?", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the tables are not up to date"
    )
    args = parser.parse_args(argv)
    results = load(args.results)
    before = args.file.read_text(encoding="utf-8")
    try:
        after = render(before, results)
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    if args.check:
        if before != after:
            print(
                f"report: {args.file.name} is not up to date; run: python benchmarks/report.py",
                file=sys.stderr,
            )
        return int(before != after)
    args.file.write_text(after, encoding="utf-8")
    for (kind, device), result in results.items():
        if kind == BENCH:
            report.plot(result, args.results / f"bench-{device}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())

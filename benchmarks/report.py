"""Writes the tables of README.md and docs/benchmarks.md from the results files: nothing in them is typed by hand.

    memkit bench --json benchmarks/results/bench-cpu.json
    memkit bench --ablation --variants eager,memkit --json benchmarks/results/ablation-cpu.json
    memkit bench --model gpt --dropout 0 --variants eager,memkit --json benchmarks/results/nodropout-cpu.json
    python benchmarks/bench_activation.py --json
    python benchmarks/bench_ops.py --json
    python benchmarks/bench_loss.py --json
    python benchmarks/bench_peers.py --json
    python benchmarks/bench_pool.py --json
    python benchmarks/bench_optim.py --json
    python benchmarks/bench_models.py --json
    python benchmarks/bench_matrix.py --json
    python benchmarks/bench_steps.py --json
    python benchmarks/report.py                 # fills both; --check only says whether they are up to date

A table stands between `<!-- table:NAME -->` and `<!-- /table:NAME -->`; TABLES lists the names. The newest
results file of a kind and device counts, unless it was interrupted (of the operators, what was measured counts).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from common import RESULTS
from tables import ABLATION, BENCH, LARGE, NO_DROPOUT, OPS, ROOT, TABLES, ReportError, Results

from memkit.bench import report

PAGES = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md"]
LARGE_LAYERS = 24


def load(folder: Path) -> Results:
    found: Results = {}
    for file in sorted(folder.glob("*.json")):
        content = json.loads(file.read_text(encoding="utf-8"))
        for result in content if isinstance(content, list) else [content]:
            kind = result["kind"]
            if result.get("interrupted") and kind != OPS:
                continue
            if kind == BENCH and result["options"].get("ablation"):
                kind = ABLATION
            elif kind == BENCH and result["options"].get("dropout") == 0:
                kind = NO_DROPOUT
            elif kind == BENCH and result["options"].get("layers", 0) >= LARGE_LAYERS:
                kind = LARGE
            key = (kind, result["hardware"]["device"])
            if key not in found or result["date"] > found[key]["date"]:
                found[key] = result
    return found


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
    parser.add_argument("files", nargs="*", type=Path, default=PAGES, metavar="FILE")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if the tables are not up to date"
    )
    args = parser.parse_args(argv)
    results = load(args.results)
    before = {file: file.read_text(encoding="utf-8") for file in args.files}
    try:
        after = {file: render(text, results) for file, text in before.items()}
    except ReportError as error:
        print(error, file=sys.stderr)
        return 2
    if args.check:
        stale = [file.name for file in args.files if before[file] != after[file]]
        if stale:
            print(
                f"report: {' and '.join(stale)} not up to date; run: python benchmarks/report.py",
                file=sys.stderr,
            )
        return int(bool(stale))
    for file, text in after.items():
        file.write_text(text, encoding="utf-8")
    for (kind, device), result in results.items():
        if kind == BENCH:
            report.plot(result, args.results / f"bench-{device}.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())

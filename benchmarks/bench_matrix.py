"""Swapped models beside what people run: AMP, checkpoints, torch.compile, torch.export, and engines of several processes.

    python benchmarks/bench_matrix.py                    # every model; up to an hour on two cores that are busy
    python benchmarks/bench_matrix.py --models llama --columns AMP,compile
    python benchmarks/bench_matrix.py --json             # into benchmarks/results/matrix-cpu.json, cell by cell
    python benchmarks/bench_matrix.py --json --resume    # only the cells that the file lacks

A cell passes where loss and gradients of the swapped model, `swap(model, sample=batch, lean="call")`, are those of the stock
model under the same engine: to 2e-3 (0.1 under bfloat16's autocast), or twice as far as stock's own are apart where images
are rounded otherwise. Else it has the error, and says where stock fails too. Models are those of memkit.bench.zoo with two
layers. compile is fullgraph with the backend "aot_eager"; export is of the forward in evaluation; the engines run in two
processes over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from common import RESULTS
from matrix import COLUMNS
from matrix.cells import FAILS, NOTHING, PASSES, STOCK_TOO, row

from memkit.bench import machine
from memkit.bench.report import origin, text_table, write_json
from memkit.bench.zoo import ZOO

KIND = "memkit-matrix"
FORMAT = 1
MARKS = {PASSES: "✓", FAILS: "✗", STOCK_TOO: "stock ✗", NOTHING: "–"}
os.environ.setdefault("DS_ACCELERATOR", "cpu")
NEEDS = {"FairScale": "fairscale", "DeepSpeed ZeRO 1": "deepspeed", "DeepSpeed ZeRO 3": "deepspeed"}
LIBRARIES = ("transformers", "timm", "torchvision", "diffusers", "deepspeed", "fairscale")


def run(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"kind": KIND, "format": FORMAT, **machine.stamp("cpu"), "cells": {}}
    before = json.loads(args.json.read_text()) if args.json and args.json.exists() else {"cells": {}}
    for library in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            result["versions"][library] = importlib.metadata.version(library)
    kept: dict[str, dict[str, Any]] = before["cells"]
    result["cells"] = {name: dict(kept.get(name, {})) for name in ZOO if name in kept or name in args.models}
    lock, begin = threading.Lock(), time.monotonic()

    def one(name: str) -> None:
        cells = result["cells"][name]
        wanted = [each for each in args.columns if not (args.resume and each in cells)]
        row(name, wanted, lambda column, cell: tell(name, column, cell))

    def tell(name: str, column: str, cell: dict[str, Any]) -> None:
        with lock:
            cells = result["cells"][name] | {column: cell}
            result["cells"][name] = {each: cells[each] for each in COLUMNS if each in cells}
            word = f"{cell['state']} {cell['reason']}".rstrip()
            clock = f"{time.monotonic() - begin:5.0f} s"
            print(f"{clock}  {name}, {column}: {word} ({cell['seconds']:.0f} s)", file=sys.stderr, flush=True)
            if args.json:
                write_json(result, args.json)

    preload = ["torch", "memkit", "matrix.cells", *LIBRARIES, "transformers.models.llama.modeling_llama"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    with ThreadPoolExecutor(args.jobs) as pool:
        rows = [pool.submit(one, name) for name in args.models]
        try:
            for each in rows:
                each.result()
        except KeyboardInterrupt:
            with lock:  # the file is whole; processes end when they find nobody to answer to
                os._exit(130)
    return result


def columns_of(result: dict[str, Any]) -> list[str]:
    return [column for column in COLUMNS if any(column in cells for cells in result["cells"].values())]


def table(result: dict[str, Any]) -> str:
    columns = columns_of(result)
    body = [
        [name, *(MARKS[cells[column]["state"]] if column in cells else "" for column in columns)]
        for name, cells in result["cells"].items()
    ]
    return text_table(["model", *columns], body)


def reasons(result: dict[str, Any]) -> list[str]:
    return [
        f"{name}, {column}: {cell['state']}: {cell['reason']}"
        for name, cells in result["cells"].items()
        for column, cell in cells.items()
        if cell["reason"]
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", metavar="A,B", help=f"of {', '.join(ZOO)} (default: all)")
    parser.add_argument("--columns", metavar="A,B", help=f"of {', '.join(COLUMNS)} (default: all installed)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count(), help="models at a time (default: a core each)"
    )
    parser.add_argument(
        "--json", nargs="?", const="", metavar="FILE", help="default: results/matrix-cpu.json"
    )
    parser.add_argument("--resume", action="store_true", help="run only the cells that the file lacks")
    args = parser.parse_args(argv)
    installed = [name for name in COLUMNS if name not in NEEDS or importlib.util.find_spec(NEEDS[name])]
    for option, known, default in (("models", ZOO, list(ZOO)), ("columns", COLUMNS, installed)):
        text = getattr(args, option)
        chosen = [each.strip() for each in text.split(",")] if text else default
        if unknown := set(chosen) - set(known):
            parser.error(f"--{option}: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
        setattr(args, option, chosen)
    if args.json is not None:
        args.json = Path(args.json) if args.json else RESULTS / "matrix-cpu.json"
    result = run(args)
    print(table(result), origin(result), "\n".join(reasons(result)), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The pool against stock PyTorch on the CPU: what a tensor costs to make and drop, and what its first use costs.

    python benchmarks/bench_pool.py
    python benchmarks/bench_pool.py --json      # benchmarks/results/pool-cpu.json

Each row's contenders take turns; ratios are the median of each round's own ratio to stock.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import memkit
from memkit.bench import machine
from memkit.bench.report import origin, text_table, write_json
from memkit.bench.timing import interleave, ratio

KIND = "memkit-pool"
FORMAT = 1
RESULTS = Path(__file__).resolve().parent / "results"

CASES = {  # name: (statements a sample, contenders as statements, stock first)
    "make and drop 4 KiB": (
        20_000,
        {"stock": "torch_empty(1024)", "pool": "pool_empty(1024)", "pool, registered op": "pool_op(1024)"},
    ),
    "make and drop 4 KiB bfloat16": (
        20_000,
        {"stock": "torch_empty(2048, dtype=bfloat16)", "pool": "pool_empty(2048, dtype=bfloat16)"},
    ),
    "100 times 4 KiB": (
        200,
        {
            "stock": "for _ in hundred: torch_empty(1024)",
            "pool": "for _ in hundred: pool_empty(1024)",
            "pool, in a scope": "with pool.scope():\n for _ in hundred: pool_empty(1024)",
            "stock, in use()": "with pool.use():\n for _ in hundred: torch_empty(1024)",
        },
    ),
    "make, fill and drop 1 MiB": (
        32,
        {
            "stock": "torch_empty(1 << 18).fill_(1)",
            "pool": "pool_empty(1 << 18).fill_(1)",
            "stock, reused": "small.fill_(1)",
        },
    ),
    "make, fill and drop 64 MiB": (
        1,
        {
            "stock": "torch_empty(1 << 24).fill_(1)",
            "pool": "pool_empty(1 << 24).fill_(1)",
            "stock, reused": "large.fill_(1)",
        },
    ),
}


def timer(statement: str, calls: int, names: dict[str, Any]) -> Callable[[], float]:
    """Seconds of one run of the statement, over a loop without a function call of its own."""
    loop = timeit.Timer(statement, globals=names)
    return lambda: loop.timeit(calls) / calls


def run(rounds: int) -> dict[str, Any]:
    result: dict[str, Any] = {"kind": KIND, "format": FORMAT, **machine.stamp("cpu"), "cases": []}
    pool = memkit.Pool("256MiB")
    names = {
        "torch_empty": torch.empty,
        "bfloat16": torch.bfloat16,
        "pool": pool,
        "pool_empty": pool.empty,
        "pool_op": pool._core.functions()[2],
        "hundred": range(100),
        "small": torch.empty(1 << 18),
        "large": torch.empty(1 << 24),
    }
    for name, (calls, contenders) in CASES.items():
        timers = {each: timer(statement, calls, names) for each, statement in contenders.items()}
        times = interleave(timers, rounds)
        result["cases"].append(
            {
                "case": name,
                "rounds": rounds,
                "seconds": {each: statistics.median(taken) for each, taken in times.items()},
                "ratio": {each: ratio(taken, times["stock"]) for each, taken in times.items()},
            }
        )
    pool.check()
    return result


def table(result: dict[str, Any]) -> str:
    body = [
        [case["case"] if each == "stock" else "", each, f"{seconds * 1e6:.2f}", f"{case['ratio'][each]:.3f}×"]
        for case in result["cases"]
        for each, seconds in case["seconds"].items()
    ]
    return text_table(["case", "contender", "µs", "to stock"], body)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="default: results/pool-cpu.json")
    args = parser.parse_args(argv)
    result = run(args.rounds)
    print(table(result), origin(result), sep="\n\n")
    if args.json is not None:
        file = Path(args.json) if args.json else RESULTS / "pool-cpu.json"
        write_json(result, file)
        print(f"wrote {file.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The pool against stock PyTorch: what a tensor costs to make and drop, what its first use costs, what a training step
takes in time and in memory (pool_step.py); on the CPU also how the core's cost grows with holes and live blocks, and how
good plans are.

    python benchmarks/bench_pool.py
    python benchmarks/bench_pool.py --json      # benchmarks/results/pool-cpu.json, or pool-cuda.json on a GPU
    python benchmarks/bench_pool.py --parts calls,plans --device cpu

The core is measured by a C++ program, benchmarks/arena/bench_arena.cpp, which needs make and a C++ compiler.

Each row's contenders take turns; ratios are the median of each round's own ratio to stock.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pool_step
import torch

import memkit
from memkit.bench import machine
from memkit.bench.options import BATCH, MODELS
from memkit.bench.report import origin, text_table, write_json
from memkit.bench.timing import interleave, ratio, seconds, until_interrupted
from memkit.plan import ALIGNMENT, Buffer, Plan, read_trace, trace

KIND = "memkit-pool"
FORMAT = 3
HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PARTS = {"cpu": ("calls", "step", "lengths", "core", "plans"), "cuda": ("calls", "step", "lengths")}

Cases = dict[str, tuple[int, dict[str, str]]]
CPU_CASES: Cases = {  # name: (statements a sample, contenders as statements, stock first)
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
        32,
        {
            "stock": "torch_empty(1 << 24).fill_(1)",
            "pool": "pool_empty(1 << 24).fill_(1)",
            "stock, reused": "large.fill_(1)",
        },
    ),
    "64 MiB once, others between": (
        1,
        {
            "stock": "torch_empty(1 << 24).fill_(1)",
            "pool": "pool_empty(1 << 24).fill_(1)",
            "stock, reused": "large.fill_(1)",
        },
    ),
}


CUDA_CASES: Cases = {
    "make and drop 4 KiB": (
        20_000,
        {
            "stock": "torch_empty(1024, device=cuda)",
            "pool": "pool_empty(1024)",
            "pool, registered op": "pool_op(1024)",
        },
    ),
    "make and drop 64 MiB": (
        2_000,
        {"stock": "torch_empty(1 << 24, device=cuda)", "pool": "pool_empty(1 << 24)"},
    ),
    "100 times 4 KiB": (
        100,
        {
            "stock": "for _ in hundred: torch_empty(1024, device=cuda)",
            "pool": "for _ in hundred: pool_empty(1024)",
            "pool, in a scope": "with pool.scope():\n for _ in hundred: pool_empty(1024)",
            "stock, in use()": "with pool.use():\n for _ in hundred: torch_empty(1024, device=cuda)",
        },
    ),
    "make, fill and drop 64 MiB": (
        32,
        {
            "stock": "torch_empty(1 << 24, device=cuda).fill_(1)",
            "pool": "pool_empty(1 << 24).fill_(1)",
            "stock, reused": "large.fill_(1)",
        },
    ),
    "make 1 MiB, record_stream() and drop": (
        100,
        {
            "stock": "x = torch_empty(1 << 18, device=cuda)\nx.record_stream(other)\ndel x",
            "pool": "x = pool_empty(1 << 18)\nx.record_stream(other)\ndel x",
        },
    ),
}
CASES = {"cpu": CPU_CASES, "cuda": CUDA_CASES}


def timer(statement: str, calls: int, names: dict[str, Any], device: str) -> Callable[[], float]:
    """Seconds of one run of the statement, over a loop without a function call of its own; a GPU is done at its end."""
    loop = timeit.Timer(statement, globals=names)
    return lambda: seconds(lambda: loop.timeit(calls), device) / calls


def run_calls(rounds: int, device: str) -> list[dict[str, Any]]:
    cases = []
    pool = memkit.Pool("256MiB", device)
    names = {
        "torch_empty": torch.empty,
        "bfloat16": torch.bfloat16,
        "pool": pool,
        "pool_empty": pool.empty,
        "pool_op": pool._core.functions()["empty_op"],
        "hundred": range(100),
        "small": torch.empty(1 << 18, device=device),
        "large": torch.empty(1 << 24, device=device),
    }
    if device == "cuda":
        names |= {"cuda": torch.device("cuda"), "other": torch.cuda.Stream()}
    for name, (calls, contenders) in CASES[device].items():
        timers = {each: timer(statement, calls, names, device) for each, statement in contenders.items()}
        times = interleave(timers, rounds)
        cases.append(
            {
                "case": name,
                "rounds": rounds,
                "seconds": {each: statistics.median(taken) for each, taken in times.items()},
                "ratio": {each: ratio(taken, times["stock"]) for each, taken in times.items()},
            }
        )
    pool.check()
    return cases


# -- the core


def run_core() -> dict[str, Any]:
    """Nanoseconds an allocation and its free take, by bench_arena; without a compiler an "error" instead."""
    command = ["make", "-s", "-C", str(HERE / "arena"), "run", "ARGS=quick"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return {"error": f"make did not start: {error.strerror}"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["make failed"])[-1]}
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    rows = [line for line in lines if "bench" in line]
    return {"compiler": lines[0]["compiler"], "rows": rows}


CORE = {  # what bench_arena calls it: what a reader does
    "holes": "holes",
    "live": "live blocks",
    "latency, last made": "live blocks, the last made dropped",
}


def core_rows(core: dict[str, Any]) -> list[list[str]]:
    """A row for each number of holes and of live blocks: nanoseconds of memkit, std::set and a list."""
    body = []
    for bench, text in CORE.items():
        found = {(row["n"], row["allocator"]): row["ns"] for row in core["rows"] if row["bench"] == bench}
        for n in dict.fromkeys(n for n, _ in found):
            times = [found.get((n, allocator)) for allocator in ("memkit", "std::set", "list")]
            body.append([f"{n:,} {text}", *("" if ns is None else f"{ns:,.0f}" for ns in times)])
    return body


# -- plans

TRACES = HERE.parent / "tests" / "traces"


def planned(name: str, buffers: list[Buffer], alignment: int, budget: float) -> dict[str, Any]:
    start = time.perf_counter()
    plan = Plan.solve(buffers, alignment=alignment, budget=budget)
    return {
        "name": name,
        "buffers": len(buffers),
        "lower_bound": plan.lower_bound,
        "height": plan.height,
        "gap": plan.gap,
        "seconds": time.perf_counter() - start,
    }


def run_plans(budget: float = 10) -> list[dict[str, Any]]:
    """Recorded traces, and steps of the main job's models recorded now."""
    plans = [planned(file.stem, read_trace(file), 512, budget) for file in sorted(TRACES.glob("*.csv"))]
    for model in MODELS:
        buffers = trace(pool_step.training_step(BATCH[model], "cpu", model))
        plans.append(planned(f"step of {model}", buffers, ALIGNMENT, budget))
    return plans


def plan_rows(plans: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            plan["name"],
            f"{plan['buffers']:,}",
            f"{plan['lower_bound'] / 2**20:.1f} MiB",
            f"{plan['gap']:.2%}",
            f"{plan['seconds'] * 1e3:.0f} ms",
        ]
        for plan in plans
    ]


# -- tables


def step_table(step: dict[str, Any]) -> str:
    body = []
    for each, taken in step["seconds"].items():
        reserved, share = step["reserved_bytes"][each], step["reserved_to_live"][each]
        memory = [f"{reserved / 2**20:.1f}", f"{share:.3f}×"] if reserved else ["", ""]
        body.append([each, f"{taken * 1e3:.1f}", f"{step['ratio'][each]:.3f}×", *memory])
    title = f"training step, batch {step['batch']}"
    live = f"{step['allocations']} allocations, at most {step['live_bytes'] / 2**20:.1f} MiB alive at once"
    return text_table([title, "ms", "to stock", "peak MiB", "to alive"], body) + "\n" + live


def lengths_table(lengths: dict[str, dict[str, int]]) -> str:
    title = f"{pool_step.LENGTHS} steps of varying length"
    return text_table([title, "reserved MiB", "to alive"], lengths_rows(lengths))


def lengths_rows(lengths: dict[str, dict[str, int]]) -> list[list[str]]:
    return [
        [variant, f"{found['reserved'] / 2**20:.1f}", f"{found['reserved'] / found['live']:.3f}×"]
        for variant, found in lengths.items()
    ]


def calls_table(cases: list[dict[str, Any]]) -> str:
    body = [
        [case["case"] if each == "stock" else "", each, f"{seconds * 1e6:.2f}", f"{case['ratio'][each]:.3f}×"]
        for case in cases
        for each, seconds in case["seconds"].items()
    ]
    return text_table(["case", "contender", "µs", "to stock"], body)


def core_table(core: dict[str, Any]) -> str:
    if "error" in core:
        return f"core: not measured, {core['error']}"
    return text_table(["core, ns an allocation and free", "memkit", "std::set", "list"], core_rows(core))


def plans_table(plans: list[dict[str, Any]]) -> str:
    return text_table(["plan", "buffers", "at least", "above it", "solved in"], plan_rows(plans))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--device", choices=("auto", *PARTS), default="auto", help="default: a GPU if there is one"
    )
    parser.add_argument(
        "--parts",
        metavar="A,B",
        help=f"of {', '.join(dict.fromkeys(sum(PARTS.values(), ())))} (default: all)",
    )
    parser.add_argument("--rounds", type=int, default=21, help="of the calls")
    parser.add_argument("--batch", type=int, default=BATCH["gpt"], help="of the training step")
    parser.add_argument("--steps", type=int, default=15, metavar="ROUNDS", help="of the training step")
    parser.add_argument(
        "--json", nargs="?", const="", metavar="FILE", help="default: results/pool-DEVICE.json"
    )
    args = parser.parse_args(argv)
    there = torch.cuda.is_available()
    device = ("cuda" if there else "cpu") if args.device == "auto" else args.device
    if device == "cuda" and not there:
        parser.error("--device cuda: expected a CUDA GPU, got none")
    chosen = args.parts.split(",") if args.parts else PARTS[device]
    if unknown := set(chosen) - set(PARTS[device]):
        known = ", ".join(PARTS[device])
        parser.error(f"--parts: expected some of {known} on {device}, got {', '.join(sorted(unknown))}")
    parts: dict[str, tuple[Callable[[], Any], Callable[[Any], str]]] = {
        "calls": (lambda: run_calls(args.rounds, device), calls_table),
        "step": (lambda: pool_step.run(args.steps, args.batch, device), step_table),
        "lengths": (lambda: pool_step.varying_apart(args.batch, device), lengths_table),
        "core": (run_core, core_table),
        "plans": (run_plans, plans_table),
    }
    result: dict[str, Any] = {"kind": KIND, "format": FORMAT, **machine.stamp(device)}
    tables = []
    with until_interrupted(result):
        for part in PARTS[device]:
            if part in chosen:
                measure, show = parts[part]
                result[part] = measure()
                tables.append(show(result[part]))
    print(*tables, origin(result), sep="\n\n")
    if args.json is not None:
        file = Path(args.json) if args.json else RESULTS / f"pool-{device}.json"
        write_json(result, file)
        print(f"wrote {file.name}")
    return 130 if result.get("interrupted") else 0


if __name__ == "__main__":
    sys.exit(main())

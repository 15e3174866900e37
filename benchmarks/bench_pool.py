"""The pool against stock PyTorch on the CPU: what a tensor costs to make and drop, what its first use costs, what a
training step takes in time and in memory, how the core's cost grows with holes and live blocks, how good plans are.

    python benchmarks/bench_pool.py
    python benchmarks/bench_pool.py --json      # benchmarks/results/pool-cpu.json
    python benchmarks/bench_pool.py --parts calls,plans

The core is measured by a C++ program, benchmarks/arena/bench_arena.cpp, which needs make and a C++ compiler.

Each row's contenders take turns; ratios are the median of each round's own ratio to stock. The step is one of the GPT
that `memkit bench` trains. Its memory counts what the step adds to weights and optimizer state: for stock the growth of
the resident set in a process of its own, whose free memory went back to the system just before.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import memkit
from memkit.bench import machine, models, train
from memkit.bench.options import BATCH, MODELS, Options
from memkit.bench.report import origin, text_table, write_json
from memkit.bench.timing import interleave, ratio, seconds
from memkit.plan import ALIGNMENT, Buffer, Plan, read_trace, trace

KIND = "memkit-pool"
FORMAT = 3
HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
PARTS = ("calls", "step", "core", "plans")

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


def run_calls(rounds: int) -> list[dict[str, Any]]:
    cases = []
    pool = memkit.Pool("256MiB")
    names = {
        "torch_empty": torch.empty,
        "bfloat16": torch.bfloat16,
        "pool": pool,
        "pool_empty": pool.empty,
        "pool_op": pool._core.functions()["empty_op"],
        "hundred": range(100),
        "small": torch.empty(1 << 18),
        "large": torch.empty(1 << 24),
    }
    for name, (calls, contenders) in CASES.items():
        timers = {each: timer(statement, calls, names) for each, statement in contenders.items()}
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


# -- a training step

PRECISION = 1 << 20  # bytes, of the least memory that a pool gets through a step with


def training_step(batch: int, model: str = "gpt") -> Callable[[], None]:
    """A step of stock training, warm: its optimizer state exists."""
    options = Options(models=(model,), device="cpu", dtype="float32", batch=batch)
    torch.manual_seed(options.seed)
    if model == "gpt":
        tokens = torch.randint(options.vocab, (batch, options.seq_len + 1))
        data = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    else:
        data = (torch.randn(batch, 1, 8, 8), torch.randint(10, (batch,)))
    sizes = (options.vocab, options.layers, options.d_model, options.heads, options.seq_len)
    build = {"gpt": lambda: models.GPT(*sizes), "cnn": lambda: models.CNN(10)}[model]
    task = train.Task(model, build, [data], None, learning_rate=1e-3)
    variant = train.Variant("eager", (), task, options)

    def step() -> None:
        variant.optimizer.zero_grad(set_to_none=True)  # of a step that ran out of memory
        variant.step(data)

    step()
    return step


def status(field: str) -> int:
    """Bytes that the kernel tells of this process: VmRSS, VmHWM."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field + ":"))


def stock_peak(batch: int) -> int:
    """Of a step, in this process."""
    step = training_step(batch)
    step()
    ctypes.CDLL(None).malloc_trim(0)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again
    step()
    return status("VmHWM") - before


def stock_peak_apart(batch: int) -> int | None:
    """In a process of its own; None where the kernel does not tell."""
    command = [sys.executable, __file__, "--stock-peak", "--batch", str(batch)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return int(done.stdout.split()[-1]) if done.returncode == 0 else None


def least(step: Callable[[], None], low: int) -> int:
    """The smallest pool, to PRECISION, that a step gets through use() with; `low` bytes are known to be needed."""

    def enough(size: int) -> bool:
        try:
            with memkit.Pool(size, grow=False) as pool, pool.use():
                step()
        except memkit.PoolExhausted:
            return False
        return True

    high = low
    while not enough(high):
        low, high = high, high + max(high // 32, PRECISION)
    while high - low > PRECISION:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def run_step(rounds: int, batch: int) -> dict[str, Any]:
    step = training_step(batch)
    plan = memkit.Pool(1 << 20).record(step)
    needed = least(step, plan.lower_bound)
    pool, planned = memkit.Pool(needed), memkit.Pool(plan.height)

    def in_pool() -> None:
        with pool.use():
            step()

    def in_plan() -> None:
        with planned.replay(plan):
            step()

    contenders = {"stock": step, "pool.use()": in_pool, "pool.replay()": in_plan}
    times = interleave({k: lambda work=v: seconds(work, "cpu") for k, v in contenders.items()}, rounds)
    with planned.replay(plan) as replay:
        step()
    reserved = {
        "stock": stock_peak_apart(batch),
        "pool.use()": max(needed, pool.stats().reserved_peak),
        "pool.replay()": max(plan.height, planned.stats().reserved_peak),
    }
    for each in (pool, planned):
        each.check()
    return {
        "batch": batch,
        "rounds": rounds,
        "allocations": len(plan.buffers),
        "served_by_plan": replay.served,
        "live_bytes": plan.lower_bound,
        "plan_bytes": plan.height,
        "seconds": {each: statistics.median(taken) for each, taken in times.items()},
        "ratio": {each: ratio(taken, times["stock"]) for each, taken in times.items()},
        "reserved_bytes": reserved,
        "reserved_to_live": {each: n and n / plan.lower_bound for each, n in reserved.items()},
    }


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
        buffers = trace(training_step(BATCH[model], model))
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
        "--parts", default=",".join(PARTS), metavar="A,B", help=f"of {', '.join(PARTS)} (default: all)"
    )
    parser.add_argument("--rounds", type=int, default=21, help="of the calls")
    parser.add_argument("--batch", type=int, default=BATCH["gpt"], help="of the training step")
    parser.add_argument("--steps", type=int, default=15, metavar="ROUNDS", help="of the training step")
    parser.add_argument("--stock-peak", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", nargs="?", const="", metavar="FILE", help="default: results/pool-cpu.json")
    args = parser.parse_args(argv)
    if args.stock_peak:
        print(stock_peak(args.batch))
        return 0
    chosen = args.parts.split(",")
    if unknown := set(chosen) - set(PARTS):
        parser.error(f"--parts: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    parts: dict[str, tuple[Callable[[], Any], Callable[[Any], str]]] = {
        "calls": (lambda: run_calls(args.rounds), calls_table),
        "step": (lambda: run_step(args.steps, args.batch), step_table),
        "core": (run_core, core_table),
        "plans": (run_plans, plans_table),
    }
    result: dict[str, Any] = {"kind": KIND, "format": FORMAT, **machine.stamp("cpu")}
    tables = []
    for part in PARTS:
        if part in chosen:
            measure, show = parts[part]
            result[part] = measure()
            tables.append(show(result[part]))
    print(*tables, origin(result), sep="\n\n")
    if args.json is not None:
        file = Path(args.json) if args.json else RESULTS / "pool-cpu.json"
        write_json(result, file)
        print(f"wrote {file.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

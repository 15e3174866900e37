"""Losses over many classes: stock eager, stock compiled, PyTorch's own chunked form, memkit; time and memory.

    python benchmarks/bench_loss.py --quick
    python benchmarks/bench_loss.py --json            # benchmarks/results/loss-cpu.json

`linear`: hidden states [2048, 512] to classes, loss and gradients of both, in turns; memory is the most bytes alive at
a time above the start, by memkit.memory. The bar: beside the gradients at most 5% of what the layer and the loss apart
take, at no more than their time. `cross_entropy`: logits made by another op, loss alone and with backward. Ratios are
medians of each round's own ratio to stock eager. PyTorch's chunked form runs last and least often: in bfloat16 on a CPU
it takes ten times as long as the rest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import DTYPES, SLOWER, Choices, normal, ratios, write
from torch import Tensor

from memkit import functional
from memkit.bench import machine
from memkit.bench.report import origin, text_table
from memkit.bench.timing import interleave, until_interrupted
from memkit.memory import timeline

KIND = "memkit-loss"
FORMAT = 1
ROWS, FEATURES = 2048, 512
CLASSES = (32768, 131072)
# 16 Ki to 32 Mi logits; the last is an image with 21 classes a pixel.
SHAPES = ((16, 1024), (128, 1024), (1024, 1024), (32, 32768), (256, 32768), (1024, 32768), (8, 21, 128, 128))
LABELS = {
    "stock": "stock",
    "compiled": "stock compiled",
    "chunked": "PyTorch chunked",
    "memkit": "memkit",
    "auto": "memkit in place",
}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timer(call: Callable[[], object], device: str, calls: int = 1) -> Callable[[], float]:
    def run() -> float:
        synchronize(device)
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        return (time.perf_counter() - begin) / calls

    return run


def linear_case(dtype: str, classes: int, device: str, rounds: int, others: int) -> dict[str, Any]:
    x = normal(ROWS * FEATURES, DTYPES[dtype], device, 0).view(ROWS, FEATURES).requires_grad_()
    w = (normal(classes * FEATURES, DTYPES[dtype], device, 1).view(classes, FEATURES) / 20).requires_grad_()
    target = torch.randint(classes, (ROWS,), generator=torch.Generator().manual_seed(0)).to(device)

    def stock(x: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w), target)

    functions: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "stock": stock,
        "memkit": lambda x, w: functional.linear_cross_entropy(x, w, target),
    }
    slow: dict[str, Callable[[Tensor, Tensor], Tensor]] = {}
    if others:
        torch._dynamo.reset()
        slow["compiled"] = torch.compile(stock)
        if hasattr(torch.nn, "LinearCrossEntropyOptions"):
            options = torch.nn.LinearCrossEntropyOptions()
            slow["chunked"] = lambda x, w: F.linear_cross_entropy(x, w, target, options=options)

    def step(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(x, w), (x, w))

    timers = {name: timer(step(each), device) for name, each in functions.items()}
    times = interleave(timers, rounds, warm=1)
    both = {"stock": timers["stock"]} | {name: timer(step(each), device) for name, each in slow.items()}
    if slow:
        beside = interleave(both, others, warm=1)
        slow_ratio = ratios(beside, "stock")
        times |= {name: beside[name] for name in slow}
    ratio = ratios({name: times[name] for name in functions}, "stock")
    ratio |= {name: slow_ratio[name] for name in slow}
    gradients = (x.numel() + w.numel()) * x.element_size()
    peak = {
        name: max(alive for _, alive in timeline(step(each), device=device))
        for name, each in (functions | slow).items()
    }
    share = (peak["memkit"] - gradients) / peak["stock"]
    return {
        "dtype": dtype,
        "rows": ROWS,
        "features": FEATURES,
        "classes": classes,
        "rounds": rounds,
        "seconds": {name: statistics.median(taken) for name, taken in times.items()},
        "ratio": ratio,
        "peak": peak,
        "gradients": gradients,
        "share_of_stock_beside_gradients": share,
        "bar_met": share <= 0.05 and ratio["memkit"] <= 1.0,
    }


def rounds_of(shape: tuple[int, ...], quick: bool) -> int:
    """More where a call is short: two threads wait for each other, so that another process on one's core costs a round a
    slice of the scheduler's time, milliseconds, in which such a call is made ten times."""
    short = torch.Size(shape).numel() <= 1 << 22
    return 5 if quick else 41 if short else 9


def loss_case(dtype: str, shape: tuple[int, ...], backward: bool, device: str, rounds: int) -> dict[str, Any]:
    elements = torch.Size(shape).numel()
    x = normal(elements, DTYPES[dtype], device, 0).view(shape)
    target = torch.randint(shape[1], shape[:1] + shape[2:]).to(device)
    one = torch.ones((), dtype=x.dtype, device=device, requires_grad=True)
    calls = max(1, min(100, (1 << 21) // elements))

    def step(function: Callable[[Tensor], Tensor]) -> Callable[[], float]:
        """Only the loss and its backward down to the logits are timed, not what makes the logits."""

        def run() -> float:
            total = 0.0
            for _ in range(calls):
                h = x * one if backward else x.clone()
                edge = torch.autograd.graph.get_gradient_edge(h) if backward else None
                pair = [h]
                del h
                synchronize(device)
                begin = time.perf_counter()
                loss = function(pair.pop())
                if edge is not None:
                    torch.autograd.grad(loss, edge)
                synchronize(device)
                total += time.perf_counter() - begin
            return total / calls

        return run

    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "stock": lambda h: F.cross_entropy(h, target),
        "memkit": lambda h: functional.cross_entropy(h, target),
    }
    if backward:
        functions["auto"] = lambda h: functional.cross_entropy(h, target, inplace="auto")
    with torch.set_grad_enabled(backward):
        times = interleave({name: step(each) for name, each in functions.items()}, rounds, warm=2)
    return {
        "dtype": dtype,
        "shape": list(shape),
        "elements": elements,
        "mode": "forward+backward" if backward else "forward",
        "seconds": {name: statistics.median(taken) for name, taken in times.items()},
        "ratio": ratios(times, "stock"),
    }


def slower(result: dict[str, Any]) -> list[str]:
    """Every case in which memkit takes more than SLOWER times what stock takes, or misses the bar, in words."""
    found = []
    for case in result["linear"]:
        where = f"linear {case['dtype']} {case['classes']} classes"
        if not case["bar_met"]:
            share, ratio = case["share_of_stock_beside_gradients"], case["ratio"]["memkit"]
            found.append(f"{where}: {share:.1%} of the memory beside the gradients, {ratio:.2f}× the time")
    for case in result["cross_entropy"]:
        where = f"cross_entropy {case['dtype']} {case['shape']} {case['mode']}"
        found += [
            f"{where}: {LABELS[name]} takes {ratio:.2f}× the time of stock"
            for name, ratio in case["ratio"].items()
            if ratio > SLOWER
        ]
    return found


def tables(result: dict[str, Any]) -> str:
    names = ("compiled", "chunked", "memkit")
    columns = [
        "linear",
        "classes",
        "stock s",
        *(LABELS[n] for n in names),
        "stock MiB",
        *(LABELS[n] for n in names),
    ]
    columns += ["gradients", "beside"]
    body = []
    for case in result["linear"]:
        row = [case["dtype"], str(case["classes"]), f"{case['seconds']['stock']:.2f}"]
        row += [f"{case['ratio'][n]:.2f}×" if n in case["ratio"] else "" for n in names]
        row += [f"{case['peak'][n] / 2**20:.1f}" if n in case["peak"] else "" for n in ("stock", *names)]
        share = case["share_of_stock_beside_gradients"]
        body.append([*row, f"{case['gradients'] / 2**20:.1f}", f"{share:.1%}"])
    first = text_table(columns, body)
    columns = ["cross_entropy", "logits", "mode", "stock µs", "memkit", "memkit in place"]
    body = []
    for case in result["cross_entropy"]:
        row = [
            case["dtype"],
            "×".join(map(str, case["shape"])),
            case["mode"],
            f"{case['seconds']['stock'] * 1e6:.1f}",
        ]
        body.append(
            row + [f"{case['ratio'][n]:.2f}×" if n in case["ratio"] else "" for n in ("memkit", "auto")]
        )
    return first + "\n\n" + text_table(columns, body)


def run(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"kind": KIND, "format": FORMAT, **machine.stamp(args.device)}
    result |= {"linear": [], "cross_entropy": []}
    with until_interrupted(result):
        if "linear" in args.parts:
            for dtype in args.dtypes:
                for classes in args.classes:
                    others = args.others if classes == CLASSES[0] else 0
                    result["linear"].append(linear_case(dtype, classes, args.device, args.rounds, others))
        if "cross_entropy" in args.parts:
            for dtype in args.dtypes:
                for shape in SHAPES[1::3] if args.quick else SHAPES:
                    for backward in (False, True):
                        rounds = rounds_of(shape, args.quick)
                        result["cross_entropy"].append(loss_case(dtype, shape, backward, args.device, rounds))
    result["slower"] = slower(result)
    return result


def update(result: dict[str, Any], before: dict[str, Any]) -> None:
    """Takes over the cases of an earlier run that this one has not."""
    for part, names in (("linear", ("dtype", "classes")), ("cross_entropy", ("dtype", "shape", "mode"))):
        measured = [[case[name] for name in names] for case in result[part]]
        kept = [case for case in before[part] if [case[name] for name in names] not in measured]
        result[part] = kept + result[part]
    result["slower"] = slower(result)


def main(argv: list[str] | None = None) -> int:
    choices = Choices(
        __doc__,
        {"parts": ("linear", "cross_entropy"), "dtypes": DTYPES, "classes": map(str, CLASSES)},
        quick={"classes": [str(CLASSES[0])]},
        file="loss",
    )
    add_argument = choices.parser.add_argument
    add_argument("--rounds", type=int, default=5, help="of stock and memkit in the linear part")
    add_argument("--others", type=int, default=1, help="rounds of the slow contenders, at the fewest classes")
    add_argument("--update", action="store_true", help="keep the file's other cases")
    args = choices.parse(argv)
    args.classes = [int(each) for each in args.classes]
    if args.quick:
        args.others, args.rounds = 0, 2
    result = run(args)
    print(tables(result), origin(result), sep="\n\n")
    if args.update and args.json is not None and args.json.exists():
        update(result, json.loads(args.json.read_text()))
    return write(result, args)


if __name__ == "__main__":
    sys.exit(main())

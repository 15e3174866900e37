"""Every family of ops in one run: stock PyTorch, stock compiled, memkit, memkit in place; CPU or CUDA.

    python benchmarks/bench_ops.py                        # all of it: some twenty minutes
    python benchmarks/bench_ops.py --quick                # two sizes, float32
    python benchmarks/bench_ops.py --families norm,softmax --sizes 1Mi
    python benchmarks/bench_ops.py --json                 # benchmarks/results/ops-cpu.json

The ops are in ops/, a family a file. forward runs under no_grad; forward+backward computes the gradients of inputs and
parameters. Inputs are written anew before each sample, for all contenders alike, since those in place consume theirs.
Ratios are the median of each round's own ratio to stock. On a GPU the table also has the bytes that a forward moves at the
least over its time, beside those of a copy.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from common import (
    DTYPES,
    MODES,
    SIZES,
    Choices,
    Contender,
    Rounds,
    buffer_count,
    compiles,
    measure_in_turns,
    progress,
    settle_allocator,
    slower_than,
    write,
)
from ops import FAMILIES
from ops.op import Function, Op, Size
from torch import Tensor

from memkit.bench import machine
from memkit.bench.report import origin, text_table
from memkit.bench.timing import until_interrupted

KIND = "memkit-ops"
FORMAT = 1
CONTENDERS = {
    "stock": "stock",
    "compiled": "stock compiled",
    "memkit": "memkit",
    "in_place": "memkit in place",
}


class Buffers:
    """The tensors of one op, size and dtype."""

    def __init__(self, op: Op, elements: int, dtype: torch.dtype, device: str) -> None:
        count = buffer_count(elements, dtype, device)
        self.pristine = [op.inputs(Size(elements, dtype, device, 1 + i)) for i in range(count)]
        self.work = [[x.clone() for x in each] for each in self.pristine]
        self.parameters = list(op.parameters(Size(elements, dtype, device)))
        self.out = torch.empty_like(self.pristine[0][0])
        with torch.no_grad():
            outs = outputs(op.memkit(*self.work[0], *self.parameters))
        self.upstream = [torch.randn_like(out) for out in outs]

    def inputs(self) -> list[tuple[Tensor, ...]]:
        for work, pristine in zip(self.work, self.pristine, strict=True):
            for x, before in zip(work, pristine, strict=True):
                x.copy_(before)
        return [(*work, *self.parameters) for work in self.work]

    def leaves(self) -> list[tuple[list[Tensor]]]:
        return [([x.detach().requires_grad_() for x in work],) for work in self.work]

    def contender(self, function: Function, mode: str) -> Contender:
        if mode == "forward":
            return Contender(self.inputs, function)
        wanted = [p for p in self.parameters if p.requires_grad]

        def there_and_back(x: list[Tensor]) -> object:
            return torch.autograd.grad(outputs(function(*x, *self.parameters)), [*x, *wanted], self.upstream)

        return Contender(self.leaves, there_and_back)


def outputs(result: Any) -> Sequence[Tensor]:
    return (result,) if isinstance(result, Tensor) else result


def compile_stock(op: Op, buffers: Buffers, modes: Sequence[str]) -> Function | None:
    """Stock compiled for any size."""
    torch._dynamo.reset()
    stock = op.stock
    compiled = torch.compile(lambda *tensors: stock(*tensors), dynamic=True)

    def run() -> None:
        for mode in modes:
            with torch.set_grad_enabled(mode != "forward"):
                contender = buffers.contender(compiled, mode)
                contender.call(*contender.prepare()[0])

    return compiled if compiles(run) else None


def rounds(
    op: Op, buffers: Buffers, compiled: Function | None, mode: str, device: str, budget: float
) -> Rounds:
    functions: dict[str, Function | None] = {"stock": op.stock, "memkit": op.memkit, "compiled": compiled}
    if mode == "forward":
        functions["in_place"] = op.in_place
    entrants = {name: buffers.contender(f, mode) for name, f in functions.items() if f is not None}
    if mode == "forward" and device == "cuda":
        entrants["copy"] = Contender(buffers.inputs, lambda x, *_: buffers.out.copy_(x))
    return Rounds(entrants, device, budget)


def cases(
    family: str, name: str, dtype: str, args: argparse.Namespace, budget: float
) -> list[tuple[dict[str, Any], Rounds]]:
    """Every size and mode, the smallest size first."""
    op, compiled, made = FAMILIES[family][name], None, []
    sizes = [size for size in args.sizes if SIZES[size] >= op.least]
    for size in sorted(sizes, key=SIZES.__getitem__, reverse=True):
        progress(f"{name} {dtype} {size}")
        buffers = Buffers(op, SIZES[size], DTYPES[dtype], args.device)
        if args.compile and not made:
            compiled = compile_stock(op, buffers, args.modes)
        case = {"family": family, "op": name, "dtype": dtype, "size": size}
        case |= {"elements": SIZES[size], "passes": op.passes}
        made += [
            (case | {"mode": mode}, rounds(op, buffers, compiled, mode, args.device, budget))
            for mode in args.modes
        ]
    return sorted(made, key=lambda each: each[0]["elements"])


def run(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"kind": KIND, "format": FORMAT, **machine.stamp(args.device), "cases": []}
    budget = 0.15 if args.quick else 0.3
    if args.device == "cuda":
        budget /= 3  # its clock is steadier
    settle_allocator()
    with until_interrupted(result):
        for family in args.families:
            for name in FAMILIES[family]:
                for dtype in args.dtypes:
                    measure_in_turns(cases(family, name, dtype, args, budget), result["cases"])
    progress("")
    result["slower"] = slower_than(result["cases"], ("op", "dtype", "size", "mode"), CONTENDERS)
    return result


def table(result: dict[str, Any]) -> str:
    gpu = result["hardware"]["device"] == "cuda"
    names = [n for n in CONTENDERS if n != "stock"]
    body = []
    for c in result["cases"]:
        row = [c["op"], c["dtype"], c["size"], c["mode"], f"{c['seconds']['stock'] * 1e6:.1f}"]
        row += [f"{c['ratio'][n]:.2f}×" if n in c["ratio"] else "" for n in names]
        if gpu and "copy" in c["seconds"]:
            moved = c["elements"] * DTYPES[c["dtype"]].itemsize / 1e9
            row += [f"{c['passes'] * moved / c['seconds']['memkit']:.0f}"]
            row += [f"{2 * moved / c['seconds']['copy']:.0f}"]
        elif gpu:
            row += ["", ""]
        body.append(row)
    columns = ["op", "dtype", "size", "mode", "stock µs", *(CONTENDERS[n] for n in names)]
    return text_table([*columns, *(["memkit GB/s", "copy GB/s"] if gpu else [])], body)


def main(argv: list[str] | None = None) -> int:
    choices = Choices(
        __doc__,
        {"families": FAMILIES, "sizes": SIZES, "dtypes": DTYPES, "modes": MODES},
        quick={"sizes": ["128Ki", "8Mi"], "dtypes": ["float32"]},
        file="ops",
        compiler=True,
    )
    args = choices.parse(argv)
    result = run(args)
    print(table(result), origin(result), sep="\n\n")
    return write(result, args)


if __name__ == "__main__":
    sys.exit(main())

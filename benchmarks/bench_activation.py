"""Activations: stock eager, stock with a reused output, stock compiled, memkit, memkit in place; CPU or CUDA.

    python benchmarks/bench_activation.py --quick
    python benchmarks/bench_activation.py --json            # benchmarks/results/activation-cpu.json

Times are medians over rounds in which all contenders take turns, in several visits to each size; ratios are the
median of each round's own ratio to stock eager. On a CPU, cases in which memkit takes more than 1.02 times what
stock takes are measured again in four more processes, and all their numbers are the median of the five: where
memory happens to lie in one process makes stock up to a tenth quicker or slower than itself in another. Every
sample starts from inputs that were just written, for all contenders alike, since those in place consume theirs.
malloc takes results of more than 8 MiB from the system and keeps smaller ones (settle_allocator in common.py).
Forward and backward: `torch.autograd.grad` down to the input, which was made by another op. One function an op and
dtype is compiled with dynamic=True, at the largest size first; up to 1 Mi elements a compilation for the very size
was a quarter faster on two cores: `--static` makes one for each, in five times the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import (
    DTYPES,
    MODES,
    SIZES,
    SLOWER,
    Choices,
    Contender,
    Rounds,
    buffer_count,
    compiles,
    host_sample,
    measure,
    measure_in_turns,
    normal,
    own_code,
    progress,
    settle_allocator,
    slower_than,
    write,
)
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from memkit import functional
from memkit._reference import ACTIVATIONS
from memkit.bench import machine
from memkit.bench.report import origin, text_table
from memkit.bench.timing import until_interrupted

KIND = "memkit-activation"
FORMAT = 1
aten = torch.ops.aten

Function = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Op:
    """Stock and memkit's form of one activation.

    `out` writes into a second tensor, where stock PyTorch has that; `in_place` works on the input, under
    autograd too, unless `in_place_grad` takes its place there.
    """

    stock: Function
    memkit: Callable[..., Tensor]
    out: Callable[[Tensor, Tensor], Tensor] | None = None
    in_place: Function | None = None
    in_place_grad: Function | None = None


def op(
    name: str,
    out: Callable[[Tensor, Tensor], Tensor] | None = None,
    in_place: Function | None = None,
    in_place_grad: Function | None = None,
    **params: Any,
) -> Op:
    return Op(
        partial(ACTIVATIONS[name].stock, **params) if params else ACTIVATIONS[name].stock,
        partial(getattr(functional, name), **params) if params else getattr(functional, name),
        out,
        in_place,
        in_place_grad,
    )


OPS: dict[str, Op] = {
    "relu": op("relu", None, lambda x: torch.relu_(x)),
    "leaky_relu": op(
        "leaky_relu", lambda x, o: aten.leaky_relu.out(x, 0.01, out=o), lambda x: F.leaky_relu_(x)
    ),
    "elu": op("elu", lambda x, o: aten.elu.out(x, out=o), lambda x: F.elu_(x)),
    "selu": op("selu", None, lambda x: torch.selu_(x)),
    "celu": op("celu", None, lambda x: torch.celu_(x)),
    "sigmoid": op("sigmoid", lambda x, o: torch.sigmoid(x, out=o), lambda x: torch.sigmoid_(x)),
    "tanh": op("tanh", lambda x, o: torch.tanh(x, out=o), lambda x: torch.tanh_(x)),
    "softplus": op("softplus", lambda x, o: aten.softplus.out(x, out=o)),
    "relu6": op("relu6", lambda x, o: aten.hardtanh.out(x, 0, 6, out=o), lambda x: F.relu6(x, True)),
    "hardtanh": op("hardtanh", lambda x, o: aten.hardtanh.out(x, out=o), lambda x: F.hardtanh_(x)),
    "hardsigmoid": op(
        "hardsigmoid", lambda x, o: aten.hardsigmoid.out(x, out=o), lambda x: F.hardsigmoid(x, True)
    ),
    "relu_squared": op("relu_squared", None, lambda x: x.relu_().square_(), lambda x: x.relu_().square()),
    "gelu": op("gelu", lambda x, o: aten.gelu.out(x, out=o)),
    "gelu_tanh": op("gelu", lambda x, o: aten.gelu.out(x, approximate="tanh", out=o), approximate="tanh"),
    "quick_gelu": op("quick_gelu"),
    "silu": op("silu", lambda x, o: aten.silu.out(x, out=o), lambda x: F.silu(x, True)),
    "mish": op("mish", lambda x, o: aten.mish.out(x, out=o), lambda x: F.mish(x, True)),
    "hardswish": op("hardswish", lambda x, o: aten.hardswish.out(x, out=o), lambda x: F.hardswish(x, True)),
}

CONTENDERS = {
    "stock": "stock",
    "reused": "stock, output reused",
    "compiled": "stock compiled",
    "memkit": "memkit",
    "memkit_inplace": "memkit in place",
}
OVERHEAD_CALLS = 400
SUSPECT = 1.02  # times what stock takes
PROCESSES = 5
PAIRS = (("memkit", "stock"), ("memkit_inplace", "stock"), ("memkit_inplace", "reused"))


class Buffers:
    """Inputs of one size and dtype in pristine copies, and what the contenders work on."""

    def __init__(self, elements: int, dtype: torch.dtype, device: str) -> None:
        count = buffer_count(elements, dtype, device)
        self.pristine = [normal(elements, dtype, device, seed) for seed in range(count)]
        self.work = [torch.empty_like(x) for x in self.pristine]
        self.outputs = [torch.empty_like(x) for x in self.pristine]
        self.upstream = [normal(elements, dtype, device, seed=-1 - seed) for seed in range(count)]
        self.zero = torch.zeros((), dtype=dtype, device=device, requires_grad=True)

    def inputs(self) -> list[tuple[Tensor]]:
        for x, pristine in zip(self.work, self.pristine, strict=True):
            x.copy_(pristine)
        return [(x,) for x in self.work]

    def inputs_and_outputs(self) -> list[tuple[Tensor, Tensor]]:
        return [(x, out) for (x,), out in zip(self.inputs(), self.outputs, strict=True)]

    def pre_activations(self) -> list[tuple[Tensor, GradientEdge, Tensor]]:
        """Results of another op, which autograd lets one overwrite, with the edge to stop the backward at."""
        made = [pristine + self.zero for pristine in self.pristine]
        return [(h, get_gradient_edge(h), g) for h, g in zip(made, self.upstream, strict=True)]


def there_and_back(function: Function) -> Callable[[Tensor, GradientEdge, Tensor], object]:
    def call(h: Tensor, edge: GradientEdge, upstream: Tensor) -> object:
        return torch.autograd.grad(function(h), edge, upstream)

    return call


def one_line_each(entry: Op) -> dict[str, Function]:
    """As one line of a user's own function."""
    stock, memkit = entry.stock, entry.memkit
    return {
        "stock": lambda x: stock(x),
        "memkit": lambda x: memkit(x),
        "memkit_inplace": lambda x: memkit(x, inplace=True),
    }


def contenders(entry: Op, compiled: Function | None, mode: str, buffers: Buffers) -> dict[str, Contender]:
    functions = one_line_each(entry)
    if compiled is not None:
        functions["compiled"] = compiled
    if mode == "forward":
        found = {name: Contender(buffers.inputs, function) for name, function in functions.items()}
        if entry.out is not None:
            found["reused"] = Contender(buffers.inputs_and_outputs, entry.out)
        elif entry.in_place is not None:
            found["reused"] = Contender(buffers.inputs, entry.in_place)
        found["copy"] = Contender(buffers.inputs_and_outputs, lambda x, out: out.copy_(x))
        return found
    in_place = entry.in_place_grad or entry.in_place  # out= has no gradient
    if in_place is not None:
        functions["reused"] = in_place
    return {
        name: Contender(buffers.pre_activations, there_and_back(each)) for name, each in functions.items()
    }


def compile_stock(
    entry: Op, elements: int, dtype: torch.dtype, device: str, modes: list[str], static: bool
) -> Function | None:
    """The stock op compiled, for this size or any, and run in the modes asked for; None where no compiler works."""
    stock = entry.stock
    compiled = torch.compile(own_code(lambda x: stock(x)), dynamic=not static)
    x = normal(elements, dtype, device, seed=0)

    def run() -> None:
        if "forward" in modes:
            with torch.no_grad():
                compiled(x)
        if "forward+backward" in modes:
            x.requires_grad_()
            compiled(x).backward(x.detach())

    return compiled if compiles(run) else None


def run_overhead(op_name: str, entry: Op, device: str, budget: float) -> list[dict[str, Any]]:
    """Nanoseconds a call takes on 8 elements, where there is nothing to compute."""
    pristine = normal(8, torch.float32, device, seed=0)
    zero = torch.zeros((), device=device, requires_grad=True)
    rows = []
    for grad in (False, True):
        functions: dict[str, Function | None] = {
            **one_line_each(entry),
            "stock_inplace": (entry.in_place_grad if grad and entry.in_place_grad else entry.in_place),
        }

        def prepare(grad: bool = grad) -> list[tuple[Any, ...]]:
            made = [pristine + zero if grad else pristine.clone() for _ in range(OVERHEAD_CALLS)]
            return [(made,)]

        def entrant(function: Function, prepare: Callable[[], list[tuple[Any, ...]]] = prepare) -> Contender:
            # The results are kept: freeing them, and the graph behind them, is not part of the call.
            return Contender(prepare, lambda made: [function(x) for x in made])

        with torch.set_grad_enabled(grad):
            entrants = {name: entrant(each) for name, each in functions.items() if each is not None}
            seconds = measure(entrants, device, budget, clock=host_sample)["seconds"]
        ns = {n: each / OVERHEAD_CALLS * 1e9 for n, each in seconds.items()}
        rows.append({"op": op_name, "grad": grad, "nanoseconds": ns})
    return rows


def cases(
    name: str, dtype: str, args: argparse.Namespace, budget: float
) -> list[tuple[dict[str, Any], Rounds]]:
    """Every size and mode, the smallest size first."""
    entry, compiled, made = OPS[name], None, []
    torch._dynamo.reset()
    largest_first = sorted(args.sizes, key=SIZES.__getitem__, reverse=True)
    for size in largest_first:
        if args.compile and (size == largest_first[0] or args.static):
            progress(f"{name} {dtype} {size} compiling")
            compiled = compile_stock(entry, SIZES[size], DTYPES[dtype], args.device, args.modes, args.static)
        buffers = Buffers(SIZES[size], DTYPES[dtype], args.device)
        for mode in args.modes:
            case = {"op": name, "dtype": dtype, "size": size, "elements": SIZES[size], "mode": mode}
            made.append((case, Rounds(contenders(entry, compiled, mode, buffers), args.device, budget)))
    return sorted(made, key=lambda each: each[0]["elements"])


def run(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        **machine.stamp(args.device),
        "cases": [],
        "overhead": [],
    }
    result["options"] = {name: getattr(args, name) for name in ("ops", "sizes", "dtypes", "modes", "static")}
    budget = 0.15 if args.quick else 0.4
    if args.device == "cuda":
        budget /= 3  # its clock is steadier
    settle_allocator()
    with until_interrupted(result):
        for name in args.ops:
            result["overhead"] += run_overhead(name, OPS[name], args.device, budget)
            for dtype in args.dtypes:
                measure_in_turns(cases(name, dtype, args, budget), result["cases"])
        if not args.once:
            measure_suspects_again(result)
    progress("")
    result["slower"] = slower(result)
    return result


def place(case: Mapping[str, Any]) -> tuple[str, str, str, str]:
    return case["op"], case["dtype"], case["size"], case["mode"]


def measure_suspects_again(result: dict[str, Any]) -> None:
    """The cases in which memkit seems slower, in more processes."""

    def suspect(ratio: Mapping[str, float]) -> bool:
        return any(b in ratio and ratio[a] > SUSPECT * ratio[b] for a, b in PAIRS)

    groups: dict[tuple[str, str], dict[tuple[str, str, str, str], list[dict[str, Any]]]] = {}
    for case in result["cases"]:
        if suspect(case["ratio"]):
            groups.setdefault((case["op"], case["dtype"]), {})[place(case)] = [case]
    for number in range(1, PROCESSES):
        for (name, dtype), found in groups.items():
            progress(f"{name} {dtype} in process {number + 1} of {PROCESSES}")
            sizes, modes = {key[2] for key in found}, {key[3] for key in found}
            for case in in_a_process(name, dtype, sizes, modes):
                if place(case) in found:
                    found[place(case)].append(case)
    for found in groups.values():
        for first, *others in found.values():
            for of in ("ratio", "seconds"):
                for name in others[0][of]:
                    first[of][name] = statistics.median(each[of][name] for each in (first, *others))
            first["processes"] = PROCESSES


def in_a_process(name: str, dtype: str, sizes: Iterable[str], modes: Iterable[str]) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "again.json"
        options = {
            "ops": name,
            "dtypes": dtype,
            "sizes": ",".join(sizes),
            "modes": ",".join(modes),
            "json": path,
        }
        told = [text for option, value in options.items() for text in (f"--{option}", str(value))]
        command = [sys.executable, __file__, *told, "--device", "cpu", "--no-compile", "--once"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
        return found


def slower(result: dict[str, Any]) -> list[str]:
    """Every case in which memkit takes more than SLOWER times what stock takes, in words."""
    found = []
    for case in result["cases"]:
        best = min(("memkit", "memkit_inplace"), key=case["seconds"].__getitem__)
        where = ("op", "dtype", "size", "mode")
        found += slower_than([case], where, CONTENDERS, (*PAIRS, (best, "compiled")))
    for row in result["overhead"]:
        ns = row["nanoseconds"]
        for mine, theirs in (("memkit", "stock"), ("memkit_inplace", "stock_inplace")):
            if theirs in ns and ns[mine] > SLOWER * ns[theirs]:
                where = f"{row['op']} 8 elements {'with' if row['grad'] else 'without'} grad"
                found.append(f"{where}: {CONTENDERS[mine]} {ns[mine]:.0f} ns a call, stock {ns[theirs]:.0f}")
    return found


def table(result: dict[str, Any]) -> str:
    gpu = result["hardware"]["device"] == "cuda"
    columns = [
        "op",
        "dtype",
        "size",
        "mode",
        "stock µs",
        *(label for n, label in CONTENDERS.items() if n != "stock"),
    ]
    columns += ["memkit GB/s", "copy GB/s"] if gpu else []
    body = []
    for case in result["cases"]:
        row = [case["op"], case["dtype"], case["size"], case["mode"], f"{case['seconds']['stock'] * 1e6:.1f}"]
        row += [f"{case['ratio'][n]:.2f}×" if n in case["ratio"] else "" for n in CONTENDERS if n != "stock"]
        if gpu:
            moved = 2 * case["elements"] * DTYPES[case["dtype"]].itemsize / 1e9
            row += [
                f"{moved / case['seconds'][n]:.0f}" if "copy" in case["seconds"] else ""
                for n in ("memkit", "copy")
            ]
        body.append(row)
    return text_table(columns, body)


def overhead_table(result: dict[str, Any]) -> str:
    names = ("stock", "memkit", "stock_inplace", "memkit_inplace")
    columns = ["op, 8 elements", "grad", *(f"{n.replace('_inplace', ' in place')} ns" for n in names)]
    body = []
    for row in result["overhead"]:
        ns = row["nanoseconds"]
        cells = [f"{ns[n]:.0f}" if n in ns else "" for n in names]
        body.append([row["op"], "yes" if row["grad"] else "no", *cells])
    return text_table(columns, body)


def main(argv: list[str] | None = None) -> int:
    choices = Choices(
        __doc__,
        {"ops": OPS, "sizes": SIZES, "dtypes": DTYPES, "modes": MODES},
        quick={
            "ops": ["relu", "gelu", "silu", "relu_squared"],
            "sizes": ["128Ki", "8Mi"],
            "dtypes": ["float32"],
        },
        file="activation",
        compiler=True,
    )
    choices.parser.add_argument(
        "--static", action="store_true", help="torch.compile for each size, not once for all"
    )
    choices.parser.add_argument("--once", action="store_true", help="in this process alone")
    args = choices.parse(argv)
    args.once |= args.quick or args.device != "cpu"
    result = run(args)
    print(table(result), overhead_table(result), origin(result), sep="\n\n")
    return write(result, args)


if __name__ == "__main__":
    sys.exit(main())

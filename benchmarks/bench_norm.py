"""The norms: stock PyTorch, stock compiled and memkit in one run, forward and forward+backward.

    python benchmarks/bench_norm.py                 # all of it: some ten minutes
    python benchmarks/bench_norm.py --quick         # two ops, two sizes, float32
    python benchmarks/bench_norm.py --ops rms_norm --json --update

Rows are of 1,024 elements, images of 64 channels with 16 x 16 pixels. forward+backward computes the gradients of input
and parameters; in forward nothing does. Ratios are the contender's time over stock's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Contender, buffer_count, measure, normal, ratios
from torch import Tensor

import memkit.functional as M
from memkit._reference_norm import STOCK
from memkit.bench import machine
from memkit.bench.report import origin, text_table, write_json

KIND = "memkit-norm"
FORMAT = 1
RESULTS = Path(__file__).resolve().parent / "results"
COLUMNS = 1024
CHANNELS, SIDE = 64, 16

Function = Callable[..., Any]


@dataclass(frozen=True)
class Op:
    """`call(function, tensors, parameters)`: one call of stock's function or memkit's."""

    name: str
    inputs: int
    parameters: int
    call: Callable[[Function, list[Tensor], list[Tensor]], Any]
    image: bool = False

    @property
    def overwrites(self) -> bool:
        """Whether memkit can work in the input's memory."""
        return self.inputs == 1 and not self.image


def rows(name: str, inputs: int, parameters: int) -> Op:
    eps = 1e-6 if "rms" in name else 1e-5
    return Op(name, inputs, parameters, lambda f, x, p: f(*x, (COLUMNS,), *p, eps))


def batch(act: str) -> Op:
    return Op(
        "batch_norm_act", 1, 2, lambda f, x, p: f(*x, None, None, *p, True, 0.1, 1e-5, act=act), image=True
    )


OPS: dict[str, Op] = {
    "layer_norm": rows("layer_norm", 1, 2),
    "rms_norm": rows("rms_norm", 1, 1),
    "add_layer_norm": rows("add_layer_norm", 2, 2),
    "add_rms_norm": rows("add_rms_norm", 2, 1),
    "group_norm": Op("group_norm", 1, 2, lambda f, x, p: f(*x, 8, *p, 1e-5), image=True),
    "batch_norm_relu": batch("relu"),
    "batch_norm_silu": batch("silu"),
}
SIZES = {"16Ki": 1 << 14, "128Ki": 1 << 17, "1Mi": 1 << 20, "8Mi": 1 << 23, "32Mi": 1 << 25}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODES = ("forward", "forward+backward")
CONTENDERS = {
    "stock": "stock",
    "compiled": "stock compiled",
    "memkit": "memkit",
    "memkit_inplace": "memkit in place",
}
SLOWER = 1.05


class Buffers:
    """Inputs, parameters and incoming gradients of one op, size and dtype."""

    def __init__(self, op: Op, elements: int, dtype: torch.dtype, device: str) -> None:
        shape = (-1, CHANNELS, SIDE, SIDE) if op.image else (-1, COLUMNS)
        self.op = op
        self.count = buffer_count(elements * op.inputs, dtype, device)
        self.sets = [
            [normal(elements, dtype, device, 10 * i + k).view(shape) for k in range(op.inputs)]
            for i in range(self.count)
        ]
        size = CHANNELS if op.image else COLUMNS
        self.parameters = [1 + 0.1 * normal(size, dtype, device, -1)]
        self.parameters += [0.1 * normal(size, dtype, device, -2)] * (op.parameters - 1)
        self.parameters = [p.clone().requires_grad_() for p in self.parameters]
        self.upstream = normal(elements, dtype, device, -3).view(shape)

    def forward(self) -> list[tuple[list[Tensor]]]:
        return [(tensors,) for tensors in self.sets]

    def backward(self) -> list[tuple[list[Tensor]]]:
        return [([t.detach().requires_grad_() for t in tensors],) for tensors in self.sets]

    def contender(self, function: Function, mode: str) -> Contender:
        if mode == "forward":
            return Contender(self.forward, lambda x: self.op.call(function, x, self.parameters))

        def there_and_back(x: list[Tensor]) -> object:
            out = self.op.call(function, x, self.parameters)
            outs = out if isinstance(out, tuple) else (out,)
            return torch.autograd.grad(outs, [*x, *self.parameters], [self.upstream] * len(outs))

        return Contender(self.backward, there_and_back)


def compiled_stock(op: Op, buffers: Buffers, mode: str) -> Function | None:
    """Stock compiled for any number of rows; None where no compiler works."""
    compiled = torch.compile(lambda *a, **k: STOCK[op.name](*a, **k), dynamic=True)
    try:
        contender = buffers.contender(compiled, mode)
        with torch.set_grad_enabled(mode != "forward"):
            contender.call(*contender.prepare()[0])
    except Exception as error:
        print(f"not compiled: {type(error).__name__}: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return None
    return compiled


def run(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"kind": KIND, "format": FORMAT, **machine.stamp(args.device), "cases": []}
    budget = 0.15 if args.quick else 0.4
    for name in args.ops:
        op = OPS[name]
        for dtype in args.dtypes:
            compiled: dict[str, Function | None] = {}
            torch._dynamo.reset()
            for size in sorted(args.sizes, key=SIZES.__getitem__, reverse=True):
                buffers = Buffers(op, SIZES[size], DTYPES[dtype], args.device)
                for mode in args.modes:
                    if args.compile and mode not in compiled:
                        compiled[mode] = compiled_stock(op, buffers, mode)
                    functions = {"stock": STOCK[op.name], "memkit": getattr(M, op.name)}
                    if op.overwrites and mode == "forward":
                        functions["memkit_inplace"] = partial(getattr(M, op.name), inplace=True)
                    if compiled.get(mode):
                        functions["compiled"] = compiled[mode]
                    with torch.set_grad_enabled(mode != "forward"):
                        entrants = {n: buffers.contender(f, mode) for n, f in functions.items()}
                        times = measure(entrants, args.device, budget)
                    result["cases"].append(
                        {
                            "op": name,
                            "dtype": dtype,
                            "size": size,
                            "elements": SIZES[size],
                            "mode": mode,
                            "rounds": len(times["stock"]),
                            "seconds": {n: statistics.median(taken) for n, taken in times.items()},
                            "ratio": ratios(times, "stock"),
                        }
                    )
    return result


def finish(result: dict[str, Any]) -> None:
    """Cases in order, and every one in which memkit takes more than SLOWER times what a contender takes, in words."""
    order = [list(OPS), list(DTYPES)]
    result["cases"].sort(key=lambda c: (order[0].index(c["op"]), order[1].index(c["dtype"]), c["elements"]))
    result["slower"] = []
    for case in result["cases"]:
        for theirs in ("stock", "compiled"):
            if theirs in case["ratio"] and case["ratio"]["memkit"] > SLOWER * case["ratio"][theirs]:
                factor = case["ratio"]["memkit"] / case["ratio"][theirs]
                where = f"{case['op']} {case['dtype']} {case['size']} {case['mode']}"
                result["slower"].append(
                    f"{where}: memkit takes {factor:.2f}× the time of {CONTENDERS[theirs]}"
                )


def table(result: dict[str, Any]) -> str:
    names = [n for n in CONTENDERS if n != "stock"]
    body = [
        [c["op"], c["dtype"], c["size"], c["mode"], f"{c['seconds']['stock'] * 1e6:.1f}"]
        + [f"{c['ratio'][n]:.2f}×" if n in c["ratio"] else "" for n in names]
        for c in result["cases"]
    ]
    return text_table(["op", "dtype", "size", "mode", "stock µs", *(CONTENDERS[n] for n in names)], body)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    listed = {"ops": list(OPS), "sizes": list(SIZES), "dtypes": list(DTYPES), "modes": list(MODES)}
    for name, known in listed.items():
        parser.add_argument(f"--{name}", metavar="A,B", help=f"of {', '.join(known)} (default: all)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--quick", action="store_true", help="two ops, two sizes, float32")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without stock compiled")
    parser.add_argument(
        "--json", nargs="?", const="", metavar="FILE", help="default: results/norm-DEVICE.json"
    )
    parser.add_argument("--update", action="store_true", help="keep the file's cases of other ops")
    args = parser.parse_args(argv)
    quick = {"ops": ["layer_norm", "rms_norm"], "sizes": ["128Ki", "8Mi"], "dtypes": ["float32"]}
    for name, known in listed.items():
        text = getattr(args, name)
        chosen = text.split(",") if text else (quick.get(name, known) if args.quick else known)
        unknown = [each for each in chosen if each not in known]
        if unknown:
            parser.error(f"--{name}: expected some of {', '.join(known)}, got {', '.join(unknown)}")
        setattr(args, name, chosen)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    result = run(args)
    finish(result)
    print(table(result), origin(result), sep="\n\n")
    if args.json is not None:
        file = Path(args.json) if args.json else RESULTS / f"norm-{args.device}.json"
        if args.update and file.exists():
            done = {(c["op"], c["dtype"], c["size"], c["mode"]) for c in result["cases"]}
            before = json.loads(file.read_text())["cases"]
            result["cases"] += [c for c in before if (c["op"], c["dtype"], c["size"], c["mode"]) not in done]
            finish(result)
        write_json(result, file)
        print(f"wrote {file.name}")
    print(f"\nmemkit slower by more than {SLOWER - 1:.0%}: {len(result['slower']) or 'nowhere'}")
    for line in result["slower"]:
        print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Softmax: stock PyTorch, stock compiled and memkit in one run, forward and forward+backward.

    python benchmarks/bench_softmax.py               # all of it: some minutes
    python benchmarks/bench_softmax.py --quick       # softmax, two sizes, float32
    python benchmarks/bench_softmax.py --ops masked --json

Rows of 64, 1,024 and 32,768 elements. softmax and log_softmax are torch.nn.functional's; masked is softmax of scaled scores
of [heads, queries, keys] with a bool mask, causal with a causal one, which stock takes several operators for. Ratios are
the contender's time over stock's.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Contender, buffer_count, measure, normal, ratios
from torch import Tensor
from torch.nn import functional as F

import memkit.functional as M
from memkit.bench import machine
from memkit.bench.report import origin, text_table, write_json

KIND = "memkit-softmax"
FORMAT = 1
RESULTS = Path(__file__).resolve().parent / "results"
OPS = ("softmax", "log_softmax", "masked", "causal")
COLUMNS = {"64": 64, "1024": 1024, "32768": 32768}
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
    """Inputs and an incoming gradient of one op, size and dtype."""

    def __init__(self, op: str, elements: int, columns: int, dtype: torch.dtype, device: str) -> None:
        scores = op in ("masked", "causal")
        queries = min(columns, elements // columns)
        shape = (-1, queries, columns) if scores else (-1, columns)
        self.options: dict[str, Any] = {"log": True} if op == "log_softmax" else {}
        if scores:
            self.options["scale"] = 0.125
        if op == "masked":
            self.options["mask"] = normal(queries * columns, dtype, device, -2).view(queries, columns) > -1
        if op == "causal":
            self.options["causal"] = True
        count = buffer_count(elements, dtype, device)
        self.sets = [normal(elements, dtype, device, i).view(shape) for i in range(count)]
        self.upstream = normal(elements, dtype, device, -1).view(shape)

    def contender(self, function: Any, mode: str) -> Contender:
        if mode == "forward":
            return Contender(lambda: [(x,) for x in self.sets], lambda x: function(x, **self.options))

        def there_and_back(x: Tensor) -> object:
            return torch.autograd.grad(function(x, **self.options), x, self.upstream)

        return Contender(lambda: [(x.detach().requires_grad_(),) for x in self.sets], there_and_back)


def stock(
    x: Tensor, log: bool = False, scale: float = 1.0, mask: Tensor | None = None, causal: bool = False
) -> Tensor:
    """As people write it, without a thought for rows of which nothing is left."""
    z = x if scale == 1 else x * scale
    if causal:
        mask = torch.ones(z.shape[-2:], dtype=torch.bool, device=z.device).tril()
    if mask is not None:
        z = z.masked_fill(~mask, -torch.inf)
    return (F.log_softmax if log else F.softmax)(z, -1)


def ours(x: Tensor, log: bool = False, inplace: bool = False, **options: Any) -> Tensor:
    return (M.log_softmax if log else M.softmax)(x, -1, inplace=inplace, **options)


def compiled_stock(buffers: Buffers, mode: str) -> Any:
    """Stock compiled for any number of rows; None where no compiler works."""
    compiled = torch.compile(lambda *a, **k: stock(*a, **k), dynamic=True)
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
    budget = 0.15 if args.quick else 0.3
    for op, dtype, columns in itertools.product(args.ops, args.dtypes, args.columns):
        compiled: dict[str, Any] = {}
        torch._dynamo.reset()
        for size in args.sizes:
            if SIZES[size] < COLUMNS[columns]:
                continue
            buffers = Buffers(op, SIZES[size], COLUMNS[columns], DTYPES[dtype], args.device)
            for mode in args.modes:
                if args.compile and mode not in compiled:
                    compiled[mode] = compiled_stock(buffers, mode)
                functions = {"stock": stock, "memkit": ours}
                if mode == "forward":
                    functions["memkit_inplace"] = partial(ours, inplace=True)
                if compiled.get(mode):
                    functions["compiled"] = compiled[mode]
                with torch.set_grad_enabled(mode != "forward"):
                    entrants = {n: buffers.contender(f, mode) for n, f in functions.items()}
                    times = measure(entrants, args.device, budget)
                result["cases"].append(
                    {
                        "op": op,
                        "dtype": dtype,
                        "columns": COLUMNS[columns],
                        "size": size,
                        "elements": SIZES[size],
                        "mode": mode,
                        "rounds": len(times["stock"]),
                        "seconds": {n: statistics.median(taken) for n, taken in times.items()},
                        "ratio": ratios(times, "stock"),
                    }
                )
    result["slower"] = [
        f"{c['op']} {c['dtype']} {c['size']} in rows of {c['columns']} {c['mode']}: memkit takes "
        f"{c['ratio']['memkit'] / c['ratio'][theirs]:.2f}× the time of {CONTENDERS[theirs]}"
        for c in result["cases"]
        for theirs in ("stock", "compiled")
        if theirs in c["ratio"] and c["ratio"]["memkit"] > SLOWER * c["ratio"][theirs]
    ]
    return result


def table(result: dict[str, Any]) -> str:
    names = [n for n in CONTENDERS if n != "stock"]
    body = [
        [c["op"], c["dtype"], str(c["columns"]), c["size"], c["mode"], f"{c['seconds']['stock'] * 1e6:.1f}"]
        + [f"{c['ratio'][n]:.2f}×" if n in c["ratio"] else "" for n in names]
        for c in result["cases"]
    ]
    return text_table(
        ["op", "dtype", "columns", "size", "mode", "stock µs", *(CONTENDERS[n] for n in names)], body
    )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    listed = {
        "ops": list(OPS),
        "columns": list(COLUMNS),
        "sizes": list(SIZES),
        "dtypes": list(DTYPES),
        "modes": list(MODES),
    }
    for name, known in listed.items():
        parser.add_argument(f"--{name}", metavar="A,B", help=f"of {', '.join(known)} (default: all)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--quick", action="store_true", help="softmax, two sizes, float32")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without stock compiled")
    parser.add_argument(
        "--json", nargs="?", const="", metavar="FILE", help="default: results/softmax-DEVICE.json"
    )
    args = parser.parse_args(argv)
    quick = {"ops": ["softmax"], "sizes": ["128Ki", "8Mi"], "dtypes": ["float32"]}
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
    print(table(result), origin(result), sep="\n\n")
    if args.json is not None:
        file = Path(args.json) if args.json else RESULTS / f"softmax-{args.device}.json"
        write_json(result, file)
        print(f"wrote {file.name}")
    print(f"\nmemkit slower by more than {SLOWER - 1:.0%}: {len(result['slower']) or 'nowhere'}")
    for line in result["slower"]:
        print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

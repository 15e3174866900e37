"""Rotary embeddings: stock PyTorch, stock compiled and memkit in one run, forward and forward+backward.

    python benchmarks/bench_rotary.py               # all of it: some minutes
    python benchmarks/bench_rotary.py --quick       # two sizes, float32
    python benchmarks/bench_rotary.py --styles half --json

q and k of 8 and 2 heads of 64 elements, [batch, positions, heads, size] seen as [batch, heads, positions, size], as layers
make them; elements are those of both. Stock is what transformers' models write. Ratios are the contender's time over
stock's.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import Contender, buffer_count, measure, normal, ratios
from torch import Tensor

import memkit.functional as M
from memkit._reference_rotary import stock, tables
from memkit.bench import machine
from memkit.bench.report import origin, text_table, write_json

KIND = "memkit-rotary"
FORMAT = 1
RESULTS = Path(__file__).resolve().parent / "results"
HEADS, KEY_HEADS, WIDTH, POSITIONS = 8, 2, 64, 256
STYLES = {"half": False, "interleaved": True}
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
    """Packed heads, tables and incoming gradients of one size and dtype."""

    def __init__(self, elements: int, dtype: torch.dtype, device: str, interleaved: bool) -> None:
        positions = max(1, elements // ((HEADS + KEY_HEADS) * WIDTH))
        batch, length = max(1, positions // POSITIONS), min(positions, POSITIONS)
        shape = (batch, length, HEADS + KEY_HEADS, WIDTH)
        numel = batch * length * (HEADS + KEY_HEADS) * WIDTH
        self.packed = [
            normal(numel, dtype, device, i).view(shape) for i in range(buffer_count(numel, dtype, device))
        ]
        self.tables = [t.to(device, dtype) for t in tables(length, WIDTH, interleaved=interleaved)]
        self.upstream = [torch.randn_like(x) for x in self.split(self.packed[0])]

    @staticmethod
    def split(x: Tensor) -> list[Tensor]:
        return [x[:, :, :HEADS].transpose(1, 2), x[:, :, HEADS:].transpose(1, 2)]

    def contender(self, function: Any, mode: str) -> Contender:
        if mode == "forward":
            return Contender(
                lambda: [(self.split(x),) for x in self.packed], lambda x: function(*x, *self.tables)
            )

        def there_and_back(x: list[Tensor]) -> object:
            return torch.autograd.grad(function(*x, *self.tables), x, self.upstream)

        return Contender(
            lambda: [([t.detach().requires_grad_() for t in self.split(x)],) for x in self.packed],
            there_and_back,
        )


def both(interleaved: bool, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return stock(q, cos, sin, interleaved=interleaved), stock(k, cos, sin, interleaved=interleaved)


def compiled_stock(interleaved: bool, buffers: Buffers, mode: str) -> Any:
    """Stock compiled for any shape; None where no compiler works."""
    compiled = torch.compile(partial(both, interleaved), dynamic=True)
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
    for style in args.styles:
        for dtype in args.dtypes:
            compiled: dict[str, Any] = {}
            torch._dynamo.reset()
            for size in args.sizes:
                buffers = Buffers(SIZES[size], DTYPES[dtype], args.device, STYLES[style])
                for mode in args.modes:
                    if args.compile and mode not in compiled:
                        compiled[mode] = compiled_stock(STYLES[style], buffers, mode)
                    ours = partial(M.apply_rotary, interleaved=STYLES[style])
                    functions = {"stock": partial(both, STYLES[style]), "memkit": ours}
                    if mode == "forward":
                        functions["memkit_inplace"] = partial(ours, inplace=True)
                    if compiled.get(mode):
                        functions["compiled"] = compiled[mode]
                    with torch.set_grad_enabled(mode != "forward"):
                        entrants = {n: buffers.contender(f, mode) for n, f in functions.items()}
                        times = measure(entrants, args.device, budget)
                    result["cases"].append(
                        {
                            "style": style,
                            "dtype": dtype,
                            "size": size,
                            "elements": SIZES[size],
                            "mode": mode,
                            "rounds": len(times["stock"]),
                            "seconds": {n: statistics.median(taken) for n, taken in times.items()},
                            "ratio": ratios(times, "stock"),
                        }
                    )
    result["slower"] = [
        f"{c['style']} {c['dtype']} {c['size']} {c['mode']}: memkit takes "
        f"{c['ratio']['memkit'] / c['ratio'][theirs]:.2f}× the time of {CONTENDERS[theirs]}"
        for c in result["cases"]
        for theirs in ("stock", "compiled")
        if theirs in c["ratio"] and c["ratio"]["memkit"] > SLOWER * c["ratio"][theirs]
    ]
    return result


def table(result: dict[str, Any]) -> str:
    names = [n for n in CONTENDERS if n != "stock"]
    body = [
        [c["style"], c["dtype"], c["size"], c["mode"], f"{c['seconds']['stock'] * 1e6:.1f}"]
        + [f"{c['ratio'][n]:.2f}×" if n in c["ratio"] else "" for n in names]
        for c in result["cases"]
    ]
    return text_table(["pairs", "dtype", "size", "mode", "stock µs", *(CONTENDERS[n] for n in names)], body)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    listed = {"styles": list(STYLES), "sizes": list(SIZES), "dtypes": list(DTYPES), "modes": list(MODES)}
    for name, known in listed.items():
        parser.add_argument(f"--{name}", metavar="A,B", help=f"of {', '.join(known)} (default: all)")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--quick", action="store_true", help="two sizes, float32")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="without stock compiled")
    parser.add_argument(
        "--json", nargs="?", const="", metavar="FILE", help="default: results/rotary-DEVICE.json"
    )
    args = parser.parse_args(argv)
    quick = {"sizes": ["128Ki", "8Mi"], "dtypes": ["float32"]}
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
        file = Path(args.json) if args.json else RESULTS / f"rotary-{args.device}.json"
        write_json(result, file)
        print(f"wrote {file.name}")
    print(f"\nmemkit slower by more than {SLOWER - 1:.0%}: {len(result['slower']) or 'nowhere'}")
    for line in result["slower"]:
        print(f"  {line}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

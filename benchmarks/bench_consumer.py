"""Consumers: an operator and the layer behind it; stock PyTorch, stock compiled, memkit's parts and node in one run.

    python benchmarks/bench_consumer.py                 # all of it: some ten minutes
    python benchmarks/bench_consumer.py --quick         # the smallest size, float32
    python benchmarks/bench_consumer.py --ops gelu,swiglu --json --update

A size is tokens x width, as in a GPT: an MLP's hidden tensors have four times the width (gated: 8/3), a norm is in front of
a layer three times as wide, a batch norm with relu in front of a 3 x 3 convolution. Times: forward and backward, ratios to
stock eager. Memory is above the start: what is kept for backward, the operator's input made inside, and the peak.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from common import DTYPES, Choices, Contender, compiles, measure, normal, slower_than, write
from torch import Tensor

import memkit.functional as M
from memkit._reference_norm import batch_norm_act
from memkit.bench import machine
from memkit.bench.report import origin, text_table
from memkit.memory import measure as measure_memory
from memkit.memory import timeline

KIND = "memkit-consumer"
FORMAT = 1
SIZES = {"512x256": (512, 256), "1024x512": (1024, 512), "2048x768": (2048, 768)}
CONTENDERS = {"stock": "stock", "compiled": "stock compiled", "parts": "memkit, parts", "memkit": "memkit"}
WHERE = ("op", "dtype", "size")

Function = Callable[..., Tensor]
Shapes = Callable[[int, int], tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Op:
    """Functions of the operator's inputs, then the other tensors; ``shapes`` of all of them for tokens and width."""

    inputs: int
    shapes: Shapes
    stock: Function
    parts: Function
    memkit: Function


def mlp(tokens: int, width: int) -> tuple[tuple[int, ...], ...]:
    return (tokens, 4 * width), (width, 4 * width), (width,)


def gate(tokens: int, width: int) -> tuple[tuple[int, ...], ...]:
    hidden = 8 * width // 3 // 64 * 64
    return (tokens, hidden), (tokens, hidden), (width, hidden)


def layer_norm(tokens: int, width: int) -> tuple[tuple[int, ...], ...]:
    return (tokens, width), (3 * width, width), (3 * width,), (width,), (width,)


def rms_norm(tokens: int, width: int) -> tuple[tuple[int, ...], ...]:
    return (tokens, width), (3 * width, width), (width,)


def images(tokens: int, width: int) -> tuple[tuple[int, ...], ...]:
    channels = width // 4
    return (tokens // 64, channels, 16, 16), (channels, channels, 3, 3), (channels,), (channels,)


OPS: dict[str, Op] = {
    "gelu": Op(
        1,
        mlp,
        lambda x, w, b: F.linear(F.gelu(x), w, b),
        lambda x, w, b: F.linear(M.gelu(x), w, b),
        lambda x, w, b: M.act_linear(x, w, b),
    ),
    "silu": Op(
        1,
        mlp,
        lambda x, w, b: F.linear(F.silu(x), w, b),
        lambda x, w, b: F.linear(M.silu(x), w, b),
        lambda x, w, b: M.act_linear(x, w, b, "silu"),
    ),
    "dropout": Op(
        1,
        mlp,
        lambda x, w, b: F.linear(F.dropout(x, 0.1), w, b),
        lambda x, w, b: F.linear(M.dropout(x, 0.1), w, b),
        lambda x, w, b: M.dropout_linear(x, w, b, 0.1),
    ),
    "gelu_dropout": Op(
        1,
        mlp,
        lambda x, w, b: F.linear(F.dropout(F.gelu(x), 0.1), w, b),
        lambda x, w, b: F.linear(M.act_dropout(x, "gelu", 0.1), w, b),
        lambda x, w, b: M.dropout_linear(x, w, b, 0.1, act="gelu"),
    ),
    "swiglu": Op(
        2,
        gate,
        lambda g, u, w: F.linear(F.silu(g) * u, w),
        lambda g, u, w: F.linear(M.swiglu(g, u), w),
        lambda g, u, w: M.glu_linear(g, u, w),
    ),
    "layer_norm": Op(
        1,
        layer_norm,
        lambda x, w, b, nw, nb: F.linear(F.layer_norm(x, nw.shape, nw, nb), w, b),
        lambda x, w, b, nw, nb: F.linear(M.layer_norm(x, nw.shape, nw, nb), w, b),
        lambda x, w, b, nw, nb: M.norm_linear(x, w, b, norm_weight=nw, norm_bias=nb),
    ),
    "rms_norm": Op(
        1,
        rms_norm,
        lambda x, w, nw: F.linear(F.rms_norm(x, nw.shape, nw, 1e-6), w),
        lambda x, w, nw: F.linear(M.rms_norm(x, nw.shape, nw, 1e-6), w),
        lambda x, w, nw: M.norm_linear(x, w, norm="rms_norm", norm_weight=nw, eps=1e-6),
    ),
    "norm_act_conv2d": Op(
        1,
        images,
        lambda x, w, nw, nb: F.conv2d(batch_norm_act(x, None, None, nw, nb, True, act="relu"), w, padding=1),
        lambda x, w, nw, nb: F.conv2d(
            M.batch_norm_act(x, None, None, nw, nb, True, act="relu"), w, padding=1
        ),
        lambda x, w, nw, nb: M.norm_act_conv2d(x, w, padding=1, norm_weight=nw, norm_bias=nb, training=True),
    ),
}


class Case:
    """The tensors of one op, size and dtype."""

    def __init__(self, op: Op, size: str, dtype: torch.dtype, device: str) -> None:
        self.op = op
        shapes = op.shapes(*SIZES[size])
        self.leaves = []
        for i, shape in enumerate(shapes):
            t = normal(torch.Size(shape).numel(), dtype, device, i).view(shape)
            fan_in = torch.Size(shape[1:]).numel() if i >= op.inputs and len(shape) > 1 else 1
            self.leaves.append(t / fan_in**0.5 + (1 if i >= op.inputs and len(shape) == 1 else 0))
        self.leaves = [t.requires_grad_() for t in self.leaves]
        with torch.no_grad():
            out = op.memkit(*self.leaves)
        self.upstream = normal(out.numel(), dtype, device, 99).view(out.shape)
        self.repeat = 8 if out.numel() < 1 << 18 else 1

    def there_and_back(self, function: Function) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(*self.leaves), self.leaves, self.upstream)

    def contender(self, function: Function) -> Contender:
        return Contender(lambda: [()] * self.repeat, lambda: self.there_and_back(function))

    def memory(self, function: Function, device: str) -> dict[str, int]:
        """Of the function with inputs that only it holds."""

        def forward() -> Tensor:
            return function(*(t * 1 for t in self.leaves[: self.op.inputs]), *self.leaves[self.op.inputs :])

        def step() -> None:
            torch.autograd.grad(forward(), self.leaves, self.upstream)

        step()
        return {
            "saved": measure_memory(forward, device=device).saved,
            "peak": max(alive for _, alive in timeline(step, device=device)),  # without hooks
        }


def run(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"kind": KIND, "format": FORMAT, **machine.stamp(args.device), "cases": []}
    for name in args.ops:
        op = OPS[name]
        for dtype in args.dtypes:
            for size in args.sizes:
                torch._dynamo.reset()
                case = Case(op, size, DTYPES[dtype], args.device)
                functions = {"stock": op.stock, "parts": op.parts, "memkit": op.memkit}
                compiled = torch.compile(op.stock, dynamic=False)
                if args.compile and compiles(lambda f=compiled, c=case: c.there_and_back(f)):
                    functions["compiled"] = compiled
                found = measure(
                    {n: case.contender(f) for n, f in functions.items()},
                    args.device,
                    args.budget,
                    least=5,
                    most=40,
                )
                result["cases"].append(
                    {
                        "op": name,
                        "dtype": dtype,
                        "size": size,
                        **found,
                        "memory": {n: case.memory(f, args.device) for n, f in functions.items()},
                    }
                )
    return result


def finish(result: dict[str, Any]) -> None:
    """Cases in order, and every one in which memkit takes more than SLOWER times what a contender takes, in words."""
    orders = [list(OPS), list(DTYPES), list(SIZES)]
    result["cases"].sort(
        key=lambda c: tuple(o.index(c[k]) for o, k in zip(orders, ("op", "dtype", "size"), strict=True))
    )
    result["slower"] = slower_than(result["cases"], WHERE, CONTENDERS)


def table(result: dict[str, Any]) -> str:
    names = [n for n in CONTENDERS if n != "stock"]

    def memory(case: dict[str, Any], what: str) -> str:
        found = [case["memory"][n][what] / (1 << 20) for n in CONTENDERS if n in case["memory"]]
        return " ".join(f"{each:.1f}" for each in found)

    body = [
        [c["op"], c["dtype"], c["size"], f"{c['seconds']['stock'] * 1e3:.2f}"]
        + [f"{c['ratio'][n]:.2f}×" if n in c["ratio"] else "" for n in names]
        + [memory(c, "saved"), memory(c, "peak")]
        for c in result["cases"]
    ]
    heads = ["op", "dtype", "size", "stock ms", *(CONTENDERS[n] for n in names)]
    return text_table([*heads, "kept, MiB (in this order, after stock's)", "peak, MiB"], body)


def main(argv: list[str] | None = None) -> int:
    choices = Choices(
        __doc__,
        {"ops": OPS, "sizes": SIZES, "dtypes": DTYPES},
        quick={"sizes": ["512x256"], "dtypes": ["float32"]},
        file="consumer",
    )
    choices.parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="without stock compiled"
    )
    choices.parser.add_argument("--budget", type=float, default=3.0, help="seconds a case (default: 3)")
    choices.parser.add_argument("--update", action="store_true", help="keep the file's other cases")
    args = choices.parse(argv)
    result = run(args)
    finish(result)
    print(table(result), origin(result), sep="\n\n")
    if args.update and args.json is not None and args.json.exists():
        measured = [[case[name] for name in WHERE] for case in result["cases"]]
        before = json.loads(args.json.read_text())["cases"]
        result["cases"] += [case for case in before if [case[name] for name in WHERE] not in measured]
        finish(result)
    return write(result, args)


if __name__ == "__main__":
    sys.exit(main())

"""memkit beside Liger-Kernel: stock PyTorch, stock compiled, Liger-Kernel's Triton kernels, memkit; time, memory, error.

    python benchmarks/bench_peers.py                      # every size up to 64 Mi elements
    python benchmarks/bench_peers.py --quick --no-compile # 32 Mi elements
    python benchmarks/bench_peers.py --ops rms_norm,softmax --sizes 1Mi,32Mi
    python benchmarks/bench_peers.py --json               # benchmarks/results/peers-cuda.json

Each call gets inputs that another operator made and nobody else holds, and gradients of its own, made before the clock
starts: Liger-Kernel writes gradients over the inputs it saved (gated units), over the logits (cross entropy) and over the
incoming gradients (RMSNorm, rotary). "memkit in place" may overwrite its inputs as well. Inputs and incoming gradients are
there at the start, so neither they nor what is written over them count into a peak; results live until backward ends.
`saved` are the bytes that the forward keeps and made itself, `saved_total` those with inputs and parameters. Errors are
the largest of a kind, relative by norm to stock's in float64. Liger-Kernel's losses wait for the device, within the time.

Rows have 4,096 elements, images 64 channels of 16 x 16 pixels, rotary 32 and 8 heads of 128 elements; losses have 32,768
classes, and a size is that of the logits, which linear cross entropy makes from 1,024 features.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from bench_ops import outputs
from common import (
    DTYPES,
    MODES,
    Choices,
    Contender,
    Rounds,
    buffer_count,
    measure_in_turns,
    progress,
    settle_allocator,
    slower_than,
    write,
)
from common import SIZES as COMMON_SIZES
from ops.norm import CHANNELS, image, parameters
from ops.op import Function, Op, Size
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import memkit.functional as M
from memkit import memory
from memkit._reference import ACTIVATIONS
from memkit._reference_norm import add_rms_norm
from memkit._reference_rotary import stock as stock_rotary
from memkit._reference_rotary import tables
from memkit.bench import machine
from memkit.bench.report import origin, text_table
from memkit.bench.timing import until_interrupted

KIND = "memkit-peers"
FORMAT = 1
SIZES = COMMON_SIZES | {"64Mi": 1 << 26}
CONTENDERS = {
    "stock": "stock",
    "compiled": "stock compiled",
    "liger": "Liger",
    "memkit": "memkit",
    "in_place": "memkit in place",
}
PAIRS = tuple(("memkit", name) for name in ("stock", "compiled", "liger"))

COLUMNS = 4096
CLASSES, FEATURES = 32768, 1024
HEADS, KEY_HEADS, WIDTH, POSITIONS = 32, 8, 128, 2048
GROUPS = 8
RMS_EPS, EPS = 1e-6, 1e-5

Exact = tuple[list[Tensor], list[Tensor]]  # results, gradients


@dataclass(frozen=True, kw_only=True)
class Peer(Op):
    """`liger`: a function of the same tensors."""

    liger: Function


@functools.cache
def ligers(name: str) -> Function:
    """Of Liger-Kernel's default implementation; .apply takes no keywords."""
    function: Function = getattr(importlib.import_module("liger_kernel.ops"), name).apply
    return function


def rows(count: int) -> Callable[[Size], list[Tensor]]:
    return lambda size: [size.normal(-1, COLUMNS, part=i) for i in range(count)]


def heads(size: Size) -> list[Tensor]:
    """[batch, positions, heads, width] seen as [batch, heads, positions, width], as layers make them."""
    tokens, length = size.elements // ((HEADS + KEY_HEADS) * WIDTH), positions(size)
    shapes = [(tokens // length, length, count, WIDTH) for count in (HEADS, KEY_HEADS)]
    return [size.normal(*shape, part=i).transpose(1, 2) for i, shape in enumerate(shapes)]


def positions(size: Size) -> int:
    return min(POSITIONS, size.elements // ((HEADS + KEY_HEADS) * WIDTH))


def tables_of(size: Size) -> list[Tensor]:
    return [t.to(size.device, size.dtype) for t in tables(positions(size), WIDTH)]


def logits(size: Size) -> list[Tensor]:
    return [size.normal(-1, CLASSES)]


def targets(size: Size) -> list[Tensor]:
    count = size.elements // CLASSES
    return [torch.randint(CLASSES, (count,), generator=torch.Generator().manual_seed(0)).to(size.device)]


def hidden(size: Size) -> list[Tensor]:
    return [size.normal(size.elements // CLASSES, FEATURES)]


def layer_and_targets(size: Size) -> list[Tensor]:
    weight = size.normal(CLASSES, FEATURES, part=8) / FEATURES**0.5
    return [weight.requires_grad_(), *targets(size)]


PEERS: dict[str, Peer] = {
    "rms_norm": Peer(
        lambda x, w: F.rms_norm(x, w.shape, w, RMS_EPS),
        lambda x, w: M.rms_norm(x, w.shape, w, RMS_EPS),
        lambda x, w: M.rms_norm(x, w.shape, w, RMS_EPS, inplace=True),
        rows(1),
        parameters(1, COLUMNS),
        liger=lambda x, w: ligers("LigerRMSNormFunction")(x, w, RMS_EPS),
    ),
    "layer_norm": Peer(
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, EPS),
        lambda x, w, b: M.layer_norm(x, w.shape, w, b, EPS),
        lambda x, w, b: M.layer_norm(x, w.shape, w, b, EPS, inplace=True),
        rows(1),
        parameters(2, COLUMNS),
        liger=lambda x, w, b: ligers("LigerLayerNormFunction")(x, w, b, EPS),
    ),
    "add_rms_norm": Peer(
        lambda x, r, w: add_rms_norm(x, r, w.shape, w, RMS_EPS),
        lambda x, r, w: M.add_rms_norm(x, r, w.shape, w, RMS_EPS),
        lambda x, r, w: M.add_rms_norm(x, r, w.shape, w, RMS_EPS, inplace=True),
        rows(2),
        parameters(1, COLUMNS),
        # in_place as in Liger-Kernel's own functional form
        liger=lambda x, r, w: ligers("LigerFusedAddRMSNormFunction")(x, r, w, RMS_EPS, 0.0, "llama", True),
    ),
    "group_norm": Peer(
        lambda x, w, b: F.group_norm(x, GROUPS, w, b, EPS),
        lambda x, w, b: M.group_norm(x, GROUPS, w, b, EPS),
        None,
        image,
        parameters(2, CHANNELS),
        liger=lambda x, w, b: ligers("LigerGroupNormFunction")(x, w, b, CHANNELS, GROUPS, EPS),
    ),
    "swiglu": Peer(
        lambda g, u: F.silu(g) * u,
        lambda g, u: M.swiglu(g, u),
        None,
        rows(2),
        liger=lambda g, u: ligers("LigerSiLUMulFunction")(g, u),
    ),
    "swiglu_packed": Peer(
        lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
        lambda x: M.swiglu(x),
        None,
        rows(1),
        liger=lambda x: ligers("LigerFusedGateUpSiLUMulFunction")(x),
    ),
    "geglu_tanh": Peer(
        lambda g, u: F.gelu(g, approximate="tanh") * u,
        lambda g, u: M.geglu(g, u, "tanh"),
        None,
        rows(2),
        liger=lambda g, u: ligers("LigerGELUMulFunction")(g, u),
    ),
    "relu_squared": Peer(
        ACTIVATIONS["relu_squared"].stock,
        lambda x: M.relu_squared(x),
        lambda x: M.relu_squared(x, inplace=True),
        rows(1),
        liger=lambda x: ligers("LigerReLUSquaredFunction")(x),
    ),
    "softmax": Peer(
        lambda x: F.softmax(x, -1),
        lambda x: M.softmax(x, -1),
        lambda x: M.softmax(x, -1, inplace=True),
        rows(1),
        liger=lambda x: ligers("LigerSoftmaxFunction")(x),
    ),
    "rotary": Peer(
        lambda q, k, cos, sin: (stock_rotary(q, cos, sin), stock_rotary(k, cos, sin)),
        lambda q, k, cos, sin: M.apply_rotary(q, k, cos, sin),
        lambda q, k, cos, sin: M.apply_rotary(q, k, cos, sin, inplace=True),
        heads,
        tables_of,
        liger=lambda q, k, cos, sin: ligers("LigerRopeFunction")(q, k, cos, sin),
    ),
    "cross_entropy": Peer(
        lambda x, t: F.cross_entropy(x, t),
        lambda x, t: M.cross_entropy(x, t),
        lambda x, t: M.cross_entropy(x, t, inplace=True),
        logits,
        targets,
        least=CLASSES,
        liger=lambda x, t: ligers("LigerCrossEntropyFunction")(x, t, None)[0],
    ),
    "linear_cross_entropy": Peer(
        lambda x, w, t: F.cross_entropy(F.linear(x, w), t),
        lambda x, w, t: M.linear_cross_entropy(x, w, t),
        None,
        hidden,
        layer_and_targets,
        least=CLASSES,
        liger=lambda x, w, t: ligers("LigerFusedLinearCrossEntropyFunction")(x, w, t)[0],
    ),
}


class Work:
    """The tensors of one op, size and dtype, of which each call gets its own to overwrite."""

    def __init__(self, op: Op, elements: int, dtype: torch.dtype, device: str) -> None:
        count = buffer_count(elements, dtype, device)
        self.op = op
        self.pristine = [op.inputs(Size(elements, dtype, device, 1 + i)) for i in range(count)]
        self.parameters = list(op.parameters(Size(elements, dtype, device)))
        self.wanted = [p for p in self.parameters if p.requires_grad]
        self.one = torch.ones((), dtype=dtype, device=device, requires_grad=True)
        with torch.no_grad():
            outs = outputs(op.stock(*self.pristine[0], *self.parameters))
        self.upstream = [torch.randn_like(out) if out.dim() else torch.ones_like(out) for out in outs]

    def given(self, x: Sequence[Tensor]) -> tuple[list[Tensor], list[Any], list[Tensor]]:
        box = [each * self.one for each in x]
        if not torch.is_grad_enabled():
            return box, [], []
        return box, [get_gradient_edge(each) for each in box], [each.clone() for each in self.upstream]

    def prepare(self) -> list[tuple[list[Tensor], list[Any], list[Tensor]]]:
        return [self.given(x) for x in self.pristine]

    def contender(self, function: Function, mode: str) -> Contender:
        def there(box: list[Tensor], *rest: object) -> object:
            return function(*emptied(box), *self.parameters)

        def there_and_back(box: list[Tensor], edges: list[Any], upstream: list[Tensor]) -> object:
            outs = outputs(function(*emptied(box), *self.parameters))
            return torch.autograd.grad(outs, [*edges, *self.wanted], upstream)

        return Contender(self.prepare, there if mode == "forward" else there_and_back)

    def exact(self) -> Exact:
        """Results and gradients of stock in float64."""
        wide = [
            x.detach().double().requires_grad_(needed) if x.is_floating_point() else x
            for x, needed in [(x, True) for x in self.pristine[0]]
            + [(p, p.requires_grad) for p in self.parameters]
        ]
        with torch.enable_grad():
            outs = outputs(self.op.stock(*wide))
            leaves = [x for x in wide if x.requires_grad]
            grads = torch.autograd.grad(outs, leaves, [u.double() for u in self.upstream])
        return [out.detach() for out in outs], list(grads)

    def errors(self, function: Function, mode: str, exact: Exact) -> dict[str, float]:
        box, edges, upstream = self.given(self.pristine[0])
        exact_outs, exact_grads = exact
        outs = outputs(function(*emptied(box), *self.parameters))
        found = {"output": distance(outs, exact_outs)}
        if mode != "forward":
            grads = torch.autograd.grad(outs, [*edges, *self.wanted], upstream)
            count = len(edges)
            found["gradient"] = distance(grads[:count], exact_grads[:count])
            if self.wanted:
                found["parameters"] = distance(grads[count:], exact_grads[count:])
        return found

    def trial(self, function: Function, mode: str, exact: Exact, device: str) -> dict[str, Any]:
        """Of one call: its errors, then its memory, when workspaces and compiled kernels are there."""
        found: dict[str, Any] = {"error": self.errors(function, mode, exact)}
        call = self.contender(function, mode).call
        needed = memory.measure(call, *self.given(self.pristine[0]), device=device)
        found["peak"] = needed.peak
        if mode != "forward":
            found |= {"saved": needed.saved, "saved_total": needed.saved_total}
        return found


def emptied(box: list[Tensor]) -> tuple[Tensor, ...]:
    """What was in it: a call's inputs go when it no longer needs them."""
    tensors = tuple(box)
    box.clear()
    return tensors


def distance(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The largest of the tensors' own, relative by norm."""
    pairs = zip(found, exact, strict=True)
    return max(float((a.detach().double() - b).norm() / b.norm()) for a, b in pairs)


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]


def liger_left_out(device: str) -> str | None:
    """Why Liger-Kernel is not measured."""
    if device != "cuda":
        return "needs a GPU"
    try:
        ligers("LigerRMSNormFunction")
    except Exception as error:
        return one_line(error)
    return None


def functions_of(peer: Peer, args: argparse.Namespace) -> dict[str, Function]:
    functions: dict[str, Function | None] = {"stock": peer.stock, "memkit": peer.memkit}
    if args.compile:
        torch._dynamo.reset()
        stock = peer.stock
        functions["compiled"] = torch.compile(lambda *tensors: stock(*tensors), dynamic=True)
    functions["liger"] = peer.liger if args.liger else None
    functions["in_place"] = peer.in_place
    return {name: function for name, function in functions.items() if function is not None}


def cases(
    name: str, dtype: str, args: argparse.Namespace, budget: float, failed: list[dict[str, str]]
) -> list[tuple[dict[str, Any], Rounds]]:
    """Every size and mode, the smallest size first; who raises is left out and named in `failed`."""
    peer, made = PEERS[name], []
    functions = functions_of(peer, args)
    sizes = [size for size in args.sizes if SIZES[size] >= peer.least]
    for size in sorted(sizes, key=SIZES.__getitem__, reverse=True):
        work = Work(peer, SIZES[size], DTYPES[dtype], args.device)
        exact = work.exact()
        for mode in args.modes:
            progress(f"{name} {dtype} {size} {mode}")
            case: dict[str, Any] = {"op": name, "dtype": dtype, "size": size, "mode": mode}
            contenders = {}
            found: dict[str, dict[str, Any]] = {}
            for each, function in functions.items():
                try:
                    with torch.set_grad_enabled(mode != "forward"):
                        for key, value in work.trial(function, mode, exact, args.device).items():
                            found.setdefault(key, {})[each] = value
                    contenders[each] = work.contender(function, mode)
                except Exception as error:
                    failed.append(case | {"contender": each, "error": one_line(error)})
            if "stock" in contenders:
                rounds = Rounds(contenders, args.device, budget)
                made.append((case | {"elements": SIZES[size]} | found, rounds))
    return sorted(made, key=lambda each: each[0]["elements"])


def run(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"kind": KIND, "format": FORMAT, **machine.stamp(args.device)}
    reason = liger_left_out(args.device)
    args.liger = reason is None
    result["versions"]["liger-kernel"] = importlib.metadata.version("liger-kernel") if args.liger else None
    result |= {"left_out": {} if args.liger else {"liger": reason}, "cases": [], "failed": []}
    budget = 0.15 if args.quick else 0.3
    if args.device == "cuda":
        budget /= 3  # its clock is steadier
    settle_allocator()
    gc.freeze()  # memory.measure collects garbage each time, 0.2 s where transformers is imported
    with until_interrupted(result):
        for name in args.ops:
            for dtype in args.dtypes:
                made = cases(name, dtype, args, budget, result["failed"])
                measure_in_turns(made, result["cases"])
    gc.unfreeze()
    progress("")
    where = ("op", "dtype", "size", "mode")
    result["slower"] = slower_than(result["cases"], where, CONTENDERS, PAIRS)
    return result


def table(result: dict[str, Any]) -> str:
    names = [n for n in CONTENDERS if any(n in case["ratio"] for case in result["cases"])]
    others = [n for n in names if n != "stock"]
    body = []
    for c in result["cases"]:
        row = [c["op"], c["dtype"], c["size"], c["mode"], f"{c['seconds']['stock'] * 1e6:.1f}"]
        row += [f"{c['ratio'][n]:.2f}×" if n in c["ratio"] else "" for n in others]
        row += [f"{c['peak'][n] / 2**20:.1f}" if n in c["peak"] else "" for n in names]
        row += [f"{max(c['error'][n].values()):.1e}" if n in c["error"] else "" for n in names]
        body.append(row)
    columns = ["op", "dtype", "size", "mode", "stock µs", *(CONTENDERS[n] for n in others)]
    columns += [f"{head}{CONTENDERS[n]}" for head in ("MiB ", "error ") for n in names]
    lines = [f"{CONTENDERS[name]} left out: {reason}" for name, reason in result["left_out"].items()]
    for each in result["failed"]:
        where = " ".join(each[key] for key in ("op", "dtype", "size", "mode"))
        lines.append(f"{where}: {CONTENDERS[each['contender']]} failed: {each['error']}")
    return "\n".join([text_table(columns, body), "", *lines])


def main(argv: list[str] | None = None) -> int:
    choices = Choices(
        __doc__,
        {"ops": PEERS, "sizes": SIZES, "dtypes": DTYPES, "modes": MODES},
        quick={"sizes": ["32Mi"]},
        file="peers",
        compiler=True,
    )
    args = choices.parse(argv)
    result = run(args)
    print(table(result), origin(result), sep="\n\n")
    return write(result, args)


if __name__ == "__main__":
    sys.exit(main())

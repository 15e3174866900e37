"""AdamW and SGD: a step of PyTorch's three forms and of memkit with moments in 32, 16 and 8 bits; bytes of state.

    python benchmarks/bench_optim.py --quick
    python benchmarks/bench_optim.py --json           # benchmarks/results/optim-cpu.json

`gpt`: the parameters of a GPT of 10 M; `small`: 1,000 tensors of 256 elements. Gradients stay the same from step to step.
All contenders take turns; ratios are medians of each round's own ratio to PyTorch's fused form. State bytes count each
storage once. The bar: memkit in float32 takes no longer than the fused form.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from common import DTYPES, Choices, ratios, slower_than, write
from torch import Tensor, nn

from memkit import optim
from memkit.bench import machine
from memkit.bench.models import GPT
from memkit.bench.report import origin, text_table
from memkit.bench.timing import interleave, until_interrupted

KIND = "memkit-optim"
FORMAT = 1
REFERENCE = "fused"

Make = Callable[[list[Tensor]], torch.optim.Optimizer]
ADAMW: dict[str, Make] = {
    "for-loop": lambda p: torch.optim.AdamW(p, foreach=False, fused=False),
    "foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "memkit": lambda p: optim.AdamW(p, stochastic_rounding=False),
    "memkit bf16": lambda p: optim.AdamW(p, state_dtype=torch.bfloat16),
    "memkit 8bit": lambda p: optim.AdamW(p, state_dtype="8bit"),
}
SGD: dict[str, Make] = {
    "for-loop": lambda p: torch.optim.SGD(p, momentum=0.9, foreach=False, fused=False),
    "foreach": lambda p: torch.optim.SGD(p, momentum=0.9, foreach=True),
    "fused": lambda p: torch.optim.SGD(p, momentum=0.9, fused=True),
    "memkit": lambda p: optim.SGD(p, momentum=0.9, stochastic_rounding=False),
    "memkit bf16": lambda p: optim.SGD(p, momentum=0.9, state_dtype=torch.bfloat16),
    "memkit 8bit": lambda p: optim.SGD(p, momentum=0.9, state_dtype="8bit"),
}
RULES = {"adamw": ADAMW, "sgd": SGD}


def parameters(name: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    torch.manual_seed(0)
    if name == "gpt":
        made: list[Tensor] = list(GPT(8192, 6, 320, 8, 256).to(device, dtype).parameters())
    else:
        made = [nn.Parameter(torch.randn(256, device=device, dtype=dtype)) for _ in range(1000)]
    for p in made:
        p.grad = torch.randn_like(p) * 1e-3
    return made


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Of the moments and steps, each storage once."""
    tensors = [x for entry in optimizer.state.values() for x in entry.values() if isinstance(x, Tensor)]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}.values())


def case(rule: str, name: str, dtype: str, device: str, rounds: int) -> dict[str, Any]:
    def timer(optimizer: torch.optim.Optimizer) -> Callable[[], float]:
        def run() -> float:
            if device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - begin

        return run

    optimizers = {each: make(parameters(name, DTYPES[dtype], device)) for each, make in RULES[rule].items()}
    times = interleave({each: timer(o) for each, o in optimizers.items()}, rounds, warm=3)
    params = parameters(name, DTYPES[dtype], device)
    return {
        "rule": rule,
        "parameters": name,
        "dtype": dtype,
        "tensors": len(params),
        "elements": sum(p.numel() for p in params),
        "rounds": rounds,
        "seconds": {each: statistics.median(taken) for each, taken in times.items()},
        "ratio": ratios(times, REFERENCE),
        "state_bytes": {each: state_bytes(o) for each, o in optimizers.items()},
    }


def table(result: dict[str, Any]) -> str:
    names = list(ADAMW)
    body = []
    for c in result["steps"]:
        row = [c["rule"], c["parameters"], c["dtype"], f"{c['seconds'][REFERENCE] * 1e3:.2f}"]
        row += [f"{c['ratio'][name]:.2f}×" for name in names]
        body.append([*row, *(f"{c['state_bytes'][name] / c['elements']:.2f}" for name in names[2:])])
    columns = ["rule", "parameters", "dtype", "fused ms", *names, *(f"B/el. {name}" for name in names[2:])]
    return text_table(columns, body)


def main(argv: list[str] | None = None) -> int:
    choices = Choices(
        __doc__, {"rules": RULES, "dtypes": DTYPES}, quick={"dtypes": ["float32"]}, file="optim"
    )
    choices.parser.add_argument("--rounds", type=int, default=25)
    args = choices.parse(argv)
    rounds = 7 if args.quick else args.rounds
    result: dict[str, Any] = {"kind": KIND, "format": FORMAT, **machine.stamp(args.device), "steps": []}
    with until_interrupted(result):
        for rule in args.rules:
            for name in ("gpt", "small"):
                for dtype in args.dtypes:
                    result["steps"].append(case(rule, name, dtype, args.device, rounds))
    mine = [(name, REFERENCE) for name in ADAMW if name.startswith("memkit")]
    labels = {name: name for name in ADAMW}
    result["slower"] = slower_than(result["steps"], ("rule", "parameters", "dtype"), labels, mine)
    print(table(result), origin(result), sep="\n\n")
    return write(result, args)


if __name__ == "__main__":
    sys.exit(main())

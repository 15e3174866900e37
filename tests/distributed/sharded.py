"""memkit's operators on DTensors over a mesh of 2 x 2, and compiled; run by test_sharded.py with torchrun, four processes.

    torchrun --nproc-per-node 4 tests/distributed/sharded.py

Prints a JSON line: which cases passed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import memkit.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from sharding_cases import CASES, ON_FOUR, check, distributed, tensors_of

COMPILED = {
    "gelu": "S0 -> S0",
    "leaky_relu in place": "S2 -> S2",
    "swiglu": "S2 S2 -> S2",
    "rms_norm": "S0 R -> S0 | S0 P",
    "softmax, mask": "S0 plain -> S0",
    "apply_rotary": "S1 S1 R R -> S1 S1",
    "act_linear": "S2 S1 R -> P | S2 S1 P",
    "cross_entropy": "S0 plain -> P",
}


def drops_alike(mesh) -> bool:
    """Compiled too, replicas have one mask and parts masks of their own."""
    torch.manual_seed(dist.get_rank())
    drop = torch.compile(F.dropout, backend="aot_eager", fullgraph=True)
    x = torch.ones(64, 64)
    found = []
    for text in ("R", "S0"):
        masks = [torch.empty(64 if text == "R" else 16, 64) for _ in range(4)]
        dist.all_gather(masks, drop(distributed(x, mesh, text)).to_local())
        found.append(all(torch.equal(each, masks[0]) for each in masks[1:]))
    return found == [True, False]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    passed = []
    two = init_device_mesh("cpu", (2, 2))
    for name, rows in ON_FOUR.items():
        function, shapes, _ = CASES[name]
        for row in rows:
            check(function, tensors_of(shapes), row, two)
        passed.append(name)
    one = init_device_mesh("cpu", (4,))
    for name, row in COMPILED.items():
        function, shapes, _ = CASES[name]
        torch.compiler.reset()
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        check(compiled, tensors_of(shapes), row, one, compiled=True)
        passed.append(f"{name}, compiled")
    if drops_alike(one):
        passed.append("dropout, compiled")
    if dist.get_rank() == 0:
        print(json.dumps({"passed": passed}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

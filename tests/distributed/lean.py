"""Units whose last operator takes a parameter, inside lean(), sharded; run by test_lean.py with torchrun, two processes.

    torchrun --nproc-per-node 2 tests/distributed/lean.py

What the next unit's layer keeps is made again before the parameter's memory is back. Prints a JSON line: the largest
difference of a gradient to that of one process.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import memkit

WIDTH = 256


class Unit(nn.Module):
    def __init__(self, ends_with: str) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH) if ends_with == "rms_norm" else nn.LayerNorm(WIDTH)
        if ends_with == "product":
            self.scale = nn.Parameter(torch.ones(WIDTH))
        self.ends_with = ends_with

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.layer(x))
        if self.ends_with == "product":
            return x * torch.sigmoid(x) * self.scale
        return x if self.ends_with.endswith("norm") else nn.functional.gelu(x)


def fsdp1(model: nn.Sequential) -> nn.Module:
    wrapped = [
        FullyShardedDataParallel(unit, device_id=torch.device("cpu"), use_orig_params=True) for unit in model
    ]
    return FullyShardedDataParallel(
        nn.Sequential(*wrapped), device_id=torch.device("cpu"), use_orig_params=True
    )


def fsdp2(model: nn.Sequential) -> nn.Module:
    for unit in model:
        fully_shard(unit)
    return fully_shard(model)


def each_module(model: nn.Sequential) -> nn.Module:
    for unit in model:
        fully_shard(unit.layer)
        fully_shard(unit.norm)
        fully_shard(unit)
    return fully_shard(model)


ENGINES: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "fsdp2 of each module": each_module,
}


def gradients(model: nn.Module, x: Tensor, *, lean: bool) -> Tensor:
    with memkit.lean() if lean else torch.enable_grad():
        out = model(x)
    out.square().mean().backward()
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([getattr(grad, "full_tensor", lambda grad=grad: grad)().flatten() for grad in found])


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    worst = {}
    for ends_with in ("layer_norm", "rms_norm", "product", "gelu"):
        torch.manual_seed(0)
        model = nn.Sequential(*(Unit(ends_with) for _ in range(3)))
        for p in model.parameters():
            p.data.add_(torch.rand_like(p), alpha=0.05 if p.dim() > 1 else 0.5)
        x = torch.randn(512, WIDTH)
        stock = gradients(copy.deepcopy(model), x, lean=False)
        for name, engine in ENGINES.items():
            swapped = copy.deepcopy(model)
            memkit.swap(swapped, sample=x, lean=True)
            found = gradients(engine(swapped), x, lean=True)
            worst[f"{name}, {ends_with}"] = float((found - stock).abs().max() / stock.abs().max())
    if dist.get_rank() == 0:
        print(json.dumps(worst), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

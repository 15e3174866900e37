"""Parameters, gradients and comparisons of the optimizers' tests on DTensors."""

from __future__ import annotations

import math

import torch
from sharding_cases import numbers, placements
from torch.distributed.tensor import DTensor, distribute_tensor

from memkit import optim
from memkit.optim._sharded import dequantize_whole, local

RANKS = 3
SHAPES = ((100, 70), (5000,), (2, 3), (64, 256), (7, 4, 30), (), (0, 4))
"""Parts of 34, 34 and 32 rows; of 1, 1 and none; of none at all."""
RULES = {
    "adamw": (optim.AdamW, torch.optim.AdamW, {"amsgrad": True, "weight_decay": 0.3}),
    "sgd": (optim.SGD, torch.optim.SGD, {}),
    "sgd-momentum": (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}


def part_text(text, x):
    """Of a mesh of one dimension or two; scalars are replicated, and what has fewer dimensions sharded along the first."""
    dims = [each if each[0] != "S" else f"S{min(int(each[1:]), x.ndim - 1)}" for each in text.split(",")]
    return ",".join(dims) if x.ndim else ",".join("R" for _ in dims)


def shard(x, mesh, text):
    return distribute_tensor(x.clone(), mesh, placements(part_text(text, x)), src_data_rank=None)


def values(dtype=torch.float32):
    return [numbers(*shape, dtype=torch.float64).to(dtype) for shape in SHAPES]


def gradients(step, dtype=torch.float32):
    return [(numbers(*shape, seed=1000 + step) * 10.0**-i).to(dtype) for i, shape in enumerate(SHAPES)]


def train(optimizer, params, steps=3, start=0, to=lambda g, p: g):
    for step in range(start, start + steps):
        for p, g in zip(params, gradients(step, params[0].dtype), strict=True):
            p.grad = to(g, p)
        optimizer.step()


def alike(g, p):
    return distribute_tensor(g, p.device_mesh, p.placements, src_data_rank=None)


def distance(x, y, like):
    """In units of the last place of the largest value of `like`."""
    if not y.numel():
        return 0.0
    scale = 2.0 ** math.floor(math.log2(like.abs().max().item())) * torch.finfo(y.dtype).eps
    return ((x.double() - y.double()).abs().max() / scale).item()


def part(x):
    with torch.no_grad():
        return local(x)


def full(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def numbers_of(entry, name):
    """The moment in float32, whole."""
    return dequantize_whole(full(entry[name]), full(entry[name + "_scale"]))

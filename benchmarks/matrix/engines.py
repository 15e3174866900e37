"""Columns of two processes over gloo: data, tensor and pipeline parallelism, and libraries of engines."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from memkit.bench.zoo import Subject

from .pipeline import pipelined
from .step import InapplicableError, Result, Run, blocks, finish, steps

ATTENTION = {
    ("q_proj", "k_proj", "v_proj"): "o_proj",
    ("attention.self.query", "attention.self.key", "attention.self.value"): "attention.output.dense",
    ("query_key_value",): "dense",  # a head's q, k and v lie together
}
FEED_FORWARD = {
    ("gate_proj", "up_proj"): "down_proj",
    ("fc1",): "fc2",
    ("wi",): "wo",
    ("wi_0", "wi_1"): "wo",
    ("intermediate.dense",): "output.dense",
    ("dense_h_to_4h",): "dense_4h_to_h",
    ("linear1",): "linear2",
}
"""Layers split by columns, and the one behind them, by rows. Attention only where it counts heads by its input."""


def apart(subject: Subject) -> Subject:
    """Another sample on the second rank: the first one's mirror image."""
    if dist.get_rank() == 0:
        return subject

    def mirrored(x: Tensor) -> Tensor:
        return x.flip(-1) if x.dim() > 1 else x

    sample = subject.sample
    if isinstance(sample, dict):
        return Subject(subject.model, {key: mirrored(x) for key, x in sample.items()})
    return Subject(subject.model, tuple(map(mirrored, sample)))


def data_parallel(subject: Subject) -> Result:
    engine = nn.parallel.DistributedDataParallel(subject.model)
    return finish(Subject(engine, apart(subject).sample).loss(), subject.model)


def fully_sharded(subject: Subject) -> Result:
    from torch.distributed.fsdp import fully_shard

    for path in blocks(subject.model):
        fully_shard(subject.model.get_submodule(path))
    fully_shard(subject.model)
    loss, grads = finish(apart(subject).loss(), subject.model)
    return loss, [grad.full_tensor() for grad in grads]  # type: ignore[operator]


def plan_of(model: nn.Module) -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    plan: dict[str, Any] = {}
    linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    for path, _ in model.named_modules():
        prefix = f"{path}." if path else ""
        for columns, row in (ATTENTION | FEED_FORWARD).items():
            split = [prefix + name for name in columns]
            if linear.issuperset([*split, prefix + row]):
                plan |= {name: ColwiseParallel() for name in split}
                plan[prefix + row] = RowwiseParallel()
    return plan


def tensor_parallel(subject: Subject) -> Result:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import parallelize_module

    plan = plan_of(subject.model)
    if not plan:
        raise InapplicableError("no pair of nn.Linear to split by columns and rows")
    parallelize_module(subject.model, init_device_mesh("cpu", (2,)), plan)
    loss, grads = finish(subject.loss(), subject.model)
    return loss, [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]


def deepspeed(stage: int) -> Run:
    def run(subject: Subject) -> Result:
        import deepspeed

        model = subject.model
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        }
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)

        def train() -> Tensor:
            loss = Subject(engine, apart(subject).sample).loss()
            engine.backward(loss)
            engine.step()
            return loss

        if stage < 3:
            return steps(model, train)
        return steps(model, train, lambda: deepspeed.zero.GatheredParameters(list(model.parameters())))

    return run


def fairscale(subject: Subject) -> Result:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    optimizer = OSS(params=subject.model.parameters(), optim=torch.optim.SGD, lr=1.0)
    engine = ShardedDataParallel(subject.model, optimizer)

    def train() -> Tensor:
        loss = Subject(engine, apart(subject).sample).loss()
        loss.backward()
        optimizer.step()
        return loss

    return steps(subject.model, train)


ENGINES: dict[str, Run] = {
    "DDP": data_parallel,
    "FSDP2": fully_sharded,
    "TP": tensor_parallel,
    "PP": pipelined,
    "FairScale": fairscale,
    "DeepSpeed ZeRO 1": deepspeed(1),
    "DeepSpeed ZeRO 3": deepspeed(3),
}

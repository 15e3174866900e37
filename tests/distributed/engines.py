"""Trains one model on each distributed engine, as stock and swapped; run by test_engines.py with torchrun, two processes.

    torchrun --nproc-per-node 2 tests/distributed/engines.py ddp fsdp2

Prints a JSON line an engine: losses and each rank's peak, stock's and memkit's.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import async_save, load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import memkit
from memkit.bench.models import GPT
from memkit.swap.types import Changed

STEPS, BATCH, LENGTH, VOCAB, WIDTH = 4, 4, 32, 64, 32
Step = Callable[[Tensor], Tensor]


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(VOCAB, 2, WIDTH, 4, LENGTH, dropout=0.0)


def batches(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=generator) for _ in range(STEPS)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Step:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)

    def step(tokens: Tensor) -> Tensor:
        model.zero_grad()
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ddp(model: GPT) -> Step:
    return plain_step(nn.parallel.DistributedDataParallel(model))


def sharded(model: GPT, **options: Any) -> GPT:
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model


def fsdp2(model: GPT) -> Step:
    return plain_step(sharded(model))


def fsdp2_bf16_offload(model: GPT) -> Step:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return plain_step(sharded(model, mp_policy=policy, offload_policy=CPUOffloadPolicy(pin_memory=False)))


def tensor_parallel(model: GPT) -> Step:
    """Columns of `up`, rows of `down`: the activation between them has its part of the features."""
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        parallelize_module(block, mesh, {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()})
    return plain_step(model)


def activation_on_dtensors(model: GPT) -> Step:
    """The activation itself is given DTensors."""
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        up, down = ColwiseParallel(use_local_output=False), RowwiseParallel(input_layouts=Shard(-1))
        parallelize_module(block, mesh, {"mlp.up": up, "mlp.down": down})
    return plain_step(model)


def sequence_parallel(model: GPT) -> Step:
    """Norms, sums and activations are given DTensors, parts of the sequence or of the features."""
    mesh = init_device_mesh("cpu", (2,))
    norm = SequenceParallel(use_local_output=False)
    plan = {
        "norm1": norm,
        "attention": PrepareModuleInputOutput(
            input_layouts=Shard(1),
            desired_input_layouts=Replicate(),
            use_local_input=True,
            output_layouts=Replicate(),
            desired_output_layouts=Shard(1),
            use_local_output=False,
        ),
        "norm2": norm,
        "mlp.up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "mlp.down": RowwiseParallel(input_layouts=Shard(-1), output_layouts=Shard(1), use_local_output=False),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    parallelize_module(model, mesh, {"norm": norm})
    model.blocks.register_forward_pre_hook(
        lambda _, inputs: DTensor.from_local(inputs[0], mesh, [Replicate()]).redistribute(mesh, [Shard(1)])
    )
    model.norm.register_forward_hook(lambda _, inputs, output: output.full_tensor())
    return plain_step(model)


def pipeline(model: GPT) -> Step:
    """Two stages, each a part of the blocks, over micro-batches; the embedding in front, the head behind."""
    rank = dist.get_rank()
    first, second = model.blocks
    stage_model = nn.Sequential(first) if rank == 0 else nn.Sequential(second, model.norm)
    stage = PipelineStage(stage_model, rank, 2, torch.device("cpu"))
    optimizer = torch.optim.AdamW(stage_model.parameters(), lr=1e-2, foreach=False)
    schedule = ScheduleGPipe(
        stage, n_microbatches=2, loss_fn=lambda out, target: (out - target).square().mean()
    )
    embed = copy.deepcopy(model.tokens).requires_grad_(False)

    def step(tokens: Tensor) -> Tensor:
        dist.broadcast(tokens, 0)
        x = embed(tokens)
        optimizer.zero_grad()
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(x[:, :-1].contiguous())
        else:
            schedule.step(target=x[:, 1:].contiguous(), losses=losses)
        optimizer.step()
        loss = torch.stack(losses).mean().detach() if losses else torch.zeros(())
        dist.broadcast(loss, 1)
        return loss

    return step


def checkpoint(model: GPT) -> Step:
    """Saved sharded, waited for or not, and loaded into an unsharded model of the other kind."""
    other = gpt()
    if not is_swapped(model):
        memkit.swap(other)
    step = plain_step(sharded(model))

    def run(tokens: Tensor) -> Tensor:
        loss = step(tokens)
        folder = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
        dist.broadcast_object_list(folder)
        state = get_model_state_dict(model)
        for how in (dcp_save, async_save):
            path = Path(str(folder[0])) / how.__name__
            future = how(state, checkpoint_id=path)
            if future is not None and how is async_save:
                future.result()
            dist.barrier()
            found = get_model_state_dict(other)
            for each in found.values():
                each.zero_()
            load(found, checkpoint_id=path)
            set_model_state_dict(other, found)
            for name, value in other.state_dict().items():
                torch.testing.assert_close(value, state[name].full_tensor())
        return loss

    return run


def is_swapped(model: nn.Module) -> bool:
    return any(isinstance(module, Changed) for module in model.modules())


def deepspeed(model: GPT, stage: int) -> Step:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())

    def step(tokens: Tensor) -> Tensor:
        loss = loss_of(engine, tokens)
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step


def fairscale(model: GPT) -> Step:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    optimizer = OSS(params=model.parameters(), optim=torch.optim.AdamW, lr=1e-2, foreach=False)
    return plain_step(ShardedDataParallel(model, optimizer), optimizer)


ENGINES: dict[str, Callable[[GPT], Step]] = {
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp2_bf16_offload": fsdp2_bf16_offload,
    "tensor_parallel": tensor_parallel,
    "activation_on_dtensors": activation_on_dtensors,
    "sequence_parallel": sequence_parallel,
    "pipeline": pipeline,
    "checkpoint": checkpoint,
    "deepspeed_zero1": lambda model: deepspeed(model, 1),
    "deepspeed_zero3": lambda model: deepspeed(model, 3),
    "fairscale_oss": fairscale,
}
LEAN = {"ddp", "fsdp2"}
"""Also inside memkit.lean()."""


def train(engine: str, kind: str) -> dict[str, Any]:
    """Losses of all steps, and the most bytes that this rank had alive in the last."""
    model = gpt()
    if kind != "stock":
        sample = batches(0)[0][:, :-1]
        memkit.swap(model, sample=sample, exact="bf16" not in engine, lean=kind == "lean")
    step = ENGINES[engine](model)
    losses = []
    for tokens in batches(dist.get_rank() if engine != "pipeline" else 0):
        with memkit.lean() if kind == "lean" else torch.enable_grad():
            measured = memkit.memory.measure(step, tokens)
        losses.append(float(measured.result))
    peaks = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(peaks, torch.tensor(measured.peak))
    return {"losses": losses, "peaks": [int(each) for each in peaks]}


def main() -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    dist.init_process_group("gloo")
    for engine in sys.argv[1:]:
        kinds = ["stock", "memkit", *(["lean"] if engine in LEAN else [])]
        found = {kind: train(engine, kind) for kind in kinds}
        if dist.get_rank() == 0:
            print(json.dumps({"engine": engine, **found}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

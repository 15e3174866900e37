"""memkit.optim beside torch.optim on FSDP2 and tensor parallelism, saved and resumed; run by test_optimizers.py.

    torchrun --nproc-per-node 2 tests/distributed/optimizers.py train
    torchrun --nproc-per-node 2 tests/distributed/optimizers.py save FOLDER
    torchrun --nproc-per-node 3 tests/distributed/optimizers.py resume FOLDER

Prints JSON lines of what was found.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from memkit.optim import SGD, AdamW, step_in_backward

STEPS, WIDTH, HIDDEN = 5, 24, 248  # rows of 24, which are no whole blocks; of 3 parts, 83, 83 and 82
Make = Callable[[Any], torch.optim.Optimizer]


def network(width: int = WIDTH, hidden: int = HIDDEN) -> nn.Sequential:
    torch.manual_seed(0)
    block = [nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, width)]
    return nn.Sequential(nn.Sequential(*block), nn.LayerNorm(width), nn.Linear(width, 3))


def fsdp2(model: nn.Sequential, **options: Any) -> nn.Module:
    fully_shard(model[0], **options)
    return fully_shard(model, **options)


def offloaded(model: nn.Sequential) -> nn.Module:
    return fsdp2(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def tensor_parallel(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"0.0": ColwiseParallel(), "0.2": RowwiseParallel()})


def both(model: nn.Sequential) -> nn.Module:
    """FSDP2 over tensor parallelism, on a mesh of 2 x 1 or 2 x 2."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0.0": ColwiseParallel(), "0.2": RowwiseParallel()})
    return fsdp2(model, mesh=mesh["dp"])


def half(model: nn.Sequential) -> nn.Module:
    """bfloat16 weights, gradients reduced in float32."""
    return fsdp2(model.bfloat16(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))


ENGINES = {"fsdp2": fsdp2, "offloaded": offloaded, "tensor_parallel": tensor_parallel, "both": both}


def backward(model: nn.Module, seed: int, fresh: bool = True) -> None:
    """Each rank's own batch; with tensor parallelism the same for all of its ranks."""
    parallel = not isinstance(model, FSDPModule)
    generator = torch.Generator().manual_seed(100 * seed + (0 if parallel else data_rank(model)))
    dtype = next(model.parameters()).dtype
    x = torch.randn(8, next(model.parameters()).size(1), generator=generator).to(dtype)
    if fresh:
        model.zero_grad()
    model(x).float().square().mean().backward()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    backward(model, seed)
    optimizer.step()


def data_rank(model: nn.Module) -> int:
    mesh = next(model.parameters()).device_mesh
    return (
        mesh.get_local_rank("dp")
        if mesh.mesh_dim_names and "dp" in mesh.mesh_dim_names
        else mesh.get_local_rank(0)
    )


def full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def distance(a: nn.Module, b: nn.Module) -> float:
    """The largest difference, in units of the last place of the tensors' largest values."""
    worst = 0.0
    for x, y in zip(map(full, a.parameters()), map(full, b.parameters()), strict=True):
        scale = 2.0 ** math.floor(math.log2(y.abs().max().item())) * torch.finfo(y.dtype).eps
        worst = max(worst, ((x.double() - y.double()).abs().max() / scale).item())
    return worst


def trained(engine: Callable[..., nn.Module], make: Make) -> nn.Module:
    model = engine(network())
    optimizer = make(model.parameters())
    for seed in range(STEPS):
        step(model, optimizer, seed)
    return model


def difference(
    engine: Callable[..., nn.Module], ours: Make, theirs: Make, max_norm: float | None = None
) -> float:
    """Of models that get the same gradients, those of the second."""
    a, b = engine(network()), engine(network())
    mine, stock = ours(a.parameters()), theirs(b.parameters())
    for seed in range(STEPS):
        backward(b, seed)
        for p, q in zip(a.parameters(), b.parameters(), strict=True):
            assert q.grad is not None
            p.grad = q.grad.clone()
        for model in (a, b) if max_norm is not None else ():
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        mine.step()
        stock.step()
    return distance(a, b)


def clipped_one_by_one() -> tuple[nn.Module, nn.Module]:
    models = fsdp2(network()), fsdp2(network())
    early, late = (SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models)
    step_in_backward(early, max_norm=0.01)
    for seed in range(STEPS):
        for model in models:
            backward(model, seed)
        for p in models[1].parameters():
            assert nn.utils.clip_grad_norm_([p], 0.01).full_tensor() > 0
        late.step()
    return models


def accumulated() -> tuple[nn.Module, nn.Module]:
    """Two batches a step, of which the first leaves the weights alone."""
    models = fsdp2(network()), fsdp2(network())
    early, late = (AdamW(model.parameters(), lr=1e-2) for model in models)
    handle = step_in_backward(early)
    for seed in range(0, STEPS, 2):
        with handle.accumulate():
            backward(models[0], seed)
        backward(models[0], seed + 1, fresh=False)
        backward(models[1], seed)
        backward(models[1], seed + 1, fresh=False)
        late.step()
    return models


def local_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [x for entry in optimizer.state.values() for x in entry.values()]
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)


def train() -> dict[str, Any]:
    found: dict[str, Any] = {}
    ours: Make = lambda p: AdamW(p, lr=1e-2)  # noqa: E731
    theirs = {
        "loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
        "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    }
    for name, engine in ENGINES.items():
        for kind, make in theirs.items():
            if name == "tensor_parallel" and kind == "foreach":
                continue  # takes no plain tensors beside DTensors
            found[f"{name}, {kind}"] = difference(engine, ours, make)
        if name in (
            "fsdp2",
            "offloaded",
        ):  # torch's clip_grad_norm_ takes DTensors of one mesh, and nothing else beside
            found[f"{name}, clipped"] = difference(engine, ours, theirs["loop"], 0.1)

        def early(p: Any) -> torch.optim.Optimizer:
            optimizer = AdamW(p, lr=1e-2)
            step_in_backward(optimizer)
            return optimizer

        found[f"{name}, in backward"] = distance(trained(engine, early), trained(engine, ours))

    found["fsdp2, in backward, clipped"] = distance(*clipped_one_by_one())
    found["fsdp2, in backward, accumulated"] = distance(*accumulated())

    def rounded(state_dtype: Any) -> Make:
        return lambda p: AdamW(p, lr=1e-2, state_dtype=state_dtype)

    exact = trained(fsdp2, theirs["loop"])
    start = network()
    for name, model in (
        ("8bit", trained(fsdp2, rounded("8bit"))),
        ("bf16 state", trained(fsdp2, rounded(torch.bfloat16))),
        ("bf16", trained(half, rounded(None))),
    ):
        moved, error = 0.0, 0.0
        for x, y, z in zip(model.parameters(), exact.parameters(), start.parameters(), strict=True):
            moved += (full(y) - z).square().sum().item()
            error += (full(x).float() - full(y)).square().sum().item()
        found[f"{name}, error"] = math.sqrt(error / moved)
    sizes = {}
    for name, make in (("stock", theirs["loop"]), ("memkit", ours), ("8bit", rounded("8bit"))):
        model = fsdp2(network(256, 512))
        optimizer = make(model.parameters())
        step(model, optimizer, 0)
        sizes[name] = local_bytes(optimizer)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, sizes)
    return {**found, "bytes": every}


CASES: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "float32": ({}, (WIDTH, HIDDEN)),
    "8bit rows": ({"state_dtype": "8bit"}, (256, 512)),
    "8bit": ({"state_dtype": "8bit"}, (WIDTH, HIDDEN)),
}
"""Options; width, hidden width. Rows of 256 are whole blocks."""


def made(case: str, engine: Callable[..., nn.Module] = fsdp2, **options: Any) -> tuple[nn.Module, AdamW]:
    own, shape = CASES[case]
    model = engine(network(*shape))
    return model, AdamW(model.parameters(), lr=1e-2, **{**own, **options})


def moments(optimizer: AdamW) -> list[Tensor]:
    """exp_avg of all parameters, whole and in float32."""
    from memkit.optim._sharded import dequantize_whole

    found = []
    for entry in optimizer.state.values():
        value = full(entry["exp_avg"])
        if "exp_avg_scale" in entry:
            whole = dequantize_whole(value, full(entry["exp_avg_scale"]))
            assert whole is not None
            value = whole
        found.append(value)
    return found


def save(folder: Path) -> dict[str, Any]:
    """What two more steps make of it is what who resumes is to find; here itself, on the same ranks."""
    found = {}
    for case in CASES:
        model, optimizer = made(case)
        for seed in range(3):
            step(model, optimizer, seed)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder / case)
        kept = moments(optimizer)
        if dist.get_rank() == 0:
            dcp_to_torch_save(folder / case, folder / f"{case}.pt")
            torch.save(kept, folder / f"{case}.moments")
        dist.barrier()
        other, again = made(case)
        states = dict(zip(("model", "optimizer"), get_state_dict(other, again), strict=True))
        dcp.load(states, checkpoint_id=folder / case)
        set_state_dict(other, again, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        for seed in range(3, 5):
            step(model, optimizer, seed)
            step(other, again, seed)
        found[case] = distance(other, model)
    return found


def resume(folder: Path) -> dict[str, Any]:
    """On another number of ranks, and unsharded: moments as they were saved, or an error before anything is read."""
    found: dict[str, Any] = {}
    for case in CASES:
        expected = torch.load(folder / f"{case}.moments")

        def worst(optimizer: AdamW, expected: list[Tensor] = expected) -> float:
            errors = [(x - y).norm() / y.norm() for x, y in zip(moments(optimizer), expected, strict=True)]
            return max(errors).item()

        for name, engine in (("fsdp2", fsdp2), ("unsharded", lambda model: model)):
            model, optimizer = made(case, engine)
            state = get_optimizer_state_dict(model, optimizer)
            before = [x.clone() for x in moments(optimizer)]
            try:
                dcp.load({"optimizer": state}, checkpoint_id=folder / case)
            except dcp.api.CheckpointException as error:
                found[f"{case}, {name}"] = str(error).splitlines()[-1]
                assert all(torch.equal(x, y) for x, y in zip(moments(optimizer), before, strict=True))
            else:
                set_optimizer_state_dict(model, optimizer, state)
                found[f"{case}, {name}"] = worst(optimizer)
                step(model, optimizer, 0) if name == "fsdp2" else None

        if "8bit" in case:
            model, optimizer = made(case, state_dtype=None)
            state = get_optimizer_state_dict(model, optimizer)
            dcp.load({"optimizer": state}, checkpoint_id=folder / case)
            try:
                set_optimizer_state_dict(model, optimizer, state)
            except ValueError as error:
                found[f"{case}, in float32"] = str(error)
        model, optimizer = made(case)
        whole = torch.load(folder / f"{case}.pt", weights_only=False)["optimizer"]
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(model, optimizer, whole, options=options)
        found[f"{case}, full"] = worst(optimizer)
        step(model, optimizer, 0)
        gathered = get_optimizer_state_dict(model, optimizer, options=options)["state"]
        assert not any(isinstance(x, DTensor) for entry in gathered.values() for x in entry.values())
    return found


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    command, *folder = sys.argv[1:]
    found = train() if command == "train" else {"save": save, "resume": resume}[command](Path(folder[0]))
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

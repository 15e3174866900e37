"""Batch norm over a process group: two processes against PyTorch's batch norm of both batches in float64."""

from __future__ import annotations

import multiprocessing
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from norm_cases import normal
from torch import Tensor, nn

import memkit.functional as M
import memkit.nn

CHANNELS, STEPS = 5, 2
Found = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Rows of each process and what a row is beside its channels; a shift of the values and the module's arguments."""

    rows: tuple[int, int]
    rest: tuple[int, ...] = ()
    mean: float = 0
    act: str | None = None
    more: dict[str, Any] = field(default_factory=dict)

    def whole(self, step: int, seed: int) -> Tensor:
        """What both processes have together."""
        return normal((sum(self.rows), CHANNELS, *self.rest), torch.float64, 10 * step + seed)

    def norm(self, module: Any, **more: Any) -> nn.Module:
        made: nn.Module = getattr(module, f"BatchNorm{max(1, len(self.rest))}d")(
            CHANNELS, dtype=torch.float64, **self.more, **more
        )
        with torch.no_grad():
            for seed, parameter in enumerate(made.parameters()):
                parameter.copy_(normal((CHANNELS,), torch.float64, 50 + seed))
        return made


CASES = {
    "even": Case((4, 4)),
    "uneven": Case((2, 9)),
    "one a process": Case((1, 1)),
    "none in the second": Case((6, 0)),
    "none in the first": Case((0, 3), act="relu"),
    "sequences": Case((3, 5), (7,), act="gelu"),
    "images, large mean": Case((3, 6), (5, 4), 100, "silu"),
    "without weights": Case((4, 7), more={"affine": False}),
    "mean of all steps": Case((4, 7), more={"momentum": None}),
    "no running statistics": Case((4, 7), more={"track_running_stats": False}),
}


def train(case: Case, norm: nn.Module, own: slice, act: Any = None) -> Found:
    """Some steps on those rows: every result and gradient, and the statistics at the end."""
    found: Found = {}
    for step in range(STEPS):
        x = (case.whole(step, 0)[own] + case.mean).requires_grad_()
        out = act(norm(x)) if act else norm(x)
        found[f"out {step}"] = out.detach()
        grads = torch.autograd.grad(out, [x, *norm.parameters()], case.whole(step, 1)[own])
        found |= {f"grad {i} {step}": grad for i, grad in enumerate(grads)}
    return found | {f"state {name}": value.clone() for name, value in norm.state_dict().items()}


def alone(rank: int) -> Found:
    """What one process does while the other has no part in it; a collective call would wait for it in vain."""
    found: Found = {}
    if rank == 0:
        norm = CASES["even"].norm(memkit.nn, process_group=dist.group.WORLD).eval()
        x = CASES["even"].whole(0, 0).requires_grad_()
        out = norm(x)
        found = {"eval": out.detach(), "eval grad": torch.autograd.grad(out.sum(), x)[0]}
    group = dist.new_group([0])  # which every process has to call
    if rank == 0:
        x = CASES["even"].whole(0, 0)
        found["group of one"] = M.batch_norm_act(x, None, None, training=True, process_group=group)
    return found


def too_few(rank: int) -> str:
    x = torch.zeros(1 - rank, CHANNELS)
    try:
        M.batch_norm_act(x, None, None, training=True, process_group=dist.group.WORLD)
    except ValueError as error:
        return str(error)
    return ""


def worker(rank: int, port: int, file: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    found: Found = {"alone": alone(rank), "too few": too_few(rank)}
    for name, case in CASES.items():
        norm = case.norm(memkit.nn, act=case.act, process_group=dist.group.WORLD)
        own = slice(0, case.rows[0]) if rank == 0 else slice(case.rows[0], None)
        found[name] = train(case, norm, own)
    torch.save(found, file)
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Found, Found]:
    """What each of two processes found."""
    folder: Path = tmp_path_factory.mktemp("sync_norm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    files = [str(folder / f"{rank}.pt") for rank in range(2)]
    started = [context.Process(target=worker, args=(rank, port, file)) for rank, file in enumerate(files)]
    for process in started:
        process.start()
    for process in started:
        process.join(120)
    codes = [process.exitcode for process in started]
    for process in started:
        if process.is_alive():
            process.kill()
    assert codes == [0, 0], "None: a process waits for the other"
    first, second = (torch.load(file) for file in files)
    return first, second


@pytest.mark.parametrize("name", CASES)
def test_as_one_batch(name: str, processes: tuple[Found, Found]) -> None:
    case = CASES[name]
    act = getattr(F, case.act) if case.act else None
    want = train(case, case.norm(nn), slice(None), act)
    first, second = (found[name] for found in processes)
    assert first.keys() == second.keys() == want.keys()
    for key, value in want.items():
        if key.startswith("state"):
            assert torch.equal(first[key], second[key]), key  # or the processes drift apart
            mine = first[key]
        elif key.startswith(("out", "grad 0")):
            mine = torch.cat([first[key], second[key]])
        else:  # each has its share of a parameter's gradient
            mine = first[key] + second[key]
        torch.testing.assert_close(
            mine, value, rtol=1e-8, atol=1e-8, msg=lambda text, key=key: f"{key}: {text}"
        )


def test_evaluation_asks_nobody(processes: tuple[Found, Found]) -> None:
    found = processes[0]["alone"]
    x = CASES["even"].whole(0, 0).requires_grad_()
    out = CASES["even"].norm(nn).eval()(x)
    torch.testing.assert_close(found["eval"], out.detach())
    torch.testing.assert_close(found["eval grad"], torch.autograd.grad(out.sum(), x)[0])


def test_a_group_of_some_processes(processes: tuple[Found, Found]) -> None:
    want = F.batch_norm(CASES["even"].whole(0, 0), None, None, training=True)
    torch.testing.assert_close(processes[0]["alone"]["group of one"], want)


def test_one_value_in_all_processes_is_refused_in_each(processes: tuple[Found, Found]) -> None:
    for rank, found in enumerate(processes):
        assert found["too few"] == (
            "batch_norm_act: expected more than 1 value per channel when training, got "
            f"[{1 - rank}, {CHANNELS}] in each process"
        )

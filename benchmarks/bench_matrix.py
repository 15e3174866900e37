"""Swapped models beside what people run: AMP, checkpointing, torch.compile, torch.export, data-parallel engines.

    python benchmarks/bench_matrix.py                    # every model; some fifteen minutes on two cores
    python benchmarks/bench_matrix.py --models llama --columns amp,compile
    python benchmarks/bench_matrix.py --json             # benchmarks/results/matrix-cpu.json

Each model (memkit.bench.zoo) runs in a process of its own. A cell passes where loss and gradients of the swapped model,
`swap(model, sample=batch, lean="call")`, are those of the stock model under the same engine; otherwise it has the error, and
"stock too" where the stock model fails in the same way. compile is fullgraph with the backend "aot_eager"; export is of the
model's forward in evaluation; the engines run in two processes over gloo.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import multiprocessing
import os
import queue
import socket
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from common import RESULTS, progress
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memkit
from memkit.bench import machine
from memkit.bench.report import origin, text_table, write_json
from memkit.bench.zoo import LIBRARY, ZOO, Subject, distance

KIND = "memkit-matrix"
FORMAT = 1
FLOAT, HALF = 2e-3, 0.1
"""Of the distance between gradients, relative: rounding, and rounding of bfloat16."""

SECONDS = 240  # for a cell

Result = tuple[Tensor, list[Tensor]]
Run = Callable[[Subject], Result]


def finish(subject: Subject, loss: Tensor, model: nn.Module | None = None) -> Result:
    loss.backward()
    parameters = (model or subject.model).parameters()
    return loss.detach(), [p.grad.clone() for p in parameters if p.grad is not None]


def plain(subject: Subject) -> Result:
    return finish(subject, subject.loss())


def amp(subject: Subject) -> Result:
    with torch.autocast("cpu", torch.bfloat16):
        loss = subject.loss()
    return finish(subject, loss)


def checkpointed(**options: Any) -> Run:
    def run(subject: Subject) -> Result:
        one = torch.ones(
            (), requires_grad=True
        )  # a reentrant checkpoint looks for an input that requires grad
        return finish(subject, checkpoint(lambda one: subject.loss() * one, one, **options))

    return run


def selective() -> Any:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def compiled(subject: Subject) -> Result:
    torch._dynamo.reset()
    model = subject.model
    subject.model = torch.compile(model, backend="aot_eager", fullgraph=True)
    try:
        return finish(subject, subject.loss(), model)
    finally:
        subject.model = model


def exported(subject: Subject) -> Result:
    model = subject.model.eval()
    kwargs = subject.sample if isinstance(subject.sample, dict) else {}
    args = () if kwargs else subject.sample
    with torch.no_grad():
        program = torch.export.export(model, args, kwargs, strict=False)
        out = program.module()(*args, **kwargs)
    values = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else (out,)
    found = [value for value in values if isinstance(value, Tensor)]
    return found[0].mean(), found


def data_parallel(subject: Subject) -> Result:
    model = subject.model
    subject.model = nn.parallel.DistributedDataParallel(model)
    return finish(subject, subject.loss(), model)


def fully_sharded(subject: Subject) -> Result:
    from torch.distributed.fsdp import fully_shard

    for module in subject.model.modules():
        if isinstance(module, nn.ModuleList):
            for each in module:
                fully_shard(each)
    model = fully_shard(subject.model)
    loss, grads = finish(subject, subject.loss(), model)
    return loss, [grad.full_tensor() for grad in grads]  # type: ignore[operator]


def fairscale(subject: Subject) -> Result:
    from fairscale.nn.data_parallel import ShardedDataParallel
    from fairscale.optim.oss import OSS

    model = subject.model
    optimizer = OSS(params=model.parameters(), optim=torch.optim.SGD, lr=1e-2)
    subject.model = ShardedDataParallel(model, optimizer)
    loss = subject.loss()
    loss.backward()
    optimizer.step()  # each rank has the gradients of its own parameters alone
    return loss.detach(), [p.detach().clone() for p in model.parameters()]


COLUMNS: dict[str, Run] = {
    "plain": plain,
    "amp": amp,
    "checkpoint": checkpointed(use_reentrant=False),
    "checkpoint, reentrant": checkpointed(use_reentrant=True),
    "checkpoint, selective": checkpointed(use_reentrant=False, context_fn=selective),
    "compile": compiled,
    "export": exported,
    "DDP": data_parallel,
    "FSDP2": fully_sharded,
    "FairScale": fairscale,
}
ENGINES = {"DDP", "FSDP2", "FairScale"}


def attempt(run: Run, subject: Subject) -> Result | str:
    try:
        return run(subject)
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"


def cell(name: str, column: str) -> str:
    """ "" where it passes."""
    torch.manual_seed(0)
    stock = ZOO[name]()
    swapped = Subject(copy.deepcopy(stock.model), stock.sample)
    with torch.autocast("cpu", torch.bfloat16, enabled=column == "amp"):
        memkit.swap(swapped.model, sample=swapped.sample, lean="call")
    theirs, ours = attempt(COLUMNS[column], stock), attempt(COLUMNS[column], swapped)
    if isinstance(ours, str):
        return f"stock too: {ours}" if isinstance(theirs, str) else ours
    if isinstance(theirs, str):
        return ""
    apart = distance(ours[1], theirs[1])
    bound = HALF if column == "amp" else FLOAT
    return "" if apart <= bound and torch.isfinite(ours[0]) else f"gradients are {apart:.1e} apart"


def examine(name: str, columns: list[str], rank: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  libraries' warnings, for the process's life
    torch.manual_seed(0)
    if rank >= 0:
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    for column in columns:
        found = cell(name, column)
        if rank <= 0:
            results.put((column, found))
    if rank >= 0:
        dist.destroy_process_group()


def row(name: str, columns: list[str]) -> dict[str, str]:
    """Cells by column: those of one process, then those of two."""
    context = multiprocessing.get_context("fork")  # what was imported is there
    found = dict.fromkeys(columns, "no answer")
    alone = [column for column in columns if column not in ENGINES]
    beside = [column for column in columns if column in ENGINES]
    for chosen, ranks in ((alone, (-1,)), (beside, (0, 1))):
        if not chosen:
            continue
        with contextlib.closing(socket.socket()) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        results = context.Queue()
        processes = [context.Process(target=examine, args=(name, chosen, r, port, results)) for r in ranks]
        for process in processes:
            process.start()
        with contextlib.suppress(queue.Empty):
            for _ in chosen:
                column, text = results.get(timeout=SECONDS)
                found[column] = text
        for process in processes:
            process.join(5)
            process.kill()
    return found


def run(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"kind": KIND, "format": FORMAT, **machine.stamp("cpu")}
    result |= {"columns": args.columns, "cells": {}}
    if any(LIBRARY[name] == "transformers" for name in args.models):
        importlib.import_module("transformers.models.llama.modeling_llama")
    for library in sorted({LIBRARY[name] for name in args.models} - {None}, key=str):
        result["versions"][library] = importlib.import_module(str(library)).__version__
    for name in args.models:
        progress(name)
        result["cells"][name] = row(name, args.columns)
    progress("")
    return result


def table(result: dict[str, Any]) -> str:
    body = []
    for name, cells in result["cells"].items():
        words = [
            ("stock fails too" if text.startswith("stock too") else "no") if text else "yes"
            for text in cells.values()
        ]
        body.append([name, *words])
    return text_table(["model", *result["columns"]], body)


def reasons(result: dict[str, Any]) -> list[str]:
    return [
        f"{name}, {column}: {text}"
        for name, cells in result["cells"].items()
        for column, text in cells.items()
        if text
    ]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", metavar="A,B", help=f"of {', '.join(ZOO)} (default: all)")
    parser.add_argument("--columns", metavar="A,B", help=f"of {', '.join(COLUMNS)} (default: all)")
    parser.add_argument("--json", action="store_true", help="write results/matrix-cpu.json")
    args = parser.parse_args(argv)
    for option, known in (("models", list(ZOO)), ("columns", list(COLUMNS))):
        text = getattr(args, option)
        chosen = [each.strip() for each in text.split(";" if ";" in text else ",")] if text else known
        if unknown := set(chosen) - set(known):
            parser.error(f"--{option}: expected some of {', '.join(known)}, got {', '.join(sorted(unknown))}")
        setattr(args, option, chosen)
    result = run(args)
    print(table(result), origin(result), *reasons(result), sep="\n\n")
    if args.json:
        write_json(result, RESULTS / "matrix-cpu.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())

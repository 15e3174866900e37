"""Runs the columns on one model in processes of their own, which start anew behind whatever fails."""

from __future__ import annotations

import contextlib
import copy
import functools
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from bench_models import rounded_otherwise

import memkit
from memkit.bench.zoo import ZOO, Subject, distance

from . import COLUMNS, ENGINES, InapplicableError, Result
from .pipeline import MICROBATCHES

LAYERS = 2
FLOAT, HALF = 2e-3, 0.1
"""Of the distance between losses and gradients, relative: rounding, and rounding of bfloat16."""
DRAWS = 40  # of the sample's rounding: it hits a kink once in five or six
SECONDS = 240  # for a cell
PASSES, FAILS, STOCK_TOO, NOTHING = "passes", "fails", "stock fails too", "not applicable"


@dataclass
class Cell:
    state: str
    reason: str = ""
    apart: float | None = None
    seconds: float = 0.0


@dataclass
class Answer:
    """Of one process about one column."""

    column: str
    apart: float = 0.0
    bound: float = 0.0
    error: str = ""
    of_stock: bool = False
    not_applicable: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.error) and not self.not_applicable


@functools.cache
def pair(name: str, autocast: bool) -> tuple[Subject, Subject]:
    """The stock model and the swapped one, to be copied."""
    torch.manual_seed(0)
    stock = ZOO[name](layers=LAYERS)
    swapped = copy.deepcopy(stock)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        memkit.swap(swapped.model, sample=swapped.sample, lean="call")
    return stock, swapped


def apart(ours: Result, theirs: Result) -> float:
    """The larger of the distances between losses and between gradients; not a number where one is not."""
    loss = (ours[0] - theirs[0]).abs() / theirs[0].abs().clamp(min=1e-9)
    return float(torch.stack([loss.double(), torch.tensor(distance(ours[1], theirs[1])).double()]).max())


@functools.cache
def rounding(name: str, autocast: bool, parts: int) -> float:
    """What kinks, and norms over few values, make of an image's rounding: the farthest of some stock steps on one of so many
    parts of the batch."""
    stock = copy.copy(pair(name, autocast)[0])
    if isinstance(stock.sample, dict):
        return 0.0
    stock.sample = tuple(x.chunk(parts)[0] for x in stock.sample)
    run = COLUMNS["AMP" if autocast else "plain"]
    first, found = run(copy.deepcopy(stock)), 0.0
    for draw in range(DRAWS):
        torch.manual_seed(draw)
        other = Subject(copy.deepcopy(stock.model), rounded_otherwise(stock.sample))
        found = max(found, apart(run(other), first))
    return found


def examine(name: str, column: str, stock_runs: bool) -> Answer:
    answer = Answer(column)
    run = COLUMNS[column]
    try:
        stock, swapped = pair(name, column == "AMP")
        answer.of_stock = stock_runs
        theirs = run(copy.deepcopy(stock)) if stock_runs else None
        answer.of_stock = False
        ours = run(copy.deepcopy(swapped))
        answer.bound = HALF if column == "AMP" else FLOAT
        answer.apart = apart(ours, theirs) if theirs else 0.0
        if not answer.apart <= answer.bound:
            parts = MICROBATCHES if column == "PP" else 1
            answer.bound = max(answer.bound, 2 * rounding(name, column == "AMP", parts))
    except InapplicableError as error:
        answer.not_applicable, answer.error = True, str(error)
    except Exception as error:
        answer.error = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return answer


def work(name: str, columns: list[str], stock_runs: bool, rank: int, port: int, answers: Connection) -> None:
    """A process's life. The first error ends it: the other rank may be waiting for this one anywhere."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # or an interrupted run would note that all has failed
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    torch.set_num_threads(1)
    if rank >= 0:
        patience = timedelta(seconds=SECONDS)
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ |= {key: str(value) for key, value in environment.items()}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        dist.init_process_group("gloo", timeout=patience)
    for column in columns:
        answer = examine(name, column, stock_runs)
        answers.send(answer)
        if answer.failed:
            break
    with contextlib.suppress(EOFError):
        answers.recv()  # stays until it is ended: whoever waits for this process is not to see it go
    os._exit(0)


def attempt(name: str, columns: list[str], stock_runs: bool = True) -> Iterator[tuple[list[Answer], float]]:
    """For each column the answers of all processes and seconds, until one of them fails."""
    context = multiprocessing.get_context("forkserver")  # which has imported the libraries
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, pipes = [], []
    for rank in (0, 1) if columns[0] in ENGINES else (-1,):
        ours, theirs = context.Pipe()
        arguments = (name, columns, stock_runs, rank, port, theirs)
        processes.append(context.Process(target=work, args=arguments, daemon=True))
        processes[-1].start()
        theirs.close()
        pipes.append(ours)
    try:
        for column in columns:
            begin = time.monotonic()
            answers = collect(column, pipes)
            yield answers, time.monotonic() - begin
            if any(answer.failed for answer in answers):
                break
    finally:
        for process in processes:
            process.kill()
            process.join()


def collect(column: str, pipes: list[Connection]) -> list[Answer]:
    """Of all processes, or up to the first that fails."""
    answers: list[Answer] = []
    waiting, end = list(pipes), time.monotonic() + SECONDS
    while waiting and not (answers and answers[-1].failed):
        ready = wait(waiting, max(end - time.monotonic(), 0))
        if not ready:
            return [*answers, Answer(column, error=f"no answer in {SECONDS} s")]
        pipe: Any = ready[0]
        waiting.remove(pipe)
        try:
            answers.append(pipe.recv())
        except EOFError:
            answers.append(Answer(column, error="the process died"))
    return answers


def verdict(answers: list[Answer], seconds: float) -> Cell:
    """The first error counts: others may follow from it."""
    for answer in answers:
        if answer.error:
            return Cell(NOTHING if answer.not_applicable else FAILS, answer.error, None, seconds)
    for answer in answers:
        if not answer.apart <= answer.bound:
            reason = f"loss or gradients are {answer.apart:.1e} from stock's, the bound is {answer.bound:.1e}"
            return Cell(FAILS, reason, answer.apart, seconds)
    return Cell(PASSES, "", max(answer.apart for answer in answers), seconds)


def row(name: str, columns: list[str], tell: Callable[[str, dict[str, Any]], None]) -> None:
    """Tells of each cell when it is there."""
    for chosen in ([c for c in columns if c not in ENGINES], [c for c in columns if c in ENGINES]):
        left = list(chosen)
        while left:
            for answers, seconds in attempt(name, list(left)):
                column = left.pop(0)
                cell = verdict(answers, seconds)
                if any(answer.failed and answer.of_stock for answer in answers):
                    ours = verdict(*next(attempt(name, [column], stock_runs=False)))
                    cell = Cell(STOCK_TOO, ours.reason, None, seconds) if ours.state == FAILS else ours
                tell(column, asdict(cell))

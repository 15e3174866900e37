"""Models of several libraries, stock and swapped: what memory, time and exactness `swap` costs or brings.

    python benchmarks/bench_models.py                    # all, some fourteen minutes on two cores
    python benchmarks/bench_models.py --models llama,bert
    python benchmarks/bench_models.py --json --update --models llama    # renews one row of the results file
    python benchmarks/bench_models.py --device cuda                     # batches 64 times the zoo's

Each model (memkit.bench.zoo: small, random weights, float32, no dropout) runs in a process of its own on the CPU, with four
times the zoo's batch, swapped by `swap(model, sample=batch, ops=["all", "linear_cross_entropy"], lean="call")`. Memory is
that of a training step above its start; gradients against those of the stock model in float64, the error of all together
over stock's own (on the zoo's batch; the median of nine seeds, where the first is a factor of 1.5 from 1); losses over 20
steps of SGD from one start, and where they differ by more than 1e-4, by how much stock's do if images are rounded
otherwise; time: the median over these steps, which stock and swapped take in turns, in two processes: in one the stock model
is made first, in the other the swapped one. What is made first lies otherwise in memory, which can move a ratio by 0.03.
The same on a fourth of the batch, where calls weigh most.
"""

from __future__ import annotations

import argparse
import copy
import gc
import importlib.util
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import memkit
from memkit.bench import machine
from memkit.bench.report import origin, size, text_table, write_json
from memkit.bench.timing import ratio, until_interrupted
from memkit.bench.zoo import LIBRARY, ZOO, Subject, distance, exact_gradients, gradients
from memkit.memory import measure

KIND = "memkit-models"
FORMAT = 1
RESULTS = Path(__file__).resolve().parent / "results"
STEPS = 20
TYPICAL = 1.5
SEEDS = 9
ROUNDING = 1e-4
COLUMNS = (
    "model",
    "swapped / left",
    "forward difference",
    "gradient error to stock's",
    f"loss difference, {STEPS} steps",
    "saved for backward",
    "",
    "peak of a step",
    "step time",
    "on a fourth of the batch",
)
FOURTH = 4
OPS = "all", "linear_cross_entropy"


@dataclass
class Case:
    """A model of the zoo, where it runs, and how many times the zoo's batch it is given."""

    name: str
    device: str = "cpu"
    batch: int = 1
    threads: int = 0

    def make(self, seed: int = 0, batch: int | None = None) -> Subject:
        torch.manual_seed(seed)
        subject = ZOO[self.name]()
        subject.model.to(self.device)
        given = subject.sample.items() if isinstance(subject.sample, dict) else enumerate(subject.sample)
        found = {key: self.repeated(x, batch or self.batch) for key, x in given}
        subject.sample = found if isinstance(subject.sample, dict) else tuple(found.values())
        return subject

    def repeated(self, x: Tensor, batch: int) -> Tensor:
        """What has no batch is as it is: positions, a row for each token."""
        is_batch = x.dim() != 2 or not x.is_floating_point() or x.shape[-1] > 3
        return x.repeat(batch, *[1] * (x.dim() - 1)).to(self.device) if is_batch else x.to(self.device)


def step(subject: Subject) -> float:
    subject.model.zero_grad(set_to_none=True)
    loss = subject.loss()
    loss.backward()
    return loss.item()


def gradient_error(case: Case, seed: int) -> float:
    """On the zoo's own batch."""
    subject = case.make(seed, batch=1)
    exact = exact_gradients(subject).values()
    stock = distance(gradients(copy.deepcopy(subject)).values(), exact)
    memkit.swap(subject.model, ops=OPS, lean="call")
    return distance(gradients(subject).values(), exact) / stock


def outputs(subject: Subject) -> list[Tensor]:
    with torch.no_grad():
        out = (
            subject.model(**subject.sample)
            if isinstance(subject.sample, dict)
            else subject.model(*subject.sample)
        )
    values = out.values() if isinstance(out, dict) else out if isinstance(out, tuple) else (out,)
    return [value for value in values if isinstance(value, Tensor)]


def memory(subject: Subject, device: str) -> dict[str, int]:
    step(subject)
    subject.model.zero_grad(set_to_none=True)
    measured = measure(lambda: subject.loss().backward(), device=device)
    return {"saved": measured.saved, "peak": measured.peak}


def train(subjects: dict[str, Subject]) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Losses and seconds of all in turns."""
    losses: dict[str, list[float]] = {name: [] for name in subjects}
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    optimizers = {n: torch.optim.SGD(s.model.parameters(), lr=1e-3) for n, s in subjects.items()}
    for turn in range(STEPS):
        for name in sorted(subjects, reverse=bool(turn % 2)):
            begin = time.perf_counter()
            losses[name].append(step(subjects[name]))
            optimizers[name].step()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - begin)
    return losses, seconds


def loss_difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


def rounded_otherwise(sample: Any) -> Any:
    """A tuple's numbers, each of which may be one unit in the last place larger."""
    return tuple(t * (1 + torch.finfo(t.dtype).eps * torch.rand_like(t).round()) for t in sample)


def made(case: Case, first: str) -> tuple[dict[str, Subject], memkit.SwapReport]:
    """The stock model and the swapped one, from one seed."""
    subjects: dict[str, Subject] = {}
    for each in ("stock", "memkit") if first == "stock" else ("memkit", "stock"):
        subjects[each] = case.make()
        if each == "memkit":
            report = memkit.swap(subjects[each].model, sample=subjects[each].sample, ops=OPS, lean="call")
    return subjects, report


def pace(case: Case, first: str) -> dict[str, list[float]]:
    """Seconds of the steps where this model was made first."""
    torch.set_num_threads(case.threads)
    subjects, _ = made(case, first)
    for subject in subjects.values():
        step(subject)
    return train(subjects)[1]


def examine(case: Case) -> dict[str, Any]:
    torch.set_num_threads(case.threads)
    errors = [gradient_error(case, 0)]
    if (
        not 1 / TYPICAL <= errors[0] <= TYPICAL
    ):  # a value on the other side of a kink, which others may not have
        errors += [gradient_error(case, seed) for seed in range(1, SEEDS)]
    subjects, report = made(case, "stock")
    stock, swapped = subjects["stock"], subjects["memkit"]
    forward = distance(outputs(swapped), outputs(stock))
    before, after = memory(stock, case.device), memory(swapped, case.device)
    losses, seconds = train(subjects)
    apart = loss_difference(losses["memkit"], losses["stock"])
    rounded = None
    if apart > ROUNDING:
        other = case.make()
        other.sample = rounded_otherwise(other.sample)
        rounded = loss_difference(train({"stock": other})[0]["stock"], losses["stock"])
    left: dict[str, int] = {}
    for row in report.left:
        key = f"{row.before}: {row.reason}"
        left[key] = left.get(key, 0) + 1
    return {
        "model": case.name,
        "parameters": sum(p.numel() for p in stock.model.parameters()),
        "changed": len(report.changed),
        "left": left,
        "forward_difference": forward,
        "gradient_error": errors,
        "loss_difference": apart,
        "loss_difference_of_rounding": rounded,
        "losses": losses,
        "saved": [before["saved"], after["saved"]],
        "peak": [before["peak"], after["peak"]],
        "seconds": seconds,
    }


def by_itself(work: Callable[..., Any], *args: Any) -> Any:
    """In a process of its own, forked before any thread has started: so the imports are paid for once. What has asked for a
    GPU cannot be forked."""
    if args[0].device == "cuda":
        found = work(*args)
        gc.collect()
        torch.cuda.empty_cache()
        return found
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(work, args)


def ratio_of(
    first: dict[str, list[float]], second: dict[str, list[float]]
) -> tuple[float, dict[str, list[float]]]:
    """memkit's time to stock's, and the seconds of both processes together."""
    seconds = {key: taken + second[key] for key, taken in first.items()}
    return ratio(seconds["memkit"], seconds["stock"]), seconds


def run(args: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {
        "kind": KIND,
        "format": FORMAT,
        "batch": args.batch,
        "models": [],
        "versions": {},
        "failed": {},
    }
    for library in sorted({LIBRARY[name] for name in args.models} - {None}, key=str):
        if importlib.util.find_spec(str(library)) is None:
            print(f"{library} is not installed: its models are left out", file=sys.stderr)
            args.models = [name for name in args.models if LIBRARY[name] != library]
        else:
            result["versions"][library] = importlib.import_module(str(library)).__version__
    if any(LIBRARY[name] == "transformers" for name in args.models):
        importlib.import_module("transformers.models.llama.modeling_llama")
    with until_interrupted(result):
        for name in args.models:
            begin = time.perf_counter()
            case = Case(name, args.device, args.batch, torch.get_num_threads())
            try:
                row, again = by_itself(examine, case), by_itself(pace, case, "memkit")
                fewer = replace(case, batch=max(case.batch // FOURTH, 1))
                row["ratio_fourth"], _ = ratio_of(
                    *(by_itself(pace, fewer, first) for first in row["seconds"])
                )
            except Exception as error:  # a library's other version, say: the others are measured all the same
                result["failed"][name] = f"{type(error).__name__}: {error}"
                print(f"{name}: {result['failed'][name]}", file=sys.stderr, flush=True)
                continue
            row["ratio"], seconds = ratio_of(row["seconds"], again)
            row["seconds"] = {key: statistics.median(taken) for key, taken in seconds.items()}
            result["models"].append(row)
            print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    found = machine.stamp(args.device)
    return {**result, **found, "versions": {**found["versions"], **result["versions"]}}


def rows(result: dict[str, Any]) -> list[list[str]]:
    body = []
    for row in result["models"]:
        (saved, saved_now), (peak, peak_now) = row["saved"], row["peak"]
        other = row.get("loss_difference_of_rounding")
        body.append(
            [
                row["model"],
                f"{row['changed']} / {sum(row['left'].values())}",
                f"{row['forward_difference']:.0e}",
                f"{statistics.median(row['gradient_error']):.2f}×",
                f"{row['loss_difference']:.0e}" + (f" (rounding: {other:.0e})" if other else ""),
                f"{size(saved)} → {size(saved_now)}",
                f"{saved_now / saved - 1:+.0%}",
                f"{size(peak)} → {size(peak_now)}",
                f"{row['ratio']:.2f}×",
                f"{row['ratio_fourth']:.2f}×",
            ]
        )
    return body


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", metavar="A,B", help=f"of {', '.join(ZOO)} (default: all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    parser.add_argument(
        "--batch", type=int, metavar="N", help="times the zoo's batches (default: 4, on a GPU 64)"
    )
    parser.add_argument(
        "--json", nargs="?", const="", metavar="FILE", help="default: results/models-DEVICE.json"
    )
    parser.add_argument("--update", action="store_true", help="keep the file's other models")
    args = parser.parse_args(argv)
    args.batch = args.batch or (64 if args.device == "cuda" else 4)
    args.models = args.models.split(",") if args.models else list(ZOO)
    if unknown := set(args.models) - set(ZOO):
        parser.error(f"--models: expected some of {', '.join(ZOO)}, got {', '.join(sorted(unknown))}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    result = run(args)
    if args.json is not None:
        file = Path(args.json) if args.json else RESULTS / f"models-{args.device}.json"
        if args.update and file.exists():
            before = json.loads(file.read_text())
            result["models"] += [row for row in before["models"] if row["model"] not in args.models]
            result["versions"] = before["versions"] | result["versions"]
        result["models"].sort(key=lambda row: list(ZOO).index(row["model"]))
        write_json(result, file)
        print(f"wrote {file.name}")
    print(text_table(COLUMNS, rows(result)), origin(result), sep="\n\n")
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())

"""Training steps of big models in bfloat16: memory, time, and the largest batch that fits.

    python benchmarks/bench_steps.py --device cuda --json            # gpt, llama and resnet50, some minutes
    python benchmarks/bench_steps.py --models llama --variants eager,liger,memkit --sequence 8192 --budget 24GiB
    python benchmarks/bench_steps.py --device cpu --tiny --budget 100MiB      # small models: whether the script works

Variants: stock eager; torch.compile; Liger-Kernel, with what it has for the model; memkit, swapped under
memkit.lean(), with the head and its loss as one (linear_cross_entropy); and memkit with its optimizer, whose steps are
taken inside of backward. The optimizer of all others is torch.optim.AdamW(fused=True). All start from the same weights
and train on one batch of random tokens or images: gpt and llama with weights in bfloat16, resnet50 under autocast.

Peak and saved are bytes of a step above its start, and the time is a ratio to stock eager over interleaved steps. The
largest batch is what steps get through within --budget in total, weights, gradients and optimizer state included: on a GPU
with that much memory given to PyTorch's allocator (set_per_process_memory_fraction), one variant at a time, on the CPU
by their measured peak. The search starts where the peaks of two smaller batches, extended linearly, meet the budget.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from common import Choices, progress
from step_models import MODELS, Case, Trainer
from torch import Tensor

from memkit._pool_text import parse_size
from memkit.bench import machine
from memkit.bench.report import origin, size, text_table, write_json
from memkit.bench.timing import interleave, seconds, summary, until_interrupted
from memkit.memory import measure

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

KIND = "memkit-steps"
FORMAT = 1
VARIANTS = {
    "eager": "stock eager",
    "compile": "torch.compile",
    "liger": "Liger-Kernel",
    "memkit": "memkit",
    "memkit+optimizer": "memkit and its optimizer",
}
PACKAGES = {"llama": "transformers", "resnet50": "torchvision"}  # of models
LIBRARIES = ("transformers", "torchvision", "liger_kernel")
COLUMNS = (
    "model",
    "variant",
    "batch",
    "peak of a step",
    "saved for backward",
    "step time",
    "final loss",
    "largest batch",
)
WARM_STEPS = 2
LEFT = 32 << 20  # bytes that another variant may leave behind
TRIAL_STEPS = 2  # of a batch that fits: the second has the optimizer's state and what the first left behind


def absent(model: str, variant: str, device: str) -> str | None:
    """Why a variant is left out."""
    if variant != "liger":
        return None
    if model == "resnet50":
        return "has nothing for this model"
    if importlib.util.find_spec("liger_kernel") is None:
        return "not installed"
    return None if device == "cuda" else "needs a GPU"


def release(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # tens of MiB a stream, which the next product takes again
        torch.cuda.empty_cache()


def one_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:300]


def compare(case: Case, names: list[str], args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Memory, times and losses of all variants on one batch; an error ends the variant that raised it."""
    batch = case.batch(case.size)
    trainers: dict[str, Trainer] = {}
    losses: dict[str, list[float]] = {}

    def timed(name: str) -> float:
        kept: list[Tensor] = []
        taken = seconds(lambda: kept.append(trainers[name].step(batch)), args.device)
        losses[name].append(kept[0].item())
        return taken

    for name in names:
        try:
            begin = time.perf_counter()
            trainers[name], losses[name] = Trainer(case, name, args.device), []
            found[name]["made_seconds"] = time.perf_counter() - begin
            found[name]["first_step_seconds"] = timed(name)
            for _ in range(1, WARM_STEPS):
                timed(name)
        except Exception as error:
            found[name]["error"] = one_line(error)
            trainers.pop(name, None)
            if name == "eager":  # to which the others are compared
                for other in names[1:]:
                    found[other]["error"] = "stock eager did not run"
                return
        release(args.device)
    times = interleave({name: lambda name=name: timed(name) for name in trainers}, args.steps, warm=0)
    for name, trainer in trainers.items():
        measured = measure(lambda step=trainer.step: step(batch), device=args.device)
        found[name] |= {
            "held_bytes": trainer.held(),
            "peak_bytes": measured.peak,
            "saved_bytes": measured.saved,
            "step": summary(times[name], times["eager"]),
            "losses": losses[name],
            "loss_final": losses[name][-1],
        }
        if trainer.swapped is not None:
            rows = trainer.swapped.rows
            found[name]["swap"] = {
                "changed": len(trainer.swapped.changed),
                "rows": len(rows),
                "reasons": dict(Counter(row.reason for row in rows if row.reason)),
            }


class Trials:
    """Steps of one variant at batches of any size, within a budget of bytes in total."""

    def __init__(self, case: Case, variant: str, args: argparse.Namespace) -> None:
        self.case, self.budget, self.device, self.steps = case, args.budget, args.device, args.trial_steps
        self.trainer = Trainer(case, variant, args.device)
        self.bytes: dict[int, int] = {}  # what steps needed in total, by batch
        self.tried: dict[int, bool] = {}

    def needs(self, rows: int) -> int:
        """Most bytes at any moment of the steps, with all that the variant holds."""
        batch = self.case.batch(rows)

        def steps() -> None:
            for _ in range(self.steps):
                self.trainer.step(batch)

        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            steps()
            torch.cuda.synchronize()
            total = torch.cuda.max_memory_allocated()
        else:
            inputs = sum(t.untyped_storage().nbytes() for t in batch)
            total = inputs + self.trainer.held() + measure(steps, device=self.device).peak
        self.bytes[rows] = total
        return total

    def fits(self, rows: int) -> bool:
        progress(f"batch {rows}")
        try:
            fitting = self.needs(rows) <= self.budget
        except torch.OutOfMemoryError:
            fitting = False
        # Behind the except: until there the error's frames hold the step's tensors.
        self.trainer.optimizer.zero_grad(set_to_none=True)
        release(self.device)
        self.tried[rows] = fitting
        return fitting

    def guess(self) -> int:
        """The batch whose peak is the budget, if peaks grow linearly between the two largest batches measured."""
        low = max(self.case.grain, self.case.size // 2)
        high = 2 * low
        self.needs(low)  # makes the optimizer's state
        self.needs(low)
        self.needs(high)
        release(self.device)
        while True:
            found = self.extended(low, high)
            # Half of it, for a better line; not far beyond, as peaks of small batches say little of large ones.
            near = min(found // 2, 8 * high) // self.case.grain * self.case.grain
            if near < 2 * high or not self.fits(near):
                return found
            low, high = high, near

    def extended(self, low: int, high: int) -> int:
        each = (self.bytes[high] - self.bytes[low]) / (high - low)
        return int(low + (self.budget - self.bytes[low]) / each) if each > 0 else 16 * high


@contextmanager
def memory_limit(budget: int, device: str) -> Iterator[None]:
    """Within it PyTorch's allocator takes at most that much of the GPU's memory."""
    if device != "cuda":
        yield
        return
    before = torch.cuda.get_per_process_memory_fraction()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before)


def largest(fits: Callable[[int], bool], guess: int, grain: int = 1) -> int:
    """The largest multiple of `grain` that fits, 0 for none: from a guess in growing strides, then by halves."""
    good, bad, stride = 0, None, grain
    rows = max(grain, guess // grain * grain)
    while bad is None or bad - good > grain:
        if fits(rows):
            good = rows
        else:
            bad = rows
        if bad is None:
            rows, stride = good + stride, 2 * stride
        elif not good:
            rows, stride = max(grain, bad - stride), 2 * stride
        else:
            rows = (good + bad) // 2 // grain * grain
    return good


def search(case: Case, variant: str, args: argparse.Namespace) -> dict[str, Any]:
    """The largest batch within the budget, of a variant that is alone on the device."""
    others = torch.cuda.memory_allocated() if args.device == "cuda" else 0
    if others > LEFT:
        raise RuntimeError(f"expected a device without tensors, got {size(others)} that others hold")
    with memory_limit(args.budget, args.device):
        trials = Trials(case, variant, args)
        guess = trials.guess()
        found = largest(trials.fits, guess, case.grain)
    return {
        "others_bytes": others,
        "largest": found,
        "guess": guess,
        "tried": {str(rows): fitting for rows, fitting in trials.tried.items()},
        "held_bytes": trials.trainer.held(),
        "peak_bytes": trials.bytes.get(found),
    }


def run(args: argparse.Namespace) -> dict[str, Any]:
    options = ("models", "variants", "steps", "trial_steps", "budget", "sequence", "dropout", "tiny", "quick")
    result: dict[str, Any] = {"kind": KIND, "format": FORMAT, **machine.stamp(args.device)}
    result["versions"] |= {name: version(name) for name in LIBRARIES}
    result |= {"options": {name: getattr(args, name) for name in options}, "models": {}, "left_out": {}}
    with until_interrupted(result):
        for model in args.models:
            if model in PACKAGES and importlib.util.find_spec(PACKAGES[model]) is None:
                result["left_out"][model] = f"{PACKAGES[model]} is not installed"
                continue
            begin = time.perf_counter()
            examine(model, args, result["models"])
            print(f"{model}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return result


def examine(model: str, args: argparse.Namespace, models: dict[str, Any]) -> None:
    """Writes into `models` as it goes: an interruption leaves what was measured."""
    case = MODELS[model](args)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in case.build().parameters())
    variants: dict[str, dict[str, Any]] = {name: {} for name in args.variants}
    shape = list(case.batch(case.size)[0].shape)
    models[model] = {
        "parameters": parameters,
        "batch": case.size,
        "input_shape": shape,
        "grain": case.grain,
        "variants": variants,
    }
    for name in args.variants:
        if reason := absent(model, name, args.device):
            variants[name]["absent"] = reason
    compare(case, [name for name in args.variants if not variants[name]], args, variants)
    release(args.device)
    for name, found in variants.items():
        if "peak_bytes" not in found:
            continue
        progress(f"{model} {name}")
        begin = time.perf_counter()
        try:
            found["search"] = search(case, name, args)
        except Exception as error:
            found["search"] = {"error": one_line(error)}
        found["search"]["seconds"] = time.perf_counter() - begin
        release(args.device)


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def columns(result: dict[str, Any]) -> list[str]:
    return [*COLUMNS[:-1], f"{COLUMNS[-1]} in {budget_text(result)}"]


def budget_text(result: dict[str, Any]) -> str:
    return size(result["options"]["budget"]).replace(".0 ", " ")


def rows(result: dict[str, Any]) -> list[list[str]]:
    """A row for each model and variant."""
    body = []
    for model, measured in result["models"].items():
        variants = measured["variants"]
        stock = variants["eager"]
        for name, found in variants.items():
            nothing = found.get("swap", {}).get("changed") == 0
            head = [model, f"{VARIANTS[name]} (no layer changed)" if nothing else VARIANTS[name]]
            if "peak_bytes" not in found:
                reason = found.get("absent") or found.get("error", "interrupted")
                body.append([*head, reason, *[""] * (len(COLUMNS) - len(head) - 1)])
                continue
            body.append(
                [
                    *head,
                    str(measured["batch"]),
                    beside(size(found["peak_bytes"]), found["peak_bytes"], stock["peak_bytes"]),
                    beside(size(found["saved_bytes"]), found["saved_bytes"], stock["saved_bytes"]),
                    f"{found['step']['seconds'] * 1e3:.0f} ms ({found['step']['ratio']:.2f}×)",
                    f"{found['loss_final']:.3f}",
                    largest_text(found.get("search", {}), stock.get("search", {})),
                ]
            )
    return body


def beside(text: str, count: int, stock: int) -> str:
    return text if count == stock or not stock else f"{text} ({count / stock - 1:+.0%})"


def largest_text(found: dict[str, Any], stock: dict[str, Any]) -> str:
    """Nothing of a search that does not say that it was alone."""
    if "largest" in found and "others_bytes" not in found:
        return ""
    if found.get("largest") == 0:
        return "none fits"
    if "largest" in found:
        return beside(str(found["largest"]), found["largest"], stock.get("largest", 0))
    return found.get("error", "")


def conditions(result: dict[str, Any]) -> str:
    """What was trained and how to read the table."""
    options = result["options"]
    parts = []
    for model, measured in result["models"].items():
        shape = "×".join(map(str, measured["input_shape"]))
        parts.append(f"{model}: {measured['parameters'] / 1e6:.0f} M parameters, batch {shape}")
    parts += [f"{model} left out: {reason}" for model, reason in result["left_out"].items()]
    trials = options["trial_steps"]
    coarse = {name: found["grain"] for name, found in result["models"].items() if found["grain"] > 1}
    grains = "".join(f"; of the {name} a multiple of {grain}" for name, grain in coarse.items())
    dropped = f", the gpt with {options['dropout']:.0%} dropout" if "gpt" in result["models"] else ""
    return (
        f"{'; '.join(parts)}; bfloat16{dropped}. Random data; AdamW, stock's fused but for memkit's own, which rounds "
        "weights in bfloat16 stochastically. Stock's loss is taken of logits in float32, as transformers has it; those of "
        "Liger-Kernel and memkit are one operator with the head, put in by hand. Peak and saved "
        "are bytes above the start of a step (weights and optimizer state not counted). Times are medians of "
        f"{options['steps']} interleaved warm steps, and of each round's ratio to stock eager. The largest batch is what "
        f"{'a step' if trials == 1 else f'{trials} steps'} got through with {budget_text(result)} for all of it, weights, "
        f"gradients and optimizer state included, each variant alone on the device{grains}."
    )


def libraries(result: dict[str, Any]) -> str:
    known = ((name, result["versions"].get(name)) for name in LIBRARIES)
    return "".join(f"{name} {found}; " for name, found in known if found)


def arguments(argv: list[str] | None) -> argparse.Namespace:
    few = {"variants": [name for name in VARIANTS if name != "compile"]}
    choices = Choices(__doc__, {"models": MODELS, "variants": VARIANTS}, few, "steps", compiler=True)
    parser = choices.parser
    parser.add_argument("--budget", default="40GiB", help="bytes of the search for the largest batch: 40GiB")
    parser.add_argument("--steps", type=int, help="timed steps of each variant (default: 10)")
    parser.add_argument("--sequence", type=int, default=4096, help="the llama's (default: 4096)")
    parser.add_argument("--dropout", type=float, default=0.1, help="the gpt's (default: 0.1)")
    parser.add_argument("--tiny", action="store_true", help="small models: whether the script works")
    args = choices.parse(argv)
    try:
        args.budget = parse_size(args.budget, "--budget")
    except ValueError as error:
        parser.error(str(error))
    args.steps = args.steps if args.steps is not None else 10
    if args.steps < 1 or args.sequence < 2:
        parser.error("--steps, --sequence: expected at least 1 and 2")
    args.trial_steps = 1 if args.quick else TRIAL_STEPS
    chosen = [name for name in args.variants if name != "compile" or args.compile]
    args.variants = [name for name in VARIANTS if name in chosen]  # eager first
    if "eager" not in args.variants:
        parser.error("--variants: expected eager among them, to which the others are compared")
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    result = run(args)
    if args.json is not None:
        write_json(result, args.json)
        print(f"wrote {args.json.name}")
    print(text_table(columns(result), rows(result)), conditions(result), sep="\n\n")
    print(f"\n{libraries(result)}{origin(result)}")
    return 130 if result.get("interrupted") else 0


if __name__ == "__main__":
    sys.exit(main())

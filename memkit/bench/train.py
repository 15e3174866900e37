"""Train one model as stock eager, stock torch.compile and memkit, side by side, and measure each."""

# torch.nn calls return Any, and parts of torch are untyped.
# mypy: disable-error-code="no-any-return,no-untyped-call"

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memkit
from memkit import memory
from memkit.swap.find import OPS
from memkit.swap.types import TWINS

from . import data, models
from .options import WARM_STEPS, Options
from .pooled import Pooled
from .timing import balanced, interleave, seconds, summary

INFERENCE_ROUNDS = 10
TIMELINE_POINTS = 400

# Inductor draws its own dropout masks unless told otherwise. With PyTorch's masks its losses can be compared
# step by step; on the CPU its step took as long with either.
COMPILE_OPTIONS: dict[str, Any] = {"fallback_random": True}

Batch = tuple[Tensor, Tensor]
Say = Callable[[str], None]


@dataclass
class Task:
    """One model with its data: everything the variants share."""

    name: str
    build: Callable[[], nn.Module]
    batches: list[Batch]
    held_out: Batch | None
    learning_rate: float

    def to(self, device: str, dtype: torch.dtype) -> Task:
        def moved(batch: Batch) -> Batch:
            inputs, targets = (part.to(device) for part in batch)
            return (inputs.to(dtype) if inputs.is_floating_point() else inputs), targets

        batches = [moved(batch) for batch in self.batches]
        held_out = moved(self.held_out) if self.held_out else None
        return Task(self.name, self.build, batches, held_out, self.learning_rate)


def gpt_task(options: Options) -> Task:
    batch, steps = options.batch_of("gpt"), options.steps_of("gpt")
    tokens = data.corpus_tokens(options.vocab, options.out / "cache")
    batches = data.windows(tokens, options.seq_len, batch, steps, options.seed)

    def build() -> nn.Module:
        return models.GPT(
            options.vocab, options.layers, options.d_model, options.heads, options.seq_len, options.dropout
        )

    return Task("gpt", build, batches, None, learning_rate=1e-3)


def cnn_task(options: Options) -> Task:
    batches, held_out = data.digits(options.batch_of("cnn"), options.steps_of("cnn"), options.seed)
    return Task("cnn", lambda: models.CNN(classes=10), batches, held_out, learning_rate=1e-3)


TASKS: dict[str, Callable[[Options], Task]] = {"gpt": gpt_task, "cnn": cnn_task}


# The operators of each ingredient that memkit.swap brings.
SWAPPED: dict[str, tuple[str, ...]] = {
    "activations": tuple(TWINS),
    "norms": tuple(op for op in OPS if "norm" in op),
    "dropouts": tuple(op for op in OPS if "dropout" in op),
    "lean": ("conv2d", "linear"),
}


class Variant:
    """A model equal in weights to every other variant's, with its optimizer and its way of running."""

    def __init__(self, name: str, parts: tuple[str, ...], task: Task, options: Options) -> None:
        self.name = name
        is_memkit = name not in ("eager", "compile")
        torch.manual_seed(options.seed)
        self.model = model = task.build().to(options.device, options.parameter_dtype)
        self.swapped: Any = None
        if is_memkit:
            ops = [op for part in parts for op in SWAPPED.get(part, ())]
            # Under autocast as in training: which precision an activation sees decides what can be done with it.
            with torch.autocast(options.device, options.torch_dtype, enabled=options.amp):
                self.swapped = memkit.swap(
                    model, sample=task.batches[0][0], ops=ops, exact=options.exact, lean="lean" in parts
                )
        needs_scaler = options.amp and options.torch_dtype is torch.float16
        self.scaler = torch.amp.GradScaler(options.device, enabled=needs_scaler)
        self.steps_in_backward = "optimizer" in parts and is_memkit and not needs_scaler
        make: Any = memkit.optim.AdamW if "optimizer" in parts and is_memkit else torch.optim.AdamW
        self.optimizer: torch.optim.Optimizer = make(model.parameters(), lr=task.learning_rate)
        if self.steps_in_backward:
            memkit.optim.step_in_backward(self.optimizer)

        def forward(inputs: Tensor) -> Tensor:
            with torch.autocast(options.device, options.torch_dtype, enabled=options.amp):
                return model(inputs)

        def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(forward(inputs).flatten(0, -2).float(), targets.flatten())

        def fused_loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
            with torch.autocast(options.device, options.torch_dtype, enabled=options.amp):
                hidden = model.features(inputs).flatten(0, -2)  # type: ignore[operator]
                return memkit.functional.linear_cross_entropy(
                    hidden,
                    model.head.weight,  # type: ignore[union-attr, arg-type]
                    targets.flatten(),
                )

        def lean_loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
            fused = is_memkit and "loss" in parts and hasattr(model, "features")
            with memkit.lean() if "lean" in parts else nullcontext():
                return (fused_loss_of if fused else loss_of)(inputs, targets)

        # The loss is compiled together with the model: torch.compile at its best fuses the two.
        self.forward: Callable[[Tensor], Tensor] = forward
        self.loss_of: Callable[[Tensor, Tensor], Tensor] = lean_loss_of if is_memkit else loss_of
        if name == "compile":
            self.forward = torch.compile(forward, options=COMPILE_OPTIONS)
            self.loss_of = torch.compile(loss_of, options=COMPILE_OPTIONS)
        self.pooled: Pooled[Tensor] | None = None
        if is_memkit and options.pool != "none":
            self.pooled = Pooled(self._step, options.pool, options.device)

    def step(self, batch: Batch) -> Tensor:
        """One whole training step; it starts and ends without gradients in memory."""
        return (self.pooled or self._step)(batch)

    def _step(self, batch: Batch) -> Tensor:
        loss = self.loss_of(*batch)
        self.scaler.scale(loss).backward()
        if self.steps_in_backward:
            return loss.detach()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def infer(self, inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return self.forward(inputs)


def compare(task: Task, options: Options, say: Say, advance: Callable[[], None]) -> dict[str, Any]:
    """All that the report tells about one model. `advance` is called after each step of each variant."""
    task = task.to(options.device, options.parameter_dtype)
    if "compile" in options.variants:
        torch.compiler.reset()
    variants = [Variant(name, parts, task, options) for name, parts in options.runs]
    results: dict[str, dict[str, Any]] = {v.name: {} for v in variants}

    say(f"{task.name}: training {', '.join(v.name for v in variants)}, in turns")
    variants = _train(task, variants, options, results, advance)
    say(f"{task.name}: measuring memory over one step")
    for variant in variants:
        results[variant.name] |= _memory_of_step(task, variant, options)
    say(f"{task.name}: inference")
    _inference(task, variants, options, results)
    eager = variants[0] if variants[0].name == "eager" else next(v for v in variants if v.name == "eager")
    return {
        "parameters": sum(p.numel() for p in eager.model.parameters()),
        "batch": options.batch_of(task.name),
        "input_shape": list(task.batches[0][0].shape),
        "steps": len(task.batches),
        "warm_steps": WARM_STEPS,
        "variants": results,
    }


def _train(
    task: Task,
    variants: list[Variant],
    options: Options,
    results: dict[str, dict[str, Any]],
    advance: Callable[[], None],
) -> list[Variant]:
    """Train all variants a step each in turns; returns those that ran."""
    losses: dict[str, list[float]] = {v.name: [] for v in variants}
    times: dict[str, list[float]] = {v.name: [] for v in variants}
    running = {v.name: v for v in variants}
    for turn, batch in enumerate(task.batches):
        for name in balanced(list(running), turn):
            variant = running[name]
            kept: list[Tensor] = []
            torch.manual_seed(options.seed + turn)  # the same dropout masks for every variant

            def step(variant: Variant = variant, batch: Batch = batch, kept: list[Tensor] = kept) -> None:
                kept.append(variant.step(batch))

            try:
                times[name].append(seconds(step, options.device))
            except Exception as error:
                # torch.compile needs a working C++ or Triton compiler, which not every machine has.
                if name != "compile" or turn > 0:
                    raise
                results[name]["error"] = _one_line(error)
                del running[name]
                continue
            losses[name].append(kept[0].item())
            advance()

    for name in running:
        pairs = zip(losses[name], losses["eager"], strict=True)
        results[name] |= {
            "losses": losses[name],
            "loss_final": losses[name][-1],
            "loss_max_difference": max(_difference(a, b) for a, b in pairs),
            "first_step_seconds": times[name][0],
            "step_seconds": times[name],
            "step": summary(times[name][WARM_STEPS:], times["eager"][WARM_STEPS:]),
        }
        pooled = running[name].pooled
        if pooled is not None:
            results[name]["pool"] = pooled.to_dict()
    return list(running.values())


def _memory_of_step(task: Task, variant: Variant, options: Options) -> dict[str, Any]:
    """Bytes above the start of one more step: weights and optimizer state exist already and do not count."""
    batch = task.batches[-1]
    variant.model.train()

    def step() -> None:
        variant.step(batch)

    torch.manual_seed(options.seed)
    measured = memory.measure(step, device=options.device)
    torch.manual_seed(options.seed)
    timeline = memory.timeline(step, device=options.device)
    found: dict[str, Any] = {
        "peak_bytes": measured.peak,
        "saved_bytes": measured.saved,
        "allocations": measured.allocations,
        "timeline": thinned(timeline),
    }
    if variant.swapped is not None:
        found["swap"] = variant.swapped.to_dict()
    return found


def _inference(
    task: Task, variants: list[Variant], options: Options, results: dict[str, dict[str, Any]]
) -> None:
    inputs = task.batches[0][0]
    contenders: dict[str, Callable[[], float]] = {}
    with _evaluating(variants):
        for variant in variants:

            def infer(variant: Variant = variant) -> None:
                variant.infer(inputs)

            contenders[variant.name] = lambda infer=infer: seconds(infer, options.device)  # type: ignore[misc]
            infer()  # compiles
            results[variant.name]["inference"] = {
                "peak_bytes": memory.measure(infer, device=options.device).peak
            }
            if task.held_out is not None:
                results[variant.name]["accuracy"] = _accuracy(variant, task.held_out)
        times = interleave(contenders, INFERENCE_ROUNDS)
    for name, taken in times.items():
        results[name]["inference"] |= summary(taken, times["eager"])


@contextmanager
def _evaluating(variants: list[Variant]) -> Iterator[None]:
    for variant in variants:
        variant.model.eval()
    try:
        yield
    finally:
        for variant in variants:
            variant.model.train()


def _accuracy(variant: Variant, held_out: Batch) -> float:
    # Straight through the module: another batch size would only make torch.compile compile again.
    inputs, targets = held_out
    with torch.no_grad():
        return (variant.model(inputs).argmax(-1) == targets).double().mean().item()


def _difference(a: float, b: float) -> float:
    """Two losses that both diverged the same way are equal; inf - inf would say NaN."""
    return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else abs(a - b)


def _one_line(error: Exception) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:300]


def thinned(timeline: list[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most TIMELINE_POINTS of the curve, the highest of each stretch, so that no peak is lost."""
    stretch = max(1, math.ceil(len(timeline) / TIMELINE_POINTS))
    parts = [timeline[i : i + stretch] for i in range(0, len(timeline), stretch)]
    return [(round(seconds, 6), size) for seconds, size in (max(part, key=lambda p: p[1]) for part in parts)]

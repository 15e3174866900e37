"""Runs a model on a sample, forward and backward, and leaves no trace of it."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .._lean import lean
from ..memory import measure
from .library.attend import stock_dropout
from .library.heads import but_logits, with_logits
from .results import look_through
from .untouched import memory_of, untouched

# Of each output and gradient, so many elements are compared, and the norm.
PROBES = 4096
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-2}

WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float64}

Digests = list[tuple[float, Tensor]]


@dataclass(frozen=True)
class Outcome:
    """What a run gave, in a few numbers: norm and probes of each output, then of each gradient."""

    outputs: Digests
    gradients: Digests
    saved: int | None = None

    @property
    def has_finite_output(self) -> bool:
        """Whether there is one without NaN and infinity to compare, or no output at all."""
        return not self.outputs or any(math.isfinite(norm) for norm, _ in self.outputs)

    def agrees_with(self, other: Outcome, tolerance: float) -> bool:
        return _agree(self.outputs, other.outputs, tolerance) and _agree(
            self.gradients, other.gradients, tolerance
        )

    def is_as_near(self, others: Sequence[Outcome], truth: Outcome, tolerance: float) -> bool:
        """As `truth`, each output and each gradient, at most twice as far as the farthest of `others`."""
        outputs, gradients = [o.outputs for o in others], [o.gradients for o in others]
        return _is_as_near(self.outputs, outputs, truth.outputs, tolerance) and _is_as_near(
            self.gradients, gradients, truth.gradients, tolerance
        )


@contextmanager
def heap_passed_over() -> Iterator[None]:
    """Before each measurement garbage is collected: of what there is on entry once, not every time. A program that has
    frozen objects itself keeps them so."""
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class Trial:
    def __init__(self, model: nn.Module, sample: Any) -> None:
        self.model = model
        self.sample = sample
        self.places: dict[nn.Module, nn.Module] = {}  # of a copy: what stands for which module
        self.in_lean = False
        """Whether forwards run inside :class:`memkit.lean`."""
        self.but_logits = False
        """Whether a language model's logits do not count among its outputs."""
        self.written: set[nn.Parameter] = set()
        """The parameters that a run writes to."""
        self.memory: dict[int, torch.UntypedStorage] = {}
        """What else it writes to that was there before."""

    def run(
        self,
        phase: str,
        in_evaluation: Sequence[nn.Module] = (),
        noise: float = 0.0,
        drops: bool = False,
        logits: bool = True,
    ) -> Outcome:
        """Counts what is saved on the way. Some modules may be told that this is no training; twins of what calls dropout as
        a function drop what stock does, so that results can be compared, but for ``drops``.

        ``logits``: whether language models return them all the same.
        ``noise``: how far, relatively, numbers in the sample may be from what they are; of a sample without any, what
        its embeddings give.
        """
        as_stock = nullcontext() if drops else stock_dropout(), with_logits() if logits else nullcontext()
        with (
            untouched(self.model, self.written, self.memory.values()),
            explained(phase),
            as_stock[0],
            as_stock[1],
        ):
            for module in in_evaluation:
                self.places.get(module, module).training = False
            inputs = self.fresh()
            with self.disturbed(inputs, noise) if noise else nullcontext():
                measured = measure(lambda: self.step(inputs), device=self.device())
            leaves = [*self.model.parameters(), *tensors(inputs)]
            return Outcome(
                [_digest(t) for t in outputs_of(measured.result)[0] if _may_differentiate(t)],
                [_digest(leaf.grad) for leaf in leaves if leaf.grad is not None],
                measured.saved,
            )

    def widened(self, wide: torch.dtype) -> Trial | None:
        """With the numbers of the sample, and of a copy of the model, in this dtype where theirs is narrower. None: there is
        no copy."""
        narrow = {dtype for dtype in WIDER if dtype.itemsize < wide.itemsize}
        copies: dict[int, Tensor] = {}

        def widen(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dtype not in narrow:
                return leaf
            if id(leaf) not in copies:
                copies[id(leaf)] = leaf.detach().to(wide).requires_grad_(leaf.requires_grad)
            return copies[id(leaf)]

        trial = Trial(self.model, tree_map(widen, self.sample))
        trial.in_lean, trial.memory = self.in_lean, self.memory
        if any(tensor.dtype in narrow for tensor in (*self.model.parameters(), *self.model.buffers())):
            copy: Any = own_copy(self.model)
            if copy is None:
                return None
            trial.places = dict(zip(self.model.modules(), copy.modules(), strict=True))
            trial.model = copy._apply(lambda held: held.to(wide) if held.dtype in narrow else held)
        pairs = zip(self.model.parameters(), trial.model.parameters(), strict=True)
        trial.written = {theirs for ours, theirs in pairs if ours in self.written}
        return trial

    @contextmanager
    def disturbed(self, inputs: Any, noise: float) -> Iterator[None]:
        def factors(of: Tensor) -> Tensor:
            return 1 + noise * torch.empty_like(of).uniform_(-1, 1)

        def disturb(module: nn.Module, given: Any, out: Any) -> Any:
            return tree_map(lambda t: t * factors(t.detach()) if _is_float(t) else t, out)

        numbers = [given for given in tensors(inputs) if _is_float(given)]
        with torch.no_grad():
            # Whole numbers may be indices, as of each box's image.
            for given in [x for x in numbers if not bool((x == x.round()).all())] or numbers:
                given.mul_(factors(given))
        modules = [] if numbers else self.model.modules()
        hooks = [
            m.register_forward_hook(disturb) for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def fresh(self) -> Any:
        """The sample again: tensors copied, as the model may write to them."""
        copies: dict[int, Tensor] = {}

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in copies:
                copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
            return copies[id(leaf)]

        return tree_map(copy, self.sample)

    def step(self, inputs: Any) -> Any:
        """Forward, then backward from all outputs at once. Returns the outputs."""
        with lean() if self.in_lean else nullcontext():
            if isinstance(inputs, dict):
                outputs = self.model(**inputs)
            else:
                outputs = self.model(*inputs) if isinstance(inputs, tuple) else self.model(inputs)
        if self.but_logits:
            outputs = but_logits(outputs)
        roots = [t for t in outputs_of(outputs)[0] if t.requires_grad and _may_differentiate(t)]
        if roots and torch.is_grad_enabled():
            torch.autograd.backward(roots, [_slant(root) for root in roots])
        return outputs

    def device(self) -> torch.device:
        devices = {t.device for t in [*self.model.parameters(), *tensors(self.sample)]}
        return next((d for d in devices if d.type == "cuda"), torch.device("cpu"))


def _may_differentiate(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()


def tensors(tree: Any) -> list[Tensor]:
    """All in nested containers, dataclasses included."""
    found: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors([getattr(leaf, f.name) for f in fields(leaf)])
        elif isinstance(leaf, Mapping):
            found += tensors(dict(leaf))
    return found


def outputs_of(result: Any) -> tuple[list[Tensor], str]:
    """All that a model returned, in whatever object, and the class of what cannot be looked into."""
    found = tensors(result)
    opaque = look_through(result, found)
    return found, opaque


@contextmanager
def explained(phase: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if hasattr(error, "add_note"):  # Python 3.11
            error.add_note(f"swap: the model raised this on the sample ({phase}); it is as it was before")
        raise


def own_copy(module: nn.Module) -> nn.Module | None:
    """A copy that shares nothing with the module, which may say itself how it is copied; None where that cannot be had."""
    try:
        copy = deepcopy(module)
    except Exception:
        return None
    theirs = {id(part) for part in module.modules()}
    memory = {memory_of(tensor) for tensor in (*module.parameters(), *module.buffers())}
    if any(id(part) in theirs for part in copy.modules()):
        return None
    shared = any(
        memory_of(tensor) in memory for tensor in (*copy.parameters(), *copy.buffers()) if tensor.numel()
    )
    return None if shared else copy


@contextmanager
def exact_convolutions(device: torch.device) -> Iterator[None]:
    """On a GPU in float32 as elsewhere in PyTorch, where cuDNN would round what it is given to TF32: of two inputs that
    differ by a rounding error it may make one that is three digits larger."""
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    before, of_convolutions = cudnn.fp32_precision, cudnn.conv.fp32_precision
    cudnn.fp32_precision = "ieee"
    follows = cudnn.conv.fp32_precision == "ieee"  # else somebody has said it of convolutions themselves
    if not follows:
        cudnn.conv.fp32_precision = "ieee"
    try:
        yield
    finally:
        if not follows:
            cudnn.conv.fp32_precision = of_convolutions
        cudnn.fp32_precision = before


def _slant(root: Tensor) -> Tensor:
    """A gradient to start from: not constant, as a normalisation's output has a constant sum, and without a regular
    course, or what sums it up, as a bias does, would have little but rounding left of it."""
    if root.numel() < 2:
        return torch.ones_like(root)
    period = 4093  # a prime, so that rows start anywhere in it
    wave = 2 * torch.rand(period, generator=torch.Generator("cpu").manual_seed(0), device="cpu") - 1
    wave = torch.complex(wave, wave.flip(0)) if root.is_complex() else wave
    repeated = wave.to(root).repeat(-(-root.numel() // period))
    return repeated[: root.numel()].view(root.shape)


def _digest(tensor: Tensor) -> tuple[float, Tensor]:
    tensor = _strided(tensor.detach())
    flat = (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).reshape(-1)
    probes = flat[:: max(1, flat.numel() // PROBES)].double().cpu()
    wide = torch.float64 if flat.dtype == torch.float64 else torch.float32
    norm = torch.linalg.vector_norm(flat, dtype=wide).item()
    if not math.isfinite(
        norm
    ):  # as squares may not be of what is, logits that are masked by the least number
        norm = torch.linalg.vector_norm(flat, dtype=torch.float64).item()
    return norm, probes


def _strided(tensor: Tensor) -> Tensor:
    """What a sparse one holds, each row or number by a factor that goes by its place: an embedding's gradient as a whole may
    be larger than all else."""
    if tensor.layout == torch.strided:
        return tensor
    if tensor.layout not in _SPARSE:
        return tensor.to_dense()
    tensor = (tensor if tensor.is_sparse else tensor.to_sparse()).coalesce()
    places, values = tensor.indices().double(), tensor.values()
    irrational = torch.tensor(
        [(i + 2) ** 0.5 for i in range(len(places))], dtype=torch.float64, device=places.device
    )
    factors = 1 + (irrational @ places) % 1
    return values * factors.view(-1, *[1] * (values.dim() - 1)).to(values.dtype)


_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


def _agree(ours: Digests, theirs: Digests, tolerance: float) -> bool:
    if len(ours) != len(theirs):
        return False
    largest = max((norm for norm, _ in theirs if math.isfinite(norm)), default=0.0)
    for (norm, probes), (expected, expected_probes) in zip(ours, theirs, strict=True):
        if probes.shape != expected_probes.shape:
            return False
        close = abs(norm - expected) <= tolerance * (expected + 1e-2 * largest)
        # Gradients that are zero but for rounding are compared at the scale of the others.
        error = torch.linalg.vector_norm(torch.nan_to_num(probes) - torch.nan_to_num(expected_probes)).item()
        near = error <= tolerance * (torch.linalg.vector_norm(expected_probes).item() + 1e-2 * largest)
        if math.isfinite(expected) and not (close and near):
            return False
    return True


def _is_as_near(ours: Digests, others: Sequence[Digests], exact: Digests, tolerance: float) -> bool:
    if any(len(each) != len(exact) for each in (ours, *others)):
        return False
    largest = max((norm for norm, _ in exact if math.isfinite(norm)), default=0.0)
    for (own, probes), (expected, truth), *theirs in zip(ours, exact, *others, strict=True):
        if any(each.shape != truth.shape for each in (probes, *(b for _, b in theirs))):
            return False
        if not all(math.isfinite(norm) for norm in (expected, *(norm for norm, _ in theirs))):
            continue
        far, *stock = (float(torch.linalg.vector_norm(x - truth)) for x in (probes, *(b for _, b in theirs)))
        if not (math.isfinite(own) and far <= 2 * max(stock) + tolerance * (expected + 1e-2 * largest)):
            return False
    return True

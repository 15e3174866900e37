"""The places in a model that swap may change, what it decided of each, and how the report tells of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from .._hooks import has_hooks
from .layers import FUSED, Choice, Norm, is_convolution
from .library import BatchNormAct, Reads, Twin, activation_twin
from .report import Row
from .types import COPIES_INPUT, INEXACT, KEEPS_OUTPUT, NEEDS_BIT, TWINS, WIDE, Proof, Swapped

NAMES: dict[type[nn.Module], str] = {twin._stock: name for name, twin in TWINS.items()}

ANY_NORM = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)

LEAN = Proof(False, save="input")
"""Of an activation that keeps its input inside `memkit.lean()` and is stock outside."""

LEAN_IN_TURN = LEAN._replace(callers=True)
"""The same of one that overwrites its input, where the code that calls it is known not to read that again."""


@dataclass(frozen=True)
class Decision:
    """What becomes of a site: a proof, or the reason why it stays."""

    proof: Any  # Proof, of a layer a Choice
    reason: str = ""
    bytes_before: int | None = None
    bytes_after: int | None = None

    def row(self, path: str, before: str, after: str, saved: str) -> Row:
        bytes_after = self.bytes_before if self.proof is None else self.bytes_after
        return Row(path, before, after, saved, self.bytes_before, bytes_after, self.reason)


@dataclass(eq=False)
class Site:
    """An activation module, or a stand-in for a function that a layer holds."""

    module: nn.Module
    name: str
    path: str
    layer: Any = None
    """Where the function is held; its recipe says as what."""
    function: Any = None
    followers: list[list[nn.Module]] = field(default_factory=list)
    """For each place where known code calls it: the modules that take its output, in order."""
    variables: int = 1
    """In which that code holds its input."""
    norms: list[bool] = field(default_factory=list)
    """For each of those places: whether a batch norm comes before it that becomes memkit's."""
    fuses: list[bool] = field(default_factory=list)
    """Whether it runs as one with that."""
    beside_norms: list[bool] = field(default_factory=list)
    """Whether any norm comes before or behind it there."""

    method: ClassVar[str] = "forward"
    is_block: ClassVar[bool] = False

    def add_place(
        self,
        followers: list[nn.Module],
        variables: int,
        behind_norm: bool = False,
        fuses: bool = False,
        before: nn.Module | None = None,
    ) -> None:
        self.followers.append(followers)
        self.variables = min(self.variables, variables)
        self.norms.append(behind_norm)
        self.fuses.append(fuses)
        self.beside_norms.append(any(isinstance(each, ANY_NORM) for each in (before, *followers[:1])))

    @property
    def behind_norms(self) -> bool:
        return bool(self.norms) and all(self.norms) and not has_hooks(self.module)

    @property
    def fused(self) -> bool:
        return self.behind_norms and all(self.fuses)

    @property
    def feeds_convolution(self) -> bool:
        """Whether it runs as one with the convolution behind it too."""
        return self.fused and all(behind and is_convolution(behind[0]) for behind in self.followers)

    @property
    def twin(self) -> type[Swapped]:
        # What stands for a function is of torch.nn, or was until it was changed for the first time.
        is_torchs = self.layer is not None or type(self.module) in NAMES
        return TWINS[self.name] if is_torchs else activation_twin(self.name, self.module)

    @property
    def overwrites(self) -> bool:
        return bool(getattr(self.module, "inplace", False))

    @property
    def keeps_output_already(self) -> bool:
        """Whether stock works in place and keeps no copy of the input, as memkit would."""
        return self.overwrites and self.name not in COPIES_INPUT and not self.fused

    def dtypes(self, exact: bool) -> frozenset[torch.dtype] | None:
        """In which the slope may come from the output; None: in all."""
        if self.name == "softplus":  # which autocast computes in float32
            return WIDE
        if self.name == "hardtanh":  # a bound that rounding moves inwards is not recognised in the output
            module: Any = self.module
            halves = torch.float16, torch.bfloat16
            bounds = module.min_val, module.max_val
            return None if all(_is_exact(bound, dtype) for bound in bounds for dtype in halves) else WIDE
        return WIDE if exact and self.name in INEXACT else None

    def restriction(self, exact: bool) -> str:
        """Where it keeps to the stock forward when it is swapped."""
        return "" if self.dtypes(exact) is None else "runs as stock in half precision"

    def row(self, decision: Decision) -> Row:
        before = type(self.module).__name__ if self.function is None else f"{self.function.__name__}()"
        return decision.row(self.path, before, *self._becomes(decision.proof))

    def _becomes(self, proof: Proof | None) -> tuple[str, str]:
        """The row's `after` and `saved`."""
        if proof is None:
            keeps_output = self.name in KEEPS_OUTPUT or (self.overwrites and self.name not in COPIES_INPUT)
            return "unchanged", "output" if keeps_output else "input"
        if proof is FUSED:
            return "with the norm", "input of the norm"
        if proof in (LEAN, LEAN_IN_TURN):
            return "in lean()", "input"
        if proof.save == "bit":
            return "in place" if proof.inplace else "bit", "1 bit"
        saved = "output + 1 bit" if self.name in NEEDS_BIT else "output"
        return "in place" if proof.inplace else "output", saved


@dataclass(eq=False)
class LayerSite:
    """A norm, a dropout, or a module of a library's that a recipe knows."""

    module: nn.Module
    name: str
    path: str
    twin: type[Any]
    choice: Any = Choice()  # noqa: RUF009  never changed
    """What `_swap` will hold; a norm's is decided from what is seen."""
    method: str = "forward"
    """What the twin has in place of stock's."""
    reads: Reads = ()

    layer: ClassVar[None] = None

    @property
    def is_norm(self) -> bool:
        return issubclass(self.twin, Norm)

    @property
    def is_of_channels(self) -> bool:
        """Whether it is, or ends with, a norm whose result can be made again with all that stands behind it."""
        return self.name in ("group_norm", "batch_norm_act")

    @property
    def is_batch_norm_alone(self) -> bool:
        """Of a library's, with no activation behind it: it may bring that its result can be made again, and nothing else."""
        return issubclass(self.twin, BatchNormAct) and self.twin.is_alone(self.module)

    @property
    def is_block(self) -> bool:
        """Several layers that a recipe took over together."""
        return issubclass(self.twin, Twin) and not self.is_norm

    @property
    def may_keep_output(self) -> bool:
        return self.name in ("layer_norm", "rms_norm")

    def row(self, decision: Decision) -> Row:
        proof = decision.proof
        if self.is_block:
            before, after = "all", self.twin.saved
        elif self.is_norm:
            before, after = "input", "output" if proof is not None and proof.save == "auto" else "input"
        else:
            before, after = self.twin.keeps
        name = type(self.module).__name__
        if proof is None:
            return decision.row(self.path, name, "unchanged", before)
        return decision.row(self.path, name, "memkit", after)


AnySite = Site | LayerSite
Decisions = dict[AnySite, Decision]


def _is_exact(value: float, dtype: torch.dtype) -> bool:
    return torch.tensor(value, dtype=dtype, device="cpu").item() == value

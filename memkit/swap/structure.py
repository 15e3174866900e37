"""What a model's structure proves of each site, without a run on a sample."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .. import _C
from .._hooks import has_hooks
from .layers import FUSED, LINEARS, Choice
from .report import UNPROVEN
from .sites import LEAN, LEAN_IN_TURN, AnySite, Decision, LayerSite, Site
from .types import INEXACT, KEEPS_OUTPUT, NEEDS_BIT, TWO_SLOPES, Proof

# Modules that keep their input for backward, give a new tensor, and change nothing; with a weight, where it is trained.
WEIGHTED = {
    *LINEARS,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
}
KEEPERS = {
    *WEIGHTED,
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm),
    *(nn.MaxPool1d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
}
DROPOUTS = {nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d}
VIEWS = {nn.Identity, nn.Flatten, nn.Unflatten}

ALREADY = "already in place"
REBUILT = "its result is made again for what keeps it"


def check(site: AnySite, lean: bool = False) -> str:
    """Why no proof would help."""
    module = site.module
    if "forward" in vars(module):
        return "its forward is replaced"
    if isinstance(site, LayerSite):
        return "it returns its indices" if getattr(module, "return_indices", False) else ""
    if site.keeps_output_already and site.name not in TWO_SLOPES and not lean:
        return ALREADY
    as_twin = site.twin.__new__(site.twin)
    vars(as_twin).update(vars(module))
    try:
        _C.activation(as_twin._op, torch.empty(0, device="cpu"), None, -1, as_twin._params, False, "output")
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def by_structure(site: AnySite, exact: bool, lean: bool, pools: Collection[nn.Module] = ()) -> Decision:
    """What holds whatever the model does elsewhere, as calls from elsewhere are left to stock.

    ``pools``: the max pooling that becomes memkit's, which keeps no input.
    """
    if refusal := check(site):
        return Decision(None, refusal)
    if isinstance(site, LayerSite):
        if not site.is_norm:
            return Decision(site.choice)
        return Decision(Choice(exact=exact), f"keeps its input: {UNPROVEN}" if site.may_keep_output else "")
    if site.fused:
        return Decision(FUSED)
    if lean and site.behind_norms:  # whose result is made again where nobody overwrites it
        return Decision(LEAN_IN_TURN if site.overwrites else LEAN)
    decision = _of_activation(site, exact, pools)
    if site.keeps_output_already and not lean and not takes_bit(decision):
        return Decision(None, ALREADY)
    if lean and not site.overwrites and (decision.proof is None or site.name in INEXACT):
        return Decision(LEAN, REBUILT)
    return decision


def takes_bit(decision: Decision) -> bool:
    return decision.proof is not None and decision.proof.save == "bit"


def _of_activation(site: Site, exact: bool, pools: Collection[nn.Module]) -> Decision:
    if has_hooks(site.module):
        return Decision(None, f"it has hooks: {UNPROVEN}")
    if not site.followers:
        return Decision(None, UNPROVEN)
    fates = [_fate_of_output(followers, pools) for followers in site.followers]
    for kept, reason in fates:
        if reason and site.name not in KEEPS_OUTPUT:
            return Decision(None, f"{reason}: {UNPROVEN}")
        if not kept and site.name in NEEDS_BIT:
            return Decision(None, "what follows does not keep its output: nothing to save")
    from_bit = site.name in TWO_SLOPES and not any(kept or reason for kept, reason in fates)
    proof = Proof(
        inplace=site.overwrites or "auto",
        holders=site.variables,
        callers=True,
        dtypes=site.dtypes(exact),
        save="bit" if from_bit else "output",
        compiled=not all(site.beside_norms),
    )
    return Decision(proof, site.restriction(exact))


def _fate_of_output(followers: Iterable[nn.Module], pools: Collection[nn.Module]) -> tuple[bool, str]:
    """Whether what comes next keeps the very tensor for backward; why that, or that nothing changes it, is not known."""
    kept = True
    module: Any
    for module in _flat(followers):
        name = type(module).__name__
        if has_hooks(module):
            return False, f"the {name} after it has hooks"
        if type(module) in KEEPERS:
            return kept and (type(module) not in WEIGHTED or module.weight.requires_grad), ""
        if type(module) is nn.MaxPool2d:
            return kept and module not in pools, ""
        if type(module) in DROPOUTS and not module.inplace:
            kept = kept and module.p == 0
        elif type(module) not in VIEWS:
            return False, f"a {name} follows"
    return False, "nothing follows in its Sequential"


def _flat(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        if is_sequence(module) and not has_hooks(module):
            yield from _flat(called_in_turn(module))
        else:
            yield module


def is_sequence(module: nn.Module) -> bool:
    """Whether it hands each child's output to the next and nowhere else."""
    cls: Any = type(module)
    return (
        isinstance(module, nn.Sequential)
        and cls.forward is nn.Sequential.forward
        and cls.__iter__ is nn.Sequential.__iter__
        and "forward" not in vars(module)
    )


def called_in_turn(sequence: nn.Module) -> list[nn.Module]:
    """Its children; one that is there twice comes twice."""
    return [child for child in sequence._modules.values() if child is not None]

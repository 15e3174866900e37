"""Finds what swap may change in a model, says what structure proves of each activation, and changes them or back."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .. import _C
from ..nn.activation import _Variant
from .layers import BATCH_NORMS, FUSED, LAYERS, Choice, Conv2d, Norm, Sequential, is_convolution
from .library import (
    InLean,
    Twin,
    Verifier,
    activation_twin,
    candidates,
    has_library_loss,
    hold,
    is_attention,
    library_activation,
    release,
    twin_of,
)
from .recipes import FUNCTIONS, RECIPES
from .report import UNPROVEN, Row
from .types import (
    COPIES_INPUT,
    INEXACT,
    KEEPS_OUTPUT,
    NEEDS_BIT,
    TWINS,
    WIDE,
    Changed,
    Proof,
    Swapped,
    has_hooks,
    stock_of,
)

FAMILY = {"gelu_tanh": "gelu"}
"""Activations that go by another's name in `ops`, beside their own."""
NAMES: dict[type[nn.Module], str] = {twin._stock: name for name, twin in TWINS.items()}
LAYER_NAMES: dict[type[nn.Module], str] = {twin._stock: name for name, twin in LAYERS.items()}
OPS = (
    *TWINS,
    *FAMILY,
    "quick_gelu",
    "relu_squared",
    *LAYERS,
    "batch_norm_act",
    "conv2d",
    "act_linear",
    "gated",
    "attention",
    "cross_entropy",
)

# Modules that keep their input for backward, give a new tensor, and change nothing; with a weight, where it is trained.
WEIGHTED = {
    *(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
}
KEEPERS = {
    *WEIGHTED,
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
}
DROPOUTS = {nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d}
VIEWS = {nn.Identity, nn.Flatten, nn.Unflatten}

ALREADY = "already in place"


LEAN = Proof(False, save="input")
"""Of an activation that keeps its input inside `memkit.lean()` and is stock outside."""


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
    """For each of those places: whether a batch norm comes before it, with which it runs as one."""

    def add_place(self, followers: list[nn.Module], variables: int, behind_norm: bool = False) -> None:
        self.followers.append(followers)
        self.variables = min(self.variables, variables)
        self.norms.append(behind_norm)

    @property
    def fused(self) -> bool:
        return bool(self.norms) and all(self.norms) and not has_hooks(self.module)

    @property
    def feeds_convolution(self) -> bool:
        """Whether it runs as one with the convolution behind it too."""
        return self.fused and all(behind and is_convolution(behind[0]) for behind in self.followers)

    @property
    def twin(self) -> type[Swapped]:
        return TWINS[self.name] if type(self.module) in NAMES else activation_twin(self.name, self.module)

    @property
    def overwrites(self) -> bool:
        return bool(getattr(self.module, "inplace", False))

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

    def row(self, decision: Decision) -> Row:
        proof = decision.proof
        kept = "output" if self.name in KEEPS_OUTPUT or self.overwrites else "input"
        if proof is not None:
            kept = "output + 1 bit" if self.name in NEEDS_BIT else "output"
        elif self.overwrites and self.name in COPIES_INPUT:
            kept = "input"
        return Row(
            path=self.path,
            before=type(self.module).__name__ if self.function is None else f"{self.function.__name__}()",
            after=_after(proof),
            saved="input of the norm" if proof is FUSED else "input" if proof == LEAN else kept,
            bytes_before=decision.bytes_before,
            bytes_after=decision.bytes_before if proof is None else decision.bytes_after,
            reason=decision.reason,
        )


@dataclass(frozen=True)
class Decision:
    """What becomes of a site: a proof, or the reason why it stays."""

    proof: Any  # Proof, of a layer a Choice
    reason: str = ""
    bytes_before: int | None = None
    bytes_after: int | None = None


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
    layer: None = None

    @property
    def is_norm(self) -> bool:
        return issubclass(self.twin, Norm)

    @property
    def may_keep_output(self) -> bool:
        return self.name in ("layer_norm", "rms_norm")

    def row(self, decision: Decision) -> Row:
        before, after = ("input", "input") if self.is_norm else ("mask", "seed")
        if issubclass(self.twin, Twin) and not self.is_norm:
            before, after = "all", self.twin.saved  # type: ignore[attr-defined]
        if decision.proof is None:
            after = before
        elif self.is_norm and decision.proof.save == "auto":
            after = "output"
        return Row(
            path=self.path,
            before=type(self.module).__name__,
            after="unchanged" if decision.proof is None else "memkit",
            saved=after,
            bytes_before=decision.bytes_before,
            bytes_after=decision.bytes_before if decision.proof is None else decision.bytes_after,
            reason=decision.reason,
        )


Decisions = dict["Site | LayerSite", "Decision"]


@dataclass
class Found:
    activations: list[Site]
    layers: list[LayerSite]
    in_lean: list[tuple[nn.Module, type[Any]]]
    """Batch norms and convolutions, with their twins: changed where there is memkit.lean()."""
    sequences: list[nn.Module]
    """Those with a batch norm and an activation behind it."""
    losses: list[nn.Module]
    """Those that hold their loss as a function."""
    attentions: list[nn.Module]
    others: list[Row]
    """Activations that are none of the above, losses and attention."""

    @property
    def sites(self) -> list[Site | LayerSite]:
        return [*self.activations, *self.layers]


def find(model: nn.Module, names: frozenset[str], exact: bool, lean: bool) -> Found:
    """Everything with these names."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    sites: dict[nn.Module, Site] = {}
    found = Found([], [], [], [], [], [], [])
    verifier = Verifier()
    taken: set[nn.Module] = set()
    for module, places in paths.items():
        if match := _match(module, names, exact, verifier, found, ", ".join(places)):
            twin = twin_of(match.kind, type(module))
            where = ", ".join(places)
            found.layers.append(LayerSite(module, match.op, where, twin, match.choice, match.method))
            taken.update(match.takes)
        if "cross_entropy" in names and has_library_loss(module):
            path = f"{places[0]}.loss_function".lstrip(".")
            found.losses.append(module)
            found.others.append(Row(path, "ForCausalLMLoss", "memkit", "logits", None, None, ""))
        if lean and "attention" in names and is_attention(type(module)) and "forward" not in vars(module):
            before = type(module).__name__
            found.attentions.append(module)
            found.others.append(
                Row(", ".join(places), before, "in lean()", "query, key, value", None, None, "")
            )
    for module, places in paths.items():
        if module in taken:
            continue
        where = ", ".join(places)
        name = library_activation(module)
        if name is not None and _chosen(name, names):
            sites[module] = Site(module, name, where)
            continue
        stock = next((base for base in type(module).__mro__ if base in NAMES), None)
        if (
            stock is not None
            and _chosen(_own_name(module, stock), names)
            and not isinstance(module, _Variant)
        ):
            if type(module) is stock:
                sites[module] = Site(module, NAMES[stock], where)
            else:
                reason = f"a subclass of torch.nn.{stock.__name__}"
                found.others.append(_left(where, type(module).__name__, reason))
        if LAYER_NAMES.get(type(module)) in names:
            name = LAYER_NAMES[type(module)]
            found.layers.append(LayerSite(module, name, where, LAYERS[name]))
        if type(module) in BATCH_NORMS and "batch_norm_act" in names:
            found.in_lean.append((module, BATCH_NORMS[type(module)]))
        if is_convolution(module) and "conv2d" in names:
            found.in_lean.append((module, Conv2d))
        recipe = RECIPES.get(type(module))
        held: Any = recipe and getattr(module, recipe.attribute)
        if recipe is not None and not isinstance(held, nn.Module):
            path = ", ".join(f"{place}.{recipe.attribute}".lstrip(".") for place in places)
            name = FUNCTIONS.get(held) if callable(held) and isinstance(held, Hashable) else None
            if name is None:
                before = getattr(held, "__name__", type(held).__name__)
                found.others.append(_left(path, before, "not a function that memkit knows"))
            elif name in names:
                stand_in = TWINS[name]._stock()
                sites[stand_in] = site = Site(stand_in, name, path, module, held)
                site.add_place([getattr(module, after) for after in recipe.then], variables=0)
    for parent in paths:
        recipe = RECIPES.get(type(parent))
        if is_sequence(parent):
            children = _children(parent)
            fuses = type(parent) is nn.Sequential and "batch_norm_act" in names
            for index, child in enumerate(children):
                if child in sites:
                    behind_norm = fuses and index > 0 and _is_pair(children[index - 1], child)
                    sites[child].add_place(children[index + 1 :], variables=1, behind_norm=behind_norm)
                    if behind_norm and parent not in found.sequences:
                        found.sequences.append(parent)
        elif recipe is not None:
            held = getattr(parent, recipe.attribute)
            if isinstance(held, nn.Module) and held in sites:
                sites[held].add_place([getattr(parent, after) for after in recipe.then], variables=0)
    found.activations = list(sites.values())
    return found


def _own_name(module: nn.Module, stock: type[nn.Module]) -> str:
    """The name in memkit.functional's tables."""
    return "gelu_tanh" if getattr(module, "approximate", "none") == "tanh" else NAMES[stock]


def _chosen(name: str, names: frozenset[str]) -> bool:
    return name in names or FAMILY.get(name) in names


def _match(
    module: nn.Module, names: frozenset[str], exact: bool, verifier: Verifier, found: Found, where: str
) -> Any:
    """The recipe for a library's module; where one looks right and is not, a row says why."""
    reason = ""
    for match in candidates(module, names, exact):
        why_not = "its forward is replaced" if "forward" in vars(module) else verifier.why_not(module, match)
        if not why_not:
            return match
        reason = reason or why_not
    if reason:
        found.others.append(_left(where, type(module).__name__, reason))
    return None


def _is_pair(norm: nn.Module, act: nn.Module) -> bool:
    """What layers.is_pair will say when the activation has been changed."""
    return type(norm) in BATCH_NORMS and not has_hooks(norm) and not has_hooks(act)


def by_structure(site: Site | LayerSite, exact: bool, lean: bool) -> Decision:
    """What holds whatever the model does elsewhere, as calls from elsewhere are left to stock."""
    if refusal := check(site):
        return Decision(None, refusal)
    if isinstance(site, LayerSite) and not site.is_norm:
        return Decision(site.choice)
    if isinstance(site, LayerSite):
        return Decision(Choice(exact=exact), f"keeps its input: {UNPROVEN}" if site.may_keep_output else "")
    if site.fused:
        return Decision(FUSED)
    decision = _by_structure(site, exact)
    if lean and decision.proof is None and not site.overwrites:
        return Decision(LEAN, decision.reason)
    return decision


def _by_structure(site: Site, exact: bool) -> Decision:
    module = site.module
    if has_hooks(module):
        return Decision(None, f"it has hooks: {UNPROVEN}")
    if not site.followers:
        return Decision(None, UNPROVEN)
    for followers in site.followers:
        kept, reason = _fate_of_output(followers)
        if reason and site.name not in KEEPS_OUTPUT:
            return Decision(None, f"{reason}: {UNPROVEN}")
        if not kept and site.name in NEEDS_BIT:
            return Decision(None, "what follows does not keep its output: nothing to save")
    proof = Proof(site.overwrites or "auto", site.variables, callers=True, dtypes=site.dtypes(exact))
    return Decision(proof, restriction(site, exact))


def check(site: Site | LayerSite, lean: bool = False) -> str:
    """Why no proof would help."""
    module = site.module
    if "forward" in vars(module):
        return "its forward is replaced"
    if isinstance(site, LayerSite):
        return ""
    if site.overwrites and site.name not in COPIES_INPUT and not site.fused and not lean:
        return ALREADY
    as_twin = site.twin.__new__(site.twin)
    vars(as_twin).update(vars(module))
    try:
        _C.activation(as_twin._op, torch.empty(0), None, -1, as_twin._params, False, "output")
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def restriction(site: Site, exact: bool) -> str:
    """Where a swapped site keeps to the stock forward."""
    return "" if site.dtypes(exact) is None else "in half precision as stock"


def is_sequence(module: nn.Module) -> bool:
    """Whether it hands each child's output to the next and nowhere else."""
    cls: Any = type(module)
    return (
        isinstance(module, nn.Sequential)
        and cls.forward is nn.Sequential.forward
        and cls.__iter__ is nn.Sequential.__iter__
        and "forward" not in vars(module)
    )


def apply(site: Site | LayerSite, proof: Any) -> None:
    module: Any = site.module
    if isinstance(site, Site):
        proof = proof._replace(original=site.function)
    module._swap = proof
    module.__class__ = site.twin
    if site.layer is not None:
        vars(site.layer)[RECIPES[type(site.layer)].attribute] = module


def apply_others(found: Found, lean: bool) -> None:
    """Losses, attention, batch norms with what is behind them, and where there is memkit.lean() by themselves."""
    changed: Any
    for changed in found.losses:
        hold(changed)
    for changed in found.sequences:
        changed._swap = None
        changed.__class__ = Sequential
    for changed in found.attentions:
        changed._swap = None
        changed.__class__ = twin_of("attention", type(changed))
    for changed, twin in found.in_lean if lean else ():
        if "forward" not in vars(changed):
            changed._swap = None
            changed.__class__ = twin


def undo(model: nn.Module) -> list[tuple[nn.Module, Any]]:
    """Changes all back. Returns what `redo` needs."""
    done: list[tuple[nn.Module, Any]] = []
    for module in model.modules():
        if isinstance(module, Changed) and "forward" in vars(module) and not isinstance(module, InLean):
            continue  # somebody wrapped the forward that it has, and calls it
        recipe = RECIPES.get(type(module))
        if recipe is not None and isinstance(held := vars(module).get(recipe.attribute), Swapped):
            done.append((module, held))
            vars(module)[recipe.attribute] = held._swap.original
        if release(module):
            done.append((module, None))
        if isinstance(module, Changed):
            done.append((module, (type(module), vars(module).pop("_swap", None))))
            changed: Any = module
            while "_stock" in dir(type(changed)):  # a root may be changed twice
                changed.__class__ = stock_of(type(changed))
    return done


def redo(done: list[tuple[nn.Module, Any]]) -> None:
    for module, what in done:
        if what is None:
            hold(module)
        elif isinstance(what, nn.Module):
            vars(module)[RECIPES[type(module)].attribute] = what
        else:
            module.__class__, vars(module)["_swap"] = what


def _fate_of_output(followers: Iterable[nn.Module]) -> tuple[bool, str]:
    """Whether what comes next keeps the very tensor for backward; why that, or that nothing changes it, is not known."""
    kept = True
    module: Any
    for module in _flat(followers):
        name = type(module).__name__
        if has_hooks(module):
            return False, f"the {name} after it has hooks"
        if type(module) in KEEPERS:
            return kept and (type(module) not in WEIGHTED or module.weight.requires_grad), ""
        if type(module) in DROPOUTS and not module.inplace:
            kept = kept and module.p == 0
        elif type(module) not in VIEWS:
            return False, f"a {name} follows"
    return False, "nothing follows in its Sequential"


def _flat(modules: Iterable[nn.Module]) -> Iterator[nn.Module]:
    for module in modules:
        if is_sequence(module) and not has_hooks(module):
            yield from _flat(_children(module))
        else:
            yield module


def _children(module: nn.Module) -> list[nn.Module]:
    """As they are called: one that is there twice comes twice."""
    return [child for child in module._modules.values() if child is not None]


def _is_exact(value: float, dtype: torch.dtype) -> bool:
    return torch.tensor(value, dtype=dtype).item() == value


def _after(proof: Proof | None) -> str:
    if proof is None:
        return "unchanged"
    if proof == LEAN:
        return "in lean()"
    return "with the norm" if proof is FUSED else "in place" if proof.inplace else "output"


def _left(path: str, before: str, reason: str) -> Row:
    return Row(path, before, "unchanged", "?", None, None, reason)

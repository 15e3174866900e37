"""Finds what swap may change in a model."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from .._hooks import has_hooks
from ..nn.activation import _Variant
from .layers import (
    BATCH_NORMS,
    INSTANCE_NORMS,
    LAYERS,
    BatchNorm,
    Conv2d,
    InstanceNorm,
    Linear,
    is_convolution,
    is_pointwise,
    narrows,
)
from .library import (
    ROTARY,
    Match,
    Verifier,
    attention_twin,
    candidates,
    dropped,
    drops,
    has_library_loss,
    head_of,
    is_attention,
    is_multihead,
    library_activation,
    made_again,
    may_be_idle,
    multihead_twin,
    needs_lean,
    served,
    twin_of,
    what_drops,
    why_not_fits,
    why_not_rotary,
)
from .recipes import FUNCTIONS, RECIPES
from .report import Row
from .sites import NAMES, AnySite, Decisions, LayerSite, Site
from .structure import called_in_turn, is_sequence
from .types import TWINS

FAMILY = {"gelu_tanh": "gelu"}
"""Activations that go by another's name in `ops`, beside their own."""
LAYER_NAMES: dict[type[nn.Module], str] = {twin._stock: name for name, twin in LAYERS.items()}
OPS = (
    *TWINS,
    *FAMILY,
    "quick_gelu",
    "relu_squared",
    *LAYERS,
    "batch_norm_act",
    "conv2d",
    "linear",
    "act_linear",
    "gated",
    "attention",
    "apply_rotary",
    "cross_entropy",
)
ON_REQUEST = ("linear_cross_entropy",)
"""Not of what "all" means."""

DROPS_NOTHING = "not called on the sample, or with nothing to drop out of place"
IDLE = "not called on the sample, or with tables that memkit does not take"


@dataclass
class Found:
    activations: list[Site] = field(default_factory=list)
    layers: list[LayerSite] = field(default_factory=list)
    in_lean: list[tuple[nn.Module, type[Any]]] = field(default_factory=list)
    """With their twins: norms of channels, convolutions and what is made again, where there is memkit.lean(); and modules
    that call dropout as a function."""
    dropouts: dict[nn.Module, int] = field(default_factory=dict)
    """The latter, with the numbers of their rows in `others`."""
    sequences: list[nn.Module] = field(default_factory=list)
    """Those with a batch norm and an activation behind it."""
    losses: list[nn.Module] = field(default_factory=list)
    """Those that hold their loss as a function."""
    heads: dict[nn.Module, tuple[nn.Module, int]] = field(default_factory=dict)
    """Of models that will return no logits in training: their last layer, and the number of their row in `others`."""
    attentions: list[tuple[nn.Module, type[Any]]] = field(default_factory=list)
    """With their twins."""
    may_be_idle: dict[nn.Module, tuple[int, str]] = field(default_factory=dict)
    """Layers of which a run says whether memkit did anything there, with the number of their row in `others` and why not."""
    others: list[Row] = field(default_factory=list)
    """Activations that are none of the above, losses and attention."""

    @property
    def sites(self) -> list[AnySite]:
        return [*self.activations, *self.layers]

    @property
    def norms(self) -> list[nn.Module]:
        """Of channels, that are no sites and will be changed."""
        kinds = BatchNorm, InstanceNorm
        return [m for m, twin in self.in_lean if issubclass(twin, kinds) and "forward" not in vars(m)]

    @property
    def changes(self) -> bool:
        """Whether something is, or may be."""
        return bool(self.sites) or self.changes_others

    def rows(self, decisions: Decisions) -> tuple[Row, ...]:
        return (*(site.row(decision) for site, decision in decisions.items()), *self.others)

    @property
    def changes_others(self) -> bool:
        """Whether something is changed that nothing has to be proven of."""
        return bool(self.losses or self.attentions or self.in_lean)

    def keep_logits(self, why: str) -> None:
        """Of all models."""
        for _, number in self.heads.values():
            self.others[number] = replace(self.others[number], after="unchanged", saved="logits", reason=why)
        self.heads.clear()

    def note_dropped(self) -> None:
        """After a run in which they drop."""
        for module, number in self.dropouts.items():
            if module.training and module not in dropped:
                row = self.others[number]
                self.others[number] = replace(row, after="unchanged", saved="mask", reason=DROPS_NOTHING)

    def note_idle(self) -> None:
        """After a run: rows say where there was nothing that memkit takes."""
        for module, (number, reason) in self.may_be_idle.items():
            if module not in served:
                row = self.others[number]
                self.others[number] = replace(row, after="unchanged", saved="?", reason=reason)


def find(model: nn.Module, names: frozenset[str], exact: bool, lean: bool) -> Found:
    """Everything with these names."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    search = _Search(names, exact, lean)
    taken: set[nn.Module] = set()
    for module, places in paths.items():
        if module not in taken:
            taken.update(search.of_a_library(module, places))
    for module, places in paths.items():
        if module not in taken:
            search.of_torch(module, places)
    for module in paths:
        search.note_calls(module)
    search.found.activations = list(search.activations.values())
    return search.found


class _Search:
    def __init__(self, names: frozenset[str], exact: bool, lean: bool) -> None:
        self.names, self.exact, self.lean = names, exact, lean
        self.found = Found()
        self.activations: dict[nn.Module, Site] = {}
        self.verifier = Verifier()

    def of_a_library(self, module: nn.Module, places: list[str]) -> tuple[nn.Module, ...]:
        """Returns the activations that another site takes over."""
        where = ", ".join(places)
        match = self.match(module, where)
        if match is not None:
            twin = twin_of(match.kind, type(module))
            reads = self.verifier.watched(module, match)
            if reads:
                twin = twin_of("watching", twin)
            site = LayerSite(module, match.op, where, twin, match.choice, match.method, reads)
            self.found.layers.append(site)
        if self.names & {"cross_entropy", *ON_REQUEST} and has_library_loss(module):
            self.found.losses.append(module)
            path = _inside(places[:1], "loss_function")
            self.found.others.append(Row(path, "ForCausalLMLoss", "memkit", "logits", None, None, ""))
            if self.names.issuperset(ON_REQUEST):
                self.head(module, places)
        self.attention(module, places)
        if match is None and "forward" not in vars(module):
            return self.again(module, places)
        return () if match is None else match.takes

    def head(self, model: nn.Module, places: list[str]) -> None:
        where, head = _inside(places[:1], "logits"), head_of(model)
        why_not = ""
        if head is None or narrows(head):
            why_not = "its last layer is no Linear with more outputs than inputs"
        elif "forward" in vars(model) or "forward" in vars(head):
            why_not = "a forward is replaced"
        if head is None or why_not:
            self.left(where, type(model).__name__, why_not)
            return
        self.found.heads[model] = head, len(self.found.others)
        self.found.others.append(Row(where, "Linear", "none in training", "gradients", None, None, ""))

    def attention(self, module: nn.Module, places: list[str]) -> None:
        """Of transformers' models."""
        if isinstance(module, torch.jit.ScriptModule):
            return
        kind = type(module)
        in_lean = (
            self.lean and "attention" in self.names and is_attention(kind) and "forward" not in vars(module)
        )
        why_not = why_not_rotary(module) if "apply_rotary" in self.names else None
        if in_lean:
            row = Row(", ".join(places), kind.__name__, "in lean()", "query, key, value", None, None, "")
            self.found.others.append(row)
        if why_not:
            self.left(_inside(places, ROTARY), ROTARY, why_not)
        elif why_not is not None:
            self.found.may_be_idle[module] = len(self.found.others), IDLE
            row = Row(_inside(places, ROTARY), ROTARY, "memkit", "tables", None, None, "")
            self.found.others.append(row)
        if in_lean or why_not == "":
            twin = attention_twin(kind, in_lean, why_not == "", "dropout" in self.names)
            self.found.attentions.append((module, twin))

    def again(self, module: nn.Module, places: list[str]) -> tuple[nn.Module, ...]:
        """What no recipe knows: what is cheap to make again, and dropout called as a function. Returns the activations that
        it takes over."""
        kind = made_again(module, self.names if self.lean else self.names & {"dropout"})
        if not kind:
            return ()
        twin, where = twin_of(kind, type(module)), ", ".join(places)
        if why := why_not_fits(module, twin):
            self.left(where, type(module).__name__, why)
            return ()
        self.found.in_lean.append((module, twin))
        if drops(kind):
            self.found.dropouts[module] = len(self.found.others)
            name = what_drops(module)
            row = Row(_inside(places, name), name, "memkit", "seed", None, None, "")
            self.found.others.append(row)
        if needs_lean(kind):
            if why := may_be_idle(module, kind):
                self.found.may_be_idle[module] = len(self.found.others), why
            self.found.others.append(Row(where, type(module).__name__, "in lean()", "input", None, None, ""))
        return tuple(module.children()) if kind == "star_relu" else ()

    def match(self, module: nn.Module, where: str) -> Match | None:
        """The recipe for a library's module; where one looks right and is not, a row says why."""
        reason = ""
        try:
            for match in candidates(module, self.names, self.exact):
                replaced = "forward" in vars(module)
                why_not = "its forward is replaced" if replaced else self.verifier.why_not(module, match)
                if not why_not:
                    return match
                reason = reason or why_not
        except Exception as error:  # of a class that says of itself what no module does
            reason = f"{type(module).__name__} cannot be verified: {type(error).__name__}"
        if reason and not (self.lean and made_again(module, self.names)):
            self.left(where, type(module).__name__, reason)
        return None

    def of_torch(self, module: nn.Module, places: list[str]) -> None:
        """Torch's own layers, and activations of a library's."""
        kind, where = type(module), ", ".join(places)
        self.activation(module, where)
        if (name := LAYER_NAMES.get(kind)) in self.names:
            self.found.layers.append(LayerSite(module, name, where, LAYERS[name]))
        if self.lean and kind in BATCH_NORMS and "batch_norm_act" in self.names:
            self.found.in_lean.append((module, BATCH_NORMS[kind]))
        if self.lean and kind in INSTANCE_NORMS and "group_norm" in self.names:
            self.found.in_lean.append((module, INSTANCE_NORMS[kind]))
        if "attention" in self.names and is_multihead(module) and "forward" not in vars(module):
            self.found.attentions.append((module, multihead_twin(kind, "dropout" in self.names)))
            self.found.others.append(Row(where, kind.__name__, "memkit", "query, key, value", None, None, ""))
        if self.lean and is_convolution(module) and not is_pointwise(module) and "conv2d" in self.names:
            self.found.in_lean.append((module, Conv2d))
        if self.lean and narrows(module) and "linear" in self.names:
            self.found.in_lean.append((module, Linear))
        self.function(module, places)

    def activation(self, module: nn.Module, where: str) -> None:
        name = library_activation(module)
        if name is not None and self.chosen(name):
            self.activations[module] = Site(module, name, where)
            return
        stock = next((base for base in type(module).__mro__ if base in NAMES), None)
        if stock is None or isinstance(module, _Variant) or not self.chosen(_own_name(module, stock)):
            return
        if type(module) is stock:
            self.activations[module] = Site(module, NAMES[stock], where)
        else:
            self.left(where, type(module).__name__, f"a subclass of torch.nn.{stock.__name__}")

    def function(self, layer: nn.Module, places: list[str]) -> None:
        """That a layer holds as its activation."""
        recipe = RECIPES.get(type(layer))
        held: Any = recipe and getattr(layer, recipe.attribute)
        if recipe is None or isinstance(held, nn.Module):
            return
        path = _inside(places, recipe.attribute)
        name = FUNCTIONS.get(held) if callable(held) and isinstance(held, Hashable) else None
        if name is None:
            before = getattr(held, "__name__", type(held).__name__)
            self.left(path, before, "not a function that memkit knows")
        elif name in self.names:
            stand_in = TWINS[name]._stock()
            self.activations[stand_in] = site = Site(stand_in, name, path, layer, held)
            site.add_place(recipe.followers(layer), variables=0)

    def note_calls(self, parent: nn.Module) -> None:
        """Of the activations that it calls: what follows them there, and what is before them."""
        recipe = RECIPES.get(type(parent))
        if is_sequence(parent):
            children = called_in_turn(parent)
            norms_change = "batch_norm_act" in self.names
            for i, child in enumerate(children):
                if child in self.activations:
                    behind_norm = norms_change and i > 0 and _is_pair(children[i - 1], child)
                    fuses = behind_norm and type(parent) is nn.Sequential
                    before = children[i - 1] if i else None
                    self.activations[child].add_place(children[i + 1 :], 1, behind_norm, fuses, before)
                    if fuses and parent not in self.found.sequences:
                        self.found.sequences.append(parent)
        elif recipe is not None:
            held = getattr(parent, recipe.attribute)
            if isinstance(held, nn.Module) and held in self.activations:
                self.activations[held].add_place(recipe.followers(parent), variables=0)

    def chosen(self, activation: str) -> bool:
        return activation in self.names or FAMILY.get(activation) in self.names

    def left(self, path: str, before: str, reason: str) -> None:
        self.found.others.append(Row(path, before, "unchanged", "?", None, None, reason))


def _own_name(module: nn.Module, stock: type[nn.Module]) -> str:
    """The name in memkit.functional's tables."""
    return "gelu_tanh" if getattr(module, "approximate", "none") == "tanh" else NAMES[stock]


def _inside(places: Iterable[str], attribute: str) -> str:
    return ", ".join(f"{place}.{attribute}".lstrip(".") for place in places)


def _is_pair(norm: nn.Module, act: nn.Module) -> bool:
    """What layers.is_pair will say when the activation has been changed."""
    return type(norm) in BATCH_NORMS and not has_hooks(norm) and not has_hooks(act)

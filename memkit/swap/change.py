"""Changes a model's modules as was decided, and back."""

from __future__ import annotations

from typing import Any

from torch import nn

from .find import Found
from .layers import Sequential
from .library import Head, InLean, hold, release, twin_of
from .recipes import RECIPES
from .sites import AnySite, Decisions, LayerSite, Site
from .types import Changed, Swapped, stock_of

READS = "_memkit_reads"


def apply_all(model: nn.Module, decisions: Decisions, found: Found, lean: bool | str) -> None:
    for site, decision in decisions.items():
        if decision.proof is not None:
            apply(site, decision.proof)
    apply_others(found)
    if lean == "call":
        root: Any = model
        root.__class__ = twin_of("lean", type(model))


def apply(site: AnySite, proof: Any) -> None:
    if isinstance(site, Site):
        proof = proof._replace(original=site.function)
    _become(site.module, site.twin, proof)
    if isinstance(site, LayerSite) and site.reads:
        vars(site.module)[READS] = site.reads
    if site.layer is not None:
        vars(site.layer)[RECIPES[type(site.layer)].attribute] = site.module


def apply_others(found: Found) -> None:
    """Losses, attention, batch norms with what is behind them, and what memkit.lean() asks for by itself."""
    for module in found.losses:
        hold(module)
    for model, (head, _) in found.heads.items():
        _become(model, twin_of("without logits", type(model)))
        if not isinstance(head, Head):  # another model's too
            _become(head, twin_of("head", type(head)))
    for module in found.sequences:
        _become(module, Sequential)
    for module, twin in found.attentions:
        _become(module, twin)
    for module, twin in found.in_lean:
        if "forward" not in vars(module):
            _become(module, twin)


def _become(module: Any, twin: type[Any], choice: Any = None) -> None:
    module._swap = choice
    module.__class__ = twin


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
            held = {name: vars(module).pop(name) for name in ("_swap", READS) if name in vars(module)}
            done.append((module, (type(module), held)))
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
            module.__class__, held = what
            vars(module).update(held)

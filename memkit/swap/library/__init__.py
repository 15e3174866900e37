"""Recipes for the modules of model libraries.

A module's class name, or the names of its children, say what it may be; its values and all its gradients on a few random
numbers say whether it is that. So another version of a library, or a class of another library that is written alike,
is either the same function or left alone, with the reason in the report.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ..layers import Choice, is_linear
from .activations import CLASSES, activation_of, activation_twin, library_activation
from .again import drops, made_again, may_be_idle, needs_lean
from .attention import attention_twin, is_attention, why_not_rotary
from .channel_norms import channel_norm_kinds
from .functions import dropped, what_drops
from .gated_norms import GATES, gated_norm_probe, is_gated_norm
from .heads import Head, head_of
from .losses import has_library_loss, hold, release
from .match import Match
from .mlps import GATINGS, STEPS, Gating, Steps
from .multihead import is_multihead, multihead_twin
from .norm_acts import BatchNormAct, norm_op
from .norms import further_probes, norm_kinds, norm_probe
from .projections import Projection, networks, parts_of, projections
from .reads import Reads, Watching
from .residual import BLOCKS, DENSE, OPTIONAL, is_dense_layer
from .rotary import NAME as ROTARY
from .rotary import served
from .sequences import is_ff_layer, pairs_of, steps_of
from .twin import InLean, Twin, fits, numbers, twin_of, weight_of, why_not_fits
from .verifier import Verifier
from .written import written

__all__ = [
    "CLASSES",
    "ROTARY",
    "BatchNormAct",
    "Head",
    "InLean",
    "Match",
    "Reads",
    "Twin",
    "Verifier",
    "Watching",
    "activation_twin",
    "attention_twin",
    "candidates",
    "dropped",
    "drops",
    "fits",
    "has_library_loss",
    "head_of",
    "hold",
    "is_attention",
    "is_multihead",
    "library_activation",
    "made_again",
    "may_be_idle",
    "multihead_twin",
    "needs_lean",
    "release",
    "served",
    "twin_of",
    "what_drops",
    "why_not_fits",
    "why_not_rotary",
]


def candidates(module: nn.Module, names: frozenset[str], exact: bool) -> list[Match]:
    """Of one module, the likeliest first. Cheap: all modules of a model are asked."""
    if isinstance(module, torch.jit.ScriptModule):
        return []
    found = []
    for kind in (*norm_kinds(module), *channel_norm_kinds(module)):
        op = norm_op(kind)
        if op in names:
            behind = module._modules.keys() & {"act", "activation"}
            acts = _acts(module, behind) if op == "batch_norm_act" else ()
            probe, further = norm_probe(module, kind), further_probes(module, kind)
            found.append(Match(kind, op, Choice(exact=exact), probe, "forward", acts, further))
    if {"rms_norm", "gated"} <= names and is_gated_norm(module):
        probe = gated_norm_probe(module)
        found += [Match("gated_norm", "gated", gate, probe) for gate in GATES]
    children = module._modules.keys()
    held = children | vars(module).keys()
    named = (row for row in (*STEPS, *GATINGS) if held >= _own(row) >= children and not _has_act(module))
    no_functions = type(module).forward is nn.Sequential.forward
    for row in (*named, *written(module)):
        if row.op in names and not (no_functions and _own(row) < set(row.names)):
            kind = "gated" if row.op == "gated" else "steps"
            choice = row._replace(dropout="dropout" in names)
            first, acts = getattr(module, row.names[0]), _acts(module, sorted(_own(row)))
            found.append(Match(kind, row.op, choice, _probe(first), "forward", acts))
    for kind, hows in (("projected network", networks(module)), ("projected", projections(module))):
        for how in hows:
            if how.op in names:
                found.append(_projecting(module, kind, how._replace(dropout="dropout" in names)))
    for block in BLOCKS if "batch_norm_act" in names else ():
        needed = set(block.names) | {"downsample"}
        if children <= needed and held >= needed and children >= needed - OPTIONAL:
            probe = _probe(module._modules["conv1"])
            found.append(
                Match("residual", block.op, block, probe, "forward", _acts(module, set(block.names)))
            )
    if "batch_norm_act" in names and is_dense_layer(module):
        probe = _probe(module._modules["conv1"])
        found.append(Match("dense_layer", "batch_norm_act", Choice(), probe, "forward", _acts(module, DENSE)))
    if {"act_linear", "dropout"} <= names:
        if pairs := pairs_of(module):
            first = next(child for child in module.children() if is_linear(child))
            acts = tuple(act for act, _ in pairs)
            found.append(Match("sequence", "act_linear", Choice(), _probe(first), "forward", acts))
        if is_ff_layer(module):
            first, act, *_ = steps_of(module)
            taken = (module, *_modules((act,)))
            found.append(Match("ff_block", "act_linear", Choice(), _probe(first), "_ff_block", taken))
    if "act_linear" in names and _is_bert_layer(module):
        layer: Any = module
        acts = (layer.intermediate.intermediate_act_fn,)
        probe = _probe(layer.intermediate.dense)
        parts = type(layer.intermediate), type(layer.output)
        found.append(Match("bert_layer", "act_linear", parts, probe, "feed_forward_chunk", _modules(acts)))
    if "gated" in names and hasattr(type(module), "_apply_gate") and "act_fn" in held:
        experts: Any = module
        weight = getattr(experts, "gate_up_proj", None)
        if isinstance(weight, Tensor) and weight.dim() == 3:
            width = weight.shape[2 if getattr(experts, "is_transposed", False) else 1]
            probe = (numbers((3, width), weight),)
            found.append(
                Match("experts", "gated", Choice(), probe, "_apply_gate", _modules((experts.act_fn,)))
            )
    if "gated" in names and "act_fn" in held and _is_batched_experts(module):
        batched: Any = module
        number, width, _ = batched.gate_up_proj.shape
        probe = (numbers((2 * number, width), batched.gate_up_proj),)
        acts = _modules((batched.act_fn,))
        found.append(Match("batched_experts", "gated", Choice(), probe, "forward", acts))
    return found


def _projecting(module: nn.Module, kind: str, how: Projection) -> Match:
    first = module if kind == "projected" else parts_of(module)[0]
    probe = _probe(getattr(first, how.linear)) if how.linear else (numbers((2, 3, 16), None),)
    acts = () if how.act[0] == "=" else _modules((getattr(first, how.act),))
    return Match(kind, how.op, how, probe, "forward", (*acts, first))


def _probe(layer: Any) -> tuple[Tensor, ...]:
    """Input for a module whose first layer this is."""
    weight = weight_of(layer)
    if not isinstance(weight, Tensor) or weight.dim() not in (2, 4):
        return ()
    if weight.dim() == 4:
        side = 2 * max(weight.shape[2:]) + 1
        shape: tuple[int, ...] = (2, layer.in_channels, side, side)
    else:
        features = weight.shape[0] if type(layer).__name__ == "Conv1D" else weight.shape[1]
        shape = (2, 3, features)
    return (numbers(shape, weight),)


def _has_act(module: Any) -> bool:
    """Of a batch norm that calls its activation itself: nothing is left for the module around it."""
    return hasattr(module._modules.get("bn"), "act")


def _own(row: Steps | Gating) -> set[str]:
    """What a module holds, without functions."""
    return {name for name in row.names if name[0] != "="}


def _acts(module: nn.Module, names: Iterable[str]) -> tuple[nn.Module, ...]:
    return _modules(held for name in names if activation_of(held := getattr(module, name)) is not None)


def _modules(held: Iterable[Any]) -> tuple[nn.Module, ...]:
    return tuple(each for each in held if isinstance(each, nn.Module))


def _is_batched_experts(module: Any) -> bool:
    """By its weights, [experts, in, out] without biases."""
    weights = module._parameters
    return weights.keys() == {"gate_up_proj", "down_proj"} and all(
        each is not None and each.dim() == 3 for each in weights.values()
    )


def _is_bert_layer(module: Any) -> bool:
    parts = module._modules
    return (
        hasattr(type(module), "feed_forward_chunk")
        and parts.get("intermediate") is not None
        and parts.get("output") is not None
        and {"dense"} == parts["intermediate"]._modules.keys() - {"intermediate_act_fn"}
        and hasattr(parts["intermediate"], "intermediate_act_fn")
        and {"dense", "dropout", "LayerNorm"} == parts["output"]._modules.keys()
    )

"""Recipes for the modules of model libraries.

A module's class name, or the names of its children, say what it may be; its values and all its gradients on a few random
numbers say whether it is that. So another version of a library, or a class of another library that is written alike,
is either the same function or left alone, with the reason in the report.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..layers import Choice, Norm, is_linear
from ..trial import exact_convolutions, own_copy
from ..types import HALVES
from ..untouched import untouched
from .activations import CLASSES, activation_of, activation_twin, library_activation
from .again import drops, made_again, may_be_idle, needs_lean
from .attention import attention_twin, is_attention, why_not_rotary
from .channel_norms import channel_norm_kinds
from .functions import dropped, what_drops
from .gated_norms import GATES, gated_norm_probe, is_gated_norm
from .heads import Head, head_of
from .losses import has_library_loss, hold, release
from .mlps import GATINGS, STEPS, Gating, Steps
from .multihead import is_multihead, multihead_twin
from .norm_acts import BatchNormAct, norm_op
from .norms import further_probes, norm_kinds, norm_probe
from .projections import Projection, networks, parts_of, projections
from .reads import (
    INTERNAL,
    Read,
    Reads,
    Watching,
    another,
    differing,
    instead,
    marks,
    numbers_read,
    uses,
    value_of,
)
from .residual import BLOCKS, DENSE, OPTIONAL, is_dense_layer
from .rotary import NAME as ROTARY
from .rotary import served
from .sequences import is_ff_layer, pairs_of, steps_of
from .twin import MIXINS, TOLERANCE, InLean, Twin, fits, numbers, twin_of, weight_of, why_not_fits
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


class Match(NamedTuple):
    """What a module may be."""

    kind: str
    op: str
    """Its name in `ops`."""
    choice: Any
    """What `_swap` will hold."""
    probe: tuple[Tensor, ...]
    method: str = "forward"
    takes: tuple[nn.Module, ...] = ()
    """Activations that it calls as part of itself, and itself if it holds one as a function."""
    further: tuple[tuple[Tensor, ...], ...] = ()
    """Probes beside that one."""


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


class Verifier:
    """Remembers, for one model, which kinds of modules compute what their twins compute."""

    def __init__(self) -> None:
        self._known: dict[Hashable, str] = {}
        self._unread: dict[Hashable, tuple[Read, ...]] = {}
        self._unread_of: dict[Hashable, tuple[Read, ...]] = {}

    def why_not(self, module: nn.Module, match: Match) -> str:
        """Why a module does not get this twin; nothing if it does."""
        kind = (match.kind, match.choice, _signature(module))
        key = kind, self._values(module, kind)
        if key not in self._known:
            why = self._verify(module, match)
            if not why and kind not in self._unread:
                why = self._look(module, match, kind)
                key = kind, self._values(module, kind)
            self._known[key] = why
        return self._known[key]

    def watched(self, module: nn.Module, match: Match) -> Reads:
        """Of a module that gets this twin: what the twin has to be called with, or stock serves."""
        if not any(self._unread.values()):
            return ()
        return self._values(module, (match.kind, match.choice, _signature(module)))

    def _values(self, module: nn.Module, kind: Hashable) -> Reads:
        return tuple((*read, value_of(module, read)) for read in self._unread.get(kind, ()))

    def _look(self, module: nn.Module, match: Match, kind: Hashable) -> str:
        self._unread[kind] = ()
        alike = match.kind, match.choice, _alike(module)
        unread = self._unread_of.get(alike)
        if unread is None:
            unread = self._unread_of[alike] = _unread(module, match)
        for read in unread:
            if isinstance(value_of(module, read), Tensor) or match.method != "forward":
                return f"{type(module).__name__} computes with {read[1]}, which memkit's {match.op} does not"
        self._unread[kind] = unread
        return ""

    @staticmethod
    def _verify(module: nn.Module, match: Match) -> str:
        held = (*match.probe, *module.parameters())
        if not all(tensor.numel() for tensor in held) or any(tensor.is_meta for tensor in held):
            return "its parameters have no values yet"
        if not match.probe:
            return "its first layer is none that memkit knows what to give"
        twin = twin_of(match.kind, type(module))
        if why := why_not_fits(module, twin):
            return why
        if sets := uses(type(module), match.method).sets:
            return f"{type(module).__name__} sets {', '.join(sorted(sets))} in each call"
        device = match.probe[0].device
        # Under autocast norms stay stock's, if asked to be exact: nothing would be compared.
        plain = torch.autocast(device.type, enabled=False) if issubclass(twin, Norm) else nullcontext()
        tried = _of_other_numbers(module) if issubclass(twin, Norm) else (module,)
        with exact_convolutions(device), plain:
            # In both modes: a dropout that its forward writes out would not show in evaluation.
            for training in (module.training, not module.training):
                for each, probe in product(tried, (match.probe, *match.further)):
                    probed = match._replace(probe=probe)
                    if (reason := _why_not(each, probed, training)) and not _rounds_alike(
                        each, probed, training
                    ):
                        return reason
                if issubclass(twin, Norm) and (reason := _why_not_wide(tried[-1], match, training)):
                    return reason
                feeds_forward = match.op in ("act_linear", "gated") and match.kind != "gated_norm"
                if feeds_forward and (reason := _why_not_far(module, match, training)):
                    return reason
        return ""


def _unread(module: nn.Module, match: Match) -> tuple[Read, ...]:
    """What stock's values depend on, and the twin's do not."""
    found = []
    for read, value in numbers_read(module, match.method).items():
        if read[1].endswith(INDEX):  # which may be compared with one
            found.append(read)
            continue
        changed = another(value)
        wide = _wide(module, match)
        if changed is None or wide is None:
            continue
        probe = tuple(x.float() if x.dtype in HALVES else x for x in match.probe)
        with instead(wide, read, changed), torch.autocast(probe[0].device.type, enabled=False):
            theirs, ours = _both(wide, match._replace(probe=probe), module.training)
        if not isinstance(theirs, Exception) and not _is_same(match, ours, theirs):
            found.append(read)
    return tuple(found)


def _of_other_numbers(module: nn.Module) -> tuple[nn.Module, ...]:
    """A copy, as a norm may set its parameters by what it is given first, and one with other parameters than it starts with,
    which are ones and zeros."""
    first, other = own_copy(module), own_copy(module)
    if first is None or other is None:
        return (module,)
    with torch.no_grad():
        for parameter in other.parameters():
            if type(parameter) is nn.Parameter and parameter.is_floating_point():
                parameter.add_(numbers(parameter.shape, parameter))
    return first, other


FAR = 1e4


def _why_not_far(module: nn.Module, match: Match, training: bool) -> str:
    """The same for inputs that show what a function does with large values, such as a limit. In float32 for half precision,
    which may not have them."""
    wide = _wide(module, match)
    if wide is None:
        return f"{type(module).__name__} {_NO_COPY}"
    probe = tuple(FAR * (x.float() if x.dtype in HALVES else x) for x in match.probe)
    with torch.autocast(probe[0].device.type, enabled=False):
        return _why_not(wide, match._replace(probe=probe), training)


def _why_not_wide(module: nn.Module, match: Match, training: bool) -> str:
    """Of a norm in half precision, in float32: rounding hides by what a row's squares are divided."""
    if match.probe[0].dtype not in HALVES:
        return ""
    wide = _wide(module, match)
    if wide is None:
        return f"{type(module).__name__} {_NO_COPY}"
    probes = (tuple(x.float() for x in match.probe), *further_probes(wide, match.kind))
    return next(filter(None, (_why_not(wide, match._replace(probe=probe), training) for probe in probes)), "")


def _wide(module: nn.Module, match: Match) -> nn.Module | None:
    """In float32, if it is in half precision and can be copied."""
    if match.probe[0].dtype not in HALVES:
        return module
    wide = own_copy(module)
    return None if wide is None else wide.float()


def _rounds_alike(module: nn.Module, match: Match, training: bool) -> bool:
    """Whether a twin differs by the rounding of half precision alone: not in float32, and else it is as near to what that
    gives as stock, on one of a few inputs: an element that rounding takes across a kink may be stock's or the twin's alone.
    """
    given = match.probe[0]
    autocast = torch.is_autocast_enabled(given.device.type)
    half = torch.get_autocast_dtype(given.device.type) if autocast else given.dtype
    if half not in HALVES:
        return False
    wide: nn.Module | None = module
    if given.dtype in HALVES and (wide := own_copy(module)) is not None:
        wide.float()
    return wide is not None and any(
        _is_near(module, wide, match._replace(probe=tuple(factor * x for x in match.probe)), training, half)
        for factor in (1, 1.01, 1.02, 1.03)
    )


def _is_near(module: nn.Module, wide: nn.Module, match: Match, training: bool, half: torch.dtype) -> bool:
    """`wide` is the module in float32."""
    theirs, ours = _both(module, match, training)
    widened = match._replace(probe=tuple(x.float() if x.dtype in HALVES else x for x in match.probe))
    with torch.autocast(match.probe[0].device.type, enabled=False):
        exact, own = _both(wide, widened, training)
    if isinstance(theirs, Exception) or isinstance(exact, Exception) or ours is None or own is None:
        return False
    if not _rounds(theirs[0], exact[0], half):
        return False
    # A bias before a batch norm has no gradient but for rounding: compared at the scale of the others, as in _agree.
    inputs = len(match.probe)
    largest = max((float(c.double().norm()) for c in exact[1 + inputs :] if c is not None), default=0.0)
    slack = 1e-2 * TOLERANCE[half] * largest
    return _agree(own, exact, inputs, _tolerance(widened)) and all(
        _is_as_near(a, b, c, slack if i > inputs else 0.0)
        for i, (a, b, c) in enumerate(zip(ours, theirs, exact, strict=True))
    )


def _rounds(output: Tensor | None, exact: Tensor | None, half: torch.dtype) -> bool:
    """Whether an output is that of float32 but for rounding, which does not make it larger or smaller as a whole."""
    if output is None or exact is None or output.shape != exact.shape:
        return False
    error, size = output.double() - exact.double(), exact.double().square().sum()
    return bool(error.norm() <= TOLERANCE[half] * size.sqrt()) and bool(
        (error * exact.double()).sum().abs() <= torch.finfo(half).eps * size
    )


def _is_as_near(ours: Tensor | None, theirs: Tensor | None, exact: Tensor | None, slack: float) -> bool:
    if ours is None or theirs is None or exact is None:
        return ours is theirs is exact
    if ours.dtype != theirs.dtype or not ours.shape == theirs.shape == exact.shape:
        return False
    mine, stock = (float((x.double() - exact.double()).norm()) for x in (ours, theirs))
    return mine <= 2 * stock + TOLERANCE[torch.float32] * float(exact.double().norm()) + slack


def _why_not(module: nn.Module, match: Match, training: bool) -> str:
    name = type(module).__name__
    noted: list[dict[Any, Any]] = []
    theirs, ours = _both(module, match, training, noted=noted)
    if isinstance(theirs, AttributeError) and theirs.args == (_NO_MODE,):
        return f"{name} has {_NO_MODE}"
    if isinstance(theirs, Exception):
        where = "" if training == module.training else f" in {'training' if training else 'evaluation'}"
        return f"{name} takes other arguments{where}: {type(theirs).__name__}"
    same = _is_same(match, ours, theirs) and (
        not issubclass(MIXINS[match.kind], Norm) or _lie_alike(ours[0], theirs[0])  # type: ignore[index]
    )
    if not same:
        others, _ = _both(module, match, training, seed=1)
        if not isinstance(others, Exception) and not _is_same(match, others, theirs):
            return f"{name} draws random numbers, as dropout does, which memkit's {match.op} does not"
    elif any(map(_is_dropout, module.modules())):
        theirs, ours = _both(module, match, training, scales=True)
        same = not isinstance(theirs, Exception) and _is_same(match, ours, theirs)
        if not same:
            return f"{name} calls its dropouts elsewhere than memkit's {match.op}"
    if not same:
        return f"{name} computes something else than memkit's {match.op}"
    before, stock, twin = noted
    lost = differing(before, stock) - differing(stock, twin)
    return (
        f"{name} changes {', '.join(sorted(attribute for _, attribute in lost))} in each call" if lost else ""
    )


def _is_same(match: Match, ours: Values | None, theirs: Values) -> bool:
    return ours is not None and _agree(ours, theirs, len(match.probe), _tolerance(match))


def _is_dropout(module: nn.Module) -> bool:
    return "dropout" in type(module).__name__.lower() and not module._modules


def _lie_alike(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """In memory, by which what follows goes."""
    return ours is not None and theirs is not None and ours.stride() == theirs.stride()


def _tolerance(match: Match) -> float:
    tolerance = TOLERANCE.get(match.probe[0].dtype, 0.0)
    if match.further:  # float32 inside is what a norm without a weight may have, whatever it is given
        tolerance = max(tolerance, TOLERANCE[torch.float32])
    return tolerance


def _scaled(factor: float, input: Tensor) -> Tensor:
    return factor * input


Values = list[Tensor | None]
INDEX = "idx", "index"
_NO_COPY = "cannot be copied to be verified in float32"
_NO_MODE = "a part whose mode cannot be set"


def _both(
    module: nn.Module,
    match: Match,
    training: bool,
    seed: int = 0,
    scales: bool = False,
    noted: list[dict[Any, Any]] | None = None,
) -> tuple[Values | Exception, Values | None]:
    """Of stock, or what it raises, and of its twin, if that does not raise. ``scales``: with a factor of its own in the
    place of each dropout, which shows where and how often it is called; else they do nothing. ``noted``: gets what there is
    to see of the module's attributes before, after stock and after its twin."""
    stock = type(module)
    twin = twin_of(match.kind, stock)
    changed: Any = module
    with untouched(module, deep=False), torch.enable_grad():
        try:
            for at, part in enumerate(module.modules()):
                mode = training and not _is_dropout(part)
                if part.training != mode:
                    part.training = mode
                if scales and _is_dropout(part):
                    part.forward = partial(_scaled, 1.3 + 0.4 * at)
        except AttributeError:
            return AttributeError(_NO_MODE), None
        for parameter in module.parameters():  # frozen ones too: what they are used for is compared
            parameter.requires_grad_(parameter.is_floating_point())
        note(noted, module)
        try:
            theirs = _values(module, match, seed)
        except Exception as error:
            return error, None
        note(noted, module)
        changed._swap, changed.__class__ = match.choice, twin
        try:
            if isinstance(changed, Norm):  # which may leave it to stock
                changed._memkit(match.probe[0])
                if changed._stays(match.probe[0]):
                    return theirs, None
            ours = _values(module, match, seed)
            changed.__class__ = stock
            note(noted, module)
            return theirs, ours
        except Exception:  # names propose a twin, whose shapes may not even fit
            return theirs, None
        finally:
            changed.__class__ = stock


def note(noted: list[dict[Any, Any]] | None, module: nn.Module) -> None:
    if noted is not None:
        noted.append(marks(module))


def _values(module: nn.Module, match: Match, seed: int) -> Values:
    """What it gives, and the gradients of what it was given and of its parameters; None of those that it does not use.

    A parameter of its own may start at a value that changes nothing, which only its gradient shows.
    """
    torch.manual_seed(seed)
    inputs = [tensor.clone().requires_grad_() for tensor in match.probe]
    output = getattr(module, match.method)(*inputs)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape).to(output.dtype)
    leaves = [*inputs, *(parameter for parameter in module.parameters() if parameter.requires_grad)]
    return [output.detach(), *torch.autograd.grad(output, leaves, weights, allow_unused=True)]


def _agree(ours: Values, theirs: Values, inputs: int, tolerance: float) -> bool:
    """Of the output and the inputs each by itself, of a parameter beside the largest gradient of one: a bias before a batch
    norm has none but for rounding."""
    norms = [0.0 if b is None else float(b.double().norm()) for b in theirs]
    least = 1e-2 * max(norms[1 + inputs :], default=0.0)
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a is None or b is None:
            if a is not b:
                return False
            continue
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        scale = max(norms[i], least if i > inputs else 0.0, 1e-30)
        if not float((a.double() - b.double()).norm()) <= tolerance * scale:
            return False
    return True


def _signature(module: nn.Module) -> Hashable:
    """What a forward may depend on: classes, numbers and words, shapes; not the values of parameters, nor an index: see
    `Verifier.watched`."""
    plain = tuple(
        (name, _frozen(held))
        for name, held in vars(module).items()
        if name not in INTERNAL and not name.endswith(INDEX)
    )
    shapes = tuple((name, p.shape, p.dtype) for name, p in module._parameters.items() if p is not None)
    parts = tuple((name, _signature(child)) for name, child in module._modules.items() if child is not None)
    return type(module), plain, shapes, parts


def _alike(module: nn.Module) -> Hashable:
    """Of modules of one class: the way that its code takes, whatever their sizes are."""
    way = tuple(
        (k, v) for k, v in vars(module).items() if k not in INTERNAL and isinstance(v, bool | str | None)
    )
    parts = tuple((name, type(child)) for name, child in module._modules.items())
    return type(module), way, parts, tuple(name for name, p in module._parameters.items() if p is not None)


def _frozen(held: Any) -> Hashable:
    """What tells one value from another: of what is no number or word, that it is the same object."""
    if isinstance(held, tuple | list):
        return tuple(map(_frozen, held))
    if isinstance(held, dict):
        return tuple((_frozen(key), _frozen(value)) for key, value in held.items())
    return held if isinstance(held, int | float | str) else id(held)


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

"""What the optimizers share: lists for the compiled step, flat state, state dicts."""

# Parts of torch are untyped.
# mypy: disable-error-code="no-untyped-call,untyped-decorator"

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from .. import _C
from .._sharding import is_dtensor
from ..pool import Pool
from . import _sharded
from ._quantize import BLOCK_SIZES
from ._state import Moment, check_loaded, fill, make_state

STATE_DTYPES = (None, torch.float32, torch.bfloat16, "8bit")
OWN_OPTIONS = ("state_dtype", "block_size", "stochastic_rounding")  # the program's, not a checkpoint's
PLAIN = torch._C._disabled_torch_dispatch_impl
_looking = threading.RLock()
"""Held while an optimizer's lists are made: backwards of two threads may both find that there are none."""


Step: TypeAlias = _C.Step | _sharded.ShardedStep


@dataclass(frozen=True)
class Part:
    """Parameters of one group in one place."""

    group: dict[str, Any]
    lists: _C.StepList | _sharded.ShardedList
    params: list[Tensor]
    rounds: bool  # whether anything in it is bfloat16


class Kept:
    """A loaded state tensor that Optimizer.load_state_dict is not to cast to its parameter's dtype."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class FusedOptimizer(Optimizer):
    """Optimizer over a compiled step for lists of tensors."""

    def __init__(self, params: Any, defaults: dict[str, Any], pool: Pool | None) -> None:
        if pool is not None and not isinstance(pool, Pool):
            raise TypeError(f"{self._name}: expected a memkit.Pool or None, got {type(pool).__name__}")
        self._forget()
        self._pool = pool
        super().__init__(params, {**defaults, "fused": self._fused})

    # -- of the rule

    _name: str
    _all_moments: tuple[Moment, ...]
    """All that its operator takes, in that order."""
    _fused: bool | None
    """Of the groups, so that torch.optim, loading them, steps with what can use our state."""
    _looked_in = -1
    """The last backward that looked at the groups."""

    def _moments(self, group: dict[str, Any]) -> tuple[Moment, ...]:
        """Those of all that it needs."""
        raise NotImplementedError

    def _advance(self, part: Part, step: Step) -> None:
        raise NotImplementedError

    _numbers_named: tuple[str, ...] = ("lr", "weight_decay")
    """Of a group, at least 0."""
    _known_by: tuple[str, ...]
    """What the groups of a checkpoint have if it is one of this rule, and others' lack."""
    _flags_named: tuple[str, ...] = ("maximize",)

    def _check_numbers(self, group: dict[str, Any]) -> None:
        """Without waiting for a GPU: in each step, and while a graph is recorded."""
        for key in self._numbers_named:
            value = group[key]
            if not isinstance(value, (Real, Tensor)):
                got = type(value).__name__
                raise TypeError(f"{self._name}: expected {key} to be a number, got {got}")
            if isinstance(value, Tensor) and value.numel() != 1:
                raise ValueError(f"{self._name}: expected {key} of one element, got {list(value.shape)}")
            if isinstance(value, Tensor) and (value.is_meta or value.is_complex()):
                raise TypeError(
                    f"{self._name}: expected {key} with a real value, got {value.dtype} on {value.device}"
                )
        for key in self._flags_named:
            value = group[key]
            got = type(value).__name__
            if not hasattr(type(value), "__bool__"):
                raise TypeError(f"{self._name}: expected {key} to be a bool, got {got}")
            try:
                bool(value)
            except Exception as error:
                raise TypeError(f"{self._name}: expected {key} to be a bool, got {got} ({error})") from error

    def _check(self, group: dict[str, Any]) -> None:
        self._check_numbers(group)
        name = self._name
        for key in self._numbers_named:
            if not float(group[key]) >= 0:
                raise ValueError(f"{name}: expected {key} of at least 0, got {group[key]}")
        if group["state_dtype"] not in STATE_DTYPES:
            choices = "None, torch.float32, torch.bfloat16 or '8bit'"
            raise ValueError(f"{name}: expected state_dtype {choices}, got {group['state_dtype']!r}")
        if not isinstance(group["block_size"], int) or group["block_size"] not in BLOCK_SIZES:
            raise ValueError(f"{name}: expected block_size 64, 128 or 256, got {group['block_size']!r}")

    # -- groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._check({**self.defaults, **param_group})
        before = list(self.param_groups)
        super().add_param_group(param_group)
        try:
            for param in self.param_groups[-1]["params"]:
                self._check_param(param)
            if self._in_backward is not None:
                self._in_backward.watch(self.param_groups[-1]["params"])
        except BaseException:
            self.param_groups[:] = before
            raise

    def _check_param(self, param: Tensor) -> None:
        if is_dtensor(param):
            _sharded.check(self._name, param)
            with torch.no_grad():
                param = _sharded.local(param)
        if type(param).__torch_dispatch__ is not PLAIN:
            raise TypeError(
                f"{self._name}: expected plain parameters or DTensors, got {type(param).__name__}"
            )
        if not param.is_floating_point() or param.dtype.itemsize == 1:
            expected = "float32, float64, float16 or bfloat16"
            raise TypeError(f"{self._name}: expected parameters of {expected}, got {param.dtype}")

    # -- steps

    @torch.compiler.disable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step for all parameters that have a gradient. Where a gradient cannot be used, nothing is written."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        handle = self._in_backward
        if handle is not None:
            handle.settle()
            handle.clip_all()
        ready = [(part, step) for part in self._parts() if (step := part.lists.collect())]
        for part, step in ready:
            self._check_numbers(part.group)
            if len(ready) > 1:  # a single one is checked by its operator
                step.check(part.group["block_size"])
        for part, step in ready:
            self._advance(part, step)
        if handle is not None:
            handle.free_all()
        return loss

    def _step_one(self, param: Tensor) -> None:
        """A step for a parameter that has a gradient. A backward has its groups looked at once."""
        task = torch._C._current_graph_task_id()
        found = self._where.get(param) if 0 <= task == self._looked_in else None
        if found is None:
            with _looking:
                self._parts()
                self._looked_in = task
                found = self._where.get(param)
            if found is None:
                raise RuntimeError(
                    f"{self._name}: expected a gradient of its parameters, got one of {list(param.shape)} that was taken "
                    "from its groups: remove() the handle of step_in_backward first"
                )
        part, index = found
        self._advance(part, part.lists.collect_one(index))

    def _step_arrived(self, gradients: _C.Gradients) -> None:
        """A step for plain parameters whose gradients are no longer theirs."""
        if not gradients:
            return
        for part in self._parts():
            if isinstance(part.lists, _C.StepList) and (step := part.lists.collect_from(gradients)):
                self._advance(part, step)
        if gradients:
            raise RuntimeError(
                f"{self._name}: expected gradients of its parameters, got {len(gradients)} of others: "
                "were they taken from its groups?"
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """GradScaler asks: the step divides by `grad_scale` and heeds `found_inf` itself."""
        if self._in_backward is not None:
            raise RuntimeError(
                f"{self._name}: expected no GradScaler with step_in_backward, got one; gradients were used "
                "with their scale. bfloat16 autocast needs no scaler"
            )
        return True

    def _numbers(self, group: dict[str, Any]) -> tuple[float, Tensor | None]:
        lr = group["lr"]
        return (0.0, lr) if isinstance(lr, Tensor) else (lr, None)

    def _rest(self, part: Part) -> tuple[bool, int, bool, Tensor | None, Tensor | None]:
        """The last arguments of every operator."""
        scaler = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        return part.group["maximize"], part.group["block_size"], part.rounds, *scaler

    def _forget(self) -> None:
        self._made: list[Part] = []
        self._made_of: list[Any] = []
        self._options: list[tuple[Any, ...]] | None = None
        self._frozen: list[Tensor] = []
        self._where: dict[Tensor, tuple[Part, int]] = {}
        self._in_backward: Any = None

    def _parts(self) -> list[Part]:
        """The lists, made again when groups, parameters, their state or layout, or what is kept changed."""
        with _looking:
            options = [
                (self._moments(group), *(group[key] for key in OWN_OPTIONS)) for group in self.param_groups
            ]
            params = [group["params"] for group in self.param_groups]
            thawed = any(p.requires_grad or p.grad is not None for p in self._frozen)
            same = options == self._options and _C.is_made_of(self._made_of, params, self.state)
            if thawed or not same or not all(part.lists.lies_as_parameters() for part in self._made):
                self._make_parts()
                self._options, self._made_of = options, _C.made_of(params, self.state)
            return self._made

    def _lists(self, entries: Sequence[Mapping[str, Any]], moments: tuple[Moment, ...]) -> list[list[Tensor]]:
        """What the operator takes beside parameters and gradients."""
        values = [
            [entry[each.name] for entry in entries] if each in moments else [] for each in self._all_moments
        ]
        coded = [scales(entries, each) for each in self._all_moments if each.code]
        return [*values, *coded, [entry["step"] for entry in entries]]

    @torch.no_grad()
    def _make_parts(self) -> None:
        self._frozen = []
        active: list[tuple[dict[str, Any], list[Tensor]]] = []
        for group in self.param_groups:
            used = [p for p in group["params"] if p.requires_grad or p.grad is not None]
            self._frozen += [p for p in group["params"] if not p.requires_grad and p.grad is None]
            active.append((group, used))
        wanted, moved = {}, {}
        for group, used in active:
            moments = self._moments(group)
            for p in used if moments else ():
                entry = self.state.get(p, {})
                known = self._known(entry, moments)
                if not is_dtensor(p) and not all(
                    _C.lies_as(entry[name], p) for name in known if entry[name].shape == p.shape
                ):
                    # The parameter's strides are others now. What else a program keeps there stays.
                    own = {"step", *(name for each in moments for name in (each.name, each.scale))}
                    moved[p], known = entry, []
                    entry = {name: x for name, x in entry.items() if name not in own}
                if len(known) < len(moments) or "step" not in entry:
                    wanted[p] = (entry, moments, group["state_dtype"], group["block_size"])
        make_state(wanted, self._pool, self._name)
        for p, (entry, moments, _, block) in wanted.items():
            if p in moved:
                before = tuple(each for each in moments if each.name in moved[p])
                fill(p, entry, moved[p], before, block, self._name)
            self.state[p] = entry
        self._made, self._where = [], {}
        for group, used in active:
            moments = self._moments(group)
            places: dict[Any, list[Tensor]] = {}
            for p in used:
                places.setdefault(_sharded.place(p), []).append(p)
            names = [each.scale for each in moments]
            for params in places.values():
                entries = [
                    _sharded.operands(p, self.state[p], names, group["block_size"])
                    for p in (params if moments else ())
                ]
                state = self._lists(entries, moments)
                dtypes = {x.dtype for x in (*params, *(x for each in state for x in each))}
                rounds = bool(group["stochastic_rounding"]) and torch.bfloat16 in dtypes
                make = _sharded.ShardedList if is_dtensor(params[0]) else _C.StepList
                part = Part(group, make(self._name, params, state), params, rounds)
                self._made.append(part)
                self._where.update((p, (part, i)) for i, p in enumerate(params))

    def _known(self, entry: Mapping[str, Any], moments: tuple[Moment, ...]) -> list[str]:
        """Which of the moments a parameter's state has."""
        for name in (*(each.name for each in moments), "step"):
            if name in entry and not isinstance(entry[name], Tensor):
                got = type(entry[name]).__name__
                raise TypeError(f"{self._name}: expected state {name!r} to be a Tensor, got {got}")
        return [each.name for each in moments if each.name in entry]

    # -- state

    def state_dict(self) -> dict[str, Any]:
        """As torch's. What is on a GPU asks torch.optim for its fused form, whose `step` is on the device, too."""
        state: dict[str, Any] = super().state_dict()
        for packed, group in zip(state["param_groups"], self.param_groups, strict=True):
            if not any(p.is_cuda for p in group["params"]):
                packed["fused"] = None
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch. Moments are converted to this optimizer's `state_dtype`; a failed load changes nothing."""

        def keep(_: Optimizer, given: dict[str, Any]) -> dict[str, Any]:
            state = {
                key: {name: Kept(x) if isinstance(x, Tensor) else x for name, x in entry.items()}
                for key, entry in given["state"].items()
            }
            return {**given, "state": state}

        handle = self.register_load_state_dict_pre_hook(keep)  # the last to run
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        # Of their own memory: pickle would write the whole buffer for each view of it.
        kept = {
            p: {name: Kept(x.clone()) if isinstance(x, Tensor) else x for name, x in entry.items()}
            for p, entry in self.state.items()
        }
        return {**state, "state": kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        new = "_made" not in self.__dict__
        if new:  # a copy
            self._forget()
            self._pool = None
        groups = state["param_groups"]
        for group in groups:
            if missing := [key for key in self._known_by if key not in group]:
                expected, got = ", ".join(missing), ", ".join(key for key in group if key != "params")
                raise ValueError(
                    f"{self._name}: expected a state of {self._name}, whose groups have {expected}, got one with {got}"
                )
        saved_as = [group.get("state_dtype") for group in groups]
        for group, own in zip(groups, groups if new else self.param_groups, strict=True):
            defaults = state.get("defaults", self.__dict__.get("defaults", {}))
            for key, value in defaults.items():
                group.setdefault(key, value)
            group.update((key, own[key]) for key in OWN_OPTIONS)
            group["fused"] = self._fused
        wanted: dict[Tensor, Any] = {}
        loaded: dict[Tensor, Any] = {}
        for group, dtype in zip(groups, saved_as, strict=True):
            self._check(group)
            moments = self._moments(group)
            for p in group["params"]:
                values = {
                    name: x.value if isinstance(x, Kept) else x
                    for name, x in state["state"].get(p, {}).items()
                }
                # Also those that the options of now do not need: they may change back.
                had = [each for each in self._all_moments if values.get(each.name) is not None]
                if had:
                    required = [each for each in moments if not each.late]
                    has = tuple(each for each in self._all_moments if each in had or each in required)
                    check_loaded(p, values, has, dtype == "8bit", self._name)
                    wanted[p] = ({}, has, group["state_dtype"], group["block_size"])
                    loaded[p] = values
        with torch.no_grad():
            make_state(wanted, self._pool, self._name)
            for p, (entry, has, _, block) in wanted.items():
                fill(p, entry, loaded[p], has, block, self._name)
        entries: dict[Tensor, Any] = defaultdict(dict)  # as in torch
        entries.update((p, entry) for p, (entry, *_) in wanted.items())
        super().__setstate__({**state, "state": entries})
        self._made, self._where, self._made_of, self._options = [], {}, [], None  # they hold the state before

    def _all_params(self) -> Iterable[Tensor]:
        return (p for group in self.param_groups for p in group["params"])


def scales(entries: Sequence[Mapping[str, Any]], moment: Moment) -> list[Tensor]:
    """Of those in 8 bits; nothing where none is."""
    if not any(moment.scale in entry for entry in entries):
        return []
    none = entries[0]["step"].new_empty(0)
    return [entry.get(moment.scale, none) for entry in entries]

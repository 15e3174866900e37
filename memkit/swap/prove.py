"""Watches one run of the stock model for everything that would make an overwritten input or a saved output wrong.

Each activation's input and output are followed by their storage, views included, in forward and in backward: who reads
the input afterwards, who saved it, who changes the output, and what is still held at the end. Their storages stay alive
during the run, so that no address names two of them.

What is not seen: kernels that get raw pointers past PyTorch's dispatcher, and control flow that the sample does not take.
Values and gradients are therefore compared afterwards, and each call counts the references to its input.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from sys import getrefcount
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..memory._saved import SavedStorages, storages
from .layers import FUSED, Choice, keeps_output, row_shape
from .library import Twin
from .recipes import RECIPES
from .sites import ALREADY, LEAN, Decision, Decisions, LayerSite, Site, check, restriction
from .trial import Trial, explained, tensors, untouched
from .types import ALONE, FLOATS, INEXACT, KEEPS_OUTPUT, NEEDS_BIT, Proof


@dataclass(eq=False)
class Call:
    """One call of an activation."""

    site: Site | LayerSite
    references: int
    dtype: torch.dtype
    device: str
    shape: torch.Size = torch.Size()  # noqa: RUF009  never changed
    nbytes: int = 0
    input: int = 0
    """The key of its storage, as of the output's."""
    output: int = 0
    of_a_sum: bool = False
    of_a_batch_norm: bool = False
    own: dict[int, int] = field(default_factory=dict)
    """Bytes of the storages that stock's activation itself saved."""
    read: str = ""
    """Why its input may not be overwritten."""
    written: str = ""
    """Why its output may not be saved."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.alive: dict[int, torch.UntypedStorage] = {}
        self.parameters = {key: p for p in model.parameters() for key in self.keys(p)}
        self.known = dict.fromkeys(self.parameters, "its input is a parameter")
        for name, given in (("a buffer", model.buffers()), ("the model's", tensors(inputs))):
            self.known |= {key: f"its input is {name}" for tensor in given for key in self.keys(tensor)}
        self.calls: dict[Site | LayerSite, list[Call]] = {}
        self.nodes: dict[Site | LayerSite, set[Any]] = {}
        self.saved_elsewhere: set[int] = set()
        self.inputs: dict[int, list[Call]] = {}
        self.outputs: dict[int, list[Call]] = {}
        self.current: Call | None = None
        self.backups: dict[int, Tensor] = {}

    def keys(self, tensor: Tensor) -> list[int]:
        found = list(storages(tensor))
        self.alive.update((storage._cdata, storage) for storage in found)
        return [storage._cdata for storage in found]

    def begin(self, site: Site | LayerSite, input: Tensor, references: int) -> Call:
        self.current = call = Call(site, references, input.dtype, input.device.type)
        if _is_block(site):
            self.saved_elsewhere.update(self.keys(input))  # memkit keeps it too
        made_by = type(input.grad_fn).__name__
        call.of_a_sum, call.of_a_batch_norm = made_by == "AddBackward0", "BatchNorm" in made_by
        self.calls.setdefault(site, []).append(call)
        if isinstance(site, LayerSite):  # never in place
            return call
        for key in self.keys(input):
            call.read = call.read or self.known.get(key, "")
            for earlier in self.inputs.get(key, ()):
                earlier.read = earlier.read or "its input goes through an activation again"
        return call

    def end(self, call: Call, input: Tensor, output: Tensor) -> None:
        self.nodes.setdefault(call.site, set()).add(output.grad_fn)
        inputs, outputs = self.keys(input), self.keys(output)
        if len(inputs) != 1 or len(outputs) != 1:
            call.read = call.written = "its input is not a dense tensor"
            return
        call.shape, call.nbytes = output.shape, output.nbytes
        call.input, call.output = inputs[0], outputs[0]
        self.outputs.setdefault(call.output, []).append(call)
        if call.input != call.output and isinstance(call.site, Site):
            self.inputs.setdefault(call.input, []).append(call)

    def saved(self, tensor: Tensor) -> None:
        """A tensor is saved for backward."""
        for key in self.keys(tensor):
            if self.current is not None and key in self.parameters and _is_block(self.current.site):
                continue  # its weights
            if self.current is None:
                self.saved_elsewhere.add(key)
            else:
                self.current.own[key] = self.alive[key].nbytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "is_view", False):
            return func(*args, **kwargs)  # no read, and what it returns has the same storage
        # Backward reads the inputs for the activations themselves. Where it records gradients, it recomputes a forward.
        node = None if torch.is_grad_enabled() else torch._C._current_autograd_node()
        changed = {s._cdata for t in tensors(_written(func, args, kwargs)) for s in storages(t)}
        for tensor in tensors((args, kwargs)):
            for storage in storages(tensor):
                self.look(storage._cdata, str(func), storage._cdata in changed, node)
        return func(*args, **kwargs)

    def look(self, key: int, op: str, changes: bool, node: Any) -> None:
        for call in self.inputs.get(key, ()):
            if node is None or node not in self.nodes[call.site]:
                call.read = call.read or f"its input is read again by {op}"
        if not changes:
            return
        for call in self.outputs.get(key, ()):
            call.written = call.written or f"its output is changed in place by {op}"
        if key in self.parameters and key not in self.backups:
            self.backups[key] = self.parameters[key].detach().clone()

    def restore_parameters(self) -> None:
        with torch.no_grad():
            for key, value in self.backups.items():
                self.parameters[key].copy_(value)


class Saves(SavedStorages):
    """Tells a watch of each tensor that is saved."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def _note(self, tensor: Tensor) -> None:
        self._watch.saved(tensor)


def prove(
    trial: Trial, sites: Sequence[Site | LayerSite], exact: bool, lean: bool
) -> tuple[Decisions, set[torch.dtype]]:
    """What becomes of each site, and the dtypes that they were called with."""
    refusals = {site: check(site, lean) for site in sites}
    watched = [site for site in sites if not refusals[site]]
    with untouched(trial.model), explained("watched"):
        inputs = trial.fresh()
        watch = Watch(trial.model, inputs)
        try:
            for site in watched:
                _observe(site, watch)
            with watch, Saves(watch).hooks():
                outputs = [trial.step(inputs)]
            _look_for_holders(watch, outputs)
        finally:
            watch.restore_parameters()
            for site in watched:
                del vars(site.module)[site.method if isinstance(site, LayerSite) else "forward"]
    decisions: Decisions = {site: Decision(None, reason) for site, reason in refusals.items()}
    for site in watched:
        if isinstance(site, LayerSite):
            decisions[site] = _decide_layer(site, watch, exact)
        else:
            decisions[site] = _decide(site, watch, exact)
            calls = watch.calls.get(site, [])
            before = decisions[site].bytes_before
            if lean and _gains_from_lean(site, decisions[site], calls):
                decisions[site] = Decision(LEAN, decisions[site].reason, before, before)
            elif site.overwrites and check(site) == ALREADY:
                decisions[site] = Decision(
                    None, ALREADY if calls else "not called on the sample", before, before
                )
    return decisions, {call.dtype for calls in watch.calls.values() for call in calls}


def _observe(site: Site | LayerSite, watch: Watch) -> None:
    method = site.method if isinstance(site, LayerSite) else "forward"
    stock: Any = getattr(type(site.module), method)

    def forward(self: nn.Module, input: Any) -> Tensor:
        references = getrefcount(input) - ALONE  # as in Swapped.forward
        outer = watch.current
        first: Tensor = tensors(input)[0]  # a block may be given several
        call = watch.begin(site, first, references)
        try:
            output: Tensor = stock(self, input)
        finally:
            watch.current = outer
        watch.end(call, first, output)
        return output

    vars(site.module)[method] = MethodType(forward, site.module)
    if site.layer is not None:
        vars(site.layer)[RECIPES[type(site.layer)].attribute] = site.module


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operator writes to, as its schema says."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    return [given.get(argument.name) for argument in schema.arguments if argument.is_write]


def _look_for_holders(watch: Watch, outputs: list[Any]) -> None:
    """Who can reach an activation's input after the step, apart from autograd? Empties `outputs`."""
    for key in {storage._cdata for tensor in tensors(outputs) for storage in storages(tensor)}:
        for call in watch.inputs.get(key, ()):
            call.read = call.read or "the model returns its input"
        for call in watch.outputs.get(key, ()):
            call.written = call.written or "the model returns its output"
    outputs.clear()  # and with them the graph, where backward has not run
    watch.nodes.clear()
    gc.collect()
    for key, calls in watch.inputs.items():
        if torch._C._storage_Use_Count(key) > 1:  # one for `alive`
            for call in calls:
                call.read = call.read or "its input is still held after the step"


def _decide(site: Site, watch: Watch, exact: bool) -> Decision:
    calls = watch.calls.get(site, [])
    if not calls:
        return Decision(None, "not called on the sample")
    if watch.backups:
        return Decision(None, "the forward changes a parameter")
    before, after = _bytes(calls, watch, site.dtypes(exact))
    if site.feeds_convolution:  # which keeps its input no longer
        before += sum(
            {call.output: call.nbytes for call in calls if call.output in watch.saved_elsewhere}.values()
        )
    if site.fused:
        return Decision(FUSED, "", before, 0)
    dtypes = site.dtypes(exact) or FLOATS
    refused = [call.dtype for call in calls if call.dtype not in dtypes]
    if len(refused) == len(calls):
        return Decision(None, _why_not(site, refused[0]), before, before)
    written = next((call.written for call in calls if call.written), "")
    if written and site.name not in KEEPS_OUTPUT:
        return Decision(None, written, before, before)
    read = next((call.read for call in calls if call.read), "")
    if after > before:
        reasons = [read, "what follows does not keep its output: nothing to save"]
        return Decision(None, "; ".join(filter(None, reasons)), before, before)
    if after == before and read and not site.overwrites:
        return Decision(None, f"{read}; out of place nothing is saved", before, before)
    proof = Proof(
        inplace=True if site.overwrites else False if read else "auto",
        holders=min(call.references for call in calls),
        hooked=bool(site.module._forward_hooks),
        dtypes=site.dtypes(exact),
    )
    reasons = [f"not in place: {read}" if read and not site.overwrites else "", restriction(site, exact)]
    return Decision(proof, "; ".join(filter(None, reasons)), before, after)


def _decide_layer(site: LayerSite, watch: Watch, exact: bool) -> Decision:
    calls = watch.calls.get(site, [])
    if not calls:
        return Decision(None, "not called on the sample")
    before = _own(calls, watch)
    if not any(call.dtype in FLOATS for call in calls):
        return Decision(None, f"called on {calls[0].dtype}", before, before)
    if _is_block(site):
        after = sum(
            call.dtype.itemsize * site.twin.kept(site.module, call.shape) for call in calls if call.own
        )
        return Decision(site.choice, "", before, after)
    if not site.is_norm:
        return Decision(site.choice, "", before, 8 * sum(bool(call.own) for call in calls))
    if exact and torch.is_autocast_enabled(calls[0].device):
        reason = "its result is float32 under autocast: exact=False allows autocast's dtype"
        return Decision(None, reason, before, before)
    written = next((call.written for call in calls if call.written), "")
    choice = Choice(
        "auto" if site.may_keep_output and not written else "input", bool(site.module._forward_hooks), exact
    )
    reason = f"keeps its input: {written}" if site.may_keep_output and written else ""
    kept: dict[int, int] = {}
    statistics = 0
    for call in calls:
        if call.own:
            from_output = choice.save == "auto" and keeps_output(site.twin, site.module, call.dtype)
            kept[call.output if from_output else call.input] = call.nbytes
            statistics += _statistics(site, call, from_output)
    return Decision(choice, reason, before, _beyond(kept, watch) + statistics)


def _statistics(site: LayerSite, call: Call, from_output: bool) -> int:
    """Bytes beside the tensor: a number a row, or two where the mean is needed as well; two of float64 a group."""
    module: Any = site.module
    if site.name == "group_norm":
        return 16 * call.shape[0] * int(module.num_groups)
    rows: int = call.shape.numel() // max(1, math.prod(row_shape(module)))
    return (
        (2 if site.name == "layer_norm" and not from_output else 1)
        * rows
        * (8 if call.dtype == torch.float64 else 4)
    )


def _is_block(site: Site | LayerSite) -> bool:
    """Several layers that a recipe took over together."""
    return isinstance(site, LayerSite) and issubclass(site.twin, Twin) and not site.is_norm


def _own(calls: list[Call], watch: Watch) -> int:
    kept: dict[int, int] = {}
    for call in calls:
        kept |= call.own
    return _beyond(kept, watch)


def _beyond(kept: dict[int, int], watch: Watch) -> int:
    """Of these storages, by key, the bytes of those that nothing else keeps."""
    return sum(size for key, size in kept.items() if key not in watch.saved_elsewhere)


def _gains_from_lean(site: Site, decision: Decision, calls: list[Call]) -> bool:
    """Called, and either not proven, or given a sum or a batch norm's result, which may be rebuilt as well.

    One that overwrites its input: where that is a batch norm's result, which is rebuilt only if nobody changes it.
    """
    if site.overwrites:
        return any(call.of_a_batch_norm for call in calls)
    rebuilt = all(call.of_a_sum or call.of_a_batch_norm for call in calls)
    return bool(calls) and (decision.proof is None or (rebuilt and decision.proof is not FUSED))


def _why_not(site: Site, dtype: torch.dtype) -> str:
    if dtype not in FLOATS:
        return f"called on {dtype}"
    if site.name not in INEXACT or site.name == "softplus":
        return f"stock in {dtype}"
    error = INEXACT[site.name][dtype == torch.bfloat16]
    return f"its slope from the output may be off by {error:g} in {dtype}: exact=False allows it"


def _bytes(calls: list[Call], watch: Watch, dtypes: frozenset[torch.dtype] | None) -> tuple[int, int]:
    """What these calls keep that nothing else keeps, as stock and swapped."""
    stock: dict[int, int] = {}
    swapped: dict[int, int] = {}
    bits = 0
    for call in calls:
        stock |= call.own
        if call.dtype not in (dtypes or FLOATS):
            swapped |= call.own
        elif call.own:
            swapped[call.output] = call.nbytes
            bits += -(-call.shape.numel() // 8) if call.site.name in NEEDS_BIT else 0
    return _beyond(stock, watch), _beyond(swapped, watch) + bits

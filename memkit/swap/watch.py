"""Watches one run of the stock model for everything that would make an overwritten input or a saved output wrong.

Each activation's input and output are followed by their storage, views included, in forward and in backward: who reads
the input afterwards, who saved it, who changes the output, and what is still held at the end. Their storages stay alive
during the run, so that no address names two of them.

What a run does not show, the code of those who hold an input says (frames.py): what reads it past PyTorch's dispatcher,
and on paths that the sample does not take. Values and gradients are compared afterwards all the same, and each call counts
the references to its input.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from sys import _getframe, getrefcount
from types import FrameType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .._hooks import was_read
from ..functional._norm import output_dtype
from ..memory._saved import SavedStorages, storages
from .frames import Frames
from .later import reads_parameter
from .recipes import RECIPES
from .sites import AnySite, LayerSite, Site
from .trial import Trial, explained, outputs_of, tensors
from .types import ALONE, Place, calling, place
from .untouched import Held, keep_memory, untouched


@dataclass(eq=False)
class Call:
    """One call of an activation."""

    site: AnySite
    references: int
    callers: tuple[Place, ...]
    dtype: torch.dtype
    device: str
    shape: torch.Size = torch.Size()  # noqa: RUF009  never changed
    nbytes: int = 0
    input: int = 0
    """The key of its storage, as of the output's."""
    output: int = 0
    of_a_sum: bool = False
    """Of two results that may become memkit's, so that it can be made again."""
    of_a_norm: bool = False
    """That becomes memkit's, so that its result can be made again, or is what the norm keeps."""
    behind_norm: bool = False
    """Of any norm."""
    norms: set[nn.Module] = field(default_factory=set)
    """Those norms whose result, or the sum of whose results, its input is."""
    own: dict[int, int] = field(default_factory=dict)
    """Bytes of the storages that stock's activation itself saved."""
    read: str = ""
    """Why its input may not be overwritten."""
    shown: str = ""
    """The same: what may read it past PyTorch's dispatcher."""
    later: str = ""
    """The same where something holds it: what may read it so, or on a path that the sample does not take."""
    written: str = ""
    """Why its output may not be saved."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    supports_higher_order_operators = True

    def __init__(self, model: nn.Module, inputs: Any, exact: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.exact = exact
        self.alive: dict[int, torch.UntypedStorage] = {}
        self.parameters: dict[int, list[nn.Parameter]] = {}
        for parameter in model.parameters():
            for key in self.keys(parameter):
                self.parameters.setdefault(key, []).append(parameter)
        self.known = dict.fromkeys(self.parameters, "its input is a parameter")
        for name, given in (("a buffer", model.buffers()), ("the model's", tensors(inputs))):
            self.known |= {key: f"its input is {name}" for tensor in given for key in self.keys(tensor)}
        self.calls: dict[AnySite, list[Call]] = {}
        self.nodes: dict[AnySite, set[Any]] = {}
        self.made_again: dict[Any, nn.Module] = {}  # by their nodes, norms whose results can be
        self.norms: set[nn.Module] = set()  # the same
        self.wanted: set[nn.Module] = set()  # those whose results somebody keeps
        self.rebuilt: set[int] = set()  # results of activations that will be made again, by key
        self.saved_elsewhere: set[int] = set()
        self.kept_elsewhere: set[int] = set()  # the same of the swapped model
        self.inputs: dict[int, list[Call]] = {}
        self.outputs: dict[int, list[Call]] = {}
        self.current: Call | None = None
        self.frames = Frames()
        self.backups: dict[nn.Parameter, Tensor] = {}
        self.held = {key for tensor in Held(model).tensors for key in self.keys_of_any(tensor)} - {
            *self.known
        }
        self.memory: dict[int, torch.UntypedStorage] = {}  # what of that is written to
        self.before = ExitStack()  # puts it back

    def keys(self, tensor: Tensor) -> list[int]:
        found = list(storages(tensor))
        self.alive.update((storage._cdata, storage) for storage in found)
        return [storage._cdata for storage in found]

    def keys_of_any(self, tensor: Tensor) -> list[int]:
        """None of a tensor whose class does not let its memory be seen."""
        try:
            return self.keys(tensor)
        except Exception:
            return []

    def begin(self, site: AnySite, input: Tensor, references: int, caller: FrameType | None) -> Call:
        self.current = call = Call(site, references, (), input.dtype, input.device.type)
        if site.is_block:
            self.saved_elsewhere.update(self.keys(input))  # memkit keeps it too
            self.wanted |= self.norms_before(input)
        node = _made_by(input)
        call.of_a_sum = _is_sum(node) and all(self.is_of_a_site(before) for before, _ in node.next_functions)
        call.of_a_norm = node in self.made_again or self.is_of_rows(input)
        call.behind_norm = call.of_a_norm or "Norm" in type(node).__name__
        call.norms = self.norms_before(input)
        self.calls.setdefault(site, []).append(call)
        if isinstance(site, LayerSite):  # never in place
            return call
        holders = self.frames.look(caller, input, references)
        call.references -= holders.own
        call.callers = tuple(map(place, holders.frames))
        call.later = holders.reason
        call.shown = holders.reason if holders.uncounted else ""
        if any(
            reads_parameter(hook, 1) for hook in site.module._forward_hooks.values() if not was_read(hook)
        ):
            call.shown = call.shown or "a forward hook may read its input"
        for key in self.keys(input):
            call.read = call.read or self.known.get(key, "")
            for earlier in self.inputs.get(key, ()):
                earlier.read = earlier.read or "its input goes through an activation again"
        return call

    def end(self, call: Call, input: Tensor, output: Tensor) -> None:
        self.nodes.setdefault(call.site, set()).add(output.grad_fn)
        stays = self.exact and torch.is_autocast_enabled(input.device.type)
        if isinstance(call.site, LayerSite) and call.site.is_of_channels and not stays:
            self.normalized(call.site.module, output)
        inputs, outputs = self.keys(input), self.keys(output)
        if len(inputs) != 1 or len(outputs) != 1:
            call.read = call.written = "its input is not a dense tensor"
            return
        call.shape, call.nbytes = output.shape, output.nbytes
        call.input, call.output = inputs[0], outputs[0]
        self.outputs.setdefault(call.output, []).append(call)
        if call.input != call.output and isinstance(call.site, Site):
            self.inputs.setdefault(call.input, []).append(call)

    def normalized(self, norm: nn.Module, output: Tensor) -> None:
        """What a norm of channels returned that becomes memkit's; what else runs with it may have made it last."""
        node = _made_by(output)
        if "BatchNorm" in type(node).__name__ or "GroupNorm" in type(node).__name__:
            self.made_again[node] = norm
            self.norms.add(norm)

    def is_of_rows(self, tensor: Tensor) -> bool:
        """Whether a norm over rows that becomes memkit's returned it, or what it is a view of."""
        made = (call for key in self.keys(tensor) for call in self.outputs.get(key, ()))
        sites = [call.site for call in made if isinstance(call.site, LayerSite) and call.site.may_keep_output]
        return bool(sites) and not (self.exact and torch.is_autocast_enabled(tensor.device.type))

    def is_of_a_site(self, node: Any) -> bool:
        return node in self.made_again or any(node in made for made in self.nodes.values())

    def norms_before(self, tensor: Tensor) -> set[nn.Module]:
        """Those that are called again when the tensor is made again: it is their result, or the sum of two."""
        node = _made_by(tensor)
        nodes = [before for before, _ in node.next_functions] if _is_sum(node) else [node]
        return {self.made_again[each] for each in nodes if each in self.made_again}

    def saved(self, tensor: Tensor) -> None:
        """A tensor is saved for backward."""
        self.wanted |= self.norms_before(tensor)
        for key in self.keys(tensor):
            if self.current is not None and key in self.parameters and self.current.site.is_block:
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
        if key in self.held and key not in self.memory:
            self.memory[key] = self.alive[key]
            keep_memory(self.before, self.alive[key])
        for call in self.outputs.get(key, ()):
            call.written = call.written or f"its output is changed in place by {op}"
        for parameter in self.parameters.get(key, ()):
            if parameter not in self.backups:
                self.backups[parameter] = parameter.detach().clone()

    def restore_parameters(self) -> None:
        with torch.no_grad():
            for parameter, value in self.backups.items():
                parameter.copy_(value)


class Saves(SavedStorages):
    """Tells a watch of each tensor that is saved."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def _note(self, tensor: Tensor) -> None:
        self._watch.saved(tensor)

    def _begin(self) -> None:
        """What was saved has been told."""


def watched(trial: Trial, sites: Sequence[AnySite], norms: Sequence[nn.Module], exact: bool) -> Watch:
    """Runs the stock model once, which afterwards is as it was. ``norms``: what becomes memkit's and is no site."""
    with untouched(trial.model), explained("stock, watched"):
        inputs = trial.fresh()
        watch = Watch(trial.model, inputs, exact)
        try:
            for site in sites:
                _observe(site, watch)
            for norm in norms:
                _observe_norm(norm, watch)
            with watch, Saves(watch).hooks(), _uncompiled():
                outputs = [trial.step(inputs)]
            _look_for_holders(watch, outputs)
        finally:
            trial.written.update(watch.backups)
            trial.memory.update(watch.memory)
            watch.before.close()
            watch.restore_parameters()
            for site in sites:
                del vars(site.module)[site.method]
            for norm in norms:
                del vars(norm)["forward"]
    return watch


@contextmanager
def _uncompiled() -> Iterator[None]:
    """Under a mode nothing is compiled, and what says that it has to be would raise; flex_attention warns."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        yield


def _observe(site: AnySite, watch: Watch) -> None:
    stock: Any = getattr(type(site.module), site.method)

    @functools.wraps(stock)  # transformers' apply_chunking_to_forward counts a method's parameters
    def forward(self: nn.Module, input: Any = None, *others: Any, **named: Any) -> Tensor:
        # As in Swapped.forward. A block may be given its input by another name.
        references = 0 if input is None else getrefcount(input) - ALONE
        given = () if input is None else (input, *others)
        outer = watch.current
        first: Tensor = tensors((given, named))[0]  # a block may be given several
        call = watch.begin(site, first, references, calling(_getframe(1)))
        try:
            output: Tensor = stock(self, *given, **named)
        finally:
            watch.current = outer
        watch.end(call, first, output)
        return output

    vars(site.module)[site.method] = MethodType(forward, site.module)
    if site.layer is not None:
        vars(site.layer)[RECIPES[type(site.layer)].attribute] = site.module


def _observe_norm(norm: Any, watch: Watch) -> None:
    stock: Any = type(norm).forward

    def forward(self: nn.Module, input: Tensor) -> Tensor:
        output: Tensor = stock(self, input)
        if output_dtype(input) == input.dtype:
            watch.normalized(self, output)
        return output

    vars(norm)["forward"] = MethodType(forward, norm)


def _made_by(tensor: Tensor) -> Any:
    """The node that it comes from, past views: an instance norm's result is one of a batch norm's."""
    made: Any = tensor._base if tensor._is_view() else tensor
    node: Any = made.grad_fn
    while node is not None and "View" in type(node).__name__:
        node = node.next_functions[0][0]
    return node


def _is_sum(node: Any) -> bool:
    return type(node).__name__ == "AddBackward0"


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that an operator writes to, as its schema says."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    if func in _BATCH_NORMS and args[5]:
        return list(args[3:5])
    if not schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
    return [given.get(argument.name) for argument in schema.arguments if argument.is_write]


_BATCH_NORMS = {torch.ops.aten.native_batch_norm.default, torch.ops.aten.cudnn_batch_norm.default}
"""Their schemas do not say that they write to running statistics."""


def _look_for_holders(watch: Watch, outputs: list[Any]) -> None:
    """Who can reach an activation's input after the step, apart from autograd? Empties `outputs`."""
    returned, opaque = outputs_of(outputs)
    for key in {key for tensor in returned for key in watch.keys_of_any(tensor)}:
        for call in watch.inputs.get(key, ()):
            call.read = call.read or "the model returns its input"
        for call in watch.outputs.get(key, ()):
            call.written = call.written or "the model returns its output"
    for call in (call for calls in watch.calls.values() for call in calls if opaque):
        call.read = call.read or f"the model returns a {opaque}, which may hold its input"
    returned.clear()
    outputs.clear()  # and with them the graph, where backward has not run
    watch.nodes.clear()
    watch.made_again.clear()
    gc.collect()
    for key, calls in watch.inputs.items():
        if torch._C._storage_Use_Count(key) > 1:  # one for `alive`
            for call in calls:
                call.read = call.read or "its input is still held after the step"

"""Calls that backward makes again: activation checkpointing (Chen et al., "Training deep nets with sublinear memory cost",
2016) by saved-tensor hooks, as `torch.utils.checkpoint` does it without reentrance, but for calls of a few operators, which
that takes several times as long as they do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from threading import RLock
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ..._C import SavedTensor
from ..._modes import in_forward_mode
from .twin import itself


def checkpointed(
    function: Callable[..., Any], *given: Any, reads: Iterable[Tensor] = (), rng: bool = True, **named: Any
) -> Any:
    """A call that backward makes again, in the same autocast and on the same default device, and, where ``rng`` says that
    it may draw random numbers, with the same. Its tensors and those that it ``reads`` besides are saved as autograd saves
    one: changed in between, they raise."""
    if is_compiling() or in_forward_mode() or not torch.is_grad_enabled():
        return function(*given, **named)
    reads = list(reads)
    devices = {x.device for x in _tensors((*given, *named.values(), *reads)) if x.is_cuda}
    if rng and devices and torch.cuda.is_current_stream_capturing():  # there is nothing to draw again from
        return function(*given, **named)
    call = _Call(function, given, named, reads, _Setting(devices, rng))
    with saved_tensors_hooks(call.pack, call.unpack):
        return function(*given, **named)


def generators(devices: Iterable[torch.device]) -> list[torch.Generator]:
    """Which calls on the CPU and such CUDA devices draw from."""
    return [torch.default_generator, *(torch.cuda.default_generators[each.index] for each in devices)]


DIFFERS = "memkit.lean: expected a call made again in backward to do what it did in forward, got another one:"


class _Stop(BaseException):
    """All that was saved is made."""


class _Saved:
    """What stands for a saved tensor; has the tensor from when a backward makes it again until that asks for it."""

    __slots__ = "__weakref__", "dtype", "shape", "task", "tensor"

    def __init__(self, x: Tensor) -> None:
        self.shape, self.dtype = x.shape, x.dtype
        self.tensor: Tensor | None = None
        self.task = -1


class _Call:
    """One, and what was saved in it."""

    def __init__(
        self,
        function: Callable[..., Any],
        given: tuple[Any, ...],
        named: dict[str, Any],
        reads: list[Tensor],
        setting: _Setting,
    ) -> None:
        self._function, self._setting = function, setting
        self._given = [_held(x) for x in given]
        self._named = {name: _held(x) for name, x in named.items()}
        self._reads = [_held(x) for x in reads]
        parameters = (x for x in (*given, *named.values(), *reads) if isinstance(x, nn.Parameter))
        self._trained = [(x, x.requires_grad) for x in parameters]
        self._saved: list[ref[_Saved]] = []
        self._lock = RLock()  # other threads run backward on other devices

    def pack(self, x: Tensor) -> _Saved:
        saved = _Saved(x)
        self._saved.append(ref(saved))
        return saved

    def unpack(self, saved: _Saved) -> Tensor:
        task = torch._C._current_graph_task_id()
        with self._lock:
            # What another backward has left may be of arguments that were changed since: those are looked at again.
            if saved.tensor is None or saved.task != task or task == -1:
                self._make(task)
            tensor, saved.tensor = saved.tensor, None
        if tensor is None:
            raise RuntimeError(f"{DIFFERS} fewer tensors were saved")
        return tensor

    def _make(self, task: int) -> None:
        given = [_given(x) for x in self._given]
        named = {name: _given(x) for name, x in self._named.items()}
        for x in self._reads:
            _given(x)
        places, last = iter(self._saved), self._saved[-1]

        def keep(x: Tensor) -> Tensor:
            if (place := next(places, None)) is None:
                raise RuntimeError(f"{DIFFERS} more tensors were saved")
            x = x.detach() if x.requires_grad else x  # the graph of what is returned would hold itself
            if (saved := place()) is not None:
                if (saved.shape, saved.dtype) != (x.shape, x.dtype):
                    was, now = (f"{list(each.shape)} of {each.dtype}" for each in (saved, x))
                    raise RuntimeError(f"{DIFFERS} a tensor was saved as {was}, is now {now}")
                saved.tensor, saved.task = x, task
            if place is last:
                raise _Stop
            return x

        def call() -> None:
            with suppress(_Stop), torch.enable_grad(), saved_tensors_hooks(keep, itself):
                self._function(*given, **named)

        with _as_trained(self._trained):
            self._setting.run(call)


@contextmanager
def _as_trained(parameters: list[tuple[nn.Parameter, bool]]) -> Iterator[None]:
    """With what asked for gradients in forward, by which autograd saves: they may be frozen by now, or no longer."""
    changed = [(x, was) for x, was in parameters if x.requires_grad != was]
    for x, was in changed:
        x.requires_grad_(was)
    try:
        yield
    finally:
        for x, was in changed:
            x.requires_grad_(not was)


def _tensors(given: Iterable[Any]) -> list[Tensor]:
    return [x for x in given if isinstance(x, Tensor)]


def _held(x: Any) -> Any:
    return SavedTensor(x) if isinstance(x, Tensor) else x


def _given(x: Any) -> Any:
    return x.tensor() if isinstance(x, SavedTensor) else x


class _Setting:
    """What a call goes by beside what it is given, as it is now."""

    def __init__(self, devices: Collection[torch.device], rng: bool) -> None:
        self._kinds = ("cpu", "cuda") if devices else ("cpu",)
        self._modes = _modes(self._kinds)
        self._states = _states(generators(devices)) if rng else []

    def run(self, call: Callable[[], None]) -> None:
        now = _states(generator for generator, _ in self._states)
        _draw_from(self._states)
        try:
            with nullcontext() if _modes(self._kinds) == self._modes else self._entered():
                call()
        finally:
            _draw_from(now)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        device, caches, casts = self._modes
        with ExitStack() as stack:
            stack.enter_context(torch.device("cpu" if device is None else device))
            for kind, (enabled, dtype) in zip(self._kinds, casts, strict=True):
                stack.enter_context(torch.autocast(kind, dtype, enabled, caches))
            yield


def _modes(kinds: tuple[str, ...]) -> tuple[torch.device | None, bool, list[tuple[bool, torch.dtype]]]:
    device = None
    if torch._C._len_torch_function_stack():
        modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        device = next((mode.device for mode in reversed(modes) if isinstance(mode, DeviceContext)), None)
    casts = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
    return device, torch.is_autocast_cache_enabled(), casts


def _states(of: Iterable[torch.Generator]) -> list[tuple[torch.Generator, Tensor]]:
    return [(each, each.get_state()) for each in of]


def _draw_from(states: list[tuple[torch.Generator, Tensor]]) -> None:
    for generator, state in states:
        generator.set_state(state)

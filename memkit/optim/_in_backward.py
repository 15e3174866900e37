"""Steps inside of backward: a gradient is used and freed before the next ones are made."""

# Parts of torch are untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import _C
from .._sharding import is_dtensor
from ..functional._shared import check_number
from ._base import FusedOptimizer
from ._sharded import gradient

# Of gradients that wait for each other on a GPU, where a step is one launch for many of them.
WAITING_BYTES = 32 << 20

STEP, ALONE = _C.Arrivals.STEP, _C.Arrivals.ALONE


class _Hook:
    """Of a parameter, which it does not keep alive: what holds a parameter's hooks is hidden from the garbage collector, and
    an optimizer holds its parameters."""

    def __init__(self, take: Callable[[Tensor], None]) -> None:
        self.take = weakref.WeakMethod(take)
        self.handle: Any = None

    def __call__(self, param: Tensor) -> None:
        take = self.take()
        if take is not None:
            take(param)
        else:
            self.handle.remove()
            warnings.warn(
                "step_in_backward: the optimizer was freed, so that gradients stay with their parameters from now on; "
                "keep it as long as backward is to step",
                stacklevel=2,
            )


class StepInBackward:
    """What :func:`step_in_backward` returns."""

    def __init__(self, optimizer: FusedOptimizer, max_norm: float | None, clip_value: float | None) -> None:
        self._optimizer = optimizer
        self._max_norm, self._clip_value = max_norm, clip_value
        self._deferred = 0
        self._sums: set[Tensor] = set()
        """Parameters whose gradients accumulate() has added up."""
        self._ends = -1
        """The last backward that steps them at its end, if it has not before."""
        self._arrivals = _C.Arrivals(WAITING_BYTES)
        self._handles: list[Any] = []
        self.watch(optimizer._all_params())
        optimizer._in_backward = self

    def watch(self, params: Iterable[Tensor]) -> None:
        """Also those that are frozen: they may thaw."""
        watched = list(params)
        for param in watched:
            if any(map(_steps, (param._post_accumulate_grad_hooks or {}).values())):
                raise RuntimeError(
                    "step_in_backward: expected parameters that no other optimizer steps in backward, got one of "
                    f"{list(param.shape)}: remove() that optimizer's handle first"
                )
        for param in watched:
            hook = _Hook(self._clip_and_take if self._clips else self._take)
            frozen = not param.requires_grad
            param.requires_grad_()  # what is frozen takes no hook
            try:
                hook.handle = param.register_post_accumulate_grad_hook(hook)
            finally:
                if frozen:
                    param.requires_grad_(False)
            self._handles.append(hook.handle)

    @property
    def _clips(self) -> bool:
        return self._clip_value is not None or self._max_norm is not None

    def _take(self, param: Tensor) -> None:
        if self._deferred:
            self._sums.add(param)
            return
        if self._sums:
            self._step_sums_at_end()
        then = self._arrivals.take(param)
        if then:
            try:
                self._go_on(param, then)
            finally:
                param.grad = None

    def _go_on(self, param: Tensor, then: int) -> None:
        if then == ALONE:
            self._optimizer._step_one(param)
        elif then == STEP:
            self._optimizer._step_arrived(self._arrivals.give(param.device))
        else:
            device = param.device
            self._settle(device)  # a backward that raised, or another one around this one
            self._arrivals.begin(device)
            torch.autograd.Variable._execution_engine.queue_callback(lambda: self._settle(device))
            self._take(param)

    def _clip_and_take(self, param: Tensor) -> None:
        if self._deferred or param.grad is None:  # a hook before this one may have used and freed it
            self._take(param)
            return
        _C.check_arrived(param)
        try:
            self._clip(param)
            self._take(param)
        finally:
            param.grad = None

    def _clip(self, param: Tensor) -> None:
        """Its gradient, by itself."""
        if self._clips and is_dtensor(param):
            with torch.no_grad():
                gradient(self._optimizer._name, param)  # whole sums are clipped
        if self._clip_value is not None:
            torch.nn.utils.clip_grad_value_([param], self._clip_value)
        if self._max_norm is not None:
            torch.nn.utils.clip_grad_norm_([param], self._max_norm)

    def _step_sums_at_end(self) -> None:
        """Those that do not arrive in this backward: it reaches other parameters than the ones before."""
        task = torch._C._current_graph_task_id()
        if task not in (-1, self._ends):
            self._ends = task
            torch.autograd.Variable._execution_engine.queue_callback(self._step_sums)

    def _step_sums(self) -> None:
        node: Any = torch._C._current_autograd_node()
        if node is not None:  # a backward inside of a node of another one, where they may arrive yet

            def go_on_outside(*_: object) -> None:
                handle.remove()
                self._step_sums_at_end()

            handle = node.register_hook(go_on_outside)
            return
        for param in [p for p in self._optimizer._all_params() if p in self._sums]:
            self._sums.discard(param)
            if param.grad is None:
                continue
            try:
                self._clip(param)
                self._optimizer._step_one(param)
            finally:
                param.grad = None
        self._sums.clear()  # of parameters that were taken from its groups

    def _settle(self, device: torch.device) -> None:
        self._optimizer._step_arrived(self._arrivals.end(device))

    def settle(self) -> None:
        """Steps what a backward that raised has left."""
        for device in self._arrivals.devices():
            self._settle(device)

    def clip_all(self) -> None:
        """What step() is about to use."""
        if self._clips:
            for param in self._optimizer._all_params():
                if param.grad is not None:
                    self._clip(param)

    def free_all(self) -> None:
        """What step() has used."""
        self._sums.clear()
        for param in self._optimizer._all_params():
            param.grad = None

    @contextmanager
    def accumulate(self) -> Iterator[None]:
        """`with handle.accumulate():` backward adds gradients up and keeps them; the next one outside uses the sums, and
        steps also the parameters that it does not reach itself. `optimizer.step()` uses them, too."""
        self._deferred += 1
        try:
            yield
        finally:
            self._deferred -= 1

    def remove(self) -> None:
        """Back to `optimizer.step()`."""
        self.settle()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._optimizer._in_backward is self:
            self._optimizer._in_backward = None


def _steps(hook: Any) -> bool:
    return isinstance(hook, _Hook) and hook.take() is not None


def step_in_backward(
    optimizer: FusedOptimizer, *, max_norm: float | None = None, clip_value: float | None = None
) -> StepInBackward:
    """Makes backward step each parameter of `optimizer` as soon as its gradient is complete, and free the gradient.

    Gradients then take the memory of the largest one, not of all. On a GPU, where a step for many costs what one for a
    single parameter does, they wait for each other up to 32 MiB more, and to the end of backward at most.
    `optimizer.step()` may stay in the loop: it finds no gradients and does nothing (but clips, steps and frees what
    `accumulate()` has left), and schedulers see their step. Step hooks are not called. Parameters that are frozen now are
    stepped once they thaw.

    Args:
        optimizer: of `memkit.optim`. Several may step in backward, each parameters of its own.
        max_norm: clips each gradient by itself, to this norm. The norm of all gradients is known only when the last
            has arrived.
        clip_value: clips each element to this magnitude, before the norm.

    A weight that is used several times is stepped once a backward, with the sum of its gradients. After an error in
    backward, the parameters whose gradients had arrived are stepped (those that waited, at the start of the next step), the
    others not; the next backward works. A second
    backward through the same graph, or through another one that kept a weight, raises: the weight has changed. With
    `with handle.accumulate():` around it the first one leaves weights alone. With FSDP2 (``fully_shard``) and
    tensor parallelism norms are those of whole gradients. DistributedDataParallel and FullyShardedDataParallel, which
    would reduce gradients too late, are refused in backward. Not for weights shared between checkpoints of
    ``use_reentrant=True``, whose parts of the gradient arrive one by one. A GradScaler is refused.

    Returns a handle: `remove()`, `accumulate()`. Parameters keep neither it nor the optimizer alive: where both are gone,
    backward warns once and leaves gradients where they are.

    Example:
        >>> optimizer = memkit.optim.AdamW(model.parameters())
        >>> handle = memkit.optim.step_in_backward(optimizer)
        >>> loss.backward()  # the weights are new
    """
    if not isinstance(optimizer, FusedOptimizer):
        raise TypeError(
            f"step_in_backward: expected an optimizer of memkit.optim, got {type(optimizer).__name__}"
        )
    if optimizer._in_backward is not None:
        raise RuntimeError(
            "step_in_backward: expected an optimizer without it, got one that has it: remove() it first"
        )
    for name, value in (("max_norm", max_norm), ("clip_value", clip_value)):
        if value is None:
            continue
        check_number("step_in_backward", name, value)
        if not value > 0:
            raise ValueError(f"step_in_backward: expected {name} above 0 or None, got {value}")
    return StepInBackward(optimizer, max_norm, clip_value)

"""Puts back what a run of a model changes."""

from __future__ import annotations

import operator
import random
import re
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

OBJECTS = 10_000
"""So many are looked into at most, beside modules and what these hold themselves."""
MEMBERS = 1_000
"""Containers of more are put back, but what they hold is not looked into."""


@contextmanager
def untouched(
    model: nn.Module, written: Set[Tensor] = frozenset(), memory: Iterable[torch.UntypedStorage] = ()
) -> Iterator[None]:
    """Puts back what a run changes: random generators, gradients, buffers, modules' attributes and what these hold. No layer
    is skipped.

    ``written``: the parameters whose values a run changes; ``memory``: what else it writes to.
    """
    with ExitStack() as stack:
        _keep_random_state(stack)
        for parameter in model.parameters():
            _keep_parameter(stack, parameter, parameter in written)
        for storage in memory:
            keep_memory(stack, storage)
        _keep_state(stack, model)
        _keep_every_layer(stack, model)
        yield


def memory_of(tensor: Tensor) -> Any:
    try:
        return tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError):  # a tensor without one
        return id(tensor)


def _place(tensor: Tensor) -> Any:
    try:
        return memory_of(tensor), tensor.shape, tensor.stride(), tensor.storage_offset()
    except (RuntimeError, NotImplementedError):
        return memory_of(tensor)


def _keep_random_state(stack: ExitStack) -> None:
    cuda: Any = torch.cuda
    devices = list(range(cuda.device_count())) if cuda.is_initialized() else []
    stack.enter_context(torch.random.fork_rng(devices))
    stack.callback(random.setstate, random.getstate())
    if "numpy" in sys.modules:
        import numpy as np

        stack.callback(np.random.set_state, np.random.get_state())


def _keep_parameter(stack: ExitStack, parameter: nn.Parameter, with_values: bool) -> None:
    gradient, trained = parameter.grad, parameter.requires_grad
    data = parameter.data
    values = data.clone() if with_values else None
    # Hooks that step an optimizer as soon as a gradient is there must not run.
    hooks = parameter._post_accumulate_grad_hooks
    suspended = dict(hooks or {})
    attributes = dict(vars(parameter))  # gradients of each sample, say

    def restore() -> None:
        vars(parameter).clear()
        vars(parameter).update(attributes)
        if _place(parameter) != _place(data):  # another may stand for it
            parameter.data = data
        if values is not None:
            data.copy_(values)
        parameter.requires_grad_(trained)
        parameter.grad = gradient
        if suspended:
            hooks.update(suspended)

    if suspended:
        hooks.clear()
    parameter.grad = None
    stack.callback(restore)


def keep_memory(stack: ExitStack, storage: torch.UntypedStorage) -> None:
    """Its bytes."""
    before: torch.UntypedStorage = storage.clone()  # type: ignore[no-untyped-call]

    def restore() -> None:
        if storage.nbytes() == before.nbytes():
            storage.copy_(before)

    stack.callback(restore)


def _keep_state(stack: ExitStack, model: nn.Module) -> None:
    """Of modules, and of containers and objects that they hold, at whatever depth."""
    held: deque[Any] = deque(model.modules())
    seen = set(map(id, held))
    left = OBJECTS + 32 * len(held)  # a module has a dozen containers of its own
    while held and left:
        each = held.popleft()
        left -= 1
        if isinstance(each, nn.Module):
            _keep_tensors(stack, [*each._buffers.values(), *vars(each).values()])
        members: Collection[Any] = each if isinstance(each, (*_CONTAINERS, tuple)) else vars(each)
        _keep_members(stack, members)
        if len(members) > MEMBERS:
            continue
        for member in members.values() if isinstance(members, dict) else members:
            if id(member) not in seen and _has_state(member):
                seen.add(id(member))
                held.append(member)


_CONTAINERS = (dict, list, set, deque)
_STATELESS = {"torch", "memkit", *sys.stdlib_module_names}
"""Packages whose objects have a life of their own: what they did in a run stays done."""


def _has_state(held: Any) -> bool:
    if isinstance(held, (nn.Module, tuple, *_CONTAINERS)):
        return True
    package = str(type(held).__module__).partition(".")[0]
    return (
        package not in _STATELESS
        and not isinstance(held, (type, Tensor))
        and type(getattr(held, "__dict__", None)) is dict
    )


def _keep_tensors(stack: ExitStack, held: list[Any]) -> None:
    tensors = [(each, each.detach().clone()) for each in held if isinstance(each, Tensor)]

    def restore() -> None:
        with torch.no_grad():
            for tensor, copy in tensors:
                if tensor.shape != copy.shape:  # its first run gave it another
                    tensor.resize_(copy.shape)
                tensor.copy_(copy)

    if tensors:
        stack.callback(restore)


def _keep_members(stack: ExitStack, container: Any) -> None:
    kinds = [kind for kind in _CONTAINERS if isinstance(container, kind)]
    if not kinds:  # a tuple
        return
    members = kinds[0](container)  # a class derived from it may not be copied like it

    def restore() -> None:
        if not _holds(container, members):  # else it may be one that lets nobody change it
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(members)

    stack.callback(restore)


def _keep_every_layer(stack: ExitStack, model: nn.Module) -> None:
    """LayerDrop (Fan et al. 2019) skips other layers in each run: some would not be seen, and two runs would not compare."""
    holders = [*model.modules(), *{id(c): c for c in map(_config, model.modules()) if c is not None}.values()]
    for holder in holders:
        for name, value in list(vars(holder).items()):
            if _LAYER_DROP.search(name) and isinstance(value, float) and value > 0:
                vars(holder)[name] = 0.0  # past what may refuse or check it
                stack.callback(operator.setitem, vars(holder), name, value)


_LAYER_DROP = re.compile("layer_?drop(_|$)")


def _config(module: nn.Module) -> Any:
    """A model's own settings, which its forward reads."""
    config = vars(module).get("config")
    return config if hasattr(config, "__dict__") else None


def _holds(container: Any, members: Any) -> bool:
    if isinstance(container, dict):
        return _holds(list(container), list(members)) and _holds(
            list(container.values()), list(members.values())
        )
    if isinstance(container, set):
        return {id(member) for member in container} == {id(member) for member in members}
    return len(container) == len(members) and all(map(operator.is_, container, members))

"""Puts back what a run of a model changes."""

from __future__ import annotations

import operator
import random
import re
import sys
from argparse import Namespace
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .._hooks import was_read

LOOKED_AT = 10_000
"""So many members of containers and attributes of objects, beside modules' own attributes, are looked at."""
MEMBERS = 1_000
"""Containers of more, in others, are left alone."""


@contextmanager
def untouched(
    model: nn.Module,
    written: Set[Tensor] = frozenset(),
    memory: Iterable[torch.UntypedStorage] = (),
    *,
    deep: bool = True,
) -> Iterator[None]:
    """Puts back what a run changes: random generators, gradients, buffers, modules' attributes.

    ``written``: the parameters whose values a run changes; ``memory``: what else it writes to; ``deep``: also what is in the
    attributes, see `Held`, and no layer is skipped; else one module runs, which may be what skips itself.
    """
    with ExitStack() as stack:
        _keep_random_state(stack)
        for parameter in model.parameters():
            _keep_parameter(stack, parameter, parameter in written)
        for storage in memory:
            keep_memory(stack, storage)
        for module in model.modules():
            _keep_attributes(stack, module)
        if deep:
            held = Held(model)
            for container in held.containers:
                _keep_members(stack, container)
            for tensor in held.tensors:
                _keep_gradient(stack, tensor)
            _keep_every_layer(stack, model)
        yield


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """No hooks of the user's see a run: of PyTorch's own some make a weight, and those that were read have one gathered."""
    with ExitStack() as stack:
        for parameter in model.parameters():
            if hooks := parameter._backward_hooks:
                parameter._backward_hooks = None
                stack.callback(setattr, parameter, "_backward_hooks", hooks)
        for module in model.modules():
            own = vars(module)
            for name in HOOKS:
                if hooks := own.get(name):
                    own[name] = type(hooks)((at, hook) for at, hook in hooks.items() if _stays(hook))
                    stack.callback(operator.setitem, own, name, hooks)
        yield


HOOKS = "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"


def _stays(hook: Any) -> bool:
    while isinstance(hook, partial):
        hook = hook.func
    where = getattr(hook, "__module__", None) or type(hook).__module__
    return was_read(hook) or str(where).partition(".")[0] == "torch"


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


class Held:
    """What attributes of modules hold, at whatever depth: tensors, containers, attributes of objects.

    Containers are those of the built-in types themselves; objects those of neither PyTorch nor the standard library, whose
    state is not a model's. What happened in a module that is not registered stays: it may have become another.
    """

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[Tensor] = []
        self.containers: list[Any] = []
        modules = list(model.modules())
        held = deque(value for module in modules for value in _inner(vars(module)))
        seen = {*map(id, modules), *map(id, model.parameters())}
        left = LOOKED_AT
        while held and left > 0:
            each = held.popleft()
            if id(each) in seen:
                continue
            seen.add(id(each))
            if issubclass(type(each), Tensor):
                self.tensors.append(each)
                continue
            members = self._members(each)
            left -= 1 + len(members)
            held += members

    def _members(self, held: Any) -> list[Any]:
        kind = type(held)
        if kind is tuple:
            return list(held[:MEMBERS])
        if issubclass(kind, nn.Module):
            own = vars(held)
            return [*own.get("_parameters", {}).values(), *own.get("_buffers", {}).values(), *_inner(own)]
        container = held if kind in _CONTAINERS else attributes_of(held)
        if container is None or len(container) > MEMBERS:
            return []
        self.containers.append(container)
        return list(container.values() if isinstance(container, dict) else container)


_OWN = frozenset(vars(nn.Module()))
_CONTAINERS = {dict, OrderedDict, defaultdict, list, set, deque}
_NAMESPACES = {SimpleNamespace, Namespace}
STATELESS = {"torch", "memkit", *sys.stdlib_module_names}


def _inner(own: dict[str, Any]) -> list[Any]:
    """Of a module's attributes those that are not every module's."""
    return [value for name, value in list(own.items()) if name not in _OWN]


def attributes_of(held: Any) -> dict[str, Any] | None:
    kind = type(held)
    if str(kind.__module__).partition(".")[0] in STATELESS and kind not in _NAMESPACES:
        return None
    try:
        found = object.__getattribute__(held, "__dict__")
    except Exception:  # a class may say anything there
        return None
    return found if type(found) is dict and not issubclass(kind, (dict, list, set, type)) else None


def _keep_attributes(stack: ExitStack, module: nn.Module) -> None:
    attributes = vars(module)
    before = dict(attributes)
    own = [*module._buffers.values(), *before.values()]
    tensors = [(held, held.detach().clone()) for held in own if isinstance(held, Tensor)]

    def restore() -> None:
        with torch.no_grad():
            for tensor, copy in tensors:
                if tensor.shape != copy.shape:  # its first run gave it another
                    tensor.resize_(copy.shape)
                tensor.copy_(copy)
        attributes.clear()
        attributes.update(before)

    stack.callback(restore)
    for held in before.values():
        if isinstance(held, (dict, list, set)):
            _keep_members(stack, held)


def _keep_members(stack: ExitStack, container: Any) -> None:
    # A class derived from a built-in one may not be copied like it.
    kind: Any = next(kind for kind in (dict, list, set, deque) if isinstance(container, kind))
    members = kind(container)

    def restore() -> None:
        if not _holds(container, members):  # else it may be one that lets nobody change it
            container.clear()
            (container.extend if isinstance(container, (list, deque)) else container.update)(members)

    stack.callback(restore)


def _keep_gradient(stack: ExitStack, tensor: Tensor) -> None:
    """Of a tensor that no module has registered."""
    if tensor.requires_grad and tensor.is_leaf:
        gradient, tensor.grad = tensor.grad, None
        stack.callback(setattr, tensor, "grad", gradient)


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

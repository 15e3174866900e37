"""Whether calling a module runs more than its class's forward, and whether that may touch what the forward gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module

_untyped: Any = torch_module
_ZERO3 = "deepspeed.runtime.zero.parameter_offload"
READ = {
    *((_ZERO3, "_start_of_forward_hook"), (_ZERO3, "_pre_forward_module_hook")),
    *((_ZERO3, "_post_backward_module_hook"), (_ZERO3, "_post_forward_module_hook")),
    (_ZERO3, "_pre_backward_module_hook"),
}
"""Hooks around a forward whose source was read, by their functions' modules and names: they neither keep a tensor nor read
nor change its numbers. DeepSpeed's for ZeRO 3, on every module, gather its own parameters for its call and hand tensors on
through identities of autograd's, whose backward gathers them again for the backward of the call."""

WRAPPERS = {"deepspeed.utils.nvtx": "func"}
"""Modules with a decorator that calls the function it holds under this name, and does nothing to what goes through."""


def has_hooks(module: nn.Module) -> bool:
    """Of its own, or a forward put into the instance."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or "forward" in module.__dict__
    )


def has_global_hooks() -> bool:
    return bool(_untyped._has_any_global_hook())


def shows_result(module: nn.Module) -> bool:
    """Whether a forward hook is given the result that may keep or change it."""
    if torch_module._global_forward_hooks:
        return True
    return bool(module._forward_hooks) and not all(map(was_read, module._forward_hooks.values()))


def only_read(module: nn.Module) -> bool:
    """Whether all that a call runs beside the class's forward are such hooks: nothing sees what is computed."""
    if module._forward_hooks or module._forward_pre_hooks:
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        if not all(map(was_read, hooks)):
            return False
    others = module._backward_hooks or module._backward_pre_hooks or "forward" in module.__dict__
    return not (others or has_global_hooks())


def was_read(hook: Callable[..., Any]) -> bool:
    module = getattr(hook, "__module__", None)
    if module in WRAPPERS:
        code, cells = getattr(hook, "__code__", None), getattr(hook, "__closure__", None)
        held = dict(zip(code.co_freevars, cells, strict=True)) if code and cells else {}
        cell = held.get(WRAPPERS[module])
        return cell is not None and was_read(cell.cell_contents)
    return (module, getattr(hook, "__name__", None)) in READ

"""Whether calling a module runs more than its class's forward."""

from __future__ import annotations

from typing import Any, cast

from torch import nn
from torch.nn.modules import module as torch_module


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
    return cast(bool, cast(Any, torch_module)._has_any_global_hook())

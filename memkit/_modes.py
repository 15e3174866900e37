"""Whether one of PyTorch's modes is at work, in which a call does more, or other things, than in eager mode."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import _len_torch_dispatch_stack, _len_torch_function_stack
from torch.autograd import forward_ad


def is_tracing() -> bool:
    """By `torch.jit.trace`."""
    return torch._C._get_tracing_state() is not None


def in_transform() -> bool:
    """In one of `torch.func`: `grad`, `vmap` and the like."""
    functorch: Any = torch._C._functorch
    return functorch.peek_interpreter_stack() is not None


def in_forward_mode() -> bool:
    """Results may have tangents."""
    return forward_ad._current_level >= 0


def has_torch_modes() -> bool:
    """Of dispatch or of torch functions, which see the operators that run."""
    return bool(_len_torch_dispatch_stack() or _len_torch_function_stack())

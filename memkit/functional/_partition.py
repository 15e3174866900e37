"""What PyTorch's partitioner is told of a traced operator, where it is to keep less (activation_memory_budget)."""

# Parts of torch are untyped.
# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, get_proxy_slot, proxy_call
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy


def _trace(mode: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    results = proxy_call(mode, func, mode.pre_dispatch, args, kwargs)
    for result in tree_leaves(results):
        if isinstance(result, Tensor):
            slot: Any = get_proxy_slot(result, mode.tracer)
            node = slot.proxy.node
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
            if node.target is operator.getitem:  # one of several: who partitions looks at either
                node.args[0].meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return results


def keep_results(op: str) -> None:
    """What backward needs of the operator's results is kept, not computed again."""
    torch.library.register_torch_dispatch(f"memkit::{op}", ProxyTorchDispatchMode, _trace)

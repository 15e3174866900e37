"""`F.scaled_dot_product_attention` with dropout in a layer's own code.

PyTorch's kernels for the CPU have no dropout: its function keeps a number for each pair of tokens, four times over. In
training :func:`attend` stands in, which keeps query, key, value and a seed, inside :class:`memkit.lean` and outside,
recorded or not, since a checkpoint's two runs have to drop the same. What it is not for runs under a checkpoint inside lean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..._lean import is_lean
from ..._modes import in_forward_mode
from ..layers import serves
from ..types import HALVES
from .attend import Scores, attend, may_drop
from .checkpoint import checkpointed

BY_POSITION = 6
"""So many arguments stock takes by their place."""


class _Given(NamedTuple):
    """As stock names it."""

    query: Any
    key: Any
    value: Any
    attn_mask: Any = None
    dropout_p: Any = 0.0
    is_causal: Any = False
    scale: Any = None
    enable_gqa: Any = False


def attending(stock: Callable[..., Tensor], note_dropped: Callable[[], None]) -> Any:
    """The function, and what to call when it drops."""

    def scaled_dot_product_attention(*args: Any, **named: Any) -> Tensor:
        given = _given(args, named)
        if given is None or not may_drop(given.dropout_p) or not _takes(given):
            return stock(*args, **named)
        if not torch.is_autocast_enabled("cpu"):
            note_dropped()
            return _attended(given)
        again = is_lean() and torch.is_grad_enabled()
        return checkpointed(stock, *args, **named) if again else stock(*args, **named)

    return scaled_dot_product_attention


def with_learned_mask(*args: Any, **named: Any) -> Tensor | None:
    """By `attend`, where the gradient of the mask is wanted, and there is no dropout."""
    given = _given(args, named)
    if given is None or given.dropout_p != 0.0 or not isinstance(given.attn_mask, Tensor):
        return None
    return _attended(given) if given.attn_mask.requires_grad and _takes(given) else None


def _given(args: tuple[Any, ...], named: dict[str, Any]) -> _Given | None:
    """None where stock says what is wrong with it."""
    try:
        return _Given(*args, **named) if len(args) <= BY_POSITION else None
    except TypeError:
        return None


def _attended(given: _Given) -> Tensor:
    query, key, value, mask, dropout, is_causal, scale, _ = given
    if is_causal:
        mask = query.new_ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril_()
    if mask is not None:
        mask = mask[(None,) * (query.dim() - mask.dim())]
    if one_head := query.dim() == 3:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        mask = mask if mask is None else mask.unsqueeze(1)
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    scores = Scores(scale, None, dropout, wide=query.dtype in HALVES)
    learned = mask is not None and mask.requires_grad
    out, _ = attend(query, key, value, None if learned else mask, mask if learned else None, scores)
    return out.squeeze(1) if one_head else out


def _takes(given: _Given) -> bool:
    """Whether stock would keep the weights, and what it is given is as it should be: stock says what is not."""
    query, key, value, mask, _, is_causal, scale, enable_gqa = given
    tensors = [query, key, value, *([] if mask is None else [mask])]
    if not all(type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided for x in tensors):
        return False
    dims = query.dim()
    return (
        query.device.type == "cpu"
        and all(x.device == query.device for x in tensors)
        and serves(query)
        and query.dtype == key.dtype == value.dtype
        and dims in (3, 4)
        and key.dim() == value.dim() == dims
        and query.shape[0] == key.shape[0]
        and query.shape[-1] == key.shape[-1]
        and key.shape[:-1] == value.shape[:-1]
        and key.shape[-2] >= query.shape[-1]  # else they are smaller than the query
        and query.numel() > 0
        and value.numel() > 0
        and (dims == 3 or query.shape[1] == key.shape[1] or _are_groups(query, key, enable_gqa))
        and (mask is None or (is_causal is False and _takes_mask(mask, query, key)))
        and type(is_causal) is bool
        and (scale is None or type(scale) in (int, float))
        and not in_forward_mode()
    )


def _are_groups(query: Tensor, key: Tensor, enable_gqa: Any) -> bool:
    return enable_gqa is True and key.shape[1] > 0 and query.shape[1] % key.shape[1] == 0


def _takes_mask(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    shape = (*query.shape[:-1], key.shape[-2])
    return (
        mask.dtype in (torch.bool, query.dtype)
        and mask.dim() <= len(shape)
        and all(a in (1, b) for a, b in zip(reversed(mask.shape), reversed(shape), strict=False))
    )

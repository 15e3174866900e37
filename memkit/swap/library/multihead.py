"""torch.nn.MultiheadAttention with the batch first, without the copies that stock makes to have the tokens first.

Stock transposes its input, which the projection then copies and keeps beside the tensor that was given, copies the projected
query, key and value out of their one memory, and transposes the result for another copy. The twin keeps what it is given,
the projections and the attention's result. Of weights with dropout on the CPU, where stock keeps a number for each pair of
tokens, it keeps a seed; inside :class:`memkit.lean` none either of weights that are returned, or have stock's dropout.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as stock
from torch import Tensor, nn
from torch.compiler import is_compiling

from ..._lean import is_lean
from ..._modes import in_forward_mode, is_tracing
from ..layers import serves
from ..types import HALVES
from .attend import Scores, attend, may_drop
from .checkpoint import checkpointed
from .twin import Twin, twin_of

Mask = Tensor | None


class MultiheadAttention(Twin, kind="multihead attention"):
    _drops = True

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Mask = None,
        need_weights: bool = True,
        attn_mask: Mask = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        module: Any = self
        if not _takes(module, query, key, value, key_padding_mask, need_weights, attn_mask, is_causal):
            given = query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights
            return module._stock_forward(*given, is_causal)  # type: ignore[no-any-return]
        is_causal = is_causal and key_padding_mask is None and not need_weights
        mask = None if is_causal else _added(query, key, module.num_heads, key_padding_mask, attn_mask)
        q, k, v = _project(module, query, key, value)
        weights = None
        dropout = module.dropout if module.training else 0.0
        # PyTorch's kernels for the CPU have no dropout.
        keeps_weights = dropout > 0 and not query.is_cuda and _has_many(module, key)
        if need_weights or (keeps_weights and _attends(module, q, dropout)):
            if is_causal:
                mask = q.new_ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool).tril_()
            learned = mask is not None and mask.requires_grad
            # Weights that are wanted stock computes in the dtype that it is given.
            wide = not need_weights and q.dtype in HALVES
            scores = Scores(q.shape[3] ** -0.5, None, dropout, wide=wide)
            out, weights = attend(q, k, v, None if learned else mask, mask if learned else None, scores)
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            kernel = partial(stock.scaled_dot_product_attention, dropout_p=dropout, is_causal=is_causal)
            again = keeps_weights and is_lean()
            out = checkpointed(kernel, q, k, v, mask) if again else kernel(q, k, v, mask)
        del q, k, v
        last = module.out_proj.weight, module.out_proj.bias
        if not need_weights:
            return stock.linear(out.transpose(1, 2).reshape(query.shape), *last), None
        # In stock's order of memory, in which a dropout behind it draws: outside of lean() this is stock's call.
        batch, tokens, width = query.shape
        rows = out.permute(2, 0, 1, 3).reshape(tokens, batch, width)
        return stock.linear(rows, *last).transpose(0, 1), weights


class StockDropout(MultiheadAttention, kind="multihead attention, stock dropout"):
    _drops = False


def multihead_twin(cls: type[nn.Module], drops: bool) -> type[Any]:
    """``drops``: whether memkit's dropout may take the place of stock's."""
    return twin_of(f"multihead attention{'' if drops else ', stock dropout'}", cls)


def is_multihead(module: Any) -> bool:
    """Whether the twin brings something."""
    return type(module) is nn.MultiheadAttention and _is_usual(module)


def _is_usual(module: Any) -> bool:
    return (
        module.batch_first
        and module._qkv_same_embed_dim
        and module.bias_k is None
        and module.bias_v is None
        and not module.add_zero_attn
        # Each time that one of those is asked for its weights may count.
        and not ("parametrizations" in module._modules or "parametrizations" in module.out_proj._modules)
    )


def _has_many(module: Any, key: Tensor) -> bool:
    """Whether making the weights again is possible, and spares memory."""
    can = not (is_compiling() or in_forward_mode())
    return can and key.shape[1] >= module.embed_dim // module.num_heads


def _attends(module: Any, query: Tensor, dropout: float) -> bool:
    """Whether `attend` may take the place of a kernel with this dropout: inside of lean() and outside, recorded or not, as a
    checkpoint's two runs have to drop the same."""
    autocast = torch.is_autocast_enabled(query.device.type)
    return bool(module._drops) and may_drop(dropout) and not autocast and query.numel() > 0


def _takes(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Mask,
    need_weights: bool,
    mask: Mask,
    is_causal: bool,
) -> bool:
    """Where stock may take its own kernel for inference, it stays. In training that does not depend on whether autograd
    records, as a checkpoint's two runs have to draw the same behind it.
    """
    if not (module.training or torch.is_grad_enabled()) or is_tracing() or not _is_usual(module):
        return False
    owned = module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias
    tensors = query, key, value, *(each for each in owned if each is not None)
    if not all(map(serves, tensors)) or not (module.training or any(each.requires_grad for each in tensors)):
        return False
    autocast = torch.is_autocast_enabled(query.device.type)
    if not autocast and any(each.dtype != query.dtype for each in tensors):
        return False
    if need_weights and (
        autocast
        or (module.training and module.dropout > 0)
        or not (is_lean() and _has_many(module, key))
        or query.numel() == 0
    ):
        return False
    batch, _, width = query.shape if query.dim() == 3 else (0, 0, 0)
    return (
        width == module.embed_dim
        and key.dim() == 3
        and key.shape == value.shape
        and key.shape[::2] == (batch, width)
        and not (is_causal and mask is None)  # an error
        and _takes_masks(module, query, key, padding, mask)
    )


def _takes_masks(module: Any, query: Tensor, key: Tensor, padding: Mask, mask: Mask) -> bool:
    batch, pairs = query.shape[0], (query.shape[1], key.shape[1])
    shapes = {2: pairs, 3: (batch * module.num_heads, *pairs)}
    given = [each for each in (padding, mask) if each is not None]
    return (
        all(type(each) is Tensor and each.device == query.device for each in given)
        and all(each.dtype in (torch.bool, query.dtype) for each in given)
        and len({each.dtype for each in given}) < 2
        and (padding is None or padding.shape == key.shape[:2])
        and (mask is None or mask.shape == shapes.get(mask.dim()))
    )


def _added(query: Tensor, key: Tensor, heads: int, padding: Mask, mask: Mask) -> Mask:
    """What is added to the scores [batch, heads, tokens, keys], as far as that differs among them."""
    added = None
    for given in (mask, padding):
        if given is None:
            continue
        each = given
        if each.dtype == torch.bool:
            each = torch.zeros_like(each, dtype=query.dtype).masked_fill_(each, float("-inf"))
        if given is padding:
            each = each[:, None, None]
        else:
            each = each[None, None] if each.dim() == 2 else each.view(query.shape[0], heads, *each.shape[1:])
        added = each if added is None else added + each
    return added


def _project(module: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Each [batch, heads, tokens, width of a head]; those of one tensor by one product, whose memory they share."""
    found: list[Tensor] = []
    weight, bias = module.in_proj_weight, module.in_proj_bias
    number = 3 if query is key is value else 1
    for x in (query, key, value):
        if len(found) == 3:
            break
        if found and key is value:
            number = 2
        rows = slice(len(found) * module.embed_dim, (len(found) + number) * module.embed_dim)
        part = (weight, bias) if number == 3 else (weight[rows], None if bias is None else bias[rows])
        shape = *x.shape[:2], number, module.num_heads, module.head_dim
        found += stock.linear(x, *part).view(shape).permute(2, 0, 3, 1, 4).unbind(0)
    q, k, v = found
    return q, k, v

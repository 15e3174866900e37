"""Whether `attend` computes what a function of transformers' models computes that writes attention out.

What it is given says what that may be; values, gradients and dropped weights of some tokens say whether it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes

from ..._modes import in_forward_mode
from ..layers import serves
from ..types import HALVES
from .attend import Scores, attend
from .checkpoint import generators
from .remembered import Remembered
from .twin import TOLERANCE, itself, near, numbers

FUSED = "sdpa_attention_forward"
TOKENS = 8

_same: Remembered[bool] = Remembered()
"""Whether `attend` is what a function computes, as a module of that class calls it."""


def as_written(
    function: Any, module: Any, query: Tensor, key: Tensor, value: Tensor, args: Any, kwargs: Any
) -> tuple[Tensor | None, Tensor | None, Scores, Tensor | None] | None:
    """Mask, bias, scores and sinks for `attend`, where it computes what the function does."""
    mask, *more = args or (kwargs.get("attention_mask"),)
    bias, scale, cap = kwargs.get("position_bias"), kwargs.get("scaling"), kwargs.get("softcap")
    dropout = kwargs.get("dropout", 0.0)
    held, sinks = _sinks_of(module, kwargs)
    if learned := bias is None and is_learned(mask):
        mask, bias = None, mask
    plain = (
        not more
        and isinstance(scale, float)
        and (cap is None or (isinstance(cap, float) and bias is None and (mask is None or not dropout)))
        and serves(query)
        and query.dtype == key.dtype == value.dtype
        and query.dim() == key.dim() == value.dim() == 4
        and query.numel() > 0
        and query.shape[0] == key.shape[0]  # else the product broadcasts
        and query.shape[1] % key.shape[1] == 0
        and key.shape[:3] == value.shape[:3]
        and not torch.is_autocast_enabled(query.device.type)
        and not in_forward_mode()
    )
    if not plain:
        return None
    tokens = query.shape[:3]
    for each, columns in ((mask, key.shape[2]), (bias, key.shape[2]), (sinks, 1)):
        if each is not None and not (
            type(each) in (Tensor, nn.Parameter) and _expands(each, (*tokens, columns))
        ):
            return None
    if sinks is not None and cap is not None:
        return None
    says = mask is not None and mask.dtype == torch.bool  # what is seen, beside a bias, or to a fused kernel
    if mask is not None and (
        mask.requires_grad or says != (bias is not None or (says and is_fused(function)))
    ):
        return None
    if mask is None and not learned and is_fused(function):
        causal = kwargs.get("is_causal")
        if query.shape[2] > 1 and (getattr(module, "is_causal", True) if causal is None else causal):
            mask = query.new_ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool).tril_()
    how = (mask, bias, Scores(scale, cap, dropout, wide=is_fused(function) and query.dtype in HALVES), sinks)
    given = tuple(sorted(name for name, held in kwargs.items() if held is not None))
    groups = query.shape[1] // key.shape[1]
    parts = [x if x is None else (x.dtype, *(n == 1 for n in x.shape)) for x in (mask, sinks)]
    places = [each is held for each in _places_of_sinks(module, kwargs)]
    kind = (
        query.dtype,
        groups,
        query.shape[2] == 1,
        *parts,
        *places,
        says,
        learned and not dropout,
        dropout > 0,
    )
    same, seen = _same.of(function, type(module)), (module.training, given, kind)
    if seen not in same:
        autograd: Any = torch._C._autograd
        if not autograd._saved_tensors_hooks_is_enabled():
            return None
        try:
            same[seen] = _is_same(function, module, (query, key, value), args, how, kwargs)
        except Exception:  # it is given something of the size of the batch
            same[seen] = False
    return how if same[seen] else None


def _is_same(function: Any, module: Any, tensors: Any, args: Any, how: Any, kwargs: Any) -> bool:
    """Of some tokens: results, weights and gradients; and no parameter of the module has part in them. Numbers and masks are
    ours, so that it does not depend on the first batch.

    A checkpoint around the model sees nothing of it, since it is not done again when that computes again.
    """
    mask, bias, scores, sinks = how
    devices = [tensors[0].device] if tensors[0].is_cuda else []
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        saved_tensors_hooks(itself, itself),
        _disable_current_modes(),
        torch.random.fork_rng(devices),
    ):
        for generator in generators(devices):
            generator.manual_seed(0)
        query, key, value = (
            numbers((2, x.shape[1], (i + 1) * TOKENS, x.shape[3]), x)[:, :, -TOKENS:]
            for i, x in enumerate(tensors)
        )
        query = query / (scores.scale * query.shape[3] ** 0.5)  # for scores of the size of one
        for x in (query, key, value):
            x.requires_grad_()
        named = "attention_mask" in kwargs
        given = kwargs["attention_mask"] if named else (*args, None)[0]
        learned = given is not None and given is bias
        given, mask, bias = (x if x is None else _added(x) for x in (given, mask, bias))
        leaves = [query, key, value]
        if bias is not None:
            leaves.append(bias.requires_grad_())
        options = {**kwargs, "dropout": 0.0} if scores.dropout else dict(kwargs)
        if sinks is not None:
            held, _ = _sinks_of(module, kwargs)
            per_token = (2, sinks.shape[1], 1 if sinks.shape[2] == 1 else TOKENS, 1)
            leaf = numbers(held.shape if held.dim() == 1 else per_token, held).requires_grad_()
            leaves.append(leaf)
            sinks = _per_head(leaf)
            options = {name: leaf if given is held else given for name, given in options.items()}
            module = _with_sinks(module, leaf) if getattr(module, "sinks", None) is held else module
        if learned:
            given = bias
        elif bias is not None:
            options["position_bias"] = bias
        if named:
            options["attention_mask"] = given

        def theirs_of(value: Tensor) -> tuple[Tensor, Tensor | None]:
            out, weights = function(module, query, key, value, *(() if named else (given,)), **options)
            return out, weights

        theirs, weights = theirs_of(value)
        ours, our_weights = attend(query, key, value, mask, bias, scores._replace(dropout=0.0), sinks)
        pairs = [(ours.transpose(1, 2), theirs)]
        if weights is not None:
            pairs.append((our_weights, weights))
        if any(a.shape != b.shape for a, b in pairs):
            return False
        if scores.dropout:
            options["dropout"] = 0.5
            once = torch.eye(*value.shape[2:]).to(value).expand_as(value)
            dropped, weights = theirs_of(once)
            dropped = dropped.transpose(1, 2)[..., :TOKENS]
            sums = theirs_of(torch.ones_like(value))[0].transpose(1, 2)
            if not _is_dropped(our_weights, dropped, sums) or not (weights is None or near(dropped, weights)):
                return False
        weight = numbers(theirs.shape, theirs.detach())
        own = [p for p in module.parameters() if p.requires_grad]
        found = torch.autograd.grad(theirs, [*leaves, *own], weight, allow_unused=True)
        if any(grad is not None for grad in found[len(leaves) :]):
            return False
        pairs += zip(torch.autograd.grad(pairs[0][0], leaves, weight), found, strict=False)
        return all(b is not None and near(a, b) for a, b in pairs)


def _sinks_of(module: nn.Module, kwargs: dict[str, Any]) -> tuple[Any, Any]:
    """Scores without a key, for each head and perhaps token: given, or what the module learns; and as they are added."""
    held = next((each for each in _places_of_sinks(module, kwargs) if isinstance(each, Tensor)), None)
    return held, held if held is None else _per_head(held)


def _places_of_sinks(module: nn.Module, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return kwargs.get("sinks"), kwargs.get("s_aux"), getattr(module, "sinks", None)


def _per_head(sinks: Tensor) -> Tensor:
    return sinks.view(1, -1, 1, 1) if sinks.dim() == 1 else sinks


def _with_sinks(module: nn.Module, sinks: Tensor) -> nn.Module:
    """What stands for it, with others."""
    copy: nn.Module = object.__new__(type(module))
    held = vars(copy)
    held.update(vars(module), sinks=sinks)
    for kind in ("_parameters", "_buffers"):
        held[kind] = {name: x for name, x in held[kind].items() if name != "sinks"}
    return copy


def _added(x: Tensor) -> Tensor:
    """In the place of a mask or bias: of one row where that is for all."""
    shape = (1, x.shape[1], *(n if n == 1 else TOKENS for n in x.shape[2:]))
    if x.dtype == torch.bool:
        ones = torch.ones(shape, dtype=torch.bool, device=x.device)
        return ones.tril() if shape[2] > 1 else ones.tril(TOKENS - 2)  # of one row: all but the last
    return numbers(shape, x)


def _is_dropped(weights: Tensor, dropped: Tensor, sums: Tensor) -> bool:
    """Whether of the weights each is either twice as large or zero by itself; they, and not what comes of them: what is left
    of a row is the same for all that is multiplied with it."""
    if weights.shape != dropped.shape:  # a value is narrower than there are tokens
        return False
    tolerance = TOLERANCE[weights.dtype]
    kept = torch.isclose(dropped, 2 * weights, rtol=tolerance, atol=tolerance * 1e-3)
    seen = weights > tolerance
    for dim in range(4):  # no neighbours share their fate
        last, size = weights.shape[dim] - 1, weights.shape[dim]
        a, b = (kept.narrow(dim, at, last) for at in (0, size - last))
        both = seen.narrow(dim, 0, last) & seen.narrow(dim, size - last, last)
        if last and not ((a != b) & both).any():
            return False
    alike = torch.isclose(sums, sums[..., :1], rtol=tolerance, atol=tolerance)
    return bool(alike.all() and (kept | (dropped == 0)).all())


def _expands(x: Tensor, shape: tuple[int, ...]) -> bool:
    return x.dim() == 4 and all(a in (1, b) for a, b in zip(x.shape, shape, strict=True))


def is_fused(function: Any) -> bool:
    return getattr(function, "__name__", "") == FUSED


def is_learned(given: Any) -> bool:
    return isinstance(given, Tensor) and given.requires_grad

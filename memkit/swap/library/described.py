"""Attention that a layer writes out, computed by :func:`attend`.

A run of the layer's own lines in which scores and weights are described instead of computed: which query and key they are
of, by what they are multiplied, what is added or hidden. The product with the value computes the whole at once; so does
a kernel whose mask is learned. Whatever else the lines do with them ends the run, and nothing has been drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..layers import Pending, serves
from .attend import Scores, attend, may_drop
from .checkpoint import generators
from .sdpa import with_learned_mask

FUSED = "scaled_dot_product_attention"
CASTS: dict[str, torch.dtype | None] = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "type_as": None,
    "to": None,
}
NAMES = {
    "imul": "mul",
    "rmul": "mul",
    "multiply": "mul",
    "iadd": "add",
    "radd": "add",
    "truediv": "div",
    "itruediv": "div",
    "divide": "div",
    "true_divide": "div",
}
"""Of functions that do the same."""
METHODS = {
    *CASTS,
    *("mul", "mul_", "div", "div_", "add", "add_", "masked_fill", "masked_fill_", "softmax", "matmul", "bmm"),
    *("contiguous", "new_zeros", "new_ones", "new_full", "new_empty"),
}

Axes = tuple[int, ...]


def _said(equation: Any) -> str:
    """With other letters, in the order of the alphabet."""
    letters: dict[str, str] = {}
    said = (
        letters.setdefault(c, chr(97 + len(letters))) if c.isalpha() else c for c in str(equation) if c != " "
    )
    return "".join(said)


HEADS_FIRST, TOKENS_FIRST, WITHOUT_HEADS = (0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 2)
PAIRS: dict[str, Axes] = {
    _said("bhid,bhjd->bhij"): HEADS_FIRST,
    _said("bihd,bjhd->bhij"): TOKENS_FIRST,
    _said("bid,bjd->bij"): WITHOUT_HEADS,
}
"""What einsum may say of query and key, and where their axes are."""
SUMS: dict[str, Axes] = {
    _said("bhij,bhjd->bhid"): HEADS_FIRST,
    _said("bhij,bjhd->bihd"): TOKENS_FIRST,
    _said("bij,bjd->bid"): WITHOUT_HEADS,
}
"""And of value and result."""


class NotAttentionError(Exception):
    """What `attend` does not compute."""


def attended(function: Callable[..., Any], given: tuple[Any, ...]) -> tuple[Tensor, ...] | None:
    """What the function gives, where `attend` computes it; nothing has been drawn where it does not."""
    if torch._C._len_torch_function_stack() or "type" in function.__code__.co_names:  # who looks closer
        return None
    run, devices = _Describing(), {x.device for x in given if isinstance(x, Tensor) and x.is_cuda}
    before = [(each, each.get_state()) for each in generators(devices)]
    try:
        with run:
            outs = function(*given)
        if run.is_done:
            return tuple(out.weights() if isinstance(out, _Described) else out for out in outs)
    except Exception as error:  # what it is, the lines will say when they are run as they are
        if type(error).__module__ == "torch.utils.checkpoint":  # that it has got what it came for
            raise
    for each, state in before:
        each.set_state(state)
    return None


class _Describing(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._is_first = True
        self.is_done = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        name = getattr(function, "__name__", "")
        if any(isinstance(each, _Described) for each in (*args, *named.values())):
            return _step(name, args, named)
        if any(
            isinstance(each, list | tuple) and any(isinstance(x, _Described) for x in each) for each in args
        ):
            raise NotAttentionError
        if name == FUSED and not torch.is_autocast_enabled("cpu"):
            with torch._C.DisableTorchFunction():
                found = with_learned_mask(*args, **named)
            if found is not None:
                self.is_done = True
                return found
        if self._is_first and not named and (pair := _pair(name, args)):
            self._is_first = False
            return _Described(self, *pair)
        return function(*args, **named)


def _pair(name: str, args: Any) -> tuple[Tensor, Tensor] | None:
    """The query and the key of a product that may be scores."""
    equation, tensors = "", args
    if name == "einsum":
        equation, *tensors = args
    elif name not in ("matmul", "bmm", "__matmul__"):
        return None
    if len(tensors) != 2 or not all(type(x) in (Tensor, nn.Parameter) and x.dim() in (3, 4) for x in tensors):
        return None
    query, key = tensors
    if equation:
        axes = PAIRS.get(_said(equation))
        if axes is None or {query.dim(), key.dim()} != {len(axes)}:
            return None
        query, key = query.permute(axes), key.permute(axes)
    else:
        key = key.mT
    plain = (
        serves(query)
        and serves(key)
        and query.dim() == key.dim()
        and query.dtype == key.dtype
        and query.device == key.device
        and query.shape[:-2] == key.shape[:-2]
        and query.shape[-1] == key.shape[-1]
        and query.numel() > 0
        and key.numel() > 0
    )
    return (query, key) if plain and _may_attend(query) else None


def _may_attend(x: Tensor) -> bool:
    return torch.is_grad_enabled() and not torch.is_autocast_enabled(x.device.type)


def _step(name: str, args: Any, named: Any) -> Any:
    """What a function gives of what is described; ends the run if that cannot be described."""
    in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    name = name.strip("_")
    name = NAMES.get(name, name)
    at = [i for i, each in enumerate(args) if isinstance(each, _Described)]
    if len(at) != 1:
        raise NotAttentionError
    described: _Described = args[at[0]]
    if not _may_attend(described._query):
        raise NotAttentionError
    others = [*args[: at[0]], *args[at[0] + 1 :]]
    is_first = at == [0]
    if name in ("matmul", "bmm") and is_first and len(others) == 1 and not named:
        return described.of(others[0])
    if name == "einsum" and at == [1] and len(others) == 2 and not named:
        axes = SUMS.get(_said(others[0]))
        if axes is None or others[1].dim() != len(axes):
            raise NotAttentionError
        return described.of(others[1].permute(axes)).permute(axes)
    if name in CASTS and is_first:
        return described.cast(CASTS[name], others, named)
    if name == "contiguous" and not (others or named):
        return described
    if name == "dropout":  # of stock, which draws other numbers
        given = {**dict(zip(("p", "training", "inplace"), others, strict=False)), **named}
        if given.get("p", 0.5) != 0.0 and given.get("training", True):
            raise NotAttentionError
        return described
    if name.startswith("new") and is_first:
        return getattr(described._query, f"new_{name[4:]}")(*others, **named)
    made = described if in_place else described.copied()
    if name == "mul" and len(others) == 1 and not named:
        made.times(others[0])
    elif name == "div" and is_first and len(others) == 1 and not named and type(others[0]) in (int, float):
        made.times(1.0 / others[0])
    elif name == "add" and len(others) == 1 and not named:
        made.plus(others[0])
    elif name == "masked_fill" and is_first:
        given = {**dict(zip(("mask", "value"), others, strict=False)), **named}
        made.hide(given.get("mask"), given.get("value"), hides=True)
    elif name == "where" and at == [1] and len(others) == 2 and not named:
        made.hide(*others)
    elif name == "softmax" and is_first and len(others) < 2:
        made.become_weights(others[0] if others else named.get("dim"), named.get("dtype"))
    else:
        raise NotAttentionError
    return made


class _Described(Pending):
    """Scores, or the weights that came of them."""

    def __init__(self, run: _Describing, query: Tensor, key: Tensor) -> None:
        self._run, self._query, self._key = run, query, key
        self._scale = 1.0
        self._added: Tensor | None = None
        self._seen: Tensor | None = None
        self._fill: float | None = None
        self._dropout: float | None = None
        self._are_weights = False
        self._result: Tensor | None = None
        self._read = [(x, x._version) for x in (query, key)]

    # What code may ask.
    shape = property(lambda self: torch.Size((*self._query.shape[:-1], self._key.shape[-2])))
    dtype = property(lambda self: self._query.dtype)
    device = property(lambda self: self._query.device)
    ndim = property(lambda self: self._query.dim())

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self._query.dim()

    def weights(self) -> Tensor:
        """With dropout, once they have been multiplied with a value."""
        if self._result is None:
            raise NotAttentionError
        return self._result

    def drop(self, p: float) -> _Described:
        if p == 0.0 and self._are_weights:
            return self
        if not self._are_weights or self._dropout is not None or not may_drop(p):
            raise NotAttentionError
        made = self.copied()
        made._dropout = p
        return made

    def copied(self) -> _Described:
        made: _Described = object.__new__(_Described)
        vars(made).update(vars(self), _read=[*self._read])
        return made

    def cast(self, dtype: Any, args: Any, named: Any) -> _Described:
        """To what it is already."""
        if dtype is None and len(args) == 1 and not named:
            like = args[0]
            dtype = like.dtype if isinstance(like, Tensor) and like.device == self.device else like
        if dtype != self.dtype or (args and named):
            raise NotAttentionError
        return self

    def times(self, factor: Any) -> None:
        is_first = self._added is None and self._seen is None and not self._are_weights
        if not is_first or type(factor) not in (int, float):
            raise NotAttentionError
        self._scale *= factor

    def plus(self, added: Any) -> None:
        if not self._fits(added) or added.dtype != self.dtype or self._seen is not None:
            raise NotAttentionError
        self._read.append((added, added._version))
        added = added[(None,) * (self.dim() - added.dim())]
        self._added = added if self._added is None else self._added + added

    def hide(self, mask: Any, fill: Any, hides: bool = False) -> None:
        """Where the mask says so, that number stands for the score."""
        if isinstance(fill, Tensor) and fill.dim() == 0 and not fill.is_cuda and not fill.requires_grad:
            fill = fill.item()
        is_number = type(fill) is float or (type(fill) is int and abs(fill) < 2**53)
        if not (is_number and self._fits(mask) and mask.dtype == torch.bool) or self._seen is not None:
            raise NotAttentionError
        self._read.append((mask, mask._version))
        seen = ~mask if hides else mask
        self._seen, self._fill = seen[(None,) * (self.dim() - seen.dim())], float(fill)

    def become_weights(self, dim: Any, dtype: Any) -> None:
        is_last = type(dim) is int and dim in (-1, self.dim() - 1)
        if self._are_weights or not is_last or dtype not in (None, self.dtype):
            raise NotAttentionError
        self._are_weights = True

    def _fits(self, x: Any) -> bool:
        """Whether it is a tensor that expands to the scores."""
        if type(x) not in (Tensor, nn.Parameter) or self._are_weights or x.dim() > self.dim():
            return False
        sizes = zip(reversed(x.shape), reversed(self.shape), strict=False)
        return all(a in (1, b) for a, b in sizes) and x.device == self.device

    def of(self, value: Any) -> Tensor:
        """The weights times the value."""
        query, key, dims = self._query, self._key, self.dim()
        plain = (
            self._are_weights
            and self._result is None
            and type(value) in (Tensor, nn.Parameter)
            and value.dtype == self.dtype
            and value.shape[:-1] == key.shape[:-1]
            and value.numel() > 0
            and all(x._version == version for x, version in self._read)
        )
        if not plain:
            raise NotAttentionError
        mask, bias, fill, seen = None, None, None, self._seen
        if self._added is not None and self._added.requires_grad:
            bias = self._added
        else:
            mask = self._added
        if seen is not None and mask is None and bias is None and self._fill == float("-inf"):
            mask = seen
        elif seen is not None:
            mask, bias, fill = seen, self._added, self._fill
        if dims == 3:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            mask, bias = (x if x is None else x.unsqueeze(1) for x in (mask, bias))
        scores = Scores(self._scale, None, self._dropout or 0.0, fill)
        with torch._C.DisableTorchFunction():
            out, weights = attend(query, key, value, mask, bias, scores)
        self._run.is_done = True
        self._result = weights if dims == 4 else weights.squeeze(1)
        return out if dims == 4 else out.squeeze(1)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return Tensor

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        if name not in METHODS:
            raise NotAttentionError
        return lambda *args, **named: _step(name, (self, *args), named)

    def __setattr__(self, name: str, value: Any) -> None:
        if name[0] != "_":
            raise NotAttentionError
        super().__setattr__(name, value)

    def __bool__(self) -> bool:
        raise NotAttentionError

    def __eq__(self, other: object) -> bool:
        raise NotAttentionError

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotAttentionError  # outside the run


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, other: _step(name, (self, other), {})


for _name in ("mul", "rmul", "imul", "truediv", "itruediv", "add", "radd", "iadd", "matmul"):
    setattr(_Described, f"__{_name}__", _operator(f"__{_name}__"))

"""A Linear and the activation or gate behind it in one module, and the feed-forward networks that start with such a module.

    value, gate = self.proj(x).chunk(2, dim=-1)             GEGLU, SwiGLU of diffusers, GLU of x-transformers
    return value * F.gelu(gate)
    net = [GEGLU(dim, hidden), Dropout(p), Linear(hidden, dim)]

Classes with GLU, GELU or SiLU in their names, with at most one Linear and one activation of their own; what they compute,
the verification says. By itself such a module becomes the same Linear and memkit's gated unit or activation, whose result
can be made again inside `memkit.lean`; in a network all runs as one, and what the Linears give is all that is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import functional as F
from ...functional._glu import Packing
from ..layers import LINEARS, Dropout, is_linear
from .activations import activation_of
from .mlps import GATES, act_alone, gated_linear, run
from .twin import Twin, computes_in, is_plain

PACKINGS: tuple[Packing, ...] = ("up_gate", "gate_up")
SIMPLE = {*LINEARS, nn.Dropout, Dropout, nn.Identity}
"""What may stand behind such a module in a network that runs as one."""
PLAIN = ("gelu", "gelu_tanh", "quick_gelu", "silu")


class Projection(NamedTuple):
    cls: type[nn.Module]
    linear: str
    """A child's name; "" where the activation or gate is all there is."""
    act: str
    """A child's name; "=gelu" stands for a function."""
    packing: Packing | None
    """None: no gate."""
    dropout: bool = True
    """Whether memkit's dropout may take the place of stock's."""
    down: int = 0
    """Which of the modules behind the first is the network's other Linear."""

    @property
    def op(self) -> str:
        return "act_linear" if self.packing is None else "gated"


def projections(module: nn.Module) -> Iterator[Projection]:
    """What one module may be."""
    cls = _class_of(module)
    name = cls.__name__.lower()
    gates = "glu" in name
    known = gates or any(word in name for word in ("gelu", "silu", "linearact"))
    if not known or cls.__module__.startswith(("torch.", "memkit.")) or module._parameters or module._buffers:
        return
    linears = [name for name, child in module._modules.items() if is_linear(child)]
    acts = [name for name, child in module._modules.items() if activation_of(child)]
    if len(linears) > 1 or len(acts) > 1 or len(module._modules) != len(linears) + len(acts):
        return
    if not (linears or gates):
        return
    functions = sorted(GATES, key=PLAIN[:1].count, reverse=True) if gates else PLAIN
    for act in acts or [f"={name}" for name in functions]:
        for packing in PACKINGS if gates else (None,):
            yield Projection(cls, linears[0] if linears else "", act, packing)


def networks(module: nn.Module) -> Iterator[Projection]:
    """What a network may be, by its first module: dropouts and one Linear follow."""
    first, *rest = parts_of(module) or [module]
    linears = [i for i, layer in enumerate(rest) if is_linear(layer)]
    if len(linears) == 1 and all(type(layer) in SIMPLE for layer in rest):
        yield from (how._replace(down=linears[0]) for how in projections(first) if how.linear)


def parts_of(module: nn.Module) -> list[nn.Module]:
    """What it calls in turn."""
    if _class_of(module) is nn.Sequential:
        return list(module.children())
    held = list(module._modules.values())
    return list(held[0]) if len(held) == 1 and type(held[0]) is nn.ModuleList else []


class Projected(Twin, kind="projected"):
    _swap: Projection
    saved = "h"

    def forward(self, input: Tensor) -> Tensor:
        how, act = self._swap, _act(self, self._swap)
        if act is None or not computes_in(input, *_linear(self, how)):
            return self._stock_forward(input)
        hidden = _projected(self, how, input)
        if how.packing is None:
            return act_alone(hidden, *act)
        gate: Any = act[0]
        return F.gated(hidden, None, gate, packing=how.packing)

    @staticmethod
    def kept(module: Any, shape: torch.Size, lean: bool) -> int:
        return _kept(module, shape)


class ProjectedNetwork(Twin, kind="projected network"):
    _swap: Projection
    saved = "h"

    def forward(self, input: Tensor) -> Tensor:
        how: Projection | None = vars(self).get("_swap")  # a slice of a Sequential has none
        first, *rest = parts_of(self) or [self]
        if how is None or _class_of(first) is not how.cls or not is_plain(first) or len(rest) <= how.down:
            return self._stock_forward(input)
        act = _act(first, how)
        if act is None or not computes_in(input, *_linear(first, how), *rest):
            return self._stock_forward(input)
        hidden = _projected(first, how, input)
        if how.packing is None:
            name = how.act[1:] if how.act[0] == "=" else getattr(first, how.act)
            before = getattr(first, how.linear) if how.linear else None
            return run((name, *rest), hidden, how.dropout, before)
        gate: Any = act[0]
        down = how.down
        parts = [hidden]
        del hidden
        out = gated_linear(parts, gate, how.packing, rest[:down], rest[down], how.dropout)
        return run(rest[down + 1 :], out, dropout=False)

    @staticmethod
    def kept(module: Any, shape: torch.Size, lean: bool) -> int:
        return _kept(parts_of(module)[0], shape)


def _class_of(module: Any) -> type[nn.Module]:
    """A library's, whether or not the module has become a twin."""
    cls: type[nn.Module] = type(module)
    while issubclass(cls, Twin):
        cls = cls._stock
    return cls


def _act(module: Any, how: Projection) -> tuple[str, dict[str, float]] | None:
    act = (how.act[1:], {}) if how.act[0] == "=" else activation_of(getattr(module, how.act))
    return act if act is None or how.packing is None or act[0] in GATES else None


def _linear(module: Any, how: Projection) -> list[Any]:
    return [getattr(module, how.linear)] if how.linear else []


def _projected(module: Any, how: Projection, input: Tensor) -> Tensor:
    return getattr(module, how.linear)(input) if how.linear else input


def _kept(module: Any, shape: torch.Size) -> int:
    """Elements of what the Linear gives, or of what is given where there is none, for a result of this shape."""
    width = next((int(child.out_features) for child in module.children() if is_linear(child)), 0)
    return shape.numel() // max(1, shape[-1]) * (width or 2 * shape[-1])

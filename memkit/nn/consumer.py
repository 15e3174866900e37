"""Layers with the operator in front of them, which backward computes again, and the two usual networks of such layers.

``ActLinear``, ``DropoutLinear``, ``GLULinear``: ``torch.nn.Linear`` with its constructor and ``state_dict``, and more
arguments. ``MLP`` and ``GatedMLP``: two layers with an activation between them, three with a gated unit; their parameters
are those of ordinary ``torch.nn.Linear`` modules under the usual names. Where a layer or norm inside one was replaced (by an
adapter, by a quantised one), is of a subclass or has hooks, it is called as it is, and memkit's operator beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from .._hooks import has_global_hooks, has_hooks
from .._lean import lean
from ..functional._activation import overwrites
from ..functional._glu import Packing
from ..functional._shared import check_number
from .norm import LayerNorm, RMSNorm, norm_act_conv_of

__all__ = [
    "MLP",
    "ActLinear",
    "Conv2d",
    "DropoutLinear",
    "GLULinear",
    "GatedMLP",
    "Linear",
    "NormActConv2d",
    "NormLinear",
]


class ActLinear(nn.Linear):
    """linear(act(x)); ``act`` and its ``params`` as in :func:`memkit.functional.act_linear`."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        act: str = "gelu",
        *,
        device: Any = None,
        dtype: Any = None,
        **params: Any,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.act = _activation(act)
        self.params = params

    def forward(self, input: Tensor) -> Tensor:
        return F.act_linear(input, self.weight, self.bias, self.act, **self.params)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, act={self.act!r}" + "".join(
            f", {k}={v}" for k, v in self.params.items()
        )


class DropoutLinear(nn.Linear):
    """linear(dropout(act(x))), without an activation where ``act`` is None."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        p: float = 0.5,
        act: str | None = None,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.p = _probability("DropoutLinear", p)
        self.act = act if act is None else _activation(act)

    def forward(self, input: Tensor) -> Tensor:
        return F.dropout_linear(input, self.weight, self.bias, self.p, self.training, act=self.act)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}" + ("" if self.act is None else f", act={self.act!r}")


class GLULinear(nn.Linear):
    """linear(act(gate) * up), of two tensors or of one that packs both; in_features: of each."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        act: str = "silu",
        *,
        packing: Packing = "gate_up",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.act = _gate(act)
        self.packing: Packing = packing

    def forward(self, gate: Tensor, up: Tensor | None = None) -> Tensor:
        return F.glu_linear(gate, up, self.weight, self.bias, self.act, packing=self.packing)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, act={self.act!r}"


class NormLinear(nn.Module):
    """A norm over the last dimension and the layers that read it, as a query, a key and a value do.

    ``norm``: a ``torch.nn.LayerNorm`` or ``RMSNorm``; with one layer the result is a tensor, else a tuple.
    """

    def __init__(self, norm: nn.LayerNorm | nn.RMSNorm, *linears: nn.Linear) -> None:
        super().__init__()
        if not isinstance(norm, (nn.LayerNorm, nn.RMSNorm)) or len(norm.normalized_shape) != 1:
            raise TypeError(
                f"NormLinear: expected a LayerNorm or RMSNorm over the last dimension, got {norm}"
            )
        if not linears:
            raise ValueError("NormLinear: expected at least one Linear, got none")
        self.norm = norm
        self.linears = nn.ModuleList(linears)

    def forward(self, input: Tensor) -> Tensor | tuple[Tensor, ...]:
        norm = self.norm
        linears: list[nn.Linear] = list(self.linears)  # type: ignore[arg-type]
        outs: tuple[Tensor, ...]
        if all(_is_plain(each) for each in linears) and _is_plain(norm, *_ROW_NORMS):
            outs = F.norm_linear(
                input,
                [each.weight for each in linears],
                [each.bias for each in linears],
                norm="layer_norm" if isinstance(norm, nn.LayerNorm) else "rms_norm",
                norm_weight=norm.weight,
                norm_bias=getattr(norm, "bias", None),
                eps=norm.eps,
            )
        else:
            h = norm(input)
            outs = tuple(each(h) for each in linears)
        return outs[0] if len(outs) == 1 else outs


class Linear(nn.Linear):
    """``torch.nn.Linear`` by :func:`memkit.functional.linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.weight, self.bias)


class Conv2d(nn.Conv2d):
    """``torch.nn.Conv2d`` by :func:`memkit.functional.conv2d`; where padding is text or not of zeros, as it is."""

    def forward(self, input: Tensor) -> Tensor:
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            return super().forward(input)
        return F.conv2d(input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class NormActConv2d(nn.Conv2d):
    """conv2d(act(norm(x))) with ``norm`` a ``torch.nn.BatchNorm2d``, as pre-activation networks and DenseNets have it."""

    def __init__(
        self,
        norm: nn.BatchNorm2d,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        *args: Any,
        act: str | None = "relu",
        **kwargs: Any,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel_size, *args, **kwargs)
        if self.padding_mode != "zeros" or isinstance(self.padding, str):
            raise ValueError(
                "NormActConv2d: expected padding_mode 'zeros' and padding in numbers, got "
                f"{self.padding_mode!r} and {self.padding!r}"
            )
        self.norm = norm
        self.act = act if act is None else _activation(act)

    def forward(self, input: Tensor) -> Tensor:
        norm = self.norm
        if not _is_plain(norm, nn.BatchNorm2d):
            h = norm(input)
            return super().forward(h if self.act is None else F.act_dropout(h, self.act, 0.0))
        return norm_act_conv_of(norm, self, input, self.act, {})

    def extra_repr(self) -> str:
        text: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{text}, act={self.act!r}"


class MLP(nn.Module):
    """fc2(dropout(act(fc1(x)))).

    Keeps fc1's output: 2 bytes an element in bfloat16, where stock keeps 4, with dropout 6. ``hidden_features``: None for
    four times ``in_features``; ``out_features``: None for ``in_features``. ``dropout``: of the hidden features;
    ``out_dropout``: of the result.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act: str = "gelu",
        bias: bool = True,
        dropout: float = 0.0,
        out_dropout: float = 0.0,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        hidden = 4 * in_features if hidden_features is None else hidden_features
        out = in_features if out_features is None else out_features
        self.fc1 = nn.Linear(in_features, hidden, bias, device, dtype)
        self.fc2 = nn.Linear(hidden, out, bias, device, dtype)
        self.act = _activation(act)
        self.dropout = _probability("MLP", dropout)
        self.out_dropout = _probability("MLP", out_dropout)

    def forward(self, input: Tensor) -> Tensor:
        h = self.fc1(input)
        p = self.dropout if self.training else 0.0
        if not p and _is_fresh(self.fc1) and overwrites(h):
            out = self.fc2(F.act_dropout(h, self.act, 0.0, inplace=True))
        elif _is_plain(self.fc2):
            out = F.dropout_linear(h, self.fc2.weight, self.fc2.bias, p, act=self.act)
        else:
            out = self.fc2(F.act_dropout(h, self.act, p))
        return F.dropout(out, self.out_dropout, self.training, "auto") if self.out_dropout else out

    def extra_repr(self) -> str:
        return f"act={self.act!r}, dropout={self.dropout}, out_dropout={self.out_dropout}"


class GatedMLP(nn.Module):
    """down_proj(dropout(act(gate_proj(x)) * up_proj(x))).

    Keeps gate and up: 4 bytes an element in bfloat16, where stock keeps 8. The MLP of Llama, Mistral, Qwen ("silu") and
    Gemma ("gelu_tanh"), with their parameters' names. ``hidden_features``: None for 8/3 of ``in_features``, rounded up to a
    multiple of 64. The rest as in :class:`MLP`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        act: str = "silu",
        bias: bool = False,
        dropout: float = 0.0,
        out_dropout: float = 0.0,
        *,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        hidden = -(-8 * in_features // 192) * 64 if hidden_features is None else hidden_features
        out = in_features if out_features is None else out_features
        self.gate_proj = nn.Linear(in_features, hidden, bias, device, dtype)
        self.up_proj = nn.Linear(in_features, hidden, bias, device, dtype)
        self.down_proj = nn.Linear(hidden, out, bias, device, dtype)
        self.act = _gate(act)
        self.dropout = _probability("GatedMLP", dropout)
        self.out_dropout = _probability("GatedMLP", out_dropout)

    def forward(self, input: Tensor) -> Tensor:
        parts = [self.gate_proj(input), self.up_proj(input)]
        out = self._down(parts)
        return F.dropout(out, self.out_dropout, self.training, "auto") if self.out_dropout else out

    def _down(self, parts: list[Tensor]) -> Tensor:
        """Of gate and up, taken from the list."""
        down, act = self.down_proj, self.act
        p = self.dropout if self.training else 0.0
        if not _is_plain(down) or (not p and all(map(overwrites, parts))):
            h = F.gated(parts[0], parts[1], act)  # type: ignore[arg-type]
            parts.clear()
            return down(F.dropout(h, p) if p else h)  # type: ignore[no-any-return]
        gate, up = parts
        if not p:
            return F.glu_linear(gate, up, down.weight, down.bias, act)
        with lean():  # the product, which dropout's node would keep
            return F.dropout_linear(F.gated(gate, up, act), down.weight, down.bias, p)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        return f"act={self.act!r}, dropout={self.dropout}, out_dropout={self.out_dropout}"


_ROW_NORMS = (nn.LayerNorm, nn.RMSNorm, LayerNorm, RMSNorm)


def _activation(act: str) -> str:
    """Raises at once what the first forward would."""
    F.act_dropout(torch.empty(0, device="cpu"), act, 0.0, save="input")
    return act


def _gate(act: str) -> str:
    F.gated(torch.empty(0, 2, device="cpu"), None, act)  # type: ignore[arg-type]
    return act


def _probability(name: str, p: float) -> float:
    check_number(name, "a dropout probability", p)
    if not 0 <= p <= 1:
        raise ValueError(f"{name}: expected a dropout probability in [0, 1], got {p}")
    return p


def _is_fresh(linear: nn.Module) -> bool:
    """Whether nobody has its result but who calls it. A weight of another tensor class may bring its own product."""
    return _is_plain(linear) and type(linear.weight) is nn.Parameter and not has_global_hooks()


def _is_plain(module: nn.Module, *types: type[nn.Module]) -> bool:
    """Whether calling the module does what its type's forward does with its parameters, and nothing else."""
    return type(module) in (types or (nn.Linear,)) and not has_hooks(module)

"""Feed-forward networks of model libraries, told by the names of their layers and verified by their values.

A row says in which order a module calls its children. `Steps`: one after the other, where an activation and the Linear
behind it become `act_linear`, which keeps the activation's input alone, and a batch norm runs with the activation behind
it. `Gating`: act(gate) * up before a Linear, as `glu_linear`, which keeps gate and up. What stands for a layer at the
time of the call decides: an adapter around it, a hook or a quantised layer is called as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import mode
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from ... import functional as F
from ..._hooks import only_read
from ..._lean import lean
from ...functional._activation import _apply, overwrites
from ...functional._glu import Packing
from ...functional._norm import output_dtype
from ...nn.norm import batch_norm_of
from ..layers import BATCH_NORMS, BatchNorm, Dropout, is_convolution, serves, takes
from ..types import KEEPS_OUTPUT
from .activations import activation_of
from .twin import Twin, computes_in, is_plain, linear_call, linear_weights, weight_of


class Steps(NamedTuple):
    """Children in the order of their calls; "=relu" stands for a function, an activation's by its name."""

    names: tuple[str, ...]
    dropout: bool = True
    """Whether memkit's dropout may take the place of stock's."""

    @property
    def op(self) -> str:
        return "batch_norm_act" if "bn" in self.names else "act_linear"


STEPS = (
    Steps(("c_fc", "act", "c_proj", "dropout")),  # GPT-2
    Steps(("c_fc", "act", "c_proj")),
    Steps(("dense_h_to_4h", "act", "dense_4h_to_h")),  # GPT-NeoX
    Steps(("fc_in", "act", "fc_out", "dropout")),  # GPT-J, CodeGen
    Steps(("fc1", "activation_fn", "fc2")),  # ViT, CLIP, SigLIP, Phi
    Steps(("fc1", "act", "fc2")),
    Steps(("up_proj", "act_fn", "down_proj")),  # Nemotron
    Steps(("c_fc", "act", "c_proj", "residual_dropout")),  # Starcoder 2
    Steps(("wi", "act", "dropout", "wo")),  # T5
    Steps(("fc1", "act", "drop1", "norm", "fc2", "drop2")),  # timm
    Steps(("fc1", "act", "fc2", "drop")),
    Steps(("fc1", "act", "drop", "fc2", "drop")),  # ViTDet
    Steps(("fc1", "activation", "drop", "fc2", "drop")),  # FocalNet
    Steps(("fc1", "act", "dropout", "fc2")),  # NLLB, SeamlessM4T
    Steps(("fc1", "activation_fn", "dropout1", "fc2", "dropout2")),  # Janus
    # wav2vec 2
    Steps(
        (
            "intermediate_dense",
            "intermediate_act_fn",
            "intermediate_dropout",
            "output_dense",
            "output_dropout",
        )
    ),
    Steps(("conv", "bn", "=relu")),  # Inception, GoogLeNet
)


class Gating(NamedTuple):
    gate: str
    up: str | None
    """None: `gate` gives both in one tensor."""
    down: str
    act: str
    """As of `Steps`, "=silu" is a function."""
    between: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    packing: Packing = "gate_up"
    dropout: bool = True

    @property
    def op(self) -> str:
        return "gated"

    @property
    def names(self) -> tuple[str, ...]:
        found = (self.gate, self.up, self.act, *self.between, self.down, *self.after)
        return tuple(name for name in found if name is not None)


GATINGS = (
    Gating("gate_proj", "up_proj", "down_proj", "act_fn"),  # Llama, Mistral, Qwen, Gemma
    Gating("gate_proj", "up_proj", "down_proj", "activation_fn"),  # Llama 4
    Gating("w1", "w3", "w2", "act_fn"),
    Gating("wi_0", "wi_1", "wo", "act", ("dropout",)),  # T5 1.1
    Gating("Wi", None, "Wo", "act", ("drop",)),  # ModernBERT
    Gating("gate_up_proj", None, "down_proj", "activation_fn"),  # Phi-3, GLM
    Gating("fc1_g", "fc1_x", "fc2", "act", ("drop1", "norm"), ("drop2",)),  # timm
    Gating("fc1", None, "fc2", "act", ("drop1", "norm"), ("drop2",)),
    Gating("fc1", None, "fc2", "act", ("drop1", "norm"), ("drop2",), "up_gate"),
)

GATES = frozenset({"silu", "gelu", "gelu_tanh", "relu", "sigmoid"})
"""What `glu_linear` takes."""


ALONE = KEEPS_OUTPUT | {"relu_squared"}
"""The slope follows from the output, which the layer behind keeps too: making that again would bring nothing."""


class FeedForward(Twin, kind="steps"):
    _swap: Steps
    saved = "h"

    def forward(self, input: Tensor) -> Tensor:
        held: Any = self._modules  # in which nn.Module looks last
        steps = [held.get(n) or (n[1:] if n[0] == "=" else getattr(self, n)) for n in self._swap.names]
        if not computes_in(input, *steps):
            return self._stock_forward(input)
        return run(steps, input, self._swap.dropout)

    @staticmethod
    def kept(module: Any, shape: torch.Size, lean: bool) -> int:
        """Elements of what lies between the layers, beside the input, where the result has this shape."""
        linears = [layer for layer in module._modules.values() if linear_weights(layer) is not None]
        return shape.numel() if len(linears) < 2 else _hidden(linears[-1], shape)


class GatedFeedForward(Twin, kind="gated"):
    _swap: Gating
    saved = "gate, up"

    def forward(self, input: Tensor) -> Tensor:
        if is_dynamo_compiling() and not torch.is_grad_enabled():  # what compilers do as well
            return self._stock_forward(input)
        how = self._swap
        down: Any = getattr(self, how.down)
        act = (how.act[1:], {}) if how.act[0] == "=" else activation_of(getattr(self, how.act))
        if act is None or act[0] not in GATES or not computes_in(input, getattr(self, how.gate), down):
            return self._stock_forward(input)
        parts = [getattr(self, name)(input) for name in (how.gate, how.up) if name is not None]
        between = [getattr(self, name) for name in how.between]
        kind: Any = act[0]
        out = gated_linear(parts, kind, how.packing, between, down, how.dropout)
        for name in how.after:
            out = getattr(self, name)(out)
        return out

    @staticmethod
    def kept(module: Any, shape: torch.Size, lean: bool) -> int:
        rows = (row for row in GATINGS if all(hasattr(module, name) for name in row.names))
        if (row := next(rows, None)) is not None:
            return 2 * _hidden(getattr(module, row.down), shape)
        width: int = mode(each.out_features for each in module.children() if hasattr(each, "out_features"))
        return 2 * shape.numel() // shape[-1] * width


def gated_linear(
    parts: list[Tensor],
    act: Any,
    packing: Packing,
    between: Sequence[Any],
    down: Any,
    dropout: bool,
) -> Tensor:
    """The gated unit, what runs behind it, and the Linear. ``parts``: gate and up, or both in one; taken from the list.
    ``dropout``: whether memkit's may take the place of stock's."""
    between = [step for step in between if not _is_idle(step)]
    gated = partial(F.gated, act=act, packing=packing)
    linear = linear_call(down)
    if linear is not None and not between and not all(map(overwrites, parts)):

        def fused(weight: Tensor, bias: Tensor | None, gate: Tensor, up: Tensor | None = None) -> Tensor:
            return F.glu_linear(gate, up, weight, bias, act, packing=packing)

        return linear(fused, *parts)
    if linear is not None and dropout and len(between) == 1 and _is_dropout(between[0]):
        with lean():  # the product, which dropout's node would keep
            product = gated(*parts)
            return linear(lambda w, b, h: F.dropout_linear(h, w, b, between[0].p), product)
    out = gated(*parts)
    parts.clear()  # nothing is recorded of them, or what is has them
    for step in (*between, down):
        out = step(out)
    return out


class BertLayer(Twin, kind="bert_layer"):
    """The activation and the Linear behind it, which are two modules' there, of the classes that were verified."""

    _swap: tuple[type[nn.Module], type[nn.Module]]
    saved = "h"

    def feed_forward_chunk(self, attention_output: Tensor) -> Tensor:
        module: Any = self
        first, last = module.intermediate, module.output
        known = (type(first), type(last)) == self._swap and is_plain(first) and is_plain(last)
        if not (known and computes_in(attention_output, first.dense, last.dense)):
            return super().feed_forward_chunk(attention_output)  # type: ignore[misc,no-any-return]
        steps = (first.dense, first.intermediate_act_fn, last.dense, last.dropout)
        out = run(steps, attention_output, dropout=False)
        return last.LayerNorm(out + attention_output)  # type: ignore[no-any-return]

    @staticmethod
    def kept(module: Any, shape: torch.Size, lean: bool) -> int:
        return _hidden(module.output.dense, shape)


class Experts(Twin, kind="experts"):
    """A mixture's experts, whose products lie in one tensor."""

    _swap: Any
    saved = "gate, up, product"

    def _apply_gate(self, gate_up_out: Tensor) -> Tensor:
        module: Any = self
        act = activation_of(module.act_fn)
        if act is None or act[0] not in GATES or not serves(gate_up_out):
            return super()._apply_gate(gate_up_out)  # type: ignore[misc,no-any-return]
        return F.gated(gate_up_out, None, act[0])  # type: ignore[arg-type]

    @staticmethod
    def kept(module: Any, shape: torch.Size, lean: bool) -> int:
        return shape.numel()


class BatchedExperts(Twin, kind="batched_experts"):
    """Experts that are given equally many rows each, as in Llama 4."""

    _swap: Any
    saved = "gate, up, product"

    def forward(self, hidden_states: Tensor) -> Tensor:
        module: Any = self
        act = activation_of(module.act_fn)
        if act is None or act[0] not in GATES or not serves(hidden_states):
            return self._stock_forward(hidden_states)
        first, last = module.gate_up_proj, module.down_proj
        gate_up = torch.bmm(hidden_states.view(first.shape[0], -1, first.shape[1]), first)
        kind: Any = act[0]
        return torch.bmm(F.gated(gate_up, None, kind), last).view(-1, last.shape[2])

    @staticmethod
    def kept(module: Any, shape: torch.Size, lean: bool) -> int:
        return shape[0] * int(module.down_proj.shape[1]) * (2 if lean else 3)


def _hidden(down: Any, shape: torch.Size) -> int:
    """Elements of what this layer was given, where its result has this shape."""
    return shape.numel() // shape[-1] * int(getattr(down, "in_features", 0) or weight_of(down).shape[0])


def run(steps: Sequence[Any], input: Tensor, dropout: bool, before: Any = None) -> Tensor:
    """Calls one after the other, and pairs that memkit has an operator for as one. ``before``: the layer whose result the
    input is, if nothing came between."""
    at = 0
    while at < len(steps):
        step = steps[at]
        input, at = _next(steps, at, input, dropout, before)
        before = step
    return input


def _next(steps: Sequence[Any], at: int, input: Tensor, dropout: bool, before: Any) -> tuple[Tensor, int]:
    step = steps[at]
    if is_batch_norm(step) and serves(input) and output_dtype(input) == input.dtype:
        after = at + 1
        while after < len(steps) and _is_idle(steps[after]):
            after += 1
        behind = steps[after] if after < len(steps) else None
        act = (behind, {}) if isinstance(behind, str) else behind and activation_of(behind)
        if act:
            return batch_norm_of(step, input, *act), after + 1
    act = (step, {}) if isinstance(step, str) else activation_of(step)
    if act is not None:
        params: Any = act[1]
        after, p = at + 1, 0.0
        while after < len(steps):
            if not _is_idle(steps[after]):
                if p or not (dropout and _is_dropout(steps[after])):
                    break
                p = steps[after].p
            after += 1
        if not p and overwrites(input) and _makes_new(before):
            return _apply(act[0], input, tuple(params.values()), True, "auto"), after
        layer: Any = steps[after] if after < len(steps) else None
        linear = linear_call(layer)
        if linear is not None and p:
            # The hidden features of a dropout_linear are the ones that act_dropout would drop.
            out = linear(lambda w, b, h: F.dropout_linear(h, w, b, p, act=act[0], **params), input)
            return out, after + 1
        if act[0] in ALONE and not p:
            return _apply(act[0], input, tuple(params.values()), False, "auto"), at + 1
        if linear is not None and not p:
            return linear(lambda w, b, h: F.act_linear(h, w, b, act[0], **params), input), after + 1
        if not p and takes(layer, input):
            how = (layer.stride, layer.padding, layer.dilation, layer.groups)
            return F.act_conv2d(input, layer.weight, layer.bias, *how, act=act[0], **params), after + 1
        if serves(input):  # before a layer that is none of these, as one with an adapter
            return act_alone(input, *act), at + 1
    return _called(step, input), at + 1


def _makes_new(layer: Any) -> bool:
    """Whether nobody has its result but who calls it."""
    return linear_weights(layer) is not None or (is_convolution(layer) and is_plain(layer))


def _called(step: Any, input: Tensor) -> Tensor:
    return _apply(step, input, (), False, "auto") if isinstance(step, str) else step(input)


def act_alone(input: Tensor, name: str, params: dict[str, float]) -> Tensor:
    """Out of place, from the input."""
    values = tuple(params.values())
    return _apply(name, input, values, False, "input")


def is_batch_norm(step: Any) -> bool:
    return (type(step) in BATCH_NORMS or isinstance(step, BatchNorm)) and is_plain(step)


def _is_dropout(step: Any) -> bool:
    return (type(step) is nn.Dropout or isinstance(step, Dropout)) and only_read(step) and not step.inplace


def _is_idle(step: Any) -> bool:
    """Gives what it is given."""
    if type(step) is nn.Identity:
        return only_read(step)
    return _is_dropout(step) and not (step.training and step.p > 0)

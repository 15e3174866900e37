"""The loss of transformers' language models: the logits are kept and no softmax, and not a float32 copy of them.

A model holds its loss as a function, in `_loss_function` if it is not the library's own; so nothing but that is changed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from ... import functional as F
from ..layers import serves
from ..types import HALVES

_HOLDER = "_loss_function"
_now = local()

INSTEAD = 'swap: expected, with "linear_cross_entropy", nothing but the loss to use the logits in training with labels'


class Logits:
    """What stands for the result of the last layer, or for a multiple of it, or for cap * tanh(a multiple)."""

    def __init__(self, head: Any, hidden: Tensor, times: float = 1.0, cap: float | None = None) -> None:
        self._head, self._hidden, self._times, self._cap = head, hidden, times, cap
        self.device = hidden.device

    def contiguous(self) -> Logits:
        return self

    def float(self) -> Logits:
        """The loss is taken in float32."""
        return self

    def tanh(self) -> Logits:
        if self._cap is not None:
            raise TypeError(INSTEAD)
        return Logits(self._head, self._hidden, self._times, 1.0)

    def __mul__(self, number: Any) -> Logits:
        if not isinstance(number, int | float):
            raise TypeError(INSTEAD)
        if self._cap is not None:
            return Logits(self._head, self._hidden, self._times, self._cap * number)
        return Logits(self._head, self._hidden, self._times * number)

    __rmul__ = __mul__

    def __truediv__(self, number: Any) -> Logits:
        if not isinstance(number, int | float):
            raise TypeError(INSTEAD)
        return self * (1 / number)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{INSTEAD}, got .{name}")

    def _refuse(self, *others: Any) -> Any:
        raise TypeError(INSTEAD)

    __add__ = __radd__ = __sub__ = __rsub__ = __matmul__ = __neg__ = __len__ = __iter__ = __getitem__ = (
        _refuse
    )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.tanh and len(args) == 1 and not kwargs:
            return args[0].tanh()
        raise TypeError(f"{INSTEAD}, got {getattr(function, '__name__', function)}")

    def loss(self, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
        kind, dtype = self.device.type, self._hidden.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        half = dtype in HALVES
        hidden, bias = self._hidden.flatten(0, -2), self._head.bias
        times = self._times * (self._cap or 1.0)  # cap * tanh(times * x / cap)
        if abs(times - 1) > 1e-12:
            hidden, bias = hidden * times, None if bias is None else bias * times
        with torch.autocast(kind, dtype if half else None, enabled=half):  # in which the loss is float32
            loss = F.linear_cross_entropy(
                hidden,
                self._head.weight,
                target,
                linear_bias=bias,
                ignore_index=ignore_index,
                reduction=reduction,
                softcap=self._cap,
            )
        _now.loss = loss
        return loss


def take_loss() -> Tensor | None:
    """Of this thread's :class:`Logits`, the last one."""
    loss: Tensor | None = vars(_now).pop("loss", None)
    return loss


def causal_lm_loss(
    logits: Tensor | Logits,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """As transformers' ForCausalLMLoss: of tokens < n against n, in float32."""
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]  # type: ignore[arg-type]
    targets = shift_labels.reshape(-1).to(logits.device)
    reduction: Any = "mean" if num_items_in_batch is None else "sum"
    if isinstance(logits, Logits):
        loss = logits.loss(targets, ignore_index, reduction)
    elif serves(logits) and logits.dtype != torch.float64:  # stock's loss is float32 whatever it is given
        half = logits.dtype in HALVES
        with torch.autocast(logits.device.type, logits.dtype if half else None, enabled=half):
            loss = F.cross_entropy(
                logits.view(-1, vocab_size), targets, ignore_index=ignore_index, reduction=reduction
            )
    else:
        loss = nn.functional.cross_entropy(
            logits.float().view(-1, vocab_size), targets, ignore_index=ignore_index, reduction=reduction
        )
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def has_library_loss(module: Any) -> bool:
    """Whether a model's loss is transformers' for causal language models, and computes what ours does."""
    if not hasattr(type(module), "loss_function"):  # what wraps a model may show its attributes as its own
        return False
    kind = getattr(module, "loss_type", "")
    if kind not in ("ForCausalLM", "ForConditionalGeneration", None) or _HOLDER in vars(module):
        return False
    # None by the name of the class (GPT2LMHeadModel): the library takes that loss then, where the model has one at all. What
    # generates under a condition has the same by its name (LLaVA), or one of its own (T5, Whisper).
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if kind != "ForCausalLM" and "loss_function" not in getattr(code, "co_names", ()):
        return False
    theirs: Any = getattr(module, "loss_function", None)
    return getattr(theirs, "__module__", "") == "transformers.loss.loss_utils" and _same(
        theirs, causal_lm_loss
    )


def hold(module: nn.Module) -> None:
    vars(module)[_HOLDER] = causal_lm_loss


def holds(module: nn.Module) -> bool:
    return vars(module).get(_HOLDER) is causal_lm_loss


def release(module: nn.Module) -> bool:
    """Gives the library's loss back, if the module held ours."""
    if not holds(module):
        return False
    del vars(module)[_HOLDER]
    return True


def _same(theirs: Callable[..., Tensor], ours: Callable[..., Tensor]) -> bool:
    """On a few numbers, in the ways that a trainer calls it."""
    generator = torch.Generator("cpu").manual_seed(0)
    labels = torch.randint(5, (2, 4), generator=generator, device="cpu")
    for dtype in (torch.float32, torch.bfloat16):
        for options in ({}, {"num_items_in_batch": 7}, {"ignore_index": -1}):
            labels[0, 1] = options.get("ignore_index", -100)
            found = []
            for loss in (theirs, ours):
                drawn = torch.randn(2, 4, 5, generator=generator.manual_seed(1), device="cpu")
                logits = drawn.to(dtype).requires_grad_()
                with torch.enable_grad():
                    value = loss(logits, labels.clone(), 5, **options)
                    found.append((value, *torch.autograd.grad(value, logits)))
            tolerance = 1e-5 if dtype == torch.float32 else 1e-2
            pairs = zip(*found, strict=True)
            if not all(
                a.dtype == b.dtype and torch.allclose(a, b, rtol=tolerance, atol=tolerance) for a, b in pairs
            ):
                return False
    return True

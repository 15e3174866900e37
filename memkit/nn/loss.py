"""Twins of torch.nn's losses over many classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import functional as F
from ..functional import Inplace
from ..functional._activation import check_inplace


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """torch.nn.CrossEntropyLoss over :func:`memkit.functional.cross_entropy`: the same arguments and state, and
    ``z_loss``, ``softcap`` and ``inplace``."""

    # In the class, so that a module whose class was changed has them too.
    z_loss: float = 0.0
    softcap: float | None = None
    inplace: Any = False  # Inplace

    def __init__(
        self,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        *,
        z_loss: float = 0.0,
        softcap: float | None = None,
        inplace: Inplace = False,
    ) -> None:
        check_inplace("CrossEntropyLoss", inplace)
        super().__init__(weight, size_average, ignore_index, reduce, reduction, label_smoothing)
        self.z_loss = z_loss
        self.softcap = softcap
        self.inplace = inplace

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(
            input,
            target,
            self.weight,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            inplace=self.inplace,
        )


class LinearCrossEntropyLoss(nn.Linear):
    """A linear layer and the cross entropy of its output, over :func:`memkit.functional.linear_cross_entropy`.

    The layer is an ``nn.Linear(in_features, num_classes, bias)``: its keys, its initialisation. ``tied_weight``: a
    parameter [num_classes, in_features] to use for its weight, such as an embedding's. ``weight`` being the layer's, the
    class weights are called ``class_weight`` (a buffer that is not saved). ``z_loss``, ``softcap``, ``chunk`` and the
    rest are the function's.

    forward(input [..., in_features], target) returns the loss; ``logits(input)`` what the layer alone does.
    """

    class_weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        bias: bool = True,
        *,
        tied_weight: nn.Parameter | None = None,
        class_weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        softcap: float | None = None,
        chunk: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if tied_weight is not None:
            if tied_weight.shape != (num_classes, in_features):
                raise ValueError(
                    f"LinearCrossEntropyLoss: expected a tied_weight of [{num_classes}, {in_features}], got "
                    f"{list(tied_weight.shape)}"
                )
            device, dtype = tied_weight.device, tied_weight.dtype
        super().__init__(in_features, num_classes, bias, device=device, dtype=dtype)
        if tied_weight is not None:
            self.weight = tied_weight
        self.register_buffer("class_weight", class_weight, persistent=False)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.softcap = softcap
        self.chunk = chunk

    @property
    def num_classes(self) -> int:
        return self.out_features

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.linear_cross_entropy(
            input,
            self.weight,
            target,
            linear_bias=self.bias,
            weight=self.class_weight,
            reduction=self.reduction,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            softcap=self.softcap,
            chunk=self.chunk,
        )

    def logits(self, input: Tensor) -> Tensor:
        """The layer's output, after the softcap."""
        logits = super().forward(input)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, num_classes={self.num_classes}, bias={self.bias is not None}, "
            f"reduction={self.reduction!r}"
        )

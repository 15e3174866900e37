"""AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..pool import Pool
from ._base import FusedOptimizer, Part, Step
from ._state import Moment

FIRST = Moment("exp_avg", torch.int8)
SECOND = Moment("exp_avg_sq", torch.uint8)
LARGEST = Moment("max_exp_avg_sq", None, late=True)


class AdamW(FusedOptimizer):
    """``torch.optim.AdamW(fused=True)`` in one call for all parameters; see :mod:`memkit.optim` for what it adds.

    Loshchilov, Hutter: "Decoupled Weight Decay Regularization", 2019. 8-bit moments after Dettmers et al.: "8-bit
    Optimizers via Block-wise Quantization", 2022, with levels of their own (q⁴ and q⁸); a NaN or infinite gradient makes
    its whole block NaN.

    Args:
        lr: a number, or a tensor of one element.
        amsgrad: not with ``state_dtype="8bit"``.

    State: ``step``, ``exp_avg``, ``exp_avg_sq`` (``max_exp_avg_sq``), as torch's; in 8 bits int8 and uint8 with
    ``exp_avg_scale`` and ``exp_avg_sq_scale``.

    Raises:
        ValueError, TypeError: an argument, a parameter or a loaded state that does not fit.
        RuntimeError: a gradient that does not fit, such as a sparse one, or a plain one of a DTensor; nothing is written.
    """

    _name = "AdamW"
    _all_moments = (FIRST, SECOND, LARGEST)
    _fused = True  # its `step` is on the device
    _numbers_named = ("lr", "weight_decay", "eps")
    _known_by = ("lr", "betas")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | str | None = None,
        block_size: int = 256,
        stochastic_rounding: bool = True,
        pool: Pool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": _pair(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
            "decoupled_weight_decay": True,
            "state_dtype": state_dtype,
            "block_size": block_size,
            "stochastic_rounding": stochastic_rounding,
        }
        super().__init__(params, defaults, pool)

    def _check_numbers(self, group: dict[str, Any]) -> None:
        super()._check_numbers(group)
        _pair(group["betas"])

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        if not all(0 <= beta < 1 for beta in _pair(group["betas"])):
            raise ValueError(f"AdamW: expected betas of at least 0 and below 1, got {tuple(group['betas'])}")
        if group["amsgrad"] and group["state_dtype"] == "8bit":
            raise ValueError("AdamW: expected amsgrad without state_dtype '8bit', got both")
        if not group["decoupled_weight_decay"]:
            raise ValueError(
                "AdamW: expected a state of AdamW, got one of Adam (decoupled_weight_decay is False)"
            )

    def _moments(self, group: dict[str, Any]) -> tuple[Moment, ...]:
        return (FIRST, SECOND, LARGEST) if group["amsgrad"] else (FIRST, SECOND)

    def _advance(self, part: Part, step: Step) -> None:
        group = part.group
        lr, lr_tensor = self._numbers(group)
        beta1, beta2 = group["betas"]
        step.adamw(
            lr,
            lr_tensor,
            float(beta1),
            float(beta2),
            group["eps"],
            float(group["weight_decay"]),
            *self._rest(part),
        )


def _pair(betas: Any) -> tuple[float, float]:
    try:
        first, second = betas
        return float(first), float(second)
    except (TypeError, ValueError):
        raise ValueError(f"AdamW: expected betas of two numbers, got {betas!r}") from None

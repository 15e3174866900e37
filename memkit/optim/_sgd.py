"""Stochastic gradient descent."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..pool import Pool
from ._base import FusedOptimizer, Part, Step
from ._state import Moment

BUFFER = Moment("momentum_buffer", torch.int8)


class SGD(FusedOptimizer):
    """``torch.optim.SGD(fused=True)`` in one call for all parameters; see :mod:`memkit.optim` for what it adds.

    State, with momentum: ``momentum_buffer`` as torch's (in 8 bits int8 with ``momentum_buffer_scale``), and ``step``.
    Without momentum (0 by default, as in torch) there is no moment, and ``state_dtype`` and ``block_size`` have no effect.
    Arguments that are not named there are torch's; errors are those of :class:`AdamW`.
    """

    _name = "SGD"
    _all_moments = (BUFFER,)
    _numbers_named = ("lr", "weight_decay", "momentum")
    _known_by = ("lr", "momentum", "dampening")
    _flags_named = ("maximize", "nesterov")
    _fused = None  # what suits the parameters: PyTorch has no fused SGD for DTensors

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float | Tensor = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        state_dtype: torch.dtype | str | None = None,
        block_size: int = 256,
        stochastic_rounding: bool = True,
        pool: Pool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
            "state_dtype": state_dtype,
            "block_size": block_size,
            "stochastic_rounding": stochastic_rounding,
        }
        super().__init__(params, defaults, pool)

    def _check_numbers(self, group: dict[str, Any]) -> None:
        super()._check_numbers(group)
        if not isinstance(group["dampening"], Real):
            got = type(group["dampening"]).__name__
            raise TypeError(f"SGD: expected dampening to be a number, got {got}")

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            got = f"{group['momentum']} and {group['dampening']}"
            raise ValueError(f"SGD: expected with nesterov a momentum above 0 and no dampening, got {got}")

    def state_dict(self) -> dict[str, Any]:
        """As torch's, which counts no steps: where dampening would take a buffer for one, before the first there is none."""
        packed = super().state_dict()
        for group in packed["param_groups"]:
            for key in group["params"] if group["dampening"] else ():
                if not float(packed["state"].get(key, {}).get("step", 1)):
                    del packed["state"][key]
        return packed

    def _moments(self, group: dict[str, Any]) -> tuple[Moment, ...]:
        return (BUFFER,) if group["momentum"] else ()

    def _advance(self, part: Part, step: Step) -> None:
        group = part.group
        lr, lr_tensor = self._numbers(group)
        step.sgd(
            lr,
            lr_tensor,
            float(group["momentum"]),
            float(group["dampening"]),
            float(group["weight_decay"]),
            group["nesterov"],
            *self._rest(part),
        )

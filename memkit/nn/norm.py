"""Twins of torch.nn's norms: subclasses with the same constructor and ``state_dict``, over :mod:`memkit.functional`.

``LayerNorm`` and ``RMSNorm`` have two more attributes, in the constructor or later: ``inplace`` (False, True or "auto") and
``save`` ("auto", "input" or "output"). The batch norms have ``act`` (the name of an activation, with its parameters in
``act_params``) and ``process_group``, over which a training step's statistics are taken together.
"""

from __future__ import annotations

from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from .. import _C
from .. import functional as F
from .activation import _Variant


class LayerNorm(_Variant, nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(
            input,
            self.normalized_shape,
            self.weight,
            self.bias,
            self.eps,
            inplace=self.inplace,
            save=self.save,
        )


class RMSNorm(_Variant, nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(
            x, self.normalized_shape, self.weight, self.eps, inplace=self.inplace, save=self.save
        )


class GroupNorm(nn.GroupNorm):
    def forward(self, input: Tensor) -> Tensor:
        return F.group_norm(input, self.num_groups, self.weight, self.bias, self.eps)


class BatchNormState(TypedDict):
    """What a batch norm computes with beside its parameters: arguments of :func:`memkit.functional.batch_norm_act`."""

    running_mean: Tensor | None
    running_var: Tensor | None
    training: bool
    momentum: float
    eps: float


def batch_norm_state(module: Any) -> BatchNormState:
    """Of one call of a batch norm of torch.nn, which is counted."""
    momentum = 0.0 if module.momentum is None else module.momentum
    training, tracks = module.training, module.track_running_stats
    mean, variance = module.running_mean, module.running_var  # a buffer costs a module a search
    counter = module.num_batches_tracked if training and tracks else None
    if counter is not None:
        if is_compiling() or _C.count_batch(counter) is None:
            counter.add_(1)
        if module.momentum is None:  # the average over all batches
            momentum = 1.0 / float(counter)
    kept = not training or tracks
    return {
        "running_mean": mean if kept else None,
        "running_var": variance if kept else None,
        "training": training or (mean is None and variance is None),
        "momentum": momentum,
        "eps": module.eps,
    }


def batch_norm_of(
    module: Any, input: Tensor, act: str | None, params: dict[str, Any], process_group: Any = None
) -> Tensor:
    """What a batch norm of torch.nn computes with its state, and the activation behind it."""
    module._check_input_dim(input)
    state = batch_norm_state(module)
    try:
        return F.batch_norm_act(
            input,
            weight=module.weight,
            bias=module.bias,
            act=act,
            process_group=process_group,
            **state,
            **params,
        )
    except (RuntimeError, TypeError, ValueError) as error:
        refused = str(error).startswith("batch_norm_act: expected")  # before it wrote, so stock may do it
        counts = module.training and module.track_running_stats and module.num_batches_tracked is not None
        if refused and counts:
            module.num_batches_tracked.sub_(1)
        raise


def norm_act_conv_of(
    norm: Any, conv: nn.Conv2d, input: Tensor, act: str | None, params: dict[str, Any]
) -> Tensor:
    """What a batch norm of torch.nn, the activation and the convolution behind it compute, as one operator."""
    norm._check_input_dim(input)
    return F.norm_act_conv2d(
        input,
        conv.weight,
        conv.bias,
        conv.stride,
        conv.padding,  # type: ignore[arg-type]
        conv.dilation,
        conv.groups,
        norm_weight=norm.weight,
        norm_bias=norm.bias,
        act=act,
        **batch_norm_state(norm),
        **params,
    )


class _BatchNorm(nn.modules.batchnorm._BatchNorm):
    """The module of the same name in torch.nn, with its arguments and state, and the activation behind it.

    Arguments by keyword, and attributes:

    ``act``
        The name of an activation in :mod:`memkit.functional`, whose parameters follow by keyword (``alpha=0.5``).
    ``process_group``
        Over which a training step's statistics are taken together, as in ``torch.nn.SyncBatchNorm``; None: this process
        alone.
    """

    # Defaults in the class, so that a module whose class was changed has them too.
    act: str | None = None
    act_params: dict[str, Any] = {}  # noqa: RUF012  replaced, never changed
    process_group: Any = None

    def __init__(self, *args: Any, act: str | None = None, process_group: Any = None, **kwargs: Any) -> None:
        stock = {"eps", "momentum", "affine", "track_running_stats", "device", "dtype", "bias"}
        own = {name: value for name, value in kwargs.items() if name in stock | {"num_features"}}
        super().__init__(*args, **own)
        self.act = act
        self.act_params = {name: value for name, value in kwargs.items() if name not in own}
        self.process_group = process_group
        if act is not None:  # raises at once what the first forward would
            F.act_dropout(torch.empty(0, device="cpu"), act, 0.0, save="input", **self.act_params)
        elif self.act_params:
            name, got = type(self).__name__, ", ".join(self.act_params)
            raise TypeError(f"{name}: expected parameters of an activation with act=, got {got} alone")

    def forward(self, input: Tensor) -> Tensor:
        group = self.process_group if self.training else None
        return batch_norm_of(self, input, self.act, self.act_params, group)

    def extra_repr(self) -> str:
        text: str = super().extra_repr()  # type: ignore[no-untyped-call]
        if self.act is not None:
            text += f", act={self.act!r}" + "".join(f", {k}={v}" for k, v in self.act_params.items())
        return text


class BatchNorm1d(_BatchNorm, nn.BatchNorm1d):
    pass


class BatchNorm2d(_BatchNorm, nn.BatchNorm2d):
    pass


class BatchNorm3d(_BatchNorm, nn.BatchNorm3d):
    pass

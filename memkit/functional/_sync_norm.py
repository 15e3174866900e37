"""Batch norm whose statistics are those of all processes of a group, as in ``torch.nn.SyncBatchNorm``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ._norm import output_dtype

ops = torch.ops.memkit


def synchronised(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    act: str,
    params: list[float],
    group: Any,
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The result, the common mean and variance, and of how many values a channel they are."""
    with torch.no_grad():
        mean, variance, count = _statistics(input, group)
    if count <= 1:
        raise ValueError(
            "batch_norm_act: expected more than 1 value per channel when training, got "
            f"{list(input.shape)} in each process"
        )
    out: Tensor = _Synchronised.apply(input, weight, bias, mean, variance, count, eps, act, params, group)
    return out, mean, variance, count


def _statistics(input: Tensor, group: Any) -> tuple[Tensor, Tensor, int]:
    """Gathered and put together as means and squared distances, which a large mean does not spoil."""
    own_mean, own_variance = ops._channel_moments(input.detach(), 0)
    count = input.numel() // max(1, input.shape[1])
    if count == 0:  # a process without samples
        own_mean, own_variance = torch.zeros_like(own_mean), torch.zeros_like(own_variance)
    own = torch.cat([own_mean, own_variance, own_mean.new_full((1,), count)])
    everyone = own.new_empty(dist.get_world_size(group), own.numel())
    dist.all_gather(list(everyone.unbind()), own, group=group)
    counts = everyone[:, -1:]
    share = counts / counts.sum()
    means, variances = everyone[:, :-1].chunk(2, 1)
    mean = (means * share).sum(0)
    variance = ((variances + (means - mean).square()) * share).sum(0)
    return mean, variance, int(counts.sum().item())


class _Synchronised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: int,
        eps: float,
        act: str,
        params: list[float],
        group: Any,
    ) -> Tensor:
        ctx.save_for_backward(input, weight, bias, mean, variance)
        ctx.count, ctx.eps, ctx.act, ctx.params, ctx.group = count, eps, act, params, group
        out: Tensor = ops._channel_norm_forward(
            input, 0, mean, variance, weight, bias, eps, act, params, output_dtype(input)
        )
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, bias, mean, variance = ctx.saved_tensors
        call = (input, 0, mean, variance, weight, bias)
        rest = (ctx.eps, ctx.act, ctx.params)
        dz, dz_x_hat, _, _ = ops._channel_norm_sums(grads[0], *call, *rest)
        common = torch.stack([dz, dz_x_hat])
        dist.all_reduce(common, group=ctx.group)
        common /= ctx.count
        c1, c2 = (common if weight is None else common * weight.to(common.dtype)).unbind()
        grad_input = ops._channel_norm_backward(grads[0], *call, c1, c2, *rest)
        grad_weight = None if weight is None else dz_x_hat.to(weight.dtype)
        grad_bias = None if bias is None else dz.to(bias.dtype)
        return (grad_input, grad_weight, grad_bias, *(7 * (None,)))

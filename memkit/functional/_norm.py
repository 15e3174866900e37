"""Norms that keep one tensor and one number a row for backward, and that one the tensor which the next layer keeps anyway.

``layer_norm``, ``rms_norm``, ``group_norm`` and ``batch_norm_act`` take the arguments of their ``torch.nn.functional``
twins, in their order; ``add_layer_norm`` and ``add_rms_norm`` add a residual first. The norms over rows take more:

``dim``
    The last of the dimensions that are normalised (``layer_norm`` and ``rms_norm``): -1, the last one, or 1 for the
    channels of images [N, C, H, W], with a ``normalized_shape`` of (C,). The result is contiguous; for one dimension of
    a channels_last input it is channels_last, too.

``denominator``
    What is divided by (``layer_norm`` and ``rms_norm``). ``"root"``: sqrt(variance + eps). ``"deviation"``: the root of the
    variance, plus eps, as in the RMS norm's own code; ``"sample_deviation"``: that of a sample, whose squares are divided
    by one less than there are, plus eps, as in "The Annotated Transformer"; ``"norm"``: the 2-norm, or eps where that is
    more, as in :func:`normalize`. In ``rms_norm`` the mean is 0. Where a row has no deviation the gradient is that of the
    distances from the mean over eps, as in stock PyTorch. With a deviation and a bias of more digits than the output the
    input is kept, and ``save="output"`` is a ``ValueError``.

``save``
    What backward rebuilds the normalised input from. ``"input"``: exact whatever the weights; keeps the input. ``"output"``:
    ``(y - bias) / weight``; keeps the output, which a following Linear keeps too, so that it costs nothing. ``"auto"``:
    the output where the weights let it be as exact as stock PyTorch, else the input. That is measured in
    each call: every ``|bias| <= |weight|``, no weight so small or large that outputs leave the dtype's normal range,
    weights of no more digits than the output (under autocast they may have more: the gradient that arrives has been
    rounded already), and in ``rms_norm`` rows of at least 8 elements. On CUDA what the call before has measured holds.
    :func:`norm_saves` tells which one it was. What the output is kept for must not be changed in place afterwards:
    backward would raise. In a compiled function ``"auto"`` is the input.
``inplace``
    ``False``: a new tensor. ``True``: the input's memory is overwritten with the output (with a residual: the
    residual's with the sum); raises where that would corrupt a value or a gradient, or where the gradient from the
    output would not be exact. ``"auto"``: overwritten where autograd and reference counts prove that nothing else needs
    it and ``save="auto"`` means the output, else a new tensor.

Statistics are computed in float32 (float64 for float64) from distances to the mean, or to a value near it, so that a
large mean does not spoil a small variance. Sums round to a few units in the last place: a row whose result is mostly
that of one value, beside many others alike, errs by up to sixteen of them (on CUDA by more where it has more than
16,384), where PyTorch's order of adding may err less. Under autocast the result is of the autocast dtype, so that the
next layer shares it; weights may be float32 beside a float16 or bfloat16 input anywhere, and their gradients are of
their dtype.

Shapes: any; the result is contiguous and of the input's shape and dtype. Devices: CPU, CUDA. ``ValueError``: shapes that
do not fit, an unknown ``save``. ``TypeError``: another dtype. ``RuntimeError``: a device or layout memkit has no kernel
for; in place refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import _C
from .._sharding import call
from ._activation import Inplace, Save, check_inplace, save_of
from ._shared import check_tensor, describe

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "layer_norm",
    "norm_saves",
    "normalize",
    "rms_norm",
]


Denominator = Literal["root", "deviation", "sample_deviation", "norm"]


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dim: int = -1,
    denominator: Denominator = "root",
    inplace: Inplace = False,
    save: Save = "auto",
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dimensions, or those before (Ba et al. 2016)."""
    if not is_dynamo_compiling():
        out: Tensor | None = _C.layer_norm(
            input, normalized_shape, weight, bias, eps, dim, denominator, inplace, save
        )
        if out is not None:
            return out
    how = (eps, denominator, inplace, save)
    return _over("layer_norm", input, normalized_shape, weight, bias, dim, *how)


def rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dim: int = -1,
    denominator: Denominator = "root",
    inplace: Inplace = False,
    save: Save = "auto",
) -> Tensor:
    """x / sqrt(mean of x² + eps) * weight over the last dimensions, or those before (Zhang and Sennrich 2019).

    ``eps`` None: the machine epsilon of the type computed in, as in PyTorch.
    """
    if not is_dynamo_compiling():
        out: Tensor | None = _C.rms_norm(
            input, normalized_shape, weight, eps, dim, denominator, inplace, save
        )
        if out is not None:
            return out
    how = (eps, denominator, inplace, save)
    return _over("rms_norm", input, normalized_shape, weight, None, dim, *how)


def normalize(
    input: Tensor,
    p: float = 2.0,
    dim: int = 1,
    eps: float = 1e-12,
    *,
    inplace: Inplace = False,
    save: Save = "auto",
) -> Tensor:
    """x / max(|x|, eps) over one dimension: ``torch.nn.functional.normalize`` of ``p=2``, with its arguments."""
    check_tensor("normalize", "input", input)
    if p != 2:
        raise ValueError(f"normalize: expected p=2, got {p}; use torch.nn.functional.normalize")
    if eps is None:  # which rms_norm takes
        raise TypeError("normalize: expected eps to be a number, got NoneType")
    if not hasattr(dim, "__index__"):
        raise TypeError(f"normalize: expected dim to be an int, got {type(dim).__name__}")
    if not -input.dim() <= dim < input.dim():
        raise ValueError(
            f"normalize: expected dim in [{-input.dim()}, {input.dim() - 1}], got {dim} for {list(input.shape)}"
        )
    shape = (input.shape[dim],)
    return rms_norm(input, shape, None, eps, dim=dim, denominator="norm", inplace=inplace, save=save)


def add_layer_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    inplace: Inplace = False,
    save: Save = "auto",
) -> tuple[Tensor, Tensor]:
    """(layer_norm(s), s) with s = input + residual, in one pass (Ba et al. 2016); backward adds the gradients of both.

    s has the dtype that torch gives the sum. In place it is written into the residual's memory, with either ``save``:
    with "input" it is s that is kept, and a later in-place change of s refused.
    """
    if not is_dynamo_compiling():
        out: tuple[Tensor, Tensor] | None = _C.add_layer_norm(
            input, residual, normalized_shape, weight, bias, eps, inplace, save
        )
        if out is not None:
            return out
    return _dispatched_adding(
        "layer_norm", input, residual, normalized_shape, weight, bias, eps, inplace, save
    )


def add_rms_norm(
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    inplace: Inplace = False,
    save: Save = "auto",
) -> tuple[Tensor, Tensor]:
    """(rms_norm(s), s) with s = input + residual (Zhang and Sennrich 2019): as :func:`add_layer_norm`."""
    if not is_dynamo_compiling():
        out: tuple[Tensor, Tensor] | None = _C.add_rms_norm(
            input, residual, normalized_shape, weight, eps, inplace, save
        )
        if out is not None:
            return out
    return _dispatched_adding("rms_norm", input, residual, normalized_shape, weight, None, eps, inplace, save)


def norm_saves(normed: Tensor) -> str | None:
    """ "input" or "output": what was kept for the backward of this result of a norm; None for any other tensor."""
    return _C.norm_saves(normed) or None


def _over(
    op: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    dim: int,
    eps: float | None,
    denominator: str,
    inplace: Inplace,
    save: Save,
) -> Tensor:
    """Through torch.ops: what a compiler traces, and what DTensors take. Functional, with a copy in place."""
    if not -input.dim() <= dim < input.dim():
        raise ValueError(
            f"{op}: expected dim in [{-input.dim()}, {input.dim() - 1}], got {dim} for input {list(input.shape)}"
        )
    behind = input.dim() - 1 - dim % input.dim()
    rows = input.movedim(dim, -1) if behind else input
    parameters = (weight, bias, eps)
    if len(normalized_shape) > 1 or not _are_rows(rows):
        return _dispatched(op, input, normalized_shape, *parameters, inplace, save, denominator, behind)
    out = _dispatched(op, rows, normalized_shape, *parameters, inplace, save, denominator)
    if inplace is True:
        return input
    if (
        behind and input.is_contiguous()
    ):  # only dimensions of one element were moved: the strides of a fresh result
        return out.view(input.shape)
    return out.movedim(-1, dim) if behind else out


def _are_rows(x: Tensor) -> bool:
    """Whether the elements of the last dimension are neighbours, and the others in their order."""
    if is_dynamo_compiling() or x.numel() == 0:
        return x.is_contiguous()
    strides = [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]
    return x.is_contiguous() or (x.stride(-1) == 1 and strides == sorted(strides, reverse=True))


def _dispatched(
    op: str,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    inplace: Inplace,
    save: str,
    denominator: str,
    behind: int = 0,
) -> Tensor:
    _check(op, input, normalized_shape, inplace, save, behind)
    dtype = output_dtype(input)
    out: Tensor = call(
        "_row_norm",
        input,
        len(normalized_shape),
        behind,
        weight,
        bias,
        _resolve_eps(eps, dtype),
        op == "layer_norm",
        dtype,
        save_of(save, inplace),
        denominator,
    )
    return input.copy_(out) if inplace is True else out


def _dispatched_adding(
    op: str,
    input: Tensor,
    residual: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    inplace: Inplace,
    save: str,
) -> tuple[Tensor, Tensor]:
    _check(f"add_{op}", input, normalized_shape, inplace, save)
    total = torch.promote_types(input.dtype, residual.dtype)
    input = input.to(total)
    dtype = output_dtype(input)
    out: tuple[Tensor, Tensor] = call(
        "_add_row_norm",
        input,
        residual.to(total),
        len(normalized_shape),
        weight,
        bias,
        _resolve_eps(eps, dtype),
        op == "layer_norm",
        dtype,
        save,
    )
    return (out[0], residual.copy_(out[1])) if inplace is True else out


def _check(
    op: str, input: Tensor, shape: Sequence[int], inplace: Inplace, save: str, behind: int = 0
) -> None:
    check_inplace(op, inplace, "auto" if op.startswith("add_") else save)
    if save not in ("auto", "input", "output"):
        raise ValueError(f"{op}: expected save 'auto', 'input' or 'output', got {save!r}")
    last = input.dim() - behind
    if not 0 < len(shape) <= last or tuple(input.shape[last - len(shape) : last]) != tuple(shape):
        where = "last dimensions" if behind == 0 else f"dimensions up to {last - 1}"
        raise ValueError(f"{op}: expected an input whose {where} are {list(shape)}, got {list(input.shape)}")


def output_dtype(input: Tensor) -> torch.dtype:
    """The input's dtype, or under autocast autocast's."""
    device = input.device.type
    if input.dtype != torch.float64 and device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return input.dtype


def _resolve_eps(eps: float | None, dtype: torch.dtype) -> float:
    if eps is not None:
        return eps
    return torch.finfo(torch.float64 if dtype == torch.float64 else torch.float32).eps


describe(
    (layer_norm, rms_norm, normalize, add_layer_norm, add_rms_norm),
    """
    Shapes: any; the result has the input's, and is contiguous; weight and bias have ``normalized_shape``. Results have the
    input's dtype, under autocast autocast's; weights may be float32 beside an input of half precision. ``ValueError``:
    shapes that do not fit, an unknown ``save``, ``inplace`` or ``denominator``. ``TypeError``: another dtype, no tensor.
    ``RuntimeError``: a device or layout without a kernel; in place refused.

    ``save``: what backward computes with, "input", "output", or "auto": the output where that is as exact. ``inplace``:
    False, True, or "auto": where that is safe.
    """,
)

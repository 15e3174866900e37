"""Dropout that keeps nothing for backward but a seed of 8 bytes.

Which elements are dropped follows from the seed and an element's place in memory (Philox4x32-10: Salmon, Moraes, Dror,
Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011), so backward draws them again. The seed comes from the generator
of the input's device, so that ``torch.manual_seed``, ``torch.utils.checkpoint`` and CUDA graphs govern it as they do
stock dropout; under ``checkpoint(..., preserve_rng_state=False)`` the recomputation draws others, as in stock. The same
seed drops the same elements on the CPU and on CUDA; a CPU ``generator`` may be given for a tensor on either. The
elements are not those that stock PyTorch drops.

``p``: the probability of an element to be dropped, in [0, 1], exact to 2**-33. A kept element is scaled by 1 / (1 - p). In
evaluation (``training=False``) and at p = 0 nothing is drawn, and :func:`dropout` returns its input itself.

``inplace``: ``False``, ``True`` or ``"auto"``, as in the activations: see ``help(memkit.functional.gelu.__module__)``.

Shapes: any; the result has the input's shape and dtype. Dtypes: float32, float64, float16, bfloat16, computed in float32
(float64 in float64). ``ValueError``: a probability outside [0, 1], shapes that do not fit. ``TypeError``: another dtype.
``RuntimeError``: a generator of another device, in place refused.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Generator, Tensor
from torch.compiler import is_dynamo_compiling

from .. import _C
from .._sharding import call
from ._activation import Inplace, Save, _parameters, check_inplace, save_of
from ._partition import keep_results
from ._shared import check_number, check_tensor, describe

__all__ = [
    "act_dropout",
    "alpha_dropout",
    "bias_dropout_add",
    "drop_path",
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "dropout_add",
    "feature_alpha_dropout",
]

_LIMIT = 1.7580993408473766
"""selu's scale times alpha."""

_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_probability(op: str, p: float) -> None:
    check_number(op, "p", p)
    if not 0 <= p <= 1:
        raise ValueError(f"{op}: expected a probability p in [0, 1], got {p}")


def drop_numbers(p: float, alpha: bool = False) -> list[float]:
    """[p, scale, kept, dropped] of ``memkit::_activation``: a kept x becomes x * scale + kept, a dropped one `dropped`."""
    if p == 1:
        return [p, 1.0, 0.0, 0.0]
    if not alpha:
        return [p, 1 / (1 - p), 0.0, 0.0]
    a = float(((_LIMIT**2 * p + 1) * (1 - p)) ** -0.5)
    return [p, a, _LIMIT * a * p, _LIMIT * a * (p - 1)]


def draw_seed(op: str, input: Tensor, generator: Generator | None) -> Tensor:
    """One random int64 on the input's device or the CPU."""
    device = input.device if generator is None else generator.device
    if device != input.device and device.type != "cpu":
        raise RuntimeError(f"{op}: expected a generator on {input.device} or the CPU, got one on {device}")
    drawn = None if is_dynamo_compiling() else _C.draw_seed(input, generator)
    if drawn is not None:
        return drawn
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=device, generator=generator)
    kept: Tensor = torch.ops.memkit._kept(seed.to(input.device, non_blocking=True))
    return kept


def _batch_kept(info: Any, in_dims: tuple[int | None], seed: Tensor) -> tuple[Tensor, int | None]:
    return torch.ops.memkit._kept(seed), in_dims[0]


keep_results("_kept")  # or the random numbers are drawn again in backward, others
torch.library.register_vmap("memkit::_kept", _batch_kept)


def _dispatched(op: str, input: Tensor, inplace: Inplace, *args: Any, **kwargs: Any) -> Tensor:
    """Through torch.ops: what a compiler traces, and what DTensors take. Functional, with a copy in place."""
    check_inplace(op, inplace)
    out: Tensor = call(op, input, *args, **kwargs)
    return input.copy_(out) if inplace is True else out


def dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: Inplace = False,
    *,
    generator: Generator | None = None,
) -> Tensor:
    """Zeroes each element with probability p and scales the others by 1 / (1 - p).

    Backward keeps a seed of 8 bytes, no mask.

    Args:
        input: of any shape; float32, float64, float16 or bfloat16.
        p: the probability of an element to be dropped, in [0, 1].
        training: False returns the input itself.
        inplace: True overwrites the input, or raises where that is not safe. "auto": overwrites it where nothing else
            can read it, and makes a new tensor elsewhere.
        generator: where the seed comes from; by default PyTorch's generator of the input's device.

    Srivastava, Hinton, Krizhevsky, Sutskever, Salakhutdinov, 2014.
    """
    if not is_dynamo_compiling():
        out = _C.dropout(input, p, training, inplace, generator, False)
        if out is not None:
            return out
    return _dispatched("dropout", input, inplace, p, training, generator=generator)


def alpha_dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: Inplace = False,
    *,
    generator: Generator | None = None,
) -> Tensor:
    """Dropout to selu's negative limit that keeps mean 0 and variance 1. Arguments as in :func:`dropout`.

    Klambauer, Unterthiner, Mayr, Hochreiter, "Self-normalizing neural networks", 2017.
    """
    check_inplace("alpha_dropout", inplace)
    if not is_dynamo_compiling():
        out = _C.dropout(input, p, training, inplace, generator, True)
        if out is not None:
            return out
    return _dispatched("alpha_dropout", input, inplace, p, training, generator=generator)


def dropout_add(
    input: Tensor,
    residual: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: Inplace = False,
    *,
    generator: Generator | None = None,
) -> Tensor:
    """residual + dropout(input) in one pass (Srivastava et al. 2014). In place the input is overwritten, never the residual.

    The other arguments are those of :func:`dropout`.
    A residual of another shape or dtype is added as ``+`` does it, in a second pass.
    """
    if not is_dynamo_compiling():
        out = _C.dropout_add(input, residual, p, training, inplace, generator)
        if out is not None:
            return out
    return _dispatched("dropout_add", input, inplace, residual, p, training, generator=generator)


def bias_dropout_add(
    input: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    p: float = 0.5,
    training: bool = True,
    inplace: Inplace = False,
    *,
    dim: int = -1,
    generator: Generator | None = None,
) -> Tensor:
    """residual + dropout(input + bias) in one pass (Srivastava et al. 2014); ``bias`` of shape [input.shape[dim]].

    The other arguments are those of :func:`dropout`.
    """
    if not is_dynamo_compiling():
        out = _C.bias_dropout_add(input, bias, residual, p, training, inplace, generator, dim)
        if out is not None:
            return out
    return _dispatched(
        "bias_dropout_add",
        input,
        inplace,
        bias,
        residual,
        p,
        training,
        generator=generator,
        dim=dim,
    )


def act_dropout(
    input: Tensor,
    act: str = "gelu",
    p: float = 0.5,
    training: bool = True,
    inplace: Inplace = False,
    *,
    bias: Tensor | None = None,
    dim: int = -1,
    save: Save = "auto",
    generator: Generator | None = None,
    **params: Any,
) -> Tensor:
    """dropout(act(input + bias)) in one pass (Srivastava et al. 2014).

    ``act``, its parameters by name (``negative_slope=0.2``) and ``dim`` as in :func:`bias_act`; ``p``, ``training`` and
    ``generator`` as in :func:`dropout`; ``inplace`` and ``save`` as in the activations: "output" keeps the dropped
    output, which the next layer keeps anyway, and one bit an element where the function has a minimum. A dropped element
    has no gradient, a kept one the slope at output * (1 - p). relu6, hardtanh, hardsigmoid and hardswish, whose slope
    jumps at an output that this scaling blurs, keep their input ("auto") and are refused in place.
    """
    given = _parameters("act_dropout", act, params) if params else None
    if not is_dynamo_compiling():
        out = _C.act_dropout(input, act, p, training, inplace, generator, bias, dim, given, save)
        if out is not None:
            return out
    return _dispatched(
        "act_dropout",
        input,
        inplace,
        act,
        p,
        training,
        generator=generator,
        bias=bias,
        dim=dim,
        params=_parameters("act_dropout", act, params),
        save=save_of(save, inplace),
    )


def _warn_of(name: str, input: Tensor, expected: str, got: str) -> None:
    """As torch.nn.functional does, of shapes that it takes for something else than they seem."""
    if not is_dynamo_compiling():
        text = (
            f"{name}: expected an input {expected}, took one of {list(input.shape)} for {got}, as torch does"
        )
        warnings.warn(text, stacklevel=3)


def dropout1d(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: Inplace = False,
    *,
    generator: Generator | None = None,
) -> Tensor:
    """Drops whole channels of (N, C, L) or (C, L) (Tompson et al. 2015). Backward keeps one element a channel.

    Arguments as in :func:`dropout`.
    """
    check_tensor("dropout1d", "input", input)
    if input.dim() not in (2, 3):
        raise ValueError(f"dropout1d: expected an input of 2 or 3 dimensions, got {list(input.shape)}")
    return _drop_features("dropout1d", input, input.dim() - 1, p, training, inplace, generator)


def dropout2d(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: Inplace = False,
    *,
    generator: Generator | None = None,
) -> Tensor:
    """Drops whole channels of (N, C, H, W) (Tompson et al. 2015). Backward keeps one element a channel.

    As in torch the channels are the second of any number of dimensions, also of three, (N, C, L), with a warning. Arguments
    as in :func:`dropout`.
    """
    check_tensor("dropout2d", "input", input)
    if input.dim() != 4:
        _warn_of("dropout2d", input, "(N, C, H, W)", "(N, C, ...)")
    return _drop_features("dropout2d", input, 2, p, training, inplace, generator)


def dropout3d(
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: Inplace = False,
    *,
    generator: Generator | None = None,
) -> Tensor:
    """Drops whole channels of (N, C, D, H, W) or (C, D, H, W) (Tompson et al. 2015). Backward keeps one element a channel.

    As in torch the channels are the first of any other number of dimensions, too, with a warning. Arguments as in
    :func:`dropout`.
    """
    check_tensor("dropout3d", "input", input)
    if input.dim() not in (4, 5):
        _warn_of("dropout3d", input, "(N, C, D, H, W) or (C, D, H, W)", "(C, ...)")
    return _drop_features("dropout3d", input, 2 if input.dim() == 5 else 1, p, training, inplace, generator)


def drop_path(
    input: Tensor,
    p: float = 0.0,
    training: bool = True,
    inplace: Inplace = False,
    *,
    scale_by_keep: bool = True,
    generator: Generator | None = None,
) -> Tensor:
    """Stochastic depth: drops whole samples, the first dimension of the input.

    ``scale_by_keep``: the others are scaled by 1 / (1 - p). The other arguments are those of :func:`dropout`.
    Huang, Sun, Liu, Sedra, Weinberger, "Deep networks with stochastic depth", 2016.
    """
    check_probability("drop_path", p)
    scale = 1.0 if scale_by_keep else 1 - p
    return _drop_features("drop_path", input, 1, p, training, inplace, generator, scale)


def _check_features(name: str, input: Tensor, dims: int) -> None:
    if input.dim() < dims:
        raise ValueError(f"{name}: expected an input of at least {dims} dimensions, got {input.dim()}")
    if input.dtype not in _DTYPES:
        raise TypeError(
            f"{name}: expected float32, float64, float16 or bfloat16, got {input.dtype} {list(input.shape)}"
        )


def _feature_mask(input: Tensor, dims: int, p: float, generator: Generator | None) -> Tensor:
    """Dropout of ones over the first dimensions: all that backward keeps of the product."""
    ones = input.new_ones((*input.shape[:dims], *(1 for _ in input.shape[dims:])))
    return dropout(ones, p, generator=generator)


def _drop_features(
    name: str,
    input: Tensor,
    dims: int,
    p: float,
    training: bool,
    inplace: Inplace,
    generator: Generator | None,
    scale: float = 1.0,
) -> Tensor:
    check_probability(name, p)
    check_tensor(name, "input", input)
    check_inplace(name, inplace)
    if not training or p == 0 or input.numel() == 0:
        return input
    _check_features(name, input, dims)
    mask = _feature_mask(input, dims, p, generator)
    mask = mask if scale == 1 else mask * scale
    return input.mul_(mask) if inplace is True else input * mask


def feature_alpha_dropout(
    input: Tensor,
    p: float = 0.5,
    training: bool = False,
    inplace: Inplace = False,
    *,
    generator: Generator | None = None,
) -> Tensor:
    """:func:`alpha_dropout` (Klambauer et al. 2017) of whole channels: the first two dimensions of the input.

    Arguments as in :func:`dropout`.
    """
    check_probability("feature_alpha_dropout", p)
    check_tensor("feature_alpha_dropout", "input", input)
    check_inplace("feature_alpha_dropout", inplace)
    if not training or p == 0 or input.numel() == 0:
        return input
    _check_features("feature_alpha_dropout", input, 2)
    if p == 1:
        return input.mul_(0) if inplace is True else input * 0
    kept = _feature_mask(input, 2, p, generator) != 0
    a = ((_LIMIT**2 * p + 1) * (1 - p)) ** -0.5
    scale = kept * a
    shift = (kept.to(input.dtype) - (1 - p)) * (_LIMIT * a)
    return input.mul_(scale).add_(shift) if inplace is True else input * scale + shift


describe(
    (globals()[name] for name in __all__),
    """
    Shapes: any, where none is named; the result has the input's shape and dtype. ``ValueError``: a probability outside [0,
    1], shapes that do not fit, an unknown ``inplace``. ``TypeError``: another dtype, no tensor. ``RuntimeError``: a
    generator of another device, in place refused.
    """,
)

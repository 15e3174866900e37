"""Which dimensions of which tensors go together, operator by operator: the table that :mod:`memkit._sharding` works by.

A rule takes the operator and its arguments. Dimensions are named by numbers where all are alike, else by words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from ._sharding import Arg, Names, Out, call, is_dtensor, run


def _names(x: Tensor, whole: int = 0) -> Names:
    """All dimensions', but for the last ones."""
    return (*range(x.dim() - whole), *(None,) * whole)


def _alike(names: Names, *tensors: Tensor | None, **kind: bool) -> list[Arg]:
    return [Arg(each, names, **kind) for each in tensors]


# -- elementwise


def _activation(
    op: Any,
    input: Tensor,
    bias: Tensor | None,
    dim: int,
    act: str,
    params: Sequence[float],
    save: str,
    residual: Tensor | None = None,
    seed: Tensor | None = None,
    drop: Sequence[float] = (),
) -> Any:
    names = _names(input)
    along = names[dim] if -len(names) <= dim < len(names) else None
    linear = act == "identity" and bias is None and not any(drop[2:])
    x, added = _alike(names, input, residual, linear=linear)
    args = [x, Arg(bias, (along,)), added, Arg(seed, seed=True)]

    def function(x: Tensor, bias: Tensor | None, residual: Tensor | None, seed: Tensor | None) -> Any:
        return op(x, bias, dim, act, params, save, residual, seed, drop)

    return run("activation", function, args, [Out(names, input.shape)])[0]


def _dropout(
    name: str,
    input: Tensor,
    p: float,
    training: bool,
    *,
    generator: Generator | None = None,
    bias: Tensor | None = None,
    dim: int = -1,
    residual: Tensor | None = None,
    act: str = "identity",
    params: Sequence[float] = (),
    save: str = "auto",
) -> Any:
    """What the operator of this name makes of its arguments, with a seed that each part makes its own."""
    from .functional._dropout import check_probability, draw_seed, drop_numbers

    check_probability(name, p)
    if residual is not None and (residual.dtype, residual.shape) != (input.dtype, input.shape):
        return residual + _dropout(name, input, p, training, generator=generator, bias=bias, dim=dim)
    if bias is not None and bias.dtype != input.dtype and torch.is_autocast_enabled(input.device.type):
        bias = bias.to(input.dtype)
    seed = None
    drop: list[float] = []
    if training and p > 0 and input.numel() > 0:
        seed = draw_seed(name, input, generator)
        drop = drop_numbers(p, alpha=name == "alpha_dropout")
    elif act == "identity" and bias is None and residual is None:
        return input
    return call("_activation", input, bias, dim, act, params, save, residual, seed, drop)


def _glu(op: Any, gate: Tensor, up: Tensor | None, act: str, packing: str) -> Any:
    names, shape = _names(gate), gate.shape
    if up is None:
        names, shape = (*names[:-1], _pairs(gate, packing)), torch.Size((*shape[:-1], shape[-1] // 2))
    return run("glu", lambda g, u: op(g, u, act, packing), _alike(names, gate, up), [Out(names, shape)])[0]


def _pairs(x: Any, packing: str) -> str | None:
    """The name of a last dimension that packs a gate and its unit: a part holds both of what are neighbours."""
    whole = packing != "interleaved" or not is_dtensor(x) or x.shape[-1] % (2 * x.device_mesh.size())
    return None if whole else "features"


def _rotary(
    op: Any,
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None,
    interleaved: bool,
    heads_at: int,
    *options: Any,
) -> Any:
    """q and k apart, which may be sharded otherwise. The tables go with their positions, or the numbers of their rows do."""

    def turned(x: Tensor) -> Any:
        names: Names = ("batch", "heads", "positions", None)
        names = names if heads_at == 1 else ("batch", "positions", "heads", None)
        batch, positions = x.shape[0], x.shape[3 - heads_at]

        def along(table: Tensor, *columns: None) -> Arg:
            """[positions] or [batch or 1, positions], and columns."""
            at = table.dim() - len(columns) - 1
            if table.shape[at] > positions:
                table = table.narrow(at, 0, positions)
            own = ("batch" if table.shape[0] == batch else None,) * at
            return Arg(table, (*own, "positions", *columns), plain=True)

        tables = [Arg(cos, plain=True), Arg(sin, plain=True)]
        rows = Arg(None) if position_ids is None else along(position_ids)
        if position_ids is None:
            tables = [along(cos, None), along(sin, None)]

        def function(x: Tensor, cos: Tensor, sin: Tensor, rows: Tensor | None) -> Any:
            return op(x, None, cos, sin, rows, interleaved, heads_at, *options)[0]

        args = [Arg(x, names, linear=True), *tables, rows]
        return run("apply_rotary", function, args, [Out(names, x.shape)])[0]

    return turned(q), None if k is None else turned(k)


# -- over rows and channels


def _softmax(
    op: Any, input: Tensor, dim: int, mask: Tensor | None, scale: float, causal: bool, *rest: Any
) -> Any:
    n = input.dim()
    whole = {dim % max(1, n), *({n - 1, n - 2} if causal else ())}
    names = tuple(None if i in whole else i for i in range(n))
    shape = () if mask is None else mask.shape
    over = [None if size == 1 else name for name, size in zip(names[n - len(shape) :], shape, strict=False)]
    args = [Arg(input, names), Arg(mask, tuple(over), plain=True)]
    outs = [Out(names, input.shape)]
    return run("softmax", lambda x, mask: op(x, dim, mask, scale, causal, *rest), args, outs)[0]


def _row_norm(
    op: Any, input: Tensor, dims: int, behind: int, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> Any:
    whole = range(input.dim() - behind - dims, input.dim() - behind)
    names = tuple(None if i in whole else i for i in range(input.dim()))
    args = [Arg(input, names), Arg(weight), Arg(bias)]
    return run("norm", lambda x, w, b: op(x, dims, behind, w, b, *rest), args, [Out(names, input.shape)])[0]


def _add_row_norm(
    op: Any,
    input: Tensor,
    residual: Tensor,
    dims: int,
    weight: Tensor | None,
    bias: Tensor | None,
    *rest: Any,
) -> Any:
    names = _names(input, dims)
    args = [*_alike(names, input, residual), Arg(weight), Arg(bias)]
    outs = [Out(names, input.shape)] * 2
    return run("add_norm", lambda x, r, w, b: op(x, r, dims, w, b, *rest), args, outs)


def _group_norm(
    op: Any, input: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, *rest: Any
) -> Any:
    names = ("samples", *_names(input, input.dim())[1:])
    args = [Arg(input, names), Arg(weight), Arg(bias)]
    return run("group_norm", lambda x, w, b: op(x, groups, w, b, *rest), args, [Out(names, input.shape)])[0]


def _batch_norm_act(
    op: Any,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    variance: Tensor | None,
    *rest: Any,
) -> Any:
    """Samples stay together where statistics are taken of them."""
    channels = ("channels",)
    names = (None if mean is None else "samples", *channels, *(None,) * (input.dim() - 2))
    args = [
        Arg(input, names),
        *_alike(channels, weight, bias),
        *_alike(channels, mean, variance, plain=True),
    ]
    outs = [Out(names, input.shape), *[Out(channels, input.shape[1:2])] * 2]
    return run("batch_norm_act", lambda *parts: op(*parts, *rest), args, outs)


# -- with layers behind


def _consumer(
    op: Any,
    inputs: Sequence[Any],
    producer: str,
    act: str,
    packing: str,
    numbers: Sequence[float],
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    conv: Sequence[int],
) -> Any:
    """Layers sharded over their outputs leave the input as it is; over their inputs, they give sums over the ranks."""
    x, *others = inputs
    batch: Names = (0,) if conv else _names(x)[:-1]
    rest: Names = (None, None) if conv else ()
    features: str | None = None
    outputs = "outputs" if not conv or conv[-1] == 1 else None  # no groups of channels
    kept = 0  # statistics that the caller wants
    if producer == "activation":
        features = None if conv else "features"  # PyTorch's convolution of no channels makes no zeros
        behind = [Arg(others[0], (features,)), Arg(others[1], seed=True)]
    elif producer == "glu":
        features = _pairs(x, packing) if others[0] is None else "features"
        behind = [Arg(others[0], (*batch, features))]
    elif producer == "batch_norm":
        training = others[2] is None
        batch, kept = (None if training else 0,), 2 * training
        behind = [*map(Arg, others[:2]), *(Arg(each, plain=True) for each in others[2:])]
    else:
        behind = [*map(Arg, others)]
    args = [
        Arg(x, (*batch, features, *rest)),
        *behind,
        *_alike((outputs, features, *rest), *weights),
        *_alike((outputs,), *biases, once=True),
    ]
    given, layers = len(inputs), len(weights)

    def function(*parts: Any) -> Any:
        own, weights, biases = parts[:given], parts[given : given + layers], parts[given + layers :]
        results, statistics = op([*own], producer, act, packing, numbers, [*weights], [*biases], conv)
        return (*results, *statistics[:kept])

    names = (*batch, outputs, *rest)
    outs = [Out(names, (*x.shape[: len(batch)], weight.shape[0], *rest)) for weight in weights]
    name = f"{producer}_conv2d" if conv else f"{producer}_linear"
    found = run(name, function, args, [*outs, *[Out((None,), ())] * kept], ["features"])
    return list(found[:layers]), list(found[layers:])


# -- losses: a mean is a sum over the ranks too, of rows divided by what all ranks count


def _loss(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Arg],
    target: Any,
    rows: Out,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
) -> Any:
    """`function` of the local parts of args (logits or input first), target and weight, of a reduction and a dtype."""
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{name}: expected reduction 'none', 'mean' or 'sum', got {reduction!r}")
    x: Any = args[0].tensor
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    dtype = wide if torch.is_autocast_enabled(x.device.type) else x.dtype
    names = args[0].names if target.is_floating_point() else rows.names
    args = [*args, Arg(target, names, plain=True), Arg(weight, plain=True)]
    if reduction == "none":
        return run(name, lambda *parts: function(*parts, 0, dtype), args, [rows])[0]
    whole, sums = [Out((), ())], [each for each in rows.names if each is not None]

    def count(target: Tensor, weight: Tensor | None) -> Tensor:
        counted = target != ignore_index
        if weight is not None:
            counted = counted * weight.to(wide)[target.masked_fill(~counted, 0).long()]
        return counted.sum(dtype=wide)

    total: Any = None
    if reduction == "mean" and target.is_floating_point():
        total = x.new_full((), torch.Size(rows.shape).numel(), dtype=wide)
    elif reduction == "mean":
        (total,) = run(name, count, args[-2:], whole, sums, x.device_mesh)

    def summed(*parts: Any) -> Any:
        *own, total = parts
        found = function(*own, 2, wide)
        return found if total is None else found / total

    (loss,) = run(name, summed, [*args, Arg(total)], whole, sums)
    if loss.dtype != dtype:  # rounded once, of the whole sum
        loss = loss.redistribute(loss.device_mesh, [*map(_added_up, loss.placements)]).to(dtype)
    return loss


def _added_up(placement: Any) -> Any:
    from torch.distributed.tensor import Replicate

    return Replicate() if placement.is_partial() else placement


def _cross_entropy(
    op: Any,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    *,
    z_loss: float,
    softcap: float | None,
) -> Any:
    at = min(1, input.dim() - 1)  # the classes
    names = tuple(None if i == at else i for i in range(input.dim()))
    rows = Out(names[:at] + names[at + 1 :], input.shape[:at] + input.shape[at + 1 :])
    options = (ignore_index, label_smoothing, z_loss, softcap or 0.0)

    def function(x: Tensor, t: Tensor, w: Tensor | None, reduction: int, dtype: torch.dtype) -> Any:
        return torch.ops.memkit._cross_entropy(x, t, w, reduction, *options, dtype, 0)

    return _loss(
        "cross_entropy", function, [Arg(input, names)], target, rows, weight, reduction, ignore_index
    )


def _linear_cross_entropy(
    op: Any,
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    reduction: str,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float | None,
    chunk: int | None,
) -> Any:
    names = _names(input, 1)
    rows = Out(names[:-1], input.shape[:-1])
    device = input.device.type
    autocast = torch.is_autocast_enabled(device) and input.dtype != torch.float64
    compute = torch.get_autocast_dtype(device) if autocast else input.dtype
    options = (ignore_index, label_smoothing, z_loss, softcap or 0.0, compute)

    def function(x: Any, linear: Any, bias: Any, t: Any, w: Any, reduction: int, dtype: torch.dtype) -> Any:
        targets = t.reshape(-1, t.shape[-1]) if t.is_floating_point() else t.reshape(-1)
        loss = torch.ops.memkit._linear_cross_entropy(
            x.reshape(-1, x.shape[-1]), linear, bias, targets, w, reduction, *options, dtype, chunk or 0
        )
        return loss.reshape(x.shape[:-1]) if reduction == 0 else loss

    args = [Arg(input, names), Arg(linear_weight), Arg(linear_bias)]
    return _loss("linear_cross_entropy", function, args, target, rows, weight, reduction, ignore_index)


RULES: dict[str, Callable[..., Any]] = {
    "_activation": _activation,
    "dropout": lambda op, x, *args, **kwargs: _dropout("dropout", x, *args, **kwargs),
    "alpha_dropout": lambda op, x, *args, **kwargs: _dropout("alpha_dropout", x, *args, **kwargs),
    "dropout_add": lambda op, x, residual, *args, **kwargs: _dropout(
        "dropout_add", x, *args, residual=residual, **kwargs
    ),
    "bias_dropout_add": lambda op, x, bias, residual, *args, **kwargs: _dropout(
        "bias_dropout_add", x, *args, bias=bias, residual=residual, **kwargs
    ),
    "act_dropout": lambda op, x, act, *args, **kwargs: _dropout("act_dropout", x, *args, act=act, **kwargs),
    "glu": _glu,
    "_softmax": _softmax,
    "_row_norm": _row_norm,
    "_add_row_norm": _add_row_norm,
    "_group_norm": _group_norm,
    "_batch_norm_act": _batch_norm_act,
    "_rotary": _rotary,
    "_consumer": _consumer,
    "cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
}

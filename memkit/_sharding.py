"""memkit's operators on DTensors (``torch.distributed.tensor``): each works on the local parts.

A rule (:mod:`memkit._sharding_rules`) says of an operator which dimensions of which tensors go together: dimensions of one
name are sharded alike, those without a name have to be whole. On each dimension of the mesh the first tensor that is sharded
along a name decides. The others follow: in their values by redistribution, in their gradients by the names, for a tensor
without the name was used by every rank for its own part, so that its gradient is a sum over the ranks (Partial). What is
Partial stays so where an operator is linear in it, and is added up elsewhere. Backward needs no rules: nodes see local
tensors, and save, reuse and overwrite these as they do without DTensors.

Nothing here imports ``torch.distributed.tensor`` before it has to: who has a DTensor has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Names = tuple[Any, ...]
"""Of a tensor's dimensions; None for one that has to be whole."""


class Arg(NamedTuple):
    tensor: Tensor | None
    names: Names = ()
    plain: bool = False
    """Counts as replicated where it is no DTensor and needs no gradient, as tables, masks and targets."""
    linear: bool = False
    """The result is linear in all that are marked together, so that all of them may be Partial."""
    once: bool = False
    """Added to the result: where that is a sum over the ranks, by one of them."""
    seed: bool = False
    """A seed, no DTensor: which elements of the first argument a mask drops."""

    def name(self, dim: int) -> Any:
        return self.names[dim] if dim < len(self.names) else None


class Out(NamedTuple):
    names: Names
    shape: Sequence[int]
    """The whole one; read where there is a name."""


def is_dtensor(x: Any) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def call(name: str, *args: Any, **kwargs: Any) -> Any:
    """torch.ops.memkit.<name>, on the local parts where a DTensor is among the arguments."""
    op = getattr(torch.ops.memkit, name).default
    module = sys.modules.get("torch.distributed.tensor")
    if module is not None and _has((*args, *kwargs.values()), module.DTensor):
        from ._sharding_rules import RULES

        return RULES[name](op, *args, **kwargs)
    return op(*args, **kwargs)


def _has(args: Sequence[Any], kind: type) -> bool:
    for arg in args:  # noqa: SIM110  any() takes half as long again
        if type(arg) is kind or (type(arg) is list and _has(arg, kind)):
            return True
    return False


def run(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Arg],
    outs: Sequence[Out],
    sums: Sequence[Any] = (),
    mesh: Any = None,
) -> tuple[Any, ...]:
    """The results of `function` on the local parts of `args`. ``sums``: names over which it adds up.

    ``TypeError``: plain tensors among DTensors. ``ValueError``: DTensors of several meshes.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    mesh = mesh or next(arg.tensor.device_mesh for arg in args if is_dtensor(arg.tensor))  # type: ignore[union-attr]
    everywhere = [Replicate()] * mesh.ndim

    def distributed(arg: Arg) -> Any:
        x: Any = arg.tensor
        if x is None or arg.seed:
            return None
        if is_dtensor(x):
            if x.device_mesh != mesh:
                raise ValueError(f"{name}: expected DTensors of one mesh, got {mesh} and {x.device_mesh}")
            return x
        if arg.plain and not x.requires_grad:
            return DTensor.from_local(x, mesh, everywhere, run_check=False)
        raise TypeError(
            f"{name}: expected DTensors together, got a plain Tensor of {list(x.shape)} among them"
        )

    given = [(arg, distributed(arg)) for arg in args]

    def choose(m: int) -> Any:
        """What this dimension of the mesh shards: a name, or the Partial that it leaves as it is, or None."""
        for arg, x in given:
            if x is not None and type(p := x.placements[m]) is Shard and arg.name(p.dim) is not None:
                return arg.name(p.dim)
        linear = {x.placements[m] for arg, x in given if arg.linear and x is not None}
        p = linear.pop() if len(linear) == 1 else None
        return p if type(p) is Partial and p.reduce_op in ("sum", "avg") else None

    chosen = [choose(m) for m in range(mesh.ndim)]

    def placements(names: Names, without: Callable[[Any], Any], partial: Callable[[Any], Any]) -> list[Any]:
        """`without`: where a name is not among these; `partial`: where the mesh's dimension stays Partial."""
        found: list[Any] = []
        for choice in chosen:
            if choice is None:
                found.append(Replicate())
            elif isinstance(choice, Partial):
                found.append(partial(choice))
            else:
                found.append(Shard(names.index(choice)) if choice in names else without(choice))
        return found

    def local(arg: Arg, x: Any) -> Any:
        if arg.seed and arg.tensor is not None:
            masked = args[0].names
            return seed_here(arg.tensor, mesh, [choice is not None and choice in masked for choice in chosen])
        if x is None:
            return None
        wanted = placements(
            arg.names, lambda _: Replicate(), lambda choice: choice if arg.linear else Replicate()
        )
        if list(x.placements) != wanted:
            x = x.redistribute(mesh, wanted)
        part = x.to_local(grad_placements=placements(arg.names, lambda _: Partial(), lambda _: Replicate()))
        first = not any(mesh.get_local_rank(m) for m, choice in enumerate(chosen) if choice in sums)
        # Zeros that depend on it: every rank needs a gradient, or none can add them up.
        return part if first or not arg.once else part.masked_fill(part.new_ones((), dtype=torch.bool), 0)

    def whole(out: Out, part: Any) -> Any:
        found = placements(
            out.names, lambda choice: Partial() if choice in sums else Replicate(), lambda choice: choice
        )
        shape = [part.size(i) if each is None else out.shape[i] for i, each in enumerate(out.names)]
        return DTensor.from_local(
            part, mesh, found, run_check=False, shape=torch.Size(shape), stride=_strides(shape, part)
        )

    results = function(*(local(arg, x) for arg, x in given))
    results = results if isinstance(results, (tuple, list)) else (results,)
    return tuple(whole(out, part) for out, part in zip(outs, results, strict=True))


def _strides(shape: Sequence[int], part: Tensor) -> tuple[int, ...]:
    """Of the whole, whose dimensions lie in memory as the part's do."""
    strides, step = [0] * len(shape), 1
    for i in sorted(range(len(shape)), key=lambda i: (part.stride(i), -i)):
        strides[i] = step
        step *= max(1, shape[i])
    return tuple(strides)


def seed_here(seed: Tensor, mesh: Any, sharded: Sequence[bool]) -> Tensor:
    """One seed for all ranks that hold the same elements, another for each part.

    Ranks may have drawn alike or not. Of those that hold the same the first one's counts, which a sum tells the others.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate

    ranks = [mesh.get_local_rank(m) for m in range(mesh.ndim)]
    if not all(sharded):
        follows = any(rank for rank, each in zip(ranks, sharded, strict=True) if not each)
        same = [Replicate() if each else Partial() for each in sharded]
        summed = DTensor.from_local(seed * (not follows), mesh, same, run_check=False)
        seed = summed.redistribute(mesh, [Replicate()] * mesh.ndim).to_local()
    part = 0
    for m, each in enumerate(sharded):
        part = part * mesh.size(m) + ranks[m] if each else part
    step = part * 0x9E3779B97F4A7C15 % 2**64  # odd, so that no two parts meet; as a signed number
    return seed + (step - 2**64 if step >= 2**63 else step)

"""Rotary position embeddings of queries and keys in one pass, in place where wanted, that keep nothing but their tables.

Su et al., "RoFormer: enhanced transformer with rotary position embedding", 2021. In the first elements of each head, pairs
are turned by angles that grow with the position: element i and i + half (GPT-NeoX, Llama), or neighbours with
``interleaved=True`` (GPT-J). Backward turns back, in the incoming gradient's memory where nobody else can see it; cos and
sin, which a model keeps anyway, are all that is saved.

Shapes: q and k [batch, heads, positions, head size], or with ``layout="bshd"`` [batch, positions, heads, head size]; k may
have other heads than q (grouped queries). Only a head's own elements need to be neighbours in memory: transposed views and
slices of a packed projection are worked on where they lie, and what lies otherwise in a copy. cos and sin: [positions,
columns], of which the first positions are taken or the rows named by ``position_ids`` (int64, [batch, positions] or
[positions]); or, as ``transformers`` passes them, [batch or 1, positions, columns]. A column belongs to an element, so that
tables narrower than a head turn its first elements and leave the others as they are; tables with one column a pair, as
``flash_attn`` has them, need ``rotary_dim``, which is then twice the columns.

Dtypes: float32, float64, float16, bfloat16, computed in float32 (float64 in float64); tables of any of these, float32
tables beside half q being the more exact; results have q's dtype. ``ValueError``: shapes that do not fit, an unknown
``layout``. ``TypeError``: another dtype, or two. ``IndexError``: position_ids without a row (on a GPU the kernel stops).
``RuntimeError``: in place refused.
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .. import _C
from .._sharding import call
from ._activation import Inplace, check_inplace
from ._shared import describe

__all__ = ["apply_rotary"]

Layout = Literal["bhsd", "bshd"]


@overload
def apply_rotary(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: bool = False,
    layout: Layout = "bhsd",
    rotary_dim: int | None = None,
    inplace: Inplace = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def apply_rotary(
    q: Tensor,
    k: None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: bool = False,
    layout: Layout = "bhsd",
    rotary_dim: int | None = None,
    inplace: Inplace = False,
) -> Tensor: ...
def apply_rotary(
    q: Tensor,
    k: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    position_ids: Tensor | None = None,
    *,
    interleaved: bool = False,
    layout: Layout = "bhsd",
    rotary_dim: int | None = None,
    inplace: Inplace = False,
) -> tuple[Tensor, Tensor] | Tensor:
    """(q, k) turned by their positions (Su et al. 2021); with ``k=None`` q alone. Argument order as in ``transformers``.

    ``inplace=True`` overwrites both, or raises where that would corrupt a value or a gradient, or where q and k may overlap;
    ``"auto"`` overwrites both where autograd and reference counts prove that nothing else needs either.
    """
    heads_at = _heads_at(layout)
    rotary = rotary_dim or 0
    if not is_dynamo_compiling():
        out: tuple[Tensor, Tensor] | Tensor | None
        if k is None:
            out = _C.apply_rotary_to_one(q, cos, sin, position_ids, interleaved, heads_at, rotary, inplace)
        else:
            out = _C.apply_rotary(q, k, cos, sin, position_ids, interleaved, heads_at, rotary, inplace)
        if out is not None:
            return out
    check_inplace("apply_rotary", inplace)
    turned: tuple[Tensor, Tensor] = call(
        "_rotary", q, k, cos, sin, position_ids, interleaved, heads_at, rotary, False
    )
    if inplace is True:  # a compiler removes the copies
        turned = (q.copy_(turned[0]), turned[1] if k is None else k.copy_(turned[1]))
    return turned[0] if k is None else turned


def _heads_at(layout: str) -> int:
    if layout not in ("bhsd", "bshd"):
        raise ValueError(f"apply_rotary: expected layout 'bhsd' or 'bshd', got {layout!r}")
    return 1 if layout == "bhsd" else 2


describe(
    (apply_rotary,),
    """
    Shapes: q and k [batch, heads, positions, head size], with ``layout="bshd"`` [batch, positions, heads, head size]; k may
    have other heads. cos and sin [positions, columns] or [batch or 1, positions, columns], a column for each element that is
    turned; with a column a pair, ``rotary_dim`` says how many elements. ``position_ids``: int64, [batch, positions] or
    [positions], rows of the tables. ``interleaved``: pairs of neighbours, else element i and i + half. Results have the
    shapes and the dtype of q and k.

    ``ValueError``: shapes that do not fit, an unknown ``layout`` or ``inplace``. ``TypeError``: another dtype, or two.
    ``IndexError``: position_ids without a row. ``RuntimeError``: in place refused, as for views that split, chunk or unbind
    made together: take them by index.
    """,
)

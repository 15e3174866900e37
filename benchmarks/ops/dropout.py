"""Dropout, alone and with what stands around it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

import memkit.functional as M

from .op import Op, Size, flat, with_in_place

P = 0.1


def two(size: Size) -> list[Tensor]:
    return [size.normal(-1), size.normal(-1, part=1)]


OPS = {
    "dropout": with_in_place(
        lambda x: F.dropout(x, P), lambda x, inplace=False: M.dropout(x, P, inplace=inplace), flat
    ),
    "dropout_add": Op(
        lambda x, r: r + F.dropout(x, P), lambda x, r: M.dropout_add(x, r, P), None, two, passes=3
    ),
    "gelu, dropout": with_in_place(
        lambda x: F.dropout(F.gelu(x), P),
        lambda x, inplace=False: M.act_dropout(x, "gelu", P, inplace=inplace),
        flat,
    ),
}

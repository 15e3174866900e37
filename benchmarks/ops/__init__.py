"""The ops that bench_ops.py times, a family a file: each as stock PyTorch and as memkit write it."""

from __future__ import annotations

from . import activation, dropout, glu, norm, pooling, rotary, softmax
from .op import Op

FAMILIES: dict[str, dict[str, Op]] = {
    "activation": activation.OPS,
    "dropout": dropout.OPS,
    "glu": glu.OPS,
    "norm": norm.OPS,
    "softmax": softmax.OPS,
    "rotary": rotary.OPS,
    "pooling": pooling.OPS,
}

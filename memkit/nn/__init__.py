"""Modules: each is its ``torch.nn`` twin, with the same arguments and state, over :mod:`memkit.functional`."""

from .activation import (
    CELU,
    ELU,
    GELU,
    SELU,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    Mish,
    QuickGELU,
    ReLU,
    ReLU6,
    ReLUSquared,
    Sigmoid,
    SiLU,
    Softplus,
    Tanh,
)
from .dropout import AlphaDropout, Dropout, Dropout1d, Dropout2d, Dropout3d, DropPath, FeatureAlphaDropout
from .glu import GeGLU, ReGLU, SwiGLU
from .loss import CrossEntropyLoss, LinearCrossEntropyLoss
from .norm import BatchNorm1d, BatchNorm2d, BatchNorm3d, GroupNorm, LayerNorm, RMSNorm
from .rotary import RotaryEmbedding
from .softmax import LogSoftmax, Softmax

__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "SELU",
    "AlphaDropout",
    "BatchNorm1d",
    "BatchNorm2d",
    "BatchNorm3d",
    "CrossEntropyLoss",
    "DropPath",
    "Dropout",
    "Dropout1d",
    "Dropout2d",
    "Dropout3d",
    "FeatureAlphaDropout",
    "GeGLU",
    "GroupNorm",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LayerNorm",
    "LeakyReLU",
    "LinearCrossEntropyLoss",
    "LogSoftmax",
    "Mish",
    "QuickGELU",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReLU6",
    "ReLUSquared",
    "RotaryEmbedding",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "SwiGLU",
    "Tanh",
]

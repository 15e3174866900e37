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
from .loss import CrossEntropyLoss, LinearCrossEntropyLoss

__all__ = [
    "CELU",
    "ELU",
    "GELU",
    "SELU",
    "CrossEntropyLoss",
    "Hardsigmoid",
    "Hardswish",
    "Hardtanh",
    "LeakyReLU",
    "LinearCrossEntropyLoss",
    "Mish",
    "QuickGELU",
    "ReLU",
    "ReLU6",
    "ReLUSquared",
    "SiLU",
    "Sigmoid",
    "Softplus",
    "Tanh",
]

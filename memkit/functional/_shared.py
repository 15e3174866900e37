"""The end of the functions' docstrings: what holds for all of a family, in short."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import cleandoc
from typing import Any

from torch import Tensor

DTYPES = "Dtypes: float32, float64, float16, bfloat16, computed in float32 (float64 in float64). Devices: CPU, CUDA."


def check_tensor(op: str, argument: str, value: Any) -> None:
    """Before Python asks it for its shape; what only behaves as one may try."""
    if not isinstance(value, Tensor) and not hasattr(type(value), "__torch_function__"):
        raise TypeError(f"{op}: expected {argument} to be a Tensor, got {type(value).__name__}")


def check_number(op: str, argument: str, value: Any) -> None:
    """Before Python compares it or counts with it."""
    if not hasattr(type(value), "__float__"):
        raise TypeError(f"{op}: expected {argument} to be a number, got {type(value).__name__}")


def describe(functions: Iterable[Callable[..., Any]], shared: str) -> None:
    for each in functions:
        if each.__doc__:  # none with python -OO
            more = f"More: ``help(memkit.functional.{each.__name__}.__module__)``"
            each.__doc__ = "\n\n".join([cleandoc(each.__doc__), cleandoc(shared), DTYPES, more])

"""The end of the functions' docstrings: what holds for all of a family, in short."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from inspect import cleandoc
from typing import Any

DTYPES = "Dtypes: float32, float64, float16, bfloat16, computed in float32 (float64 in float64). Devices: CPU, CUDA."


def describe(functions: Iterable[Callable[..., Any]], shared: str) -> None:
    for each in functions:
        if each.__doc__:  # none with python -OO
            more = f"More: ``help(memkit.functional.{each.__name__}.__module__)``"
            each.__doc__ = "\n\n".join([cleandoc(each.__doc__), cleandoc(shared), DTYPES, more])

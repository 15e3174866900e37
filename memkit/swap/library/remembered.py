"""What was found out of classes and functions, for as long as they live: a program may make them by the thousand."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from types import MethodType, NoneType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

Found = TypeVar("Found")


class Remembered(Generic[Found]):
    """By objects, which this keeps nobody alive for, a dictionary by what else decides."""

    def __init__(self) -> None:
        self._of: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()

    def of(self, *objects: Any) -> dict[Hashable, Found]:
        """One that is lost where an object takes no weak references."""
        *before, last = _parts(objects)
        held = self._of
        try:
            for each in before:
                held = _held(held, each, WeakKeyDictionary)
            found: dict[Hashable, Found] = _held(held, last, dict)
        except TypeError:
            return {}
        return found


def _held(of: WeakKeyDictionary[Any, Any], key: Any, new: Any) -> Any:
    held = of.get(key)
    if held is None:
        held = of.setdefault(key, new())
    return held


def _parts(objects: tuple[Any, ...]) -> Iterator[Any]:
    for each in objects:
        if isinstance(each, MethodType):  # another object each time that it is asked for
            yield from (each.__self__, each.__func__)
        else:
            yield NoneType if each is None else each

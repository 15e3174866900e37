"""Twins of torch.nn's Softmax and LogSoftmax: subclasses with the same constructor and ``state_dict``.

One more attribute, in the constructor or later: ``inplace`` (False, True or "auto"); the call takes ``scale``, ``mask`` and
``causal`` too. See :mod:`memkit.functional`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .. import functional as F
from ..functional import Inplace
from ..functional._activation import check_inplace


class _Variant:
    """The module of the same name in torch.nn, which may overwrite its input.

    ``inplace``, an argument by keyword and an attribute: ``False``: a new tensor. ``True``: the input is overwritten;
    raises where that would corrupt a value or a gradient. ``"auto"``: overwritten where that is proven safe. A call
    takes ``scale``, ``mask`` and ``causal`` too, as :func:`memkit.functional.softmax` does.
    """

    inplace: Inplace = False  # in the class, so that a module whose class was changed has it too

    def __init__(self, dim: int | None = None, *, inplace: Inplace = False) -> None:
        check_inplace(type(self).__name__, inplace)
        super().__init__(dim)  # type: ignore[call-arg]
        self.inplace = inplace

    def extra_repr(self) -> str:
        text: str = super().extra_repr()  # type: ignore[misc]
        return f"{text}, inplace={self.inplace!r}" if self.inplace else text


class Softmax(_Variant, nn.Softmax):
    def forward(self, input: Tensor, **options: Any) -> Tensor:
        return F.softmax(input, self.dim, inplace=self.inplace, **options)


class LogSoftmax(_Variant, nn.LogSoftmax):
    def forward(self, input: Tensor, **options: Any) -> Tensor:
        return F.log_softmax(input, self.dim, inplace=self.inplace, **options)

"""Twins of torch.nn's activation modules.

Each is a subclass of its twin: the same constructor and ``state_dict``, ``isinstance`` checks hold, and
:func:`memkit.swap` turns one into the other by changing the class alone. Two attributes choose the variant, in the
constructor or later: ``inplace`` (False, True or "auto") and ``save`` ("auto", "input" or "output", for some "bit"); see
:mod:`memkit.functional`. ``repr`` names them where they are not the default.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor, nn

from .. import functional as F
from ..functional import Inplace, Save
from ..functional._activation import check_inplace


class _Variant:
    """The module of the same name in torch.nn, with its arguments and state and two attributes that choose its memory.

    They are arguments by keyword, too:

    ``inplace``
        ``False``: a new tensor. ``True``: the input is overwritten; raises where that would corrupt a value or a gradient.
        ``"auto"``: overwritten where no graph and no other tensor needs it; a later read by your own code (``act(h) + h``)
        is not seen.
    ``save``
        What backward computes the gradient from: ``"input"``; ``"output"``, which is free where the next layer keeps its
        input; or ``"auto"``. For ReLU, LeakyReLU, ReLU6, Hardtanh and Hardsigmoid also ``"bit"``: one bit an element.

    The docstring of the function of that name in :mod:`memkit.functional`, and of the module that holds it, says more.
    """

    # Defaults in the class, so that a module whose class was changed has them too.
    inplace: Any = False  # Inplace; the twins declare a bool
    save: Save = "auto"
    _saves: ClassVar[tuple[Save, ...]] = ("auto", "input", "output")

    def __init__(self, *args: Any, inplace: Inplace = False, save: Save = "auto", **kwargs: Any) -> None:
        name = type(self).__name__
        check_inplace(name, inplace, save)
        if save not in self._saves:
            *others, last = map(repr, self._saves)
            raise ValueError(f"{name}: expected save {', '.join(others)} or {last}, got {save!r}")
        super().__init__(*args, **kwargs)
        self.inplace = inplace
        self.save = save

    def extra_repr(self) -> str:
        text: str = super().extra_repr()  # type: ignore[misc]
        stock, given = "inplace=True", f"inplace={self.inplace!r}"
        parts = [text.replace(stock, given)]
        if self.inplace and stock not in text:
            parts.append(given)
        if self.save != "auto":
            parts.append(f"save={self.save!r}")
        return ", ".join(filter(None, parts))


class _TwoSlopes(_Variant):
    _saves = (*_Variant._saves, "bit")


class ReLU(_TwoSlopes, nn.ReLU):
    def __init__(self, inplace: Inplace = False, *, save: Save = "auto") -> None:
        super().__init__(inplace=inplace, save=save)

    def forward(self, input: Tensor) -> Tensor:
        return F.relu(input, inplace=self.inplace, save=self.save)


class LeakyReLU(_TwoSlopes, nn.LeakyReLU):
    def __init__(
        self, negative_slope: float = 0.01, inplace: Inplace = False, *, save: Save = "auto"
    ) -> None:
        super().__init__(negative_slope, inplace=inplace, save=save)

    def forward(self, input: Tensor) -> Tensor:
        return F.leaky_relu(input, self.negative_slope, inplace=self.inplace, save=self.save)


class ELU(_Variant, nn.ELU):
    def __init__(self, alpha: float = 1.0, inplace: Inplace = False, *, save: Save = "auto") -> None:
        super().__init__(alpha, inplace=inplace, save=save)

    def forward(self, input: Tensor) -> Tensor:
        return F.elu(input, self.alpha, inplace=self.inplace, save=self.save)


class SELU(_Variant, nn.SELU):
    def __init__(self, inplace: Inplace = False, *, save: Save = "auto") -> None:
        super().__init__(inplace=inplace, save=save)

    def forward(self, input: Tensor) -> Tensor:
        return F.selu(input, inplace=self.inplace, save=self.save)


class CELU(_Variant, nn.CELU):
    def __init__(self, alpha: float = 1.0, inplace: Inplace = False, *, save: Save = "auto") -> None:
        super().__init__(alpha, inplace=inplace, save=save)

    def forward(self, input: Tensor) -> Tensor:
        return F.celu(input, self.alpha, inplace=self.inplace, save=self.save)


class Sigmoid(_Variant, nn.Sigmoid):
    def forward(self, input: Tensor) -> Tensor:
        return F.sigmoid(input, inplace=self.inplace, save=self.save)


class Tanh(_Variant, nn.Tanh):
    def forward(self, input: Tensor) -> Tensor:
        return F.tanh(input, inplace=self.inplace, save=self.save)


class Softplus(_Variant, nn.Softplus):
    def forward(self, input: Tensor) -> Tensor:
        return F.softplus(input, self.beta, self.threshold, inplace=self.inplace, save=self.save)


class Hardtanh(_TwoSlopes, nn.Hardtanh):
    def __init__(
        self,
        min_val: float = -1.0,
        max_val: float = 1.0,
        inplace: Inplace = False,
        min_value: float | None = None,
        max_value: float | None = None,
        *,
        save: Save = "auto",
    ) -> None:
        super().__init__(
            min_val, max_val, min_value=min_value, max_value=max_value, inplace=inplace, save=save
        )

    def forward(self, input: Tensor) -> Tensor:
        return F.hardtanh(input, self.min_val, self.max_val, inplace=self.inplace, save=self.save)


class ReLU6(_TwoSlopes, nn.ReLU6):
    def __init__(self, inplace: Inplace = False, *, save: Save = "auto") -> None:
        super().__init__(inplace=inplace, save=save)

    def forward(self, input: Tensor) -> Tensor:
        return F.relu6(input, inplace=self.inplace, save=self.save)


class Hardsigmoid(_TwoSlopes, nn.Hardsigmoid):
    def __init__(self, inplace: Inplace = False, *, save: Save = "auto") -> None:
        super().__init__(inplace=inplace, save=save)

    def forward(self, input: Tensor) -> Tensor:
        return F.hardsigmoid(input, inplace=self.inplace, save=self.save)


class GELU(_Variant, nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        return F.gelu(input, self.approximate, inplace=self.inplace, save=self.save)


class SiLU(_Variant, nn.SiLU):
    def __init__(self, inplace: Inplace = False, *, save: Save = "auto") -> None:
        super().__init__(inplace=inplace, save=save)

    def forward(self, input: Tensor) -> Tensor:
        return F.silu(input, inplace=self.inplace, save=self.save)


class Mish(_Variant, nn.Mish):
    def __init__(self, inplace: Inplace = False, *, save: Save = "auto") -> None:
        super().__init__(inplace=inplace, save=save)

    def forward(self, input: Tensor) -> Tensor:
        return F.mish(input, inplace=self.inplace, save=self.save)


class Hardswish(_Variant, nn.Hardswish):
    def __init__(self, inplace: Inplace = False, *, save: Save = "auto") -> None:
        super().__init__(inplace=inplace, save=save)

    def forward(self, input: Tensor) -> Tensor:
        return F.hardswish(input, inplace=self.inplace, save=self.save)


class QuickGELU(_Variant, nn.Module):
    """x * sigmoid(1.702 * x), as in CLIP; torch.nn has no twin. ``inplace`` and ``save`` as in :class:`GELU`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.quick_gelu(input, inplace=self.inplace, save=self.save)


class ReLUSquared(_Variant, nn.Module):
    """relu(x)², as in Primer; torch.nn has no twin. ``inplace`` and ``save`` as in :class:`GELU`."""

    def forward(self, input: Tensor) -> Tensor:
        return F.relu_squared(input, inplace=self.inplace, save=self.save)

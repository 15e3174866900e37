"""Norms that people write out with eps beside the root, and `F.normalize` in a layer's own code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

import memkit
from memkit.memory import measure
from memkit.swap.library.functions import _normalize

C = 48


class Scaled(nn.Module):
    """With parameters of these names."""

    names = "weight", "bias"
    eps = 1e-6

    def __init__(self) -> None:
        super().__init__()
        self.eps = type(self).eps
        for name, value in zip(self.names, (torch.ones(C), torch.zeros(C)), strict=False):
            setattr(self, name, nn.Parameter(value))

    def held(self) -> list[Any]:
        return [getattr(self, name) for name in self.names]


class AnnotatedLayerNorm(Scaled):
    names = "a_2", "b_2"

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.held()
        mean, deviation = x.mean(-1, keepdim=True), x.std(-1, keepdim=True)
        return weight * (x - mean) / (deviation + self.eps) + bias  # type: ignore[no-any-return]


class Norm(AnnotatedLayerNorm):
    names = "alpha", "bias"


class LayerNormalization(Scaled):
    names = "scale", "shift"

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.held()
        distance, variance = x - x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return weight * distance / (variance.sqrt() + self.eps) + bias  # type: ignore[no-any-return]


class BookLayerNorm(Scaled):
    names = "scale", "shift"
    eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.held()
        distance, variance = x - x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
        return weight * (distance / torch.sqrt(variance + self.eps)) + bias  # type: ignore[no-any-return]


class PlainRMSNorm(Scaled):
    names = ("weight",)

    def forward(self, x: Tensor) -> Tensor:
        return self.held()[0] * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)  # type: ignore[no-any-return]


class OwnRMSNorm(Scaled):
    names = ("scale",)
    eps = 1e-8

    def forward(self, x: Tensor) -> Tensor:
        rms = x.norm(2, dim=-1, keepdim=True) * C**-0.5
        return self.held()[0] * (x / (rms + self.eps))  # type: ignore[no-any-return]


class LeastRMSNorm(Scaled):
    names = ("g",)
    eps = 1e-8

    def __init__(self) -> None:
        super().__init__()
        self.scale = C**-0.5

    def forward(self, x: Tensor) -> Tensor:
        rms = torch.norm(x, dim=-1, keepdim=True) * self.scale
        return x / rms.clamp(min=self.eps) * self.g


class ScaleNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g, self.eps = nn.Parameter(torch.ones(1) * C**0.5), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return x / torch.norm(x, dim=-1, keepdim=True).clamp(min=self.eps) * self.g


class ChannelLayerNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-5
        self.g, self.b = nn.Parameter(torch.ones(1, C, 1, 1)), nn.Parameter(torch.zeros(1, C, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        deviation = torch.var(x, dim=1, unbiased=False, keepdim=True).sqrt()
        return (x - x.mean(dim=1, keepdim=True)) / (deviation + self.eps) * self.g + self.b


class OtherNorm(Scaled):
    """None of them: divides by the deviation alone, and adds eps to the result."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.held()
        return weight * (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True) + self.eps + bias  # type: ignore[no-any-return]


class FirstScaleNorm(nn.Module):
    """The paper's own, whose scale has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.eps = nn.Parameter(torch.tensor(C**0.5)), 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.scale / torch.norm(x, dim=-1, keepdim=True).clamp(min=self.eps))


class TinyLayerNorm(LayerNormalization):
    eps = 1e-12


class TinyRMSNorm(PlainRMSNorm):
    eps = 1e-12


class LengthRMSNorm(Scaled):
    names = ("gamma",)
    eps = 1e-12

    def forward(self, x: Tensor) -> Tensor:
        return nnf.normalize(x, dim=-1, eps=self.eps) * C**0.5 * self.held()[0]  # type: ignore[no-any-return]


KINDS = {
    AnnotatedLayerNorm: "layer_norm/sample",
    Norm: "layer_norm/sample",
    LayerNormalization: "layer_norm/deviation",
    BookLayerNorm: "layer_norm",
    PlainRMSNorm: "rms_norm/deviation",
    OwnRMSNorm: "rms_norm/deviation",
    LeastRMSNorm: "rms_norm/least",
    ScaleNorm: "scale_norm",
    FirstScaleNorm: "scale_norm",
    TinyLayerNorm: "layer_norm/deviation",
    TinyRMSNorm: "rms_norm/deviation",
    LengthRMSNorm: "normalized",
    ChannelLayerNorm: "channel_layer_norm/deviation",
}


def inputs(cls: type[nn.Module]) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, C, 6, 5) if cls is ChannelLayerNorm else torch.randn(4, 6, 5, C)


def model_of(cls: type[nn.Module]) -> nn.Sequential:
    torch.manual_seed(1)
    layer = (lambda: nn.Conv2d(C, C, 1)) if cls is ChannelLayerNorm else (lambda: nn.Linear(C, C))
    model = nn.Sequential(layer(), cls(), layer())
    with torch.no_grad():
        for parameter in model[1].parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    out = model(leaf)
    return [out.detach(), *torch.autograd.grad(out.sin().sum(), [leaf, *model.parameters()])]


def kind_of(module: nn.Module) -> str:
    cls: Any = type(module)
    return (cls._stock if cls.kind == "watching" else cls).kind  # type: ignore[no-any-return]


def assert_near(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_written_out(cls: type[nn.Module]) -> None:
    stock, x = model_of(cls), inputs(cls)
    swapped = copy.deepcopy(stock)
    memkit.swap(swapped)
    assert kind_of(swapped[1]) == KINDS[cls]
    assert_near(step(swapped, x), step(stock, x))
    kept = measure(lambda: swapped(x)).saved
    less = 0 if cls is FirstScaleNorm else 0.9 * x.nbytes  # its product keeps the input alone
    assert kept < measure(lambda: stock(x)).saved - less
    small = [each * 1e-7 for each in (x, x)]  # where eps is what counts
    assert_near(step(swapped[1], small[0]), step(stock[1], small[1]))
    memkit.unswap(swapped)
    assert type(swapped[1]) is cls
    assert_near(step(swapped, x), step(stock, x))


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_in_half_precision(cls: type[nn.Module]) -> None:
    stock, x = model_of(cls).bfloat16(), inputs(cls).bfloat16()
    exact = step(copy.deepcopy(stock).double(), x.double())
    swapped = copy.deepcopy(stock)
    memkit.swap(swapped)
    assert kind_of(swapped[1]) == KINDS[cls]
    for ours, theirs, true in zip(step(swapped, x), step(stock, x), exact, strict=True):
        assert ours.dtype == theirs.dtype
        mine, other = ((each.double() - true).norm() for each in (ours, theirs))
        rounding = 1e-3 if true.dim() else 2e-2  # of one sum over all that is rounded
        assert mine <= 2 * other + rounding * true.norm()


class InsideNorm(Scaled):
    """The bias inside the weight, which does not show while they are ones and zeros."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.held()
        distance = x - x.mean(-1, keepdim=True)
        return weight * (distance / (x.var(-1, keepdim=True, unbiased=False) + self.eps).sqrt() + bias)  # type: ignore[no-any-return]


class PositiveRMSNorm(PlainRMSNorm):
    """Nor does this."""

    def forward(self, x: Tensor) -> Tensor:
        return self.held()[0].abs() * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)  # type: ignore[no-any-return]


@pytest.mark.parametrize("cls", [OtherNorm, InsideNorm, PositiveRMSNorm], ids=lambda cls: cls.__name__)
def test_another_is_left(cls: type[nn.Module]) -> None:
    model = nn.Sequential(cls())
    report = memkit.swap(model)
    assert type(model[0]) is cls
    assert "computes something else" in str(report)


class ActNorm(Scaled):
    """Set by what it is given first."""

    names = "scale", "bias"

    def __init__(self) -> None:
        super().__init__()
        self.is_set = False

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.held()
        if not self.is_set:
            with torch.no_grad():
                weight.copy_(1 / (x.std() + self.eps))
                bias.copy_(-x.mean())
            self.is_set = True
        return weight * (x + bias)  # type: ignore[no-any-return]


def test_what_is_set_by_its_first_input_is_not() -> None:
    model = ActNorm()
    memkit.swap(nn.Sequential(model))
    assert not model.is_set
    assert torch.equal(model.scale, torch.ones(C))
    assert torch.equal(model.bias, torch.zeros(C))


def test_a_number_of_no_dimensions_is_no_weight() -> None:
    class NumberRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.eps = torch.tensor(2.0), 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    model = nn.Sequential(NumberRMSNorm())
    memkit.swap(model)
    assert type(model[0]) is NumberRMSNorm


def test_a_weight_of_another_dtype_decides() -> None:
    class OwnLayerNorm(BookLayerNorm):
        names = ("scale",)

        def forward(self, x: Tensor) -> Tensor:
            distance, variance = x - x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
            return self.held()[0] * distance / (variance + self.eps).sqrt()  # type: ignore[no-any-return]

    model = nn.Sequential(OwnLayerNorm())
    memkit.swap(model)
    assert type(model[0]) is not OwnLayerNorm
    assert model(torch.randn(2, C).bfloat16()).dtype == torch.float32


class Cosine(nn.Module):
    """As Swin V2's attention begins."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, C // 4).permute(2, 0, 3, 1, 4)
        return nnf.normalize(q, dim=-1) * nnf.normalize(k, p=2.0, dim=3).exp() * v


class GeluAndLength(Cosine):
    def forward(self, x: Tensor) -> Tensor:
        return nnf.normalize(nnf.gelu(self.qkv(x)), dim=-1)


def test_normalize_does_not_stand_in_the_way_of_others() -> None:
    model, x = GeluAndLength(), torch.randn(2, 7, C)
    memkit.swap(model, sample=x, ops=["gelu"], lean="call")
    assert type(model) is not GeluAndLength


def test_normalize_in_a_forward() -> None:
    torch.manual_seed(0)
    stock, x = Cosine(), torch.randn(2, 7, C)
    swapped = copy.deepcopy(stock)
    memkit.swap(swapped, sample=x, lean="call")
    assert_near(step(swapped, x), step(stock, x))
    # The first one's result; the second one's is kept by nobody.
    assert measure(lambda: swapped(x)).saved <= measure(lambda: stock(x)).saved - x.nbytes
    with torch.autocast("cpu", torch.bfloat16):
        assert swapped(x).dtype == stock(x).dtype


@pytest.mark.parametrize("dim", [-1, 0, 1, 2, 3])
def test_normalize_lies_as_stocks(dim: int) -> None:
    dense = torch.randn(2, 3, 4, 5)
    part = torch.randn(2, 4, 3, 3, 5)[:, :, 1]
    layouts = [
        dense,
        dense.transpose(1, 2),
        dense.transpose(-1, -2),
        dense.contiguous(memory_format=torch.channels_last),
        part.transpose(1, 2),
        part.transpose(1, 3),
        dense[:, ::2],
    ]
    for x in layouts:
        theirs, ours = (x.detach().requires_grad_() for _ in range(2))
        want = nnf.normalize(theirs, dim=dim)
        got = _normalize(nnf.normalize, ours, dim=dim)
        assert got.grad_fn is not None
        assert got.stride() == want.stride()
        grads = (torch.autograd.grad(y.exp().sum(), leaf)[0] for y, leaf in ((got, ours), (want, theirs)))
        torch.testing.assert_close(*grads)
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ((1.0,), {}),
        ((2, (1, 2)), {}),
        ((2, 1, 1e-3, None), {}),
        ((), {"out": None}),
        ((2.0, 1), {"eps": 1}),
        ((), {"eps": -1.0}),
    ],
)
def test_normalize_left_to_stock(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    calls = []

    def stock(*args: Any, **named: Any) -> Tensor:
        calls.append(args)
        return nnf.normalize(*args, **named)

    x = torch.randn(2, 3, 4, requires_grad=True)
    assert torch.equal(_normalize(stock, x, *args, **named), nnf.normalize(x, *args, **named))
    assert len(calls) == 1


@pytest.mark.parametrize("case", ["broadcast", "autocast"])
def test_normalize_of_other_layouts_and_dtypes(case: str) -> None:
    x = torch.randn(4, 1, 5, requires_grad=True)
    calls = []

    def stock(x: Tensor) -> Tensor:
        calls.append(x)
        return nnf.normalize(x)

    with torch.autocast("cpu", torch.bfloat16, enabled=case == "autocast"):
        given = x.expand(4, 3, 5) if case == "broadcast" else x
        got, want = _normalize(stock, given), nnf.normalize(given)
    assert (got.dtype, got.stride(), len(calls)) == (want.dtype, want.stride(), 1)

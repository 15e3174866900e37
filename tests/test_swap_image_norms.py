"""Norms over the channels of images that model libraries write out: known, verified, and safe in every call."""

import pytest
import torch
from swap_cases import assert_compiled, assert_copied, assert_known
from torch import nn

from memkit import swap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")
C = 8


def parameter(*shape):
    return nn.Parameter(torch.rand(shape) + 0.5)


class LayerNorm2d(nn.Module):
    """As in Segment Anything and ConvNeXt."""

    def __init__(self, channels=C, eps=1e-6):
        super().__init__()
        self.weight, self.bias, self.eps = parameter(channels), parameter(channels), eps

    def forward(self, x):
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class ChanLayerNorm(nn.Module):
    """As in imagen-pytorch."""

    def __init__(self):
        super().__init__()
        self.g, self.b, self.eps = parameter(1, C, 1, 1), parameter(1, C, 1, 1), 1e-5

    def forward(self, x):
        variance = torch.var(x, dim=1, unbiased=False, keepdim=True)
        return (x - x.mean(dim=1, keepdim=True)) / (variance + self.eps).sqrt() * self.g + self.b


class PermutedLayerNorm(LayerNorm2d):
    """Whose result is channels_last."""

    def forward(self, x):
        shape = self.weight.shape
        normed = nn.functional.layer_norm(x.permute(0, 2, 3, 1), shape, self.weight, self.bias, self.eps)
        return normed.permute(0, 3, 1, 2)


class FormattedLayerNorm(nn.Module):
    """As in ConvNeXt's own code."""

    def __init__(self, data_format):
        super().__init__()
        self.weight, self.bias, self.eps = parameter(C), parameter(C), 1e-6
        self.data_format, self.normalized_shape = data_format, (C,)

    def forward(self, x):
        if self.data_format == "channels_last":
            return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return LayerNorm2d.forward(self, x)


class RMSNorm2d(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = parameter(C, 1, 1), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + self.eps) * self.weight


class RMSNorm(nn.Module):
    """As in denoising-diffusion-pytorch."""

    def __init__(self, offset=0, shape=(1, C, 1, 1)):
        super().__init__()
        self.g, self.scale, self.offset = parameter(*shape), C**0.5, offset

    def forward(self, x):
        return nn.functional.normalize(x, dim=1) * (self.g + self.offset) * self.scale


class PixelNorm(nn.Module):
    """As in progressive GANs."""

    def forward(self, x):
        return x / torch.sqrt(torch.mean(x**2, dim=1, keepdim=True) + 1e-8)


def some():
    return torch.randn(2, C, 5, 4, dtype=torch.float64)


KNOWN = {
    "layer_norm": (LayerNorm2d, some),
    "layer_norm of four dimensions": (ChanLayerNorm, some),
    "layer_norm, channels first": (lambda: FormattedLayerNorm("channels_first"), some),
    "layer_norm, channels last": (
        lambda: FormattedLayerNorm("channels_last").double(),
        lambda: torch.randn(2, 5, 4, C).double(),
    ),
    "layer_norm, permuted": (lambda: PermutedLayerNorm().double(), some),
    "rms_norm": (RMSNorm2d, some),
    "normalized": (RMSNorm, some),
    "normalized, offset": (lambda: RMSNorm(1), some),
    "normalized, sequences": (lambda: RMSNorm(shape=(1, C, 1)), lambda: torch.randn(2, C, 7).double()),
    "normalized, sequences without the first": (
        lambda: RMSNorm(shape=(C, 1)),
        lambda: torch.randn(2, C, 7).double(),
    ),
    "normalized, volumes": (
        lambda: RMSNorm(shape=(1, C, 1, 1, 1)),
        lambda: torch.randn(2, C, 3, 4, 2).double(),
    ),
    "pixels": (PixelNorm, some),
}
known = pytest.mark.parametrize("name", KNOWN)


@known
@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("by_sample", [False, True])
def test_known(name, by_sample, lean):
    assert_known(*KNOWN[name], by_sample, lean)


@known
def test_copies_and_pickles(name):
    assert_copied(*KNOWN[name])


@known
@pytest.mark.parametrize("lean", [False, "call"])
def test_compiled(name, lean):
    assert_compiled(*KNOWN[name], lean)


def between_convolutions(norm):
    return nn.Sequential(nn.Conv2d(C, C, 1), norm, nn.Conv2d(C, C, 1))


@pytest.mark.parametrize(
    "name", [name for name in KNOWN if KNOWN[name][1] is some and "permuted" not in name]
)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_what_is_kept_and_how_results_lie(name, layout):
    """One tensor, which the next convolution keeps, or which is there again in backward."""
    stock, norm = KNOWN[name][0](), KNOWN[name][0]()
    norm.load_state_dict(stock.state_dict())
    x = torch.randn(2, C, 16, 16).contiguous(memory_format=layout)
    model = between_convolutions(norm)
    before = measure(lambda: model(x)).saved
    want = [*torch.autograd.grad(model(x).square().sum(), [*model.parameters()])]
    report = swap(model, sample=x)
    assert {row.path: row.after for row in report.changed} == {"1": "memkit"}
    assert report.saved_after == measure(lambda: model(x)).saved
    assert report.saved_after <= before - 0.9 * x.nbytes
    for mine, theirs in zip(
        torch.autograd.grad(model(x).square().sum(), [*model.parameters()]), want, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)
    assert model[1](x).is_contiguous(memory_format=layout)
    assert stock(x).is_contiguous(memory_format=layout)
    lean = between_convolutions(KNOWN[name][0]())
    swap(lean, sample=x, lean="call")
    one = x.nbytes + 2 * 2 * 16 * 16 * 4
    assert measure(lambda: lean(x)).saved <= one


def result(forward, x):
    """Or what it raises."""
    try:
        return forward(x)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("name", ["layer_norm of four dimensions", "normalized", "pixels"])
def test_other_shapes_and_dtypes_stay_stocks(name):
    stock, norm = KNOWN[name][0](), KNOWN[name][0]()
    norm.load_state_dict(stock.state_dict())
    assert swap(nn.Sequential(norm)).changed
    image = torch.randn(2, C, 5, 4).bfloat16()
    promoted = [] if name == "pixels" else [image]
    for x in (torch.randn(C, 5, 4), torch.randn(3, C), *promoted):
        mine, theirs = result(norm, x), result(stock, x)
        assert mine == theirs if isinstance(theirs, str) else torch.equal(mine, theirs)
    mine, theirs = norm.bfloat16()(image), stock.bfloat16()(image)
    assert mine.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


NOT_QUITE = {
    "another dimension": lambda self, x: RMSNorm2d.forward(self, x.transpose(1, 2)).transpose(1, 2),
    "a deviation": lambda self, x: x / (x.pow(2).mean(1, keepdim=True).sqrt() + self.eps) * self.weight,
    "the largest": lambda self, x: x / x.abs().amax(1, keepdim=True) * self.weight,
    "centred": lambda self, x: RMSNorm2d.forward(self, x - x.mean(1, keepdim=True)),
}


@pytest.mark.parametrize("forward", NOT_QUITE.values(), ids=NOT_QUITE)
def test_what_computes_something_else_is_left(forward):
    class OwnRMSNorm(RMSNorm2d):
        pass

    OwnRMSNorm.forward = forward
    norm = OwnRMSNorm()
    norm.weight = parameter(C, 1, 1)
    assert not swap(nn.Sequential(norm)).changed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pixels_that_become_of_one_dtype_are_left(dtype):
    """Without a weight that would say of what dtype they are."""

    class OwnPixelNorm(PixelNorm):
        def forward(self, x):
            return super().forward(x.to(dtype))

    assert not swap(nn.Sequential(OwnPixelNorm())).changed


def test_channels_that_are_broadcast_to_the_weight_stay_stocks():
    stock, norm = RMSNorm(), RMSNorm()
    norm.load_state_dict(stock.state_dict())
    assert swap(nn.Sequential(norm)).changed
    x = torch.randn(2, 1, 5, 4)
    assert torch.equal(norm(x), stock(x))


def test_what_holds_something_else_is_left():
    for name, held in (("weight", 1.0), ("bias", [1.0])):
        norm = LayerNorm2d()
        del norm._parameters[name]
        setattr(norm, name, held)
        assert not swap(nn.Sequential(nn.Conv2d(C, C, 1), norm)).changed
    mixed = ChanLayerNorm()
    mixed.b = nn.Parameter(torch.zeros(C, 1, 1))
    wide = RMSNorm2d()
    wide.weight = parameter(C, 4, 4)
    for norm in (mixed, wide):
        assert not swap(nn.Sequential(norm)).changed


def test_results_lie_as_stocks():
    """What follows may ask for a view of them."""
    stock = PermutedLayerNorm()
    norm = nn.Sequential(stock)
    x = torch.randn(2, C, 5, 4)
    want = stock(x)
    assert swap(norm).changed
    assert norm(x).stride() == want.stride() != x.stride()
    torch.testing.assert_close(norm(x), want)


def test_verified_without_autocast():
    """Under which a norm that shall be exact stays stock's, and would compare with itself."""
    stock, model = RMSNorm(offset=1), nn.Sequential(RMSNorm(offset=1))
    with torch.no_grad():
        stock.g.zero_()
    model[0].load_state_dict(stock.state_dict())
    with torch.autocast("cpu", torch.bfloat16):
        assert swap(model).changed
    x = torch.randn(2, C, 5, 4)
    torch.testing.assert_close(model(x), stock(x))


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_twin_that_leaves_the_probe_to_stock_is_none(dtypes):
    class LayerNorm2dThrice(LayerNorm2d):
        def forward(self, x):
            return 3 * super().forward(x)

    LayerNorm2dThrice.__name__ = "LayerNorm2d"
    norm = LayerNorm2dThrice()
    norm.weight.data, norm.bias.data = (
        p.data.to(dtype) for p, dtype in zip((norm.weight, norm.bias), dtypes, strict=True)
    )
    assert not swap(nn.Sequential(norm)).changed
    deep = type("RMSNorm", (RMSNorm,), {"forward": lambda self, x: 3 * RMSNorm.forward(self, x)})
    assert not swap(nn.Sequential(deep(shape=(1, 2, 1, 1, 1, 1)))).changed


def test_torchs_norms_are_left_to_their_own_twins():
    model = nn.Sequential(nn.LayerNorm(C), nn.RMSNorm(C), type("LayerNorm2d", (nn.LayerNorm,), {})(C))
    assert [row.path for row in swap(model, sample=torch.randn(4, C)).rows] == ["0", "1", "2"]


def test_in_a_block_with_an_activation():
    """Its norm's result is made again, and the activation's from that."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj, self.norm, self.act = nn.Conv2d(C, C, 3, padding=1), RMSNorm(), nn.SiLU()
            self.last = nn.Conv2d(C, C, 1)

        def forward(self, x):
            return self.last(self.act(self.norm(self.proj(x))))

    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, C, 16, 16)
    want = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    swap(model, sample=x, lean="call")
    got = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)
    assert measure(lambda: model(x)).saved <= x.nbytes + 2 * 2 * 16 * 16 * 4

"""Norms as model libraries write them: found by their names, verified by their values, safe in every call."""

import pytest
import torch
from swap_cases import (
    D,
    TinyRMSNorm,
    assert_as_stock,
    assert_compiled,
    assert_copied,
    assert_known,
    batch,
    images,
    only,
)
from torch import nn

from memkit import swap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")


class OwnLayerNorm(nn.Module):
    """As in Cohere's models."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)
        self.variance_epsilon = 1e-5

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))


class BiasedLayerNorm(nn.Module):
    """As in DeBERTa."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(D) + 0.5), nn.Parameter(torch.rand(D))
        self.variance_epsilon = 1e-5

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed + self.bias


class KinLayerNorm(TinyRMSNorm):
    """T5's kin calls it so."""


class PlainRMSNorm(nn.Module):
    """As in nanochat, for rows of any width."""

    def __init__(self):
        super().__init__()
        self.eps = 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


class PlainLayerNorm(nn.Module):
    """As in OLMo."""

    def __init__(self):
        super().__init__()
        self.normalized_shape = (D,)

    def forward(self, x):
        return nn.functional.layer_norm(x, self.normalized_shape)


class OffsetLayerNorm(nn.LayerNorm):
    """As in Nemotron."""

    def forward(self, x):
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class FirstLayerNorm(nn.LayerNorm):
    """As in transformers' ConvNeXt."""

    data_format = "channels_first"

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


KNOWN = {
    "rms_norm": (TinyRMSNorm, batch),
    "rms_norm+1": (lambda: TinyRMSNorm(1.0), batch),
    "rms_norm by the other's name": (KinLayerNorm, batch),
    "rms_norm without a weight": (PlainRMSNorm, batch),
    "layer_norm": (OwnLayerNorm, batch),
    "layer_norm with a bias": (BiasedLayerNorm, batch),
    "layer_norm without a weight": (PlainLayerNorm, batch),
    "layer_norm+1": (lambda: OffsetLayerNorm(D), batch),
    "layer_norm, channels first": (lambda: FirstLayerNorm(2), images),
    "the same without a weight": (lambda: FirstLayerNorm(2, elementwise_affine=False), images),
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


@pytest.mark.parametrize("norm", [PlainRMSNorm, PlainLayerNorm])
def test_norms_without_a_weight_keep_their_output(norm):
    x = torch.randn(64, D, requires_grad=True)
    model = nn.Sequential(nn.Tanh(), norm(), nn.Linear(D, 1))
    report = swap(model, sample=x, ops={"rms_norm", "layer_norm"})
    assert report.saved_after == report.saved_before - report.bytes_before + report.bytes_after
    assert measure(lambda: model(x)).saved == (2 * D + 1) * 64 * 4
    if norm is PlainRMSNorm:
        torch.testing.assert_close(model[1](torch.tensor(3.0)), norm()(torch.tensor(3.0)))


def test_a_norm_with_a_bias_keeps_its_output_and_promotes_as_stock():
    x = torch.randn(64, D, requires_grad=True)
    model = nn.Sequential(nn.Tanh(), BiasedLayerNorm(), nn.Linear(D, 1))
    with torch.no_grad():
        model[1].bias.zero_()  # weights that allow the output
    assert swap(model, sample=x, ops={"layer_norm"}).changed
    assert measure(lambda: model(x)).saved == (2 * D + 1) * 64 * 4
    rounded = x.detach().bfloat16().requires_grad_()
    assert_as_stock(model[:2], rounded)
    assert model[:2](rounded).dtype == torch.float32


def rms(x, dims=-1, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + eps)


NOT_QUITE = {
    "another eps": lambda self, x: nn.functional.layer_norm(x, (D,), None, None, 1e-6),
    "always float32": lambda self, x: rms(x.float()),
    "the third dimension": lambda self, x: rms(x, 2 if x.dim() > 2 else -1),
    "the first numbers": lambda self, x: x * torch.rsqrt(x[..., :D].pow(2).mean(-1, keepdim=True) + 1e-6),
}


@pytest.mark.parametrize("forward", NOT_QUITE.values(), ids=NOT_QUITE)
def test_norms_without_a_weight_that_compute_something_else(forward):
    """There is nothing but numbers to tell them by."""

    layer = "layer_norm" in forward.__code__.co_names
    cls = type("OwnLayerNorm" if layer else "OwnRMSNorm", (nn.Module,), {"forward": forward})
    norm = cls()
    if layer:
        norm.normalized_shape = (D,)
    else:
        norm.eps = 1e-6
    assert not swap(nn.Sequential(norm, nn.Linear(D, D))).changed


@pytest.mark.parametrize("attribute", [("normalized_shape", D), ("weight", 1.0), ("weight", [1.0] * D)])
def test_norms_that_hold_other_things_are_left(attribute):
    norm = PlainRMSNorm()
    setattr(norm, *attribute)
    assert not swap(nn.Sequential(nn.Linear(D, D), norm)).changed


@pytest.mark.parametrize("values", [((-1,), (-2, -1)), ({"eps": 1e-6}, {"eps": 0.1})])
def test_a_verdict_is_of_one_kind_of_module(values):
    class OwnRMSNorm(PlainRMSNorm):
        def __init__(self, held):
            super().__init__()
            self.held = held

        def forward(self, x):
            return rms(x, eps=self.held["eps"]) if isinstance(self.held, dict) else rms(x, self.held)

    model = nn.Sequential(OwnRMSNorm(values[0]), nn.Linear(D, D), OwnRMSNorm(values[1])).double()
    assert [row.path for row in swap(model).changed] == ["0"]
    assert_as_stock(model, batch(2, 3, D))


def test_a_norm_whose_parameters_are_elsewhere():
    """On no elements everything agrees with everything."""
    norm = TinyRMSNorm(D)
    norm.weight = nn.Parameter(torch.empty(0))
    row = only(swap(nn.Sequential(norm)))
    assert not row.changed
    assert row.reason == "its parameters have no values yet"

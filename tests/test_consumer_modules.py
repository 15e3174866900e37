"""The modules over operators and their layers as one node, and what all of them refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from consumer_cases import seeded, with_gradients
from torch import Tensor, nn

import memkit
import memkit.functional as M
from memkit.memory import measure


def test_bad_input() -> None:
    x, w = torch.randn(4, 6), torch.randn(3, 6)
    image = torch.randn(2, 6, 4, 4)
    for call, error, message in (
        (
            lambda: M.act_linear(x, torch.randn(3, 5)),
            ValueError,
            r"act_linear: expected 5 features, got \[4, 6\]",
        ),
        (
            lambda: M.act_linear(x, w, torch.randn(4)),
            ValueError,
            r"act_linear: expected a bias of shape \[3\], got \[4\]",
        ),
        (
            lambda: M.act_linear(x, w.double()),
            TypeError,
            "act_linear: expected a weight of the input's dtype",
        ),
        (lambda: M.act_linear(x, w[0]), ValueError, "act_linear: expected a weight of 2 dimensions"),
        (lambda: M.act_linear(x, w, act="swish"), ValueError, "activation: expected one of"),
        (
            lambda: M.act_linear(x, w, act="elu", beta=1.0),
            TypeError,
            r"act_linear: expected parameters \['alpha'\]",
        ),
        (
            lambda: M.act_linear(x, None),
            TypeError,
            "act_linear: expected weight to be a Tensor or several, got None",
        ),
        (lambda: M.act_linear([1.0], w), TypeError, "act_linear: expected input to be a Tensor, got list"),
        (lambda: M.act_linear(x.long(), w), TypeError, "expected float32, float64, float16 or bfloat16"),
        (lambda: M.act_linear(x, w, act_bias=torch.randn(3)), ValueError, r"expected a bias of shape \[6\]"),
        (lambda: M.act_linear(torch.tensor(1.0), w), ValueError, "expected an input of"),
        (
            lambda: M.act_linear(x, [w, w], [None]),
            ValueError,
            "act_linear: expected a bias or None for each of 2 weights",
        ),
        (
            lambda: M.dropout_linear(x, [w], []),
            ValueError,
            "dropout_linear: expected a bias or None for each of 1",
        ),
        (
            lambda: M.glu_linear(x, x, [w], []),
            ValueError,
            "glu_linear: expected a bias or None for each of 1",
        ),
        (lambda: M.norm_linear(x, [w], []), ValueError, "norm_linear: expected a bias or None for each of 1"),
        (lambda: M.act_linear(x, []), ValueError, "act_linear: expected at least 1 weight, got 0"),
        (
            lambda: M.act_linear(x[0, 0], w),
            ValueError,
            "act_linear: expected an input of at least 1 dimension",
        ),
        (
            lambda: M.dropout_linear(x, w, p=1.5),
            ValueError,
            r"dropout_linear: expected a probability p in \[0, 1\]",
        ),
        (lambda: M.glu_linear(x, x[:2], w), ValueError, "swiglu: expected gate and up of one shape"),
        (lambda: M.glu_linear(x, x, w, packing="halves"), ValueError, "gated: expected packing"),
        (lambda: M.norm_linear(x, w, norm="batch"), ValueError, "norm_linear: expected norm"),
        (
            lambda: M.norm_linear(x, w, norm_weight=torch.ones(5)),
            ValueError,
            "layer_norm: expected a weight of shape",
        ),
        (lambda: M.act_conv2d(x, w), ValueError, "act_conv2d: expected an input .N, C, H, W."),
        (lambda: M.norm_act_conv2d(x, w), ValueError, "norm_act_conv2d: expected an input of 4 dimensions"),
        (
            lambda: M.norm_act_conv2d(image, w),
            ValueError,
            "expected running_mean and running_var outside training",
        ),
        (
            lambda: M.norm_act_conv2d(image, w, training=True),
            ValueError,
            "norm_act_conv2d: expected a weight of 4 dimensions",
        ),
        (
            lambda: M.norm_act_conv2d(image, torch.randn(2, 5, 1, 1), training=True),
            ValueError,
            "norm_act_conv2d: expected 5 channels",
        ),
        (
            lambda: M.norm_act_conv2d(image, torch.randn(2, 6, 1, 1), padding="same", training=True),
            ValueError,
            "norm_act_conv2d: expected padding of one or two whole numbers",
        ),
        (
            lambda: M.norm_act_conv2d(image[:1, :, :1, :1], torch.randn(2, 6, 1, 1), training=True),
            ValueError,
            "norm_act_conv2d: expected more than 1 value per channel",
        ),
        (
            lambda: M.norm_act_conv2d(image, torch.randn(2, 6, 1, 1), training=True, eps=-1.0),
            ValueError,
            "norm_act_conv2d: expected an eps above 0 when training, got -1.0",
        ),
        (lambda: M.act_linear("x", w), TypeError, "act_linear: expected input to be a Tensor, got str"),  # type: ignore[call-overload]
        (lambda: M.dropout_linear(None, w), TypeError, "dropout_linear: expected input to be a Tensor"),  # type: ignore[call-overload]
        (lambda: M.act_linear(x, w, 3), TypeError, "act_linear: expected a tensor argument .*, got int"),  # type: ignore[call-overload]
        (
            lambda: M.norm_linear(x, [w, "w"]),
            TypeError,
            "norm_linear: expected a tensor argument .*, got str",
        ),  # type: ignore[list-item]
        (lambda: M.glu_linear(x, 3, w), TypeError, "glu_linear: expected a tensor argument .*, got int"),  # type: ignore[call-overload]
        (
            lambda: torch.ops.memkit._consumer([x], "softmax", "", "", [], [w], [None], []),
            ValueError,
            "_consumer: expected op",
        ),
        (
            lambda: torch.ops.memkit._consumer([x], "glu", "silu", "gate_up", [], [w], [None], []),
            ValueError,
            "_consumer: glu: expected 2 inputs",
        ),
    ):
        with pytest.raises(error, match=message):
            call()


def test_edges() -> None:
    w, b = torch.randn(3, 6, requires_grad=True), torch.randn(3, requires_grad=True)
    for shape in ((0, 6), (2, 0, 6), (6,)):
        x = torch.randn(shape, requires_grad=True)
        out, *grads = with_gradients(lambda x, w, b: M.act_linear(x, w, b), [x, w, b])
        assert out.shape == (*shape[:-1], 3)
        assert [g.shape for g in grads] == [x.shape, w.shape, b.shape]
    x = torch.randn(4, 6)
    x[1, 2], x[2, 3] = torch.nan, torch.inf
    out = M.act_linear(x, w)
    assert out[[0, 3]].isfinite().all()
    assert out[1].isnan().all()
    assert torch.equal(M.dropout_linear(x[:1], w, training=False), F.linear(x[:1], w))
    many = M.dropout_linear(x[:1], [w, w], [b, None], training=False)
    assert torch.equal(many[0], F.linear(x[:1], w, b))
    assert torch.equal(many[1], F.linear(x[:1], w))
    assert torch.equal(M.dropout_linear(x[:1], w, p=1.0), torch.zeros(1, 3))
    mine, parts = (
        seeded(f)()
        for f in (
            lambda: M.dropout_linear(x[:1], w, generator=torch.Generator().manual_seed(3)),
            lambda: F.linear(M.dropout(x[:1], generator=torch.Generator().manual_seed(3)), w),
        )
    )
    assert torch.equal(mine, parts)


def usual(kind: str) -> nn.Module:
    """An implementation as models have it."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if kind == "mlp":
                self.fc1, self.fc2 = nn.Linear(16, 64), nn.Linear(64, 16)
            else:
                self.gate_proj, self.up_proj = nn.Linear(16, 64, bias=False), nn.Linear(16, 64, bias=False)
                self.down_proj = nn.Linear(64, 16, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            if kind == "mlp":
                return self.fc2(F.gelu(self.fc1(x)))
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    return Plain()


@pytest.mark.parametrize("kind", ["mlp", "gated"])
def test_networks(kind: str) -> None:
    theirs = usual(kind)
    mine = memkit.nn.MLP(16) if kind == "mlp" else memkit.nn.GatedMLP(16, 64)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 7, 16, requires_grad=True)
    a, b = mine(x), theirs(x)
    torch.testing.assert_close(a, b)
    grads = [torch.autograd.grad(y.square().sum(), [x, *m.parameters()]) for y, m in ((a, mine), (b, theirs))]
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    hidden = 5 * 7 * 64 * 4
    assert measure(lambda: mine(x)).saved == hidden * (1 if kind == "mlp" else 2)
    mine.dropout, mine.out_dropout = 0.3, 0.2
    assert torch.equal(mine.eval()(x), a)
    mine.train()
    assert measure(lambda: mine(x)).saved == hidden * (1 if kind == "mlp" else 2) + 16
    last = mine.fc2 if kind == "mlp" else mine.down_proj

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        y = mine(x)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *mine.parameters()])]

    fused = run()
    seen: list[Any] = []
    handle = last.register_forward_hook(
        lambda *a: seen.append(a)
    )  # the layer is called, and all else is the same
    for got, want in zip(run(), fused, strict=True):
        torch.testing.assert_close(got, want)
    assert len(seen) == 1
    handle.remove()
    assert "dropout=0.3" in repr(mine)
    with pytest.raises(ValueError, match="expected a dropout probability"):
        type(mine)(16, dropout=2.0)


def test_layers() -> None:
    x, up = torch.randn(4, 16), torch.randn(4, 16)
    for layer, want in (
        (memkit.nn.ActLinear(16, 3, act="silu"), lambda m: F.linear(M.silu(x), m.weight, m.bias)),
        (
            memkit.nn.ActLinear(16, 3, False, "leaky_relu", negative_slope=0.2),
            lambda m: F.linear(M.leaky_relu(x, 0.2), m.weight),
        ),
        (
            memkit.nn.DropoutLinear(16, 3, p=0.3, act="gelu").eval(),
            lambda m: F.linear(M.gelu(x), m.weight, m.bias),
        ),
        (memkit.nn.GLULinear(16, 3), lambda m: F.linear(M.swiglu(x, up), m.weight, m.bias)),
    ):
        assert isinstance(layer, nn.Linear)
        assert layer.state_dict().keys() == nn.Linear(16, 3, layer.bias is not None).state_dict().keys()
        got = layer(x, up) if isinstance(layer, memkit.nn.GLULinear) else layer(x)
        assert torch.equal(got, want(layer))
        assert "in_features=16" in repr(layer)
    drops = memkit.nn.DropoutLinear(16, 3, p=0.5)
    assert torch.equal(
        *(seeded(f)() for f in (lambda: drops(x), lambda: F.linear(M.dropout(x), drops.weight, drops.bias)))
    )


def test_norm_linear_module() -> None:
    x = torch.randn(4, 16)
    for norm in (nn.LayerNorm(16), nn.RMSNorm(16), memkit.nn.RMSNorm(16)):
        heads = [nn.Linear(16, n) for n in (4, 2)]
        module = memkit.nn.NormLinear(norm, *heads)
        for got, head in zip(module(x), heads, strict=True):
            torch.testing.assert_close(got, head(norm(x)))
        heads[0].register_forward_hook(lambda *a: a[2] * 0)
        assert not module(x)[0].any()
        assert torch.is_tensor(memkit.nn.NormLinear(norm, heads[1])(x))

    class Shifted(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    shifted = Shifted(16)
    torch.testing.assert_close(memkit.nn.NormLinear(shifted, heads[1])(x), heads[1](shifted(x)))
    with pytest.raises(TypeError, match="NormLinear: expected a LayerNorm or RMSNorm"):
        memkit.nn.NormLinear(nn.LayerNorm((4, 4)), heads[0])
    with pytest.raises(ValueError, match="NormLinear: expected at least one Linear"):
        memkit.nn.NormLinear(norm)


def test_norm_act_conv_module() -> None:
    x = torch.randn(4, 6, 5, 5)
    for momentum in (0.1, None):
        ours, theirs = (nn.BatchNorm2d(6, momentum=momentum) for _ in range(2))
        module = memkit.nn.NormActConv2d(ours, 6, 3, 3, padding=1)
        for _ in range(2):
            torch.testing.assert_close(
                module(x),
                F.conv2d(F.relu(theirs(x)), module.weight, module.bias, padding=1),
                rtol=1e-4,
                atol=1e-5,
            )
        for key, value in theirs.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[key], value)
        module.eval(), theirs.eval()
        torch.testing.assert_close(
            module(x),
            F.conv2d(F.relu(theirs(x)), module.weight, module.bias, padding=1),
            rtol=1e-4,
            atol=1e-5,
        )
    norm = memkit.nn.BatchNorm2d(6, act="silu")
    module = memkit.nn.NormActConv2d(norm, 6, 3, 1, act="gelu_tanh")
    want = F.conv2d(F.gelu(norm(x), approximate="tanh"), module.weight, module.bias)
    torch.testing.assert_close(module(x), want, rtol=1e-4, atol=1e-5)
    for options in ({"padding": "same"}, {"padding_mode": "reflect", "padding": 1}):
        with pytest.raises(
            ValueError, match="NormActConv2d: expected padding_mode 'zeros' and padding in numbers"
        ):
            memkit.nn.NormActConv2d(nn.BatchNorm2d(6), 6, 3, 3, **options)


def test_unknown_activations_are_refused_at_once() -> None:
    makes: dict[str, Callable[[], nn.Module]] = {
        "activation: expected one of gelu": lambda: memkit.nn.MLP(4, act="swish"),
        "gated: expected act 'silu'": lambda: memkit.nn.GatedMLP(4, 8, act="swish"),
        "activation: expected one of gelu, silu": lambda: memkit.nn.ActLinear(4, 4, act="swish"),
    }
    for text, make in makes.items():
        with pytest.raises(ValueError, match=text):
            make()
    with torch.device("meta"):
        assert memkit.nn.MLP(4, act="relu").fc1.weight.is_meta

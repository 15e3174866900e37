"""Swapped models under torch.compile."""

import copy

import pytest
import torch
from swap_cases import (
    DOUBLE,
    Block,
    D,
    batch,
    mlp,
    plain,
    step,
)
from torch import nn

from memkit import swap
from memkit.memory import measure

pytestmark = pytest.mark.usefixtures("repeatable")


@pytest.mark.parametrize("by_sample", [False, True])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compile_fullgraph(backend, by_sample):
    torch._dynamo.reset()
    model = nn.Sequential(
        mlp(nn.GELU()),
        Block(lambda self, x: self.second(self.act(self.first(x)).mul_(2)), nn.SiLU()),
        Block(plain, nn.SiLU(inplace=True)),
        nn.TransformerEncoderLayer(D, 2, D, 0.0, batch_first=True, **DOUBLE),
    )
    x = batch(2, 3, D)
    swap(model, sample=x if by_sample else None)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    eager = step(model, x)
    for ours, theirs in zip(step(compiled, x), eager, strict=True):
        torch.testing.assert_close(ours, theirs)
    with pytest.raises(ValueError, match="not compiled yet, got a compiled one; swap first, then compile"):
        swap(compiled)
    model.compile(backend=backend)
    with pytest.raises(ValueError, match="not compiled yet"):
        swap(model)


def test_compiled_inference_sees_stock_operators():
    torch._dynamo.reset()
    model = mlp(nn.GELU())
    swap(model)
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.code))
        return graph.forward

    with torch.no_grad():
        torch.compile(model, backend=backend, fullgraph=True)(batch())
    torch.compile(model, backend=backend, fullgraph=True)(batch())
    assert "memkit" not in graphs[0]
    assert "memkit" in graphs[1]


@pytest.mark.parametrize("lean", [False, True, "call"])
@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(D), lambda: nn.RMSNorm(D), lambda: nn.GroupNorm(1, D)])
def test_compiled_norms_are_stock_operators(make, lean):
    """A compiler makes their results again in backward, which it cannot of memkit's."""
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(D, D), make(), nn.Linear(D, D)), torch.randn(3, D)
    norm = type(model[1])
    swap(model, sample=x, lean=lean)
    graphs = []

    def backend(graph, _):
        graphs.append(str(graph.code))
        return graph.forward

    torch.compile(model, backend=backend, fullgraph=True)(x)
    assert (type(model[1]) is not norm) == (norm is not nn.GroupNorm or bool(lean))
    assert "norm(" in graphs[0]
    assert "memkit" not in graphs[0]


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


class Gate(nn.Module):
    def forward(self, x):
        return x * x.mean((2, 3), keepdim=True).sigmoid()


@pytest.mark.slow
@pytest.mark.parametrize("by_sample", [True, False])
@pytest.mark.parametrize("lean", [False, True, "call"])
@pytest.mark.parametrize("kind", ["norm, act", "act, norm", "residual", "images", "timm's", "tanh", "pool"])
def test_compiled_by_inductor_keeps_no_more_than_stock(kind, lean, by_sample):
    torch.manual_seed(0)
    x = torch.randn(8, 16, 16, 16) if kind in ("images", "timm's", "pool") else torch.randn(256, 64)
    blocks = []
    for _ in range(3):
        if kind == "images":
            blocks += [nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 16, 3, padding=1)]
        elif kind == "timm's":
            norm = pytest.importorskip("timm.layers").BatchNormAct2d(16, act_layer=nn.SiLU)
            blocks += [nn.Conv2d(16, 16, 3, padding=1), norm, Gate()]
        elif kind == "pool":
            blocks += [nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.AvgPool2d(2)]
        elif kind == "tanh":
            blocks += [nn.Linear(64, 64), nn.Tanh()]
        elif kind == "residual":
            blocks.append(Residual(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)))
        else:
            pair = [nn.LayerNorm(64), nn.SiLU()]
            blocks += [nn.Linear(64, 64), *(pair if kind == "norm, act" else pair[::-1])]
    stock = nn.Sequential(*blocks, nn.Conv2d(16, 1, 1) if x.dim() == 4 else nn.Linear(64, 1))
    ours = copy.deepcopy(stock)
    swap(ours, sample=x if by_sample else None, lean=lean)

    def step(model):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True)
        compiled(x).sum().backward()
        measured = measure(lambda: compiled(x).sum().backward(), device="cpu")
        return measured.saved, measured.peak

    mine, theirs = step(ours), step(stock)
    assert mine[0] <= theirs[0]
    assert mine[1] <= 1.01 * theirs[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gated", "images"])
def test_compiled_inference_is_stocks(kind):
    torch.manual_seed(0)
    if kind == "images":
        layers = [
            nn.Conv2d(3, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.Conv2d(16, 16, 3),
            nn.BatchNorm2d(16),
        ]
        stock, x = nn.Sequential(*layers, nn.SiLU()).eval(), torch.randn(4, 3, 32, 32)
    else:
        config = pytest.importorskip("transformers").LlamaConfig(hidden_size=64, intermediate_size=256)
        from transformers.models.llama.modeling_llama import LlamaMLP

        stock, x = LlamaMLP(config), torch.randn(512, 64)
    ours = copy.deepcopy(stock)
    swap(ours, sample=x)
    assert {type(m) for m in ours.modules()} != {type(m) for m in stock.modules()}

    def run(model):
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True)
        with torch.no_grad():
            compiled(x)
            measured = measure(lambda: compiled(x), device="cpu")
        return measured.peak, measured.result

    (peak, result), (most, expected) = run(ours), run(stock)
    assert peak <= most
    assert torch.equal(result, expected)

"""`lean()` and the norms: what they made is dropped and made again, to the bit, from what they keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

import memkit
import memkit.functional as M
from memkit.memory import measure

WIDTH = 48


class Block(nn.Module):
    """A norm between what made its input and a layer that keeps its result."""

    def __init__(self, kind: str, **how: object) -> None:
        super().__init__()
        self.kind, self.how = kind, how
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv2d(WIDTH, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.kind == "layer_norm":
            return self.last(M.layer_norm(h, (WIDTH,), self.weight, self.bias, **self.how))
        if self.kind == "rms_norm":
            return self.last(M.rms_norm(h, (WIDTH,), self.weight, **self.how))
        if self.kind == "add_layer_norm":
            normed, total = M.add_layer_norm(h, x * 2, (WIDTH,), self.weight, self.bias, **self.how)
            return self.last(normed) + total
        if self.kind == "add_rms_norm":
            normed, total = M.add_rms_norm(h, x * 2, (WIDTH,), self.weight, **self.how)
            return self.last(normed) + total
        image = h.view(2, -1, 3, WIDTH).permute(0, 3, 1, 2)
        if self.kind == "group_norm":
            return self.conv(M.group_norm(image, 6, self.weight, self.bias))
        image = image if self.kind == "channels_last" else image.contiguous()
        return self.conv(M.batch_norm_act(image, None, None, self.weight, self.bias, True, act="silu"))


ROWS = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
KINDS = (*ROWS, "group_norm", "batch_norm", "channels_last")


def results(model: nn.Module, run: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The output and every gradient."""
    torch.manual_seed(2)
    x = torch.randn(24, WIDTH, requires_grad=True)
    out = run(x)
    model.zero_grad()
    out.square().sum().backward()
    return [out.detach(), *(t.grad for t in (x, *model.parameters()) if t.grad is not None)]


def assert_equal(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def lean(run: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        with memkit.lean():
            return run(x)

    return call


def block(kind: str) -> Block:
    torch.manual_seed(0)
    return Block(kind, **({"save": "input"} if kind in ROWS else {}))


@pytest.mark.parametrize("kind", KINDS)
def test_exact_and_one_tensor_less(kind: str) -> None:
    model = block(kind)
    assert_equal(results(model, lean(model)), results(model, model))
    x = torch.randn(24, WIDTH, requires_grad=True)
    assert measure(lambda: model(x)).saved - measure(lambda: lean(model)(x)).saved == x.numel() * 4
    outs = [measure(lambda f=f: f(x)).result for f in (model, lean(model))]
    assert torch.equal(*outs)


@pytest.mark.parametrize("kind", KINDS)
def test_with_other_hooks(kind: str) -> None:
    model = block(kind)
    want = results(model, model)

    def offloaded(x: Tensor) -> Tensor:
        with save_on_cpu():
            return lean(model)(x)

    def inside(x: Tensor) -> Tensor:
        with memkit.lean(), save_on_cpu():
            return model(x)

    for run in (
        lean(lean(model)),
        offloaded,
        inside,
        lambda x: checkpoint(lean(model), x, use_reentrant=False),
        lambda x: lean(lambda x: checkpoint(model, x, use_reentrant=False))(x),
        lambda x: checkpoint(lean(model), x, use_reentrant=True),
    ):
        assert_equal(results(model, run), want)


@pytest.mark.parametrize("early_stop", [True, False])
def test_checkpointed_blocks_that_take_what_is_rebuilt(early_stop: bool) -> None:
    """A rebuild runs a block again, whose own input is rebuilt meanwhile: what the block then hands out is not a rebuild."""
    norms = nn.ModuleList(memkit.nn.LayerNorm(WIDTH, save="input") for _ in range(4))
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
    model = nn.ModuleList([norms, layers])

    def run(x: Tensor, checkpointed: bool = False) -> Tensor:
        h = norms[0](x * 3)
        for norm, layer in zip(norms[1:], layers, strict=True):

            def block(h: Tensor, norm: nn.Module = norm, layer: nn.Module = layer) -> Tensor:
                return norm(h + layer(h))

            h = checkpoint(block, h, use_reentrant=False, early_stop=early_stop) if checkpointed else block(h)
        return h

    assert_equal(results(model, lean(lambda x: run(x, checkpointed=True))), results(model, run))


def test_chains() -> None:
    """What a rebuild starts from may itself be rebuilt; a norm's result that goes through views is."""
    weight, down = torch.randn(WIDTH, requires_grad=True), nn.Linear(WIDTH // 2, 3)

    def run(x: Tensor) -> Tensor:
        h = M.rms_norm(M.gelu(x * 3), (WIDTH,), weight, save="input")
        return down(M.silu(h)[..., ::2]) + down(h[..., 1::2])

    assert_equal(results(down, lean(run)), results(down, run))
    with memkit.lean():
        out = run(torch.randn(4, WIDTH))
    first = torch.autograd.grad(out.sum(), weight, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(out.sum(), weight)[0], first)


def test_from_the_output_nothing_is_rebuilt() -> None:
    x = torch.randn(24, WIDTH, requires_grad=True)
    for inplace in (False, True):
        model = Block("rms_norm", save="output", inplace=inplace)
        want = results(model, model)
        assert_equal(results(model, lean(model)), want)
        saved = [measure(lambda f=f: f(x)).saved for f in (model, lean(model))]
        assert saved[0] == saved[1] == x.numel() * 4 + 24 * 4


def test_the_sum_is_kept_and_a_changed_result_too() -> None:
    x = torch.randn(24, WIDTH, requires_grad=True)
    weight = torch.randn(WIDTH, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        normed, total = M.add_rms_norm(x * 2, x, (WIDTH,), weight, save="input")
        with torch.no_grad():
            normed.add_(1)
        return normed * weight + total.sin()

    want = torch.autograd.grad(run(x).sum(), [x, weight])
    got = torch.autograd.grad(lean(run)(x).sum(), [x, weight])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with memkit.lean():
        h = x * 2
        out = M.rms_norm(h, (WIDTH,), weight, save="input") * weight
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hooks_that_change_the_order_of_memory() -> None:
    """save_on_cpu hands back contiguous tensors: what is rebuilt from them has to lie as it did."""
    down = nn.Linear(5, 3)
    x = torch.randn(5, 6, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        return down(M.gelu((x * 1).t()))

    def offloaded(x: Tensor) -> Tensor:
        with save_on_cpu():
            return lean(run)(x)

    want = torch.autograd.grad(run(x).square().sum(), [x, down.weight])
    for got, truth in zip(
        torch.autograd.grad(offloaded(x).square().sum(), [x, down.weight]), want, strict=True
    ):
        torch.testing.assert_close(got, truth)


def test_under_autocast_and_lets_go() -> None:
    model = block("layer_norm")
    x = torch.randn(24, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        plain, dropped = (
            torch.autograd.grad(f(x).float().square().sum(), [model.weight, model.last.weight])
            for f in (model, lean(model))
        )
    assert all(torch.equal(a, b) for a, b in zip(plain, dropped, strict=True))
    lean(model)(x)
    assert measure(lambda: (lean(model)(x), None)[1]).live == 0

"""memkit's operators on DTensors: values and gradients of the unsharded call, in the placements that the rules promise.

The ranks are threads of one process.
"""

import copy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from sharding_cases import (
    CASES,
    TABLE,
    X,
    check,
    distributed,
    flat,
    full,
    numbers,
    objective,
    on_ranks,
    placements,
    target,
    tensors_of,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import memkit
import memkit.functional as F
from memkit import nn as mnn

RANKS = 3
"""Dimensions of 5 and 4 then have parts of 2, 2, 1 and 2, 2, 0."""


@pytest.mark.parametrize("name", CASES)
def test_placements(name):
    function, shapes, cases = CASES[name]

    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        for row in cases:
            check(function, tensors_of(shapes), row, mesh)

    on_ranks(rank)


def test_in_place_keeps_the_placements():
    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        x = numbers(*X)
        for text, op in (
            ("S2", lambda y: F.softmax(y, -1, inplace=True)),
            ("S0", lambda y: F.gelu(y, inplace=True)),
            ("S2", lambda y: F.rms_norm(y, [6], inplace=True)),
            ("S1", lambda y: F.act_dropout(y, "relu", 0.0, inplace=True)),
            ("S1", lambda y: F.apply_rotary(y[None], None, TABLE, TABLE, inplace=True)),
        ):
            y = distributed(x, mesh, text)
            held = y.to_local()
            op(y)
            expected = x.clone()
            op(expected)
            assert y.placements == placements(text)
            assert y.to_local().data_ptr() == held.data_ptr()
            torch.testing.assert_close(y.full_tensor(), expected)

    on_ranks(rank)


def draws(text, op, shape=(64, 12)):
    """What every rank holds of op's result on ones, each rank with a generator of its own."""
    found = {}

    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        x = distributed(torch.ones(shape, requires_grad=True), mesh, text)
        out = op(x, torch.Generator().manual_seed(7 + dist.get_rank()))
        out.backward(out.detach())
        assert torch.equal(x.grad.to_local() != 0, out.to_local() > 0)  # backward draws the same mask
        found[dist.get_rank()] = out.to_local().detach()

    on_ranks(rank)
    return [found[i] for i in range(RANKS)]


@pytest.mark.parametrize("op", [F.dropout, F.alpha_dropout, F.dropout1d])
def test_replicas_drop_alike(op):
    found = draws("R", lambda x, generator: op(x, 0.5, True, generator=generator))
    alone = op(torch.ones(64, 12), 0.5, True, generator=torch.Generator().manual_seed(7))
    for each in found:
        torch.testing.assert_close(each, alone, rtol=0, atol=0)


def test_sums_drop_alike():
    found = draws("P", lambda x, generator: F.dropout(x, 0.5, generator=generator))
    assert all(torch.equal(each != 0, found[0] != 0) for each in found)
    assert 0.4 < (found[0] == 0).double().mean() < 0.6


@pytest.mark.parametrize("same", [True, False], ids=["one generator", "generators"])
def test_parts_drop_apart(same):
    def op(x, generator):
        generator = generator.manual_seed(1) if same else generator
        return F.act_dropout(x, "relu", 0.5, generator=generator)

    found = draws("S0", op, (66, 12))
    assert all(each.shape == (22, 12) for each in found)
    for i, each in enumerate(found):
        assert 0.3 < (each == 0).double().mean() < 0.7
        for other in found[:i]:
            assert 0.3 < ((each == 0) == (other == 0)).double().mean() < 0.7


def test_dropout_in_front_of_sharded_layers():
    """A replicated input has one mask whatever its layer's part is; a sharded one a mask for each part."""

    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        generator = torch.Generator().manual_seed(7 + dist.get_rank())
        x, w = numbers(64, 6).abs() + 1, torch.eye(6, dtype=torch.float64)
        alone = F.dropout_linear(x, w, generator=torch.Generator().manual_seed(7))
        columns = F.dropout_linear(distributed(x, mesh, "R"), distributed(w, mesh, "S0"), generator=generator)
        assert columns.placements == (Shard(1),)
        torch.testing.assert_close(columns.full_tensor(), alone)
        rows = F.dropout_linear(distributed(x, mesh, "S1"), distributed(w, mesh, "S1"), generator=generator)
        assert rows.placements == (Partial(),)
        kept = rows.full_tensor()
        torch.testing.assert_close(kept[kept != 0], 2 * x[kept != 0])
        assert 0.3 < (kept == 0).double().mean() < 0.7

    on_ranks(rank)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_losses_of_two_bytes_do_not_overflow(dtype):
    """A mean is no sum that is divided later: 16,384 rows of a loss of 8 are more than float16 holds."""

    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        x = torch.zeros(16384, 2, dtype=dtype)
        x[:, 0] = 8
        t = torch.ones(16384, dtype=torch.int64)
        sharded = distributed(x.requires_grad_(), mesh, "S0")
        loss = F.cross_entropy(sharded, t)
        alone = F.cross_entropy(x, t)
        assert (loss.dtype, loss.placements) == (dtype, (Replicate(),))
        (loss * 16384).backward()
        (alone * 16384).backward()
        torch.testing.assert_close(loss.full_tensor(), alone, rtol=0, atol=0)
        torch.testing.assert_close(sharded.grad.full_tensor(), x.grad, rtol=0, atol=0)

    on_ranks(rank)


def test_autocast():
    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        tensors = [x.detach().float().requires_grad_() for x in tensors_of([(6, 4, 6), (6,), (6,), (8, 6)])]

        def function(x, w, b, v):
            with torch.autocast("cpu", torch.bfloat16):
                h = F.bias_act(F.layer_norm(x, [6], w), b, "silu")
                out = F.norm_linear(x, v, norm_weight=w)
                return (
                    h,
                    out,
                    F.cross_entropy(out.flatten(0, 1), target(24)),
                    F.linear_cross_entropy(x, v, target(6, 4)),
                )

        for row in ("S0 R R R -> S0 S0 P P", "R R R R -> R R R R"):
            check(function, tensors, row, mesh, rtol=2e-2, atol=2e-2)

    on_ranks(rank)


def test_refusals():
    def rank():
        mesh, other = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (1, RANKS))
        x, w = numbers(*X), numbers(6)
        sharded = distributed(x, mesh, "S0")
        with pytest.raises(TypeError, match=r"norm: expected DTensors together, got a plain Tensor of \[6\]"):
            F.rms_norm(sharded, [6], w)
        with pytest.raises(TypeError, match="activation: expected DTensors together"):
            F.dropout_add(x, sharded, 0.0)
        with pytest.raises(ValueError, match="activation: expected DTensors of one mesh, got"):
            F.bias_act(sharded, distribute_tensor(w, other, [Replicate(), Replicate()]))
        with pytest.raises(ValueError, match="dropout: expected a probability p"):
            F.dropout(sharded, 1.5)
        with pytest.raises(ValueError, match="cross_entropy: expected reduction"):
            F.cross_entropy(sharded, target(5, 6, classes=4), reduction="total")

    on_ranks(rank)


def test_importing_memkit_leaves_dtensors_alone():
    """They take as long to import as torch does."""
    code = "import sys, memkit.swap; sys.exit('torch.distributed.tensor' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


MODULES = {
    "GELU": (mnn.GELU, X, "S2"),
    "SwiGLU": (mnn.SwiGLU, X, "S0"),
    "LayerNorm": (lambda: mnn.LayerNorm(6), X, "S1"),
    "RMSNorm": (lambda: mnn.RMSNorm(6), X, "S0"),
    "GroupNorm": (lambda: mnn.GroupNorm(2, 4), X, "S0"),
    "BatchNorm1d": (lambda: mnn.BatchNorm1d(4, act="relu"), X, "S1"),
    "Softmax": (lambda: mnn.Softmax(1), X, "S2"),
    "Dropout": (lambda: mnn.Dropout(0.0), X, "S2"),
    "ActLinear": (lambda: mnn.ActLinear(6, 8), X, "S1"),
    "NormLinear": (lambda: mnn.NormLinear(nn.LayerNorm(6), nn.Linear(6, 8), nn.Linear(6, 3)), X, "S1"),
    "MLP": (lambda: mnn.MLP(6), (6, 4, 6), "S0"),
    "GatedMLP": (lambda: mnn.GatedMLP(6), (6, 4, 6), "S0"),
    "RotaryEmbedding": (lambda: mnn.RotaryEmbedding(4, 4), (5, 4, 7, 6), "S2"),
    "NormActConv2d": (lambda: mnn.NormActConv2d(nn.BatchNorm2d(4), 4, 8, 3), (5, 4, 6, 7), "R"),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    make, shape, text = MODULES[name]

    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        module = copy.deepcopy(made)
        sharded = distribute_module(copy.deepcopy(module), mesh)
        x = numbers(*shape).requires_grad_()
        y = distributed(x, mesh, text)
        expected, found = flat(module(x)), flat(sharded(y))
        assert all(each.placements == placements(text) for each in found)
        objective(expected).backward()
        objective(found).backward()
        for ours, theirs in zip([*found, y.grad], [*expected, x.grad], strict=True):
            torch.testing.assert_close(full(ours), theirs)
        for (key, ours), theirs in zip(sharded.named_parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(full(ours.grad), theirs.grad, msg=f"gradient of {key}")
        for ours, theirs in zip(sharded.buffers(), module.buffers(), strict=True):
            torch.testing.assert_close(full(ours), theirs)

    torch.manual_seed(0)
    made = make().double()
    on_ranks(rank)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 32)
        self.act = nn.GELU()
        self.down = nn.Linear(32, 8)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


class Outside(nn.Module):
    """Makes DTensors of what it is given, and tensors of what comes back."""

    def __init__(self, inner, mesh):
        super().__init__()
        self.inner, self.mesh = inner, mesh

    def forward(self, x):
        shared = DTensor.from_local(x, self.mesh, [Replicate()])
        return self.inner(shared.redistribute(self.mesh, [Shard(1)])).full_tensor()


def parallel(network, mesh):
    """Sequence parallel norms; columns and rows of the layers around an activation."""
    plan = {
        "norm": SequenceParallel(use_local_output=False),
        "up": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
    }
    return Outside(parallelize_module(copy.deepcopy(network), mesh, plan), mesh)


@pytest.mark.parametrize("lean", [False, True], ids=["", "lean"])
def test_swapped_models(lean):
    """They keep less, and their gradients are the stock model's."""
    x = numbers(8, 6, 8)
    stock = Network().double()
    swapped = copy.deepcopy(stock)
    memkit.swap(swapped, sample=x, lean=lean)
    saved = {}

    def step(network, mesh, context):
        model = parallel(network, mesh)
        with context:
            loss = model(x).square().sum()
        loss.backward()
        return [loss.detach(), *(p.grad.full_tensor() for p in model.parameters())]

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        found = []
        for network in (stock, swapped):
            kept = {}

            def pack(t, kept=kept):
                storage = (t.to_local() if isinstance(t, DTensor) else t).untyped_storage()
                kept[storage.data_ptr()] = storage.nbytes()
                return t

            found.append(step(network, mesh, torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)))
            saved[network is swapped, dist.get_rank()] = sum(kept.values())
        if lean:
            found[1] = step(swapped, mesh, memkit.lean())
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs)

    on_ranks(rank, 2)
    hidden = 8 * 6 * 16 * 8
    for i in range(2):
        less = (
            hidden - hidden // 16 if not lean else 0
        )  # but for a bit an element; lean keeps inputs, elsewhere
        assert saved[False, i] - saved[True, i] >= less


def test_checkpoints_drop_alike():
    """Recomputation draws the seed again, and the first rank's counts again.

    The others draw from generators of their own: as threads, all ranks share the one that a checkpoint sets back.
    """

    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        x = distributed(torch.ones(8, 64, requires_grad=True), mesh, "R")
        first = dist.get_rank() == 0
        own = None if first else torch.Generator().manual_seed(dist.get_rank())
        y = checkpoint(
            lambda x: 2 * F.act_dropout(x, "relu", 0.5, generator=own),
            x,
            use_reentrant=False,
            preserve_rng_state=first,
        )
        y.sum().backward()
        assert torch.equal(x.grad.to_local() != 0, y.to_local() != 0)

    on_ranks(rank)


class LlamaMLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(8, 24, bias=False), nn.Linear(8, 24, bias=False)
        self.down_proj = nn.Linear(24, 8, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def test_twins_of_library_classes():
    """Columns and rows without a hook: gate and up are kept, and the product of a rank's rows is a summand."""
    x = numbers(6, 8)
    stock = LlamaMLP().double()
    swapped = copy.deepcopy(stock)
    memkit.swap(swapped)
    assert type(swapped) is not type(stock)
    stock(x).square().sum().backward()
    expected = [stock(x), *(p.grad for p in stock.parameters())]

    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        model = copy.deepcopy(swapped)
        for layer, dim in ((model.gate_proj, 0), (model.up_proj, 0), (model.down_proj, 1)):
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(dim)]))
        out = model(distribute_tensor(x, mesh, [Replicate()]))
        assert out.placements == (Partial(),)
        assert out.grad_fn.next_functions[0][0].name() == "memkit::glu_linear_backward"
        whole = out.full_tensor()
        whole.square().sum().backward()
        for ours, theirs in zip([whole, *(p.grad for p in model.parameters())], expected, strict=True):
            torch.testing.assert_close(full(ours), theirs)

    on_ranks(rank)

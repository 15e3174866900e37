"""Optimizers on DTensors: the steps of unsharded parameters. Ranks are threads."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from optim_sharding_cases import (
    RANKS,
    RULES,
    alike,
    distance,
    full,
    gradients,
    numbers_of,
    part,
    part_text,
    shard,
    train,
    values,
)
from sharding_cases import distributed, numbers, on_ranks, placements
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from memkit import optim

pytestmark = pytest.mark.usefixtures("repeatable")


@pytest.mark.parametrize(
    ("text", "rule", "dtype"),
    [
        *((text, "adamw", torch.float32) for text in ("S0", "S1", "R", "S0,S1", "S0,S0", "R,S0")),
        ("S0", "adamw", torch.float64),
        ("S1,S0", "sgd", torch.float32),
        ("S0", "sgd-momentum", torch.float32),
    ],
)
def test_equals_unsharded(text, rule, dtype):
    """The bits of unsharded parameters; as near to PyTorch's optimizer on DTensors as those are; state as PyTorch's."""
    ours, theirs, options = RULES[rule]
    plain = [nn.Parameter(x) for x in values(dtype)]
    train(ours(plain, lr=1e-2, **options), plain)
    shape = (RANKS,) if "," not in text else (2, 2)

    def rank():
        mesh = init_device_mesh("cpu", shape)
        a, b = ([nn.Parameter(shard(x, mesh, text)) for x in values(dtype)] for _ in range(2))
        mine, stock = ours(a, lr=1e-2, **options), theirs(b, lr=1e-2, foreach=False, **options)
        train(mine, a, to=alike)
        train(stock, b, to=alike)
        for x, y, z in zip(a, b, plain, strict=True):
            assert distance(part(x), part(y), z) <= 16
            assert torch.equal(part(x), part(shard(z.detach(), mesh, text)))
            assert x.placements == placements(part_text(text, x))
            for name, theirs_ in stock.state[y].items():
                kept = mine.state[x][name]
                if name != "step" and theirs_ is not None:
                    assert (kept.shape, kept.stride(), kept.dtype) == (z.shape, z.stride(), dtype)
                    assert kept.placements == x.placements
                    assert distance(part(kept), part(theirs_), z.grad) <= 16

    on_ranks(rank, math.prod(shape))


@pytest.mark.parametrize("state_dtype", [None, "8bit"])
def test_fsdp_over_tensor_parallel(state_dtype):
    """Rows that two dimensions of a mesh share, in the order in which FSDP cuts them."""
    x, grads = numbers(256, 100).float(), [numbers(256, 100, seed=1 + i).float() for i in range(3)]

    def rank():
        mesh = init_device_mesh("cpu", (2, 2))
        kind = (_StridedShard(0, split_factor=2), Shard(0))

        def cut(x):
            first, second = mesh.get_coordinate()
            rows = x.chunk(2)[second].chunk(2)[first].clone()
            return DTensor.from_local(rows, mesh, kind, run_check=False, shape=x.shape, stride=x.stride())

        p, q = nn.Parameter(cut(x)), nn.Parameter(part(cut(x)))
        sharded, alone = (optim.AdamW([each], lr=1e-2, state_dtype=state_dtype) for each in (p, q))
        for g in grads:
            p.grad, q.grad = cut(g), part(cut(g))
            sharded.step()
            alone.step()
        assert torch.equal(part(p), q)
        state = sharded.state[p]
        assert state["exp_avg"].placements == kind
        if state_dtype:
            assert state["exp_avg_scale"].shape == (4, 1, 25)
        plain = nn.Parameter(x)
        unsharded = optim.AdamW([plain])
        unsharded.load_state_dict(sharded.state_dict())
        expected = numbers_of(state, "exp_avg") if state_dtype else full(state["exp_avg"])
        assert torch.equal(unsharded.state[plain]["exp_avg"], expected)
        exact = sum(0.1 * 0.9 ** (2 - i) * g for i, g in enumerate(grads))
        assert (expected - exact).norm() < 0.03 * exact.norm()

    on_ranks(rank, 4)


def test_gradients_in_other_placements():
    """Shares are added up, what is sharded otherwise is sharded anew; the gradient then is the parameter's kind."""
    plain = [nn.Parameter(x) for x in values()]
    train(optim.AdamW(plain, lr=1e-2), plain)

    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        for text, other in (("R", "P"), ("S0", "P"), ("S0", "R"), ("S0", "S1")):
            params = [nn.Parameter(shard(x, mesh, text)) for x in values()]

            def to(g, p, other=other):
                given = part_text(other, g) if other != "P" else other
                return distributed(g, mesh, given)

            train(optim.AdamW(params, lr=1e-2), params, to=to)
            for x, y in zip(params, plain, strict=True):
                torch.testing.assert_close(full(x), y.detach(), rtol=1e-5, atol=1e-6)
                assert x.grad.placements == x.placements

    on_ranks(rank)


def test_one_group_of_all_kinds():
    plain = [nn.Parameter(x) for x in values()]
    train(optim.SGD(plain, lr=0.1, momentum=0.9), plain)

    def rank():
        mesh, other = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (1, RANKS))
        kinds = [(mesh, "S0"), (other, "R,S0"), (None, ""), (mesh, "R"), (mesh, "S2")]
        params = [
            nn.Parameter(x.clone() if kind[0] is None else shard(x, *kind))
            for x, kind in zip(values(), kinds + kinds, strict=False)
        ]
        train(
            optim.SGD(params, lr=0.1, momentum=0.9),
            params,
            to=lambda g, p: alike(g, p) if isinstance(p, DTensor) else g,
        )
        for x, y in zip(params, plain, strict=True):
            assert torch.equal(full(x), y.detach())

    on_ranks(rank)


def test_missing_gradients():
    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        params = [nn.Parameter(shard(x, mesh, "S0")) for x in values()]
        optimizer = optim.AdamW(params)
        train(optimizer, params, 1, to=alike)
        before = [full(p).clone() for p in params]
        optimizer.zero_grad()
        optimizer.step()
        params[3].grad = alike(gradients(1)[3], params[3])
        optimizer.step()
        changed = [not torch.equal(full(p), b) for p, b in zip(params, before, strict=True)]
        assert [i for i, each in enumerate(changed) if each] == [3]
        assert [optimizer.state[p]["step"].item() for p in params[2:4]] == [1, 2]

    on_ranks(rank)


def test_refusals():
    def rank():
        mesh, other = init_device_mesh("cpu", (RANKS,)), init_device_mesh("cpu", (1, RANKS))
        a, b = (nn.Parameter(shard(torch.ones(6, 4), mesh, "S0")) for _ in range(2))
        optimizer = optim.AdamW([a, b])
        a.grad = alike(torch.ones(6, 4), a)
        b.grad = torch.ones(6, 4)
        with pytest.raises(
            RuntimeError, match="AdamW: expected a DTensor as gradient of a DTensor, got a plain"
        ):
            optimizer.step()
        b.grad = shard(torch.ones(6, 4), other, "R,S0")
        with pytest.raises(RuntimeError, match="AdamW: expected a gradient on its parameter's mesh"):
            optimizer.step()
        b.grad = DTensor.from_local(
            torch.ones(5, 4), mesh, b.placements, run_check=False, shape=b.shape, stride=b.stride()
        )
        plain = nn.Parameter(torch.ones(3))
        plain.grad = torch.ones(3)
        optimizer.add_param_group({"params": [plain]})
        with pytest.raises(RuntimeError, match=r"AdamW: expected a gradient like its parameter, here .* got"):
            optimizer.step()
        c = nn.Parameter(shard(torch.ones(6, 4, dtype=torch.float64), mesh, "S0"))
        if hasattr(c, "grad_dtype"):  # else torch takes no gradient of another dtype
            c.grad_dtype = None
            c.grad, b.grad = alike(torch.ones(6, 4), c), None
            optimizer.add_param_group({"params": [c]})
            with pytest.raises(
                RuntimeError, match=r"here torch.float64 \[2, 4\], got torch.float32 \[2, 4\]"
            ):
                optimizer.step()
        assert all((full(each) == 1).all() for each in (a, b, c, plain))
        summed = DTensor.from_local(torch.ones(4), mesh, [Partial()])
        with pytest.raises(
            TypeError, match="SGD: expected parameters that are sharded or replicated, got one"
        ):
            optim.SGD([nn.Parameter(summed)])

    on_ranks(rank)


def test_versions_tell_autograd():
    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        p = nn.Parameter(shard(torch.ones(6), mesh, "S0"))
        loss = (p * p).sum()
        p.grad = alike(torch.ones(6), p)
        optim.SGD([p]).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    on_ranks(rank)


# -- rounding


def test_replicas_round_alike_and_parts_apart():
    """Whatever the generators say, whose draws the ranks do not share here."""

    def rank():
        mesh = init_device_mesh("cpu", (2, 2))
        p = nn.Parameter(shard(torch.ones(1 << 15, 2, dtype=torch.bfloat16), mesh, "R,S0"))
        p.grad = alike(torch.full(p.shape, -(2.0**-10), dtype=torch.bfloat16), p)
        optim.SGD([p], lr=1.0).step()
        found = [torch.empty_like(part(p)) for _ in range(4)]
        dist.all_gather(found, part(p).contiguous())
        assert torch.equal(found[0], found[2])
        assert torch.equal(found[1], found[3])
        first, second = (each == 1 for each in found[:2])
        assert abs(first.float().mean().item() - 0.875) < 5 * math.sqrt(0.875 * 0.125 / 2**15)
        both = (first == second).float().mean().item()
        assert abs(both - (0.875**2 + 0.125**2)) < 0.02

    on_ranks(rank, 4)


# -- what optimizers of PyTorch do


def test_grad_scaler():
    """An infinite gradient on one rank skips the step on all."""

    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        a, b = ([nn.Parameter(shard(x, mesh, "S0")) for x in values()] for _ in range(2))
        scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
        ours, theirs = optim.AdamW(a, lr=1e-2), torch.optim.AdamW(b, lr=1e-2, foreach=False)
        for step in range(4):
            for params, optimizer, scaler in ((a, ours, scalers[0]), (b, theirs, scalers[1])):
                scale = scaler.scale(torch.ones(())).item()
                for p, g in zip(params, gradients(step), strict=True):
                    if step == 2 and g.shape == (100, 70):
                        g[99, 3] = math.inf  # the last rank's
                    p.grad = alike(g * scale, p)
                scaler.step(optimizer)
                scaler.update()
        for x, y in zip(a, b, strict=True):
            assert distance(full(x), full(y), full(y)) <= 16
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert ours.state[a[0]]["step"] == 3

    on_ranks(rank)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8))


@pytest.mark.parametrize("clip", [{}, {"max_norm": 0.5}, {"clip_value": 0.1, "max_norm": 0.2}])
def test_step_in_backward(clip):
    """Tensor parallel; norms are those of whole gradients, and shares are added up before they are measured."""
    stock = network()
    optimizer = optim.SGD(stock.parameters(), lr=1e-2)
    optim.step_in_backward(optimizer, **clip)
    for seed in range(3):
        stock(numbers(6, 8, seed=seed).float()).square().sum().backward()

    def rank():
        mesh = init_device_mesh("cpu", (2,))
        for plan in ({"0": ColwiseParallel(), "2": RowwiseParallel()}, {}):
            model = parallelize_module(copy.deepcopy(made), mesh, plan)
            if not plan:  # replicas whose gradients are shares
                for module in (model[0], model[2]):
                    for name, p in list(module.named_parameters()):
                        setattr(module, name, nn.Parameter(shard(p.detach(), mesh, "R")))
            early = optim.SGD(model.parameters(), lr=1e-2)
            optim.step_in_backward(early, **clip)
            for seed in range(3):
                x = numbers(6, 8, seed=seed).float()
                x = x if plan else shard(x, mesh, "S0")
                model(x).square().sum().backward()
                assert all(p.grad is None for p in model.parameters())
            for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True):
                torch.testing.assert_close(full(ours), theirs.detach(), rtol=1e-4, atol=1e-5)

    made = network()
    on_ranks(rank, 2)


def test_clipping_by_the_norm_of_all():
    """torch's own, which counts every rank's parts, before the step."""

    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        a, b = [nn.Parameter(x) for x in values()], [nn.Parameter(shard(x, mesh, "S0")) for x in values()]
        ours, theirs = optim.SGD(b, lr=0.1), optim.SGD(a, lr=0.1)
        for x, y, g in zip(a, b, gradients(0), strict=True):
            x.grad, y.grad = g, alike(g.clone(), y)
        norms = [nn.utils.clip_grad_norm_(params, 0.5) for params in (a, b)]
        torch.testing.assert_close(full(norms[1]), norms[0])
        ours.step()
        theirs.step()
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(full(y), x.detach())

    on_ranks(rank)

"""What optimizers keep of DTensors: 8 bits along the parts, from any parts to any others; state dicts."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from optim_sharding_cases import (
    RANKS,
    RULES,
    alike,
    full,
    numbers_of,
    part,
    shard,
    train,
    values,
)
from sharding_cases import numbers, on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import memkit
from memkit import optim
from memkit.optim._sharded import local, scale_shape

pytestmark = pytest.mark.usefixtures("repeatable")

# -- 8 bits


@pytest.mark.parametrize(("shape", "text"), [((192, 70), "S0"), ((48, 512), "S0"), ((70, 192), "S1")])
def test_8_bits_are_those_of_the_part(shape, text):
    """Blocks along what a rank holds: bit for bit what it would keep for a parameter of its own, in as many bytes."""
    x = numbers(*shape).float()

    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        p = nn.Parameter(shard(x, mesh, text))
        q = nn.Parameter(local(p.detach()).clone())
        sharded, alone = (optim.AdamW([each], lr=1e-2, state_dtype="8bit") for each in (p, q))
        for seed in range(3):
            p.grad = shard(numbers(*shape, seed=seed).float(), mesh, text)
            q.grad = p.grad.to_local().clone()
            sharded.step()
            alone.step()
        assert torch.equal(local(p.detach()), q)
        sizes = []
        for state in (sharded.state[p], alone.state[q]):
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(local(sharded.state[p][name]), alone.state[q][name])
                scale = local(sharded.state[p][name + "_scale"]).flatten()
                assert torch.equal(scale, alone.state[q][name + "_scale"])
            storages = {
                s.data_ptr(): s.nbytes() for s in (local(each).untyped_storage() for each in state.values())
            }
            sizes.append(sum(storages.values()))
        assert sizes[0] <= sizes[1]  # which is of whole buffers
        assert sizes[0] <= 0.26 * 2 * 4 * q.numel() + 256

    on_ranks(rank)


@pytest.mark.parametrize("shape", [(100, 70), (50, 512), (5000,)])
@pytest.mark.parametrize("target", ["S0", "S1", "R", "plain"])
@pytest.mark.parametrize("source", ["S0", "S1", "R", "plain"])
def test_8_bits_from_other_placements(source, target, shape):
    """Read by the parts that they were made of, cut anew into blocks of other parts."""
    x, g = numbers(*shape).float(), numbers(*shape, seed=1).float()

    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))

        def made(text, block):
            p = nn.Parameter(x.clone() if text == "plain" else shard(x, mesh, text))
            return p, optim.AdamW([p], state_dtype="8bit", block_size=block)

        p, first = made(source, 256)
        p.grad = g if source == "plain" else alike(g, p)
        first.step()
        for block in (256, 64):
            q, second = made(target, block)
            second.load_state_dict(first.state_dict())
            mine, loaded = second.state[q], first.state[p]
            assert mine["step"] == 1
            for name, exact in (("exp_avg", 0.1 * g), ("exp_avg_sq", 0.001 * g * g)):
                assert mine[name].dtype == loaded[name].dtype
                assert tuple(mine[name + "_scale"].shape) == scale_shape(q, block)
                kept = numbers_of(loaded, name)
                assert (kept - exact).norm() < 0.02 * exact.norm()
                again = numbers_of(mine, name)
                if source == target and block == 256:
                    assert torch.equal(again, kept)
                assert (again - exact).norm() < 0.03 * exact.norm()
            _, exact = made(target, 256)
            exact.param_groups[0]["state_dtype"] = None
            exact.load_state_dict(first.state_dict())
            (entry,) = exact.state.values()
            torch.testing.assert_close(full(entry["exp_avg"]), numbers_of(loaded, "exp_avg"))

    on_ranks(rank)


def test_rows_keep_their_scales_on_any_number_of_ranks():
    """Where rows are whole blocks, codes and scales of the rows are those of the unsharded parameter."""
    x, g = numbers(48, 512).float(), numbers(48, 512, seed=1).float()
    plain = nn.Parameter(x.clone())
    alone = optim.AdamW([plain], state_dtype="8bit")
    plain.grad = g
    alone.step()

    def rank():
        for shape, text in (((RANKS,), "S0"), ((RANKS,), "R"), ((1, RANKS), "S0,S0")):
            mesh = init_device_mesh("cpu", shape)
            p = nn.Parameter(shard(x, mesh, text))
            optimizer = optim.AdamW([p], state_dtype="8bit")
            p.grad = alike(g, p)
            optimizer.step()
            state = optimizer.state[p]
            for name in ("exp_avg", "exp_avg_sq"):
                assert state[name + "_scale"].shape == (48, 1, 2)
                assert state[name + "_scale"].placements == p.placements
                assert torch.equal(full(state[name]), alone.state[plain][name])
                assert torch.equal(
                    full(state[name + "_scale"]).flatten(), alone.state[plain][name + "_scale"]
                )

    on_ranks(rank)


def test_8_bits_of_nothing():
    """A rank without a row steps, saves and loads as the others do."""

    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        x, g = numbers(2, 5000).float(), numbers(2, 5000, seed=1).float()
        for rule in (optim.AdamW, optim.SGD):
            options = {"lr": 0.1, "state_dtype": "8bit", **({"momentum": 0.9} if rule is optim.SGD else {})}
            p = nn.Parameter(shard(x, mesh, "S0"))
            optimizer = rule([p], **options)
            again = rule([p], **options)
            for seen in (1, 2):
                p.grad = alike(g, p)
                optimizer.step()
                assert optimizer.state[p]["step"] == seen
            again.load_state_dict(optimizer.state_dict())
            for name, kept in optimizer.state[p].items():
                assert torch.equal(full(again.state[p][name]), full(kept))
            again.step()
            alone = nn.Parameter(x.clone())
            plain = rule([alone], **{**options, "state_dtype": None})
            for _ in range(3):
                alone.grad = g
                plain.step()
            torch.testing.assert_close(full(p), alone.detach(), rtol=0.02, atol=0.02)

    on_ranks(rank)


def test_kept_in_float32():
    """A dimension that is split twice and unevenly: its parts would not follow from the scales' shape."""

    def rank():
        mesh = init_device_mesh("cpu", (2, 2))
        for text, shape, dtype in (
            ("S0,S0", (101, 70), torch.float32),
            ("S0,S0", (100, 70), torch.int8),
            ("S0,S0", (101, 256), torch.int8),
            ("S0,R", (101, 70), torch.int8),
            ("S0", (40, 70), torch.float32),
        ):
            here = mesh if "," in text else init_device_mesh("cpu", (4,))
            p = nn.Parameter(shard(numbers(*shape).float(), here, text))
            optimizer = optim.AdamW([p], state_dtype="8bit")
            p.grad = alike(torch.ones(shape), p)
            optimizer.step()
            assert optimizer.state[p]["exp_avg"].dtype is dtype

    on_ranks(rank, 4)


# -- state dicts


@pytest.mark.parametrize("rule", ["adamw", "sgd-momentum"])
def test_state_of_torch_and_back(rule):
    """Of DTensors, and of unsharded parameters: whole tensors are cut, sharded ones put together."""
    ours, theirs, options = RULES[rule]

    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))

        def made(kind, text):
            params = [nn.Parameter(x if text == "plain" else shard(x, mesh, text)) for x in values()]
            more = {"foreach": False} if kind is theirs else {}
            return params, kind(params, lr=1e-2, **options, **more)

        for source, target in (("S0", "S0"), ("S0", "S1"), ("plain", "S0"), ("S0", "plain")):
            params, first = made(theirs, source)
            train(first, params, to=alike if source != "plain" else lambda g, p: g)
            _, second = made(ours, target)
            second.load_state_dict(first.state_dict())
            again, third = made(theirs, target)
            third.load_state_dict(second.state_dict())
            for mine, stock, back in zip(*(o.state.values() for o in (second, first, third)), strict=True):
                for name in mine.keys() & stock.keys():
                    assert torch.equal(full(mine[name]), full(stock[name])), name
                    assert torch.equal(full(back[name]), full(stock[name])), name
            train(third, again, 1, to=alike if target != "plain" else lambda g, p: g)

    on_ranks(rank)


@pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, "8bit"])
def test_saved_and_continued(state_dtype):
    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        a, b = ([nn.Parameter(shard(x, mesh, "S0")) for x in values()] for _ in range(2))
        options = {"state_dtype": state_dtype, "stochastic_rounding": False}
        first, second = optim.AdamW(a, **options), optim.AdamW(b, lr=7.0, **options)
        train(first, a, to=alike)
        with torch.no_grad():
            for x, y in zip(a, b, strict=True):
                y.copy_(x)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        assert (
            file.tell()
            < 1.5 * sum(part(x).nbytes for entry in first.state.values() for x in entry.values()) + 40_000
        )
        file.seek(0)
        second.load_state_dict(torch.load(file, weights_only=False))
        copied = copy.deepcopy([a, first])
        for params, optimizer in ([a, first], [b, second], copied):
            train(optimizer, params, start=3, to=alike)
        for x, y, z in zip(a, b, copied[0], strict=True):
            assert torch.equal(full(x), full(y))
            assert torch.equal(full(x), full(z))

    on_ranks(rank)


def test_failed_load_changes_nothing():
    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        p = nn.Parameter(shard(numbers(100, 70).float(), mesh, "S0"))
        optimizer = optim.AdamW([p], state_dtype="8bit")
        p.grad = alike(torch.ones(100, 70), p)
        optimizer.step()
        before = {name: full(x).clone() for name, x in optimizer.state[p].items()}
        broken = copy.deepcopy(optimizer.state_dict())
        broken["state"][0]["exp_avg_scale"] = torch.ones(5, 1, 7)
        with pytest.raises(ValueError, match="AdamW: expected exp_avg and scales of its blocks, got"):
            optimizer.load_state_dict(broken)
        assert all(torch.equal(full(optimizer.state[p][name]), x) for name, x in before.items())

    on_ranks(rank)


def test_pool():
    def rank():
        mesh = init_device_mesh("cpu", (RANKS,))
        a, b = ([nn.Parameter(shard(x, mesh, "S0")) for x in values()] for _ in range(2))
        with memkit.Pool("4MiB") as pool:
            held, free = optim.AdamW(a, state_dtype="8bit", pool=pool), optim.AdamW(b, state_dtype="8bit")
            train(held, a, to=alike)
            train(free, b, to=alike)
            for x, y in zip(a, b, strict=True):
                assert torch.equal(full(x), full(y))
            assert pool.stats().live_blocks == 3
            held.state.clear()
            del held
            assert pool.stats().live_blocks == 0

    on_ranks(rank)

"""What the optimizers keep, in how many bytes; state dicts."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from optim_cases import (
    RULES,
    distance,
    each_rule,
    each_state,
    equal,
    parameters,
    state_bytes,
    tensors,
    train,
)
from torch import nn

from memkit import optim
from memkit.bench import models
from memkit.optim._quantize import dequantize

pytestmark = pytest.mark.usefixtures("repeatable")  # tensors are small


def test_bytes_of_state() -> None:
    model = models.GPT(512, 2, 128, 4, 64)
    sizes = {}
    for name, make in {
        "torch": torch.optim.AdamW,
        "memkit": optim.AdamW,
        "bf16": lambda p: optim.AdamW(p, state_dtype=torch.bfloat16),
        "8bit": lambda p: optim.AdamW(p, state_dtype="8bit"),
    }.items():
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer = make(model.parameters())
        optimizer.step()
        sizes[name] = state_bytes(optimizer)
    assert sizes["memkit"] <= 1.01 * sizes["torch"]
    assert sizes["bf16"] <= 0.51 * sizes["torch"]
    assert sizes["8bit"] <= 0.30 * sizes["torch"]


def test_one_flat_buffer_a_dtype() -> None:
    params = [*parameters(), *parameters(torch.bfloat16)]
    optimizer = optim.AdamW(params)
    train(optimizer, params, 1)
    assert len({x.untyped_storage().data_ptr() for x in tensors(optimizer)}) == 2
    eight = optim.AdamW(params, state_dtype="8bit")
    train(eight, params, 1)
    assert len({x.untyped_storage().data_ptr() for x in tensors(eight)}) == 3  # two kinds of codes; the rest


@each_state
@each_rule
def test_saved_and_continued(rule: str, state_dtype: Any) -> None:
    make, _, options = RULES[rule]
    a, b = parameters(), parameters()
    if options.get("amsgrad") and state_dtype == "8bit":
        with pytest.raises(ValueError, match="expected amsgrad without state_dtype '8bit'"):
            make(a, state_dtype=state_dtype, **options)
        return
    options = {"lr": 1e-2, "state_dtype": state_dtype, **options}
    first = make(a, **options)
    train(first, a, 3)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    for x, y in zip(a, b, strict=True):
        y.data.copy_(x.data)
    second = make(b, **{**options, "lr": 7.0})
    second.load_state_dict(torch.load(file, weights_only=True))
    assert second.param_groups[0]["lr"] == 1e-2
    copied, pickled = copy.deepcopy([a, first]), pickle.loads(pickle.dumps([a, first]))
    torch.manual_seed(5)
    train(first, a, 3, start=3)
    for params, optimizer in ([b, second], copied, pickled):
        torch.manual_seed(5)
        train(optimizer, params, 3, start=3)
        assert equal(a, params)
        assert state_bytes(optimizer) == state_bytes(first)


@each_rule
@pytest.mark.parametrize("fused", [True, False])
def test_state_of_torch_and_back(rule: str, fused: bool) -> None:
    ours, theirs, options = RULES[rule]
    a, b, c = parameters(), parameters(), parameters()
    stock = theirs(a, lr=1e-2, fused=fused, **options)
    train(stock, a, 3)
    for x, y in zip(a, b, strict=True):
        y.data.copy_(x.data)
    mine = ours(b, **({"momentum": 0.5} if "momentum" in options else {}))
    mine.load_state_dict(stock.state_dict())
    assert mine.param_groups[0]["lr"] == 1e-2
    train(stock, a, 3, start=3)
    train(mine, b, 3, start=3)
    assert distance(b, a) <= 4
    for x, y in zip(b, c, strict=True):
        y.data.copy_(x.data)
    again = theirs(c)
    again.load_state_dict(mine.state_dict())
    train(stock, a, 3, start=6)
    train(again, c, 3, start=6)
    assert distance(c, a) <= 8


def test_state_looks_like_torchs() -> None:
    a, b = parameters(), parameters()
    ours, theirs = optim.AdamW(a), torch.optim.AdamW(b, fused=True)
    train(ours, a, 2)
    train(theirs, b, 2)
    mine, stock = ours.state_dict(), theirs.state_dict()
    assert mine["state"].keys() == stock["state"].keys()
    for i, entry in stock["state"].items():
        assert list(mine["state"][i]) == list(entry)
        for name, x in entry.items():
            other = mine["state"][i][name]
            assert (other.shape, other.dtype, other.stride()) == (x.shape, x.dtype, x.stride())


@pytest.mark.parametrize("source", [None, torch.bfloat16, "8bit"])
@pytest.mark.parametrize("target", [None, torch.bfloat16, "8bit"])
def test_state_changes_its_dtype(source: Any, target: Any) -> None:
    a, b = parameters(), parameters()
    first, second = optim.AdamW(a, state_dtype=source), optim.AdamW(b, state_dtype=target, block_size=64)
    train(first, a, 3)
    second.load_state_dict(first.state_dict())
    for x, y in zip(a, b, strict=True):
        mine, loaded = second.state[y], first.state[x]
        assert mine["step"] == 3
        for name in ("exp_avg", "exp_avg_sq"):
            values = []
            for entry, block in ((mine, 64), (loaded, 256)):
                coded = entry[name].dtype in (torch.int8, torch.uint8)
                values.append(
                    dequantize(entry[name], entry[name + "_scale"], block) if coded else entry[name]
                )
            assert (values[0].float() - values[1].float()).abs().sum() <= 0.05 * values[1].float().abs().sum()
    assert second.param_groups[0]["state_dtype"] == target
    train(second, b, 1)


def test_8_bit_state_of_permuted_parameters() -> None:
    """Saved from a contiguous parameter, loaded for one in another order of memory."""
    weight = torch.randn(64, 16, 3, 3)
    a, b = nn.Parameter(weight), nn.Parameter(weight.to(memory_format=torch.channels_last))
    first, second = optim.AdamW([a], state_dtype="8bit"), optim.AdamW([b], state_dtype="8bit")
    a.grad = torch.randn_like(weight)
    first.step()
    second.load_state_dict(first.state_dict())
    for name in ("exp_avg", "exp_avg_sq"):
        values = [
            dequantize(o.state[p][name], o.state[p][name + "_scale"], 256)
            for o, p in ((first, a), (second, b))
        ]
        assert (values[0] - values[1]).norm() < 0.05 * values[0].norm()


def test_failed_load_changes_nothing() -> None:
    a = parameters()
    optimizer = optim.AdamW(a, lr=1e-2)
    train(optimizer, a, 2)
    before = copy.deepcopy(optimizer.state_dict())
    for change in (
        lambda s: s["state"][1].update(exp_avg=torch.zeros(7)),
        lambda s: s["state"][1].pop("exp_avg_sq"),
        lambda s: s["state"][1].update(exp_avg=torch.zeros(5000, dtype=torch.int8)),
        lambda s: s["state"][1].update(exp_avg=torch.zeros(5000, dtype=torch.int64)),
        lambda s: s["state"][1].update(exp_avg=torch.zeros(5000, dtype=torch.complex64)),
        lambda s: s["param_groups"][0].update(betas=(2.0, 0.5)),
        lambda s: s["param_groups"][0].pop("betas"),
    ):
        broken = copy.deepcopy(before)
        broken["param_groups"][0]["lr"] = 5.0
        change(broken)
        with pytest.raises(ValueError, match="AdamW: expected"):
            optimizer.load_state_dict(broken)
        assert optimizer.param_groups[0]["lr"] == 1e-2
        now = optimizer.state_dict()["state"]
        assert all(torch.equal(now[i][k], x) for i, e in before["state"].items() for k, x in e.items())


@pytest.mark.parametrize(
    ("rule", "other"),
    [
        *((optim.AdamW, each) for each in ("RMSprop", "SGD", "Adagrad", "Adamax", "Rprop")),
        *((optim.SGD, each) for each in ("RMSprop", "Adagrad", "Adamax", "NAdam", "AdamW")),
    ],
)
def test_states_of_other_optimizers_are_refused(rule: Any, other: str) -> None:
    a, b = parameters(), parameters()
    theirs = getattr(torch.optim, other)(a)
    train(theirs, a, 1)
    ours = rule(b)
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match=f"{rule.__name__}: expected"):
        ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == before


def test_dampening_spares_the_first_step_in_torch() -> None:
    """torch.optim.SGD takes a buffer for a step that was taken."""
    values = torch.randn(2, 5)
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    ends = []
    for first in (optim.SGD, torch.optim.SGD):
        params = [nn.Parameter(values[i].clone()) for i in range(2)]
        optimizer = first(params, **options)
        params[0].grad = torch.ones(5)
        optimizer.step()
        after = torch.optim.SGD(params, **options)
        after.load_state_dict(optimizer.state_dict())
        for p in params:
            p.grad = torch.ones(5)
        after.step()
        ends.append(params)
    for p, q in zip(*ends, strict=True):
        torch.testing.assert_close(p, q)


def test_a_flag_that_is_none_writes_nothing() -> None:
    a, b = parameters(), parameters()
    optimizer = optim.SGD([{"params": a}, {"params": b}], lr=1.0)
    for p in (*a, *b):
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in (*a, *b)]
    optimizer.param_groups[1]["maximize"] = torch.ones(2)
    with pytest.raises(TypeError, match="SGD: expected maximize to be a bool, got Tensor"):
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip((*a, *b), before, strict=True))

"""AdamW and SGD against torch.optim's fused forms and float64; what they keep, in how many bytes; state dicts."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import memkit
from memkit import optim
from memkit.bench import data, models
from memkit.optim._quantize import dequantize, quantize

pytestmark = pytest.mark.usefixtures("repeatable")  # tensors are small

SHAPES = ((100, 70), (5000,), (3,), (64, 80), (), (0, 4))
RULES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "adamw": (optim.AdamW, torch.optim.AdamW, {}),
    "adamw-all": (
        optim.AdamW,
        torch.optim.AdamW,
        {"betas": (0.3, 0.9), "eps": 1e-3, "weight_decay": 0.3, "amsgrad": True, "maximize": True},
    ),
    "sgd": (optim.SGD, torch.optim.SGD, {}),
    "sgd-momentum": (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "sgd-nesterov": (optim.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
}
each_rule = pytest.mark.parametrize("rule", RULES)
each_state = pytest.mark.parametrize("state_dtype", [None, torch.bfloat16, "8bit"])


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype)) for s in SHAPES]


def gradients(params: list[nn.Parameter], step: int) -> None:
    """The same for every dtype, up to rounding."""
    generator = torch.Generator().manual_seed(1000 + step)
    for i, p in enumerate(params):
        p.grad = ((torch.randn(p.shape, generator=generator) + 0.1) * 10.0**-i).to(p.dtype)


def train(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 50, start: int = 0
) -> None:
    for step in range(start, start + steps):
        gradients(params, step)
        optimizer.step()


def distance(a: list[nn.Parameter], b: list[nn.Parameter]) -> float:
    """The largest difference, in units of the last place of the tensors' largest values in a's dtype."""
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if x.numel():
            scale = 2.0 ** math.floor(math.log2(y.abs().max().item())) * torch.finfo(x.dtype).eps
            worst = max(worst, (x.double() - y.double()).abs().max().item() / scale)
    return worst


def equal(a: list[nn.Parameter], b: list[nn.Parameter]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [x for entry in optimizer.state.values() for x in entry.values() if isinstance(x, Tensor)]


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors(optimizer)}
    return sum(storages.values())


# -- the formula


@each_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_fused(rule: str, dtype: torch.dtype) -> None:
    """After 50 steps within 16 units of the last place of each tensor's largest value: the two contract other products."""
    ours, theirs, options = RULES[rule]
    a, b, truth = parameters(dtype), parameters(dtype), parameters(torch.float64)
    train(ours(a, lr=1e-2, **options), a)
    train(theirs(b, lr=1e-2, fused=True, **options), b)
    assert distance(a, b) <= 16
    assert not equal(a, parameters(dtype))
    if dtype is torch.float32:
        train(theirs(truth, lr=1e-2, fused=True, **options), truth)
        assert distance(a, truth) <= 1.5 * distance(b, truth) + 1


@each_rule
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(rule: str, dtype: torch.dtype) -> None:
    """No farther from float64 than PyTorch's fused form, rounding to nearest as it does."""
    ours, theirs, options = RULES[rule]
    a, b, truth = parameters(dtype), parameters(dtype), [nn.Parameter(p.double()) for p in parameters(dtype)]
    train(ours(a, lr=1e-2, stochastic_rounding=False, **options), a)
    train(theirs(b, lr=1e-2, fused=True, **options), b)
    train(theirs(truth, lr=1e-2, **options), truth)
    for x, y, t in zip(a, b, truth, strict=True):
        error, stock = (x - t).double().norm(), (y - t).double().norm()
        assert error <= 1.5 * stock + 1e-6 * t.norm()


def test_wide_state_of_half_parameters() -> None:
    a, truth = parameters(torch.bfloat16), [nn.Parameter(p.double()) for p in parameters(torch.bfloat16)]
    optimizer = optim.AdamW(a, state_dtype=torch.float32)
    train(optimizer, a, 1)
    train(torch.optim.AdamW(truth), truth, 1)
    gradients(a, 0)
    expected = 0.1 * a[0].grad.float()
    assert torch.allclose(optimizer.state[a[0]]["exp_avg"], expected, rtol=1e-6, atol=0)


def test_thread_count() -> None:
    results, before = [], torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        big = [nn.Parameter(torch.linspace(-1, 1, 100_001)), *parameters()]
        optimizer = optim.AdamW(big, state_dtype="8bit")
        train(optimizer, big, 3)
        results.append(big)
    torch.set_num_threads(before)
    assert equal(*results)


# -- 8 bits


def powers_of_ten(count: int, decades: float) -> Tensor:
    return 10 ** (-decades * torch.rand(count)) * torch.randn(count).sign()


@pytest.mark.parametrize("block", [64, 128, 256])
def test_codes_are_the_nearest(block: int) -> None:
    """A step from zero moments leaves 0.1 g and 0.001 g² behind; their codes are those of torch operations."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.zeros(5000))
    p.grad = powers_of_ten(5000, 3)
    p.grad[:block] = 0
    optimizer = optim.AdamW([p], state_dtype="8bit", block_size=block)
    optimizer.step()
    state = optimizer.state[p]
    for name, exact in (("exp_avg", 0.1 * p.grad), ("exp_avg_sq", 0.001 * p.grad * p.grad)):
        codes, scale = state[name], state[name + "_scale"]
        expected, scales = torch.empty_like(codes), torch.empty_like(scale)
        quantize(exact, expected, scales, block)
        assert torch.allclose(scale, scales, rtol=1e-6)
        assert (codes.int() - expected.int()).abs().max() <= 1  # what lies halfway may go either way
        assert (codes != expected).float().mean() < 1e-3
        assert codes.int().abs().max() == (127 if name == "exp_avg" else 255)
    assert (state["exp_avg_sq"][block:] > 0).all()
    assert (state["exp_avg_sq"][:block] == 0).all()


def test_code_error() -> None:
    """Half a step between levels: 2/q of the value for q⁴, 4/q for q⁸."""
    torch.manual_seed(0)
    x = powers_of_ten(1 << 14, 4)
    for signed, power, top in ((True, 4, 127), (False, 8, 255)):
        value = x if signed else x.abs()
        codes = torch.empty(len(x), dtype=torch.int8 if signed else torch.uint8)
        scales = torch.empty(len(x) // 256)
        quantize(value, codes, scales, 256)
        error = (dequantize(codes, scales, 256) - value).abs()
        q = top * (value.abs() / scales.repeat_interleave(256)) ** (1 / power)
        assert (error <= value.abs() * 0.5 * ((1 + 1 / q) ** power - 1) + 1e-12).all()


def dynamic_levels(signed: bool) -> Tensor:
    """The dynamic map of the paper: a decade has twice the levels of the one below."""
    levels = [0.0, 1.0]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (i + (not signed)) + 1)
        levels += ((edges[:-1] + edges[1:]) / 2 * 10.0 ** (i - 6)).tolist()
    return torch.tensor(sorted(levels))


def power_levels(signed: bool, power: int) -> Tensor:
    top = 127 if signed else 255
    return (torch.arange(top + 1) / top).double().pow(power).float()


def update_error(first: Tensor, second: Tensor, spread: float) -> float:
    """Of Adam's updates, relative, where moments pass through such levels each step; gradients of log-normal scales."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.exp(spread * torch.randn(4096, generator=generator)) * 1e-3

    def through(x: Tensor, levels: Tensor, keep: bool) -> Tensor:
        blocks = x.view(-1, 256)
        share = (blocks.abs() / blocks.abs().amax(1, keepdim=True)).contiguous()
        code = torch.searchsorted((levels[:-1] + levels[1:]) / 2, share)
        code = code.clamp_min(1) if keep else code
        return (levels[code] * blocks.abs().amax(1, keepdim=True) * blocks.sign()).view_as(x)

    m = v = m8 = v8 = torch.zeros(4096)
    errors = []
    for step in range(1, 151):
        g = (torch.randn(4096, generator=generator) + 0.3) * scale
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        m8, v8 = 0.9 * m8 + 0.1 * g, 0.99 * v8 + 0.01 * g * g
        exact, ours = m / (v.sqrt() + 1e-8), m8 / (v8.sqrt() + 1e-8)
        if step > 50:
            errors.append(((exact - ours).norm() / exact.norm()).item())
        m8, v8 = through(m8, first, False), through(v8, second, True)
    return sum(errors) / len(errors)


def test_levels_are_well_chosen() -> None:
    """Why q⁴ and q⁸: alike within a block, as good as the paper's map; decades apart, half its error; linear is useless."""
    for spread, bound in ((0.5, 1.1), (1.5, 0.6), (3.0, 0.6)):
        ours = update_error(power_levels(True, 4), power_levels(False, 8), spread)
        dynamic = update_error(dynamic_levels(True), dynamic_levels(False), spread)
        linear = update_error(power_levels(True, 1), power_levels(False, 1), spread)
        assert ours <= bound * dynamic
        assert ours <= 0.6 * linear


def test_not_a_number_in_8_bits() -> None:
    """Keeps to its block; the next block is as without it."""
    results = []
    for bad in (0.0, math.nan, math.inf):
        p = nn.Parameter(torch.ones(4096))
        optimizer = optim.AdamW([p], state_dtype="8bit")
        for _ in range(3):
            p.grad = torch.linspace(1, 2, 4096)
            p.grad[300] += bad
            optimizer.step()
        results.append(p.detach())
    outside = torch.ones(4096, dtype=torch.bool)
    outside[256:512] = False
    for broken in results[1:]:
        assert torch.equal(broken[outside], results[0][outside])
        assert broken[300].isnan()


def test_tiny_gradients_in_8_bits() -> None:
    p, q = nn.Parameter(torch.ones(4096)), nn.Parameter(torch.ones(4096))
    ours, theirs = optim.AdamW([p], state_dtype="8bit"), torch.optim.AdamW([q])
    for _ in range(5):
        p.grad = torch.full((4096,), 1e-22)
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    assert torch.allclose(p, q)


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


# -- rounding


def test_stochastic_rounding_is_right_on_average() -> None:
    """1 + 2⁻¹⁰ lies an eighth of the way from 1 to the next bfloat16."""
    torch.manual_seed(0)
    p = nn.Parameter(torch.ones(1 << 16, dtype=torch.bfloat16))
    p.grad = torch.full_like(p, -(2.0**-10))
    optim.SGD([p], lr=1.0).step()
    assert set(p.unique().tolist()) == {1.0, 1.0 + 2.0**-7}
    assert abs((p == 1).float().mean().item() - 0.875) < 5 * math.sqrt(0.875 * 0.125 / 2**16)
    neighbours = (p[1:] == 1).float() - 0.875
    assert abs((neighbours[1:] * neighbours[:-1]).mean().item()) < 5 * 0.11 / 256  # independent
    q = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    q.grad = torch.full_like(q, -(2.0**-10))
    optim.SGD([q], lr=1.0, stochastic_rounding=False).step()
    assert (q == 1).all()


def test_bfloat16_state_moves_only_with_stochastic_rounding() -> None:
    """Where gradients become small, v is to decay by 0.1% a step, less than half of a bfloat16's last place."""
    kept = {}
    for stochastic in (True, False):
        torch.manual_seed(0)
        p = nn.Parameter(torch.zeros(4096))
        optimizer = optim.AdamW([p], state_dtype=torch.bfloat16, stochastic_rounding=stochastic)
        p.grad = torch.ones(4096)
        optimizer.step()
        p.grad = torch.zeros(4096)
        for _ in range(500):
            optimizer.step()
        kept[stochastic] = optimizer.state[p]["exp_avg_sq"].float().mean().item() / 0.001
    assert kept[False] == pytest.approx(1, rel=0.01)
    assert kept[True] == pytest.approx(0.999**500, rel=0.02)


def test_seeded_by_torch() -> None:
    def run(seed: int) -> list[nn.Parameter]:
        params = parameters(torch.bfloat16)
        torch.manual_seed(seed)
        train(optim.AdamW(params, lr=1e-2), params, 5)
        return params

    assert equal(run(1), run(1))
    assert not equal(run(1), run(2))


def test_draws_nothing_where_nothing_is_bfloat16() -> None:
    params = parameters()
    before = torch.get_rng_state()
    train(optim.AdamW(params, state_dtype="8bit"), params, 2)
    assert torch.equal(torch.get_rng_state(), before)


# -- state dicts


@each_state
@each_rule
def test_saved_and_continued(rule: str, state_dtype: Any) -> None:
    make, _, options = RULES[rule]
    if options.get("amsgrad") and state_dtype == "8bit":
        pytest.skip("refused")
    a, b = parameters(), parameters()
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
        lambda s: s["param_groups"][0].update(betas=(2.0, 0.5)),
    ):
        broken = copy.deepcopy(before)
        broken["param_groups"][0]["lr"] = 5.0
        change(broken)
        with pytest.raises(ValueError, match="AdamW: expected"):
            optimizer.load_state_dict(broken)
        assert optimizer.param_groups[0]["lr"] == 1e-2
        now = optimizer.state_dict()["state"]
        assert all(torch.equal(now[i][k], x) for i, e in before["state"].items() for k, x in e.items())


# -- what optimizers of PyTorch do


def test_groups_schedulers_and_closures() -> None:
    a, b = parameters(), parameters()
    results = []
    for params, make in ((a, optim.AdamW), (b, lambda g, **o: torch.optim.AdamW(g, fused=True, **o))):
        optimizer = make([{"params": params[:2], "lr": 1e-2}, {"params": params[2:4]}], lr=1e-3)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
        losses = []
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": params[4:], "weight_decay": 0.5})

            def closure(step: int = step, params: list[nn.Parameter] = params) -> int:
                assert torch.is_grad_enabled()
                gradients(params, step)
                return step

            losses.append(optimizer.step(closure))
            scheduler.step()
        results.append(losses)
    assert results[0] == results[1] == list(range(6))
    assert distance(a, b) <= 4


def test_missing_gradients() -> None:
    a, b = parameters(), parameters()
    ours, theirs = optim.AdamW(a), torch.optim.AdamW(b, fused=True)
    for step in range(4):
        for params, optimizer in ((a, ours), (b, theirs)):
            gradients(params, step)
            for i, p in enumerate(params):
                if (i + step) % 3 == 0:
                    p.grad = None
            optimizer.step()
            optimizer.zero_grad()
            assert all(p.grad is None for p in params)
    assert distance(a, b) <= 4
    assert [ours.state[p]["step"].item() for p in a] == [theirs.state[p]["step"].item() for p in b]
    ours.step()  # without any gradient


def test_frozen_parameters_take_no_state_until_they_thaw() -> None:
    p, q = nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(10), requires_grad=False)
    optimizer = optim.AdamW([p, q])
    p.grad = torch.ones(10)
    optimizer.step()
    assert q not in optimizer.state
    q.requires_grad_()
    q.grad = torch.ones(10)
    optimizer.step()
    assert optimizer.state[q]["step"] == 1
    assert optimizer.state[p]["step"] == 2
    assert (q != 1).all()


def test_state_that_was_cleared_starts_again() -> None:
    a, b = parameters(), parameters()
    ours, theirs = optim.AdamW(a), torch.optim.AdamW(b, fused=True)
    for params, optimizer in ((a, ours), (b, theirs)):
        train(optimizer, params, 2)
        optimizer.state.clear()
        train(optimizer, params, 2)
    assert distance(a, b) <= 4


def test_layouts() -> None:
    """Parameters and gradients of any strides; an expanded gradient; views of one memory."""
    base = torch.randn(6, 8, 3, 3)
    makers: tuple[Callable[[], Tensor], ...] = (
        lambda: base.clone().to(memory_format=torch.channels_last),
        lambda: base[0, 0].clone().t(),
        lambda: torch.arange(40.0)[::2],
        lambda: torch.arange(33.0)[1:],
        lambda: torch.arange(12.0).view(3, 4).t()[::2],
    )
    for make in makers:
        a, b = nn.Parameter(make()), nn.Parameter(make())
        assert a.stride() == make().stride()
        for grad in (torch.randn(a.shape), torch.ones(()).expand(a.shape), torch.randn_like(a)):
            for state_dtype in (None, "8bit"):
                ours, theirs = optim.AdamW([a], state_dtype=state_dtype), torch.optim.AdamW([b])
                for _ in range(2):
                    a.grad, b.grad = grad, grad.clone()
                    ours.step()
                    theirs.step()
                assert torch.allclose(a, b, rtol=2e-6, atol=1e-6)


def test_what_lies_beside_a_view_stays() -> None:
    memory = torch.zeros(40)
    p = nn.Parameter(memory[1::2])
    p.grad = torch.ones(20)
    optim.AdamW([p]).step()
    assert (memory[::2] == 0).all()
    assert (memory[1::2] != 0).all()


def test_dtypes_in_one_group() -> None:
    dtypes = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    mixed = [nn.Parameter(torch.ones(5000, dtype=d)) for d in dtypes]
    for state_dtype in (None, torch.bfloat16, "8bit", torch.float32):
        optimizer = optim.AdamW(mixed, state_dtype=state_dtype)
        for p in mixed:
            p.data.fill_(1)
            p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        for p in mixed:
            assert torch.allclose(p.double(), torch.full((5000,), 1 * (1 - 1e-5) - 1e-3).double(), rtol=8e-3)
        kept = optimizer.state[mixed[1]]["exp_avg"].dtype
        assert kept is torch.float64


def test_tensor_learning_rate_and_changed_options() -> None:
    a, b = parameters(), parameters()
    ours, theirs = (
        optim.AdamW(a, lr=torch.tensor(1e-2)),
        torch.optim.AdamW(b, lr=torch.tensor(1e-2), fused=True),
    )
    for step in range(4):
        for params, optimizer in ((a, ours), (b, theirs)):
            optimizer.param_groups[0]["lr"].mul_(0.5)
            optimizer.param_groups[0]["weight_decay"] = 0.1 * step
            train(optimizer, params, 1, start=step)
    assert distance(a, b) <= 4


def test_grad_scaler() -> None:
    a, b = parameters(), parameters()
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in range(2)]
    ours, theirs = optim.AdamW(a, lr=1e-2), torch.optim.AdamW(b, lr=1e-2, fused=True)
    for step in range(6):
        for params, optimizer, scaler in ((a, ours, scalers[0]), (b, theirs, scalers[1])):
            gradients(params, step)
            for p in params:
                p.grad *= scaler.scale(torch.ones(()))
            if step == 2:
                params[1].grad[7] = math.inf
            if step == 4:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
        for p, q in zip(a, b, strict=True):
            assert torch.allclose(p.grad, q.grad, equal_nan=True)  # unscaled, as PyTorch leaves them
    assert distance(a, b) <= 4
    assert scalers[0].get_scale() == scalers[1].get_scale()
    assert ours.state[a[0]]["step"] == 5
    assert not hasattr(ours, "grad_scale")


def test_versions_tell_autograd() -> None:
    p = nn.Parameter(torch.ones(3))
    loss = (p * p).sum()
    p.grad = torch.ones(3)
    optim.SGD([p]).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_pool() -> None:
    with memkit.Pool("4MiB") as pool:
        a, b = parameters(), parameters()
        held, free = optim.AdamW(a, state_dtype="8bit", pool=pool), optim.AdamW(b, state_dtype="8bit")
        train(held, a, 3)
        train(free, b, 3)
        assert equal(a, b)
        assert pool.stats().live_blocks == 3
        assert pool.holders()[0][0] == "AdamW"
        copied = copy.deepcopy(held)
        assert copied.param_groups[0]["state_dtype"] == "8bit"
        del held
        assert pool.stats().live_blocks == 0


@each_rule
def test_hooks_and_profiler_names(rule: str) -> None:
    make, _, options = RULES[rule]
    params = parameters()
    optimizer = make(params, **options)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    optimizer.register_load_state_dict_pre_hook(
        lambda _, s: seen.append(type(s["state"].get(0, {}).get("step")))
    )
    train(optimizer, params, 1)
    assert seen == ["before", "after"]
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen[2] in (Tensor, type(None))


# -- errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.AdamW(p, lr=-1.0), "AdamW: expected lr of at least 0, got -1"),
        (lambda p: optim.AdamW(p, lr=torch.ones(2)), "AdamW: expected lr of one element"),
        (lambda p: optim.AdamW(p, betas=(1.0, 0.9)), "AdamW: expected betas"),
        (lambda p: optim.AdamW(p, eps=-1.0), "AdamW: expected eps"),
        (lambda p: optim.AdamW(p, weight_decay=math.nan), "AdamW: expected weight_decay"),
        (lambda p: optim.AdamW(p, state_dtype="4bit"), "AdamW: expected state_dtype None, .* got '4bit'"),
        (lambda p: optim.AdamW(p, state_dtype=torch.float16), "AdamW: expected state_dtype"),
        (lambda p: optim.AdamW(p, block_size=100), "AdamW: expected block_size 64, 128 or 256, got 100"),
        (lambda p: optim.AdamW(p, amsgrad=True, state_dtype="8bit"), "AdamW: expected amsgrad without"),
        (lambda p: optim.AdamW([{"params": p, "eps": -2.0}]), "AdamW: expected eps"),
        (lambda p: optim.SGD(p, momentum=-0.5), "SGD: expected momentum"),
        (lambda p: optim.SGD(p, nesterov=True), "SGD: expected with nesterov"),
    ],
)
def test_bad_options(make: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(parameters())


def test_bad_types() -> None:
    with pytest.raises(TypeError, match=r"AdamW: expected a memkit.Pool or None, got str"):
        optim.AdamW(parameters(), pool="1MiB")
    with pytest.raises(TypeError, match=r"SGD: expected parameters of float32, .* got torch.complex64"):
        optim.SGD([nn.Parameter(torch.ones(2, dtype=torch.complex64))])
    optimizer = optim.AdamW(parameters())
    with pytest.raises(TypeError, match="AdamW: expected parameters"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]})
    assert len(optimizer.param_groups) == 1


def test_bad_gradients_write_nothing() -> None:
    params = parameters()
    optimizer = optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    train(optimizer, params, 1)
    before = [p.detach().clone() for p in params]
    gradients(params, 1)
    params[3].grad = torch.randn(64, 80).to_sparse()
    with pytest.raises(RuntimeError, match="AdamW: expected dense gradients, got a Sparse one"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
    assert optimizer.state[params[0]]["step"] == 1
    train(optimizer, params, 1)


# -- the operators


def operands(quantized: bool) -> dict[str, Any]:
    params = [torch.randn(20, 30), torch.randn(7)]
    moments = [torch.zeros_like(p, dtype=torch.int8 if quantized else None) for p in params]
    seconds = [torch.zeros_like(p, dtype=torch.uint8 if quantized else None) for p in params]
    scales = [torch.zeros(-(-p.numel() // 64)) for p in params] if quantized else []
    return {
        "params": params,
        "grads": [torch.randn_like(p) for p in params],
        "exp_avgs": moments,
        "exp_avg_sqs": seconds,
        "max_exp_avg_sqs": [],
        "exp_avg_scales": scales,
        "exp_avg_sq_scales": [x.clone() for x in scales],
        "steps": [torch.zeros(()) for _ in params],
        "lr": 1e-2,
        "beta1": 0.9,
        "beta2": 0.99,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "block_size": 64,
    }


@pytest.mark.parametrize("quantized", [False, True])
def test_opcheck(quantized: bool) -> None:
    torch.library.opcheck(torch.ops.memkit._adamw_.default, (), operands(quantized))
    params = [torch.randn(8)]
    arguments = (params, [torch.ones(8)], [torch.zeros(8)], [], [torch.zeros(())])
    torch.library.opcheck(torch.ops.memkit._sgd_.default, arguments, {"lr": 0.1, "momentum": 0.9})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": [torch.zeros(())]}, "expected lists of 2 tensors, got one of 1"),
        ({"block_size": 32}, "expected a block_size"),
        ({"grads": [torch.ones(20, 30), torch.ones(8)]}, "expected a gradient like its parameter"),
        ({"exp_avgs": [torch.zeros(30, 20).t(), torch.zeros(7)]}, "expected state of strides"),
        ({"exp_avg_sqs": [torch.zeros(20, 30), torch.zeros(7).half()]}, "expected moments of one dtype"),
        ({"exp_avg_scales": [torch.zeros(3), torch.zeros(1)]}, "float32 scales|expected state"),
    ],
)
def test_operator_checks(change: dict[str, Any], message: str) -> None:
    given = operands(False)
    before = [p.clone() for p in given["params"]]
    with pytest.raises((RuntimeError, ValueError), match=f"AdamW: .*({message})"):
        torch.ops.memkit._adamw_(**{**given, **change})
    assert all(torch.equal(p, b) for p, b in zip(given["params"], before, strict=True))


def test_compiled_operator() -> None:
    def step(given: dict[str, Any]) -> Tensor:
        torch.ops.memkit._adamw_(**given)
        return given["params"][0] * 2

    torch.manual_seed(0)
    plain = operands(False)
    copied = copy.deepcopy(plain)
    expected = step(plain)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(copied), expected)
    assert all(torch.equal(x, y) for x, y in zip(plain["exp_avgs"], copied["exp_avgs"], strict=True))


def test_compiled_training_step() -> None:
    results = []
    for compiled in (False, True):
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        optimizer = optim.AdamW(layer.parameters(), lr=1e-2)
        x = torch.randn(4, 8)

        def step(layer: nn.Module = layer, x: Tensor = x, o: optim.AdamW = optimizer) -> None:
            o.zero_grad()
            layer(x).square().sum().backward()
            o.step()

        run = torch.compile(step, backend="aot_eager") if compiled else step
        for _ in range(3):
            run()
        results.append(layer.weight.detach())
        assert optimizer.state[layer.weight]["step"] == 3
    assert torch.allclose(*results, rtol=1e-6)


# -- training


def test_gpt_in_8_bits_learns_as_well() -> None:
    """50 steps of a small GPT on Python sources: the final loss within 1% of torch's AdamW."""
    tokens = torch.tensor(list(data.stdlib_text(1 << 16).encode()[: 1 << 16]))
    batches = data.windows(tokens, 32, 8, 50, 0)
    losses = {}
    for name, make in {
        "torch": torch.optim.AdamW,
        "8bit": lambda p, lr: optim.AdamW(p, lr, state_dtype="8bit"),
        "bf16": lambda p, lr: optim.AdamW(p, lr, state_dtype=torch.bfloat16),
    }.items():
        torch.manual_seed(0)
        model = models.GPT(256, 2, 64, 4, 32, dropout=0.0)
        optimizer = make(model.parameters(), lr=2e-3)
        tail = []
        for inputs, targets in batches:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            tail.append(loss.item())
        losses[name] = sum(tail[-5:]) / 5
    assert losses["torch"] < 0.6 * math.log(256)
    assert losses["8bit"] == pytest.approx(losses["torch"], rel=0.01)
    assert losses["bf16"] == pytest.approx(losses["torch"], rel=0.01)

"""Moments in 8 bits: their codes, why these levels, and training with them."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memkit import optim
from memkit.bench import data, models
from memkit.optim._quantize import dequantize, quantize

pytestmark = pytest.mark.usefixtures("repeatable")  # tensors are small


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

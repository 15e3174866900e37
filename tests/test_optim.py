"""AdamW and SGD against torch.optim's fused forms and float64; rounding."""

from __future__ import annotations

import math

import pytest
import torch
from optim_cases import (
    RULES,
    distance,
    each_rule,
    equal,
    gradients,
    parameters,
    train,
)
from torch import nn

from memkit import optim

pytestmark = pytest.mark.usefixtures("repeatable")  # tensors are small


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

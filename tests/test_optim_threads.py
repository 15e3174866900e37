"""Threads that step at once, with parameters and graphs of their own."""

import copy
import threading

import pytest
import torch
from pool_cases import in_threads
from torch import nn

import memkit
from memkit.optim import AdamW, step_in_backward


def make_blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(2))


def assert_threads_step_alone(cls: type, steps: int) -> None:
    x, blocks = torch.randn(8, 16), make_blocks()
    alone = copy.deepcopy(blocks)
    handle = step_in_backward(cls(blocks.parameters(), lr=1e-3))
    start = threading.Barrier(len(blocks))

    def train(number: int) -> None:
        start.wait()
        for _ in range(steps):
            blocks[number](x).square().mean().backward()

    in_threads(train, len(blocks))
    handle.remove()
    for block in alone:
        optimizer = cls(block.parameters(), lr=1e-3)
        for _ in range(steps):
            block(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, want in zip(blocks.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, want, rtol=0, atol=0)


@pytest.mark.parametrize("cls", [AdamW, memkit.optim.SGD])
def test_backwards_of_two_threads_step_what_is_theirs(cls: type) -> None:
    """Also the first steps, which both threads find without a state."""
    for steps in [3] * 30 + [150]:
        assert_threads_step_alone(cls, steps)


def test_a_step_has_its_own_gradients() -> None:
    """What another thread collects between a step's collection and the step itself is another step."""
    params = [nn.Parameter(torch.full((4,), float(i))) for i in range(3)]
    lists = memkit._C.StepList("SGD", params, [[], [], []])
    params[0].grad, params[2].grad = torch.ones(4), torch.ones(4)
    first = lists.collect()
    second = lists.collect_one(2)
    assert (len(first), len(second)) == (2, 1)
    numbers = (1.0, None, 0.0, 0.0, 0.0, False, False, 64, False, None, None)
    first.sgd(*numbers)
    assert [p[0].item() for p in params] == [-1, 1, 1]
    second.sgd(*numbers)
    assert [p[0].item() for p in params] == [-1, 1, 0]

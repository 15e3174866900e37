"""What users do to an optimizer's groups and state between steps, and steps that cannot be taken: as in torch.optim."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkit import optim

RULES = {
    "adamw": (optim.AdamW, torch.optim.AdamW, {}),
    "amsgrad": (optim.AdamW, torch.optim.AdamW, {"amsgrad": True}),
    "sgd": (optim.SGD, torch.optim.SGD, {}),
    "momentum": (optim.SGD, torch.optim.SGD, {"momentum": 0.9}),
}
each_rule = pytest.mark.parametrize("rule", RULES)


def steps(optimizer: Any, *params: Tensor, n: int = 3) -> None:
    for i in range(n):
        for param in params:
            param.grad = torch.linspace(-1, 2, param.numel()).view_as(param) * (i + 1)
        optimizer.step()


def compare(rule: str, change: Any) -> None:
    found = []
    for make in RULES[rule][:2]:
        torch.manual_seed(0)
        first, second = (nn.Parameter(torch.randn(4, 5)) for _ in range(2))
        optimizer = make([{"params": [first]}, {"params": [second]}], lr=0.1, **RULES[rule][2])
        steps(optimizer, first, second)
        params = change(optimizer, first, second)
        steps(optimizer, *params)
        found.append([p.detach() for p in params])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@each_rule
def test_a_parameter_takes_anothers_place(rule: str) -> None:
    """As where points are added to a scene: moments are extended, and go to the new parameter."""

    def change(optimizer: Any, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        new = nn.Parameter(torch.cat([first.detach(), torch.ones(2, 5)]))
        state = optimizer.state.pop(first, {})
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == first.shape:
                state[name] = torch.cat([value, torch.zeros(2, 5)])
        optimizer.param_groups[0]["params"][0] = new
        if state:
            optimizer.state[new] = state
        return new, second

    compare(rule, change)


@pytest.mark.parametrize("rule", ["adamw", "amsgrad", "momentum"])
def test_moments_are_replaced(rule: str) -> None:
    def change(optimizer: Any, *params: Tensor) -> tuple[Tensor, ...]:
        for name, value in optimizer.state[params[0]].items():
            if isinstance(value, Tensor) and value.shape == params[0].shape:
                optimizer.state[params[0]][name] = torch.zeros_like(value)
        return params

    compare(rule, change)


@pytest.mark.parametrize("rule", ["adamw", "amsgrad"])
def test_state_is_emptied(rule: str) -> None:
    def change(optimizer: Any, *params: Tensor) -> tuple[Tensor, ...]:
        optimizer.state[params[0]] = {}
        return params

    compare(rule, change)
    param = nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([param])
    steps(optimizer, param)
    optimizer.state[param] = {}
    steps(optimizer, param, n=2)
    assert optimizer.state[param]["step"] == 2


def test_state_that_is_no_tensor() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = optim.AdamW([param])
    steps(optimizer, param)
    optimizer.state[param]["step"] = 3
    with pytest.raises(TypeError, match="AdamW: expected state 'step' to be a Tensor, got int"):
        steps(optimizer, param)


@pytest.mark.parametrize(
    ("rule", "state_dtype"),
    [
        (rule, dtype)
        for rule in RULES
        for dtype in (None, torch.bfloat16, "8bit")
        if (rule, dtype) != ("amsgrad", "8bit")
    ],
)
def test_weights_change_their_layout(rule: str, state_dtype: Any) -> None:
    """model.to(memory_format=...) after the first steps: moments follow."""
    conv = nn.Conv2d(16, 32, 3)
    other = copy.deepcopy(conv)
    found = []
    for model in (conv, other):
        options = {**RULES[rule][2], "state_dtype": state_dtype, "stochastic_rounding": False}
        optimizer = RULES[rule][0]([model.weight], lr=0.1, **options)
        steps(optimizer, model.weight)
        if model is conv:
            model.to(memory_format=torch.channels_last)
        steps(optimizer, model.weight)
        found.append(model.weight.detach())
    assert conv.weight.is_contiguous(memory_format=torch.channels_last)
    moved, stayed = found
    tolerance = {"atol": 3e-2, "rtol": 0.1} if state_dtype == "8bit" else {}  # blocks are others
    torch.testing.assert_close(moved.contiguous(), stayed, **tolerance)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"betas": (0.9,)}, "betas of two numbers"),
        ({"betas": ("a", 0.9)}, "betas of two numbers"),
        ({"lr": torch.tensor(1j)}, "lr with a real value, got torch.complex64"),
        ({"lr": torch.ones(1, device="meta")}, "lr with a real value, got torch.float32 on meta"),
    ],
)
def test_numbers_that_are_none(change: dict[str, Any], message: str) -> None:
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(5))
    optimizer = optim.AdamW([{"params": [first]}, {"params": [second]}])
    optimizer.param_groups[1].update(change)
    with pytest.raises((TypeError, ValueError), match=f"AdamW: expected {message}"):
        steps(optimizer, first, second)
    assert torch.equal(first, torch.ones(4))


COPIES = {
    "copy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_loads_and_grows(how: str) -> None:
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(5))
    optimizer = optim.AdamW([first])
    steps(optimizer, first)
    state = copy.deepcopy(optimizer.state_dict())
    copied = COPIES[how](optimizer)
    copied.load_state_dict(state)
    copied.add_param_group({"params": [second]})
    assert copied.state[second] == {}
    steps(copied, copied.param_groups[0]["params"][0], second)
    assert copied.state[second]["step"] == 3
    assert copied.state[copied.param_groups[0]["params"][0]]["step"] == 6


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_before_the_first_step_with_another_option(how: str) -> None:
    """What an option asks for more, or no more, goes along."""
    weight = nn.Parameter(torch.ones(4))
    for optimizer, option, value in (
        (optim.AdamW([weight]), "amsgrad", True),
        (optim.AdamW([weight], amsgrad=True), "amsgrad", False),
        (optim.SGD([weight], momentum=0.9), "momentum", 0.0),
    ):
        steps(optimizer, weight)
        optimizer.param_groups[0][option] = value
        copied = COPIES[how](optimizer)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        (other,) = copied.param_groups[0]["params"]
        assert copied.state[other].keys() == optimizer.state[weight].keys()
        for change in (value, 0.9 if option == "momentum" else not value):
            optimizer.param_groups[0][option] = copied.param_groups[0][option] = change
            steps(optimizer, weight)
            steps(copied, other)
            assert torch.equal(weight, other)
            state = optimizer.state[weight]
            assert all(torch.equal(value, state[key]) for key, value in copied.state[other].items())


def test_what_else_is_in_the_state_stays() -> None:
    weight = nn.Parameter(torch.randn(8, 4, 3, 3))
    optimizer = optim.AdamW([weight])
    steps(optimizer, weight)
    optimizer.state[weight]["mine"] = 7
    weight.data = weight.data.to(memory_format=torch.channels_last)
    steps(optimizer, weight)
    assert optimizer.state[weight]["mine"] == 7


def test_a_moment_more_beside_another_layout() -> None:
    weight = nn.Parameter(torch.randn(8, 4, 3, 3))
    optimizer = optim.AdamW([weight])
    steps(optimizer, weight)
    known = optimizer.state[weight]["exp_avg"].clone()
    weight.data = weight.data.to(memory_format=torch.channels_last)
    optimizer.param_groups[0]["amsgrad"] = True
    weight.grad = None
    optimizer.step()
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    state = optimizer.state[weight]
    torch.testing.assert_close(state["exp_avg"], known * 0.9)
    assert state["max_exp_avg_sq"].stride() == weight.stride()
    assert state["step"] == 4


def test_a_parameter_without_moments_of_its_shape() -> None:
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(5))
    optimizer = optim.AdamW([first])
    steps(optimizer, first)
    optimizer.state[second] = optimizer.state.pop(first)
    optimizer.param_groups[0]["params"] = [second]
    second.grad = torch.ones(5)
    with pytest.raises(RuntimeError, match=r"AdamW: expected state for a parameter .*\[5\].*, got .*\[4\]"):
        optimizer.step()
    assert torch.equal(second, torch.ones(5))


WRONG = {
    "shape": (RuntimeError, "SGD: expected state for a parameter"),
    "expanded": (RuntimeError, "SGD: expected parameters with memory of its own for each element"),
    "lr": (TypeError, "SGD: expected lr to be a number, got str"),
    "momentum": (TypeError, "SGD: expected momentum to be a number, got str"),
    "dampening": (TypeError, "SGD: expected dampening to be a number, got str"),
    "maximize": (TypeError, "SGD: expected maximize to be a bool, got str"),
    "nesterov": (TypeError, "SGD: expected nesterov to be a bool, got str"),
}


@pytest.mark.parametrize("change", WRONG)
def test_a_step_that_cannot_be_taken_writes_nothing(change: str) -> None:
    first, second = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(5))
    optimizer = optim.SGD([{"params": [first]}, {"params": [second]}], lr=0.1, momentum=0.9)
    steps(optimizer, first, second)
    before = first.detach().clone(), optimizer.state[first]["momentum_buffer"].clone()
    if change == "shape":
        second.data = torch.ones(6)
    elif change == "expanded":
        second.data = torch.ones(1).expand(5)
    else:
        optimizer.param_groups[1][change] = "a"
    error = WRONG[change]
    first.grad, second.grad = torch.ones(4), torch.ones_like(second)
    with pytest.raises(error[0], match=error[1]):
        optimizer.step()
    assert torch.equal(first, before[0])
    assert torch.equal(optimizer.state[first]["momentum_buffer"], before[1])
    assert optimizer.state[first]["step"] == 3


def test_torch_optim_stays_as_it_was_asked_for() -> None:
    """PyTorch's fused form walks weights and moments alike, whatever their strides: a state must not ask for it."""
    found = []
    for make in (optim.AdamW, torch.optim.AdamW):
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(8, 4, 3, 3))
        optimizer = make([weight], lr=0.1)
        steps(optimizer, weight)
        state = copy.deepcopy(optimizer.state_dict())
        assert not state["param_groups"][0]["fused"]
        other = nn.Parameter(weight.detach().to(memory_format=torch.channels_last))
        loaded = torch.optim.AdamW([other], lr=0.1)
        loaded.load_state_dict(state)
        steps(loaded, other)
        found.append(other.detach())
    torch.testing.assert_close(*found)

"""What backward runs again reads the numbers that the forward read."""

import copy

import pytest
import torch
from attention_cases import Attention, given, small
from swap_cases import D, batch
from torch import nn

from memkit import lean, swap

__all__ = ["small"]  # a fixture
pytestmark = pytest.mark.usefixtures("repeatable")


class SoftcapConfig:
    def __init__(self):
        self.temperature = 1.0


class Configured(Attention):
    def __init__(self):
        super().__init__()
        self.config = SoftcapConfig()

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        return self.merged((torch.tanh(q @ k.mT) * self.config.temperature).softmax(-1) @ v)

    def warm(self, number):
        self.config.temperature = number


class OfItsClass(Attention):
    temperature = 1.0

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        return self.merged((torch.tanh(q @ k.mT) * self.temperature).softmax(-1) @ v)

    def warm(self, number):
        type(self).temperature = number


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.limit = nn.Linear(D, 4 * D), nn.Linear(2 * D, D), 1.0

    def _apply_gate(self, x):
        gate, up = x.chunk(2, -1)
        return gate * torch.sigmoid(gate * self.limit) * (up + 1)

    def forward(self, x):
        return self.down(self._apply_gate(self.up(x)))

    def warm(self, number):
        self.limit = number


class WavingSnake1d(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha, self.frequency = nn.Parameter(torch.rand(D)), 1.0

    def forward(self, x):
        return x + (1 / (self.alpha + 1e-9)) * torch.sin(self.alpha * self.frequency * x).pow(2)


class Waves(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D, D), WavingSnake1d(), nn.Linear(D, D))

    def warm(self, number):
        self[1].frequency = number


CASES = {
    "configuration": (Configured, given),
    "class": (OfItsClass, given),
    "gate": (Gate, batch),
    "activation": (Waves, batch),
}


def gradients(model, x):
    """Of two forwards with other numbers, and one backward."""
    outs = []
    for number in 1.0, 3.0:
        model.warm(number)
        outs.append(model(x))
    (outs[0].square() + outs[1]).sum().backward()
    model.warm(1.0)
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("name", CASES)
def test_numbers_changed_before_backward(name):
    make, inputs = CASES[name]
    model, x = make().double(), inputs()
    stock = copy.deepcopy(model)
    report = swap(model, sample=x, lean="call")
    assert any(row.after == "in lean()" and row.saved == "input" for row in report)
    torch.testing.assert_close(gradients(model, x), gradients(stock, x), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("counted", ["activation", "gate"])
def test_what_counts_its_calls_is_called_once(counted):
    class CountingSnake1d(WavingSnake1d):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return x + (1 / (self.alpha + 1e-9)) * torch.sin(self.alpha * x).pow(2)

    class CountingGate(Gate):
        calls = 0

        def _apply_gate(self, x):
            self.calls += 1
            gate, up = x.chunk(2, -1)
            return gate * torch.sigmoid(gate * self.limit) * (up + 1)

    layer = CountingSnake1d() if counted == "activation" else CountingGate()
    model = nn.Sequential(nn.Linear(D, D), layer).double()
    swap(model, lean=True)
    layer.calls = 0
    with lean():
        model(batch()).sum().backward()
    assert layer.calls == 1

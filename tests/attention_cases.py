"""What the tests of attention that layers write out share: a layer, and how small tensors count."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memkit.memory import measure
from memkit.swap.library import rerun

WIDTH, HEADS, TOKENS = 32, 4, 48


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small tensors are worth it here."""
    monkeypatch.setattr(rerun, "LEAST", 0)
    monkeypatch.setattr(rerun, "_worth", {})


class Attention(nn.Module):
    def __init__(self, p=0.0):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(p)
        self.bias = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))

    def heads(self, x):
        return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)

    def projected(self, x):
        return self.heads(self.q(x)), self.heads(self.k(x)), self.heads(self.v(x))

    def merged(self, x):
        return self.out(x.transpose(1, 2).flatten(2))

    def forward(self, x, mask=None):
        q, k, v = self.projected(x)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        scores = scores + self.bias
        if mask is not None:
            scores = scores.masked_fill(mask, -torch.inf)
        weights = self.dropout(F.softmax(scores, dim=-1))
        return self.merged(torch.matmul(weights, v))


def given(dtype=torch.float64):
    return torch.randn(2, TOKENS, WIDTH, dtype=dtype)


def steps_saved(model, *args):
    def step():
        out = model(*args)
        return out[0] if isinstance(out, tuple) else out

    return measure(step).saved

"""swap: sparse gradients and outputs on the sample are compared too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkit import swap
from memkit.swap.trial import _digest

WIDTH = 16


class Embedded(nn.Module):
    def __init__(self, embedding: nn.Module, sparse: str = "") -> None:
        super().__init__()
        self.embedding, self.sparse = embedding, sparse
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.act(self.fc1(self.embedding(x))))
        if self.sparse == "csr":
            return out.flatten(0, -2).to_sparse_csr()
        return out.relu().to_sparse() if self.sparse else out


EMBEDDINGS: dict[str, Callable[[], Embedded]] = {
    "embedding": lambda: Embedded(nn.Embedding(50, WIDTH, sparse=True)),
    "bag": lambda: Embedded(nn.EmbeddingBag(50, WIDTH, sparse=True)),
    "output": lambda: Embedded(nn.Embedding(50, WIDTH), "coo"),
    "compressed output": lambda: Embedded(nn.Embedding(50, WIDTH), "csr"),
}


@pytest.mark.parametrize("lean", [False, "call"])
@pytest.mark.parametrize("kind", EMBEDDINGS)
def test_sparse_gradients_and_outputs(kind: str, lean: Any) -> None:
    torch.manual_seed(0)
    stock = EMBEDDINGS[kind]()
    ours = copy.deepcopy(stock)
    tokens = torch.randint(0, 50, (4, 8))
    report = swap(ours, sample=tokens, lean=lean)
    assert [row.after for row in report if row.path == "act"] == ["in lean()" if lean else "in place"]
    for model in (stock, ours):
        out = model(tokens)
        (out.to_dense() if out.layout != torch.strided else out).square().sum().backward()
    for a, b in zip(ours.parameters(), stock.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert a.grad.is_sparse == b.grad.is_sparse
        torch.testing.assert_close(a.grad.to_dense(), b.grad.to_dense())


def test_a_digest_tells_places_apart() -> None:
    def of(rows: list[int], values: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(torch.tensor([rows]), values, (5, 3))

    values = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    norm, probes = _digest(of([0, 1, 1], values))
    same, alike = _digest(of([0, 1], torch.stack([values[0], values[1] + values[2]])))
    torch.testing.assert_close(alike, probes)
    assert same == pytest.approx(norm)
    for other in ([0, 2, 2], [1, 4, 4]):
        assert not torch.allclose(_digest(of(other, values))[1], probes)
    compressed = torch.eye(3).to_sparse_csr()
    assert _digest(compressed)[1].shape == (3,)

"""The operators below the optimizers: checks and compilers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memkit import optim

pytestmark = pytest.mark.usefixtures("repeatable")  # tensors are small


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

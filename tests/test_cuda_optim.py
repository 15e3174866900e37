"""The optimizers' CUDA kernels: against PyTorch's fused forms, the CPU engine, and in captured graphs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit import optim

pytestmark = pytest.mark.cuda

SHAPES = ((100, 70), (5000,), (3,), (64, 80), (), (0, 4), *(((17,),) * 50))  # more than one launch holds


def parameters(dtype: torch.dtype = torch.float32, device: str = "cuda") -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(s, generator=generator).to(device, dtype)) for s in SHAPES]


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int = 20) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).to(p)
        optimizer.step()


def close(a: list[nn.Parameter], b: list[nn.Parameter], tolerance: float) -> bool:
    return all(
        (x.cpu().double() - y.cpu().double()).abs().max() <= tolerance
        for x, y in zip(a, b, strict=True)
        if x.numel()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw(dtype: torch.dtype, amsgrad: bool) -> None:
    a, b = parameters(dtype), parameters(dtype)
    train(optim.AdamW(a, lr=1e-2, amsgrad=amsgrad, stochastic_rounding=False), a)
    train(torch.optim.AdamW(b, lr=1e-2, amsgrad=amsgrad, fused=True), b)
    assert close(a, b, 64 * torch.finfo(dtype).eps)


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9, "dampening": 0.5}, {"momentum": 0.9, "nesterov": True}]
)
def test_sgd(options: dict[str, Any]) -> None:
    a, b = parameters(), parameters()
    train(optim.SGD(a, lr=1e-2, **options), a)
    train(torch.optim.SGD(b, lr=1e-2, fused=True, **options), b)
    assert close(a, b, 64 * torch.finfo(torch.float32).eps)


@pytest.mark.parametrize("block", [64, 128, 256])
def test_codes_are_those_of_the_cpu(block: int) -> None:
    made = {}
    for device in ("cpu", "cuda"):
        params = parameters(device=device)
        optimizer = optim.AdamW(params, lr=1e-2, state_dtype="8bit", block_size=block)
        train(optimizer, params, 1)
        made[device] = params, [optimizer.state[p] for p in params]
    assert close(made["cpu"][0], made["cuda"][0], 1e-6)
    for here, there in zip(made["cpu"][1], made["cuda"][1], strict=True):
        for name, x in here.items():
            if x.dtype in (torch.int8, torch.uint8):
                different = (x.int() - there[name].cpu().int()).abs()
                assert different.max() <= 1
                assert different.float().mean() < 1e-3
            else:
                assert torch.allclose(x, there[name].cpu(), rtol=1e-5)


def test_stochastic_rounding() -> None:
    """The same bits as on the CPU for one key; right on average; governed by the device's generator."""
    seed = torch.tensor(1234)
    results = []
    for device in ("cpu", "cuda"):
        p = torch.ones(3000, dtype=torch.bfloat16, device=device)
        g = torch.full_like(p, -(2.0**-10))
        torch.ops.memkit._sgd_([p], [g], [], [], [], lr=1.0, seed=seed.to(device))
        results.append(p.cpu())
    assert torch.equal(*results)
    assert abs((results[0] == 1).float().mean().item() - 0.875) < 5 * math.sqrt(0.875 * 0.125 / 3000)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        params = parameters(torch.bfloat16)
        train(optim.AdamW(params, lr=1e-2), params, 3)
        runs.append(params)
    assert all(torch.equal(x, y) for x, y in zip(*runs, strict=True))


def test_grad_scaler() -> None:
    a, b = parameters(), parameters()
    for params, make in ((a, optim.AdamW), (b, lambda p: torch.optim.AdamW(p, fused=True))):
        optimizer, scaler = make(params), torch.amp.GradScaler("cuda", init_scale=64.0)
        for step in range(3):
            for p in params:
                p.grad = torch.full_like(p, 64.0)
            if step == 1:
                params[1].grad[7] = math.inf
            scaler.scale(torch.ones((), device="cuda"))
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.state[params[0]]["step"].item() == 2
    assert close(a, b, 1e-6)
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(a, b, strict=True))


def test_captured_graph() -> None:
    """A replay counts its steps, and reads a learning rate that is a tensor."""
    a, b = parameters(), parameters()
    lr = torch.tensor(1e-2, device="cuda")
    captured, eager = optim.AdamW(a, lr=lr), optim.AdamW(b, lr=1e-2)
    for p, q in zip(a, b, strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        captured.step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.step()
    eager.step()
    for step in range(3):
        lr.fill_(1e-2 * step)
        eager.param_groups[0]["lr"] = 1e-2 * step
        graph.replay()
        eager.step()
    assert close(a, b, 1e-6)
    assert captured.state[a[0]]["step"].item() == 4


def test_two_devices_and_a_pool() -> None:
    params = [*parameters(device="cpu")[:2], *parameters()[:2]]
    train(optim.AdamW(params), params, 2)
    assert close(params[:2], params[2:], 1.0)
    with (
        pytest.raises(ValueError, match="AdamW: expected parameters on the pool's device"),
        memkit.Pool("1MiB") as p,
    ):
        train(optim.AdamW(params, pool=p), params, 1)


def deep(layers: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))).cuda()


@pytest.mark.parametrize("together", [0, 40_000, 32 << 20])
def test_in_backward(together: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that wait for each other are stepped as all at once, on whatever stream they were made."""
    monkeypatch.setattr(optim._in_backward, "WAITING_BYTES", together)
    x = torch.randn(4, 64, device="cuda")
    a, b = deep(), deep()
    plain, early = optim.AdamW(a.parameters()), optim.AdamW(b.parameters())
    optim.step_in_backward(early)
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        a(x).square().sum().backward()
        plain.step()
        plain.zero_grad()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            b(x).square().sum().backward()
        torch.cuda.current_stream().wait_stream(stream)
        assert all(p.grad is None for p in b.parameters())
        assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert all(early.state[p]["step"].item() == 2 for p in b.parameters())


def test_in_backward_after_an_error() -> None:
    """What had arrived is used by the next backward or step, once."""
    model = deep(2)
    first, last = model[0].weight, model[1].weight
    optimizer = optim.AdamW(model.parameters())
    optim.step_in_backward(optimizer)
    x = torch.randn(4, 64, device="cuda")

    def stop(grad: torch.Tensor) -> None:
        raise ValueError("trap")

    def broken() -> None:
        h = model[0](x)
        h.register_hook(stop)
        with pytest.raises(ValueError, match="trap"):
            model[1](h).sum().backward()

    broken()
    assert last.grad is None
    optimizer.step()
    assert optimizer.state[last]["step"].item() == 1
    broken()
    model(x).sum().backward()
    assert [optimizer.state[p]["step"].item() for p in (first, last)] == [1, 3]
    assert first.grad is None
    assert last.grad is None


def test_in_backward_accumulates() -> None:
    x = torch.randn(4, 64, device="cuda")
    a, b = deep(), deep()
    plain, early = optim.SGD(a.parameters(), lr=0.1), optim.SGD(b.parameters(), lr=0.1)
    handle = optim.step_in_backward(early)
    for _ in range(2):
        a(x).sum().backward()
        a(-x).square().sum().backward()
        plain.step()
        plain.zero_grad()
        with handle.accumulate():
            b(x).sum().backward()
        b(-x).square().sum().backward()
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def test_in_backward_of_several_groups_and_another_backward_inside() -> None:
    x = torch.randn(4, 64, device="cuda")
    a, b = deep(), deep()
    plain, early = (
        optim.SGD([{"params": [p], "lr": 0.01 * i} for i, p in enumerate(m.parameters())]) for m in (a, b)
    )
    optim.step_in_backward(early)

    def inside(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            b[4](x).sum().backward()

    a[4](x).sum().backward()
    plain.step()
    plain.zero_grad()
    a[:4](x).sum().backward()
    plain.step()
    h = b[:4](x)
    h.register_hook(inside)
    h.sum().backward()
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert all(p.grad is None for p in b.parameters())


def test_in_backward_refuses_sparse_gradients_alone() -> None:
    table, layer = nn.Embedding(10, 64, sparse=True).cuda(), nn.Linear(64, 64).cuda()
    optimizer = optim.SGD([*table.parameters(), *layer.parameters()], lr=0.1)
    optim.step_in_backward(optimizer)
    weights = [p.detach().clone() for p in (table.weight, layer.weight)]
    with pytest.raises(RuntimeError, match="SGD: expected dense gradients"):
        layer(table(torch.tensor([1], device="cuda"))).sum().backward()
    optimizer.step()
    assert torch.equal(table.weight, weights[0])
    assert table.weight.grad is None
    assert not torch.equal(layer.weight, weights[1])


def test_in_backward_of_a_parameter_that_left_its_group() -> None:
    layer = nn.Linear(8, 8).cuda()
    optimizer = optim.SGD(layer.parameters(), lr=0.1)
    optim.step_in_backward(optimizer)
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(RuntimeError, match="SGD: expected gradients of its parameters, got 1 of others"):
        layer(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()

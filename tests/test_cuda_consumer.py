"""The consumers on CUDA: the bits of their parts, as exact as stock, what is kept, streams, captured graphs, autocast."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from consumer_cases import CASES, seeded, tensors, with_gradients
from norm_cases import assert_as_good_as_stock
from torch.backends import cudnn

import memkit
import memkit.functional as M
from memkit.memory import measure

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")
LOW = [torch.float32, torch.float16, torch.bfloat16]
cases = pytest.mark.parametrize("name", CASES)


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    """float32 matrix products and convolutions in float32, and the same each time."""
    torch.backends.cuda.matmul.allow_tf32 = False
    with cudnn.flags(enabled=cudnn.enabled, deterministic=True, allow_tf32=False):
        yield


@pytest.mark.parametrize("dtype", LOW, ids=str)
@cases
def test_against_the_parts(name: str, dtype: torch.dtype) -> None:
    """Same kernels on same values: what differs are sums whose order cuBLAS and cuDNN choose by the layout."""
    case = CASES[name]
    leaves = tensors(case, dtype, CUDA)
    tolerance = 8 * torch.finfo(dtype).eps
    for mine, parts in zip(
        with_gradients(case.ours, leaves), with_gradients(case.parts, leaves), strict=True
    ):
        assert (mine.dtype, mine.shape) == (parts.dtype, parts.shape)
        assert (mine - parts).abs().max() <= tolerance * parts.abs().max()


@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.stock])
def test_as_exact_as_stock(name: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    leaves = tensors(case, dtype, CUDA)
    wide = [t.detach().double().requires_grad_() for t in leaves]
    grad = torch.randn_like(case.ours(*leaves))
    want = with_gradients(case.stock, wide, grad.double())
    mine, theirs = (with_gradients(f, leaves, grad) for f in (case.ours, case.stock))
    assert_as_good_as_stock(" ".join(f"t{i}" for i in range(len(mine))), mine, theirs, want, units=1)


@cases
def test_gradcheck(name: str) -> None:
    case, leaves = CASES[name], tensors(CASES[name], torch.float64, CUDA)
    assert torch.autograd.gradcheck(case.ours, leaves, fast_mode=True, nondet_tol=1e-9)


def test_bytes() -> None:
    h = torch.randn(256, 512, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
    w = torch.randn(64, 512, dtype=torch.bfloat16, device=CUDA, requires_grad=True)
    for call, wanted in (
        (lambda: M.act_linear(h * 1, w), 2.0),
        (lambda: M.glu_linear(h * 1, h * 2, w), 4.0),
        (lambda: M.dropout_linear(h * 1, w, act="gelu"), 2.0),
        (lambda: M.norm_linear(h * 1, w), 2 + 8 / 512),
        (lambda: M.norm_linear(h * 1, w, norm="rms_norm"), 2 + 4 / 512),
    ):
        call()
        assert measure(call, device="cuda").saved / h.numel() == pytest.approx(wanted, abs=0.01)


def test_running_statistics_take_no_operators() -> None:
    """One kernel moves both: operators would take longer than the norm of a small tensor."""
    x = torch.randn(4, 8, 5, 5, device=CUDA, requires_grad=True)
    w = torch.randn(2, 8, 3, 3, device=CUDA, requires_grad=True)
    mean, variance = torch.zeros(8, device=CUDA), torch.ones(8, device=CUDA)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        M.norm_act_conv2d(x, w, running_mean=mean, running_var=variance, training=True)
    called = {event.name for event in profile.events() if "::" in event.name}
    assert not called & {"aten::lerp_", "aten::mul"}
    assert mean._version == variance._version == 1


def test_autocast() -> None:
    for name in ("gelu", "swiglu", "layer_norm", "gelu dropout", "batch_norm"):
        case, leaves = CASES[name], tensors(CASES[name], torch.float32, CUDA)
        with torch.autocast("cuda", torch.bfloat16):
            mine, parts = (f(*leaves) for f in (case.ours, case.parts))
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine, parts)
        grads = [torch.autograd.grad(y.float().square().sum(), leaves) for y in (mine, parts)]
        for a, b in zip(*grads, strict=True):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


def test_side_stream() -> None:
    case, leaves = CASES["swiglu"], tensors(CASES["swiglu"], torch.float32, CUDA)
    want = with_gradients(case.parts, leaves)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = with_gradients(case.ours, leaves)
    torch.cuda.current_stream().wait_stream(stream)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_captured_graph() -> None:
    x = torch.randn(64, 96, device=CUDA, requires_grad=True)
    w = torch.randn(32, 96, device=CUDA, requires_grad=True)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(M.act_linear(x, w).square().sum() + M.norm_linear(x, w).sum(), [x, w])

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        x.normal_()
    graph.replay()
    for a, b in zip(captured, step(), strict=True):
        torch.testing.assert_close(a, b)


@cases
def test_lean(name: str) -> None:
    case, leaves = CASES[name], tensors(CASES[name], torch.float32, CUDA)
    want = with_gradients(case.ours, leaves)
    with memkit.lean():
        got = with_gradients(case.ours, leaves)
    assert torch.equal(got[0], want[0])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", [name for name in CASES if "dropout" not in name])
def test_compiles_without_a_break(name: str, backend: str) -> None:
    case, leaves = CASES[name], tensors(CASES[name], torch.float32, CUDA)
    want = with_gradients(case.ours, leaves)
    torch._dynamo.reset()
    compiled = torch.compile(case.ours, backend=backend, fullgraph=True)
    for a, b in zip(with_gradients(compiled, leaves), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_seed_is_the_same_on_both_devices() -> None:
    x = torch.randn(64, 96)
    outs = [
        seeded(
            lambda x, d=d: M.dropout_linear(
                x.to(d), torch.eye(96, device=d), generator=torch.Generator().manual_seed(1)
            )
        )(x).cpu()
        for d in ("cpu", CUDA)
    ]
    assert torch.equal(outs[0] == 0, outs[1] == 0)
    assert F.linear(x, torch.eye(96)).shape == outs[0].shape

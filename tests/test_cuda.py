"""The CUDA kernels: values and gradients of every activation, and the ways a GPU program runs them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from activation_cases import BIT_MODES, CASES, DTYPES, HALVES, MODES, generator, keep
from activation_cases import modes as all_modes
from torch import Tensor, nn

import memkit.functional as M
import memkit.nn
from memkit._reference import ACTIVATIONS, reference, stock
from memkit.memory import measure

pytestmark = pytest.mark.cuda

CUDA = torch.device("cuda")

# One rounding of the result, and the few of float's own functions.
RTOL = {torch.float32: 2e-6, torch.float64: 1e-13, torch.float16: 6e-4, torch.bfloat16: 4.5e-3}
ATOL = {torch.float32: 1e-6, torch.float64: 1e-13, torch.float16: 1e-6, torch.bfloat16: 1e-6}
# Added in the slope where it comes from a rounded output: of a monotone function; of another, next to its minimum y0,
# where y wrong by r costs up to sqrt(2 f'' r): half a unit in the last place in the halves, 1.5 in float and double.
FROM_OUTPUT = {torch.float32: 1e-5, torch.float64: 1e-13, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
AT_MINIMUM = {torch.float32: 2.5e-4, torch.float64: 1e-8, torch.float16: 9.5e-3, torch.bfloat16: 2.7e-2}
# Where the slope jumps, a rounded output may stand for the other side.
KINKS = {
    "hardsigmoid": (-3, 3),
    "hardswish": (-3, 3),
    "relu6": (0, 6),
    "hardtanh": (-1, 1),
    "hardtanh(-2, 0.5)": (-2, 0.5),
}

SOME = [
    "leaky_relu(0.2)",
    "gelu",
    "hardswish",
]  # for what does not depend on the formula; the last two keep bits
cases = pytest.mark.parametrize("case", CASES)
some_cases = pytest.mark.parametrize("case", SOME)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
modes = pytest.mark.parametrize("mode", MODES + BIT_MODES)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return (torch.randn(shape, generator=generator(seed), dtype=torch.float64) * 2.5).to(dtype)


def run(case: str, x: Tensor, bias: Tensor | None = None, dim: int = -1, **how: object) -> Tensor:
    name, params = CASES[case]
    if bias is None:
        return getattr(M, name)(x, **params, **how)
    if case == "gelu(tanh)":
        name, params = "gelu_tanh", {}
    return M.bias_act(x, bias, name, dim=dim, **params, **how)


def unaligned(x: Tensor) -> Tensor:
    """One element off the alignment of vector loads."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


def check(
    case: str,
    x: Tensor,
    mode: str,
    bias: Tensor | None = None,
    dim: int = -1,
    layout: Callable[[Tensor], Tensor] = lambda x: x,
) -> None:
    """Value and gradients on CUDA against float64 on the CPU."""
    if mode not in all_modes(case):
        return
    name, params = CASES[case]
    dtype = x.dtype
    grad = sample(*x.shape, dtype=dtype, seed=1)
    leaf = layout(x.to(CUDA)).requires_grad_()
    bias_leaf = None if bias is None else bias.to(CUDA).requires_grad_()
    start = layout(leaf * 1) if "inplace" in mode else leaf
    result = run(case, start, bias_leaf, dim, **keep(mode))
    assert (result is start) == ("inplace" in mode)
    result.backward(grad.to(CUDA))

    exact = x.double().clone().requires_grad_()
    expected = reference(name, exact, bias, dim, **params)
    (slope,) = torch.autograd.grad(expected.sum(), exact)
    point = reference("leaky_relu", x, bias, dim, negative_slope=1.0)  # x plus bias

    def close(got: Tensor, wanted: Tensor, atol: Tensor | float) -> None:
        got = got.double().cpu()
        bad = ~((got - wanted).abs() <= atol + RTOL[dtype] * wanted.abs())
        assert not bad.any(), (
            f"{case} {dtype} {tuple(x.shape)} {mode}: {int(bad.sum())} of {bad.numel()} differ, the first at "
            f"{point[bad][0].item()}: got {got[bad][0].item()}, expected {wanted[bad][0].item()}"
        )

    close(result.detach(), expected.detach(), ATOL[dtype])
    allowed = torch.full_like(slope, ATOL[dtype])
    if mode in ("output", "inplace"):
        allowed += FROM_OUTPUT[dtype] if ACTIVATIONS[name].minimum is None else AT_MINIMUM[dtype]
        for kink in KINKS.get(case, ()):
            allowed[(point - kink).abs() <= 4 * RTOL[dtype]] = 1
    close(leaf.grad, slope * grad.double(), (allowed + ATOL[dtype]) * grad.double().abs() + ATOL[dtype])
    if bias is not None:
        others = [d for d in range(x.dim()) if d != dim % x.dim()]
        terms, got = leaf.grad.double(), bias_leaf.grad.double()
        assert ((got - terms.sum(others)).abs() <= RTOL[dtype] * terms.abs().sum(others) + ATOL[dtype]).all()


# -- values and gradients ----------------------------------------------------------------------------------------------


@cases
@dtypes
@modes
def test_sizes(case: str, dtype: torch.dtype, mode: str) -> None:
    for shape in [(0,), (1,), (7,), (8,), (9,), (1023,), (3, 5, 7), (4, 0, 2), (1 << 18,), ((1 << 17) + 13,)]:
        check(case, sample(*shape, dtype=dtype), mode)


BIASES = [  # shape, dim: words of bias, single elements of it, channels of all lengths
    ((37, 64), -1),
    ((5, 4, 1000), -1),
    ((7, 5), -1),
    ((513, 1), -1),
    ((64, 3), 0),
    ((3, 5, 4, 4), 1),
    ((2, 6, 7, 7), 1),
    ((4, 3, 1, 2), 1),
    ((2, 3, 32, 32), -3),
    ((1, 2, 5001), 1),
]


@cases
@dtypes
@modes
def test_bias(case: str, dtype: torch.dtype, mode: str) -> None:
    for shape, dim in BIASES:
        check(case, sample(*shape, dtype=dtype), mode, sample(shape[dim], dtype=dtype, seed=2), dim)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "unaligned": unaligned,
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "with gaps": lambda x: F.pad(x, (0, 3))[..., : x.size(-1)],
}


@some_cases
@dtypes
@modes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(case: str, dtype: torch.dtype, mode: str, layout: str) -> None:
    x = sample(3, 24, 5, 5, dtype=dtype)
    check(case, x, mode, layout=LAYOUTS[layout])
    check(case, x, mode, sample(24, dtype=dtype, seed=2), 1, LAYOUTS[layout])


@dtypes
@modes
def test_each_path_of_the_kernels(dtype: torch.dtype, mode: str) -> None:
    for case in ("leaky_relu(0.2)", "silu"):
        for n in (1, 7, 1023, 2048):
            check(case, sample(n, dtype=dtype), mode)
        check(case, sample(1031, dtype=dtype), mode, layout=unaligned)
        for shape, dim in (((37, 64), -1), ((7, 300), 0), ((259, 5), -1)):
            check(case, sample(*shape, dtype=dtype), mode, sample(shape[dim], dtype=dtype, seed=2), dim)


@cases
@dtypes
def test_special_values(case: str, dtype: torch.dtype) -> None:
    name, params = CASES[case]
    info = torch.finfo(dtype)
    positive = torch.tensor(
        [0.0, info.tiny / 4, info.tiny, info.max / 8, torch.inf, torch.nan], dtype=torch.float64
    )
    x = torch.cat([positive, -positive]).to(dtype)
    got, wanted = run(case, x.to(CUDA)).cpu(), reference(name, x, **params).to(dtype)
    torch.testing.assert_close(got, wanted, rtol=2 * RTOL[dtype], atol=ATOL[dtype], equal_nan=True)
    for mode in all_modes(case):
        grads = []
        for device in (CUDA, torch.device("cpu")):
            leaf = torch.full((9,), torch.nan, dtype=dtype, device=device).requires_grad_()
            run(case, leaf * 1, **keep(mode)).sum().backward()
            grads.append(leaf.grad.cpu())
        # A derivative that is all comparisons has a number for NaN too, as in PyTorch.
        assert torch.equal(*(grad.nan_to_num(7.0) for grad in grads)), mode


@dtypes
def test_what_lies_beside_is_not_touched(dtype: torch.dtype) -> None:
    for n in (1, 8, 1023, 5000):
        for offset in (0, 1, 8):
            whole = torch.full((n + 64,), 0.25, dtype=dtype, device=CUDA)
            M.gelu(whole[16 + offset : 16 + offset + n], inplace=True)
            assert (whole[: 16 + offset] == 0.25).all()
            assert (whole[16 + offset + n :] == 0.25).all()
            assert (whole[16 + offset : 16 + offset + n] != 0.25).all()


@dtypes
def test_more_elements_than_the_grid_covers_at_a_time(dtype: torch.dtype) -> None:
    x = torch.randn(48_000_005, dtype=dtype, device=CUDA)
    torch.testing.assert_close(M.silu(x), F.silu(x), rtol=2 * RTOL[dtype], atol=ATOL[dtype])
    y, grad = x.clone().requires_grad_() * 1, torch.randn_like(x)
    (got,) = torch.autograd.grad(M.relu(y), y, grad)
    assert torch.equal(got, torch.where(x > 0, grad, 0))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("case", ["gelu", "leaky_relu(0.2)"])
def test_more_than_two_billion_elements(case: str, dtype: torch.dtype) -> None:
    name, params = CASES[case]
    n, part = (1 << 31) + (1 << 20) + 9, 1 << 27
    if torch.cuda.mem_get_info()[0] < 8 * 2 * n:
        pytest.skip(f"needs {8 * 2 * n >> 30} GiB of free GPU memory")
    leaf = torch.empty(n, dtype=dtype, device=CUDA).normal_().requires_grad_()
    result = run(case, leaf * 1, inplace=True)
    result.backward(torch.ones_like(result))
    for begin in range(0, n, part):
        window = slice(begin, begin + part)
        x = leaf.detach()[window].float().requires_grad_()
        expected = stock(name, x, **params)
        (slope,) = torch.autograd.grad(expected.sum(), x)
        error = (result.detach()[window].float() - expected.detach()).abs()
        assert (error <= ATOL[dtype] + RTOL[dtype] * expected.detach().abs()).all(), begin
        assert ((leaf.grad[window].float() - slope).abs() <= 1.1 * AT_MINIMUM[dtype]).all(), begin


# -- streams, devices, graphs ------------------------------------------------------------------------------------------


def test_runs_on_the_current_stream() -> None:
    source = sample(1 << 20).to(CUDA)
    x = torch.zeros_like(source)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # on any other stream the kernel would be done before the copy
        x.copy_(source)
        M.gelu(x, inplace=True)
        result = x.clone()
    stream.synchronize()
    torch.testing.assert_close(result, F.gelu(source.double()).float(), rtol=2e-6, atol=1e-6)


def test_backward_runs_on_the_stream_of_its_forward() -> None:
    source = sample(1 << 20).to(CUDA).requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        y = M.gelu(source * 1, inplace=True)
    torch.cuda.current_stream().wait_stream(stream)
    y.sum().backward()
    torch.cuda.synchronize()
    expected = source.detach().clone().requires_grad_()
    F.gelu(expected).sum().backward()
    torch.testing.assert_close(source.grad, expected.grad, rtol=2e-6, atol=AT_MINIMUM[torch.float32])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_runs_on_the_device_of_its_tensors() -> None:
    with torch.cuda.device(0):
        x = sample(1000).to("cuda:1").requires_grad_()
        y = M.gelu(x * 1, inplace=True)
        y.sum().backward()
        assert torch.cuda.current_device() == 0
    assert y.device == x.grad.device == torch.device("cuda:1")
    torch.testing.assert_close(y.detach().cpu(), F.gelu(sample(1000).double()).float(), rtol=2e-6, atol=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_bias_on_another_device_is_refused() -> None:
    with pytest.raises(RuntimeError, match="expected input and bias on one device, got cuda:0 and cuda:1"):
        M.bias_act(torch.ones(4, 8, device="cuda:0"), torch.ones(8, device="cuda:1"))


def test_a_bias_on_the_cpu_is_refused() -> None:
    with pytest.raises(RuntimeError, match="expected input and bias on one device, got cuda:0 and cpu"):
        M.bias_act(torch.ones(4, 8, device=CUDA), torch.ones(8))


def block(act: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), act, nn.Linear(256, 64)).to(CUDA)


def test_a_captured_training_step_replays() -> None:
    model, plain = block(memkit.nn.GELU(inplace=True)), block(nn.GELU())
    x = torch.zeros(32, 64, device=CUDA)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(stream)
    model.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = model(x).square().mean()
        loss.backward()
    for seed in range(3):
        data = sample(32, 64, seed=seed).to(CUDA)
        x.copy_(data)
        graph.replay()
        plain.zero_grad()
        expected = plain(data).square().mean()
        expected.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-5)
        for got, wanted in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.grad, wanted.grad, rtol=1e-3, atol=1e-4)


# -- mixed precision, compile, measure ---------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
def test_autocast_with_a_gradient_scaler(inplace: bool) -> None:
    models = [block(memkit.nn.GELU(inplace=inplace)), block(nn.GELU())]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
        for seed in range(3):
            with torch.autocast("cuda", dtype=torch.float16):
                out = model(sample(32, 64, seed=seed).to(CUDA))
                assert out.dtype == torch.float16
                loss = out.float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 1024.0  # no step was left out for an infinity
    for got, wanted in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-3)


def test_bias_is_cast_under_autocast() -> None:
    x, bias = sample(16, 64).half().to(CUDA), sample(64, seed=1).to(CUDA).requires_grad_()
    with torch.autocast("cuda", dtype=torch.float16):
        y = M.bias_act(x, bias)
    y.float().sum().backward()
    assert y.dtype == torch.float16
    assert bias.grad.dtype == torch.float32


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("inplace", [False, True])
def test_compiles_without_a_break(backend: str, inplace: bool) -> None:
    def step(x: Tensor, bias: Tensor) -> Tensor:
        return M.silu(M.bias_act(x * 1, bias, "gelu", inplace=inplace) * 2, inplace=inplace).square().sum()

    gradients = []
    for fn in (step, torch.compile(step, backend=backend, fullgraph=True)):
        x, bias = sample(64, 96).to(CUDA).requires_grad_(), sample(96, seed=1).to(CUDA).requires_grad_()
        fn(x, bias).backward()
        gradients.append((x.grad, bias.grad))
    for eager, compiled in zip(*gradients, strict=True):
        torch.testing.assert_close(compiled, eager, rtol=1e-3, atol=2e-3)


def test_measure_counts_what_is_saved() -> None:
    x = torch.randn(1 << 20, device=CUDA, requires_grad=True)
    bits = x.numel() // 8

    assert measure(lambda: F.gelu(x * 1)).saved == x.nbytes
    for how, saved in (
        ({}, x.nbytes),
        ({"save": "output"}, x.nbytes + bits),
        ({"inplace": True}, x.nbytes + bits),
    ):
        m = measure(lambda how=how: M.gelu(x * 1, **how))
        assert m.device.type == "cuda"
        assert m.saved == saved, how
    out_of_place, in_place = measure(lambda: M.relu(x * 1)), measure(lambda: M.relu(x * 1, inplace=True))
    assert (out_of_place.peak, in_place.peak) == (2 * x.nbytes, x.nbytes)

"""The norms' CUDA kernels: as exact as on the CPU, on every stream, in a captured graph, with the choice of what is kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_cases import DTYPES, KINDS, LOW, assert_as_good_as_stock, inputs, normal, uniform
from torch import Tensor, nn

import memkit.functional as M
import memkit.nn
from memkit._reference_norm import STOCK, run
from memkit.memory import measure

pytestmark = pytest.mark.cuda
CUDA = torch.device("cuda")
OPS = ("layer_norm", "rms_norm")


def rows(op: str, columns: int, rows: int, dtype: torch.dtype, kind: str = "normal") -> list[Tensor]:
    tensors = [inputs(kind, (rows, columns), dtype), uniform((columns,), dtype, 1, 0.5, 1.5)]
    if op == "layer_norm":
        tensors.append(uniform((columns,), dtype, 2, -0.3, 0.3))
    return [t.to(CUDA) for t in tensors]


def of(function: Callable[..., Any], op: str, columns: int, **keep: Any) -> Callable[..., Any]:
    eps = 1e-6 if op == "rms_norm" else 1e-5
    return lambda x, *p: function(x, (columns,), *p, eps, **keep)


@pytest.mark.parametrize("columns", [1, 7, 24, 513, 1000, 1024, 2048, 3001, 5120, 8192, 9000, 20_000])
@pytest.mark.parametrize("dtype", LOW, ids=str)
@pytest.mark.parametrize("save", ["input", "output"])
@pytest.mark.parametrize("op", OPS)
def test_rows(op: str, save: str, dtype: torch.dtype, columns: int) -> None:
    save = "auto" if save == "output" and columns < 8 else save  # where the output is not exact for rms_norm
    tensors = rows(op, columns, 67, dtype)
    grads = [normal((67, columns), dtype, 3).to(CUDA)]
    want = run(of(STOCK[op], op, columns), tensors, grads, torch.float64)
    mine = run(of(getattr(M, op), op, columns, save=save), tensors, grads)
    theirs = run(of(STOCK[op], op, columns), tensors, grads)
    assert_as_good_as_stock(
        "y input weight bias"[: 14 if op == "rms_norm" else None], mine, theirs, want, units=1
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_kinds_of_input(op: str, kind: str) -> None:
    tensors, grads = rows(op, 768, 300, torch.float32, kind), [normal((300, 768), torch.float32, 3).to(CUDA)]
    want = run(of(STOCK[op], op, 768), tensors, grads, torch.float64)
    mine, theirs = (
        run(of(getattr(M, op), op, 768), tensors, grads),
        run(of(STOCK[op], op, 768), tensors, grads),
    )
    assert_as_good_as_stock(
        "y input weight bias"[: 14 if op == "rms_norm" else None], mine, theirs, want, units=1
    )


@pytest.mark.parametrize("op", OPS)
def test_float64_unaligned_and_many_rows(op: str) -> None:
    for columns, count in ((24, 5), (33, 5), (4100, 3), (16, 50_000)):
        tensors = rows(op, columns, count, torch.float64)
        shifted = torch.cat([tensors[0].new_zeros(1), tensors[0].flatten()])[1:].view(tensors[0].shape)
        grads = [normal((count, columns), torch.float64, 3).to(CUDA)]
        want = run(of(STOCK[op], op, columns), tensors, grads)
        for x in (tensors[0], shifted):
            for a, b in zip(
                run(of(getattr(M, op), op, columns), [x, *tensors[1:]], grads), want, strict=True
            ):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_residual(dtype: torch.dtype) -> None:
    x, residual, weight = (normal(s, dtype, i).to(CUDA) for i, s in enumerate([(64, 512), (64, 512), (512,)]))
    grads = [normal((64, 512), dtype, 5 + i).to(CUDA) for i in range(2)]
    tolerance = {"rtol": 10 * torch.finfo(dtype).eps, "atol": 30 * torch.finfo(dtype).eps}
    weight = weight.abs() + 0.5
    want = run(
        lambda *t: STOCK["add_rms_norm"](*t[:2], (512,), t[2], 1e-6),
        [x, residual, weight],
        grads,
        torch.float64,
    )
    for inplace in (False, True):
        mine = run(
            lambda *t, k=inplace: M.add_rms_norm(t[0], t[1] * 1, (512,), t[2], 1e-6, inplace=k),
            [x, residual, weight],
            grads,
        )
        for a, b in zip(mine, want, strict=True):
            scale = b.abs().max().clamp_min(1)
            torch.testing.assert_close(a.double() / scale, b / scale, **tolerance)


def test_deterministic() -> None:
    tensors, grads = (
        rows("layer_norm", 1024, 5000, torch.float32),
        [normal((5000, 1024), torch.float32, 3).to(CUDA)],
    )
    first, second = (run(of(M.layer_norm, "layer_norm", 1024), tensors, grads) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_the_choice_follows_the_weights_without_waiting() -> None:
    x = normal((4, 64), torch.float32, 0).to(CUDA)
    norm = memkit.nn.LayerNorm(64).to(CUDA)

    def settled() -> str | None:
        for _ in range(2):  # the first may find a measurement running, of the weights before
            norm(x)
            torch.cuda.synchronize()
        return M.norm_saves(norm(x))

    assert settled() == "output"
    with torch.no_grad():
        norm.weight[3] = 0
    assert settled() == "input"
    with torch.no_grad():
        norm.weight[3] = 1
    assert settled() == "output"


@pytest.mark.parametrize("op", OPS)
def test_bytes_kept_under_autocast(op: str) -> None:
    columns = 1024
    norm = {"layer_norm": memkit.nn.LayerNorm, "rms_norm": memkit.nn.RMSNorm}[op]
    net = nn.Sequential(norm(columns), nn.Linear(columns, 8)).to(CUDA)
    x = normal((64, columns), torch.bfloat16, 0).to(CUDA).requires_grad_()
    with torch.autocast("cuda", torch.bfloat16):
        for _ in range(2):
            net(x)
            torch.cuda.synchronize()
        saved = measure(lambda: net(x), device=CUDA).saved
    assert saved <= x.numel() * 2 + 4 * 64 + 8 * columns * 2 + 8 * 2


def test_captured_graph() -> None:
    norm = memkit.nn.RMSNorm(256).to(CUDA)
    x = normal((32, 256), torch.float32, 0).to(CUDA).requires_grad_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            norm(x).square().sum().backward()
        norm.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        out = norm(x)
        out.square().sum().backward()
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(out, F.rms_norm(x, (256,), norm.weight))


# Rows enough, in the layout of columns, that a device is filled by threads that hold their channels' terms, are among them.
@pytest.mark.parametrize(
    "shape",
    [
        (9, 24, 31, 33),
        (400, 24),
        (9, 16, 77),
        (3, 20, 8, 8),
        (5000, 3),
        (9001, 40),
        (10, 264, 30, 29),
        (9001, 35),
    ],
)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", LOW, ids=str)
def test_channels(dtype: torch.dtype, last: bool, shape: tuple[int, ...]) -> None:
    x = normal(shape, dtype, 0).to(CUDA)
    if last and len(shape) == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    parameters = [uniform((shape[1],), dtype, 1, -1.5, 1.5).to(CUDA), normal((shape[1],), dtype, 2).to(CUDA)]
    tensors, grads = [x, *parameters], [normal(shape, dtype, 5).to(CUDA)]
    for act in (None, "silu", "gelu"):

        def call(function: Callable[..., Any], act: str | None = act) -> Callable[..., Any]:
            return lambda x, *p: function(x, None, None, *p, True, 0.1, 1e-5, act=act)

        want = run(call(STOCK["batch_norm_act"]), tensors, grads, torch.float64)
        mine, theirs = (
            run(call(M.batch_norm_act), tensors, grads),
            run(call(STOCK["batch_norm_act"]), tensors, grads),
        )
        assert mine[0].stride() == x.stride()
        assert_as_good_as_stock("y input weight bias", mine, theirs, want, units=2)
    if shape[1] % 4 == 0:
        want = run(lambda x, *p: F.group_norm(x, 4, *p), tensors, grads, torch.float64)
        mine = run(lambda x, *p: M.group_norm(x, 4, *p), tensors, grads)
        theirs = run(lambda x, *p: F.group_norm(x, 4, *p), tensors, grads)
        assert_as_good_as_stock("y input weight bias", mine, theirs, want, units=2)


# Groups (0: batch norm), then the shape. A block does a whole statistic, but for the last ones: groups of more channels than
# it keeps terms of, and large statistics that are few.
STATISTICS = [
    (0, (4, 6, 16, 16)),
    (0, (3, 5, 7, 7)),
    (0, (16, 4, 3)),
    (0, (1, 3, 49)),
    (0, (20, 200, 1, 2)),  # short, and too many on an emulated GPU
    (4, (3, 8, 16, 16)),
    (2, (3, 6, 7, 7)),
    (2, (5, 6)),
    (8, (2, 8, 4, 4)),
    (1, (2, 100, 3)),
    (1, (1, 7, 520)),  # a thread's range is of two channels
    (2, (2, 12, 14, 14)),
    (2, (2, 512, 8)),
    (3, (2, 6, 64, 49)),
    (0, (4, 3, 48, 48)),
    (2, (2, 514, 8)),
    (0, (3, 1, 128, 112)),
    (1, (1, 11, 64, 49)),
]


def norm_of(groups: int, act: str | None = None, stock: bool = False) -> Callable[..., Any]:
    if groups:
        return lambda x, *p: (F if stock else M).group_norm(x, groups, *p)
    batch = STOCK["batch_norm_act"] if stock else M.batch_norm_act
    return lambda x, *p: batch(x, None, None, *(p or (None, None)), True, 0.1, 1e-5, act=act)


def channel_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, mean: float = 0.5
) -> tuple[list[Tensor], list[Tensor]]:
    """Input, weight, bias; gradient."""
    x = normal(shape, dtype, 0, mean)
    weight, bias = uniform(shape[1:2], dtype, 1, -1.5, 1.5), normal(shape[1:2], dtype, 2)
    return [x.to(CUDA), weight.to(CUDA), bias.to(CUDA)], [normal(shape, dtype, 3).to(CUDA)]


def unaligned(x: Tensor) -> Tensor:
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize(("groups", "shape"), STATISTICS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_whole_statistics(dtype: torch.dtype, groups: int, shape: tuple[int, ...]) -> None:
    tensors, grads = channel_inputs(shape, dtype)
    for act in (None, "silu") if groups == 0 else (None,):
        for count in (3, 1):  # with parameters, without
            mine, theirs = norm_of(groups, act), norm_of(groups, act, stock=True)
            own = tensors[:count]
            want = run(theirs, own, grads, torch.float64)
            stock = run(theirs, own, grads)
            for x in (own[0], unaligned(own[0])):
                got = run(mine, [x, *own[1:]], grads)
                if dtype == torch.float64:
                    for a, b in zip(got, want, strict=True):
                        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
                else:
                    names = "y input weight bias" if count == 3 else "y input"
                    assert_as_good_as_stock(names, got, stock, want, units=2)


@pytest.mark.parametrize(("groups", "shape"), STATISTICS, ids=str)
def test_whole_statistics_of_a_large_mean(groups: int, shape: tuple[int, ...]) -> None:
    tensors, grads = channel_inputs(shape, torch.float32, 1e4)
    tensors[0][:, : max(1, shape[1] // 2)] += 3e4  # and groups of channels that differ
    want = run(norm_of(groups, stock=True), tensors, grads, torch.float64)
    stock = run(norm_of(groups, stock=True), tensors, grads)
    assert_as_good_as_stock("y input weight bias", run(norm_of(groups), tensors, grads), stock, want, units=2)


@pytest.mark.parametrize(("groups", "shape"), STATISTICS, ids=str)
def test_whole_statistics_in_the_gradients_memory(groups: int, shape: tuple[int, ...]) -> None:
    """That of a copy which is the norm's own. And every time the same bits."""
    for dtype in (torch.float32, torch.bfloat16):
        tensors, [grad] = channel_inputs(shape, dtype)
        strided = torch.stack([grad, grad], -1)[..., 0]
        assert not strided.is_contiguous()
        want, got = (run(norm_of(groups, "silu"), tensors, [g]) for g in (grad, strided))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("groups", "shape"), STATISTICS, ids=str)
def test_whole_statistics_of_another_dtype_than_the_result(groups: int, shape: tuple[int, ...]) -> None:
    [x, *parameters], [grad] = channel_inputs(shape, torch.float32)
    x = x.bfloat16()

    def under_autocast(x: Tensor, *p: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return norm_of(groups)(x, *p).float()

    want = run(norm_of(groups, stock=True), [x, *parameters], [grad], torch.float64)
    for a, b in zip(run(under_autocast, [x, *parameters], [grad]), want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=1e-2 * b.abs().max().item())


@pytest.mark.parametrize("shape", [shape for groups, shape in STATISTICS if groups == 0], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whole_statistics_move_the_running_ones(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = normal(shape, torch.float32, 0, 2).to(CUDA)
    want = [torch.zeros(shape[1], device=CUDA), torch.ones(shape[1], device=CUDA)]
    got = [t.to(dtype) for t in want]
    for _ in range(2):
        F.batch_norm(x, *want, training=True, momentum=0.25)
        M.batch_norm_act(x, *got, training=True, momentum=0.25)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b.to(dtype), rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_is_one_operator(training: bool) -> None:
    """Nothing of PyTorch's beside it: a small tensor would take longer for that than for the norm."""
    norm = memkit.nn.BatchNorm2d(8, act="silu").to(CUDA).train(training)
    norm.num_batches_tracked = None  # which PyTorch counts on a GPU
    x = normal((4, 8, 5, 5), torch.float32, 0).to(CUDA).requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        norm(x)
    called = {event.name for event in profile.events() if "::" in event.name}
    assert called == {"memkit::_batch_norm"}


@pytest.mark.parametrize("op", OPS)
def test_what_the_caller_insists_on_is_judged_by_the_weights_as_they_are(op: str) -> None:
    """Whatever is known of them so far: nothing in the first call, and of those before where they have changed since."""
    x = normal((4, 64), torch.float32, 0).to(CUDA)
    function = {"layer_norm": M.layer_norm, "rms_norm": M.rms_norm}[op]
    weight = torch.zeros(64, device=CUDA, requires_grad=True)
    for refused in ("expected, with save='output', finite weights", "expected, in place, finite weights"):
        with pytest.raises(ValueError, match=refused):
            function(x * 1, (64,), weight, inplace="in place" in refused, save="output")
    for value in (1.0, 2.0):
        with torch.no_grad():
            weight.fill_(value)
        h = x * 1
        assert function(h, (64,), weight, inplace=True).data_ptr() == h.data_ptr()
        with torch.no_grad():
            weight[3] = 0
        torch.cuda.synchronize()
        function(x, (64,), weight)
        torch.cuda.synchronize()
        with pytest.raises(ValueError, match="expected, in place, finite weights"):
            function(x * 1, (64,), weight, inplace=True)
    assert function(x, (64,), torch.ones_like(weight).requires_grad_(), save="output").requires_grad

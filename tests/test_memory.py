"""memkit.memory counts exactly: every number here was worked out by hand."""

import gc
import os
import threading
import time
import warnings
from dataclasses import replace

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from memkit import _C
from memkit.memory import Measurement, measure, timeline

N = 1000
BYTES = 4 * N  # of a float32 tensor of N elements


@pytest.fixture
def x():
    return torch.arange(1.0, N + 1)


@pytest.fixture
def w():
    return torch.linspace(-1, 1, N, requires_grad=True)


def active_hooks():
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


# -- counts ------------------------------------------------------------------------------------------------------------


def free_the_first(x):
    first = x.clone()
    del first
    return x.clone()


def grow_and_shrink(x):
    storage = x.clone().untyped_storage()
    storage.resize_(2 * BYTES)  # the old block lives until it is copied
    storage.resize_(8)
    return storage


CASES = {  # name: (function, peak, live with the result alive, allocations)
    "nothing": (lambda x: x, 0, 0, 0),
    "clone": (lambda x: x.clone(), BYTES, BYTES, 1),
    "chain": (lambda x: x.exp().neg().abs(), 2 * BYTES, BYTES, 3),
    "result dropped": (lambda x: x.clone().numel(), BYTES, 0, 1),
    "freed before the next": (free_the_first, BYTES, BYTES, 2),
    "in place": (lambda x: x.clone().add_(x).mul_(x), BYTES, BYTES, 1),
    "out=": (lambda x: torch.exp(x, out=torch.empty(N)), BYTES, BYTES, 1),
    "empty": (lambda x: torch.empty(0), 0, 0, 0),
    "one byte": (lambda x: torch.empty(1, dtype=torch.uint8), 1, 1, 1),
    "resize_": (lambda x: torch.empty(10).resize_(100), 440, 400, 2),
    "storage resize_": (grow_and_shrink, 3 * BYTES, 8, 3),
    "set_": (lambda x: torch.empty(0).set_(x), 0, 0, 0),
    "views": (lambda x: [x.clone().view(10, 100).t()[1:], x[3:], x.expand(5, N)], BYTES, BYTES, 1),
    "part of a storage": (lambda x: x.clone()[:1], BYTES, BYTES, 1),
    "meta": (lambda x: torch.empty(N, device="meta"), 0, 0, 0),
    "numpy": (lambda x: torch.from_numpy(numpy.zeros(N)), 0, 0, 0),
    "numpy's view of a tensor": (lambda x: x.clone().numpy(), BYTES, BYTES, 1),
    "frombuffer": (lambda x: torch.frombuffer(bytearray(N), dtype=torch.uint8), 0, 0, 0),
    "tensor of a list": (lambda x: torch.tensor([1.0, 2.0]), 8, 8, 1),
    "shared memory": (lambda x: x.clone().share_memory_(), BYTES, 0, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_counts(case, x):
    fn, peak, live, allocations = CASES[case]
    for _ in range(2):
        got = measure(fn, x)
        assert (got.peak, got.live, got.allocations) == (peak, live, allocations)
        assert (got.saved, got.saved_total) == (0, 0)


def test_result_arguments_and_time(x):
    got = measure(lambda a, b=0: (time.sleep(0.02), a + b)[1], x, b=x)
    assert torch.equal(got.result, x + x)
    assert 0.02 <= got.seconds < 5
    assert got.device == torch.device("cpu")
    assert isinstance(got, Measurement)


def test_memory_of_before_that_is_freed_inside(x):
    held = [x.clone(), x.clone()]
    got = measure(held.pop)
    assert (got.peak, got.live, got.allocations) == (0, 0, 0)  # `result` has it
    got = measure(held.clear)
    assert (got.peak, got.live, got.allocations) == (0, -BYTES, 0)
    held.append(x.clone())
    got = measure(lambda: (held.clear(), x.clone())[1])
    assert (got.peak, got.live, got.allocations) == (0, 0, 1)


def test_memory_of_inside_that_is_freed_after(x):
    tap = _C.Tap()
    got = measure(x.clone)
    assert tap.read() == (BYTES, BYTES, 1)
    del got
    assert tap.read() == (0, BYTES, 1)


def test_garbage_of_before_does_not_count(x):
    gc.collect()
    cycle = [x.clone()]
    cycle.append(cycle)
    del cycle
    got = measure(lambda: (gc.collect(), x.clone())[1])
    assert (got.peak, got.live) == (BYTES, BYTES)


def test_forward_and_backward(w):
    # exp keeps its output; the sum, its gradient; backward: the gradient of w, which stays.
    got = measure(lambda: w.exp().sum().backward())
    assert (got.peak, got.live, got.allocations) == (2 * BYTES + 8, BYTES, 4)
    # Again: the new gradient is added to the old one and dropped.
    got = measure(lambda: w.exp().sum().backward())
    assert (got.peak, got.live) == (2 * BYTES + 8, 0)
    got = measure(lambda: setattr(w, "grad", None))
    assert (got.peak, got.live) == (0, -BYTES)


def test_memory_inside_kernels_is_seen():
    image, kernel = torch.randn(1, 16, 32, 32), torch.randn(16, 16, 3, 3)
    got = measure(F.conv2d, image, kernel, padding=1)
    assert got.live == image.nbytes
    assert got.peak > got.live
    query = torch.randn(1, 2, 128, 64)
    got = measure(F.scaled_dot_product_attention, query, query, query)
    assert got.live == query.nbytes
    assert got.peak > got.live


def test_onednn_allocates_through_the_tap():
    layer = nn.Linear(64, 64, dtype=torch.bfloat16)
    data = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    for approximate in ("none", "tanh"):
        got = measure(
            lambda approximate=approximate: F.gelu(layer(data), approximate=approximate).sum().backward()
        )
        assert got.allocations > 0
    packed = measure(torch.Tensor.to_mkldnn, torch.randn(16, 16))
    assert packed.live == 1024
    assert measure(torch.Tensor.to_dense, packed.result).live == 1024


def test_equal_runs_are_equal():
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(8 * 36, 10)
    )
    data = torch.randn(4, 3, 8, 8)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        F.cross_entropy(model(data), torch.zeros(4, dtype=torch.long)).backward()
        optimizer.step()

    step()
    first = measure(step)
    assert first.live == 0
    assert all(measure(step) == first for _ in range(3))


def test_out_of_memory_is_torchs_error():
    with pytest.raises(RuntimeError, match=f"you tried to allocate {1 << 56} bytes"):
        measure(torch.empty, 1 << 54)


# -- several at once ---------------------------------------------------------------------------------------------------


def test_nested(x):
    inner = []

    def fn():
        kept = x.clone()
        inner.append(measure(lambda: x.exp().neg()))
        return kept

    outer = measure(fn)
    assert (inner[0].peak, inner[0].live, inner[0].allocations) == (2 * BYTES, BYTES, 2)
    assert (outer.peak, outer.live, outer.allocations) == (3 * BYTES, 2 * BYTES, 3)


def test_nested_saved(w):
    inner = []

    def fn():
        a = w.exp()
        inner.append(measure(lambda: a.exp()))
        return inner[0].result.sin()

    outer = measure(fn)
    # Outside: both exp and the input of sin, which is the second one's output. Inside: the second one's output.
    assert (inner[0].saved, outer.saved) == (BYTES, 2 * BYTES)
    outer.result.sum().backward()
    v = w.detach().clone().requires_grad_()
    v.exp().exp().sin().sum().backward()
    assert torch.equal(w.grad, v.grad)


def test_taps_that_overlap(x):
    a = _C.Tap()
    kept = x.clone()
    b = _C.Tap()
    more = x.clone()
    a.stop()
    del kept
    assert (a.read(), b.read()) == ((2 * BYTES, 2 * BYTES, 2), (0, BYTES, 1))
    b.stop()
    b.stop()
    del more
    assert b.read() == (0, BYTES, 1)
    assert a.covers(x.clone().untyped_storage()._cdata)
    assert not a.covers(x.untyped_storage()._cdata)


def test_all_threads_count(x):
    def work():
        kept.append(x.clone())
        x.exp()

    def fn():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    kept = []
    got = measure(fn)
    assert (got.live, got.allocations) == (4 * BYTES, 8)
    assert 4 * BYTES <= got.peak <= 8 * BYTES


def test_many_blocks_on_many_threads():
    """Sizes of tens of thousands of living blocks, come and gone in random order."""

    def work(seed):
        order = torch.randperm(20000, generator=torch.Generator().manual_seed(seed)).tolist()
        held = [torch.empty(i % 97 + 1, dtype=torch.uint8) for i in order]
        for i in order[:10000]:
            held[i] = None
        kept.append(held)

    def fn():
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    kept = []
    got = measure(fn)
    alive = sum(t.nbytes for held in kept for t in held if t is not None)
    assert got.live == alive
    assert measure(kept.clear).live == -alive


def test_measuring_in_two_threads(x):
    """Each measurement sees what the other's thread allocates."""
    started, done = threading.Event(), threading.Event()
    results = []

    def waiting():
        started.set()
        done.wait(10)

    other = threading.Thread(target=lambda: results.append(measure(waiting)))
    other.start()
    started.wait(10)
    mine = measure(x.clone)
    done.set()
    other.join()
    assert mine.live == results[0].live == BYTES


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_fork_while_other_threads_allocate(x):
    def work():
        while not stop.is_set():
            x.clone()

    stop = threading.Event()
    churn = threading.Thread(target=work)
    tap = _C.Tap()
    churn.start()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            for _ in range(20):
                child = os.fork()
                if child == 0:
                    os._exit(0 if torch.empty(N).numel() == N else 1)
                assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        churn.join()
    assert tap.read()[0] == 0


def test_an_error_leaves_nothing_on(x):
    def fail():
        x.clone()
        raise KeyError("mine")

    for call in (measure, timeline):
        with pytest.raises(KeyError, match="mine"):
            call(fail)
        assert active_hooks() is None
    assert measure(x.clone).peak == BYTES


# -- the tap and torch -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tapped", [False, True])
def test_the_profiler_sees_allocations_as_ever(tapped, x):
    tap = _C.Tap() if tapped else None
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        kept = x.clone()
        x.exp()
    events = {event.key: event for event in profiler.key_averages()}
    assert events["aten::clone"].cpu_memory_usage == BYTES
    assert events["aten::exp"].cpu_memory_usage == BYTES
    assert events["[memory]"].cpu_memory_usage == -BYTES
    assert kept.data_ptr() % 64 == 0
    if tap is not None:
        assert tap.read()[0] == BYTES


def test_overhead_is_small():
    """Generous, as machines are noisy: the tap adds 5 to 7% to creating and dropping an 8-element tensor."""

    def quickest():
        best = float("inf")
        for _ in range(50):
            begin = time.perf_counter()
            for _ in range(500):
                torch.empty(8)
            best = min(best, time.perf_counter() - begin)
        return best

    off = quickest()
    tap = _C.Tap()
    on = quickest()
    tap.stop()
    assert on < 2 * off


# -- timeline ----------------------------------------------------------------------------------------------------------


def test_timeline(x):
    points = timeline(lambda: x.exp().neg().abs())
    assert [live for _, live in points] == [BYTES * n for n in (0, 1, 2, 1, 2, 1, 0, 0)]
    times = [seconds for seconds, _ in points]
    assert times == sorted(times)
    assert times[0] == 0


def test_timeline_agrees_with_measure():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    data = torch.randn(32, 64)

    def step():
        model(data).square().mean().backward()

    step()
    got = measure(step)
    points = timeline(step, device="cpu")
    assert max(live for _, live in points) == got.peak
    assert points[-1][1] == got.live == 0
    assert len(points) == 2 * got.allocations + 2


@pytest.mark.parametrize("limit", [1, 8, 10, 63])
def test_a_long_timeline_is_thinned_out_and_keeps_its_peak(limit, x):
    tap = _C.Tap(samples=limit)
    for i in range(1000):
        torch.empty(i % 10 + 1)
        if i == 617:
            x.clone()
    tap.stop()
    points = tap.samples()
    assert limit // 2 <= len(points) <= limit + 3
    assert max(live for _, live in points) == tap.read()[1] == BYTES
    assert points[-1][1] == 0
    assert points == sorted(points, key=lambda point: point[0])
    assert tap.samples() == points


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [measure, timeline])
def test_arguments_are_checked(call, monkeypatch):
    name = call.__name__
    with pytest.raises(TypeError, match=f"{name}: expected a callable, got int"):
        call(3)
    for device in ("meta", "nonsense", 2.5, torch.device("meta")):
        with pytest.raises(ValueError, match=f"{name}: expected device None, 'cpu' or 'cuda', got "):
            call(lambda: 1, device=device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"{name}: expected a CUDA device .* there are 0, got 'cuda:1'"):
        call(lambda: 1, device="cuda:1")


def test_a_measurement_prints_itself(x):
    text = str(measure(lambda: [torch.empty(1 << 20), x.clone()]))
    assert text.startswith("peak 4.004 MiB, live 4.004 MiB, saved 0 B, 2 allocations, ")
    assert text.endswith(" ms on cpu")
    got = measure(x.clone)
    assert str(replace(got, seconds=0.0123)).endswith(" 12.3 ms on cpu")
    assert str(replace(got, seconds=0.9999)).endswith(" 1.00 s on cpu")
    assert str(replace(got, seconds=1234.5)).endswith(" 1234.50 s on cpu")
    assert "tensor" not in repr(got)
    with pytest.raises(AttributeError):
        got.peak = 0

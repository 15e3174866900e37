"""memkit.memory on CUDA: the arithmetic of the meter on a made-up allocator, and the numbers on a device."""

import types

import pytest
import torch
from torch import nn

from memkit.memory import _meters, measure, timeline

N = 1000
BYTES = 4 * N  # of a float32 tensor of N elements


class FakeCuda:
    """The parts of torch's CUDA allocator that the meter reads: counters with one peak, and a history."""

    def __init__(self, monkeypatch):
        self.current = self.peak = self.allocations = 0
        self.history, self.recording, self.clock = [], False, 0
        cuda = torch.cuda
        monkeypatch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.recording, raising=False)
        monkeypatch.setattr(cuda, "get_allocator_backend", lambda: "native")
        monkeypatch.setattr(cuda, "synchronize", lambda device: setattr(self, "clock", self.clock + 10))
        monkeypatch.setattr(cuda, "memory_stats", self.stats)
        monkeypatch.setattr(
            cuda, "reset_peak_memory_stats", lambda device: setattr(self, "peak", self.current)
        )
        monkeypatch.setattr(cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(cuda.memory, "_snapshot", lambda device: {"device_traces": [list(self.history)]})
        monkeypatch.setattr(_meters.time, "time_ns", lambda: self.clock * 1000)

    def stats(self, device):
        return {
            "requested_bytes.all.current": self.current,
            "requested_bytes.all.peak": self.peak,
            "allocation.all.allocated": self.allocations,
        }

    def record(self, enabled, clear_history=False, **options):
        self.recording = enabled is not None
        if clear_history:
            self.history.clear()

    def event(self, action, address, size):
        self.clock += 10
        if action == "alloc":
            self.current += size
            self.allocations += 1
        elif action == "free_requested":
            self.current -= size
        self.peak = max(self.peak, self.current)
        if self.recording:
            self.history.append({"action": action, "addr": address, "size": size, "time_us": self.clock})


def stored_at(address):
    return types.SimpleNamespace(address=address)


def test_cuda_meter_on_a_made_up_allocator(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    device = torch.device("cuda", 0)
    cuda.event("alloc", 1, 1000)
    cuda.event("alloc", 2, 500)
    outer, inner = _meters.CudaMeter(device), _meters.CudaMeter(device)
    outer.start()
    weight = outer.mark(stored_at(1))
    old = outer.mark(stored_at(2))
    cuda.event("alloc", 3, 50)
    young = outer.mark(stored_at(3))
    cuda.event("free_requested", 2, 500)
    inner.start()
    cuda.event("alloc", 2, 300)
    reused = outer.mark(stored_at(2))
    cuda.event("snapshot", 0, 0)
    cuda.event("alloc", 4, 400)
    cuda.event("free_requested", 4, 400)
    inner.stop()
    assert cuda.recording  # the outer one still needs it
    cuda.event("alloc", 4, 100)
    outer.stop()
    assert not cuda.recording
    assert inner.counts() == _meters.Counts(live=300, peak=700, allocations=2)
    assert outer.counts() == _meters.Counts(live=-50, peak=250, allocations=4)
    assert [live for _, live in outer.samples()] == [0, 50, -450, -150, 250, -150, -50]
    assert [live for _, live in inner.samples()] == [0, 300, 700, 300]
    assert outer.samples()[1] == (1e-5, 50)
    assert [outer.is_new(mark) for mark in (weight, old, young, reused)] == [False, False, True, True]
    assert not _meters.CudaMeter._running


@pytest.mark.cuda
def test_cuda_counts():
    x = torch.arange(1.0, N + 1, device="cuda")
    got = measure(lambda: x.exp().neg())
    assert got.device == torch.device("cuda", torch.cuda.current_device())
    assert (got.peak, got.live, got.allocations) == (2 * BYTES, BYTES, 2)
    held = [x.clone()]
    assert measure(held.clear, device="cuda").live == -BYTES
    inner = []
    outer = measure(lambda: (x.exp().neg(), inner.append(measure(x.clone))), device="cuda")
    assert (outer.peak, inner[0].peak) == (2 * BYTES, BYTES)
    assert [live for _, live in timeline(lambda: x.exp().neg(), device="cuda")] == [
        0,
        BYTES,
        2 * BYTES,
        BYTES,
        0,
    ]


@pytest.mark.cuda
def test_cuda_saved():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to("cuda", torch.bfloat16)
    data = torch.randn(128, 64, device="cuda", dtype=torch.bfloat16)

    def step():
        model.zero_grad()
        model(data).square().mean().backward()

    step()
    elements = 128 * 256
    assert measure(model, data).saved == 4 * elements
    # zero_grad frees memory of before, which activations may take: they count all the same. Beside: square's input.
    assert measure(step, device="cuda").saved == 4 * elements + 2 * data.numel()

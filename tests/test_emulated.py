"""The emulated GPU (tests/simt): what it must not let pass."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

NAME = "the CPU (simt)"
emulated = torch.cuda.is_available() and torch.cuda.get_device_name() == NAME
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not emulated, reason="needs the emulated GPU")]


def test_a_stream_that_does_not_wait_is_too_early() -> None:
    side = torch.cuda.Stream()
    x, y = torch.zeros(8, device="cuda"), torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        x.fill_(1)
    y.copy_(x)
    torch.cuda.current_stream().synchronize()
    assert y.eq(0).all()
    torch.cuda.current_stream().wait_stream(side)
    y.copy_(x)
    assert y.eq(1).all()


def test_memory_reused_too_early_is_wrong() -> None:
    side = torch.cuda.Stream()
    x = torch.zeros(8, device="cuda")
    result = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        result.copy_(x)
    x.fill_(1)  # nobody said that the other stream still reads it
    torch.cuda.current_stream().synchronize()
    torch.cuda.synchronize()
    assert result.eq(1).all()


def test_pinned_memory_is_read_late_and_other_memory_at_once() -> None:
    pinned, plain = torch.zeros(8).pin_memory(), torch.zeros(8)
    x = pinned.to("cuda", non_blocking=True)
    y = plain.to("cuda", non_blocking=True)
    pinned.fill_(1)
    plain.fill_(1)
    assert x.eq(1).all()
    assert y.eq(0).all()


def test_an_event_is_late_until_somebody_waits() -> None:
    event = torch.cuda.Event()
    torch.zeros(8, device="cuda").fill_(1)
    event.record()
    assert not event.query()
    event.synchronize()
    assert event.query()


def test_the_host_cannot_touch_device_memory() -> None:
    code = "import ctypes, memkit, torch; x = torch.ones(8, device='cuda'); ctypes.string_at(x.data_ptr(), 4)"
    assert subprocess.run([sys.executable, "-P", "-c", code]).returncode < 0


def test_a_capture_records_and_does_nothing() -> None:
    x, graph = torch.zeros(8, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        y = x * 2
    assert x.eq(0).all()
    for value in (1, 2):
        graph.replay()
        assert x.eq(value).all()
        assert y.eq(2 * value).all()


INVALID_CAPTURE = """
import memkit, torch
event, x = torch.cuda.Event(), torch.zeros(8, device="cuda")
event.record()
here = torch.cuda.current_stream()
try:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.add_(1)
        {forbidden}
except RuntimeError as error:
    assert "apture" in str(error), error
else:
    raise AssertionError("a capture that survives")
torch.cuda.set_stream(here)
torch.cuda.synchronize()
assert x.eq(0).all()
"""


@pytest.mark.parametrize("forbidden", ["torch.cuda.synchronize()", "event.query()", "event.synchronize()"])
def test_what_a_capture_forbids_spoils_it(forbidden: str) -> None:
    """In a process of its own, as torch does not go back to the stream from there."""
    subprocess.run([sys.executable, "-P", "-c", INVALID_CAPTURE.format(forbidden=forbidden)], check=True)


def test_a_device_is_full() -> None:
    total = torch.cuda.mem_get_info()[1]
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")


def test_a_kernel_of_pytorchs_is_refused() -> None:
    x = torch.ones(1, 1, 2, 8, dtype=torch.float16, device="cuda")
    with pytest.raises(RuntimeError, match="cudaErrorNotSupported"):
        torch._scaled_dot_product_flash_attention(x, x, x)

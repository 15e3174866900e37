"""Which tests run where: `cuda` needs a device and a CUDA build; `slow` is left out by `make test`."""

from __future__ import annotations

import pytest
import torch

from memkit import _build_info


def without_cuda() -> str | None:
    """Why the tests marked `cuda` cannot run here."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if _build_info.CUDA is None:
        return f"memkit was built without CUDA: {_build_info.WITHOUT_CUDA}"
    return None


def pytest_report_header() -> list[str]:
    cuda = without_cuda() or f"{torch.cuda.get_device_name()}, built for {_build_info.CUDA_ARCHS}"
    return [f"torch {torch.__version__}, {torch.get_num_threads()} threads, CUDA: {cuda}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = without_cuda()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every engine that this machine has."""
    return torch.device(request.param)

"""Which tests run where: `cuda` needs a device and a CUDA build; `slow` is left out by `make test`."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bench_cases import ROOT, bench

from memkit import Pool, _build_info
from memkit.bench import data
from memkit.swap import types


def without_cuda() -> str | None:
    """Why the tests marked `cuda` cannot run here."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if _build_info.CUDA is None:
        return f"memkit was built without CUDA: {_build_info.WITHOUT_CUDA}"
    return None


def pytest_report_header() -> list[str]:
    cuda = without_cuda() or f"{torch.cuda.get_device_name()}, built for {_build_info.CUDA_ARCHS}"
    if _build_info.WITHOUT_CUDA == "MEMKIT_CUDA=simt":
        cuda = "its kernels, played on the CPU, serve the tensors there"
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


@pytest.fixture(autouse=True)
def seed() -> None:
    """The same numbers in whatever order tests run."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def frozen() -> None:
    """What is there before a test, modules for the most part, is passed over by each `gc.collect()` in it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def current_stream() -> Iterator[None]:
    """On a GPU torch stays on its stream: torch.cuda.graph does not go back from a capture that ends invalid."""
    before = torch.cuda.current_stream() if torch.cuda.is_initialized() else None
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # what a kernel did wrong is this test's, not the next one's
    assert before is None or torch.cuda.current_stream() == before


def pytest_runtest_logfinish() -> None:
    """A kernel's fault leaves the process without a GPU: pytest-xdist goes on in another."""
    if torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except RuntimeError as error:
            if "PYTEST_XDIST_WORKER" in os.environ:
                os._exit(70)
            pytest.exit(f"the GPU is lost to this process: {error}", returncode=70)


@pytest.fixture
def repeatable() -> Iterator[None]:
    """One thread, where tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For a whole file: nothing in it is large enough for two, and on a busy machine they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def bench_extra() -> None:
    """Skips where the packages of memkit's extra `bench` are not there."""
    for package in ("tokenizers", "sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(package)


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "CORPUS_BYTES", 100_000)


@pytest.fixture(scope="module")
def job(
    bench_extra: None, one_thread: None, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """One tiny run of the main job, without torch.compile, and what it wrote."""
    out = tmp_path_factory.mktemp("bench") / "results"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "CORPUS_BYTES", 100_000)
        assert bench("--variants eager,memkit", out) == 0
    return out, json.loads((out / "bench.json").read_text())


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """benchmarks/report.py and benchmarks/bench_activation.py, as modules."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_activation
    import report

    return report, bench_activation


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Of the size that the test file names in POOL; sound at the end, and empty."""
    with Pool(getattr(request.module, "POOL", "8MiB")) as made:
        yield made
        gc.collect()
        assert made.stats().live_blocks == 0
        made.check()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """(op, whether the input was overwritten) of each call that swapped modules make in the test."""
    seen = []
    real = types._C

    class Recorder:
        @staticmethod
        def activation(op: str, input: torch.Tensor, *rest: Any) -> torch.Tensor | None:
            before = input.data_ptr() if isinstance(input, torch.Tensor) else None
            out = real.activation(op, input, *rest)
            seen.append((op, out is not None and out.data_ptr() == before))
            return out

    monkeypatch.setattr(types, "_C", Recorder)
    return seen

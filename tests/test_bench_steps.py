"""benchmarks/bench_steps.py: steps of variants, and the search for the largest batch."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import pytest
import torch
from bench_cases import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = "--device cpu --tiny --quick --no-compile --models gpt --steps 2 --dropout 0"


@pytest.fixture(scope="module")
def script() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import bench_steps

        yield bench_steps


@pytest.fixture(scope="module")
def result(script: ModuleType, one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("steps") / "steps-cpu.json"
    assert script.main(f"{TINY} --budget 2500KiB --json {file}".split()) == 0
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_steps(result: dict[str, Any]) -> None:
    assert result["kind"] == "memkit-steps"
    assert {"date", "commit", "hardware", "versions"} <= set(result)
    variants = result["models"]["gpt"]["variants"]
    assert list(variants) == ["eager", "liger", "memkit", "memkit+optimizer"]
    assert variants.pop("liger")["absent"] in ("not installed", "needs a GPU")
    eager, swapped = variants["eager"], variants["memkit"]
    assert swapped["saved_bytes"] < eager["saved_bytes"]
    assert swapped["peak_bytes"] < eager["peak_bytes"]
    for found in variants.values():
        assert found["step"]["rounds"] == 2
        assert found["losses"] == pytest.approx(eager["losses"], abs=0.05)
        assert found["loss_final"] < found["losses"][0]


def test_largest_batch_within_the_budget(script: ModuleType, result: dict[str, Any]) -> None:
    variants = result["models"]["gpt"]["variants"]
    for name in ("eager", "memkit", "memkit+optimizer"):
        found = variants[name]["search"]
        assert found["held_bytes"] < found["peak_bytes"] <= result["options"]["budget"]
        assert found["tried"][str(found["largest"])]
        assert not found["tried"][str(found["largest"] + 1)]
    assert variants["memkit"]["search"]["largest"] > variants["eager"]["search"]["largest"]


@pytest.mark.parametrize(("limit", "grain"), [(0, 1), (1, 1), (37, 1), (100, 16), (900, 16)])
@pytest.mark.parametrize("guess", [-5, 1, 38, 1000])
def test_search(script: ModuleType, limit: int, grain: int, guess: int) -> None:
    tried = []

    def fits(rows: int) -> bool:
        tried.append(rows)
        return rows <= limit

    assert script.largest(fits, guess, grain) == limit // grain * grain
    assert len(set(tried)) == len(tried) <= 20
    assert all(rows > 0 and rows % grain == 0 for rows in tried)


def test_out_of_memory_does_not_fit(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    args = script.arguments(TINY.split())
    trials = script.Trials(script.MODELS["gpt"](args), "eager", args)
    step = trials.trainer.step

    def limited(batch: Any) -> torch.Tensor:
        if len(batch[0]) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return step(batch)

    monkeypatch.setattr(trials.trainer, "step", limited)
    assert script.largest(trials.fits, 5) == 3
    assert trials.tried == {5: False, 4: False, 2: True, 3: True}


def test_what_raises_is_one_line_of_the_result(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(self: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no\nsuch kernel")

    monkeypatch.setattr(script.Trainer, "_memkit_loss", broken)
    assert script.main(f"{TINY} --variants eager,memkit --budget 2MiB".split()) == 0
    said = capsys.readouterr().out
    assert "RuntimeError: no\n" in said
    assert "stock eager" in said


@pytest.mark.parametrize("argv", ["--variants memkit", "--budget much", "--models gpt2", "--steps 0"])
def test_options(script: ModuleType, argv: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.arguments(argv.split())


def test_table(scripts: tuple[ModuleType, ModuleType], script: ModuleType, result: dict[str, Any]) -> None:
    report = scripts[0]
    assert report.TABLES["steps"]({}) == "Not yet run on a GPU."
    gpu = result | {"hardware": result["hardware"] | {"device": "cuda", "gpu": "A GPU"}}
    table = report.TABLES["steps"]({(script.KIND, "cuda"): gpu})
    assert "| largest batch in 2.4 MiB |" in table
    assert "| gpt | memkit | 2 |" in table
    assert "A GPU" in table


@pytest.mark.cuda
def test_the_limit_is_put_back(script: ModuleType) -> None:
    before = torch.cuda.get_per_process_memory_fraction()
    with script.memory_limit(1 << 30, "cuda"), pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    assert torch.cuda.get_per_process_memory_fraction() == before

"""benchmarks/bench_matrix.py: what makes a cell pass, and the engines' own code against the stock step."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import memkit
from memkit.bench.zoo import Subject, cross_entropy

ROOT = Path(__file__).resolve().parents[1]
MODEL = "nn.TransformerEncoder"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def cells(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from matrix import cells

    return cells


@pytest.fixture
def script(cells: ModuleType) -> ModuleType:
    import bench_matrix

    return bench_matrix


def subject() -> Subject:
    """The zoo's encoder, smaller."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Subject(model.train(), (torch.randn(2, 8, 32),))


class Broken(nn.Module):
    """Another's forward, and then something else."""

    def __init__(self, model: nn.Module, scale: float) -> None:
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale == 0:
            raise ValueError("wrong\nwith words")
        return self.model(x) * self.scale


def cell_of(
    cells: ModuleType, monkeypatch: pytest.MonkeyPatch, column: str, stock: float, ours: float
) -> Any:
    made = subject()
    models = [Subject(Broken(copy.deepcopy(made.model), scale), made.sample) for scale in (stock, ours)]
    monkeypatch.setattr(cells, "pair", lambda name, autocast: models)
    cells.rounding.cache_clear()
    return cells.verdict([cells.examine(MODEL, column, True)], 1.0)


@pytest.mark.parametrize(
    "column", ["plain", "AMP", "checkpoint", "checkpoint reentrant", "checkpoint selective"]
)
def test_cells_are_what_gradients_say(
    cells: ModuleType, monkeypatch: pytest.MonkeyPatch, column: str
) -> None:
    assert cell_of(cells, monkeypatch, column, 1.0, 1.0).state == cells.PASSES
    wrong = cell_of(cells, monkeypatch, column, 1.0, 1.5)
    assert wrong.state == cells.FAILS
    assert "from stock's, the bound is" in wrong.reason
    nan = cell_of(cells, monkeypatch, column, 1.0, float("nan"))
    assert nan.state == cells.FAILS
    raised = cell_of(cells, monkeypatch, column, 1.0, 0.0)
    assert (raised.state, raised.reason) == (cells.FAILS, "ValueError: wrong with words")


def test_rounding_is_forgiven_where_stock_needs_it(
    cells: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cells, "FLOAT", 0.0)
    monkeypatch.setattr(cells, "rounded_otherwise", lambda sample: tuple(x * 1.2 for x in sample))
    assert cell_of(cells, monkeypatch, "plain", 1.0, 1.01).state == cells.PASSES
    monkeypatch.setattr(cells, "rounded_otherwise", lambda sample: sample)
    assert cell_of(cells, monkeypatch, "plain", 1.0, 1.01).state == cells.FAILS


def test_a_row_starts_anew_behind_what_fails(cells: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def attempt(name: str, columns: list[str], stock_runs: bool = True) -> Any:
        attempts.append((*columns, stock_runs))
        for column in columns:
            error = "" if column == "plain" else "it failed"
            yield [cells.Answer(column, 0.0, 1.0, error, of_stock=stock_runs and column == "AMP")], 1.0
            if error:
                return

    monkeypatch.setattr(cells, "attempt", attempt)
    told = {}
    cells.row(MODEL, ["plain", "AMP", "export", "DDP"], lambda column, cell: told.update({column: cell}))
    assert {column: cell["state"] for column, cell in told.items()} == {
        "plain": cells.PASSES,
        "AMP": cells.STOCK_TOO,
        "export": cells.FAILS,
        "DDP": cells.FAILS,
    }
    assert attempts == [
        ("plain", "AMP", "export", True),
        ("AMP", False),
        ("export", True),
        ("DDP", True),
    ]


def test_stages_of_a_pipeline_are_the_model(cells: ModuleType) -> None:
    from matrix.pipeline import Stage, inputs

    stock = subject()
    memkit.swap(stock.model, sample=stock.sample)
    loss = cross_entropy(stock.model(*stock.sample))
    loss.backward()
    first, second = (Stage(copy.deepcopy(subject().model), inputs(stock), rank) for rank in (0, 1))
    travelling = first(**inputs(stock))
    received = [x.detach().requires_grad_() for x in travelling]
    out = cross_entropy(second(*received, **inputs(stock)))
    out.backward()
    torch.autograd.backward(travelling, [x.grad for x in received])
    torch.testing.assert_close(out, loss)
    parts = zip(first.model.parameters(), second.model.parameters(), strict=True)
    for (one, other), whole in zip(parts, stock.model.parameters(), strict=True):
        assert (one.grad is None) != (other.grad is None)
        torch.testing.assert_close(one.grad if other.grad is None else other.grad, whole.grad)


def test_blocks_and_plans(cells: ModuleType) -> None:
    from matrix.engines import plan_of
    from matrix.step import blocks

    model = subject().model
    assert blocks(model) == ["layers.0", "layers.1"]
    assert {path: type(style).__name__ for path, style in plan_of(model).items()} == {
        f"layers.{i}.linear{k}": f"{side}Parallel"
        for i in (0, 1)
        for k, side in ((1, "Colwise"), (2, "Rowwise"))
    }
    bottleneck = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
    stages = nn.ModuleDict(
        {"stem": nn.Conv2d(3, 4, 1), "stages": nn.Sequential(bottleneck, copy.deepcopy(bottleneck))}
    )
    assert blocks(stages) == ["stages.0", "stages.1"]
    assert plan_of(stages) == {}


@pytest.mark.slow
def test_a_results_file_grows(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    file = tmp_path / "matrix.json"
    argv = ["--models", MODEL, "--json", str(file)]
    assert script.main([*argv, "--columns", "plain"]) == 0
    assert script.main([*argv, "--columns", "plain,DDP,TP,PP", "--resume"]) == 0
    found = json.loads(file.read_text())["cells"][MODEL]
    assert {column: cell["state"] for column, cell in found.items()} == dict.fromkeys(
        ["plain", "DDP", "TP", "PP"], "passes"
    )
    before = file.read_text()
    assert script.main([*argv, "--columns", "plain,PP", "--resume"]) == 0
    assert file.read_text() == before  # nothing was left to run


@pytest.mark.parametrize("argv", ["--models swish", "--columns swish"])
def test_options(argv: str, script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        script.main(argv.split())
    assert "expected some of" in capsys.readouterr().err

"""`memkit bench`, `memkit doctor`, the op benchmark and the README tables made from their results."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import memkit
from memkit import cli
from memkit.bench import Options, data, options, report, timing

ROOT = Path(__file__).resolve().parents[1]
TINY = "--dropout 0 --layers 1 --d-model 32 --heads 2 --seq-len 32 --vocab 400 --batch 4 --steps 4 --device cpu --quiet"

pytest.importorskip("tokenizers")
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
pytest.importorskip("tqdm")


def bench(argv: str, out: Path) -> int:
    return cli.main(["bench", *f"{TINY} {argv}".split(), "--out", str(out)])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Nothing here is large enough for two, and on a busy machine they wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "CORPUS_BYTES", 100_000)


@pytest.fixture(scope="module")
def job(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
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
    import report as readme

    return readme, bench_activation


# The main job


def test_results_file(job: tuple[Path, dict[str, Any]]) -> None:
    out, result = job
    assert result["kind"] == "memkit-bench"
    assert result["format"] == 1
    assert result["hardware"]["device"] == "cpu"
    assert result["versions"]["torch"] == torch.__version__
    assert result["date"].endswith("+00:00")
    assert "commit" in result
    assert result["options"]["seed"] == 0
    assert set(result["models"]) == {"gpt", "cnn"}
    assert (out / "memory.png").read_bytes().startswith(b"\x89PNG")
    assert str(out.parent) not in json.dumps(result), "a results file names no path of the machine"


@pytest.mark.parametrize("model", ["gpt", "cnn"])
def test_every_number_is_there(job: tuple[Path, dict[str, Any]], model: str) -> None:
    found = job[1]["models"][model]
    assert found["steps"] == 4
    for variant in found["variants"].values():
        assert len(variant["losses"]) == len(variant["step_seconds"]) == 4
        assert variant["step"]["rounds"] == 4 - options.WARM_STEPS
        assert variant["peak_bytes"] > variant["saved_bytes"] > 0
        assert variant["inference"]["peak_bytes"] > 0
        assert variant["inference"]["ratio"] > 0
        assert variant["allocations"] > 0
        highest = max(size for _, size in variant["timeline"])
        assert highest == pytest.approx(variant["peak_bytes"], rel=0.01)
        assert ("accuracy" in variant) == (model == "cnn")
    assert found["variants"]["eager"]["step"]["ratio"] == 1
    assert found["variants"]["eager"]["loss_max_difference"] == 0


@pytest.mark.parametrize("model", ["gpt", "cnn"])
def test_memkit_trains_alike_and_saves_less(job: tuple[Path, dict[str, Any]], model: str) -> None:
    eager, swapped = (job[1]["models"][model]["variants"][name] for name in ("eager", "memkit"))
    assert swapped["loss_max_difference"] < 1e-4
    assert swapped["saved_bytes"] < eager["saved_bytes"]
    assert swapped["peak_bytes"] <= eager["peak_bytes"]
    assert swapped["swap"]["changed"] > 0


def test_ablation(tmp_path: Path) -> None:
    """A row for each ingredient added; all of them are what the variant memkit is."""
    assert bench("--model gpt --variants eager,memkit --ablation --no-plot", tmp_path) == 0
    variants = json.loads((tmp_path / "bench.json").read_text())["models"]["gpt"]["variants"]
    assert list(variants) == [
        "eager",
        "memkit: activations",
        *(f"+ {part}" for part in options.INGREDIENTS[1:]),
    ]
    saved = [variant["saved_bytes"] for variant in variants.values()]
    assert saved == sorted(saved, reverse=True)
    assert all(variant["loss_max_difference"] < 1e-4 for variant in variants.values())
    assert bench("--ablation --variants eager", tmp_path) == 2
    assert bench("--ingredients salt", tmp_path) == 2
    assert bench("--ablation --pool use --variants eager,memkit", tmp_path) == 2


def test_table_and_progress(job: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    text = report.full_text(job[1])
    lines = text.splitlines()
    assert lines[0].split("  ")[0] == "model"
    assert sum(line.startswith(("gpt ", "cnn ")) for line in lines) == 4
    assert f"PyTorch {torch.__version__}" in text
    assert capsys.readouterr().err == "", "--quiet draws no progress"


def test_variant_that_cannot_run_is_a_row(job: tuple[Path, dict[str, Any]]) -> None:
    result = copy.deepcopy(job[1])
    result["models"]["gpt"]["variants"]["compile"] = {"error": "InvalidCxxCompiler: no compiler"}
    assert "did not run: InvalidCxxCompiler: no compiler" in report.full_text(result)


def test_tokens_are_cached(job: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    cache = job[0] / "cache"
    before = data.corpus_tokens(400, cache)
    monkeypatch.setattr("tokenizers.Tokenizer.train_from_iterator", None)
    assert torch.equal(data.corpus_tokens(400, cache), before)


@pytest.mark.parametrize("how", ["use", "plan"])
def test_steps_in_a_pool(
    job: tuple[Path, dict[str, Any]], how: str, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    assert bench(f"--variants eager,memkit --pool {how}", tmp_path) == 0
    result = json.loads((tmp_path / "bench.json").read_text())
    assert result["options"]["pool"] == how
    for model, found in result["models"].items():
        stock, pooled = job[1]["models"][model]["variants"]["memkit"], found["variants"]["memkit"]
        assert "pool" not in stock
        assert "pool" not in found["variants"]["eager"]
        for same in ("losses", "peak_bytes", "saved_bytes", "allocations"):
            assert pooled[same] == stock[same], same
        pool = pooled["pool"]
        assert pool["how"] == how
        assert pool["reserved_bytes"] >= pooled["peak_bytes"]
        if how == "plan":
            assert pool["planned"] * (found["steps"] - options.WARM_STEPS) == pool["served"]
            assert pool["fell_back"] == pool["gap"] == 0
            assert pool["height_bytes"] >= pooled["peak_bytes"]
    text = report.full_text(result)
    assert text.count(report.POOLED[how]) == 2
    assert (
        text.count({"use": "run inside pool.use(), with", "plan": "100.0% of their allocations get"}[how])
        == 2
    )
    assert not [str(w.message) for w in recwarn if "Pool" in str(w.message)]


@pytest.mark.slow
def test_compile_draws_the_same_masks(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    assert bench(f"--model gpt --no-plot --json {file}", tmp_path) == 0
    variants = json.loads(file.read_text())["models"]["gpt"]["variants"]
    assert list(variants) == ["eager", "compile", "memkit"]
    assert variants["compile"]["loss_max_difference"] < 1e-4
    assert not (tmp_path / "memory.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", ["--dtype bfloat16", "--amp", "--amp --inexact", "--amp --dtype float16 --inexact"]
)
def test_precisions(tmp_path: Path, precision: str) -> None:
    assert bench(f"{precision} --variants eager,memkit --no-plot", tmp_path) == 0
    for model, found in json.loads((tmp_path / "bench.json").read_text())["models"].items():
        swapped = found["variants"]["memkit"]
        assert swapped["loss_max_difference"] < 0.1
        assert swapped["saved_bytes"] < found["variants"]["eager"]["saved_bytes"]
        after = {row["after"] for row in swapped["swap"]["rows"] if row["before"] in ("GELU", "SiLU")}
        assert "unchanged" not in after
        # In half precision the slope from the output is not exact: only where that is allowed.
        if model == "gpt":
            assert bool(after & {"output", "in place"}) == ("inexact" in precision)


# Its options


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--d-model 100", "d-model must be a multiple of heads, got 100 and 6"),
        ("--batch 0", "batch must be at least 2, got 0"),
        ("--batch 1500", "batch must be at most 1437 for the cnn, which trains on as many digits, got 1500"),
        ("--steps 2", "steps must be at least 3, got 2"),
        ("--layers -1", "layers must be at least 1, got -1"),
        ("--seed -1", "seed must lie in 0 .. 2^31 - 1, got -1"),
        ("--variants memkit", "variants must contain eager"),
        ("--variants eager,fast", "variants must be of eager, compile, memkit, got fast"),
        ("--variants eager,eager", "variants must name each once, got eager, eager"),
        ("--variants ,", "variants must be of eager, compile, memkit, got nothing"),
        ("--dtype float16", "dtype float16 needs amp"),
        (
            "--pool plan --variants eager",
            "pool plan needs the variant memkit, whose step it serves, got eager",
        ),
        ("--amp --dtype float32", "amp needs dtype bfloat16 or float16"),
    ],
)
def test_options_that_cannot_run(
    argv: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert cli.main(["bench", *argv.split(), "--out", str(out)]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith(f"memkit bench: {message}")
    assert printed.out == ""
    assert not out.exists(), "nothing was done"


@pytest.mark.parametrize(
    "argv", ["--model vit", "--pool all", "--dtype int8", "--device tpu", "--steps many", "--unknown"]
)
def test_options_that_do_not_parse(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(["bench", *argv.split()])
    assert "error: " in capsys.readouterr().err


def test_out_must_be_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("")
    assert cli.main(["bench", "--out", str(tmp_path / "taken")]) == 2
    assert "out must be a folder, got the file" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_gpu() -> None:
    with pytest.raises(
        options.OptionError, match="device cuda needs a CUDA GPU and a CUDA build of torch, got"
    ):
        options.checked(Options(device="cuda"))


def test_plans_are_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(options.OptionError, match=r"pool plan needs device cpu, .*, got cuda"):
        options.checked(Options(device="cuda", pool="plan"))
    with pytest.raises(options.OptionError, match="pool must be one of none, use, plan, got all"):
        options.checked(Options(pool="all"))


# Its parts


def test_windows_are_the_next_tokens() -> None:
    batches = data.windows(torch.arange(1000), length=10, batch=3, count=5, seed=1)
    assert len(batches) == 5
    for inputs, targets in batches:
        assert inputs.shape == targets.shape == (3, 10)
        assert torch.equal(inputs + 1, targets)


def test_digits_are_split() -> None:
    batches, (images, labels) = data.digits(batch=100, count=30, seed=0)
    assert [len(targets) for _, targets in batches] == [100] * 30
    assert images.shape == (360, 1, 8, 8)
    assert images.max() == 1
    assert labels.unique().tolist() == list(range(10))


def test_turns_and_ratios() -> None:
    assert [timing.rotated("abc", turn) for turn in range(4)] == [
        list("abc"),
        list("bca"),
        list("cab"),
        list("abc"),
    ]
    calls: list[str] = []

    def contender(name: str, taken: float) -> Any:
        return lambda: calls.append(name) or taken

    times = timing.interleave({"a": contender("a", 1.0), "b": contender("b", 2.0)}, repeats=2, warm=1)
    assert times == {"a": [1.0, 1.0], "b": [2.0, 2.0]}
    assert sorted(calls) == list("aaabbb")
    # The machine became ten times slower half-way: the rounds' own ratios do not notice.
    assert timing.ratio([2.0, 2.0, 20.0], [1.0, 1.0, 10.0]) == 2.0


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert torch.__version__ in printed
    assert "ok: gelu in place" in printed
    assert all(f"\n{name:<8} ok: " in printed for name in ("kernels", "dropout", "pool", "memory"))


def test_doctor_reports_a_failed_trial(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memkit.functional, "dropout", lambda x, p: x * 2)
    assert cli.main(["doctor"]) == 1
    assert "dropout  FAILED: RuntimeError: dropout: expected" in capsys.readouterr().out


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"memkit {memkit.__version__}\n"
    with pytest.raises(SystemExit, match="0"):
        cli.main(["bench", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "of the weights (default: float32); with --amp, what autocast computes in (default: bfloat16)"
        in printed
    )
    assert "(default: None)" not in printed
    assert "(default: False)" not in printed
    assert "dropout (default: 0)" in printed


# The op benchmark and the README


@pytest.fixture(scope="module")
def ops(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results file of a small run of the op benchmark, without torch.compile."""
    file = tmp_path_factory.mktemp("ops") / "activation-cpu.json"
    argv = f"--ops relu,gelu --sizes 16Ki --dtypes float32,bfloat16 --device cpu --quick --json {file}"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import bench_activation

        patch.setattr(bench_activation, "compile_stock", lambda *args: None)
        patch.setattr(bench_activation, "OVERHEAD_CALLS", 20)
        assert bench_activation.main(argv.split()) == 0
    return file


@pytest.fixture(scope="module")
def families(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results file of one family of the script of all ops, without torch.compile."""
    file = tmp_path_factory.mktemp("families") / "ops-cpu.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import bench_ops

        argv = f"--families rotary,softmax --sizes 16Ki --device cpu --quick --no-compile --json {file}"
        assert bench_ops.main(argv.split()) == 0
    return file


def test_benchmark_of_all_ops(families: Path) -> None:
    result = json.loads(families.read_text())
    assert {case["family"] for case in result["cases"]} == {"rotary", "softmax"}
    for case in result["cases"]:
        assert case["ratio"]["stock"] == 1
        expected = {"stock", "memkit"} | ({"in_place"} if case["mode"] == "forward" else set())
        assert set(case["seconds"]) == expected
    assert not any(
        case["elements"] < 32768 and "32Ki" in case["op"] for case in result["cases"]
    )  # a row's length
    stated = {line.split(":")[0] for line in result["slower"]}
    slow = {
        f"{case['op']} {case['dtype']} {case['size']} {case['mode']}"
        for case in result["cases"]
        if case["ratio"]["memkit"] > 1.05
    }
    assert stated == slow


def test_op_benchmark(scripts: tuple[ModuleType, ModuleType], ops: Path) -> None:
    script = scripts[1]
    result = json.loads(ops.read_text())
    assert len(result["cases"]) == 2 * 2 * 2
    for case in result["cases"]:
        assert case["ratio"]["stock"] == 1
        assert {"memkit", "memkit_inplace"} <= set(case["seconds"])
    assert len(result["overhead"]) == 4
    # Slower cases are found by the numbers, whatever they are on this machine.
    result["cases"][0]["ratio"] |= {"memkit": 1.2}
    assert any("relu float32 16Ki forward: memkit takes 1.20×" in line for line in script.slower(result))


def test_op_benchmark_knows_every_activation(scripts: tuple[ModuleType, ModuleType]) -> None:
    from memkit import functional

    named = {op for op in functional._activation.__all__ if op != "bias_act"} | {"gelu_tanh"}
    assert set(scripts[1].OPS) == named


@pytest.mark.parametrize("argv", ["--ops swish", "--sizes 3", "--dtypes int8"])
def test_op_benchmark_options(
    argv: str, scripts: tuple[ModuleType, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        scripts[1].main(argv.split())
    assert "expected some of" in capsys.readouterr().err


@pytest.mark.slow
def test_op_benchmark_compiles(scripts: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    file = tmp_path / "ops.json"
    argv = f"--ops relu --sizes 16Ki,128Ki --dtypes float32 --device cpu --quick --json {file}"
    assert scripts[1].main(argv.split()) == 0
    result = json.loads(file.read_text())
    assert all("compiled" in case["ratio"] for case in result["cases"])


@pytest.fixture(scope="module")
def pool(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results file of a small run of the pool benchmark, without its C++ part."""
    file = tmp_path_factory.mktemp("pool") / "pool-cpu.json"
    row = {"bench": "holes", "allocator": "memkit", "n": 4096, "ns": 51.2}
    core = {"compiler": "none", "rows": [row, row | {"allocator": "list", "ns": 6e3}]}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import bench_pool

        patch.setattr(
            bench_pool,
            "Options",
            lambda **options: Options(layers=1, d_model=32, heads=2, vocab=400, **options),
        )
        patch.setattr(bench_pool, "BATCH", {"gpt": 2, "cnn": 2})
        patch.setattr(bench_pool, "run_core", lambda: core)
        patch.setattr(bench_pool, "stock_peak_apart", lambda batch: None)  # a full step, in another process
        patch.setattr(bench_pool, "CASES", {k: (1, v) for k, (_, v) in bench_pool.CASES.items()})
        assert bench_pool.main(f"--rounds 2 --steps 2 --batch 2 --json {file}".split()) == 0
    return file


def test_pool_benchmark(pool: Path) -> None:
    result = json.loads(pool.read_text())
    for case in result["calls"]:
        assert case["ratio"]["stock"] == 1
        assert len(case["seconds"]) > 1
    step = result["step"]
    assert step["served_by_plan"] == step["allocations"] > 50
    assert step["live_bytes"] == step["plan_bytes"] <= step["reserved_bytes"]["pool.use()"]
    names = ["gpt", "gpt_ckpt", "gpt_varlen", "step of gpt", "step of cnn"]
    assert [plan["name"] for plan in result["plans"]] == names
    assert all(plan["gap"] == 0 for plan in result["plans"])


def test_pool_benchmark_without_a_compiler(
    scripts: tuple[ModuleType, ModuleType], pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bench_pool

    monkeypatch.setenv("PATH", str(tmp_path))
    core = bench_pool.run_core()
    assert "make did not start" in bench_pool.core_table(core)
    result = json.loads(pool.read_text()) | {"core": core}
    with pytest.raises(
        scripts[0].ReportError, match="expected pool results with every part, got none of core"
    ):
        scripts[0].core_table({(result["kind"], "cpu"): result})


def test_readme_tables(
    job: tuple[Path, dict[str, Any]],
    ops: Path,
    families: Path,
    pool: Path,
    scripts: tuple[ModuleType, ModuleType],
    tmp_path: Path,
) -> None:
    readme = scripts[0]
    results = tmp_path / "results"
    for name, options_of in (("ablation", {"ablation": True}), ("bench", {"dropout": 0.1})):
        result = copy.deepcopy(job[1])
        result["options"] |= options_of
        report.write_json(result, results / f"{name}-cpu.json")
    report.write_json(job[1], results / "nodropout-cpu.json")
    shutil.copy(ops, results)
    shutil.copy(pool, results)
    shutil.copy(families, results)
    for name in ("optim", "loss", "models", "matrix"):
        shutil.copy(ROOT / "benchmarks" / "results" / f"{name}-cpu.json", results)
    file = tmp_path / "README.md"
    file.write_text(
        "".join(f"# {n}\n\n<!-- table:{n} -->\n<!-- /table:{n} -->\n\nend\n" for n in readme.TABLES)
    )
    argv = [str(file), "--results", str(results)]

    assert readme.main([*argv, "--check"]) == 1
    assert readme.main(argv) == 0
    once = file.read_text()
    assert readme.main(argv) == 0
    assert file.read_text() == once
    assert readme.main([*argv, "--check"]) == 0
    assert "| gpt | memkit |" in once
    assert "| `gelu` |" in once
    assert "| pool.replay() |" in once
    assert "| rotary, halves | float32 |" in once
    assert "| llama |" in once
    assert "| 4,096 holes | 51 ns |  | 6,000 ns |" in once
    assert "| step of cnn |" in once
    assert "not yet run on a GPU" in once
    assert once.count("\nend\n") == len(readme.TABLES)
    assert (results / "bench-cpu.png").exists()


def test_matrix_table(job: tuple[Path, dict[str, Any]], scripts: tuple[ModuleType, ModuleType]) -> None:
    import bench_matrix

    passes, error = {"state": "passes", "reason": ""}, {"state": "stock fails too", "reason": "E: a | b"}
    cells = {
        "one": {"plain": passes, "TP": {"state": "not applicable", "reason": "no pair"}, "PP": error},
        "two": {"plain": {"state": "fails", "reason": "far"}, "PP": error},
    }
    result = job[1] | {"kind": bench_matrix.KIND, "cells": cells}
    lines = scripts[0].matrix_table({(bench_matrix.KIND, "cpu"): result}).splitlines()
    assert lines[0] == "|  | plain | TP | PP |"
    assert lines[2:4] == ["| one | ✓ | – (1) | stock ✗ (2) |", "| two | ✗ (3) |  | stock ✗ (2) |"]
    assert lines[5:8] == ["1. not applicable: `no pair`", "2. stock fails too: `E: a | b`", "3. fails: `far`"]
    assert "Of 5 cells: passes 1, fails 1, stock fails too 2, not applicable 1." in lines


def test_gpu_results_change_the_support_table(
    job: tuple[Path, dict[str, Any]], scripts: tuple[ModuleType, ModuleType]
) -> None:
    gpu = copy.deepcopy(job[1])
    gpu["hardware"] |= {"device": "cuda", "gpu": "A GPU"}
    assert "run on A GPU" in scripts[0].support_table({(gpu["kind"], "cuda"): gpu})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table:speed --><!-- /table:speed -->", "expected a table of bench, .*, got speed"),
        ("<!-- table:support -->", "expected every table mark closed"),
        (
            "<!-- table:support --><!-- table:bench --><!-- /table:support -->",
            "expected every table mark closed",
        ),
        ("<!-- table:bench --><!-- /table:bench -->", "expected a results file of kind memkit-bench"),
    ],
)
def test_readme_marks_that_are_wrong(text: str, message: str, scripts: tuple[ModuleType, ModuleType]) -> None:
    with pytest.raises(scripts[0].ReportError, match=message):
        scripts[0].render(text, {})

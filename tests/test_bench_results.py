"""The op benchmark, the pool benchmark, and the README tables made from results."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
import shutil
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from bench_cases import ROOT

from memkit.bench import Options, report

pytestmark = pytest.mark.usefixtures("bench_extra", "one_thread", "small_corpus")


@pytest.fixture(scope="module")
def ops(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results file of a small run of the op benchmark, without torch.compile."""
    file = tmp_path_factory.mktemp("ops") / "activation-cpu.json"
    argv = f"--ops relu,gelu --sizes 16Ki --dtypes float32,bfloat16 --device cpu --quick --no-compile --json {file}"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import bench_activation

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


@pytest.fixture(scope="module")
def peers(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results file of the benchmark beside other libraries, of which the CPU has none; one contender always fails."""
    file = tmp_path_factory.mktemp("peers") / "peers-cpu.json"

    def broken(x: Any) -> Any:
        raise RuntimeError("no room\nfor it")

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import bench_peers

        patch.setattr(bench_peers, "FEATURES", 16)
        softmax = dataclasses.replace(bench_peers.PEERS["softmax"], in_place=broken)
        patch.setitem(bench_peers.PEERS, "softmax", softmax)
        argv = f"--sizes 32Ki --dtypes float32 --device cpu --quick --no-compile --json {file}"
        patch.setitem(bench_peers.SIZES, "32Ki", 1 << 15)
        assert bench_peers.main(argv.split()) == 0
    return file


def test_benchmark_beside_other_libraries(peers: Path) -> None:
    import bench_peers

    result = json.loads(peers.read_text())
    assert result["kind"] == "memkit-peers"
    assert result["left_out"] == {"liger": "needs a GPU"}
    assert result["versions"]["liger-kernel"] is None
    cases = {(case["op"], case["mode"]): case for case in result["cases"]}
    assert set(cases) == {(op, mode) for op in bench_peers.PEERS for mode in bench_peers.MODES}
    for (_, mode), case in cases.items():
        assert case["ratio"]["stock"] == 1
        assert {"stock", "memkit"} <= set(case["seconds"]) == set(case["peak"]) == set(case["error"])
        kinds = {"output"} if mode == "forward" else {"output", "gradient"}
        for errors in case["error"].values():
            assert kinds <= set(errors)
            assert max(errors.values()) < 5e-5  # of one row, whose loss is steep
        assert ("saved" in case) is (mode != "forward")
    losses = cases["cross_entropy", "forward+backward"]
    assert losses["peak"]["in_place"] < losses["peak"]["memkit"] < losses["peak"]["stock"]
    failed = {"op": "softmax", "dtype": "float32", "size": "32Ki", "contender": "in_place"}
    failed["error"] = "RuntimeError: no room"
    assert result["failed"] == [failed | {"mode": mode} for mode in bench_peers.MODES]


def test_inputs_of_a_peer_may_be_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a contender that writes over inputs and incoming gradients: the next one finds them as they were."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import bench_peers

    class Overwriting(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out = x.relu().square()
            ctx.x = x.detach()
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            ctx.x.relu_().mul_(2).mul_(grad)
            grad.zero_()
            return ctx.x

    work = bench_peers.Work(bench_peers.PEERS["relu_squared"], 1 << 14, torch.float32, "cpu")
    exact = work.exact()
    for function in (Overwriting.apply, work.op.stock, Overwriting.apply):
        found = work.trial(function, "forward+backward", exact, "cpu")
        assert max(found["error"].values()) < 1e-6
    contender = work.contender(Overwriting.apply, "forward+backward")
    (box, edges, upstream), *_ = contender.prepare()
    contender.call(box, edges, upstream)
    assert box == []
    assert not upstream[0].any()
    assert work.upstream[0].any()


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


def test_rounds_in_visits(scripts: tuple[ModuleType, ModuleType]) -> None:
    bench_activation = scripts[1]
    calls: list[str] = []
    seconds = {"stock": 2.0, "memkit": 1.0}

    def clock(name: str, device: str) -> float:
        calls.append(name)
        return seconds[name]

    rounds = bench_activation.Rounds(
        {name: name for name in seconds}, "cpu", budget=1e-9, clock=clock, least=4
    )
    for visit in range(1, 4):
        rounds.take(visits=3)
        assert {name: len(taken) for name, taken in rounds.times.items()} == dict.fromkeys(seconds, 2 * visit)
    assert rounds.found() == {"rounds": 6, "seconds": seconds, "ratio": {"stock": 1.0, "memkit": 0.5}}
    begins = ["stock", "memkit", "memkit", "stock", "stock", "memkit"]
    assert calls[4::2] == begins  # as if there were no visits


def test_cases_that_seem_slower_are_measured_in_more_processes(
    scripts: tuple[ModuleType, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench_activation, asked = scripts[1], []

    def case(size: str, memkit: float, **more: float) -> dict[str, Any]:
        where = {"op": "relu", "dtype": "float32", "size": size, "mode": "forward"}
        return where | {"ratio": {"stock": 1.0, "memkit": memkit} | more, "seconds": {"memkit": memkit}}

    def again(*args: Any) -> list[dict[str, Any]]:
        asked.append(args)
        return [case("1Mi", 0.9 + len(asked) / 100), case("8Mi", 2.0)]

    monkeypatch.setattr(bench_activation, "in_a_process", again)
    in_place = {"memkit_inplace": 0.5, "compiled": 3.0}
    cases = [case("16Ki", 1.01, **in_place), case("1Mi", 1.2, **in_place)]
    bench_activation.measure_suspects_again({"cases": cases})
    assert asked == [("relu", "float32", {"1Mi"}, {"forward"})] * 4
    assert cases[0] == case("16Ki", 1.01, **in_place)
    assert cases[1]["ratio"] == {"stock": 1.0, "memkit": 0.93} | in_place  # of 1.2 and 0.91 to 0.94
    assert cases[1]["seconds"] == {"memkit": 0.93}
    assert cases[1]["processes"] == 5


def test_a_first_round_that_starts_what_later_ones_use(scripts: tuple[ModuleType, ModuleType]) -> None:
    pauses = iter([0.2])

    def clock(name: str, device: str) -> float:
        time.sleep(next(pauses, 0.0))
        return 1.0

    rounds = scripts[1].Rounds({"stock": "stock"}, "cpu", budget=0.4, clock=clock, most=10)
    rounds.take()
    assert rounds.found()["rounds"] == 10


def test_an_interrupted_benchmark_keeps_what_it_measured(
    scripts: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, bench_activation = scripts
    take = bench_activation.Rounds.take
    times = iter(range(4))  # overhead without and with grad, then two cases

    def interrupted(*args: Any) -> Any:
        if next(times, None) is None:
            raise KeyboardInterrupt
        return take(*args)

    monkeypatch.setattr(bench_activation.Rounds, "take", interrupted)
    monkeypatch.setattr(bench_activation, "OVERHEAD_CALLS", 20)
    argv = f"--ops relu,gelu --sizes 16Ki --device cpu --quick --no-compile --json {tmp_path / 'activation.json'}"
    assert bench_activation.main(argv.split()) == 130
    result = json.loads((tmp_path / "activation.json").read_text())
    assert result["interrupted"]
    assert [(case["op"], case["mode"]) for case in result["cases"]] == [
        ("relu", "forward"),
        ("relu", "forward+backward"),
    ]
    assert report.load(tmp_path) == {}


@pytest.mark.slow
def test_op_benchmark_compiles(scripts: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    file = tmp_path / "ops.json"
    argv = f"--ops relu --sizes 16Ki,128Ki --dtypes float32 --device cpu --quick --json {file}"
    assert scripts[1].main(argv.split()) == 0
    result = json.loads(file.read_text())
    assert all("compiled" in case["ratio"] for case in result["cases"])


def pool_benchmark(file: Path, device: str) -> Path:
    """Runs the smallest pool benchmark, without its C++ part."""
    row = {"bench": "holes", "allocator": "memkit", "n": 4096, "ns": 51.2}
    core = {"compiler": "none", "rows": [row, row | {"allocator": "list", "ns": 6e3}]}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import bench_pool
        import pool_step

        patch.setattr(
            pool_step,
            "Options",
            lambda **options: Options(layers=1, d_model=32, heads=2, vocab=400, **options),
        )
        patch.setattr(bench_pool, "BATCH", {"gpt": 2, "cnn": 2})
        patch.setattr(bench_pool, "run_core", lambda: core)
        patch.setattr(pool_step, "resident_peak_apart", lambda batch: None)  # a full step, in another process
        patch.setattr(pool_step, "LENGTHS", 3)
        here = ("stock", "pool.use()")  # the other one needs a process of its own
        patch.setattr(
            pool_step,
            "varying_apart",
            lambda batch, device: {each: pool_step.varying(batch, device, each) for each in here},
        )
        once = {name: (1, contenders) for name, (_, contenders) in bench_pool.CASES[device].items()}
        patch.setattr(bench_pool, "CASES", {device: once})
        assert bench_pool.main(f"--device {device} --rounds 2 --steps 2 --batch 2 --json {file}".split()) == 0
    return file


@pytest.fixture(scope="module")
def pool(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pool_benchmark(tmp_path_factory.mktemp("pool") / "pool-cpu.json", "cpu")


def test_pool_benchmark(pool: Path) -> None:
    result = json.loads(pool.read_text())
    for case in result["calls"]:
        assert case["ratio"]["stock"] == 1
        assert len(case["seconds"]) > 1
    step = result["step"]
    assert step["served_by_plan"] == step["allocations"] > 50
    assert step["live_bytes"] == step["plan_bytes"] <= step["reserved_bytes"]["pool.use()"]
    lengths = result["lengths"]
    assert set(lengths) == {"stock", "pool.use()"}
    assert 0 < lengths["pool.use()"]["live"] <= lengths["pool.use()"]["reserved"]
    assert lengths["stock"]["live"] == lengths["pool.use()"]["live"]
    names = ["gpt", "gpt_ckpt", "gpt_varlen", "step of gpt", "step of cnn"]
    assert [plan["name"] for plan in result["plans"]] == names
    assert all(plan["gap"] == 0 for plan in result["plans"])


@pytest.mark.cuda
def test_pool_benchmark_on_a_gpu(scripts: tuple[ModuleType, ModuleType], tmp_path: Path) -> None:
    result = json.loads(pool_benchmark(tmp_path / "pool-cuda.json", "cuda").read_text())
    assert {"pool", "stock"} <= set(result["calls"][0]["seconds"])
    step = result["step"]
    assert 0 < step["live_bytes"] <= step["reserved_bytes"]["pool.use()"]
    assert 0 < step["live_bytes"] <= step["reserved_bytes"]["stock"]
    assert all(0 < found["live"] <= found["reserved"] for found in result["lengths"].values())
    results = scripts[0].load(tmp_path)
    assert "after empty_cache()" in scripts[0].TABLES["pool"](results)
    assert "steps of varying length" in scripts[0].TABLES["pool"](results)
    assert "run on" in scripts[0].TABLES["support"](results)


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
        scripts[0].TABLES["pool-core"]({(result["kind"], "cpu"): result})


def test_readme_tables(
    job: tuple[Path, dict[str, Any]],
    ops: Path,
    families: Path,
    peers: Path,
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
    shutil.copy(peers, results)
    for name in ("optim-cpu", "loss-cpu", "models-cpu", "matrix-cpu", "large-cuda", "checks-cuda"):
        shutil.copy(ROOT / "benchmarks" / "results" / f"{name}.json", results)
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
    assert f"<!-- table:bench -->\n**CPU, {job[1]['hardware']['cpu']}**\n\n| model |" in once
    assert "<!-- table:large -->\n**NVIDIA H200**\n\n| model |" in once
    assert "| `gelu` |" in once
    assert "| pool.replay() |" in once
    assert re.search(r"\| pool: make and drop 4 KiB \| \d+\.\d\d× \|  \|", once)
    assert re.search(
        r"\| activations in place, forward, geometric mean of \d+ cases \| \d+\.\d\d× \|  \|", once
    )
    assert re.search(r"\| `memkit.optim.AdamW`, to the fused one; its state \| \d+\.\d\d× \| 1\.00× \|", once)
    assert "| rotary, halves | float32 |" in once
    assert "| cross_entropy | float32 | 32Ki |" in once
    assert "Liger-Kernel left out (needs a GPU)" in once
    assert "| llama |" in once
    assert "| 4,096 holes | 51 ns |  | 6,000 ns |" in once
    assert "| step of cnn |" in once
    assert "not yet run on a GPU" in once
    assert "ERROR SUMMARY: 0 errors" in once
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
    lines = scripts[0].TABLES["matrix"]({(bench_matrix.KIND, "cpu"): result}).splitlines()
    assert lines[0] == "|  | plain | TP | PP |"
    assert lines[2:4] == ["| one | ✓ | – (1) | stock ✗ (2) |", "| two | ✗ (3) |  | stock ✗ (2) |"]
    assert lines[5:8] == ["1. not applicable: `no pair`", "2. stock fails too: `E: a | b`", "3. fails: `far`"]
    assert "Of 5 cells: passes 1, fails 1, stock fails too 2, not applicable 1." in lines


def test_gpu_results_change_the_support_table(
    job: tuple[Path, dict[str, Any]], scripts: tuple[ModuleType, ModuleType]
) -> None:
    gpu = copy.deepcopy(job[1])
    gpu["hardware"] |= {"device": "cuda", "gpu": "A GPU"}
    assert "run on A GPU" in scripts[0].TABLES["support"]({(gpu["kind"], "cuda"): gpu})


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

"""Options and parts of `memkit bench`; `memkit doctor`."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest
import torch

import memkit
from memkit import cli
from memkit.bench import Options, data, options, timing

pytestmark = pytest.mark.usefixtures("bench_extra", "one_thread", "small_corpus")


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


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--out {}/file/below", "out must be a folder, got the file {}/file"),
        ("--out {} --json {}/file/below.json", "json must lie in a folder, got the file {}/file"),
        ("--out {} --json {}", "json must be a file, got the folder {}"),
        ("--out /proc/memkit", "out must be a folder, got /proc/memkit: No such file or directory"),
    ],
)
def test_results_have_a_place_before_anything_runs(
    argv: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert cli.main(["bench", *argv.format(tmp_path, tmp_path).split()]) == 2
    assert capsys.readouterr().err == f"memkit bench: {message.format(tmp_path)}\n"


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
    for names in ("ab", "abc", "abcd", "abcde"):
        orders = [timing.balanced(names, turn) for turn in range(2 * len(names))]
        assert all(sorted(order) == list(names) for order in orders)
        for place in (0, -1):
            assert Counter(order[place] for order in orders) == dict.fromkeys(names, 2)
        behind = Counter(pair for order in orders for pair in pairwise(order))
        assert behind == dict.fromkeys(permutations(names, 2), 2)
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


@pytest.mark.cuda
def test_doctor_with_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Each trial on its own device: CUDA is in use by then, which is where memkit.memory looks unless told."""
    assert cli.main(["doctor"]) == 0
    printed = capsys.readouterr().out
    assert "\ncuda     ok: gelu in place" in printed
    assert "\nmemory   ok: measure sees every allocation, cpu and cuda" in printed


def test_doctor_reports_a_failed_trial(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memkit.functional, "dropout", lambda x, p: x * 2)
    assert cli.main(["doctor"]) == 1
    assert "dropout  FAILED: RuntimeError: dropout: expected" in capsys.readouterr().out


def test_python_m_memkit_is_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "memkit", "--version"], capture_output=True, text=True)
    assert run.stdout == f"memkit {memkit.__version__}\n", run.stderr


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
    assert "steps, at least 3 (default: " in printed
    assert "(default: None)" not in printed
    assert "(default: False)" not in printed
    assert "dropout (default: 0)" in printed

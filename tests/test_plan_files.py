"""memkit.plan: signatures, files, and the command."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import memkit
from memkit import cli
from memkit.plan import Plan, Plans, _canonical, _digest, read_trace, record, signature_of

TRACES = Path(__file__).parent / "traces"


@pytest.fixture
def plan():
    buffers = [(100, 0, 2), (50, 1, 4), (100, 2, 3)]
    return Plan(buffers, [0, 128, 0], 64, 192, 192, "by hand", True, signature={"batch": [8, 16]})


# -- signatures --------------------------------------------------------------------------------------------------------


def test_signatures():
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    assert signature_of(x, [1, None], flag=True) == [["bfloat16[2, 3]", [1, None]], {"flag": True}]
    assert signature_of(nn.ReLU(), float("inf")) == [["ReLU", "inf"]]
    assert record(torch.neg, x).signature == signature_of(x) == [["bfloat16[2, 3]"]]
    assert record(torch.neg, x, signature="mine").signature == "mine"


def test_plans_by_signature(tmp_path):
    plans = Plans()
    for length in (100, 400, 200):
        x = torch.ones(length)
        assert plans.get(signature_of(x)) is None
        plans.add(record(torch.neg, x))
    assert len(plans) == 3
    assert plans.height == 1600
    assert (
        repr(plans)
        == "Plans(3 of 3 buffers together, any in 1.562 KiB, at most 0.00% above what is alive at most)"
    )
    assert (
        repr(Plans())
        == "Plans(0 of 0 buffers together, any in 0 B, at most 0.00% above what is alive at most)"
    )
    assert re.fullmatch(
        r"Plan\(1 buffer in 832 B, no plan is lower \([a-z ]+\)\)", repr(plans[signature_of(x)])
    )
    assert plans[signature_of(torch.zeros(200))].height == 832
    assert signature_of(torch.zeros(7)) not in plans
    assert plans == Plans(plans.values())
    assert plans != Plans()
    with pytest.raises(KeyError):
        plans["nothing"]
    plans.add(record(torch.neg, torch.ones(100)))
    assert len(plans) == 3
    plans.save(tmp_path / "plans.json")
    assert dict(zip(map(str, plans), plans.values(), strict=True)) == {
        str(s): p for s, p in Plans.load(tmp_path / "plans.json").items()
    }
    with pytest.raises(
        ValueError, match=r"Plan\.load: .*expected a file of kind memkit-plan, got memkit-plans"
    ):
        Plan.load(tmp_path / "plans.json")


# -- files -------------------------------------------------------------------------------------------------------------


def test_round_trip(plan, tmp_path):
    path = tmp_path / "new" / "plan.json"
    plan.save(path)
    got = Plan.load(path)
    assert got == plan
    assert hash(got) == hash(plan)
    assert got.signature == {"batch": [8, 16]}
    assert (got.torch, got.memkit) == (torch.__version__, memkit.__version__)
    assert [p.name for p in path.parent.iterdir()] == ["plan.json"]
    got.save(path)
    assert Plan.load(path) == plan


CHANGES = {  # what is written over it, and the error
    "kind": ("memkit-bench", "expected a file of kind memkit-plan, got memkit-bench"),
    "format": (2, "expected format 1, got 2"),
    "alignment": (48, "expected a power of two as alignment, got 48"),
    "sizes": ([100, 50, 200], "buffers 2 and 1 overlap"),
    "lowers": ([0, 1, 1], "buffers 2 and 0 overlap"),
    "uppers": ([2, 4], "expected sizes, lowers and uppers of one length"),
    "offsets": ([0, 64, 0], "buffers 1 and 0 overlap"),
    "height": (128, "expected the height 192, got 128"),
    "lower_bound": (128, "expected the lower bound 192, got 128"),
    "optimal": (False, "expected optimal at the lower bound, got False"),
    "method": (3, "expected text as method, got 3"),
}
MORE = {
    "a negative offset": ("offsets", [0, -64, 0], "buffer 1 has the offset -64"),
    "an odd offset": ("offsets", [0, 130, 0], "buffer 1 has the offset 130"),
    "an offset beyond 63 bits": ("offsets", [0, 2**63, 0], "expected numbers of 63 bits as offsets"),
    "an end beyond 63 bits": ("offsets", [0, 2**63 - 64, 0], "expected the height|ends beyond 63 bits"),
    "too few offsets": ("offsets", [0, 128], "2 offsets for 3 buffers"),
    "a fraction": ("offsets", [0, 128.5, 0], "expected whole numbers as offsets, got 128.5"),
    "true": ("offsets", [0, 128, False], "expected whole numbers as offsets, got False"),
    "a number": ("offsets", 3, "expected a list as offsets, got int"),
    "a negative size": ("sizes", [100, -50, 100], "expected buffer 1 with a size of 0 or more"),
    "sizes beyond 63 bits": ("sizes", [2**62, 2**62, 100], "expected sizes that add up within 63 bits"),
    "a time backwards": ("uppers", [2, 0, 3], "expected buffer 1 with a size of 0 or more and an end"),
    "an unknown field": ("colour", "red", "unexpected keyword argument 'colour'"),
}


def test_nested_too_deeply(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("[" * 100_000)
    with pytest.raises(
        ValueError, match=r"^Plan\.load: .*expected a JSON object .*, got one nested too deeply"
    ):
        Plan.load(path)


@pytest.mark.parametrize(
    ("key", "value", "message"), [(k, *v) for k, v in CHANGES.items()] + list(MORE.values()), ids=str
)
def test_changed_files(plan, tmp_path, key, value, message):
    path = tmp_path / "plan.json"
    plan.save(path)
    content = json.loads(path.read_text())
    content[key] = value
    if key not in ("kind", "format"):
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match="expected the content that its sha256 names"):
            Plan.load(path)
    del content["sha256"]
    content["sha256"] = _digest(content)  # by someone who knows how
    path.write_text(_canonical(content))
    with pytest.raises(ValueError, match=message) as error:
        Plan.load(path)
    assert str(error.value).startswith(f"Plan.load: {path}: ")


@pytest.mark.parametrize("key", ["signature", "sizes", "offsets", "height", "sha256", "kind"])
def test_missing_fields(plan, tmp_path, key):
    path = tmp_path / "plan.json"
    plan.save(path)
    content = json.loads(path.read_text())
    del content[key]
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"^Plan\.load: .*expected"):
        Plan.load(path)
    if key in ("sizes", "offsets", "height"):
        del content["sha256"]
        content["sha256"] = _digest(content)
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=f"^Plan.load: .*{key}"):
            Plan.load(path)


def test_truncated_files(plan, tmp_path):
    path = tmp_path / "plan.json"
    plan.save(path)
    whole = path.read_bytes()
    for length in range(len(whole) - 2):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"^Plan\.load: "):
            Plan.load(path)
    for text in (b"\xff\xfe", b"[" * 100000, b"3", b"[]", b"NaN"):
        path.write_bytes(text)
        with pytest.raises(ValueError, match=r"^Plan\.load: "):
            Plan.load(path)
    with pytest.raises(FileNotFoundError):
        Plan.load(tmp_path / "nowhere.json")


def test_read_trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("size,id,lower,upper\n5,0,1,3\n6,1,2,4\n")
    assert read_trace(path) == [(5, 1, 3), (6, 2, 4)]
    path.write_text("size,lower,upper\n5,1,3\n", encoding="utf-8-sig")  # as spreadsheets write it
    assert read_trace(path) == [(5, 1, 3)]
    path.write_bytes(b"size,lower,upper\n5,1,\xff\n")
    with pytest.raises(ValueError, match=r"read_trace: .*expected whole numbers in line 2"):
        read_trace(path)
    path.write_text("id,lower,upper\n0,1,3\n")
    with pytest.raises(ValueError, match="expected columns size, lower and upper, got id, lower, upper"):
        read_trace(path)
    for row in ("5,0,1,x", "5,0", "5,0,1.5,2"):
        path.write_text(f"size,id,lower,upper\n{row}\n")
        with pytest.raises(ValueError, match=r"read_trace: .*expected whole numbers in line 2"):
            read_trace(path)


# -- the command -------------------------------------------------------------------------------------------------------


def test_command(tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert cli.main(["plan", "solve", str(TRACES / "gpt.csv"), "-o", str(out), "--alignment", "512"]) == 0
    assert "gap        0.00%" in capsys.readouterr().out
    assert Plan.load(out).signature == "gpt"
    assert cli.main(["plan", "show", str(out), "--biggest", "3"]) == 0
    text = capsys.readouterr().out
    for part in ("388.6 MiB", "3630, aligned to 512 B", "no plan is lower", "offset"):
        assert part in text
    assert len(text.strip().splitlines()) == 7 + 1 + 2 + 3


def test_picture(plan, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    Plans([plan, Plan.solve([], signature="empty")]).save(tmp_path / "plans.json")
    picture = tmp_path / "plans.png"
    assert cli.main(["plan", "show", str(tmp_path / "plans.json"), "--png", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("signature") == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("show nowhere.json", "No such file"),
        ("show bad.json", "Plan.load: bad.json: "),
        ("solve bad.json -o out.json", "expected columns size, lower and upper"),
        ("solve trace.csv -o out.json --alignment 3", "expected a power of two as alignment, got 3"),
        ("solve trace.csv -o out.json --budget -1", "expected a budget of 0 seconds or more"),
        (
            "solve trace.csv -o new/out.json",
            "--out: expected a folder that exists to write out.json to, got new",
        ),
        ("solve trace.csv -o .", "--out: expected a file to write to, got the folder ."),
        ("solve empty.csv -o out.json", "empty.csv: expected a line for each buffer, got none"),
        (
            "show bad.json --png new/out.png",
            "--png: expected a folder that exists to write out.png to, got new",
        ),
    ],
)
def test_command_errors(argv, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("bad.json").write_text("{")
    Path("trace.csv").write_text("size,lower,upper\n5,1,3\n")
    Path("empty.csv").write_text("size,lower,upper\n")
    assert cli.main(["plan", *argv.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"memkit plan {argv.split()[0]}: ")
    assert message in error
    assert sorted(path.name for path in Path().iterdir()) == ["bad.json", "empty.csv", "trace.csv"]


@pytest.mark.parametrize(
    ("data", "message"), [(b"hello", "expected a JSON object"), (b"\xfa\xfb\xfc", "expected a text file")]
)
def test_files_that_are_no_plans(tmp_path, data, message):
    path = tmp_path / "plan.json"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=message) as error:
        Plan.load(path)
    assert str(error.value).startswith(f"Plan.load: {path}: ")

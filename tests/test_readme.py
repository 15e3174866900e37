"""README.md's Python runs as it stands, and its tables are those of the results files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_there_are_snippets():
    assert SNIPPETS


@pytest.mark.parametrize("code", SNIPPETS)
def test_snippet(code, capsys):
    exec(compile(code, "README.md", "exec"), {})
    assert "GELU" in capsys.readouterr().out


def test_tables_come_from_the_results_files(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import report

    assert report.main(["--check"]) == 0

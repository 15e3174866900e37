"""README.md's Python runs as it stands, and its tables are those of the results files."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def test_snippets(capsys):
    """One after the other, as a reader would."""
    assert SNIPPETS
    names = {}
    for code in SNIPPETS:
        exec(compile(code, "README.md", "exec"), names)
    printed = capsys.readouterr().out
    assert "1 of 1 sites changed" in printed
    assert "Pool(64 MiB" in printed


def test_tables_come_from_the_results_files(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import report

    assert report.main(["--check"]) == 0

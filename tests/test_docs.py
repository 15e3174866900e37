"""The Python of every page under docs/ runs as it stands; pages for several processes under torchrun."""

import importlib.util
import re
from pathlib import Path

import pytest
from torchrun import torchrun

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))


def snippets(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


SINGLE = [page for page in PAGES if snippets(page) and "# torchrun" not in page.read_text(encoding="utf-8")]
SEVERAL = [
    pytest.param(page, code, id=f"{page.stem}-{i}")
    for page in PAGES
    for i, code in enumerate(snippets(page))
    if code.startswith("# torchrun")
]


def test_every_page_is_listed():
    listed = re.findall(r"\]\((\S+\.md)\)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(page.name for page in PAGES if page.name != "README.md")
    assert SINGLE
    assert SEVERAL


@pytest.mark.parametrize("page", SINGLE, ids=lambda page: page.stem)
def test_page(page):
    """The snippets of a page, one after the other."""
    names = {}
    for code in snippets(page):
        exec(compile(code, page.name, "exec"), names)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "code"), SEVERAL)
def test_page_in_two_processes(page, code, tmp_path):
    needed = re.search(r"needs (\w+)", code.splitlines()[0])
    if needed and importlib.util.find_spec(needed[1]) is None:
        pytest.skip(f"needs {needed[1]}")
    file = tmp_path / "page.py"
    file.write_text(code, encoding="utf-8")
    torchrun(file)

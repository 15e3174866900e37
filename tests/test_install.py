"""The import check, what the package says of itself, and its public names."""

from __future__ import annotations

import importlib.metadata
import json
import pydoc
import re
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import torch

import memkit
from memkit import _build, _build_info

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
import setup_checks as checks  # noqa: E402

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def info(torch_version: str, cuda: str | None, binary: str = f"_C{SUFFIX}") -> types.ModuleType:
    module = types.ModuleType("memkit._build_info")
    module.TORCH, module.TORCH_CUDA, module.BINARY = torch_version, cuda, binary
    return module


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An installed memkit: a binary, and no source tree around it."""
    folder = tmp_path / "memkit"
    folder.mkdir()
    (folder / f"_C{SUFFIX}").touch()
    return folder


# The import check


@pytest.mark.parametrize(
    ("built", "built_cuda", "got", "got_cuda"),
    [
        ("2.13.0+cpu", None, "2.13.0+cpu", None),
        ("2.14.0+cu130", "13.0", "2.14.1+cu130", "13.0"),
        ("2.14.0+cu130", "13.0", "2.14.0+cu132", "13.2"),
        ("2.14.0+cpu", None, "2.14.0", None),
        ("2.16.0.dev20261101+cpu", None, "2.16.0.dev20261101+cpu", None),
    ],
)
def test_the_same_torch_is_accepted(package, built, built_cuda, got, got_cuda):
    assert _build.problem(info(built, built_cuda), got, got_cuda, package) is None


@pytest.mark.parametrize(
    ("built", "built_cuda", "got", "got_cuda", "names"),
    [
        ("2.13.0+cpu", None, "2.14.0+cu130", "13.0", ("2.13.0+cpu", "2.14.0+cu130")),
        ("2.13.0+cpu", None, "2.14.0+cpu", None, ("2.13.0+cpu", "2.14.0+cpu")),
        ("2.14.0+cpu", None, "2.14.0+cu130", "13.0", ("2.14.0+cpu", "2.14.0+cu130")),
        ("2.14.0+cu130", "13.0", "2.14.0+cu128", "12.8", ("2.14.0+cu130", "2.14.0+cu128")),
        ("2.1.0", None, "2.14.0", "13.0", ("2.1.0+cpu", "2.14.0+cu130")),
        (
            "2.16.0.dev20261101+cpu",
            None,
            "2.16.0.dev20261102+cpu",
            None,
            ("2.16.0.dev20261101+cpu", "2.16.0.dev20261102+cpu"),
        ),
    ],
)
def test_another_torch_is_named_with_the_cure(package, built, built_cuda, got, got_cuda, names):
    assert _build.problem(info(built, built_cuda), got, got_cuda, package) == (
        f"memkit: built for torch {names[0]}, got torch {names[1]}; "
        "rebuild with: pip install --no-build-isolation --force-reinstall --no-deps . (in a copy of memkit's repository)"
    )


def test_in_a_source_tree_the_cure_names_the_tree(package):
    (package.parent / "setup.py").touch()
    text = _build.problem(info("2.13.0+cpu", None), "2.14.0+cpu", None, package)
    assert text.endswith(f"pip install --no-build-isolation --force-reinstall --no-deps -e {package.parent}")


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        ({"url": "file:///home/me/my%20memkit", "dir_info": {}}, "'/home/me/my memkit'"),
        (
            {"url": "https://example.org/memkit.git", "vcs_info": {"vcs": "git"}},
            "git+https://example.org/memkit.git",
        ),
        (
            {"url": "file:///home/me/memkit-0.1.0.whl", "archive_info": {}},
            ". (in a copy of memkit's repository)",
        ),
    ],
)
def test_an_installed_memkit_is_rebuilt_from_where_it_came(package, origin, source):
    record = package.parent / "memkit-0.1.0.dist-info" / "direct_url.json"
    record.parent.mkdir()
    record.write_text(json.dumps(origin))
    text = _build.problem(info("2.13.0+cpu", None), "2.14.0+cpu", None, package)
    assert text.endswith(f"--no-deps {source}")


def test_a_tree_that_was_never_built_says_how_to_build(package):
    (package.parent / "setup.py").touch()
    assert _build.problem(None, "2.14.0+cpu", None, package) == (
        f"memkit: not built yet; build with: pip install --no-build-isolation -e {package.parent} (or: make build)"
    )


def test_a_binary_of_another_python_is_named(package):
    text = _build.problem(
        info("2.14.0+cpu", None, "_C.cpython-37m-x86_64-linux-gnu.so"), "2.14.0+cpu", None, package
    )
    assert text.startswith(
        f"memkit: expected a binary that ends in {SUFFIX}, got _C.cpython-37m-x86_64-linux-gnu.so; "
    )


def test_a_lost_binary_is_named(package):
    (package / f"_C{SUFFIX}").unlink()
    text = _build.problem(info("2.14.0+cpu", None), "2.14.0+cpu", None, package)
    assert text.startswith(f"memkit: _C{SUFFIX} is missing from {package}; ")


def test_import_fails_before_the_binary_is_loaded():
    """A fresh interpreter, so that the order inside memkit/__init__.py counts."""
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('memkit._build_info', {_build_info.__file__!r})\n"
        "info = importlib.util.module_from_spec(spec); spec.loader.exec_module(info)\n"
        "info.TORCH = '1.0.0+cpu'\n"
        "sys.modules['memkit._build_info'] = info\n"
        "try:\n    import memkit\n"
        "except ImportError as error:\n    print(error); print('memkit._C' in sys.modules)\n"
    )
    lines = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
    ).stdout.splitlines()
    assert re.fullmatch(
        r"memkit: built for torch 1\.0\.0\+cpu, got torch .*; rebuild with: pip install .*", lines[0]
    )
    assert lines[1] == "False"


# What this build says of itself


def test_the_build_info_is_this_torch():
    assert torch.__version__ == _build_info.TORCH
    assert torch.version.cuda == _build_info.TORCH_CUDA


def test_the_metadata_names_the_torch_of_the_build():
    try:
        requires = importlib.metadata.requires("memkit")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("built in place and not installed: there is no metadata")
    assert requires is not None
    core = [line for line in requires if "extra ==" not in line]
    assert core == [checks.torch_requirement(torch.__version__)]
    assert importlib.metadata.version("memkit").startswith(f"{memkit.__version__}+torch")


def test_every_public_name_resolves():
    assert [name for name in memkit.__all__ if not hasattr(memkit, name)] == []
    assert set(memkit._HOMES) < set(memkit.__all__)
    assert [name for name in dir(memkit) if name[0] != "_"] == sorted(memkit.__all__)
    with pytest.raises(AttributeError, match="module 'memkit' has no attribute 'no_such_name'"):
        memkit.no_such_name  # noqa: B018


def test_importing_loads_no_public_name():
    code = "import sys, memkit; print(sorted(set(memkit.__all__) & {*vars(memkit), *sys.modules}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("name", sorted({*memkit.functional.__all__} - {"norm_saves"}))
def test_help_of_a_function(name):
    text = pydoc.plain(pydoc.render_doc(getattr(memkit.functional, name)))
    for word in ("Shapes: ", "float32, float64, float16, bfloat16", "``TypeError``", "``RuntimeError``"):
        assert word in text, word
    assert f"help(memkit.functional.{name}.__module__)" in text
    if name not in ("sigmoid", "tanh", "bias_act"):
        assert re.search(r"(19|20)\d\d|torch\.nn\.functional|:func:", text), "where it comes from"


def test_help_names_what_is_public():
    text = pydoc.plain(pydoc.render_doc(memkit))
    for line in (
        "swap(model, sample=batch)",
        "unswap(model: 'nn.Module') -> 'None'",
        "class lean(",
        "class Pool(",
    ):
        assert line in text

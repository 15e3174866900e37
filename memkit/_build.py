"""Whether the compiled half fits the torch that is running, asked before it is loaded.

A binary made for another torch fails to load with an undefined symbol that helps nobody, or loads and crashes later.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import shlex
import sysconfig
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urlsplit

PACKAGE = Path(__file__).resolve().parent


def load_info() -> ModuleType | None:
    """`memkit/_build_info.py`, which setup.py writes beside the binary; None in a tree that was never built."""
    if importlib.util.find_spec("memkit._build_info") is None:
        return None
    return importlib.import_module("memkit._build_info")


def rebuild_command(package: Path = PACKAGE) -> str:
    return f"pip install --no-build-isolation --force-reinstall --no-deps {_source(package)}"


def _source(package: Path) -> str:
    """What pip must be given: the tree around `package`, the folder or repository it came from; never a name alone.

    On PyPI that name is another project's.
    """
    if (package.parent / "setup.py").exists():
        return f"-e {shlex.quote(str(package.parent))}"
    for record in package.parent.glob("memkit-*.dist-info/direct_url.json"):
        origin = json.loads(record.read_text())
        if "dir_info" in origin:
            return shlex.quote(unquote(urlsplit(origin["url"]).path))
        if "vcs_info" in origin:
            return f"git+{origin['url']}"
    return ". (in a copy of memkit's repository)"


def problem(
    info: ModuleType | None, torch_version: str, torch_cuda: str | None, package: Path = PACKAGE
) -> str | None:
    """Why the binary must not be loaded, with the command that mends it; None if it fits."""
    if info is None:
        return f"memkit: not built yet; build with: pip install --no-build-isolation {_source(package)} (or: make build)"
    if _line(info.TORCH, info.TORCH_CUDA) != _line(torch_version, torch_cuda):
        built, got = _name(info.TORCH, info.TORCH_CUDA), _name(torch_version, torch_cuda)
        return f"memkit: built for torch {built}, got torch {got}; rebuild with: {rebuild_command(package)}"
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if not info.BINARY.endswith(suffix):
        cure = rebuild_command(package)
        return f"memkit: expected a binary that ends in {suffix}, got {info.BINARY}; rebuild with: {cure}"
    if not (package / info.BINARY).exists():
        return f"memkit: {info.BINARY} is missing from {package}; rebuild with: {rebuild_command(package)}"
    return None


def check(torch_version: str, torch_cuda: str | None) -> None:
    """Raises ImportError where loading `memkit._C` would fail or, worse, would not."""
    text = problem(load_info(), torch_version, torch_cuda)
    if text is not None:
        raise ImportError(text)


def _line(version: str, cuda: str | None) -> tuple[str, str | None]:
    """What must be equal: torch's minor version (a pre-release as a whole) and its CUDA major version."""
    public = version.split("+")[0]
    release = re.fullmatch(r"(\d+\.\d+)(\.\d+)*", public)
    return (release[1] if release else version), (cuda.split(".")[0] if cuda else None)


def _name(version: str, cuda: str | None) -> str:
    """2.14.0+cu130: a torch without a local version (conda, built from source) gets its variant added."""
    if "+" in version:
        return version
    return version + ("+cu" + cuda.replace(".", "") if cuda else "+cpu")

"""`import fedtmle` is light: heavy libraries are loaded when first needed."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from itertools import chain
from pathlib import Path

import pytest

import fedtmle
from fedtmle.version import __version__
from fedtmle_core.version import __version__ as core_version

ROOT = Path(__file__).parents[1]


def test_import_loads_no_heavy_library() -> None:
    heavy = "('numba', 'scipy', 'pandas', 'numpy')"
    code = f"import sys, fedtmle, fedtmle.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_had() -> None:
    names = [name for name in fedtmle.__all__ if not name.endswith("ESTIMANDS") and name != "plots"]
    for name in names:
        assert callable(getattr(fedtmle, name))
    for name in names:  # and no submodule of the same name has taken its place since
        assert callable(getattr(fedtmle, name))
    assert all(map(callable, (*fedtmle.ESTIMANDS, *fedtmle.TIME_ESTIMANDS, *fedtmle.REGIME_ESTIMANDS)))
    assert callable(fedtmle.plots.forest)  # this one is a submodule
    assert set(fedtmle.__all__) <= set(dir(fedtmle))
    assert not hasattr(fedtmle, "nothing")
    starred: dict[str, object] = {}
    exec("from fedtmle import *", starred)  # noqa: S102 - as a user writes it
    assert set(fedtmle.__all__) <= set(starred)


@pytest.mark.parametrize(
    ("project", "package", "theirs"),
    [
        (ROOT, "fedtmle", {"polars"}),  # a user who hands over such a frame has it
        (ROOT / "core", "fedtmle_core", {"numba"}),  # optional: the kernels run without it
    ],
)
def test_every_library_that_is_imported_is_declared(project: Path, package: str, theirs: set[str]) -> None:
    """A clean environment has what the project's file names, and not what the tests happen to bring."""
    stated = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = [*stated["dependencies"], *chain(*stated.get("optional-dependencies", {}).values())]
    declared = {_normal(re.split(r"[<>=!~\[ ;]", requirement)[0]) for requirement in needed}
    distributions = packages_distributions()
    imported = set()
    for path in (project / "src" / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.split(".")[0])
    foreign = imported - sys.stdlib_module_names - {package, "fedtmle_paper"} - theirs
    assert {"numpy", "cryptography"} <= foreign
    brought = {name: distributions.get(name, [name]) for name in foreign}  # editable ones list none
    missing = {name for name in foreign if not declared & {*map(_normal, brought[name])}}
    assert not missing


def test_the_package_requires_its_core_exactly() -> None:
    """A plan names the package's version alone, which must therefore name the core's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert f"fedtmle-core=={core_version}" in project["dependencies"]
    assert __version__ == core_version


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()

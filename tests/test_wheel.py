"""The wheel that a hospital installs: no experiment of the paper is in it, and it works without them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parents[1]
# The rooms that left the package; a module of one of these names would be an experiment or a test helper.
ELSEWHERE = {
    "fedtmle/reproduce",
    "fedtmle/cli/reproduce.py",
    "fedtmle/model/density",
    "fedtmle/privacy/attacks.py",
    "fedtmle/privacy/collision.py",
    "fedtmle/privacy/discrete.py",
    "fedtmle/privacy/disclosure.py",
    "fedtmle/privacy/family.py",
    "fedtmle/runtime/faults.py",
    "fedtmle/runtime/simulated.py",
    "fedtmle/targets/benchmark.py",
    "fedtmle/targets/optimal_transport.py",
    "fedtmle/targets/two_arm.py",
    "fedtmle/theory/history.py",
    "fedtmle/theory/registry.py",
}
PAPER = {path.stem for path in (ROOT / "paper/src/fedtmle_paper").glob("*.py") if path.stem != "__init__"}


def build(project: Path, out: Path) -> zipfile.ZipFile:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build(ROOT / "core", tmp_path_factory.mktemp("core"))


def test_it_has_the_whole_package_and_nothing_of_the_paper(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    shipped = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src/fedtmle").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert names == shipped | {"fedtmle/constraints.txt"}
    assert wheel.read("fedtmle/constraints.txt") == (ROOT / "constraints.txt").read_bytes()
    for name in names:
        path = PurePosixPath(name)
        assert path.parts[0] == "fedtmle"
        assert not {str(path), *map(str, path.parents)} & ELSEWHERE
        assert b"fedtmle_paper" not in wheel.read(name), name


def test_the_wheel_of_the_core_has_the_core_alone(core: zipfile.ZipFile) -> None:
    names = {name for name in core.namelist() if ".dist-info/" not in name}
    shipped = {
        path.relative_to(ROOT / "core/src").as_posix()
        for path in (ROOT / "core/src/fedtmle_core").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "fedtmle_core/py.typed" in shipped
    assert names == shipped
    (metadata,) = (name for name in core.namelist() if name.endswith(".dist-info/METADATA"))
    needed = re.findall(r"^Requires-Dist: ([\w-]+)", core.read(metadata).decode(), flags=re.MULTILINE)
    assert sorted(needed) == ["cryptography", "msgspec", "numpy"]


def test_it_declares_no_command_of_the_paper(wheel: zipfile.ZipFile) -> None:
    (points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert wheel.read(points).decode().split() == ["[console_scripts]", "fedtmle", "=", "fedtmle.cli:main"]


def test_the_wheel_of_the_paper_has_the_paper_alone(tmp_path: Path) -> None:
    names = {name for name in build(ROOT / "paper", tmp_path).namelist() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == {"fedtmle_paper"}
    assert {f"fedtmle_paper/{name}.py" for name in PAPER} <= names


def test_it_works_alone(wheel: zipfile.ZipFile, core: zipfile.ZipFile, tmp_path: Path) -> None:
    """With its core and the dependencies; editable installs are not seen through a path file."""
    venv.create(tmp_path, with_pip=False)
    python = tmp_path / "bin/python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "lib" / version / "site-packages"
    for each in (core, wheel):
        each.extractall(site)
    # Path files of the other folders are not followed, so what is installed as editable stays out.
    folders = [path for path in sys.path if path.endswith("site-packages")]
    assert sysconfig.get_paths()["purelib"] in folders
    (site / "dependencies.pth").write_text("\n".join(folders), encoding="utf-8")

    def run(*arguments: str) -> str:
        done = subprocess.run(  # noqa: S603 - the environment made above
            [str(python), "-I", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("-c", "import fedtmle; print(fedtmle.__file__)").strip().startswith(str(site))
    assert run("-c", "from importlib.util import find_spec; print(find_spec('fedtmle_paper'))") == "None\n"
    assert "reproduce" in run("-m", "fedtmle", "--help")
    assert re.search(r"federated +985 .* 7\.20 to 11\.48", run("-m", "fedtmle", "demo", "--quiet"))


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.14"])
def test_it_installs_into_a_clean_environment(version: str, tmp_path: Path) -> None:
    """With the versions that were tested together, from the package index."""
    python = shutil.which(f"python{version}")
    if python is None or subprocess.run([python, "--version"], check=False).returncode:  # noqa: S603
        pytest.skip(f"this machine has no Python {version}")
    wheels = [build(project, tmp_path / project.name).filename for project in (ROOT / "core", ROOT)]
    place = tmp_path / "environment"
    constraints = str(ROOT / "constraints.txt")
    for command in (
        [python, "-m", "venv", str(place)],
        [f"{place}/bin/pip", "install", "--quiet", "--constraint", constraints, *map(str, wheels)],
        [f"{place}/bin/fedtmle", "init", "example"],
        [f"{place}/bin/fedtmle", "run", "example/study.toml", "--quiet", "--out", "result.json"],
    ):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False)  # noqa: S603
        assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "result.json").is_file()

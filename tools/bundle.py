"""An installation for machines without a network: every wheel with its hash, for several versions of Python.

python -m tools.bundle build/bundle [--python 3.11 ...]

The folder has `wheels/`, one file of requirements with hashes for each version of Python, the checksums of
all files, and `install.sh`, which makes an environment from them and nothing else. Packages that are
published as source only are built here, so that nothing is compiled at a hospital.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"
WANTED = "fedtmle[flare,databases]"
VERSIONS = ("3.11", "3.12", "3.13", "3.14")
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux2014_x86_64",
    "manylinux_2_17_x86_64",
)
INSTALL = """\
#!/bin/sh
# Make the environment FOLDER from this bundle, without a network: ./install.sh FOLDER [PYTHON]
set -eu
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:?"give the folder of the new environment"}
python=${2:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
requirements="$here/requirements-$version.txt"
[ -f "$requirements" ] || { echo "this bundle has nothing for Python $version" >&2; exit 1; }
(cd "$here" && sha256sum --check --quiet SHA256SUMS)
"$python" -m venv "$folder"
"$folder/bin/python" -m pip install --isolated --quiet --disable-pip-version-check --no-index \\
  --only-binary :all: --find-links "$here/wheels" --require-hashes --requirement "$requirements"
"$folder/bin/fedtmle" --version
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write a bundle, and say for which versions of Python it is complete."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", action="append", choices=VERSIONS, help="a version to include")
    given = parser.parse_args(arguments)
    made = bundle(given.folder, given.python or VERSIONS)
    for version, missing in made.items():
        print(f"Python {version}: {missing or 'complete'}")  # noqa: T201 - a script
    if not any(missing == "" for missing in made.values()):
        sys.exit(1)


def bundle(folder: Path, versions: Sequence[str]) -> dict[str, str]:
    """Write a bundle into a new folder; return for each version of Python what is missing, "" if nothing."""
    wheels = folder / "wheels"
    wheels.mkdir(parents=True)
    for project in (ROOT / "core", ROOT):
        _run("hatchling", "build", "--target", "wheel", "--directory", str(wheels.absolute()), folder=project)
    (core,), (own,) = wheels.glob("fedtmle_core-*.whl"), wheels.glob("fedtmle-*.whl")
    # For this Python: downloads wheels, and builds those that are published as source only.
    _run("pip", "wheel", *_common(wheels), "--wheel-dir", str(wheels), str(core), f"{own}[flare,databases]")
    found = {}
    for version in versions:
        found[version] = _download(wheels, version)
        if not found[version]:
            text = _requirements(wheels, version)
            (folder / f"requirements-{version}.txt").write_text(text, encoding="utf-8")
    (folder / "install.sh").write_text(INSTALL, encoding="utf-8")
    (folder / "install.sh").chmod(0o755)
    sums = "".join(
        f"{_sha256(path)}  {path.relative_to(folder)}\n"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    )
    (folder / "SHA256SUMS").write_text(sums, encoding="utf-8")
    return found


def _common(wheels: Path) -> list[str]:
    quiet = ["--quiet", "--disable-pip-version-check"]
    return [*quiet, "--constraint", str(CONSTRAINTS), "--find-links", str(wheels)]


def _target(version: str) -> list[str]:
    """Return the options of pip for another version of Python than this one."""
    number = version.replace(".", "")
    words = ["--python-version", version, "--implementation", "cp", "--only-binary", ":all:"]
    for abi in (f"cp{number}", "abi3", "none"):
        words += ["--abi", abi]
    for platform in PLATFORMS:
        words += ["--platform", platform]
    return words


def _download(wheels: Path, version: str) -> str:
    """Download the wheels for a version of Python; return what went wrong, "" if nothing did."""
    command = ("pip", "download", *_common(wheels), *_target(version), "--dest", str(wheels), WANTED)
    done = subprocess.run(  # noqa: S603 - pip
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return ""
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return errors[-1] if errors else "pip could not download the wheels"


def _requirements(wheels: Path, version: str) -> str:
    """Return what pip would install from the wheels alone, each with its hash."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.json"
        options = (
            "--no-index",
            "--dry-run",
            "--ignore-installed",
            "--target",
            scratch,
            "--report",
            str(report),
        )
        _run("pip", "install", *_common(wheels), *_target(version), *options, WANTED)
        chosen = json.loads(report.read_text(encoding="utf-8"))["install"]
    lines = []
    for each in chosen:
        name, number = each["metadata"]["name"], each["metadata"]["version"]
        # A machine may prefer another wheel of the same version, for a newer C library.
        alike = sorted(path for path in wheels.glob("*.whl") if _is_of(path, name, number))
        hashes = " ".join(f"--hash=sha256:{_sha256(path)}" for path in alike)
        lines.append(f"{name}=={number} {hashes}\n")
    return "".join(sorted(lines, key=str.lower))


def _is_of(wheel: Path, name: str, number: str) -> bool:
    """Return whether a wheel is of this version of a distribution, by its file name."""
    found, version, *_ = wheel.name.split("-")
    return _plain(found) == _plain(name) and version == number


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(*words: str, folder: Path = ROOT) -> None:
    subprocess.run([sys.executable, "-m", *words], cwd=folder, check=True)  # noqa: S603 - pip, hatchling


if __name__ == "__main__":
    main()

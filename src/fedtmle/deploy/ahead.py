"""Compile the kernels once for this machine, in the background, when a silo starts: no round waits for it.

python -m fedtmle.deploy.ahead <kit>

The example study of `fedtmle init` is run on its made-up records, which leaves the compiled code in numba's
cache. A mark beside the cache says for which versions this was done.
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import fedtmle
from fedtmle.deploy.kits import Kit, read_kit
from fedtmle_core.journal import Document

MARK = "fedtmle-compiled.json"


def is_compiled(kit: Kit) -> bool:
    """Return whether the kernels were compiled before, for these versions, as the mark in the cache says."""
    try:
        return (_cache(kit) / MARK).read_text(encoding="utf-8") == json.dumps(_versions())
    except OSError:
        return False


def compile_ahead(kit: Kit) -> float:
    """Compile unless it was done before; return the seconds that it took, 0 if there was nothing to do."""
    with (_cache(kit) / MARK).open("a+", encoding="utf-8") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)  # silos that share a cache wait for the first one
        mark.seek(0)
        if mark.read() == json.dumps(_versions()):
            return 0.0
        began = time.monotonic()
        _run_example()
        mark.truncate(0)
        mark.write(json.dumps(_versions()))
        return time.monotonic() - began


def _versions() -> Document:
    installed = {name: version(name) for name in ("fedtmle", "numba", "numpy")}
    return {**installed, "python": platform.python_version(), "machine": platform.machine()}


def _cache(kit: Kit) -> Path:
    """Return where numba keeps compiled code, the kit's folder if that cannot be written."""
    given = os.environ.get("NUMBA_CACHE_DIR")
    folder = Path(given) if given else Path(fedtmle.__file__).parent / "model" / "kernels" / "__pycache__"
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        return kit.home
    return folder


def _run_example() -> None:
    from fedtmle.studies.run import run
    from fedtmle.studyfile.file import read_study
    from fedtmle.studyfile.template import write_template

    with tempfile.TemporaryDirectory() as scratch:
        write_template(Path(scratch), force=False)
        study = read_study(Path(scratch) / "study.toml")
        run(study.study, study.silos)


if __name__ == "__main__":
    os.nice(10)
    print("compiling the kernels for this machine, once", flush=True)  # noqa: T201 - the party's log
    print(f"compiled in {compile_ahead(read_kit(Path(sys.argv[1]))):.0f} s", flush=True)  # noqa: T201 - as above

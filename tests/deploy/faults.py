"""Faults that strike inside a deployment's processes, at the moment a test chooses.

`sitecustomize.py` is put on PYTHONPATH of the processes under test. An order is a file in the folder
that FEDTMLE_FAULTS names: ``<party>.json`` with ``at`` (how many steps from now) and ``what``:

    kill       SIGKILL to the engine and to its process for the run, before the step
    kill-after the same, after the step
    slow       sleep ``seconds`` before the step
    disk       from then on, no file of this process can grow

If FEDTMLE_WITNESS names a folder, a silo appends every request and the answer that leaves to
``<party>.wire`` there, and every draw of noise to ``<party>.draws``.

``<party>-clock.json`` puts the clock of all processes of a party forward by ``seconds``, and
``<party>-version.json`` lets them take ``version`` for that of fedtmle.
"""

from __future__ import annotations

import json
from pathlib import Path

HOOK = '''\
"""Test hook: faults at chosen steps."""
import importlib.abc, importlib.machinery, json, os, resource, signal, sys, time

TARGETS = {
    "fedtmle.engine.flare": ("FlareFederation", "exchange"),
    "fedtmle.engine.site": ("Endpoint", "step"),
    "fedtmle.runtime.silo": (None, "discrete_gaussian"),
}


def party():
    """The kit's folder is in the command line of every process of a party, after the last -m."""
    words = sys.orig_argv[::-1]
    return os.path.basename(words[words.index("-m") - 1]) if "-m" in words else ""


def due(path):
    try:
        with open(path) as file:
            order = json.load(file)
    except (OSError, ValueError):
        return None
    if order["at"] > 0:
        order["at"] -= 1
        with open(path, "w") as file:
            json.dump(order, file)
        return None
    os.unlink(path)
    return order


def kill():
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def write_down(kind, *pieces):
    """Append to the party's file by one write, which a killed process has made or not."""
    folder = os.environ.get("FEDTMLE_WITNESS")
    if folder:
        with open(os.path.join(folder, party() + "." + kind), "ab", buffering=0) as file:
            file.write(b"".join(len(piece).to_bytes(4, "big") + piece for piece in pieces))


def note_draws(draw):
    def noted(*args):
        drawn = draw(*args)
        write_down("draws", str(drawn).encode())
        return drawn

    return noted


def wrap(method):
    def struck(self, *args, **kwargs):
        frame = args[0] if args else b""
        if isinstance(frame, bytes) and frame[:1] == b"?":
            return method(self, *args, **kwargs)
        order = due(os.path.join(os.environ["FEDTMLE_FAULTS"], party() + ".json"))
        what = order["what"] if order else ""
        if what == "kill":
            kill()
        if what == "slow":
            time.sleep(order["seconds"])
        if what == "disk":
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        result = method(self, *args, **kwargs)
        if what == "kill-after":
            kill()
        if isinstance(result, bytes):
            write_down("wire", frame, result)
        return result

    return struck


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name not in TARGETS:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            owner, method = TARGETS[name]
            owner, around = (getattr(module, owner), wrap) if owner else (module, note_draws)
            setattr(owner, method, around(getattr(owner, method)))

        spec.loader.exec_module = exec_module
        return spec


def skew():
    """Python's clock alone: certificates are checked by another."""
    try:
        with open(os.path.join(os.environ["FEDTMLE_FAULTS"], party() + "-clock.json")) as file:
            ahead = json.load(file)["seconds"]
    except (OSError, ValueError):
        return
    true = time.time
    time.time = lambda: true() + ahead


def pretend():
    """Another version of fedtmle, as the party tells it to others."""
    try:
        with open(os.path.join(os.environ["FEDTMLE_FAULTS"], party() + "-version.json")) as file:
            other = json.load(file)["version"]
    except (OSError, ValueError):
        return
    import importlib.metadata

    true = importlib.metadata.version
    importlib.metadata.version = lambda name: other if name == "fedtmle" else true(name)


if "FEDTMLE_FAULTS" in os.environ:
    sys.meta_path.insert(0, Finder())
    skew()
    pretend()
'''


def write_hook(folder: Path) -> Path:
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK)
    return folder


def written(path: Path) -> list[bytes]:
    """What the hook wrote down in a file, piece by piece."""
    data, pieces, at = path.read_bytes(), [], 0
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "big")
        pieces.append(data[at + 4 : end])
        at = end
    return pieces


def order(folder: Path, party: str, *, at: int, what: str, seconds: float = 0.0) -> None:
    scratch = folder / f"{party}.new"
    scratch.write_text(json.dumps({"at": at, "what": what, "seconds": seconds}))
    scratch.replace(folder / f"{party}.json")

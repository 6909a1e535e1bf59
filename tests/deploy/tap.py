"""Everything that a FLARE process sends, written down before it is encrypted.

The folder with `sitecustomize.py` is put on PYTHONPATH of the processes under test; they append each
frame to a file of their own in the folder that FEDTMLE_TAP names.
"""

from __future__ import annotations

import struct
from pathlib import Path

HOOK = '''\
"""Test hook: copies what FLARE sends."""
import importlib.abc, importlib.machinery, os, sys

NAME = "nvflare.fuel.f3.sfm.sfm_conn"


class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != NAME:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            send = module.SfmConnection.send_frame

            def tapped(self, prefix, headers, payload):
                with open(os.path.join(os.environ["FEDTMLE_TAP"], str(os.getpid())), "ab") as file:
                    file.write(repr(headers).encode() + b"\\n" + bytes(payload or b"") + b"\\n")
                return send(self, prefix, headers, payload)

            module.SfmConnection.send_frame = tapped

        spec.loader.exec_module = exec_module
        return spec


if "FEDTMLE_TAP" in os.environ:
    sys.meta_path.insert(0, Finder())
'''


def write_hook(folder: Path) -> Path:
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(HOOK)
    return folder


def forms(value: float) -> list[bytes]:
    """How a number could travel."""
    return [repr(value).encode(), struct.pack("<d", value), struct.pack(">d", value)]


def sent(folder: Path) -> dict[int, bytes]:
    """All that was sent, by process."""
    return {int(path.name): path.read_bytes() for path in folder.iterdir()}

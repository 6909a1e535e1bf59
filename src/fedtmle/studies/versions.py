"""What a run was made with: it belongs to whatever is to be reproduced."""

from __future__ import annotations

import platform
from importlib.metadata import version

from fedtmle.protocol.messages import WIRE_FORMAT
from fedtmle.version import __version__

NUMERICAL = ("numpy", "numba", "llvmlite", "duckdb")


def versions() -> dict[str, str]:
    """This package, its wire format, the interpreter, the machine and the libraries that compute."""
    return {
        "fedtmle": __version__,
        "wire format": str(WIRE_FORMAT),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
        **{name: version(name) for name in NUMERICAL},
    }

"""The environment in which golden runs are made, so that another x86-64 processor gives the same bits.

numpy, OpenBLAS and the C library choose faster routines where the processor has them, and their last bits
differ. Golden runs are made by a process of their own that is told to use none of them.
"""

from __future__ import annotations

import hashlib
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy._core._multiarray_umath import __cpu_dispatch__ as dispatched  # type: ignore[import-not-found]  # no stubs
from numpy._core._multiarray_umath import __cpu_features__ as available

_ROOT = Path(__file__).parents[2]
_MARK = "FEDTMLE_GOLDEN"


def environment() -> dict[str, str]:
    """Return this process's environment with every choice by processor switched off."""
    features = " ".join(name for name in dispatched if available.get(name))
    return os.environ | {
        "NPY_DISABLE_CPU_FEATURES": os.environ.get("NPY_DISABLE_CPU_FEATURES", "") or features,
        "OPENBLAS_CORETYPE": "Nehalem",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX,-AVX2,-FMA,-FMA4,-AVX512F",
        _MARK: "pinned",
    }


def is_pinned() -> bool:
    return os.environ.get(_MARK) == "pinned"


def python(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a module in the pinned environment."""
    command: Sequence[str] = (sys.executable, "-m", *arguments)
    return subprocess.run(  # noqa: S603 - our own module
        command, cwd=_ROOT, env=environment(), check=check, stdout=subprocess.PIPE, text=True
    )


def arithmetic() -> str:
    """Return a digest of elementary functions and matrix products here; no code of the package is in it."""
    x = np.random.default_rng(1).random(2000) * 20 - 10
    square = x[:1600].reshape(40, 40)
    arrays = [np.exp(x), np.log(np.abs(x)), np.sin(x), np.tanh(x), np.cbrt(x)]
    arrays += [
        square @ square,
        np.linalg.inv(square),
        np.array([math.exp(v) for v in x.tolist()]),
        x.cumsum(),
    ]
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()

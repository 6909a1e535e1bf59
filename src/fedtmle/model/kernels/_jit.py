"""`numba.njit` as this package uses it: typed, cached on disk, without the lock, strict IEEE."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])

# Numba's disk cache is stamped by the caller's file alone: a changed polynomial would leave stale
# kernels behind. The digest of all sources in the cached name forgets them.
SOURCES = sorted(Path(__file__).parent.glob("*.py"))
DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:12]


def jit(function: Function) -> Function:
    """Compile at the first call; no fast-math, so that the operations stay as written."""
    function.__qualname__ = f"{function.__qualname__}_{DIGEST}"
    try:
        return _compiled(function, cache=True)
    except RuntimeError:  # nowhere to write a cache: a read-only installation without a home
        return _compiled(function, cache=False)


def _compiled(function: Function, *, cache: bool) -> Function:
    decorate: Any = numba.njit(cache=cache, nogil=True, error_model="numpy", fastmath=False)
    return cast(Function, decorate(function))

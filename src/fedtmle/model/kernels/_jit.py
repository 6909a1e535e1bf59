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


def jit(function: Function, *, fastmath: bool | set[str] = False) -> Function:
    """Compile at the first call; no fast-math, so that the operations stay as written."""
    function.__qualname__ = f"{function.__qualname__}_{DIGEST}"
    try:
        return _compiled(function, cache=True, fastmath=fastmath)
    except RuntimeError:  # nowhere to write a cache: a read-only installation without a home
        return _compiled(function, cache=False, fastmath=fastmath)


def jit_unordered(function: Function) -> Function:
    """The same, for sums that no second party repeats: additions may be reordered, and so vectorise.

    A value that is not finite is caught where the same rows are summed exactly.
    """
    return jit(function, fastmath={"reassoc", "nsz", "nnan", "ninf"})


def _compiled(function: Function, *, cache: bool, fastmath: bool | set[str]) -> Function:
    decorate: Any = numba.njit(cache=cache, nogil=True, error_model="numpy", fastmath=fastmath)
    return cast(Function, decorate(function))

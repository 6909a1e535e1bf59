"""`numba.njit` as this package uses it: typed, cached on disk, without the lock, strict IEEE.

Importing this module registers the sources that both backends share.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic, overload, register_jitable

from fedtmle_core.kernels import _elementary, _primitives

Function = TypeVar("Function", bound=Callable[..., object])

# Numba's disk cache is stamped by the caller's file alone: a changed polynomial would leave stale
# kernels behind. The digest of all sources in the cached name forgets them. Two modules outside this
# folder are compiled in: constants of the grid, and codes of the families.
FOLDER = Path(__file__).parent
OUTSIDE = [FOLDER.parent / name for name in ("exact.py", "types.py")]
SOURCES = [*sorted(FOLDER.glob("*.py")), *OUTSIDE]
DIGEST = hashlib.sha256(b"".join(path.read_bytes() for path in SOURCES)).hexdigest()[:12]


def jit(function: Function) -> Function:
    """Compile at the first call; no fast-math, so that the operations stay as written."""
    function.__qualname__ = f"{function.__qualname__}_{DIGEST}"
    try:
        return _compiled(function, cache=True)
    except RuntimeError:  # nowhere to write a cache: a read-only installation without a home
        return _compiled(function, cache=False)


def _compiled(function: Function, *, cache: bool) -> Function:
    return cast(Function, numba.njit(cache=cache, nogil=True, error_model="numpy")(function))


# An array where its address says, for a list of columns whose length numba does not know.

Untyped: TypeAlias = Any  # objects of numba's compiler, for which it has no types


def _as_pointer(_: Untyped, address: Untyped) -> Untyped:
    """Return how numba makes a pointer to float64 of an address."""

    def generate(context: Untyped, builder: Untyped, signature: Untyped, arguments: Untyped) -> Untyped:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    pointer: Untyped = types.CPointer
    return pointer(types.float64)(address), generate


pointer_to: Untyped = intrinsic(_as_pointer)
array_at: Untyped = numba.carray  # type: ignore[attr-defined]  # makes an array from a pointer and a shape


# The shared sources, registered with numba for scalars: `_primitives` gets a spelling of its own, and
# `_elementary` is compiled as it stands.


def _select(condition: bool, yes: float, no: float) -> float:
    return yes if condition else no


def _bits(x: float) -> np.int64:
    return np.float64(x).view(np.int64)


def _from_bits(pattern: int) -> np.float64:
    return np.int64(pattern).view(np.float64)


# Numba asks for an implementation by argument types; there is one for all of them.
overload(_primitives.select, strict=False)(lambda *_: _select)
overload(_primitives.bits, strict=False)(lambda *_: _bits)
overload(_primitives.from_bits, strict=False)(lambda *_: _from_bits)

for shared in tuple(vars(_elementary).values()):
    if isinstance(shared, FunctionType) and shared.__module__ == _elementary.__name__:
        register_jitable(forceinline=True)(shared)

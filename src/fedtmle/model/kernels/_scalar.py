"""Registers the shared sources with numba, for scalars: importing it is enough.

`_primitives` gets a spelling of its own; `_elementary` and `_rows` are compiled as they stand.
"""

from __future__ import annotations

from types import FunctionType

import numpy as np
from numba.extending import overload, register_jitable

from fedtmle.model.kernels import _elementary, _primitives, _rows


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

for module in (_elementary, _rows):
    for function in tuple(vars(module).values()):
        if isinstance(function, FunctionType) and function.__module__ == module.__name__:
            register_jitable(forceinline=True)(function)

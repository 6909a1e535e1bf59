"""Columns of a design, read where they are: a block of rows is scaled into the first-level cache.

Numba takes no list of arrays whose length it does not know, so that columns come as addresses. Whoever
calls holds the columns, and has checked their length and that each is contiguous or one constant.
"""

from __future__ import annotations

from typing import Any

import numba
from numba import types
from numba.extending import intrinsic

from fedtmle.model.kernels._compiled_stages import scale
from fedtmle.model.kernels._jit import jit
from fedtmle.model.types import Array, Bools, IntArray


def _as_pointer(_: Any, address: Any) -> Any:
    """How numba makes a pointer to float64 of an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    pointer: Any = types.CPointer
    return pointer(types.float64)(address), generate


_pointer: Any = intrinsic(_as_pointer)
_array: Any = numba.carray  # type: ignore[attr-defined]  # of a pointer and a shape


@jit
def gather(addresses: IntArray, constant: Bools, factors: Array, begin: int, size: int, block: Array) -> None:
    """Fill the first ``size`` places of ``block``, shape (d, BLOCK): the design from row ``begin`` on."""
    for j in range(len(addresses)):
        if constant[j]:
            block[j, :size] = _array(_pointer(addresses[j]), 1)[0] * factors[j]
        else:
            scale(_array(_pointer(addresses[j]), begin + size)[begin:], factors[j], block[j, :size])

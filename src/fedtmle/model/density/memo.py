"""A small bounded memory of pure computations, so that silos in one process share their work."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar, final

Value = TypeVar("Value")


@final
class Memo(Generic[Value]):
    """The last ``size`` values, by key; the lock is held while a value is computed.

    Forty silos that reach the same law at once then wait for one quadrature instead of doing
    forty. Only pure functions of the key belong here.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        with self._lock:
            if key not in self._values:
                self._values[key] = compute()
                if len(self._values) > self._size:
                    self._values.popitem(last=False)
            self._values.move_to_end(key)
            return self._values[key]

    def __reduce__(self) -> tuple[type[Memo[Value]], tuple[int]]:
        # A copy in another process starts empty: a lock cannot travel, and values are rebuilt.
        return Memo, (self._size,)

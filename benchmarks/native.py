"""The C loops, compiled on the spot and called without the interpreter's lock."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np

SOURCE = Path(__file__).parent / "loops.c"
FLAGS = ("-O3", "-march=native", "-ffast-math", "-shared", "-fPIC")


@cache
def library() -> ctypes.CDLL | None:
    """The compiled loops; None where there is no gcc."""
    gcc = shutil.which("gcc")
    if gcc is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "loops.so"
        subprocess.run([gcc, *FLAGS, str(SOURCE), "-o", str(target), "-lm"], check=True)  # noqa: S603
        loaded = ctypes.CDLL(str(target))
    loaded.memory_pass.restype = ctypes.c_double
    return loaded


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _shared(work: Callable[[int, int, int], None], n: int, threads: int) -> None:
    edges = [n * k // threads for k in range(threads + 1)]
    if threads == 1:
        return work(0, 0, n)
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda k: work(k, edges[k], edges[k + 1]), range(threads)))


def memory_pass(X: np.ndarray, threads: int) -> None:
    n = ctypes.c_long(X.shape[1])

    def work(_: int, first: int, last: int) -> None:
        library().memory_pass(_pointer(X), n, ctypes.c_long(first), ctypes.c_long(last))

    _shared(work, X.shape[1], threads)


def gradient(X: np.ndarray, eps: np.ndarray, threads: int) -> np.ndarray:
    n, sums = ctypes.c_long(X.shape[1]), np.zeros((threads, 3))

    def work(k: int, first: int, last: int) -> None:
        at = _pointer(sums[k])
        library().gradient(_pointer(X), n, _pointer(eps), ctypes.c_long(first), ctypes.c_long(last), at)

    _shared(work, X.shape[1], threads)
    return sums.sum(axis=0)


def kernel_density(points: np.ndarray, centres: np.ndarray, threads: int) -> np.ndarray:
    result = np.empty(points.shape[1])
    n, n0 = ctypes.c_long(points.shape[1]), ctypes.c_long(centres.shape[1])

    def work(_: int, first: int, last: int) -> None:
        library().kernel_density(
            _pointer(points),
            n,
            _pointer(centres),
            n0,
            ctypes.c_long(first),
            ctypes.c_long(last),
            _pointer(result),
        )

    _shared(work, points.shape[1], threads)
    return result

"""`import fedtmle` is light: heavy libraries are loaded when first needed."""

from __future__ import annotations

import subprocess
import sys

import fedtmle


def test_import_loads_no_heavy_library() -> None:
    heavy = "('numba', 'scipy', 'pandas', 'numpy')"
    code = f"import sys, fedtmle, fedtmle.cli; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.strip() == "[]"


def test_every_public_name_can_be_had() -> None:
    names = [name for name in fedtmle.__all__ if name not in ("ESTIMANDS", "TIME_ESTIMANDS", "plots")]
    for name in names:
        assert callable(getattr(fedtmle, name))
    for name in names:  # and no submodule of the same name has taken its place since
        assert callable(getattr(fedtmle, name))
    assert all(map(callable, (*fedtmle.ESTIMANDS, *fedtmle.TIME_ESTIMANDS)))
    assert callable(fedtmle.plots.forest)  # this one is a submodule
    assert set(fedtmle.__all__) <= set(dir(fedtmle))
    assert not hasattr(fedtmle, "nothing")
    starred: dict[str, object] = {}
    exec("from fedtmle import *", starred)  # noqa: S102 - as a user writes it
    assert set(fedtmle.__all__) <= set(starred)

"""Each bound's function equals a second transcription of the paper's LaTeX, on 20 random arguments."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest

from tests.theory import transcription
from tests.theory.arguments import NOT_TRANSCRIBED, bounds, draw

NAMES = sorted(set(bounds()) - NOT_TRANSCRIBED)


def test_every_bound_has_a_second_transcription() -> None:
    assert {name for name in NAMES if not hasattr(transcription, name)} == set()
    assert set(bounds()) >= NOT_TRANSCRIBED


@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_second_transcription(name: str) -> None:
    assert disagreement(name) <= 1e-12


def disagreement(name: str, function: Any = None) -> float:
    """The largest relative difference over 20 arguments; ``function`` stands for the package's own."""
    function = function or bounds()[name]
    rng = np.random.default_rng(sum(map(ord, name)))
    worst = 0.0
    for _ in range(20):
        arguments = draw(name, rng)
        ours = function(**arguments)
        second = getattr(transcription, name)
        keyword = any(p.kind is p.KEYWORD_ONLY for p in inspect.signature(second).parameters.values())
        theirs = second(**arguments) if keyword else second(*arguments.values())
        for a, b in zip(np.atleast_1d(ours), np.atleast_1d(theirs), strict=True):
            assert math.isfinite(a)
            worst = max(worst, abs(a - b) / max(abs(a), abs(b), 1e-9))
    return worst

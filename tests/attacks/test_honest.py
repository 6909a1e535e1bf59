"""Honest studies whose silos are at or above the floors are never refused by the default policy."""

from __future__ import annotations

import pytest

from tests.attacks.honest import honest, run_honest

USUAL = ("mean", "two arms", "study")


def outcomes(seeds: range, *kinds: str) -> list[tuple[int, str, str]]:
    """The runs that did not finish: seed, how they ended, why."""
    found = ((seed, *run_honest(*honest(seed, kinds=kinds))) for seed in seeds)
    return [(seed, how, why) for seed, how, why in found if how != "finished"]


@pytest.mark.parametrize("start", range(0, 160, 40))
def test_none_of_160_honest_studies_is_refused(start: int) -> None:
    assert outcomes(range(start, start + 40), *USUAL) == []


def test_honest_transport_is_not_refused() -> None:
    assert outcomes(range(3), "transport") == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(160, 2160, 250))
def test_none_of_2000_more_is_refused(start: int) -> None:
    assert outcomes(range(start, start + 250), *USUAL) == []


@pytest.mark.slow
def test_none_of_100_honest_transports_is_refused() -> None:
    assert outcomes(range(100, 200), "transport") == []

"""Honest studies whose silos are at or above the floors are seldom refused by the default policy."""

from __future__ import annotations

import pytest

from tests.attacks.honest import honest, run_honest

USUAL = ("mean", "two arms", "study")


def outcomes(seeds: range, *kinds: str) -> list[tuple[int, str, str]]:
    """The runs that did not finish: seed, how they ended, why."""
    found = ((seed, *run_honest(*honest(seed, kinds=kinds))) for seed in seeds)
    return [(seed, how, why) for seed, how, why in found if how != "finished"]


def refused(seeds: range, *kinds: str) -> int:
    """How many runs were refused, all because a combination of closing sums is nearly one person."""
    ended = outcomes(seeds, *kinds)
    assert {(how, why) for _, how, why in ended} <= {("refused", "min_people")}
    return len(ended)


def test_few_of_160_honest_studies_are_refused() -> None:
    assert refused(range(160), *USUAL) <= 2


def test_honest_transport_is_not_refused() -> None:
    assert outcomes(range(3), "transport") == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("start", range(160, 2160, 250))
def test_few_of_2000_more_are_refused(start: int) -> None:
    assert refused(range(start, start + 250), *USUAL) <= 13


@pytest.mark.slow
def test_few_of_100_honest_transports_are_refused() -> None:
    assert refused(range(100, 200), "transport") <= 5

"""Overlap and histograms equal the present package's, and longhand numbers of a small table."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fedtmle.errors import FitError
from fedtmle.estimation.diagnostics.base import AbstractDiagnostic, Pool
from fedtmle.estimation.diagnostics.histograms import (
    Followed,
    PropensityHistograms,
    Treatment,
    WeightHistograms,
)
from fedtmle.estimation.diagnostics.overlap import WEIGHT_ERROR, WeightOverlap, refuse_no_overlap
from fedtmle.programs.diagnostics import _ceilings
from fedtmle.targets.diagnostics import PROBABILITY_EDGES, WEIGHT_EDGES
from fedtmle_core.terms import product
from tests.effects.studies import population
from tests.effects.test_pooled import TARGETS, study_of
from tests.estimation.diagnostics.supplied import STUDIES, Supplied, pooled, ran


def overlap_of(rows: Supplied, outcome) -> WeightOverlap:
    return WeightOverlap(
        pool=rows.pool,
        weights=tuple(product(rows.term("weight"), H) for H in rows.terms("H")),
        ceilings=tuple(_ceilings(outcome.problem.prepare)),
        truncated=rows.terms("truncated"),
    )


def treatments(study, rows: Supplied) -> tuple[Treatment, ...]:
    return (Treatment(arms=study.target.arms, taken=rows.terms("taken"), scores=rows.terms("g")),)


def same_overlap(study, outcome, rows: Supplied) -> None:
    expected, found = outcome.details.overlap, rows.ask(overlap_of(rows, outcome))
    assert found.truncated == expected.truncated
    assert found.disclosing == (len(rows.sheets),) * len(expected.disclosing)
    for field in ("effective_sizes", "largest_shares", "mean_squares"):
        # Two means err by `WEIGHT_ERROR`; the present sums are rounded too.
        np.testing.assert_allclose(
            getattr(found, field), getattr(expected, field), rtol=6 * WEIGHT_ERROR, err_msg=field
        )
    histograms = rows.ask(PropensityHistograms(pool=rows.pool, treatments=treatments(study, rows)))
    old = outcome.details.diagnostics.overlap
    assert [(h.of, h.arm) for h in histograms] == [(h.of, h.arm) for h in old]
    for new, before in zip(histograms, old, strict=True):
        assert [b.count for b in new.bins] == [b.count for b in before.bins]
        assert {b.silos for b in new.bins} == {len(rows.sheets)}


@pytest.mark.parametrize("name", STUDIES)
def test_overlap_is_that_of_the_present_package(name: str) -> None:
    study, outcome, rows = ran(*STUDIES[name])
    same_overlap(study, outcome, rows)


def test_overlap_of_the_demonstration(demonstration) -> None:
    study, outcome, rows = demonstration
    same_overlap(study, outcome, rows)
    asked = rows.numbers(overlap_of(rows, outcome))
    assert asked == 8
    assert rows.numbers(PropensityHistograms(pool=rows.pool, treatments=treatments(study, rows))) == 24


def test_truncated_people_are_counted() -> None:
    study = dataclasses.replace(study_of(TARGETS["ATE"]), g_bounds=0.4)
    data = population(500, 2)
    _, outcome, rows = pooled(study, data, [np.arange(200), np.arange(200, 500)])
    assert min(outcome.details.overlap.truncated) > 10
    same_overlap(study, outcome, rows)


SMALL = {
    "H 0": np.array([0.0, 2.0, 4.0, 0.0, 0.5]),
    "H 1": np.array([1.5, 0.0, 0.0, 3.0, 0.0]),
    "truncated 0": np.array([0.0, 1.0, 1.0, 0.0, 1.0]),
    "g 0": np.array([0.04, 0.5, 0.951, 0.3, 0.05]),
    "g 1": np.array([0.96, 0.5, 0.049, 0.7, 0.95]),
    "taken 0": np.array([0.0, 1.0, 1.0, 0.0, 1.0]),
    "taken 1": np.array([1.0, 0.0, 0.0, 1.0, 0.0]),
}


def small(*parts: list[int]) -> Supplied:
    return Supplied.of([{name: column[part] for name, column in SMALL.items()} for part in parts])


@pytest.mark.parametrize("parts", [([0, 1, 2, 3, 4],), ([0, 3], [1, 4], [2]), ([4, 2], [0, 1, 3])])
def test_a_small_table_by_hand_in_any_partition(parts) -> None:
    rows = small(*parts)
    diagnostic = WeightOverlap(
        pool=rows.pool, weights=rows.terms("H"), ceilings=(3.0, 10.0), truncated=rows.terms("truncated")
    )
    found = rows.ask(diagnostic)
    assert found.truncated == (3,)
    assert found.disclosing == (len(parts),)
    assert found.effective_sizes == pytest.approx((6.5**2 / 20.25, 4.5**2 / 11.25), abs=1e-4)
    assert found.mean_squares == pytest.approx((20.25 / 5, 11.25 / 5), abs=1e-4)
    assert found.largest_shares == pytest.approx((3.0 / 6.5, 11.25**0.5 / 4.5), abs=1e-4)
    histograms = rows.ask(
        PropensityHistograms(
            pool=rows.pool,
            treatments=(Treatment(arms=("a", "b"), taken=rows.terms("taken"), scores=rows.terms("g")),),
        )
    )
    assert [(h.of, h.arm, h.period) for h in histograms] == [("b", "a", None), ("b", "b", None)]
    for histogram, own in zip(histograms, ([0.5, 0.049, 0.95], [0.96, 0.7]), strict=True):
        assert [b.count for b in histogram.bins] == np.histogram(own, PROBABILITY_EDGES)[0].tolist()
    weights = WeightHistograms(
        pool=rows.pool,
        followed=(
            Followed(name="a", weight=rows.term("H 0"), period=1),
            Followed(name="b", weight=rows.term("H 1"), period=2),
        ),
    )
    for each, own, period in zip(rows.ask(weights), ([2.0, 4.0, 0.5], [1.5, 3.0]), (1, 2), strict=True):
        edges = (0.0, *WEIGHT_EDGES, np.inf)
        assert [b.count for b in each.bins] == np.histogram(own, edges)[0].tolist()
        assert each.period == period


def test_no_overlap_is_refused() -> None:
    rows = small([0, 1, 2, 3, 4])
    found = rows.ask(
        WeightOverlap(
            pool=rows.pool, weights=rows.terms("H"), ceilings=(3.0, 10.0), truncated=rows.terms("truncated")
        )
    )
    refuse_no_overlap(found, means=("a", "b"), groups=("arm 0",), n=6, floor=0.1)
    with pytest.raises(FitError, match=r"arm 0 is below 0\.1 for 3 of 5 people") as raised:
        refuse_no_overlap(found, means=("a", "b"), groups=("arm 0",), n=5, floor=0.1)
    assert raised.value.reason == "overlap"
    with pytest.raises(FitError, match="nearly 0 for 3 of 6 people"):
        refuse_no_overlap(found, means=("a", "b"), groups=("arm 0",), n=6, floor=0.0)
    nobody = dataclasses.replace(found, effective_sizes=(1.0, 0.0))
    with pytest.raises(FitError, match="contributes to b"):
        refuse_no_overlap(nobody, means=("a", "b"), groups=("arm 0",), n=6, floor=0.1)


@pytest.mark.parametrize("error", [1e-6, 2e-5, 3e-3, 0.4])
@pytest.mark.parametrize(("n", "silos"), [(10, 1), (985, 8), (10**6, 50), (10**6, 1)])
def test_places_are_the_fewest_for_an_error(n: int, silos: int, error: float) -> None:
    places = Pool(n=n, silos=silos).places(error)
    assert silos * 2.0 ** -(places + 1) / n <= error
    assert places == 0 or silos * 2.0**-places / n > error


def test_every_kind_of_study_has_the_diagnostic_or_a_reason() -> None:
    for diagnostic in (WeightOverlap, PropensityHistograms, WeightHistograms):
        assert issubclass(diagnostic, AbstractDiagnostic)
        assert diagnostic.kinds() == ("effect", "time", "regimes")

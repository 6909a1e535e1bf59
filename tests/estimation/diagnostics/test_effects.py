"""The diagnostics of studies over questions are those of the package where nothing is hidden."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.demo import IHDP, ihdp_silos
from fedtmle.estimation.diagnostics.effects import EFFECT_DIAGNOSIS
from fedtmle.estimation.flow import Ran, run_open
from fedtmle.estimation.loader import Declared
from fedtmle.estimation.study import effect_flow
from fedtmle.protocol.outcome import Targeted
from fedtmle.targets.diagnostics import Diagnostics
from tests.effects.studies import change, cut, finish
from tests.effects.test_pooled import OPTIONS, TARGETS, partitions, people, study_of
from tests.estimation.over_questions import plan_of, sheets_of
from tests.narrow import targeted


def diagnosed(study: ft.Study, silos) -> Ran[Targeted]:
    declared = Declared(study)
    flow = effect_flow(declared, hospitals=len(silos), diagnosis=EFFECT_DIAGNOSIS)
    return run_open(flow, sheets_of(declared, silos), plan_of(declared))


def details_of(outcome: Targeted) -> Any:
    """The details, whose type is that of the study."""
    return outcome.details


def same(study: ft.Study, found: Diagnostics, expected: Diagnostics, silos: int) -> None:
    """Both are the same to the rounding of the sums; nuisances differ by what their fits are stopped at."""
    assert [(h.of, h.arm) for h in found.overlap] == [(h.of, h.arm) for h in expected.overlap]
    for histogram, before in zip(found.overlap, expected.overlap, strict=True):
        assert [b.count for b in histogram.bins] == [b.count for b in before.bins]
    new, old = found.fit, expected.fit
    variance = old.variance
    assert new.r_squared == pytest.approx(old.r_squared, abs=1e-5 / variance)
    assert (new.deviance is None) == (old.deviance is None)
    if old.deviance is not None:
        assert new.deviance == pytest.approx(old.deviance, abs=1e-4)
    assert new.variance == pytest.approx(old.variance, abs=1e-5)
    assert new.residual_variance == pytest.approx(old.residual_variance, abs=1e-5)
    assert new.edges == pytest.approx(old.edges, abs=1e-3)
    assert len(new.calibration) == len(old.calibration)
    assert sum(b.count for b in new.calibration) == sum(b.count for b in old.calibration)
    assert {b.silos for b in new.calibration} == {silos}
    assert len(found.ladder) == len(expected.ladder)
    low = study.outcome_bounds[0]
    for rung, rung_before in zip(found.ladder, expected.ladder, strict=True):
        assert rung.bound == pytest.approx(rung_before.bound, rel=1e-12)
        assert rung.n == rung_before.n
        shift = np.full(len(rung.mean), low)
        (psi, covariance), (psi_old, covariance_old) = rung.estimate(shift), rung_before.estimate(shift)
        error = np.sqrt(np.diag(covariance_old))
        np.testing.assert_allclose(psi, psi_old, atol=error.min() / 100)
        np.testing.assert_allclose(np.sqrt(np.diag(covariance)), error, rtol=3e-3)
    assert (found.balance is None) == (expected.balance is None)
    for line, present in zip(found.balance or (), expected.balance or (), strict=True):
        assert (line.covariate.name, line.covariate.level) == (
            present.covariate.name,
            present.covariate.level,
        )
        width = present.covariate.high - present.covariate.low
        assert line.means == pytest.approx(present.means, abs=1e-4 * width)
        assert line.weighted_means == pytest.approx(present.weighted_means, abs=2e-4 * width)
        assert line.differences == pytest.approx(present.differences, abs=3e-3)
        assert line.weighted_differences == pytest.approx(present.weighted_differences, abs=3e-3)
        assert line.sds == pytest.approx(present.sds, rel=1e-2)


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", TARGETS)
def test_diagnostics_of_every_effect_are_those_of_the_package(name: str, option: str) -> None:
    study = study_of(TARGETS[name], **OPTIONS[option])
    data = people(study, 400, seed=5 + len(name))
    silos = cut(data, partitions(data, 3)["random"])
    finished, _ = finish(study, {"pooled": data})
    found, details = details_of(diagnosed(study, silos).result), targeted(finished).details
    same(study, found.diagnostics, details.diagnostics, len(silos))
    for field in ("effective_sizes", "mean_squares"):
        expected = getattr(details.overlap, field)
        assert getattr(found.overlap, field) == pytest.approx(expected, rel=2e-4), field
    # A weight's interval is its bound, and no wider than that of the bound on g alone.
    for new, old in zip(found.overlap.largest_shares, details.overlap.largest_shares, strict=True):
        assert 0 < new <= old * (1 + 2e-4)


@pytest.mark.parametrize(
    "options",
    [{"folds": 3}, {"clever": "weight"}, {"submodel": "contrast"}, {"link": "linear"}, {"g_bounds": 0.1}],
    ids=str,
)
def test_diagnostics_of_options_are_those_of_the_package(options) -> None:
    study = change(study_of(TARGETS["ATE"], **OPTIONS["missing"]), **options)
    data = people(study, 400, seed=5)
    finished, _ = finish(study, {"pooled": data})
    found = details_of(diagnosed(study, {"pooled": data}).result)
    same(study, found.diagnostics, targeted(finished).details.diagnostics, 1)


def test_the_demonstration() -> None:
    silos = ihdp_silos()
    data = {name: np.concatenate([silo[name] for silo in silos.values()]) for name in silos["hospital 1"]}
    finished, _ = finish(IHDP, {"pooled": data})
    declared = Declared(IHDP)
    ran, less = (
        diagnosed(IHDP, silos),
        run_open(effect_flow(declared, hospitals=len(silos)), sheets_of(declared, silos), plan_of(declared)),
    )
    same(IHDP, details_of(ran.result).diagnostics, targeted(finished).details.diagnostics, 8)
    assert ran.rounds == less.rounds  # diagnostics ride along with the closing sums
    assert ran.numbers - less.numbers <= 250


def test_diagnostics_are_the_same_bits_in_any_order_of_silos() -> None:
    study = study_of(TARGETS["ATE"], **OPTIONS["all"])
    data = people(study, 200, seed=2)
    silos = cut(data, partitions(data, 3)["random"])
    backwards = dict([*silos.items()][::-1])
    one, other = (details_of(diagnosed(study, each).result).diagnostics for each in (silos, backwards))
    assert str(one) == str(other)

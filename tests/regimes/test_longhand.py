"""The federated sequential regression equals the one written out in numpy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from tests.regimes.law import draw, study
from tests.regimes.longhand import sequential

RULES = ("0", "1", "threshold", "onset", "shares")


def estimates(result: ft.StudyResult) -> tuple[np.ndarray, np.ndarray]:
    document = result.to_dict()
    return np.array(document["psi"]), np.array(document["std_error"])


@pytest.mark.parametrize(
    ("outcome", "bounds", "options"),
    [
        ("b", (0.0, 1.0), {}),
        ("b", (0.0, 1.0), {"g_bounds": 0.1}),
        ("y", (-8.0, 8.0), {}),
        ("b", (0.0, 1.0), {"weights": "weight"}),
    ],
)
def test_outcome_at_the_end(outcome: str, bounds: Any, options: dict[str, Any]) -> None:
    """All kinds of rules, with censoring in each of three periods."""
    records = draw(1500, 3, 11)
    silos = {"north": records[:700], "south": records[700:]}
    asked = study(periods=3, outcome=outcome, **({"g_bounds": None} | options))
    psi, error = estimates(ft.run(asked, silos))
    truncated = 0
    for k, rule in enumerate(RULES):
        largest = 1.0 / options["g_bounds"] if "g_bounds" in options else np.inf
        expected = sequential(
            records,
            rule,
            3,
            outcome,
            bounds=bounds,
            largest=largest,
            weight=records["weight"].to_numpy() if "weights" in options else None,
            binary=outcome == "b",
        )
        truncated += int((expected.weights == largest).sum())
        assert psi[k] == pytest.approx(expected.psi, abs=1e-10)
        assert error[k] == pytest.approx(expected.std_error, abs=1e-9)
    assert (truncated > 20) == ("g_bounds" in options)


def test_event_over_time() -> None:
    records = draw(2500, 4, 3, survival=True)
    silos = {"north": records[:900], "south": records[900:]}
    psi, error = estimates(ft.run(study(periods=4, survival=True, horizons=(2, 4), g_bounds=None), silos))
    for k, rule in enumerate(RULES):
        for j, horizon in enumerate((2, 4)):
            expected = sequential(records, rule, horizon, "y", survival=True)
            assert psi[2 * k + j] == pytest.approx(expected.psi, abs=1e-10)
            assert error[2 * k + j] == pytest.approx(expected.std_error, abs=1e-9)


def drawn_folds(sizes: list[int], count: int, seed: int) -> np.ndarray:
    """Return the folds of the silos' people by the public rule, one silo after the other."""
    draws = [np.random.Generator(np.random.Philox(key=[seed, n])).permutation(n) for n in sizes]
    return np.concatenate(draws) % count


@pytest.mark.parametrize("survival", [False, True])
def test_cross_fitting(survival: bool) -> None:
    """Each fold goes backwards on its own: models without a fold regress what models without it predict."""
    records = draw(900, 2, 17, survival=survival)
    silos = {"north": records[:400], "south": records[400:]}
    rules = (ft.Static("1"), ft.Threshold("l", 0.2, arm="1", otherwise="0"))
    asked = study(periods=2, survival=survival, g_bounds=None, folds=3, rules=rules)
    psi, error = estimates(ft.run(asked, silos))
    folds = drawn_folds([400, 500], 3, asked.seed)
    for k, rule in enumerate(("1", "threshold")):
        expected = sequential(records, rule, 2, "y" if survival else "b", survival=survival, folds=folds)
        assert psi[k] == pytest.approx(expected.psi, abs=1e-10)
        assert error[k] == pytest.approx(expected.std_error, abs=1e-9)


def test_cross_fitting_of_super_learners() -> None:
    """The folds of a super learner are within the rows that an outer fold leaves."""
    records = draw(900, 2, 17)
    silos = {"north": records[:400], "south": records[400:]}
    rules = (ft.Static("1"),)
    learner = ft.SuperLearner((ft.GLM("w + l + a + lag1_a"), ft.GLM("w + a")), folds=2)
    plain = estimates(ft.run(study(periods=2, rules=rules, folds=2), silos))
    learned = estimates(ft.run(study(periods=2, rules=rules, folds=2, outcome_model=learner), silos))
    assert learned[0] != plain[0]
    assert np.abs(learned[0] - plain[0]) < 0.5 * plain[1]


@pytest.mark.parametrize("survival", [False, True])
def test_strata(survival: bool) -> None:
    """Each stratum has its own fluctuations; the estimates of everyone are those of a study without."""
    records = draw(900, 2, 17, survival=survival)
    records = records.assign(half=np.where(records["w"] > 0, "p", "q"))
    silos = {"north": records[:400], "south": records[400:]}
    rules = (ft.Static("1"), ft.Threshold("l", 0.2, arm="1", otherwise="0"))
    plain = study(periods=2, survival=survival, rules=rules, g_bounds=None, weights="weight")
    asked = replace(
        plain,
        target=replace(plain.target, strata="half"),
        variables=ft.Variables({**plain.variables, "half": {"kind": "category", "levels": ["p", "q"]}}),
    )
    result = ft.run(asked, silos)
    psi, error = estimates(result)
    everyone = estimates(ft.run(plain, silos))
    assert psi[:2] == pytest.approx(everyone[0], abs=1e-10)
    assert error[:2] == pytest.approx(everyone[1], abs=1e-10)
    for j, level in enumerate("pq", start=1):
        for k, rule in enumerate(("1", "threshold")):
            expected = sequential(
                records,
                rule,
                2,
                "y" if survival else "b",
                survival=survival,
                weight=records["weight"].to_numpy(),
                inside=(records["half"] == level).to_numpy(),
            )
            assert psi[2 * j + k] == pytest.approx(expected.psi, abs=1e-10)
            assert error[2 * j + k] == pytest.approx(expected.std_error, abs=1e-9)
    names = [row["estimand"] for row in result.document["estimates"]]
    assert [name.endswith(" in q") for name in names] == [False] * 4 + [True] * 2


def test_the_censored_carry_the_fluctuated_prediction() -> None:
    """The known mistake would be seen."""
    records = draw(1500, 3, 11)
    right, wrong = (
        sequential(records, "1", 3, "b", carry_unfluctuated=mistake).psi for mistake in (False, True)
    )
    (psi,), _ = estimates(ft.run(study(periods=3, rules=(ft.Static("1"),), g_bounds=None), {"all": records}))
    assert psi == pytest.approx(right, abs=1e-10)
    assert abs(psi - wrong) > 1e-6

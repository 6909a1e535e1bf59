"""Published data against Kaplan-Meier with Greenwood's standard errors, and the hazard form of R survtmle."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from tests.time.studies import colon, colon_study, rossi, rossi_study, split


def values(result: ft.StudyResult) -> tuple[list[float], list[float]]:
    rows = result.document["estimates"]
    return [row["estimate"] for row in rows], [row["std_error"] for row in rows]


def test_colon_without_covariates_is_kaplan_meier_with_greenwood() -> None:
    """The figures were computed longhand from the life table of each arm."""
    risks, errors = values(ft.run(colon_study(), split(colon(), 3)))
    assert risks == pytest.approx([0.474198804997, 0.365698898106], abs=1e-12)
    assert errors == pytest.approx([0.028176274147, 0.027655209602], abs=1e-12)
    means, _ = values(ft.run(colon_study(ft.RMST), split(colon(), 3)))
    assert means == pytest.approx([7.582787132597, 8.114906931964], abs=1e-11)


def greenwood(last: np.ndarray, event: np.ndarray, periods: int) -> tuple[list[float], list[float]]:
    """Return the Kaplan-Meier curve and Greenwood's standard error of each period."""
    survival, total, curve, errors = 1.0, 0.0, [], []
    for t in range(1, periods + 1):
        at_risk, events = int((last >= t).sum()), int((event & (last == t)).sum())
        survival *= 1 - events / at_risk
        total += events / (at_risk * (at_risk - events))
        curve.append(survival)
        errors.append(survival * total**0.5)
    return curve, errors


def test_whole_curves_are_those_of_scikit_survival() -> None:
    sksurv = pytest.importorskip("sksurv.nonparametric")
    records = colon()
    result = ft.run(colon_study(ft.Survival, horizons=tuple(range(1, 11))), split(records, 2))
    period = np.ceil(records.time / 182.625).clip(1)
    last, event = np.minimum(period, 10), (records.status == 1) & (period <= 10)
    for curve, arm in zip(result.document["curves"], ("Obs", "Lev+5FU"), strict=True):
        here = (records.rx == arm).to_numpy()
        times, expected = sksurv.kaplan_meier_estimator(event.to_numpy()[here], last.to_numpy()[here])
        assert times.tolist() == list(range(1, 11))
        assert curve["estimate"] == pytest.approx(expected.tolist(), abs=1e-12)
        _, errors = greenwood(last.to_numpy()[here], event.to_numpy()[here], 10)
        assert curve["std_error"] == pytest.approx(errors, abs=1e-12)


def test_competing_causes_without_covariates_are_aalen_johansen() -> None:
    sksurv = pytest.importorskip("sksurv.nonparametric")
    draw = np.random.default_rng(4)
    records = pd.DataFrame(
        {
            "t": draw.integers(1, 8, size=400).astype(float),
            "what": draw.choice(["none", "relapse", "death"], size=400, p=[0.4, 0.35, 0.25]),
            "a": draw.integers(0, 2, size=400),
        }
    )
    variables = ft.Variables(
        {
            "t": {"kind": "number", "range": (0, 8)},
            "what": {"kind": "category", "levels": ["none", "relapse", "death"]},
            "a": {"kind": "binary"},
        }
    )
    study = ft.Study(
        target=ft.Risk(
            outcome="what",
            time="t",
            treatment="a",
            periods=7,
            causes=("relapse", "death"),
            censored="none",
            horizons=(2, 5, 7),
        ),
        treatment_model=ft.GLM("1"),
        algorithm=ft.Gradient(optimizer=ft.Newton(), tolerance=1e-11),
        variables=variables,
    )
    result = ft.run(study, split(records, 2))
    for curve in result.document["curves"]:
        here = records[records.a == int(curve["arm"])]
        code = here.what.map({"none": 0, "relapse": 1, "death": 2}).to_numpy()
        times, incidence = sksurv.cumulative_incidence_competing_risks(code, here.t.to_numpy())
        row = incidence[{"relapse": 1, "death": 2}[curve["cause"]]]
        expected = [row[np.searchsorted(times, h, side="right") - 1] for h in (2, 5, 7)]
        assert curve["estimate"] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("algorithm", ["Gradient", "Coded", "Central"])
def test_rossi_is_the_hazard_form_of_survtmle(algorithm: str) -> None:
    """Main effects, linear period, nobody censored before the end, no bounds."""
    options: dict[str, ft.AbstractAlgorithm] = {
        "Gradient": ft.Gradient(optimizer=ft.Newton(), tolerance=1e-11),
        "Coded": ft.Coded(tolerance=3e-9),
        "Central": ft.Central(tolerance=1e-10),
    }
    result = ft.run(rossi_study(algorithm=options[algorithm]), split(rossi(), 2))
    risks, errors = values(result)
    assert result.document["converged"]
    assert risks == pytest.approx([0.306758248671, 0.226894211223], abs=1e-8)
    assert errors == pytest.approx([0.031198189836, 0.028373479186], abs=1e-8)
    assert result.document["updates"] > 1, "the clever covariate moves with the hazards"

"""C(silo) in treatment over time: coefficients of each silo's own, as those of indicator columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.errors import DataError, InputError, RefusedError
from fedtmle.initial.design import design
from fedtmle.initial.glm import GLMModel, OffsetResponse
from fedtmle.initial.own import OwnBlock, ProfiledModel, by_silo
from fedtmle.model.table import SILO, Table
from fedtmle.privacy.answers import Submodels, explain
from fedtmle.programs.regimes import RegimeDetails, predictors
from fedtmle.programs.superlearner import OwnCoefficients, own_blocks, own_view
from fedtmle.protocol.query import AnsweredQuery
from fedtmle.protocol.regression import FitGradientQuery
from fedtmle.runtime.rows import LocalRows
from fedtmle.studies.run import pooled_rows
from fedtmle.targets.regimes.statistics import ModifiedRows
from fedtmle_core.types import Array, Part
from tests.effects.studies import finish
from tests.effects.test_own import SILOS, Watched, planned, same_bytes, totals_of
from tests.narrow import targeted
from tests.premise import Premise
from tests.regimes.imputed import holed
from tests.regimes.law import draw, expit
from tests.regimes.law import study as study_of_law

__all__ = ["planned"]  # a fixture

STATIC = (ft.Static("0"), ft.Static("1"))
SHIFTS = (ft.Shift(), ft.Shift(by=-0.5), ft.Shift(by=0.3, most=2.0))
LEVEL = {
    "outcome_model": "w + l + a + lag1_a + C(silo)",
    "treatment_model": "w + l + lag1_a + C(silo)",
    "censoring_model": "l + a + C(silo)",
}
SLOPES = {
    "outcome_model": "w + l + lag1_a + a*C(silo)",
    "treatment_model": "w + lag1_a + l*C(silo)",
    "censoring_model": "a + l:C(silo)",
}
LAGS = {
    "outcome_model": "w + l + a + lag1_l*C(silo)",
    "treatment_model": "w + l + lag1_a:C(silo)",
    "censoring_model": "l + a",
}
ALONE = {"outcome_model": "C(silo)", "treatment_model": "C(silo)", "censoring_model": "C(silo)"}
SHIFTED = {
    "outcome_model": "w + l + lag1_a + a*C(silo)",
    "treatment_model": "w + l + lag1_a + a*C(silo) + a:l + I(a**2)",
}


def frames(periods: int = 2, seed: int = 3, **law: Any) -> dict[str, pd.DataFrame]:
    """Four hospitals, each with its own covariates, treatment and outcome."""
    data = {}
    for k, (silo, n) in enumerate(zip(SILOS, (160, 140, 190, 150), strict=True)):
        records = draw(n, periods, 10 * seed + k, **law).assign(site=silo)
        records["w"] = (records["w"] + 0.3 * (k - 1.5)).clip(-3, 3)
        rng = np.random.default_rng([seed, k])
        for name in ("b",):
            if name in records and not law.get("dose"):
                turned = (rng.random(n) < 0.08 * k) & records[name].notna()
                records.loc[turned, name] = 1.0 - records.loc[turned, name]
        data[silo] = records
    return data


LAW = ("survival", "censors", "dose", "outcome", "horizons")  # what the dictionary depends on


def study(models: dict[str, str], *, term: str = "C(silo)", periods: int = 2, **options: Any) -> ft.Study:
    fitted: dict[str, Any] = {
        role: ft.GLM(formula.replace("C(silo)", term)) for role, formula in models.items()
    }
    options = {"rules": STATIC} | options
    law = {key: value for key, value in options.items() if key in (*LAW, "rules")}
    declared = study_of_law(periods=periods, **law).variables
    variables = ft.Variables({**declared, "site": {"kind": "category", "levels": list(SILOS)}})
    return study_of_law(periods=periods, **({"variables": variables} | fitted | options))


def learned(term: str) -> dict[str, Any]:
    formulas = (f"w + l + a + lag1_a + {term}", f"w + {term}")
    return {"outcome_model": ft.SuperLearner(tuple(map(ft.GLM, formulas)), folds=2)}


DOSE: dict[str, Any] = {"dose": True, "censors": False, "outcome": "y", "rules": SHIFTS}
CASES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "level": (LEVEL, {}),
    "slopes": (SLOPES, {}),
    "lags": (LAGS, {}),
    "no other column": (ALONE, {}),
    "three periods, every rule": (LEVEL, {"periods": 3, "rules": (*STATIC, ft.Onset("l", 0.5, "1", "0"))}),
    "events": (LEVEL, {"survival": True, "horizons": (1, 2)}),
    "folds": (SLOPES, {"folds": 2}),
    "weights": (LEVEL, {"weights": "weight"}),
    "continuous": (SLOPES, {"outcome": "y"}),
    "shifted doses": (SHIFTED, DOSE),
    "shifted doses and folds": (SHIFTED, {**DOSE, "folds": 2}),
    "rounded": (SLOPES, {"sums": "rounded", "fit_accuracy": 1e-9}),
    "one step": (LEVEL, {"algorithm": ft.OneStep(), "sums": "exact"}),
    "local": (LEVEL, {"algorithm": ft.LocalAverage(max_updates=3)}),
    "diagnosed": (LEVEL, {"diagnostics": True}),
}


def law_of(options: dict[str, Any]) -> dict[str, Any]:
    return {key: options[key] for key in ("periods", "survival", "dose", "censors") if key in options}


def close(one: ft.StudyResult, other: ft.StudyResult, rtol: float = 1e-8) -> None:
    for column in ("estimate", "std_error"):
        np.testing.assert_allclose(one.table()[column], other.table()[column], rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
def test_estimates_are_those_of_a_column_that_names_the_silo(name: str) -> None:
    models, options = CASES[name]
    data = frames(**law_of(options))
    one, other = (ft.run(study(models, term=term, **options), data) for term in ("C(silo)", "C(site)"))
    close(one, other)


def test_candidates_of_a_super_learner_have_own_coefficients() -> None:
    one, other = (
        ft.run(study(LEVEL, term=term, **learned(term)), frames()) for term in ("C(silo)", "C(site)")
    )
    close(one, other)


def test_open_runs_are_the_pooled_run() -> None:
    data = frames()
    close(ft.run(study(SLOPES), data), ft.run(study(SLOPES, algorithm=ft.Central(tolerance=1e-11)), data))


# Coefficients, by hand.


def reweighted(X: Array, y: Array, w: Array) -> Array:
    """Iteratively reweighted least squares of a logistic model."""
    beta = np.zeros(len(X))
    for _ in range(40):
        mu = expit(beta @ X)
        beta = beta + np.linalg.solve((X * (w * mu * (1 - mu))) @ X.T, X @ (w * (y - mu)))
    return beta


def fitted_with(models: dict[str, str], **options: Any) -> tuple[RegimeDetails, Table, OwnCoefficients]:
    """Return the details of a study, its pooled rows and the view of all its models."""
    asked = study(models, **options)
    assert not asked.has_silo_columns
    finished, tables = finish(asked, frames(**law_of(options)))
    details = targeted(finished).details
    assert isinstance(details, RegimeDetails)
    view = own_view(predictors(details.problem.sequence.scores, details.problem.chains))
    assert view is not None
    pooled = pooled_rows(asked, tables)
    assert isinstance(pooled, Table)
    return details, pooled, view


def blocks_and_models(details: RegimeDetails) -> Iterator[tuple[Any, OwnBlock]]:
    for fits in details.nuisances.values():
        for fit in fits:
            (block,) = own_blocks((fit,))
            assert isinstance(block, OwnBlock)
            yield fit, block


@pytest.mark.parametrize(
    ("models", "options"),
    [
        (LEVEL, {"periods": 3}),
        (SLOPES, {}),
        (LEVEL, {"survival": True, "horizons": (1, 2)}),
        (SHIFTED, {**DOSE, "outcome": "b"}),
    ],
    ids=["level", "slopes", "events", "shifted doses"],
)
def test_every_model_is_that_of_indicator_columns(models: dict[str, str], options: dict[str, Any]) -> None:
    """Each model of each period, on the outcomes that the models of later periods predict."""
    details, pooled, view = fitted_with(models, **options)
    shown = view.of(pooled)
    assert isinstance(shown, Table)
    with Premise("the response is a prediction", at_least=0.1) as is_predicted:
        for fit, block in blocks_and_models(details):
            whole, rows = block.model.whole, block.view.of(shown) if block.view else shown
            assert isinstance(whole, GLMModel)
            assert isinstance(rows, Table)
            response = whole.response
            if isinstance(response, OffsetResponse):  # where the search began
                response = response.response
            long = response.long(rows)
            y, w = response.of(long)
            is_predicted.holds(bool(((y > 0) & (y < 1)).any()))
            X = design(whole.formula, long, whole.levels)
            codes = long.factors[SILO].codes
            own, common = list(block.model.own_columns), list(block.model.common_columns)
            silos = [X[j] * (codes == m) for j in own for m in range(len(SILOS))]
            beta = reweighted(np.stack([*X[common], *silos]), y, w)
            names = block.names
            found = [shown.numeric[name][np.argmax(codes_of(shown) == m)] for name in names for m in range(4)]
            of_fit = np.array(fit.coefficients)[common]
            np.testing.assert_allclose(of_fit, beta[: len(common)], rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(found, beta[len(common) :], rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(
                fit.predict(long), expit(beta @ np.stack([*X[common], *silos])), rtol=1e-8
            )


def codes_of(table: Table) -> Array:
    return np.asarray(table.factors[SILO].codes)


# Under masks.


@pytest.mark.parametrize(
    ("models", "options"),
    [
        (LEVEL, {}),
        (SLOPES, {"folds": 2}),
        (LEVEL, {"survival": True}),
        (SHIFTED, DOSE),
        (LEVEL, {"algorithm": ft.Coded(), "sums": "rounded"}),
        (LEVEL, {"diagnostics": True}),
    ],
    ids=["level", "slopes and folds", "events", "shifted doses", "rounded", "diagnosed"],
)
def test_masked_is_open_byte_for_byte(
    models: dict[str, str], options: dict[str, Any], planned: Watched
) -> None:
    same_bytes(planned, lambda how: study(models, aggregation=how, **options), frames(**law_of(options)))


@pytest.mark.parametrize(
    ("models", "options"),
    [
        (LEVEL, {"sums": "exact"}),
        (SLOPES, {"sums": "rounded", "algorithm": ft.Coded()}),
        (SHIFTED, {**DOSE, "rules": SHIFTS[:2], "sums": "exact"}),
    ],
    ids=["level", "slopes", "shifted doses"],
)
def test_no_total_says_which_silo_has_which_rows(models: dict[str, str], options: dict[str, Any]) -> None:
    """If two silos exchange all their rows, every broadcast of a masked study stays the same."""
    data = frames(**law_of(options))
    exchanged = {**data, "south": data["east"], "east": data["south"]}
    asked = study(models, aggregation="masked", **options)
    assert totals_of(asked, data) == totals_of(asked, exchanged)


def test_with_columns_of_one_silo_the_totals_would_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    data = frames()
    exchanged = {**data, "south": data["east"], "east": data["south"]}
    monkeypatch.setattr("fedtmle.programs.nuisance.own_formula", lambda *_: None)
    asked = study(LEVEL, aggregation="masked", sums="exact")
    assert totals_of(asked, data) != totals_of(asked, exchanged)


def test_a_pilot_with_the_silo_is_refused_under_masks() -> None:
    pilot = ft.Pilot(ft.GLM("w + C(silo)"), at="north")
    with pytest.raises(InputError, match="in Pilot, C\\(silo\\) has such columns"):
        study(LEVEL, censoring_model=pilot, aggregation="masked")


# Silos whose own coefficients have no finite values, or none at all.


def test_a_silo_without_censoring_is_counted_in_a_warning() -> None:
    data = frames()
    whole = data["east"]["b"].notna()
    data["east"] = data["east"][whole].reset_index(drop=True)
    for aggregation in ("open", "masked"):
        told = ft.run(study(LEVEL, aggregation=aggregation), data).document["warnings"]
        labels = [each.split(",")[0] for each in told if "at 1 silo, C(silo) predicts" in each]
        assert labels == ["censoring model of period 1", "censoring model of period 2"]


def test_a_silo_with_nobody_left_in_a_period_is_told_so() -> None:
    data = frames()
    later = ["l2", "a2", "c2", "b", "y"]
    data["east"].loc[:, later] = np.nan
    data["east"] = data["east"].assign(c1=1.0)
    with pytest.raises(DataError, match=r"period 2.*no row to which its own intercept, C\(silo\)"):
        ft.run(study(LEVEL), data)


def test_own_coefficients_are_found_once_for_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many views show them: every step back, every fluctuation and the joint problem."""
    found: list[tuple[OwnBlock, int]] = []
    of = OwnBlock.of

    def counted(block: OwnBlock, rows: Any) -> tuple[float, ...]:
        found.append((block, id(block)))
        return of(block, rows)

    monkeypatch.setattr(OwnBlock, "of", counted)
    data = frames(3)
    ft.run(study(LEVEL, periods=3), {name: data[name] for name in ("north", "east")})
    assert found
    numbers = [number for _, number in found]
    most = max(map(numbers.count, numbers))
    assert most <= 4  # by two silos, for the fluctuation of the fit and for what follows


# Imputed covariates.


def gapped(how: str) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """Records with missing covariates, and how the dictionary declares them."""
    data = frames()
    for k, (silo, records) in enumerate(data.items()):
        missing = holed(records, 2, k)
        data[silo] = missing if how == "impute" else records.assign(w=missing["w"])
    declared: dict[str, Any] = {"w": {"kind": "number", "range": (-3, 3), "missing": how}}
    if how == "impute":
        declared["l"] = {"kind": "number", "range": (-4, 4), "missing": how}
    return data, declared


def with_gaps(asked: ft.Study, declared: dict[str, Any]) -> ft.Study:
    variables = ft.Variables({**asked.variables, **declared})
    return replace(asked, variables=variables, imputation_sweeps=1)


@pytest.mark.parametrize("how", ["impute", "indicator"])
def test_covariates_may_be_missing(how: str) -> None:
    """Each completed data set has own coefficients."""
    data, declared = gapped(how)
    silo, site = (with_gaps(study(LEVEL, term=term), declared) for term in ("C(silo)", "C(site)"))
    one = ft.run(silo, data)
    close(one, ft.run(site, data))
    close(one, ft.run(replace(silo, algorithm=ft.Central(tolerance=1e-11)), data))
    masked = ft.run(replace(silo, aggregation="masked"), data).table()
    apart = abs(masked["estimate"] - one.table()["estimate"]) / one.table()["std_error"]
    assert apart.max() < (0.3 if how == "impute" else 1e-12)  # masked silos draw other values


# The guard and the audit.


def modified(rules: tuple[ft.Shift, ...], data: dict[str, pd.DataFrame]) -> tuple[list[ProfiledModel], Table]:
    """Return the models of the doses' rows in period 1, one for each rule, and one silo's rows."""
    options = {**DOSE, "rules": rules}
    asked = study(SHIFTED, **options)
    finished, tables = finish(asked, data)
    details = targeted(finished).details
    assert isinstance(details, RegimeDetails)
    pooled = pooled_rows(asked, tables)
    scores = details.problem.sequence.scores[0]
    blocks = list(own_blocks(each for each in scores.modified if each is not None))
    models = [block.model for block in blocks if isinstance(block, OwnBlock)]
    assert all(isinstance(model.whole.response, ModifiedRows) for model in models)
    rows = next(part for _, part in by_silo(details.problem.sequence.views[0].of(pooled)))
    assert isinstance(rows, Table)
    return models, rows


def test_a_person_and_the_shifted_copy_are_judged_as_one_row() -> None:
    """The sum of both, less what the sums of the block's columns explain within the silo."""
    (model, _), rows = modified(SHIFTS, frames(dose=True, censors=False))
    whole = model.whole
    assert isinstance(whole, GLMModel)
    beta, submodel = np.linspace(-0.3, 0.4, model.dim), model.submodel(None, rows)
    (silo,) = submodel.silos
    long = whole.response.long(rows)
    y, w = whole.response.of(long)
    X = np.ldexp(design(whole.formula, long, whole.levels), -np.array(whole.scales)[:, None])
    slopes = w * (expit(silo.point(beta) @ X) - y)
    both = np.add.reduceat(slopes * X, np.arange(0, long.n_rows, 2), axis=1)
    own, common = both[list(silo.own)], both[silo.common]
    left = common - common @ own.T @ np.linalg.inv(own @ own.T) @ own
    told = np.concatenate([piece.rows for piece in submodel.disclosed_rows(beta)], axis=1)
    assert told.shape[1] == rows.n_rows
    np.testing.assert_allclose(told, left, atol=1e-12)
    gradient = submodel.sums(beta, Part.GRADIENT).values()
    np.testing.assert_allclose(told.sum(axis=1), gradient, atol=1e-10)
    local = LocalRows("north", rows, rows.n_rows)
    query = FitGradientQuery(
        model=model, eps=beta, C=np.eye(model.dim), exponent=-30, n=rows.n_rows, stream=""
    )
    explained = explain(AnsweredQuery(query=query, answer=query.answer(local)), local, rows, Submodels())
    assert explained is not None
    np.testing.assert_allclose(explained.terms(rows).sum(axis=1), gradient, atol=1e-9)


def test_two_shifts_that_differ_in_one_person_are_judged_together() -> None:
    """As without own coefficients: at zero the residuals of all modified rows are known."""
    models, _ = modified(SHIFTS, frames(dose=True, censors=False))
    shared = {model.shared_residuals for model in models}
    assert shared == {("modified rows", 1)}
    data = frames(dose=True, censors=False)
    for records in data.values():
        records["a1"] = records["a1"].clip(upper=3.4)
    data["south"].loc[5, "a1"] = 3.6
    rules = (ft.Shift(by=0.5, most=4.0), ft.Shift(by=0.5, most=4.2))
    two = study(SHIFTED, **{**DOSE, "rules": rules})
    with pytest.raises(RefusedError, match="silo 'south' refused: the silo's policy"):
        ft.run(two, data, policy=ft.Policy())
    ft.run(study(SHIFTED, **{**DOSE, "rules": rules[:1]}), data, policy=ft.Policy())


# Files, preflight and silos' own laws.


def test_a_streamed_silo_gives_the_same_estimates(tmp_path: Path) -> None:
    data, asked = frames(), study(LEVEL)
    files = {}
    for silo, records in data.items():
        records.to_csv(tmp_path / f"{silo}.csv", index=False)
        stream = "stream = true\n" if silo == "south" else ""
        path = tmp_path / f"{silo}.toml"
        path.write_text(f'[silo]\nname = "{silo}"\n[data]\npath = "{silo}.csv"\n{stream}', encoding="utf-8")
        files[silo] = path
    close(ft.run(asked, files), ft.run(asked, data), rtol=1e-12)


@pytest.mark.parametrize("aggregation", ["open", "masked"])
def test_silos_may_retire_with_laws_of_their_own(aggregation: str) -> None:
    retiring = ft.Personalized(noise=0.7, max_updates=4, min_active=3)
    outcomes = []
    for term in ("C(silo)", "C(site)"):
        how = aggregation if term == "C(silo)" else "open"
        run = ft.run(
            study(LEVEL, term=term, algorithm=retiring, aggregation=how, diagnostics=True), frames()
        ).run
        assert run is not None
        outcomes.append(run.silos)
    own, site = outcomes
    with Premise("the silo retires", at_least=0.3) as retires:
        for name in SILOS:
            retires.holds(own[name].retired_at is not None)
            assert own[name].retired_at == site[name].retired_at
            np.testing.assert_allclose(own[name].estimate.psi, site[name].estimate.psi, rtol=1e-8)
            np.testing.assert_allclose(
                own[name].estimate.covariance, site[name].estimate.covariance, rtol=1e-8
            )

"""C(silo) in models of time to an event: coefficients of each silo's own, as those of indicator columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.initial.glm import FittedGLM
from fedtmle.initial.own import ProfiledModel
from fedtmle.model.table import SILO, Table
from fedtmle.privacy.answers import Submodels, explain
from fedtmle.programs.nuisance import effect_columns, fit_model
from fedtmle.programs.superlearner import OwnCoefficients, own_blocks
from fedtmle.programs.time import TimeDetails, _hazard_regressions
from fedtmle.protocol.query import AnsweredQuery
from fedtmle.protocol.regression import FitGradientQuery
from fedtmle.runtime.rows import LocalRows
from fedtmle.studies.run import pooled_rows
from fedtmle_core.types import Part
from tests.effects.studies import finish
from tests.effects.test_own import SILOS, Watched, expit, planned, same_bytes, totals_of
from tests.narrow import targeted
from tests.time.studies import NEWTON

__all__ = ["planned"]  # a fixture

PERIODS = 4
DICTIONARY: dict[str, Any] = {
    "t": {"kind": "number", "range": (0, PERIODS)},
    "arm": {"kind": "binary"},
    "x": {"kind": "number", "range": (-1, 1)},
    "z": {"kind": "binary"},
    "site": {"kind": "category", "levels": list(SILOS)},
}


def frames(seed: int = 11, causes: int = 1, size: int = 110) -> dict[str, pd.DataFrame]:
    """Four hospitals, each with its own level of treatment, event and censoring."""
    rng = np.random.default_rng(seed)
    data = {}
    for k, name in enumerate(SILOS):
        n = size + 15 * k
        x, z = rng.uniform(-1, 1, n), rng.integers(0, 2, n)
        arm = (rng.random(n) < expit(0.4 * (k - 1.5) + 0.5 * x)).astype(int)
        time, status = np.full(n, float(PERIODS)), np.zeros(n, dtype=int)
        for period in range(PERIODS):
            at_risk = time == PERIODS
            hazard = expit(-1.8 + 0.35 * (k - 1.5) + 0.6 * x * (k - 1) - 0.4 * arm + 0.3 * z)
            for cause in range(1, causes + 1):
                hit = at_risk & (status == 0) & (rng.random(n) < hazard)
                time[hit], status[hit] = period + 0.6, cause
            lost = at_risk & (status == 0) & (rng.random(n) < expit(-2.2 + 0.3 * k + 0.3 * x))
            time[lost & (period < PERIODS - 1)] = period + 0.9
        data[name] = pd.DataFrame(
            {"t": time, "status": status.astype(str), "arm": arm, "x": x, "z": z, "site": name}
        )
    return data


def study(models: dict[str, str], **options: Any) -> ft.Study:
    causes = ("1", "2") if options.pop("causes", 1) == 2 else ("1",)
    target = ft.Risk(
        outcome="status",
        time="t",
        treatment="arm",
        periods=PERIODS,
        period_length=1,
        causes=causes,
        **{key: options.pop(key) for key in ("compare_subperiods",) if key in options},
    )
    roles = {f"{role}_model": ft.GLM(formula) for role, formula in models.items()}
    declared = {**DICTIONARY, "status": {"kind": "category", "levels": ["0", *causes]}}
    variables = ft.Variables(declared)
    defaults: dict[str, Any] = {"algorithm": NEWTON, "variables": variables, "target": target}
    return ft.Study(**(defaults | roles | options))


LEVEL = {
    "hazard": "arm + x + z + period + C(silo)",
    "censoring": "arm + x + period + C(silo)",
    "treatment": "x + z + C(silo)",
}
SLOPES = {
    "hazard": "arm + z + period + x*C(silo)",
    "censoring": "x + period + C(silo)",
    "treatment": "x + z",
}
OF_PERIODS = {
    "hazard": "arm + x + z + C(period)*C(silo)",
    "censoring": "arm + x + period + C(silo)",
    "treatment": "x + C(silo)",
}
MODELS = {"level": LEVEL, "slopes": SLOPES, "periods": OF_PERIODS}


def sited(models: dict[str, str]) -> dict[str, str]:
    return {role: formula.replace("C(silo)", "C(site)") for role, formula in models.items()}


CASES: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "level": (LEVEL, {}),
    "slopes": (SLOPES, {}),
    "periods": (OF_PERIODS, {}),
    "two causes": (LEVEL, {"causes": 2}),
    "folds": (LEVEL, {"folds": 2}),
    "finer": (LEVEL, {"compare_subperiods": 2}),
}


@pytest.mark.parametrize("name", CASES)
def test_estimates_are_those_of_a_column_that_names_the_silo(name: str) -> None:
    models, options = CASES[name]
    # Where a silo has no event in some period, indicators have no finite fit.
    data = frames(causes=options.get("causes", 1), size=260 if name == "periods" else 110)
    one, other = (ft.run(study(each, **options), data) for each in (models, sited(models)))
    for column in ("estimate", "std_error"):
        np.testing.assert_allclose(one.table()[column], other.table()[column], rtol=1e-8, atol=1e-12)


def test_fits_are_those_of_indicator_columns() -> None:
    data = frames()
    asked = study(SLOPES)
    finished, tables = finish(asked, data)
    assert not asked.has_silo_columns
    details = targeted(finished).details
    assert isinstance(details, TimeDetails)
    (model,) = details.nuisances["hazard"]
    assert isinstance(model, FittedGLM)
    assert model.own is not None
    rows = pd.concat(data.values())
    long = []
    for row in rows.itertuples():
        last = min(int(row.t) + 1, PERIODS)
        if row.status == "0" and row.t < PERIODS:
            last = int(row.t) + 1  # at risk in the period of censoring
        for period in range(1, last + 1):
            long.append(
                (row.arm, row.z, period, row.x, row.site, float(row.status == "1" and period == last))
            )
    frame = pd.DataFrame(long, columns=["arm", "z", "period", "x", "site", "y"])
    silos = np.stack([frame["site"] == name for name in SILOS]).astype(float)
    common = [frame[name].to_numpy(float) for name in ("arm", "z", "period")]
    X = np.stack([*common, *silos, *(silos * frame["x"].to_numpy())])
    beta, y = np.zeros(len(X)), frame["y"].to_numpy()
    for _ in range(40):
        mu = expit(beta @ X)
        beta += np.linalg.solve((X * mu * (1 - mu)) @ X.T, X @ (y - mu))
    np.testing.assert_allclose(model.coefficients[2:], beta[:3], rtol=1e-9, atol=1e-10)
    view = OwnCoefficients(blocks=tuple(own_blocks((model,))))
    shown = view.of(pooled_rows(asked, tables))
    assert isinstance(shown, Table)
    codes = shown.factors[SILO].codes
    own = [[shown.numeric[name][np.argmax(codes == m)] for m in range(4)] for name in model.own.names]
    np.testing.assert_allclose(np.ravel(own), beta[3:], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("algorithm", [NEWTON, ft.Coded()], ids=["exact", "coded"])
def test_masked_is_open_byte_for_byte(name: str, algorithm: Any, planned: Watched) -> None:
    options: dict[str, Any] = {"algorithm": algorithm, "diagnostics": False}
    same_bytes(planned, lambda how: study(MODELS[name], aggregation=how, **options), frames())


@pytest.mark.parametrize(
    ("name", "sums"), [*((name, "rounded") for name in MODELS), (next(iter(MODELS)), "exact")]
)
def test_no_total_says_which_silo_has_which_rows(name: str, sums: str) -> None:
    """If two silos exchange all their rows, every broadcast of a masked study stays the same."""
    data = frames()
    exchanged = {**data, "south": data["east"], "east": data["south"]}
    options: dict[str, Any] = {"aggregation": "masked", "diagnostics": False, "sums": sums}
    assert totals_of(study(MODELS[name], **options), data) == totals_of(
        study(MODELS[name], **options), exchanged
    )


def test_a_silo_without_events_is_counted_in_a_warning() -> None:
    data = frames()
    data["east"] = data["east"].assign(status="0", t=float(PERIODS))
    for aggregation in ("open", "masked"):
        asked = study(LEVEL, aggregation=aggregation, diagnostics=False)
        told = [each for each in ft.run(asked, data).document["warnings"] if "predicts" in each]
        assert [each.split(",")[0] for each in told] == ["hazard model", "censoring model"]
        assert all("at 1 silo, C(silo) predicts" in each for each in told)


def hazard(asked: ft.Study) -> ProfiledModel:
    found = _hazard_regressions(asked, asked.target, effect_columns(asked), 1.0, True)  # type: ignore[arg-type]
    (regression,) = found["hazard"]
    assert isinstance(regression.model, ft.GLM)
    model = fit_model(regression, regression.model, {**asked.levels, SILO: SILOS})
    assert isinstance(model, ProfiledModel)
    return model


@pytest.mark.parametrize("models", [LEVEL, SLOPES], ids=["level", "slopes"])
def test_the_guard_and_the_audit_see_the_rows_of_people(models: dict[str, str]) -> None:
    """A person's rows are those of all periods, less what those of the block explain."""
    asked = study(models)
    _, tables = finish(asked, frames())
    every = pooled_rows(asked, tables)
    assert isinstance(every, Table)
    rows = every.take(np.flatnonzero(every.factors[SILO].codes == 0))
    model = hazard(asked)
    beta, submodel = np.linspace(-0.4, 0.5, model.dim), model.submodel(None, rows)
    (silo,) = submodel.silos
    own, common, gradient = list(silo.own), silo.common, submodel.sums(beta, Part.GRADIENT).values()
    pieces = {
        "summed": (list(silo.summed(beta)), list(submodel.summed_rows(beta))),
        "apart": (list(silo.rows(beta, Part.GRADIENT)), list(submodel.disclosed_rows(beta))),
    }
    for whole, left in pieces.values():
        raw, told = (np.concatenate([piece.rows for piece in each], axis=1) for each in (whole, left))
        B, X = raw[own], raw[common]
        np.testing.assert_allclose(told, X - X @ B.T @ np.linalg.inv(B @ B.T) @ B, atol=1e-12)
    (_, summed) = pieces["summed"]
    np.testing.assert_allclose(sum(piece.rows.sum(axis=1) for piece in summed), gradient, atol=1e-11)
    assert sum(piece.rows.shape[1] for piece in summed) == rows.n_rows
    shares = np.concatenate([q for _, q in silo.centred(lambda: silo.rows(beta, Part.GRADIENT))])
    assert shares.shape == (rows.n_rows,)
    assert shares.sum() == pytest.approx(len(own))  # the trace of a projection
    query = FitGradientQuery(
        model=model, eps=beta, C=np.eye(model.dim), exponent=-30, n=rows.n_rows, stream=""
    )
    local = LocalRows("north", rows, rows.n_rows)
    explained = explain(AnsweredQuery(query=query, answer=query.answer(local)), local, rows, Submodels())
    assert explained is not None
    np.testing.assert_allclose(explained.terms(rows).sum(axis=1), gradient, atol=1e-9)


def test_covariates_may_be_imputed() -> None:
    rng = np.random.default_rng(4)
    data = {
        name: frame.assign(x=np.where(rng.random(len(frame)) < 0.2, np.nan, frame["x"]))
        for name, frame in frames().items()
    }
    declared = {**DICTIONARY, "status": {"kind": "category", "levels": ["0", "1"]}}
    declared["x"] = {**declared["x"], "missing": "impute"}
    options: dict[str, Any] = {"variables": ft.Variables(declared), "diagnostics": False}
    one = ft.run(study(LEVEL, **options), data).table()
    pooled = ft.run(study(LEVEL, algorithm=ft.Central(tolerance=1e-11), **options), data).table()
    apart = abs(one["estimate"] - pooled["estimate"]) / pooled["std_error"]
    assert apart.max() < 1e-5  # iterated fluctuations end within that of each other
    np.testing.assert_allclose(one["std_error"], pooled["std_error"], rtol=1e-5)

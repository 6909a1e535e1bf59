"""The whole ATE on pooled data, beside zEpid, causallib, DoubleML, EconML and cleverly: linear models in all.

DoubleML and EconML have no TMLE; their doubly robust estimators with the same models stand for it, with the
two folds that they need at least. Ours is without the round of diagnostics, of which the peers have none.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd

import fedtmle as ft
from benchmarks.table import Row

COVARIATES = [f"w{j}" for j in range(10)]
BOUNDS = (-20.0, 20.0)
FASTER = {"zEpid": 5.0, "causallib": 5.0, "DoubleML": 5.0, "EconML": 1.0, "cleverly": 1.0}
SLOWEST = 600.0  # seconds: a peer that took longer at one size is not run at the next


def people(n: int, *, binary: bool) -> pd.DataFrame:
    rng = np.random.default_rng(3)
    W = rng.normal(size=(n, len(COVARIATES)))
    a = (rng.random(n) < 1 / (1 + np.exp(-0.3 * W[:, :5].sum(axis=1)))).astype(int)
    score = 0.2 * W.sum(axis=1) + 0.5 * a
    y = (rng.random(n) < 1 / (1 + np.exp(-score))).astype(int) if binary else score + rng.normal(size=n)
    return pd.DataFrame(W, columns=COVARIATES).assign(a=a, y=y)


def ours(data: pd.DataFrame, *, binary: bool) -> float:
    variables = {
        "y": {"kind": "binary"} if binary else {"kind": "number", "range": BOUNDS},
        "a": {"kind": "binary"},
        **{name: {"kind": "number", "range": (-10, 10)} for name in COVARIATES},
    }
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM(" + ".join(["a", *COVARIATES])),
        treatment_model=ft.GLM(" + ".join(COVARIATES)),
        algorithm=ft.Gradient(tolerance=1e-8, optimizer=ft.Newton()),
        diagnostics=False,
        variables=ft.Variables(variables),
    )
    return float(ft.run(study, {"pooled": data}).table()["estimate"].iloc[0])


def zepid(data: pd.DataFrame, *, binary: bool) -> float:
    from zepid.causal.doublyrobust import TMLE

    fit = TMLE(data, exposure="a", outcome="y")
    fit.exposure_model(" + ".join(COVARIATES), print_results=False)
    fit.outcome_model(" + ".join(["a", *COVARIATES]), print_results=False)
    fit.fit()
    return float(fit.risk_difference if binary else fit.average_treatment_effect)


def causallib(data: pd.DataFrame, *, binary: bool) -> float:
    from causallib.estimation import IPW, TMLE, Standardization
    from sklearn.linear_model import LinearRegression, LogisticRegression

    outcome = LogisticRegression(penalty=None, max_iter=1000) if binary else LinearRegression()
    weights = IPW(LogisticRegression(penalty=None, max_iter=1000))
    fit = TMLE(Standardization(outcome, predict_proba=binary), weights)
    X, a, y = data[COVARIATES], data["a"], data["y"]
    fit.fit(X, a, y)
    means = fit.estimate_population_outcome(X, a)
    return float(means[1] - means[0])


def doubleml(data: pd.DataFrame, *, binary: bool) -> float:
    from doubleml import DoubleMLData, DoubleMLIRM
    from sklearn.linear_model import LinearRegression, LogisticRegression

    outcome = LogisticRegression(penalty=None, max_iter=1000) if binary else LinearRegression()
    given = DoubleMLData(data, y_col="y", d_cols="a", x_cols=COVARIATES)
    fit = DoubleMLIRM(given, outcome, LogisticRegression(penalty=None, max_iter=1000), n_folds=2)
    return float(fit.fit().coef[0])


def econml(data: pd.DataFrame, *, binary: bool) -> float:
    from econml.dr import LinearDRLearner
    from sklearn.linear_model import LinearRegression, LogisticRegression

    outcome = LogisticRegression(penalty=None, max_iter=1000) if binary else LinearRegression()
    fit = LinearDRLearner(
        model_propensity=LogisticRegression(penalty=None, max_iter=1000),
        model_regression=outcome,
        discrete_outcome=binary,
        cv=2,
    )
    X = data[COVARIATES].to_numpy()
    fit.fit(data["y"].to_numpy(), data["a"].to_numpy(), X=None, W=X)
    return float(np.ravel(fit.ate())[0])


def cleverly(data: pd.DataFrame, *, binary: bool) -> float:
    from cleverly import ATE, CausalStudy, PointTreatment
    from sklearn.linear_model import LinearRegression, LogisticRegression

    design = PointTreatment(outcome="y", treatment="a", adjustment=COVARIATES)
    result = (
        CausalStudy(data, design=design)
        .identify(ATE())
        .estimate(
            outcome_learner=LogisticRegression(penalty=None, max_iter=1000) if binary else LinearRegression(),
            treatment_learner=LogisticRegression(penalty=None, max_iter=1000),
            cross_fit=False,
            random_state=0,
        )
    )
    return float(result.estimates["ate"].psi)


PEERS: dict[str, Callable[..., float]] = {
    "zEpid": zepid,
    "causallib": causallib,
    "DoubleML": doubleml,
    "EconML": econml,
    "cleverly": cleverly,
}


def rows(quick: bool) -> Iterator[Row]:
    tired: set[str] = set()
    for n in (100_000,) if quick else (100_000, 1_000_000):
        for binary in (True, False):
            data = people(n, binary=binary)
            what = f"ATE, n = {n:.0e}, 10 covariates, {'binary' if binary else 'continuous'} outcome"
            _quietly(ours, data, binary)  # compiles, or loads what was compiled
            for name, peer in PEERS.items():
                goal = FASTER[name] if n == 1_000_000 else None
                row = Row(group="whole TMLE", what=what, against=name, unit="s", faster=True, least=goal)
                yield _compared(row, peer, data, binary, tired)


def _compared(row: Row, peer: Callable[..., float], data: pd.DataFrame, binary: bool, tired: set[str]) -> Row:
    """The row with its times: ours before and after the peer, the mean of the two."""
    if row.against in tired:
        return _noted(row, f"not run: more than {SLOWEST:g} s at the size before")
    try:
        before, estimate = _quietly(ours, data, binary)
        theirs, other = _quietly(peer, data, binary)
        after, _ = _quietly(ours, data, binary)
    except Exception as error:  # a peer's failure is a line of the table
        return _noted(row, f"did not run: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
    if theirs > SLOWEST:
        tired.add(row.against)
    found = {"ours": (before + after) / 2, "theirs": theirs, "note": f"{estimate:.4f} and {other:.4f}"}
    return Row(**{**row.__dict__, **found})


def _noted(row: Row, note: str) -> Row:
    return Row(**{**row.__dict__, "note": note})


def _quietly(call: Callable[..., float], data: pd.DataFrame, binary: bool) -> tuple[float, float]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        begin = time.perf_counter()
        value = call(data, binary=binary)
        return time.perf_counter() - begin, value

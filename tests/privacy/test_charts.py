"""Every analytic derivative against differences of the sums that silos really send, for every target."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.errors import InputError
from fedtmle.privacy.answers import Explained, Submodels, explain, single
from fedtmle.privacy.charts import chart_of
from fedtmle.protocol.plan import roster
from fedtmle.protocol.query import AnsweredQuery, MomentsQuery
from fedtmle.protocol.sums import SumsQuery
from fedtmle.runtime.certificate import rehearse
from fedtmle.runtime.rows import LocalRows
from fedtmle.studyfile.file import study_plan
from fedtmle_core.types import Array, Part
from fedtmle_paper.benchmark import gaussian_mixture
from fedtmle_paper.density.fluctuation import ExponentialTilt, LogisticFluctuation
from fedtmle_paper.optimal_transport import OptimalTransport
from fedtmle_paper.two_arm import TwoArm
from tests.premise import Premise
from tests.privacy.studies import study_with_everything, table_of

ALL = Part.LOSS | Part.GRADIENT | Part.HESSIAN


def mean() -> tuple[Any, Any, Any]:
    problem = ft.Mean(bounds=(0.0, 20.0))
    return problem, problem.start(3.0), np.random.default_rng(1).gamma(2.0, 1.0, size=12)


def two_arm() -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(2)
    problem = TwoArm(outcome_bounds=(-10.0, 10.0), weight_ceiling=64.0)
    rows = {
        "outcome": rng.normal(size=15),
        "treatment": (rng.random(15) < 0.5).astype(float),
        "Q1": rng.normal(size=15),
        "Q0": rng.normal(size=15),
        "g": rng.uniform(0.2, 0.8, size=15),
    }
    return problem, problem.move(problem.start(), np.array([0.02, -0.01])), rows


def transport(fluctuation: Any) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(3)
    problem = OptimalTransport(fluctuation=fluctuation)
    law = problem.move(problem.start(gaussian_mixture(100, rng)), np.array([0.05, -0.02, 0.03]))
    return problem, law, gaussian_mixture(9, rng)


CASES: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "mean": mean,
    "two arms": two_arm,
    "transport, logistic": lambda: transport(LogisticFluctuation()),
    "transport, tilt": lambda: transport(ExponentialTilt()),
}


def shifted(raw: Any, name: str, by: float) -> Any:
    if isinstance(raw, dict):
        return {**raw, name: raw[name] + by}
    if name == "outcome":
        return raw + by
    moved = raw.copy()
    moved[:, int(name[1:]) - 1] += by
    return moved


def difference(terms: Callable[[float], Array], step: float) -> Array:
    """Five points: the error is of the fourth order."""
    near, far = terms(step) - terms(-step), terms(2 * step) - terms(-2 * step)
    return (8 * near - far) / (12 * step)


def terms_moved(problem: Any, raw: Any, explained: Explained, name: str, by: float) -> Array:
    return explained.terms(problem.read(shifted(raw, name, by)))


@pytest.mark.parametrize("case", CASES)
def test_jacobians_of_every_target(case: str) -> None:
    problem, law, raw = CASES[case]()
    rows = problem.read(raw)
    local = LocalRows("s", rows, problem.count(rows), None)
    eps = np.linspace(0.03, -0.02, problem.dim)
    queries = [
        SumsQuery(problem=problem, law=law, eps=eps, parts=ALL, n=100),
        MomentsQuery(problem=problem, law=law, n=100),
    ]
    for query in queries:
        answer = query.answer(local)
        explained = explain(AnsweredQuery(query=query, answer=answer), local, rows, Submodels())
        assert explained is not None
        # The terms are what the silo sums, and the box holds.
        assert np.abs(explained.terms(rows).sum(axis=1) - answer.values()).max() <= 1e-9
        for name in chart_of(problem).coordinates:
            numeric = difference(partial(terms_moved, problem, raw, explained, name), 1e-3)
            np.testing.assert_allclose(explained.tangents(rows, name), numeric, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    "kind", ["everything", "weighted", "linear", "ATT", "contrast", "three arms", "overlap"]
)
def test_jacobians_of_a_whole_study(kind: str) -> None:
    """Nuisance regressions, overlap, targeting and closing sums, in the outcome and in covariates."""
    study = study_with_everything(kind)
    table = table_of(study, 160)
    replayed = rehearse(study_plan(study, roster(["s"])), table, "s")
    submodels, seen = Submodels(), set()
    with Premise("the query is explained", at_least=0.5) as is_explained:
        for asked in single(replayed.answered):
            explained = explain(asked, replayed.local, table, submodels)
            if not is_explained.holds(explained is not None):
                continue
            key = (explained.label, type(getattr(asked.query, "problem", None)).__name__)
            if key in seen and explained.label != "loss+gradient+hessian":
                continue  # one of its kind was checked
            seen.add(key)
            for name in (study.target.outcome, "age", "dose"):
                check(explained, table, name)
    fitted = {"gradient+hessian"}
    if kind == "ATT":  # with `Coded` models are fitted by rounded sums
        fitted = {"rounded gradient of a model", "rounded curvature of a model", "rounded gradient"}
    assert {label for label, _ in seen} >= {"tally", "closing sums"} | fitted


def check(explained: Explained, table: Any, name: str) -> None:
    column = table.numeric[name]
    scale = float(np.nanstd(column))
    analytic = explained.tangents(table, name) * scale
    numeric = scale * difference(
        lambda by: explained.terms(table.with_numeric(name, column + by * scale)) / scale, 1e-4
    )
    size = max(float(np.abs(numeric).max()), 1e-8)
    # Rows within a step of a knot, a bound or a threshold have one-sided derivatives.
    off = np.abs(analytic - numeric).max(axis=0) > 1e-5 * size
    assert off.mean() <= 0.02, (explained.label, name)


def test_unknown_records_are_named() -> None:
    with pytest.raises(InputError, match="object"):
        chart_of(object())
    problem, law, raw = mean()
    rows = problem.read(raw)
    query = SumsQuery(problem=problem, law=law, eps=np.zeros(1), parts=Part.GRADIENT, n=12)
    local = LocalRows("s", rows, 12, None)
    explained = explain(AnsweredQuery(query=query, answer=None), local, rows, Submodels())
    assert explained is not None
    with pytest.raises(InputError, match="no continuous 'age'"):
        explained.tangents(rows, "age")

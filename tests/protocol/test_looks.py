"""Under masks a model's sums are judged against the rows of all silos, never too leniently."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.algorithms.gradient import Central
from fedtmle.data import load_all
from fedtmle.demo import IHDP, ihdp_silos
from fedtmle.errors import RefusedError
from fedtmle.model.families import Family
from fedtmle.model.leverage import LEAST_RESIDUAL, PersonRows, deviations, largest_leverage
from fedtmle.model.problem import JudgedTogether
from fedtmle.model.types import Array, Part
from fedtmle.protocol.guard import Guard, Policy
from fedtmle.protocol.looks import FARTHEST, NEAR, LookQuery, Looks
from fedtmle.protocol.outcome import Targeted
from fedtmle.protocol.plan import Member, Plan
from fedtmle.protocol.query import Local, Query
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.replay import heard_rounds
from fedtmle.runtime.session import Finished, InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from tests.declare import declare
from tests.premise import Premise
from tests.runtime.faults import key_of


def masked(study: ft.Study, silos: Mapping[str, Any], policy: Policy | None = None) -> tuple[Finished, Plan]:
    """Run a study under masks with relayed answers; every silo has the same policy."""
    keys = {name: key_of(name) for name in silos}
    members = [Member(name=n, key=key.public, mask_key=key.mask_key.public) for n, key in keys.items()]
    plan, rows = study_plan(study, tuple(members)), dict(load_all(silos, schema_of(study)))
    parties = [
        Silo(n, plan, rows[n], keeper=Keeper(policy=policy or Policy(), key=key, mask_key=key.mask_key))
        for n, key in keys.items()
    ]
    try:
        return Session(plan, InProcess(parties)).run(), plan
    except RefusedError:
        refused = {silo.refused_by for silo in parties} - {""}
        raise AssertionError(f"refused: {sorted(refused)}") from None


def test_ihdp_runs_whole_under_the_default_policy_and_gives_the_pooled_estimate() -> None:
    """Of eight hospitals four have one to three children in a column: their own rows would refuse."""
    silos = ihdp_silos()
    finished, plan = masked(IHDP, silos)
    assert isinstance(finished.outcome, Targeted)
    pooled = ft.run(replace(IHDP, algorithm=Central(tolerance=1e-10)), silos)
    row, psi = pooled.document["estimates"][0], finished.outcome.estimate.psi
    error = row["std_error"]
    effect = float(psi[1] - psi[0])
    assert abs(effect - row["estimate"]) <= 1e-6 * error
    assert (round(effect, 3), round(error, 3)) == (9.34, 1.093)
    rounds = [heard.query for heard in heard_rounds(plan, finished.transcript, finished.sizes)]
    looks = sum(isinstance(query, LookQuery) for query in rounds)
    assert looks <= 6
    assert len(rounds) - looks == 16


class Seen:
    """The true pooled leverages behind every answer that was judged together, and those that silos stated."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int, Part], list[Array]] = {}
        self.stated: dict[tuple[int, int, Part], list[Array]] = {}

    def examine(self, guard: Guard, query: Query, local: Local, looks: Looks | None = None) -> None:
        number = guard.queries
        assert looks is not None
        for k, member in enumerate(query.members):
            for point in member.evaluations():
                for part in point.parts:
                    if not looks.knows(point, part):
                        continue
                    told = local.submodel(point.model, point.law).told_rows(point.eps, part)
                    rows = np.concatenate([piece.rows for piece in told], axis=1)
                    space = looks.space(point, part, local)
                    self.rows.setdefault((number, k, part), []).append(rows)
                    self.stated.setdefault((number, k, part), []).append(space.leverages(PersonRows(rows)))


COVARIATES: dict[str, Any] = {"w": (-8, 8), "z": (-8, 8), "rare": "binary"}


def cohort(seed: int, sizes: tuple[int, ...], share: float, *, binary: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    silos = {}
    for m, n in enumerate(sizes):
        w, z = rng.standard_normal((2, n))
        a = rng.permutation(np.arange(n) % 2).astype(float)
        y = np.clip(rng.normal(5 + a + w, 1.5, n), 0, 10)
        if binary:
            y = (y > 6).astype(float)
        silos[f"silo {m}"] = {"y": y, "a": a, "w": w, "z": z, "rare": (rng.random(n) < share).astype(float)}
    return silos


def asked(formula: str, *, binary: bool = False, **options: Any) -> ft.Study:
    return ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM(formula, **options),
        treatment_model=ft.GLM("w + z"),
        variables=declare(y="binary" if binary else (0, 10), a="binary", **COVARIATES),
    )


@pytest.mark.parametrize("family", ["auto", "gaussian", "binomial"])
def test_no_leverage_is_stated_smaller_than_it_is(family: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every point of every model, whatever was rounded, and not larger than twice."""
    seen, binary = Seen(), family == "binomial"
    monkeypatch.setattr(Guard, "examine", lambda *arguments: seen.examine(*arguments))  # noqa: PLW0108 - it binds the guard
    study = asked("a + w + z + rare + a:w", binary=binary, family=family)
    masked(study, cohort(3, (40, 60, 50, 55), 0.1, binary=binary), Policy.unguarded())
    with Premise("the own rows would say more than twice as much", at_least=0.5) as premise:
        check_leverages(seen, premise)


def check_leverages(seen: Seen, premise: Premise) -> None:
    for key, rows in seen.rows.items():
        pooled = np.concatenate(rows, axis=1)
        true = np.einsum("in,ij,jn->n", pooled, np.linalg.inv(pooled @ pooled.T), pooled)
        stated = np.concatenate(seen.stated[key])
        assert (stated >= true * (1 - 1e-9)).all()
        assert (stated <= 2.0 * true + 1e-6).all()
        premise.holds(max(map(largest, rows)) > 2 * true.max())
    assert len(seen.rows) >= 8


def largest(rows: Array) -> float:
    return largest_leverage(lambda: [PersonRows(rows)])


@pytest.mark.parametrize("family", [Family.LOGISTIC, Family.GAUSSIAN])
def test_sums_shrink_no_faster_than_the_bound_says(family: Family) -> None:
    """s(eps)^2 >= s(0)^2 / factor for every row in the declared ranges, hence S(eps) >= S(0) / factor."""
    rng = np.random.default_rng(8)
    ranges = ((1.0, 1.0), (0.0, 0.5), (-1.0, 0.25))
    facts = JudgedTogether(family, None, ranges, 1.0)
    low, high = np.array(ranges).T
    worst = 0.0
    for _ in range(300):
        eps, direction = rng.normal(size=3), rng.normal(size=3)
        X = rng.uniform(low[:, None], high[:, None], size=(3, 400))
        X[:, :8] = np.where(np.indices((2, 2, 2)).reshape(3, 8), high[:, None], low[:, None])
        y = rng.random(400) if family is Family.GAUSSIAN else rng.integers(0, 2, 400).astype(float)
        move = direction * NEAR[family] / facts.largest_move(direction.tolist())
        delta = facts.largest_move(move.tolist())
        assert np.abs(move @ X).max() == pytest.approx(delta)
        before, after = (deviations(family, e @ X, y) for e in (eps, eps + move))
        factor = math.exp(delta) if family is Family.LOGISTIC else (1 - delta / LEAST_RESIDUAL) ** -2
        assert factor == pytest.approx(FARTHEST)
        worst = max(worst, float((before**2 / after**2).max()))
        assert worst <= factor * (1 + 1e-9)
    assert worst > 1 + 0.6 * (FARTHEST - 1)


def one_with(silos: dict[str, Any], *, others: int) -> dict[str, Any]:
    """Exactly one person of the first silo has the rare covariate, and so many in each other silo."""
    for m, rows in enumerate(silos.values()):
        rows["rare"] = (np.arange(len(rows["y"])) < (others if m else 1)).astype(float)
    return silos


def test_one_person_hides_among_the_others_of_all_silos(monkeypatch: pytest.MonkeyPatch) -> None:
    study, silos = asked("a + w + rare"), one_with(cohort(5, (60, 60, 60, 60), 0.0), others=4)
    masked(study, silos)
    monkeypatch.setattr(Looks, "knows", lambda *_: False)  # by its own rows
    with pytest.raises(AssertionError, match=r"refused: .*min_support"):
        masked(study, silos)


@pytest.mark.parametrize("formula", ["a + w + rare", "a + w + I(1 - rare)", "a + w + I(w + 0.001*rare)"])
def test_one_person_over_all_silos_is_not_told(formula: str) -> None:
    """Neither as a column, nor as a complement, nor as the difference of two nearly equal columns."""
    silos = one_with(cohort(5, (60, 60, 60, 60), 0.0), others=0)
    with pytest.raises(AssertionError, match=r"refused: .*min_pooled"):
        masked(asked(formula), silos)

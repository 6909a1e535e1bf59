"""The terms of time to an event are the rows of the package's problem, person by person and at any law."""

from __future__ import annotations

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.estimation.fluctuated import Law
from fedtmle.estimation.followup import Periods, by_period
from fedtmle.estimation.hazards import FluctuatedHazards, chances_of
from fedtmle.estimation.people import People
from fedtmle.estimation.strands import CountedHazard, Timed
from fedtmle.estimation.worlds import World
from fedtmle.targets.effects.components import Everyone, InStratum, Static, Threshold
from fedtmle.targets.time.problem import RegimeGroup, TimeProblem
from fedtmle_core import graph
from fedtmle_core.blocks import Score
from fedtmle_core.dictionary import Categorical, Dictionary, Numeric
from fedtmle_core.evaluate import Workspace, values_of
from fedtmle_core.leaves import Level
from fedtmle_core.plan import Plan, Question
from fedtmle_core.sheet import Sheet
from fedtmle_core.terms import ONE, ZERO, Constant, Pick, Term
from fedtmle_core.types import Array, Part
from tests.time.test_eif import (
    COVARIATES,
    KINDS,
    PERIODS,
    Known,
    Tree,
    law_of,
    problem_of,
    table_of,
    target_of,
)

ARMS = ("0", "1")
GROUPS = (
    RegimeGroup(Static("0"), Everyone(), 1.0),
    RegimeGroup(Static("1"), Everyone(), 1.0),
    RegimeGroup(Threshold("w", 1.5, "1", "0"), Everyone(), 1.0),
    RegimeGroup(Static("1"), InStratum(1, "1"), 0.625),
)


def dictionary_of(causes: int) -> Dictionary:
    return Dictionary(
        (
            Numeric(name="time", low=0.0, high=PERIODS),
            Numeric(name="w", low=0.0, high=2.0),
            Categorical(name="each w", levels=tuple(map(str, range(COVARIATES)))),
            Categorical(name="a", levels=ARMS),
            Categorical(name="event", levels=tuple(map(str, range(causes + 1)))),
            Categorical(name="s", levels=("0", "1")),
        )
    )


def sheet_of(tree: Tree) -> Sheet:
    table = table_of(tree)
    w = table.numeric["w"]
    levels = {name: table.factors[name].codes.astype(np.int16) for name in ("a", "event", "s")}
    numbers = {"time": table.numeric["time"], "w": w}
    return Sheet.read(dictionary_of(tree.causes), numbers, {**levels, "each w": w.astype(np.int16)})


def values_in(model: object) -> Array:
    assert isinstance(model, Known)
    return model.values


def known(values: Array) -> CountedHazard:
    """Return the model that knows a hazard by covariate, arm and period."""

    def by_covariate(t: int) -> Term:
        return Pick("each w", tuple(Pick("a", tuple(map(Constant, row[:, t].tolist()))) for row in values))

    return CountedHazard(by_period([by_covariate(t) for t in range(PERIODS)]))


def fluctuated(old: TimeProblem, causes: int) -> FluctuatedHazards:
    prepare = old.prepare
    people = People(
        y=ZERO,
        observed=ONE,
        outcome_bounds=(0.0, 1.0),
        treatment="a",
        arms=ARMS,
        taken=(Level("a", 0), Level("a", 1)),
        weight=None,
        strata_levels=("0", "1"),
        strata=(Level("s", 0), Level("s", 1)),
        cluster=None,
    )
    g = Pick("each w", tuple(map(Constant, values_in(prepare.treatment[0]).tolist())))
    timed = Timed(
        people=people,
        periods=Periods(
            time="time",
            edges=prepare.follow_up.edges,
            ends=tuple(Level("event", j + 1) for j in range(causes)),
        ),
        horizon=prepare.horizon,
        dictionary=dictionary_of(causes),
        events=tuple(known(values_in(model)) for model in prepare.events),
        censoring=known(values_in(prepare.censoring)),
        g=(1.0 - g, g),
        worlds=(World({"a": 0}), World({"a": 1})),
        regimes=GROUPS,
        floor=0.0,
    )
    return timed.fluctuated(old.labels, old.functionals)


def plan_of(causes: int) -> Plan:
    return Plan(dictionary=dictionary_of(causes), models=(), members=(), study=b"", author="test")


@pytest.mark.parametrize("causes", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_eif_and_the_score_are_those_of_the_problem(
    kind: type[ft.AbstractTimeEffect], causes: int
) -> None:
    """At the start and after fluctuations, for static arms, a rule, and a stratum."""
    tree, target = Tree(causes), target_of(kind, causes)
    old, table, sheet = problem_of(tree, law_of(tree), target, list(GROUPS)), table_of(tree), sheet_of(tree)
    q, workspace, plan = fluctuated(old, causes), Workspace(sheet), plan_of(causes)
    before, law = old.start(), Law()
    for eps in np.random.default_rng(1).normal(0.0, 0.05, size=(3, q.dim)):
        eif, theirs = q.eif(law), old.columns(before, old.prepare.people(table))
        for ours, column in ((eif.u, theirs.u), (eif.t, theirs.t), (eif.m, theirs.m)):
            np.testing.assert_allclose(workspace.columns(ours), column, rtol=0, atol=1e-13)
        block = Score(family=q.family, layers=q.layers(law), at=(0.0,) * q.dim)
        question = Question(blocks=(block,))
        (score,) = values_of(question, workspace.answer(question, plan), plan)
        sums = old.submodel(before, table).sums(np.zeros(q.dim), Part.GRADIENT)
        np.testing.assert_allclose(score, sums.values(), rtol=0, atol=1e-7)
        before, law = old.move(before, eps), law.moved(eps)


def test_public_intervals_do_not_widen_from_period_to_period() -> None:
    """Each covariate is between the payments, at laws that have moved too."""
    tree = Tree(3)
    for kind in KINDS:
        target = target_of(kind, 3)
        old = problem_of(tree, law_of(tree), target, list(GROUPS))
        q = fluctuated(old, 3)
        law = Law().moved([0.05] * q.dim).moved([-0.1] * q.dim)
        own = q.covariates(chances_of(q.own_zeta(law.history, 0)))
        for paid, c in zip(q.paid, own, strict=True):
            low, high = min(paid.min(), 0.0), max(paid.max(), 0.0)
            terms = [term for row in c for term in row]
            found = graph.intervals(terms, dictionary_of(3))
            for row, of_cause in zip(paid, c, strict=True):
                for A, term in zip(row, of_cause, strict=True):
                    assert found[term][0] >= A - high - 1e-12
                    assert found[term][1] <= A - low + 1e-12

"""The EIF of each functional is the derivative of its value on a finite law, by complex steps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.model.table import Factor, Table
from fedtmle.targets.effects.components import Everyone, InStratum, Static, Threshold
from fedtmle.targets.effects.prepare import EffectColumns
from fedtmle.targets.time.followup import PERIOD
from fedtmle.targets.time.problem import RegimeGroup, TimePreparation, TimeProblem
from fedtmle_core.types import Array, Part

COVARIATES, ARMS, PERIODS, STEP = 3, 2, 3, 1e-200


@dataclass(frozen=True)
class Tree:
    """A finite law of (W, A, last period, cause or 0): masses of its atoms, shape (W, A, T, causes + 1).

    Those who end without an event in the last period were followed to the end.
    """

    causes: int

    @property
    def shape(self) -> tuple[int, ...]:
        return COVARIATES, ARMS, PERIODS, self.causes + 1

    @property
    def atoms(self) -> list[tuple[int, ...]]:
        return list(itertools.product(*map(range, self.shape)))

    def hazards(self, p: Array) -> Array:
        """Return lambda_j(t | a, w): those with the event over those at risk; shape (W, A, T, causes)."""
        at_risk = np.cumsum(p.sum(axis=3)[:, :, ::-1], axis=2)[:, :, ::-1]
        return np.asarray(p[..., 1:] / at_risk[..., None])

    def incidences(self, p: Array) -> Array:
        """Return F_j(t | a, w) = sum_{s<=t} S(s-1) lambda_j(s), shape (W, A, T, causes)."""
        hazards = self.hazards(p)
        curve, total = np.zeros_like(hazards), np.zeros_like(hazards[:, :, 0])
        survival = np.ones_like(total[..., :1])
        for t in range(PERIODS):
            total = total + survival * hazards[:, :, t]
            survival = survival * (1 - hazards[:, :, t].sum(axis=2, keepdims=True))
            curve[:, :, t] = total
        return curve

    def values(self, p: Array, weights: Array, rule: list[int], who: list[int]) -> Array:
        """Return sum_w P(w | who) sum_{j,t} L_j(t) F_j(t | rule(w), w) for each functional's weights L."""
        share = p.sum(axis=(1, 2, 3))[who]
        curves = self.incidences(p)[who, [rule[w] for w in who]]  # (who, T, causes)
        given = np.einsum("fjt,wtj->fw", weights, curves)
        return np.asarray(given @ (share / share.sum()))


@dataclass(frozen=True)
class Known:
    """A fitted model that knows its values: by covariate, arm and period."""

    values: Array

    def predict(self, table: Table) -> Array:
        w, a = table.numeric["w"].astype(int), table.factors["a"].codes
        if PERIOD in table.factors:
            return np.asarray(self.values[w, a, table.factors[PERIOD].codes])
        return np.asarray(self.values[w])


def table_of(tree: Tree) -> Table:
    w, a, t, j = (np.array(column) for column in zip(*tree.atoms, strict=True))
    labels = tuple(str(k) for k in range(tree.causes + 1))
    return Table(
        n_rows=len(w),
        numeric={"w": w.astype(float), "time": t + 1.0},
        factors={
            "a": Factor(a, ("0", "1")),
            "event": Factor(j, labels),
            "s": Factor((w > 0).astype(np.int64), ("0", "1")),
        },
    )


def problem_of(tree: Tree, p: Array, target: ft.AbstractTimeEffect, groups: list[RegimeGroup]) -> TimeProblem:
    """Return the problem whose models are the true ones of the law."""
    columns = EffectColumns(
        outcome="event",
        outcome_bounds=(0.0, 1.0),
        treatment="a",
        arms=("0", "1"),
        strata="s",
        strata_levels=("0", "1"),
        weights=None,
        weight_ceiling=1.0,
        cluster=None,
        largest_cluster=1,
    )
    hazards = tree.hazards(p)
    earlier = np.cumsum(hazards, axis=3) - hazards
    conditional = hazards / (1 - earlier)  # among those without an event of an earlier cause in the period
    at_risk = np.cumsum(p.sum(axis=3)[:, :, ::-1], axis=2)[:, :, ::-1]
    censoring = p[..., 0] / (at_risk - p[..., 1:].sum(axis=3))
    by_arm = p.sum(axis=(2, 3))
    count = len(groups) * len(target.functionals)
    return TimeProblem(
        labels=tuple(str(k) for k in range(count)),
        functionals=target.functionals,
        prepare=TimePreparation(
            columns=columns,
            follow_up=target.follow_up,
            groups=tuple(groups),
            events=tuple(Known(conditional[..., j]) for j in range(tree.causes)),
            censoring=Known(censoring),
            treatment=(Known(by_arm[:, 1] / by_arm.sum(axis=1)),),
            horizon=max(each.horizon for each in target.functionals),
            g_floor=0.0,
            weight_mean=1.0,
            used=frozenset({"w", "a"}),
        ),
        ceiling=128.0,
        population_ceiling=1e2,
    )


def target_of(kind: type[ft.AbstractTimeEffect], causes: int) -> ft.AbstractTimeEffect:
    return kind(
        outcome="event",
        time="time",
        treatment="a",
        periods=PERIODS,
        causes=tuple(str(j + 1) for j in range(causes)),
        horizons=tuple(range(kind.first_horizon, PERIODS + 1)),
    )


def law_of(tree: Tree) -> Array:
    return np.random.default_rng(tree.causes).dirichlet(np.full(len(tree.atoms), 3.0)).reshape(tree.shape)


KINDS = [kind for kind in ft.TIME_ESTIMANDS if kind.is_value and kind is not ft.PolicyRisk]  # rules: below


@pytest.mark.parametrize("causes", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_eif_is_the_derivative_of_psi(kind: type[ft.AbstractTimeEffect], causes: int) -> None:
    """Static arms, a rule that depends on the covariate, and a stratum."""
    tree, target = Tree(causes), target_of(kind, causes)
    p = law_of(tree)
    cases = {
        RegimeGroup(Static("0"), Everyone(), 1.0): ([0, 0, 0], [0, 1, 2]),
        RegimeGroup(Static("1"), Everyone(), 1.0): ([1, 1, 1], [0, 1, 2]),
        RegimeGroup(Threshold("w", 1.5, "1", "0"), Everyone(), 1.0): ([0, 0, 1], [0, 1, 2]),
        RegimeGroup(Static("1"), InStratum(1, "1"), float(p[1:].sum())): ([1, 1, 1], [1, 2]),
    }
    problem = problem_of(tree, p, target, list(cases))
    columns = problem.columns(problem.start(), problem.prepare.people(table_of(tree)))
    weights = np.array([functional.weights for functional in target.functionals])

    def psi(law: Array) -> Array:
        return np.concatenate([tree.values(law, weights, rule, who) for rule, who in cases.values()])

    D = columns.u - columns.t * psi(p)[:, None]
    flat = p.reshape(-1)
    assert columns.m @ flat == pytest.approx(psi(p), abs=1e-13)
    assert D @ flat == pytest.approx(0.0, abs=1e-13)
    for k in range(len(flat)):
        point = np.zeros(p.shape)
        point.reshape(-1)[k] = 1.0
        derivative = psi(p + 1j * STEP * (point - p)).imag / STEP
        assert D[:, k] == pytest.approx(derivative, abs=1e-10)


@pytest.mark.parametrize("causes", [1, 3])
def test_the_fluctuation_has_the_eif_as_its_score(causes: int) -> None:
    """Away from the start too: the submodel's gradient is the mean of the first part of D at its law."""
    tree, target = Tree(causes), target_of(ft.Risk, causes)
    p = law_of(tree)
    groups = [RegimeGroup(Static(arm), Everyone(), 1.0) for arm in ("0", "1")]
    problem, table = problem_of(tree, p, target, groups), table_of(tree)
    law = problem.start()
    for eps in np.random.default_rng(1).normal(0, 0.02, size=(3, problem.dim)):
        submodel = problem.submodel(law, table)
        columns = problem.columns(law, problem.prepare.people(table))
        score = submodel.sums(np.zeros(problem.dim), Part.GRADIENT).values()
        assert score == pytest.approx((columns.u - columns.m).sum(axis=1), abs=1e-9)
        law = problem.move(law, eps)
    fresh = problem_of(tree, p, target, groups)  # replays the whole history at once
    again = fresh.columns(law, fresh.prepare.people(table))
    assert again.u == pytest.approx(problem.columns(law, problem.prepare.people(table)).u, abs=1e-12)
    kept = problem.submodel(law, table).sums(np.zeros(problem.dim), Part.GRADIENT)
    assert kept == fresh.submodel(law, table).sums(np.zeros(problem.dim), Part.GRADIENT)


@pytest.mark.parametrize("causes", [1, 2, 3])
def test_curves_rise_and_add_up_to_at_most_one_at_any_law(causes: int) -> None:
    tree, target = Tree(causes), target_of(ft.Risk, causes)
    problem = problem_of(
        tree, law_of(tree), target, [RegimeGroup(Static(a), Everyone(), 1.0) for a in ("0", "1")]
    )
    law = problem.start()
    for eps in np.random.default_rng(2).normal(0, 2.0, size=(4, problem.dim)):
        law = problem.move(law, eps)
        for arm in (0, 1):
            curves = problem.values(law, table_of(tree), arm).reshape(causes, PERIODS, -1)
            assert (np.diff(curves, axis=1) >= -1e-15).all()
            assert (curves.sum(axis=0) <= 1 + 1e-12).all()

"""The EIF of a mean under a regime is the derivative of its value on a finite law, by complex steps."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.model.table import Factor, Table
from fedtmle.targets.effects.components import AbstractRegime
from fedtmle.targets.effects.prepare import EffectColumns
from fedtmle.targets.regimes.problem import (
    ChainFit,
    PeriodScores,
    RegimeProblem,
    SequentialRules,
    SequentialStep,
)
from fedtmle.targets.regimes.timeline import Timeline
from fedtmle_core.types import Array, Part
from tests.kinds import without_example

STEP, PERIODS, DOSES = 1e-200, 2, 3
# An atom is (l1, a1, c1, y1, l2, a2, c2, y2). A history that ended has zeros from there on.
NAMES = ("l1", "a1", "c1", "y1", "l2", "a2", "c2", "y2")
RULES: tuple[AbstractRegime, ...] = (
    ft.Static("1"),
    ft.Static("0"),
    ft.Planned(("1", "0")),
    ft.Threshold("l", 0.5, arm="1", otherwise="0"),
    ft.Onset("l", 0.5, arm="1", otherwise="0"),
    ft.Onset("l", 0.5, arm="0", otherwise="1", below=True),
    ft.Stochastic((0.25, 0.75)),
)
SHIFTS: tuple[AbstractRegime, ...] = (ft.Shift(by=1.0, most=2.0), ft.Shift(by=-1.0, least=0.0), ft.Shift())


def ends(atom: tuple[int, ...], survival: bool) -> tuple[int, ...]:
    """Return the atom with zeros after censoring or the event."""
    l1, a1, c1, y1, *rest = atom
    y1 = y1 if survival else 0
    if c1:
        return (l1, a1, 1, 0, 0, 0, 0, 0)
    if y1:
        return (l1, a1, 0, 1, 0, 0, 0, 0)
    l2, a2, c2, y2 = rest
    return (l1, a1, 0, 0, l2, a2, c2, 0 if c2 else y2)


@dataclass(frozen=True)
class Tree:
    survival: bool
    doses: int = 2  # values of the treatment

    @cached_property
    def atoms(self) -> list[tuple[int, ...]]:
        sizes = (2, self.doses, 2, 2, 2, self.doses, 2, 2)
        return sorted({ends(atom, self.survival) for atom in itertools.product(*map(range, sizes))})

    def given(self, p: Any, **fixed: int) -> Any:
        """Return the mass of the atoms with the given values."""
        inside = np.ones(len(self.atoms), dtype=bool)
        for name, value in fixed.items():
            inside &= self.columns[name] == value
        return p[inside].sum()

    @cached_property
    def columns(self) -> dict[str, np.ndarray]:
        return dict(zip(NAMES, np.array(self.atoms).T, strict=True))

    def psi(self, p: Any, rule: AbstractRegime) -> Any:
        """Return the mean under the rule by the g-formula, longhand."""
        total = 0.0
        for l1 in (0, 1):
            for a1, d1 in self.assigned(rule, p, 1, (l1,)):
                before: dict[str, int] = {"l1": l1, "a1": a1, "c1": 0}
                event = self.given(p, **before, y1=1) / self.given(p, **before) if self.survival else 0.0
                later: Any = 0.0
                stay = {**before, "y1": 0}
                for l2 in (0, 1):
                    share = self.second(p, stay, l2)
                    for a2, d2 in self.assigned(rule, p, 2, (l1, l2), stay):
                        here = {**stay, "l2": l2, "a2": a2, "c2": 0}
                        later = later + share * d2 * self.given(p, **here, y2=1) / self.given(p, **here)
                total = total + self.given(p, l1=l1) * d1 * (event + (1.0 - event) * later)
        return total

    def second(self, p: Any, stay: dict[str, int], l2: int) -> Any:
        return self.given(p, **stay, l2=l2) / self.given(p, **stay)

    def assigned(
        self, rule: AbstractRegime, p: Any, t: int, levels: tuple[int, ...], stay: Any = None
    ) -> list[tuple[int, Any]]:
        """Return each value of treatment in period t under the rule, with its probability."""
        if isinstance(rule, ft.Shift):
            name = f"a{t}"
            among = {"l1": levels[0]} if t == 1 else {**stay, "l2": levels[1]}
            whole = self.given(p, **among)
            return [
                (int(rule.moved(np.array([float(a)]))[0]), self.given(p, **among, **{name: a}) / whole)
                for a in range(self.doses)
            ]
        known = {
            "Static": lambda: float(getattr(rule, "arm", "0")),
            "Planned": lambda: float(getattr(rule, "plan", "00")[t - 1]),
            "Threshold": lambda: float(levels[-1] > 0),
            "Onset": lambda: float((min(levels) >= 1) if getattr(rule, "below", False) else max(levels) > 0),
            "Stochastic": lambda: 0.75,
        }
        one = known[type(rule).__name__]()
        return [(1, one), (0, 1.0 - one)]


@dataclass(frozen=True)
class ByHistory:
    """A fitted model that knows its value for each history, by the names of columns."""

    names: tuple[str, ...]
    values: dict[tuple[int, ...], float]

    def predict(self, table: Table) -> Array:
        columns = [table.numeric[name].astype(int) for name in self.names]
        return np.array([self.values.get(tuple(row), 0.5) for row in zip(*columns, strict=True)])


def problem_of(tree: Tree, p: Array, rules: tuple[AbstractRegime, ...]) -> RegimeProblem:
    """Return the problem whose models are the true ones of the law."""
    names = ("l", "a", "c", *(("y",) if tree.survival else ()))
    timeline = Timeline(
        over_time={name: (f"{name}1", f"{name}2") for name in names},
        treatment="a",
        outcome="y" if tree.survival else "y2",
        censoring="c",
        event="y" if tree.survival else None,
    )
    g = tree.given
    histories: list[tuple[tuple[str, ...], dict[str, Any]]] = [(("l",), {}), (("lag1_l", "lag1_a", "l"), {})]
    stays = {"c1": 0, "y1": 0}
    scores, outcomes = [], []
    for t in (1, 2):
        keys = {"l": f"l{t}", "a": f"a{t}", "lag1_l": "l1", "lag1_a": "a1"}
        known = {} if t == 1 else stays
        history = histories[t - 1][0]
        ranges = [range(tree.doses) if name.endswith("a") else range(2) for name in history]
        arms: dict[tuple[int, ...], float] = {}
        censored: dict[tuple[int, ...], float] = {}
        shifted: list[dict[tuple[int, ...], float]] = [{} for _ in rules]
        for h in itertools.product(*ranges):
            at = {keys[name]: value for name, value in zip(history, h, strict=True)} | known
            arms[h] = g(p, **at, **{f"a{t}": 1}) / g(p, **at)
            for a in range(tree.doses):
                here = at | {f"a{t}": a}
                censored[(*h, a)] = g(p, **here, **{f"c{t}": 1}) / g(p, **here)
                for k, rule in enumerate(rules):
                    if isinstance(rule, ft.Shift):
                        moved = sum(
                            g(p, **at, **{f"a{t}": b})
                            for b in range(tree.doses)
                            if rule.moved(np.array([float(b)]))[0] == a
                        )
                        shifted[k][(*h, a)] = moved / (moved + g(p, **here))
        scores.append(
            PeriodScores(
                treatment=() if tree.doses > 2 else (ByHistory(history, arms),),
                censoring=ByHistory((*history, "a"), censored),
                modified=tuple(ByHistory((*history, "a"), each) for each in shifted)
                if tree.doses > 2
                else (),
            )
        )
    for rule in rules:
        last: dict[tuple[int, ...], float] = {}
        first: dict[tuple[int, ...], float] = {}
        for l1, a1 in itertools.product(range(2), range(tree.doses)):
            stay = {"l1": l1, "a1": a1, **stays}
            later = 0.0
            for l2 in (0, 1):
                for a2 in range(tree.doses):
                    here = stay | {"l2": l2, "a2": a2, "c2": 0}
                    last[l1, a1, l2, a2] = g(p, **here, y2=1) / g(p, **here)
                for a2, d2 in tree.assigned(rule, p, 2, (l1, l2), stay):
                    later += tree.second(p, stay, l2) * d2 * last[l1, a1, l2, a2]
            before = {"l1": l1, "a1": a1, "c1": 0}
            event = g(p, **before, y1=1) / g(p, **before) if tree.survival else 0.0
            first[l1, a1] = event + (1 - event) * later
        outcomes.append(
            (
                SequentialStep(outcome=ByHistory(("l", "a"), first), eps=0.0),
                SequentialStep(outcome=ByHistory(("lag1_l", "lag1_a", "l", "a"), last), eps=0.0),
            )
        )
    columns = EffectColumns(
        outcome=timeline.outcome,
        outcome_bounds=(0.0, 1.0),
        treatment="a" if tree.doses == 2 else None,
        arms=("0", "1") if tree.doses == 2 else ("all",),
        strata=None,
        strata_levels=(),
        weights=None,
        weight_ceiling=1.0,
        cluster=None,
        largest_cluster=1,
    )
    sequence = SequentialRules(
        timeline=timeline, columns=columns, rules=rules, scores=tuple(scores), ceiling=np.inf, weight_mean=1.0
    )
    return RegimeProblem(
        labels=tuple(rule.label for rule in rules),
        sequence=sequence,
        chains=tuple(ChainFit(rule=k, horizon=2, steps=steps) for k, steps in enumerate(outcomes)),
        outcome_bounds=(0.0, 1.0),
        ceiling=4096.0,
        population_ceiling=1.0,
    )


def table_of(tree: Tree) -> Table:
    values = np.array(tree.atoms, dtype=float).T
    numeric = dict(zip(NAMES, values, strict=True))
    factors = {}
    if tree.doses == 2:
        factors = {name: Factor(numeric[name].astype(np.int64), ("0", "1")) for name in ("a1", "a2")}
    return Table(n_rows=len(values[0]), numeric=numeric, factors=factors)


def test_every_rule_is_here() -> None:
    assert without_example(AbstractRegime, (*RULES, *SHIFTS)) == set()


@pytest.mark.parametrize("survival", [False, True], ids=["outcome at the end", "event"])
@pytest.mark.parametrize("rules", [RULES, SHIFTS], ids=["rules", "shifts"])
def test_eif_is_the_derivative_of_psi(survival: bool, rules: tuple[AbstractRegime, ...]) -> None:
    tree = Tree(survival, doses=2 if rules is RULES else DOSES)
    p = np.random.default_rng(5).dirichlet(np.full(len(tree.atoms), 6.0))
    problem, table = problem_of(tree, p, rules), table_of(tree)
    columns = problem.columns(problem.start(), table)
    psi = np.array([tree.psi(p, rule) for rule in rules])
    D = columns.u - columns.t * psi[:, None]
    assert columns.m @ p == pytest.approx(psi, abs=1e-6)  # predictions are truncated 1e-6 inside (0, 1)
    assert D @ p == pytest.approx(0.0, abs=1e-12)
    worst = 0.0
    for k in range(len(p)):
        direction = -p.astype(complex)
        direction[k] += 1.0
        for r, rule in enumerate(rules):
            slope = tree.psi(p + 1j * STEP * direction, rule).imag / STEP
            worst = max(worst, abs(slope - D[r, k]))
    assert worst < 1e-10


@pytest.mark.parametrize("survival", [False, True])
def test_score_is_the_eif(survival: bool) -> None:
    """The gradient of the loss at eps = 0 is the mean of the part of D that is fluctuated."""
    tree = Tree(survival)
    p = np.random.default_rng(5).dirichlet(np.full(len(tree.atoms), 6.0))
    problem, table = problem_of(tree, p, RULES), table_of(tree)
    law = problem.move(problem.start(), np.linspace(-0.3, 0.4, len(RULES)))
    columns = problem.columns(law, table)
    gradient = problem.submodel(law, table).sums(np.zeros(len(RULES)), Part.GRADIENT).values(table.n_rows)
    assert gradient == pytest.approx((columns.u - columns.m).mean(axis=1), abs=1e-11)  # the grid of sums
    assert np.abs(gradient).min() > 1e-4

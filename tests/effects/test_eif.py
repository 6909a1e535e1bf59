"""Each target's EIF is the derivative of Psi, written longhand on a finite law, by complex steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.results.inference import summaries
from fedtmle.targets.effects.moments import ClosingLayout, MomentColumns, closing_sums
from tests.declare import declare
from tests.effects.studies import NEWTON, Columns, change, finish
from tests.narrow import targeted

# A finite law over (W, A, Delta, Y): four covariate values, three arms, three outcomes or none.
OUTCOMES = (0.1, 0.35, 0.8)
ATOMS = list(itertools.product(range(4), range(3), (*OUTCOMES, None)))
W = np.array([w for w, _, _ in ATOMS])
A = np.array([a for _, a, _ in ATOMS])
DELTA = np.array([y is not None for _, _, y in ATOMS])
Y = np.array([0.0 if y is None else y for _, _, y in ATOMS])
STEP = 1e-200

Law = np.ndarray  # masses of the atoms, perhaps complex
Functional = Callable[[Law], np.ndarray]


def masses(arms: int, missing: bool) -> Law:
    """Positive masses on the atoms in use, zero on the others."""
    raw = np.random.default_rng(11).uniform(0.5, 2.0, size=len(ATOMS))
    raw = raw * (arms > A) * (DELTA | missing)
    return raw / raw.sum()


def share(p: Law, *cells: Any) -> complex:
    chosen = np.logical_and.reduce(cells)
    return p[chosen].sum()


def q(p: Law, a: int, w: int) -> complex:
    """E[Y | Delta = 1, A = a, W = w]."""
    cell = (a == A) & (w == W) & DELTA
    return (p[cell] * Y[cell]).sum() / p[cell].sum()


def mean(
    p: Law, policy: Callable[[int, int], float], arms: int, who: Callable[[Law, int], complex]
) -> complex:
    """sum_w P(w, v = 1) sum_a d(a | w) E[Y | a, w] / P(v = 1)."""
    shares = [who(p, w) for w in range(4)]
    regressions = [sum(policy(a, w) * q(p, a, w) for a in range(arms)) for w in range(4)]
    return sum(s * m for s, m in zip(shares, regressions, strict=True)) / sum(shares)


def everyone(p: Law, w: int) -> complex:
    return share(p, w == W)


def in_arm(arm: int) -> Callable[[Law, int], complex]:
    return lambda p, w: share(p, w == W, arm == A)


def in_stratum(level: int) -> Callable[[Law, int], complex]:
    return lambda p, w: share(p, w == W) * (w // 2 == level)


def overlapping(arms: int) -> Callable[[Law, int], complex]:
    """P(w) h(w), the overlap weight h = 1 / sum_a 1/g_a with g taken from the law."""

    def of(p: Law, w: int) -> complex:
        there = share(p, w == W)
        return there / sum(there / share(p, w == W, a == A) for a in range(arms))

    return of


def among_each_arm(p: Law) -> np.ndarray:
    """For arms 1 and 2, the effect against arm 0 among those in that arm."""
    return np.array([contrast(difference, 3, in_arm(arm))(p)[arm - 1] for arm in (1, 2)])


def static(arm: int) -> Callable[[int, int], float]:
    return lambda a, _: float(a == arm)


def arm_means(arms: int, who: Callable[[Law, int], complex] = everyone) -> Functional:
    return lambda p: np.array([mean(p, static(a), arms, who) for a in range(arms)])


def contrast(
    function: Callable[..., complex], arms: int, who: Callable[[Law, int], complex] = everyone
) -> Functional:
    def of(p: Law) -> np.ndarray:
        first, *others = arm_means(arms, who)(p)
        return np.array([function(other, first) for other in others])

    return of


def difference(one: complex, zero: complex) -> complex:
    return one - zero


def ratio(one: complex, zero: complex) -> complex:
    return one / zero


def odds_ratio(one: complex, zero: complex) -> complex:
    return one / (1 - one) / (zero / (1 - zero))


def by_stratum(p: Law) -> np.ndarray:
    return np.concatenate(
        [contrast(difference, 2, who)(p) for who in (everyone, in_stratum(0), in_stratum(1))]
    )


def policies(p: Law) -> np.ndarray:
    def threshold(a: int, w: int) -> float:
        return float(a == (2 if w >= 1.5 else 0))

    def stochastic(a: int, w: int) -> float:  # noqa: ARG001 - the same for everyone
        return (0.2, 0.5, 0.3)[a]

    return np.array([mean(p, rule, 3, everyone) for rule in (threshold, stochastic, static(1))])


RULES = (
    ft.Threshold("w", 1.5, arm="2", otherwise="0"),
    ft.Stochastic((0.2, 0.5, 0.3)),
    ft.Static("1"),
)
TWO, THREE = ("0", "1"), ("0", "1", "2")
CASES: dict[str, tuple[type, dict[str, Any], int, Functional]] = {
    "TSM": (ft.TSM, {"arms": TWO}, 2, arm_means(2)),
    "TSM of three arms": (ft.TSM, {"arms": THREE}, 3, arm_means(3)),
    "ATE": (ft.ATE, {"arms": TWO}, 2, contrast(difference, 2)),
    "ATE of three arms": (ft.ATE, {"arms": THREE}, 3, contrast(difference, 3)),
    "RR": (ft.RR, {"arms": TWO}, 2, contrast(ratio, 2)),
    "RR of three arms": (ft.RR, {"arms": THREE}, 3, contrast(ratio, 3)),
    "OR": (ft.OR, {"arms": TWO}, 2, contrast(odds_ratio, 2)),
    "ATT": (ft.ATT, {"arms": TWO}, 2, contrast(difference, 2, in_arm(1))),
    "ATC": (ft.ATC, {"arms": TWO}, 2, contrast(difference, 2, in_arm(0))),
    "ATT of three arms": (ft.ATT, {"arms": THREE}, 3, among_each_arm),
    "ATC of three arms": (ft.ATC, {"arms": THREE}, 3, contrast(difference, 3, in_arm(0))),
    "ATO": (ft.ATO, {"arms": TWO}, 2, contrast(difference, 2, overlapping(2))),
    "ATO of three arms": (ft.ATO, {"arms": THREE}, 3, contrast(difference, 3, overlapping(3))),
    "by stratum": (ft.ATE, {"arms": TWO, "strata": "half"}, 2, by_stratum),
    "rules": (ft.PolicyMeans, {"arms": THREE, "rules": RULES}, 3, policies),
    "a mean": (ft.OutcomeMean, {"treatment": None}, 1, arm_means(1)),
}


def test_every_estimand_has_a_case() -> None:
    assert {kind for kind, *_ in CASES.values()} == set(ft.ESTIMANDS)


def atoms(p: Law, arms: int) -> Columns:
    """The atoms in use as rows, weighted by their masses, with the law's own Q, g and pi beside them."""
    used = p > 0
    columns = {
        "w": W.astype(float),
        "half": W // 2,
        "a": A,
        "y": np.where(DELTA, Y, np.nan),
        "mass": p * 1000,
    }
    for a in range(arms):
        cells = [[share(p, a == A, w == W, DELTA), share(p, a == A, w == W), share(p, w == W)] for w in W]
        observed, taken, there = np.array(cells).T
        columns |= {
            f"g{a}": taken / there,
            f"pi{a}": observed / taken,
            f"q{a}": np.array([q(p, a, w) for w in W]),
        }
    return {name: column[used] for name, column in columns.items()}


def supplied(kind: type, declared: dict[str, Any], arms: int, missing: bool) -> ft.Study:
    every = range(arms)
    target = kind(outcome="y", **{"treatment": "a", **declared})
    return ft.Study(
        target=target,
        outcome_model=ft.Supplied(*(f"q{a}" for a in every)),
        treatment_model=ft.Supplied(*(f"g{a}" for a in every[1:])) if arms > 1 else None,
        missingness_model=ft.Supplied(*(f"pi{a}" for a in every)) if missing else None,
        weights="mass",
        g_bounds=0.01,  # below every probability of the law
        algorithm=NEWTON,
        variables=declare(
            w=(0, 3),
            half=["0", "1"],
            a=[str(a) for a in every] if arms > 1 else "binary",
            y=(0, 1),
            mass=(0, 999),
        ),
    )


@pytest.mark.parametrize("missing", [False, True], ids=["complete", "missing outcomes"])
@pytest.mark.parametrize("name", CASES)
def test_the_eif_is_the_derivative_of_psi(name: str, missing: bool) -> None:
    kind, declared, arms, psi = CASES[name]
    study, p = supplied(kind, declared, arms, missing), masses(arms, missing)
    finished, tables = finish(study, {"law": atoms(p, arms)})
    assert targeted(finished).updates == 0  # the law's own Q solves its own equation
    assert not any(targeted(finished).details.overlap.truncated)
    table = tables["law"]
    problem, components = targeted(finished).problem, targeted(finished).details.components
    estimate = targeted(finished).estimate
    found = summaries(study, components, estimate.psi)
    np.testing.assert_allclose([s.value for s in found], psi(p), atol=1e-12)
    weights = table.numeric["mass"] / table.numeric["mass"].mean()
    eif = problem.eif(targeted(finished).law, table, estimate.psi) / weights[:, None]
    own = eif @ np.stack([s.gradient for s in found]).T
    for row, atom in zip(own, np.flatnonzero(p > 0), strict=True):
        direction = np.eye(len(ATOMS))[atom] - p
        np.testing.assert_allclose(row, psi(p + 1j * STEP * direction).imag / STEP, atol=1e-10)


@pytest.mark.parametrize("kind", [ft.ATE, ft.ATT, ft.ATO])
def test_the_contrast_alone_has_the_same_eif(kind: type) -> None:
    p, arms = masses(2, missing=True), 2
    study = supplied(kind, {"arms": TWO}, arms, missing=True)
    rows = []
    for chosen in (study, change(study, submodel="contrast")):
        finished, tables = finish(chosen, {"law": atoms(p, arms)})
        outcome = targeted(finished)
        own = outcome.problem.eif(outcome.law, tables["law"], outcome.estimate.psi)
        rows.append(own @ np.array([-1.0, 1.0]) if own.shape[1] == 2 else own[:, 0])
    np.testing.assert_allclose(rows[0], rows[1], atol=1e-12)


def test_among_a_rare_arm_its_own_probability_needs_no_bound() -> None:
    """g cancels in the treated's own weight: neither truncated nor counted, however rare treatment is."""
    n, rng = 400, np.random.default_rng(0)
    a = np.arange(n) < 12
    data = {"a": a.astype(int), "y": rng.uniform(size=n), "q": np.full(n, 0.5), "g": np.full(n, 0.01)}
    study = ft.Study(
        target=ft.ATT(outcome="y", treatment="a"),
        outcome_model=ft.Supplied("q", "q"),
        treatment_model=ft.Supplied("g"),
        g_bounds=0.025,
        algorithm=NEWTON,
        variables=declare(a="binary", y=(0, 1)),
    )
    finished, tables = finish(study, {"one": data})
    assert targeted(finished).details.overlap.truncated == (0, 0)
    rows = targeted(finished).problem.rows(tables["one"])
    np.testing.assert_allclose(rows.taken(1)[a], n / 12)
    np.testing.assert_allclose(rows.taken(0)[~a], 0.025 / 0.99 * n / 12)  # both parts of the odds are bounded


def test_products_with_a_t_of_ones_are_those_of_any_other_t() -> None:
    stacked = np.random.default_rng(3).uniform(-7, 7, (3, 2, 50))
    stacked[1] = 1.0
    exponents = ClosingLayout(2).exponents(8.0, 1.0, 0)
    as_any, as_ones = (
        closing_sums(Alone(), MomentColumns(stacked, counts=counts), exponents) for counts in (False, True)
    )
    assert as_ones == as_any


class Alone:
    """Rows each of which is its own cluster."""

    cluster = None
    spanned = None

"""A cohort of people with a dictionary, split among hospitals, for tests of flows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedtmle.estimation.flow import Flow, Ran, run_open
from fedtmle.estimation.vocabulary import Vocabulary
from fedtmle_core.dictionary import Categorical, Dictionary, Numeric
from fedtmle_core.evaluate import Workspace
from fedtmle_core.plan import Member, Plan, Question
from fedtmle_core.sheet import Sheet
from fedtmle_core.terms import Term

SITES = ("a", "b", "c", "d")


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """People by column, and the dictionary that describes them."""

    dictionary: Dictionary
    columns: dict[str, np.ndarray]

    @property
    def n(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def plan(self) -> Plan:
        return Plan(
            dictionary=self.dictionary,
            models=(),
            members=(Member(name="a", signing=bytes(32), exchange=bytes(32)),),
            study=b"",
            author="",
        )

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self.dictionary)

    def sheets(self, hospitals: int, seed: int = 0) -> list[Sheet]:
        """Return the people split at random among hospitals."""
        where = np.random.default_rng(seed).integers(0, hospitals, self.n)
        numeric = {each.name for each in self.dictionary.variables if isinstance(each, Numeric)}
        return [
            Sheet.read(
                self.dictionary,
                {name: x[where == m] for name, x in self.columns.items() if name in numeric},
                {name: x[where == m] for name, x in self.columns.items() if name not in numeric},
            )
            for m in range(hospitals)
        ]

    def values(self, terms: Sequence[Term]) -> list[np.ndarray]:
        """Return terms of everybody, in one hospital."""
        return Workspace(self.sheets(1)[0]).columns(terms)

    def run(self, flow: Flow, hospitals: int = 3, seen: list[Question] | None = None) -> Ran:
        """Return what a flow ends with, asked of some hospitals; ``seen`` collects the questions."""
        return run_open(flow, self.sheets(hospitals), self.plan, seen=seen)


def cohort(n: int = 600, seed: int = 1) -> Cohort:
    """Return people with two numbers, a site, a treatment that depends on them, responses of each kind."""
    rng = np.random.default_rng(seed)
    age, bmi = rng.uniform(20, 80, n), rng.normal(27, 4, n).clip(15, 50)
    site = rng.integers(0, 4, n)
    sex = rng.integers(0, 2, n)
    eta = -1.0 + 0.03 * (age - 50) + 0.4 * (site == 2) - 0.05 * (bmi - 27) + 0.5 * sex
    treat = (rng.random(n) < 1 / (1 + np.exp(-eta))).astype(np.int16)
    y = (rng.random(n) < 1 / (1 + np.exp(-0.5 * eta - 0.7 * treat + 0.5))).astype(float)
    visits = rng.poisson(np.exp(0.3 + 0.01 * (age - 50) + 0.3 * treat)).clip(0, 30).astype(float)
    score = (40 + 0.2 * age - 3 * treat + rng.normal(0, 5, n)).clip(0, 100)
    variables = (
        Numeric(name="age", low=18.0, high=110.0),
        Numeric(name="bmi", low=10.0, high=60.0),
        Numeric(name="y", low=0.0, high=1.0),
        Numeric(name="visits", low=0.0, high=40.0),
        Numeric(name="score", low=0.0, high=100.0),
        Numeric(name="weight", low=0.0, high=4.0),
        Categorical(name="site", levels=SITES),
        Categorical(name="sex", levels=("f", "m")),
        Categorical(name="treat", levels=("0", "1")),
        Categorical(name="drug", levels=("none", "low", "high")),
    )
    columns = {
        "age": age,
        "bmi": bmi,
        "y": y,
        "visits": visits,
        "score": score,
        "weight": rng.choice([0.5, 1.0, 2.0], n),
        "site": site.astype(np.int16),
        "sex": sex.astype(np.int16),
        "treat": treat,
        "drug": _classes(rng, age).astype(np.int16),
    }
    return Cohort(dictionary=Dictionary(variables), columns=columns)


def _classes(rng: np.random.Generator, age: np.ndarray) -> np.ndarray:
    etas = np.stack([np.zeros(len(age)), 0.02 * (age - 50), 0.3 - 0.01 * (age - 50)])
    p = np.exp(etas) / np.exp(etas).sum(axis=0)
    return (rng.random(len(age)) > np.cumsum(p, axis=0)[:-1]).sum(axis=0)


def newton(X: np.ndarray, y: np.ndarray, family: str, w: np.ndarray | None = None) -> np.ndarray:
    """Return the longhand pooled fit of a GLM; columns of X by row."""
    w = np.ones(len(y)) if w is None else w
    beta = np.zeros(X.shape[1])
    for _ in range(60):
        eta = X @ beta
        mean, bend = _means(eta, family)
        beta = beta + np.linalg.solve((X * (w * bend)[:, None]).T @ X, X.T @ (w * (y - mean)))
    return beta


def _means(eta: np.ndarray, family: str) -> tuple[np.ndarray, np.ndarray]:
    if family == "binomial":
        p = 1 / (1 + np.exp(-eta))
        return p, p * (1 - p)
    if family == "poisson":
        return np.exp(eta), np.exp(eta)
    return eta, np.ones_like(eta)


def close(found: Sequence[float] | np.ndarray, expected: np.ndarray, tolerance: float = 1e-9) -> bool:
    return bool(np.allclose(np.array(found), expected, rtol=tolerance, atol=tolerance))

"""Whether the estimates that silos retain in FedTMLE-LR are doubly robust, which the paper leaves open.

A treatment effect on a binary outcome, its two nuisance models right or wrong (a confounder left out), in
silos of one population and in silos whose confounder has different means. At its retirement a silo's own EIF
mean is zero, so the error of its estimate is the silo's empirical process and the remainder R_2, the
product of the errors of both models.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

import fedtmle as ft
from fedtmle_core.types import Array
from fedtmle_paper.reproduce.extra import Z

SILOS = 4
ROWS = 4_000  # of all silos, in shares of 1 : 2 : 3 : 4
SEED = 30_000  # apart from all other seeds
SHIFT = 0.8  # of the confounder's mean in the last silo, less that in the first
CONTRAST = np.array([-1.0, 1.0])  # of E[Y(0)] and E[Y(1)]
FORMULAS = {"right": "x + z", "wrong": "x"}  # z confounds
MAX_UPDATES = 20
RULES = {
    "lattice": ft.Personalized(max_updates=MAX_UPDATES),
    "noise": ft.Personalized(noise=1.0, max_updates=MAX_UPDATES),
}
VARIABLES = ft.Variables(
    {
        "y": {"kind": "binary"},
        "a": {"kind": "binary"},
        "x": {"kind": "number", "range": (-6, 6)},
        "z": {"kind": "number", "range": (-7, 7)},
    }
)


@dataclass(frozen=True, kw_only=True)
class Retained:
    """One silo's own estimate of one run, beside the effect in its population."""

    seed: int
    populations: str  # "one" or "shifted"
    outcome_model: str  # "right" or "wrong"
    treatment_model: str
    rule: str  # of retirement
    silo: str
    retired_at: int | None
    estimate: float
    std_error: float
    truth: float  # of the silo's own population

    @property
    def covers(self) -> bool:
        return abs(self.estimate - self.truth) <= Z * self.std_error


def retained(seed: int, populations: str) -> list[Retained]:
    """Return every silo's estimate on one sample, under each pair of models and each rule of retirement."""
    rng = np.random.default_rng([SEED, seed])
    means = SHIFT * (np.arange(SILOS) / (SILOS - 1) - 0.5) * (populations == "shifted")
    data = {
        f"s{m}": _draw(rng, ROWS * (m + 1) * 2 // (SILOS * (SILOS + 1)), mean) for m, mean in enumerate(means)
    }
    table = []
    for outcome, treatment in itertools.product(FORMULAS, FORMULAS):
        for rule, algorithm in RULES.items():
            study = ft.Study(
                target=ft.ATE(outcome="y", treatment="a"),
                outcome_model=ft.GLM(f"a + {FORMULAS[outcome]}"),
                treatment_model=ft.GLM(FORMULAS[treatment]),
                algorithm=algorithm,
                variables=VARIABLES,
                diagnostics=False,
            )
            result = ft.run(study, data).run
            if result is None:
                raise AssertionError("a fresh result has its run")
            table += [
                Retained(
                    seed=seed,
                    populations=populations,
                    outcome_model=outcome,
                    treatment_model=treatment,
                    rule=rule,
                    silo=name,
                    retired_at=local.retired_at,
                    estimate=float(CONTRAST @ local.estimate.psi),
                    std_error=math.sqrt(CONTRAST @ local.estimate.covariance @ CONTRAST),
                    truth=effect(float(mean)),
                )
                for (name, local), mean in zip(result.silos.items(), means, strict=True)
            ]
    return table


def _draw(rng: np.random.Generator, n: int, mean: float) -> dict[str, Array]:
    x, z = rng.normal(size=n).clip(-6, 6), (mean + rng.normal(size=n)).clip(-7, 7)
    a = (rng.random(n) < _expit(0.3 * x + 0.8 * z)).astype(int)
    y = (rng.random(n) < _expit(-0.5 + a + 0.5 * x + 0.9 * z)).astype(int)
    return {"y": y, "a": a, "x": x, "z": z}


@cache
def effect(mean: float) -> float:
    """Return the average treatment effect where z has this mean, by Gauss-Hermite quadrature."""
    node, weight = np.polynomial.hermite_e.hermegauss(80)
    x, z = np.meshgrid(node, mean + node)
    change = _expit(0.5 + 0.5 * x + 0.9 * z) - _expit(-0.5 + 0.5 * x + 0.9 * z)
    return float((np.outer(weight, weight) * change).sum() / weight.sum() ** 2)


def _expit(value: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-value)))


def robustness_section(table: Sequence[Retained]) -> Iterator[str]:
    """Yield the section of RESULTS.md: the 2x2 table of right and wrong models, per rule and population."""
    yield from (
        "",
        "## Are the estimates that silos retain doubly robust?",
        "",
        f"The paper leaves it open. {ROWS:,} rows in {SILOS} silos (1 : 2 : 3 : 4), binary outcome, two "
        f"confounders; a wrong model leaves one out. Shifted: that one's means differ by {SHIFT:g} between "
        "the first and the last silo. Both models are fitted over all silos. Rules: a fit that rounds to "
        f"zero (spacing 2^-40), or an EIF mean within the silo's sampling noise; at most {MAX_UPDATES} "
        "updates. Bias: of the silos' estimates of the effect in their own population, in their standard "
        "errors, with twice the simulation error of the mean; coverage of their 95% intervals.",
        "",
        "| populations | rule | outcome model | treatment model | silos | retired | median tau | bias / SE "
        "| coverage |",
        "|---|---|---|---|---|---|---|---|---|",
    )
    kinds = dict.fromkeys((r.populations, r.rule, r.outcome_model, r.treatment_model) for r in table)
    for kind in sorted(kinds):
        rows = [r for r in table if (r.populations, r.rule, r.outcome_model, r.treatment_model) == kind]
        taus = [r.retired_at for r in rows if r.retired_at is not None]
        errors = [(r.estimate - r.truth) / r.std_error for r in rows]
        # Silos of one sample share their models: the sample is the unit of the simulation.
        means = [
            statistics.mean(e for e, r in zip(errors, rows, strict=True) if r.seed == seed)
            for seed in sorted({r.seed for r in rows})
        ]
        spread = statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan
        yield (
            f"| {' | '.join(kind)} | {len(rows)} | {len(taus)} "
            f"| {f'{statistics.median(taus):g}' if taus else '-'} "
            f"| {statistics.mean(errors):+.2f} ± {2 * spread:.2f} "
            f"| {statistics.mean(r.covers for r in rows):.3f} |"
        )

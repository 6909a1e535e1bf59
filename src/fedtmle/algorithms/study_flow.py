"""The flow of a study: every party runs it on the same broadcasts.

    factor levels -> counts -> treatment, missingness and outcome models -> overlap -> targeting

Each arrow is a query or a sub-flow; nothing but pooled sums, levels and exponents comes down.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.nuisance import Regression, fit_cross
from fedtmle.algorithms.outcome import Flow, Outcome, Query
from fedtmle.algorithms.study import Study
from fedtmle.errors import InputError
from fedtmle.initial.crossfit import Column, Folds
from fedtmle.initial.glm import Supplied
from fedtmle.model.families import Family
from fedtmle.model.table import Table
from fedtmle.model.types import Array, exponent
from fedtmle.protocol.query import Phase
from fedtmle.protocol.tables import LevelsQuery, TallyQuery
from fedtmle.targets.effects.components import Component
from fedtmle.targets.effects.prepare import EffectColumns, Predictor, Preparation
from fedtmle.targets.effects.problem import EffectProblem

UNBOUNDED_CEILING = 4096.0  # declared for 1/(g pi) where g is not bounded


@dataclass(frozen=True, kw_only=True)
class StudyDetails:
    """What a study learned on the way, all of it pooled and public."""

    components: tuple[Component, ...]
    strata: tuple[str, ...]
    levels: Mapping[str, tuple[str, ...]]
    arm_counts: tuple[int, ...]
    observed_counts: tuple[int, ...]
    g_floor: float
    truncated: tuple[int, ...]  # rows whose g pi is below the floor, per arm
    effective_sizes: tuple[float, ...]  # (sum H)^2 / sum H^2 of those observed, per component
    nuisances: Mapping[str, Any]


@final
@dataclass(frozen=True, kw_only=True)
class StudyFlow(AbstractAlgorithm):
    """The whole study as a flow; its ``problem`` is the `Study`, its law is None."""

    @property
    def pools_rows(self) -> bool:
        return False

    def flow(self, problem: Any, law: Any, n: int) -> Flow:  # noqa: ARG002 - a study starts without a law
        study: Study = problem
        levels = yield from _levels(study)
        columns = _columns(study, levels)
        tally = yield from _tally(study, columns, n)
        fitted = yield from _nuisances(study, columns, levels, tally, n)
        preparation = _preparation(study, columns, fitted, tally, n)
        overlap: Overlap = yield from _overlap(preparation, n)
        effect = effect_problem(study, preparation)
        outcome: Outcome = yield from study.algorithm.flow(effect, effect.start(), n)
        details = StudyDetails(
            components=preparation.components,
            strata=columns.strata_levels,
            levels=levels,
            arm_counts=tally.arms,
            observed_counts=tally.observed,
            g_floor=preparation.g_floor,
            truncated=overlap.truncated,
            effective_sizes=overlap.effective_sizes,
            nuisances=fitted,
        )
        return replace(outcome, problem=effect, details=details)


def effect_problem(study: Study, preparation: Preparation) -> EffectProblem:
    """The problem that is targeted, once nuisances are fitted."""
    components = preparation.components
    contrast = study.target.contrast() if study.submodel == "contrast" else None
    identity = tuple(tuple(float(i == j) for j in range(len(components))) for i in range(len(components)))
    smallest_share = min(preparation.shares.values())
    inverse = 1.0 / preparation.g_floor if preparation.g_floor else UNBOUNDED_CEILING
    weight = study.weight_ceiling if study.weights else 1.0
    return EffectProblem(
        labels=tuple(c.name for c in components) if contrast is None else ("contrast",),
        combination=identity if contrast is None else (contrast,),
        outcome_bounds=study.target.outcome_bounds,
        prepare=preparation,
        ceiling=weight * inverse / smallest_share,
        population_ceiling=weight / smallest_share,
        largest_cluster=study.largest_cluster if study.cluster else 1,
        linear=study.link == "linear",
        as_weight=study.clever == "weight",
    )


def _levels(study: Study) -> Generator[Query, Any, dict[str, tuple[str, ...]]]:
    levels: dict[str, tuple[str, ...]] = {}
    if study.factors:
        pooled = yield LevelsQuery(factors=study.factors)
        levels = dict(zip(study.factors, pooled, strict=True))
    if study.target.treatment is not None:
        levels[study.target.treatment] = study.target.arms
    return levels


def _columns(study: Study, levels: Mapping[str, tuple[str, ...]]) -> EffectColumns:
    target = study.target
    return EffectColumns(
        outcome=target.outcome,
        outcome_bounds=target.outcome_bounds,
        treatment=target.treatment,
        arms=target.arms,
        strata=target.strata,
        strata_levels=levels[target.strata] if target.strata else (),
        weights=study.weights,
        cluster=study.cluster,
    )


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Pooled counts: rows and observed outcomes per arm, the mean weight, weighted shares."""

    arms: tuple[int, ...]
    observed: tuple[int, ...]
    weight_mean: float
    arm_weights: tuple[float, ...]
    stratum_weights: tuple[float, ...]


def _tally(study: Study, columns: EffectColumns, n: int) -> Generator[Query, Any, Tally]:
    arms, strata = len(columns.arms), len(columns.strata_levels)

    def counted(table: Table) -> Array:
        arm, w, seen = columns.arm(table), columns.weight(table), columns.observed(table)
        taken = np.stack([(arm == a).astype(np.float64) for a in range(arms)])
        stratum = columns.stratum(table)
        rows = [taken, taken * seen, w[None, :], taken * w]
        rows += [(stratum == s)[None, :] * w for s in range(strata)] if stratum is not None else []
        return np.concatenate(rows)

    heavy = exponent(study.weight_ceiling * 1024 if study.weights else 1.0)
    exponents = (1,) * (2 * arms) + (heavy,) * (1 + arms + strata)
    pooled = yield TallyQuery(columns=counted, exponents=exponents, n=n)
    sums = pooled.values()
    weights = sums[2 * arms :]
    tally = Tally(
        arms=tuple(int(c) for c in sums[:arms]),
        observed=tuple(int(c) for c in sums[arms : 2 * arms]),
        weight_mean=float(weights[0]) / n,
        arm_weights=tuple(map(float, weights[1 : 1 + arms])),
        stratum_weights=tuple(map(float, weights[1 + arms :])),
    )
    for arm, count in zip(columns.arms, tally.observed, strict=True):
        if not count:
            raise InputError(f"treatment: no silo has an observed outcome in arm '{arm}'")
    if sum(tally.observed) < n and study.missingness_model is None:
        raise InputError(
            f"missingness_model: {n - sum(tally.observed)} outcome(s) are missing; give a model of who was "
            "observed, or leave those rows out"
        )
    return tally


def _nuisances(
    study: Study,
    columns: EffectColumns,
    levels: Mapping[str, tuple[str, ...]],
    tally: Tally,
    n: int,
) -> Generator[Query, Any, dict[str, tuple[Predictor, ...]]]:
    folds = None if study.folds is None else Folds(count=study.folds, seed=study.seed, cluster=study.cluster)
    ceiling = study.weight_ceiling if study.weights else 1.0
    fitted: dict[str, tuple[Predictor, ...]] = {}

    def weight(table: Table) -> Array:
        return columns.weight(table) / tally.weight_mean

    treatment = study.treatment_model
    if isinstance(treatment, Supplied):
        fitted["treatment"] = tuple(Column(name) for name in treatment.columns)
    elif treatment is not None:
        models = []
        for code in range(1, len(columns.arms)):

            def taken(table: Table, code: int = code) -> tuple[Array, Array]:
                arm = columns.arm(table)
                at_risk = (arm == 0) | (arm >= code)
                return (arm == code).astype(np.float64), weight(table) * at_risk

            what = (
                "treatment model"
                if len(columns.arms) == 2
                else f"treatment model, arm '{columns.arms[code]}'"
            )
            regression = Regression(
                what=what, glm=treatment, family=Family.LOGISTIC, response=taken, weight_ceiling=ceiling
            )
            models.append((yield from fit_cross(regression, levels, n, folds)))
        fitted["treatment"] = tuple(models)

    missingness = study.missingness_model
    if isinstance(missingness, Supplied):
        fitted["missingness"] = (Column(missingness.columns[0]),)
    elif missingness is not None:
        regression = Regression(
            what="missingness model",
            glm=missingness,
            family=Family.LOGISTIC,
            response=lambda table: (columns.observed(table), weight(table)),
            weight_ceiling=ceiling,
        )
        fitted["missingness"] = ((yield from fit_cross(regression, levels, n, folds)),)

    outcome = study.outcome_model
    low, high = study.target.outcome_bounds
    if isinstance(outcome, Supplied):
        if len(outcome.columns) != len(columns.arms):
            raise InputError(f"outcome_model: expected one supplied column per arm, {len(columns.arms)}")
        fitted["outcome"] = tuple(Column(name, low, high - low) for name in outcome.columns)
    else:
        regression = Regression(
            what="outcome model",
            glm=outcome,
            family=outcome.resolve(binary=study.target.is_binary),
            response=lambda table: (columns.y(table), weight(table) * columns.observed(table)),
            weight_ceiling=ceiling,
        )
        fitted["outcome"] = ((yield from fit_cross(regression, levels, n, folds)),)
    return fitted


def _preparation(
    study: Study,
    columns: EffectColumns,
    fitted: Mapping[str, tuple[Predictor, ...]],
    tally: Tally,
    n: int,
) -> Preparation:
    components = study.target.components(columns.strata_levels)
    total = tally.weight_mean * n
    shares = {}
    for r, component in enumerate(components):
        code = getattr(component.population, "code", None)
        if code is None:
            shares[r] = 1.0
        elif component.population.label.startswith("in arm"):
            shares[r] = tally.arm_weights[code] / total
        else:
            shares[r] = tally.stratum_weights[code] / total
        if shares[r] <= 0:
            raise InputError(f"strata: nobody is {component.population.label}")
    floor = 5.0 / (math.sqrt(n) * math.log(n)) if study.g_bounds == "auto" else float(study.g_bounds or 0.0)
    return Preparation(
        columns=columns,
        components=components,
        outcome=fitted["outcome"],
        treatment=fitted.get("treatment", ()),
        missingness=fitted["missingness"][0] if "missingness" in fitted else None,
        g_floor=min(floor, 0.5),
        weight_mean=tally.weight_mean,
        shares=shares,
    )


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """How well the arms overlap, from pooled sums."""

    truncated: tuple[int, ...]
    effective_sizes: tuple[float, ...]


def _overlap(preparation: Preparation, n: int) -> Generator[Query, Any, Overlap]:
    arms, count = len(preparation.columns.arms), len(preparation.components)

    def diagnosed(table: Table) -> Array:
        g, pi = preparation.propensities(table)
        rows = preparation(table)
        h = np.stack([rows.taken(r) for r in range(count)]) * rows.weight
        return np.concatenate([(g * pi < preparation.g_floor).astype(np.float64), h, h * h])

    ceiling = 1.0 / preparation.g_floor if preparation.g_floor else UNBOUNDED_CEILING
    h = ceiling / min(preparation.shares.values()) * 1024
    exponents = (1,) * arms + (exponent(h),) * count + (exponent(h * h),) * count
    pooled = yield TallyQuery(columns=diagnosed, exponents=exponents, n=n, phase=Phase.NUISANCE)
    sums = pooled.values()
    first, second = sums[arms : arms + count], sums[arms + count :]
    truncated = tuple(int(c) for c in sums[:arms])
    for arm, rows in zip(preparation.columns.arms, truncated, strict=True):
        if rows > n / 2:
            raise InputError(
                f"g_bounds: the probability of arm '{arm}' is below {preparation.g_floor:.3g} for "
                f"{rows} of {n} rows; there is no overlap to learn from. Restrict the cohort, or simplify "
                "the treatment model"
            )
    effective = tuple(float(a * a / b) if b else 0.0 for a, b in zip(first, second, strict=True))
    return Overlap(truncated=truncated, effective_sizes=effective)

"""The flow of a study: every party runs it on the same broadcasts.

    factor levels -> clusters -> counts -> treatment, missingness and outcome models -> overlap
                  -> targeting -> diagnostics

Each arrow is a query or a sub-flow; nothing but pooled sums, levels and exponents comes down.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from fedtmle.algorithms.base import AbstractAlgorithm
from fedtmle.algorithms.diagnostics import Diagnostics, diagnose
from fedtmle.algorithms.outcome import Flow, Outcome, Query
from fedtmle.algorithms.overlap import Overlap, find_overlap
from fedtmle.algorithms.regressions import effect_columns, regressions
from fedtmle.algorithms.study import MOST_STRATA, Study
from fedtmle.algorithms.superlearner import fit_nuisance
from fedtmle.errors import InputError
from fedtmle.initial.crossfit import Column, Probability
from fedtmle.initial.glm import Supplied
from fedtmle.model.table import Table, over_blocks
from fedtmle.model.types import Array, product
from fedtmle.protocol.clusters import ClustersQuery, SpanningQuery
from fedtmle.protocol.query import Cell
from fedtmle.protocol.tables import LevelsQuery, ScalesQuery, TallyQuery
from fedtmle.targets.effects.components import Component
from fedtmle.targets.effects.prepare import EffectColumns, Predictor, Preparation
from fedtmle.targets.effects.problem import EffectProblem

SMALLEST_EXPONENT = -512  # of weights: below it, their grid would leave the range of a double
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
    overlap: Overlap
    diagnostics: Diagnostics | None  # None if not wanted, or where each silo has its own law (Personalized)
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
        columns = effect_columns(study, levels, (yield from _shared_clusters(study)))
        tally = yield from _tally(study, columns, n)
        _require_outcomes(study, tally, n)
        fitted = yield from _nuisances(study, columns, levels, tally, n)
        preparation = _preparation(study, columns, fitted, tally, n)
        effect = effect_problem(study, preparation)
        overlap: Overlap = yield from find_overlap(effect, preparation, n)
        if study.submodel == "per arm":
            effect = replace(effect, combination=tuple(effect.combination[r] for r in overlap.spanning))
        outcome: Outcome = yield from study.algorithm.flow(effect, effect.start(), n)
        diagnostics = None
        if study.diagnostics and outcome.estimate is not None:
            diagnostics = yield from diagnose(study, effect, outcome.law, overlap, n)
        details = StudyDetails(
            components=preparation.components,
            strata=columns.strata_levels,
            levels=levels,
            arm_counts=tally.arms,
            observed_counts=tally.observed,
            g_floor=preparation.g_floor,
            overlap=overlap,
            diagnostics=diagnostics,
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
    rows = identity if contrast is None else (contrast,)
    return EffectProblem(
        labels=tuple(c.name for c in components) if contrast is None else ("contrast",),
        combination=rows,
        reported=rows,
        outcome_bounds=study.target.outcome_bounds,
        prepare=preparation,
        ceiling=weight * inverse / smallest_share,
        population_ceiling=weight / smallest_share,
        largest_cluster=study.largest_cluster if study.cluster else 1,
        spanning=len(preparation.columns.spanning),
        linear=study.link == "linear",
        as_weight=study.clever == "weight",
    )


def _levels(study: Study) -> Generator[Query, Any, dict[str, tuple[str, ...]]]:
    levels: dict[str, tuple[str, ...]] = {}
    if study.factors:
        pooled = yield LevelsQuery(factors=study.factors)
        levels = dict(zip(study.factors, pooled, strict=True))
    strata = study.target.strata
    if strata is not None and len(levels[strata]) > MOST_STRATA:
        raise InputError(
            f"strata: column '{strata}' has {len(levels[strata])} levels over all silos, more than "
            f"{MOST_STRATA}; group its values into a few, or name another column"
        )
    if study.target.treatment is not None:
        levels[study.target.treatment] = study.target.arms
    return levels


def _shared_clusters(study: Study) -> Generator[Query, Any, tuple[bytes, ...]]:
    """The clusters that are in more than one silo, where the study allows any."""
    if study.cluster is None or study.cluster_scope == "silo":
        return ()
    allowed = study.cluster_scope == "spanning"
    found: tuple[bytes, ...] = yield ClustersQuery(column=study.cluster, spanning=allowed)
    if found:
        yield SpanningQuery(column=study.cluster, spanning=found)
    return found


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
    counted_strata = strata if study.weights else 0  # without weights, the sums of weights are counts

    def counted(table: Table) -> Array:
        w, seen, stratum = columns.weight(table), columns.observed(table), columns.stratum(table)
        found = np.empty((1 + 3 * arms + counted_strata + strata, table.n_rows))
        found[2 * arms] = w
        for a in range(arms):
            taken = columns.taken(table, a)
            found[a], found[arms + a], found[2 * arms + 1 + a] = (
                taken,
                product(taken, seen),
                product(taken, w),
            )
        if stratum is not None:
            inside = (stratum == np.arange(strata)[:, None]).astype(np.float64)
            found[1 + 3 * arms :] = np.concatenate([inside * w, inside]) if study.weights else inside
        return found

    heavy = 1
    if study.weights:  # whatever their unit, the sums keep their digits
        (heavy,) = yield ScalesQuery(columns=lambda table: columns.weight(table)[None, :], count=1)
        heavy = max(heavy, SMALLEST_EXPONENT)
    exponents = (1,) * (2 * arms) + (heavy,) * (1 + arms + strata) + (1,) * counted_strata
    first = 1 + 3 * arms + counted_strata
    pooled = yield TallyQuery(
        columns=counted,
        over=over_blocks,
        exponents=exponents,
        n=n,
        counts=(
            *(Cell(a, arm=True) for a in range(arms)),
            *(Cell(arms + a, of=a, rest="min_missing", arm=True) for a in range(arms)),
            *(Cell(first + s) for s in range(strata)),
        ),
    )
    sums = pooled.values()
    weights = sums[2 * arms :]
    tally = Tally(
        arms=tuple(int(c) for c in sums[:arms]),
        observed=tuple(int(c) for c in sums[arms : 2 * arms]),
        weight_mean=float(weights[0]) / n,
        arm_weights=tuple(map(float, weights[1 : 1 + arms])),
        stratum_weights=tuple(map(float, weights[1 + arms : 1 + arms + strata])),
    )
    if not tally.weight_mean > 0:
        raise InputError(f"weights: column '{study.weights}' is zero in every row")
    for arm, count in zip(columns.arms, tally.observed, strict=True):
        if not count:
            raise InputError(
                f"treatment: no silo has an observed outcome in arm '{arm}'; check the treatment's column, "
                "its arms and who has an outcome"
            )
    return tally


def _require_outcomes(study: Study, tally: Tally, n: int) -> None:
    if sum(tally.observed) < n and study.missingness_model is None:
        raise InputError(
            f"missingness_model: {n - sum(tally.observed)} outcome(s) are missing; give a model of who was "
            "observed, or leave those rows out"
        )


def _nuisances(
    study: Study,
    columns: EffectColumns,
    levels: Mapping[str, tuple[str, ...]],
    tally: Tally,
    n: int,
    roles: Sequence[str] = ("treatment", "missingness", "outcome"),
) -> Generator[Query, Any, dict[str, tuple[Predictor, ...]]]:
    folds = study.outer_folds
    asked = regressions(study, columns, tally.weight_mean)
    fitted: dict[str, tuple[Predictor, ...]] = {}
    for role in roles:
        model = study.models.get(role)
        if isinstance(model, Supplied):
            fitted[role] = _supplied(model, role, study)
        elif role == "missingness" and sum(tally.observed) == n:
            continue  # nothing is missing: pi = 1, and there is nothing to fit
        elif model is not None:
            fits = []
            for regression in asked[role]:
                fits.append((yield from fit_nuisance(regression, levels, n, folds)))
            fitted[role] = tuple(fits)
    return fitted


Treatment = tuple[EffectColumns, tuple[Predictor, ...], float]


def fit_treatment(study: Study, n: int) -> Generator[Query, Any, Treatment]:
    """The treatment model alone, with the mean weight that its fit is relative to."""
    levels = yield from _levels(study)
    columns = effect_columns(study, levels)
    tally = yield from _tally(study, columns, n)
    fitted = yield from _nuisances(study, columns, levels, tally, n, roles=("treatment",))
    return columns, fitted["treatment"], tally.weight_mean


def _supplied(model: Supplied, role: str, study: Study) -> tuple[Predictor, ...]:
    """Predictions that each silo has already."""
    arms, names = len(study.target.arms), model.columns
    counts = {"treatment": (arms - 1,), "missingness": (1, arms), "outcome": (arms,)}[role]
    if len(names) not in counts:
        expected = " or ".join(str(count) for count in dict.fromkeys(counts))
        raise InputError(f"{role}_model: expected {expected} supplied column(s), not {len(names)}")
    if role == "treatment":
        return tuple(Probability(name, names[:j]) for j, name in enumerate(names))
    if role == "missingness":
        return tuple(map(Probability, names))
    low, high = study.target.outcome_bounds
    return tuple(Column(name, low, high - low) for name in names)


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
    auto = 5.0 / (math.sqrt(n) * math.log(max(n, 2)))
    floor = auto if study.g_bounds == "auto" else float(study.g_bounds or 0.0)
    return Preparation(
        columns=columns,
        components=components,
        outcome=fitted["outcome"],
        treatment=fitted.get("treatment", ()),
        missingness=fitted.get("missingness", ()),
        g_floor=min(floor, 0.5),
        weight_mean=tally.weight_mean,
        shares=shares,
        shows_g=study.diagnostics,
    )

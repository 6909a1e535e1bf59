"""Overlap of the arms, before anything is targeted, and diagnostics of overlap and fit after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from fedtmle.errors import FitError
from fedtmle.initial.superlearner import formulas
from fedtmle.model.linear import dot
from fedtmle.model.problem import Calibration
from fedtmle.programs.study import Study
from fedtmle.protocol.bins import BinsQuery
from fedtmle.protocol.query import Flow, JointQuery, Phase, Query
from fedtmle.protocol.regression import FitCurvatureQuery
from fedtmle.protocol.sums import TallyQuery
from fedtmle.targets.diagnostics import (
    Balance,
    Covariate,
    Diagnostics,
    OutcomeFit,
    Overlap,
    ladder_bounds,
    named_histograms,
)
from fedtmle.targets.effects.balance import (
    AbstractArmWeights,
    BalanceBins,
    CleverWeights,
    LadderColumns,
)
from fedtmle.targets.effects.components import Static
from fedtmle.targets.effects.prepare import Preparation
from fedtmle.targets.effects.problem import EffectLaw, EffectProblem
from fedtmle.targets.effects.statistics import (
    CalibrationBins,
    OverlapColumns,
    PredictionErrors,
    PredictionMoments,
    PropensityBins,
    TruncationBins,
)
from fedtmle_core.types import Array

BIN_PLACES = 6  # binary places of a sum over a bin: enough for a figure
SCALE_BITS = 36  # bits of the fluctuation's curvature below its bound for one row
DECILES = tuple(NormalDist().inv_cdf(k / 10) for k in range(1, 10))


def find_overlap(
    study: Study, effect: EffectProblem, preparation: Preparation, n: int
) -> Flow[tuple[Overlap, Calibration | None]]:
    """Ask for overlap in one round, and where sums are rounded for the scales of the targeting.

    Refuse a study whose arms do not overlap.
    """
    arms, columns = len(preparation.columns.arms), OverlapColumns(effect)
    bound = effect.row_bound(effect.start())
    curvature = FitCurvatureQuery(
        model=effect,
        law=effect.start(),
        eps=np.zeros(effect.dim),
        C=np.eye(effect.dim),
        exponent=bound.curvature - SCALE_BITS,
        n=n,
    )

    def tally(columns: OverlapColumns | PredictionMoments) -> TallyQuery:
        return TallyQuery(columns=columns, n=n, grid=columns.layout.grid if study.rounds_sums else None)

    pooled, bins, *further = yield JointQuery(
        (
            tally(columns),
            BinsQuery(
                bins=TruncationBins(effect, arms),
                n=n,
                phase=Phase.NUISANCE,
                floors=("min_cell", "min_truncated"),
            ),
            *((curvature,) if study.rounds_sums else ()),
            # Only the edges of a figure follow from these, so a silo with too few people omits them.
            *((replace(tally(PredictionMoments(effect)), optional=True),) if study.diagnostics else ()),
        )
    )
    sums = columns.layout.split(pooled.values())
    truncated = tuple(below.count for _, below in bins)
    _refuse_no_overlap(preparation, truncated, n)
    for component, mass in zip(preparation.components, sums["squares of H"], strict=True):
        if not mass > 0:
            raise FitError("arm", f"target: no observed outcome contributes to {component.name}")
    effective = tuple(float(a * a / b) for a, b in zip(sums["H"], sums["squares of H"], strict=True))
    ceilings = _ceilings(preparation)
    largest = tuple(
        min(ceiling, math.sqrt(b)) / float(a)
        for ceiling, a, b in zip(ceilings, sums["H"], sums["squares of H"], strict=True)
    )
    overlap = Overlap(
        truncated=truncated,
        disclosing=tuple(below.silos for _, below in bins),
        effective_sizes=effective,
        largest_shares=largest,
        mean_squares=tuple(float(b) / n for b in sums["squares of H"]),
        predicted=_mean_and_deviation(further[-1].values()) if study.diagnostics else (0.0, 0.0),
    )
    if not study.rounds_sums:
        return overlap, None
    # The outcome's part of the EIF alone; the covariates' part only adds to it.
    squares = [effect.width**2 * score / n**2 for score in sums["squared scores"].tolist()]
    calibration = Calibration(
        errors=tuple(math.sqrt(dot([w * w for w in row], squares)) for row in effect.combination),
        curvature=tuple(map(tuple, curvature.matrix(further[0]).tolist())),
        rounding=effect.dim * curvature.rounding,
    )
    return overlap, calibration


def _mean_and_deviation(moments: Array) -> tuple[float, float]:
    """Return both from the sums of w, w q and w q^2; zeros if no silo disclosed these."""
    mass, total, squares = moments.tolist()
    if not mass > 0:
        return 0.0, 0.0
    mean = total / mass
    return mean, math.sqrt(max(squares / mass - mean * mean, 0.0))


def _ceilings(preparation: Preparation) -> list[float]:
    """Return the largest possible H of each component, by the bound on g and that on the weights."""
    columns, is_complete = preparation.columns, not preparation.missingness
    inverse = 1.0 / preparation.g_floor if preparation.g_floor else math.inf
    weight = columns.weight_ceiling if columns.weights else 1.0
    return [
        weight * component.population.largest_ratio(inverse, is_complete=is_complete) / share
        for component, share in zip(preparation.components, preparation.shares, strict=True)
    ]


def _refuse_no_overlap(preparation: Preparation, truncated: tuple[int, ...], n: int) -> None:
    for arm, rows in zip(preparation.columns.arms, truncated, strict=True):
        if rows > n / 2:
            raise FitError(
                "overlap",
                f"g_bounds: the probability of arm '{arm}' is below {preparation.g_floor:.3g} for "
                f"{rows} of {n} rows; there is no overlap to learn from. Restrict the cohort, or simplify "
                "the treatment model",
            )


@dataclass(frozen=True, kw_only=True)
class Comparisons:
    """The comparisons of the diagnostics that do not depend on the law; they are made once."""

    ladder: LadderColumns | None = None
    balance: BalanceBins | None = None

    @classmethod
    def of(cls, study: Study, effect: EffectProblem) -> Comparisons:
        """Return the comparisons of a study; none if it wants no diagnostics."""
        if not study.diagnostics:
            return cls()
        return cls(ladder=ladder_columns(effect), balance=_static_balance(study, effect))


def ladder_columns(effect: EffectProblem) -> LadderColumns | None:
    """Return the terms of the estimates under other bounds, at the start; None if nothing is bounded."""
    preparation = effect.prepare
    if not isinstance(preparation, Preparation):
        return None
    population = preparation.components[0].population
    if population.largest_ratio(math.inf, is_complete=not preparation.missingness) == 1.0:
        return None
    if not preparation.treatment and not preparation.missingness:
        return None
    coordinates = min(preparation.overall, effect.dim)
    return LadderColumns(
        effect=effect,
        law=effect.start(),
        floor=preparation.g_floor,
        bounds=ladder_bounds(preparation.g_floor),
        components=preparation.overall,
        coordinates=coordinates,
        has_clusters=preparation.columns.cluster is not None,
    )


def _static_balance(study: Study, effect: EffectProblem) -> BalanceBins | None:
    """Return the sums of covariates by arm; None without static arms, or without covariates."""
    preparation, target = effect.prepare, study.target
    if target.treatment is None or not isinstance(preparation, Preparation):
        return None
    regimes = [component.regime for component in preparation.components[: preparation.overall]]
    if not all(isinstance(regime, Static) for regime in regimes) or len(regimes) != len(target.arms):
        return None
    return balance_bins(study, CleverWeights(effect=effect, components=preparation.overall))


def balance_bins(study: Study, weights: AbstractArmWeights) -> BalanceBins | None:
    """Return the sums of covariates by arm, or over all records without arms; None without covariates."""
    covariates = study_covariates(study)
    if not covariates:
        return None
    return BalanceBins(
        weights=weights,
        covariates=covariates,
        arms=max(len(study.target.arms), 1),
        has_weights=study.weights is not None,
    )


def find_balance(study: Study, weights: AbstractArmWeights, n: int) -> Flow[tuple[Balance, ...] | None]:
    """Ask for the covariates by arm, unweighted and weighted, in one round; None without covariates."""
    bins = balance_bins(study, weights)
    if bins is None:
        return None
    return bins.compared((yield BinsQuery(bins=bins, n=n, places=bins.places if study.rounds_sums else None)))


def study_covariates(study: Study) -> tuple[Covariate, ...]:
    """Return the covariates of the study's formulas, each number once and each level of a category."""
    variables = study.variables
    used = [formula for model in study.models.values() for formula in formulas(model)]
    numbers = dict.fromkeys(name for formula in used for name in formula.numeric_names)
    factors = dict.fromkeys(name for formula in used for name in formula.factor_names)
    covariates = []
    for name in numbers:
        if name in variables and name != study.target.treatment:
            low, high = variables.ranges[name]
            covariates.append(Covariate(name=name, low=low, high=high))
    for name in factors:
        if name in variables and name != study.target.treatment:
            levels = variables[name].codes
            shown = levels[1:] if len(levels) == 2 else levels
            covariates += [Covariate(name=name, level=level, levels=levels) for level in shown]
    return tuple(covariate for covariate in covariates if covariate.high > covariate.low)


def diagnose(
    study: Study,
    effect: EffectProblem,
    law: EffectLaw,
    overlap: Overlap,
    n: int,
    comparisons: Comparisons,
) -> Flow[Diagnostics]:
    """Ask for the diagnostics in one round."""
    mean, spread = overlap.predicted
    edges = tuple(mean + spread * z for z in DECILES) if spread > 0 else ()
    is_binary, arms = study.response == "binary", study.target.arms
    errors = PredictionErrors(effect=effect, law=law, is_binary=is_binary)
    outcomes = CalibrationBins(effect=effect, law=law, edges=edges)
    ladder, balance, rounds = comparisons.ladder, comparisons.balance, study.rounds_sums
    places = (BIN_PLACES,) * len(outcomes.exponents)

    def tally(columns: PredictionErrors | LadderColumns, grid: tuple[int, ...] | None) -> TallyQuery:
        return TallyQuery(columns=columns, n=n, phase=Phase.DIAGNOSTICS, grid=grid)

    asked: list[Query] = [
        tally(errors, errors.layout.grid if rounds else None),
        BinsQuery(bins=PropensityBins(effect, len(arms)), n=n),
        BinsQuery(bins=outcomes, n=n, places=places if rounds else None),
    ]
    if ladder is not None:
        # Sums at two bounds differ by the people between the bounds: a silo with few of these omits the sums.
        bounded = tally(replace(ladder, law=law), ladder.grid if rounds else None)
        asked.append(replace(bounded, optional=True))
    if balance is not None:
        asked.append(BinsQuery(bins=balance, n=n, places=balance.places if rounds else None))
    pooled, propensities, (calibration,), *further = yield JointQuery(tuple(asked))
    sums = {name: part.tolist() for name, part in errors.layout.split(pooled.values()).items()}
    mass, y, y_squared = sums["outcome moments"]
    deviance = None
    if is_binary:
        deviance = _explained(sums["log losses"], mass * _entropy(y / mass))
    before, after = sums["squared errors"]
    fit = OutcomeFit(
        r_squared=_explained(sums["squared errors"], y_squared - y * y / mass),
        deviance=deviance,
        variance=max(y_squared / mass - (y / mass) ** 2, 0.0),
        residual_variance=(before / mass, after / mass),
        edges=edges,
        calibration=calibration,
    )
    return Diagnostics(
        overlap=named_histograms(propensities, arms),
        fit=fit,
        ladder=() if ladder is None else ladder.rungs(further[0], n),
        balance=None if balance is None else balance.compared(further[-1]),
    )


def _entropy(p: float) -> float:
    return -sum(share * math.log(share) for share in (p, 1 - p) if share > 0)


def _explained(errors: Sequence[float], whole: float) -> tuple[float, float]:
    """Return the share of ``whole`` that is explained, from the error before and after targeting."""
    before, after = (1.0 - error / whole if whole > 0 else math.nan for error in errors)
    return before, after

"""A study's nuisance regressions: of the treatment, of being observed, and of the outcome."""

from __future__ import annotations

from collections.abc import Mapping

from fedtmle.algorithms.nuisance import Regression
from fedtmle.algorithms.study import Study
from fedtmle.initial.glm import Supplied
from fedtmle.model.families import Family
from fedtmle.targets.effects.prepare import EffectColumns
from fedtmle.targets.effects.responses import ArmResponse, ObservedResponse, OutcomeResponse


def effect_columns(
    study: Study, levels: Mapping[str, tuple[str, ...]], spanning: tuple[bytes, ...] = ()
) -> EffectColumns:
    """Return which columns of a table play which part in the study."""
    target = study.target
    return EffectColumns(
        outcome=target.outcome,
        outcome_bounds=target.outcome_bounds,
        treatment=target.treatment,
        arms=target.arms,
        strata=target.strata,
        strata_levels=levels[target.strata] if target.strata else (),
        weights=study.weights,
        weight_ceiling=study.weight_ceiling,
        cluster=study.cluster,
        largest_cluster=study.largest_cluster,
        spanning=spanning,
    )


def regressions(
    study: Study, columns: EffectColumns, weight_mean: float
) -> dict[str, tuple[Regression, ...]]:
    """Return the regressions of each role whose model is to be fitted: one, or one per arm but the first."""
    ceiling = study.weight_ceiling if study.weights else 1.0
    spanning = study.cluster_scope == "spanning"
    by_role: dict[str, tuple[Regression, ...]] = {}
    treatment, missingness, outcome = study.treatment_model, study.missingness_model, study.outcome_model
    if treatment is not None and not isinstance(treatment, Supplied):
        by_role["treatment"] = tuple(
            Regression(
                label="treatment model" if len(columns.arms) == 2 else f"treatment model, arm '{arm}'",
                model=treatment,
                kind="binary",
                response=ArmResponse(columns=columns, weight_mean=weight_mean, code=code),
                weight_ceiling=ceiling,
                family=Family.LOGISTIC,
                cluster=study.cluster,
                spanning=spanning,
                constant="everyone it is fitted on has the same treatment; check the treatment's column "
                "and arms, or use fewer folds",
            )
            for code, arm in enumerate(columns.arms)
            if code > 0
        )
    if missingness is not None and not isinstance(missingness, Supplied):
        by_role["missingness"] = (
            Regression(
                label="missingness model",
                model=missingness,
                kind="binary",
                response=ObservedResponse(columns=columns, weight_mean=weight_mean),
                weight_ceiling=ceiling,
                family=Family.LOGISTIC,
                cluster=study.cluster,
                spanning=spanning,
                constant="every outcome of those it is fitted on is observed, or every one is missing; leave "
                "the model out, or use fewer folds",
            ),
        )
    if not isinstance(outcome, Supplied):
        by_role["outcome"] = (
            Regression(
                label="outcome model",
                model=outcome,
                kind=study.target.response,
                response=OutcomeResponse(columns=columns, weight_mean=weight_mean),
                weight_ceiling=ceiling,
                cluster=study.cluster,
                spanning=spanning,
                bounds=study.target.outcome_bounds,
                constant="every observed outcome is the same, so there is nothing to model; check the "
                "outcome's column and how it is coded",
            ),
        )
    return by_role

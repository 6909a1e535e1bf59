"""What a study's nuisance models regress: the treatment, being observed, and the outcome."""

from __future__ import annotations

from collections.abc import Mapping

from fedtmle.algorithms.nuisance import Regression
from fedtmle.algorithms.study import Study
from fedtmle.initial.glm import Supplied
from fedtmle.model.families import Family
from fedtmle.model.table import Table
from fedtmle.model.types import Array, product
from fedtmle.targets.effects.prepare import EffectColumns


def effect_columns(
    study: Study, levels: Mapping[str, tuple[str, ...]], spanning: tuple[bytes, ...] = ()
) -> EffectColumns:
    """Which columns of a table play which part in the study."""
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
    """The regressions of each role whose model is to be fitted: one, or one per arm but the first."""
    ceiling = study.weight_ceiling if study.weights else 1.0
    spanning = study.cluster_scope == "spanning"
    found: dict[str, tuple[Regression, ...]] = {}

    def weight(table: Table) -> Array:
        return columns.relative_weight(table, weight_mean)

    treatment, missingness, outcome = study.treatment_model, study.missingness_model, study.outcome_model
    if treatment is not None and not isinstance(treatment, Supplied):
        models = []
        for code in range(1, len(columns.arms)):

            def taken(table: Table, code: int = code) -> tuple[Array, Array]:
                taken, w = columns.taken(table, code), weight(table)
                if code == 1:  # everyone is in arm 0, in arm 1 or in a later one
                    return taken, w
                arm = columns.arm(table)
                return taken, w * ((arm == 0) | (arm >= code))

            which = "" if len(columns.arms) == 2 else f", arm '{columns.arms[code]}'"
            models.append(
                Regression(
                    what=f"treatment model{which}",
                    model=treatment,
                    kind="binary",
                    response=taken,
                    weight_ceiling=ceiling,
                    family=Family.LOGISTIC,
                    cluster=study.cluster,
                    spanning=spanning,
                    constant="everyone it is fitted on has the same treatment; check the treatment's column "
                    "and arms, or use fewer folds",
                )
            )
        found["treatment"] = tuple(models)
    if missingness is not None and not isinstance(missingness, Supplied):
        found["missingness"] = (
            Regression(
                what="missingness model",
                model=missingness,
                kind="binary",
                response=lambda table: (columns.observed(table), weight(table)),
                weight_ceiling=ceiling,
                family=Family.LOGISTIC,
                cluster=study.cluster,
                spanning=spanning,
                constant="every outcome of those it is fitted on is observed, or every one is missing; leave "
                "the model out, or use fewer folds",
            ),
        )
    if not isinstance(outcome, Supplied):
        found["outcome"] = (
            Regression(
                what="outcome model",
                model=outcome,
                kind=study.target.response,
                response=lambda table: (columns.y(table), product(weight(table), columns.observed(table))),
                weight_ceiling=ceiling,
                cluster=study.cluster,
                spanning=spanning,
                bounds=study.target.outcome_bounds,
                constant="every observed outcome is the same, so there is nothing to model; check the "
                "outcome's column and how it is coded",
            ),
        )
    return found

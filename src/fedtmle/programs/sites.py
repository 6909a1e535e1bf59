"""The silos beside the pooled answer: whether they differ, and the estimate of each from its own rows.

If treatment or outcome differs between silos beyond what the models explain, and no model includes the silo,
the pooled estimate may be confounded by the silo. With r the residuals of a pooled model at silo m,

    T = sum_m (sum r)^2 / sum r^2

is at most chi^2 with M - 1 degrees of freedom if the model holds at every silo: the fit makes the residuals
of all silos add up to zero, and what it takes away besides makes T smaller. A silo discloses T_m, but not in
which direction it differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add
from typing import Any, final

import numpy as np

from fedtmle.algorithms.gradient import Gradient
from fedtmle.algorithms.optimizers import Newton
from fedtmle.errors import FedTMLEError, FitError
from fedtmle.initial.glm import GLM, Supplied
from fedtmle.initial.superlearner import SuperLearner, used_columns
from fedtmle.model.table import SILO, AnyTable, Table, over_blocks
from fedtmle.programs.study import Study
from fedtmle.protocol.flows import ask, together
from fedtmle.protocol.outcome import Outcome, SiteTest, Targeted
from fedtmle.protocol.plan import follow_alone
from fedtmle.protocol.query import Flow, Local
from fedtmle.protocol.sites import (
    AbstractDepartures,
    AbstractOwnFit,
    DeparturesQuery,
    OwnEstimate,
    OwnEstimateQuery,
    OwnStatus,
)
from fedtmle.targets.effects.moments import EffectRows
from fedtmle.targets.effects.prepare import LINEAR_REACH, EffectColumns, Preparation, arm_probabilities
from fedtmle.targets.effects.problem import EffectProblem
from fedtmle_core.exact import Sums, column_shifts, zero_sums
from fedtmle_core.kernels import column_sums
from fedtmle_core.parallel import mapped
from fedtmle_core.types import Array, IntArray, exponent, product

PRIOR_VARIANCE = 10.0  # prior variance of a coefficient of a column scaled to at most 1
FEWEST_IN_ARM = 10  # records with an outcome that a silo's own estimate needs in every arm


@dataclass(frozen=True, kw_only=True)
class ComparedSilos:
    """Tests of the models that do not include the silo, and the silos' own estimates in roster order."""

    tests: tuple[SiteTest, ...]
    own: tuple[OwnEstimate, ...]


@final
@dataclass(frozen=True, kw_only=True)
class ModelDepartures(AbstractDepartures):
    """The residuals of the treatment and the outcome model, for each that does not include the silo."""

    effect: EffectProblem
    preparation: Preparation  # of the effect's rows
    roles: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        arms = self.preparation.columns.arms
        several = len(arms) > 2
        treatment = [f"treatment model, arm '{arm}'" if several else "treatment model" for arm in arms[1:]]
        names = {"treatment": treatment, "outcome": ["outcome model"]}
        return tuple(name for role in self.roles for name in names[role])

    def of(self, local: Local) -> tuple[tuple[float, float], ...]:
        return local.evaluate(self._of)

    def _of(self, table: AnyTable) -> tuple[tuple[float, float], ...]:
        if isinstance(table, Table):
            total = self._sums(self.effect.rows(table))
        else:  # folds are drawn over all rows; a cluster is in one batch
            total = reduce(add, table.map(lambda batch: self._sums(self.preparation(batch))))
        values, count = total.values().tolist(), len(self.names)
        return tuple(zip(values[:count], values[count:], strict=True))

    def _sums(self, rows: EffectRows) -> Sums:
        """Return the exact sums of the residuals over independent units, then those of their squares."""
        columns, count = self.preparation.columns, len(self.names)
        largest = columns.weight_ceiling * columns.largest_cluster * (1.0 + LINEAR_REACH)
        powers = [exponent(largest)] * count + [exponent(largest * largest)] * count
        terms = [*((k,) for k in range(count)), *((k, k) for k in range(count))]

        def summed(piece: EffectRows) -> Sums:
            units = [_by_cluster(piece, each) for each in self._residuals(piece)]
            return column_sums(units, powers, what="residual of a model", terms=terms)

        return reduce(add, mapped(summed, rows.blocks()), zero_sums(column_shifts(powers)))

    def _residuals(self, rows: EffectRows) -> Iterator[Array]:
        if "treatment" in self.roles:
            g = arm_probabilities(rows.fits, len(self.preparation.columns.arms), slice(0, rows.n_rows))
            for code in range(1, len(g)):
                yield product((rows.arm == code) - g[code], rows.weight)
        if "outcome" in self.roles:
            yield product(rows.y - rows.factual(rows.q), product(rows.weight, rows.observed))


def _by_cluster(rows: EffectRows, residual: Array) -> Array:
    return residual if rows.cluster is None else np.bincount(rows.cluster, residual).astype(np.float64)


OwnFlow = Callable[[Study, Mapping[str, tuple[str, ...]], int], Flow[Outcome]]


@final
@dataclass(frozen=True, kw_only=True)
class OwnTMLE(AbstractOwnFit):
    """The study on one silo's rows alone: its own fits of the study's models, and its own targeting.

    ``flow`` makes the flow of a study over n rows, given the levels of its factors. Levels that do not occur
    at the silo have no columns there. Where a fit does not exist, as under separation, the models of outcome
    and missingness are fitted again with a weak penalty, a normal prior of variance `PRIOR_VARIANCE` for each
    coefficient of a column that is scaled to at most 1. The treatment model is not, unless its columns are
    collinear: if the treatment is perfectly predicted, there is no effect to estimate.
    """

    study: Study
    columns: EffectColumns
    levels: Mapping[str, tuple[str, ...]]
    dim: int
    flow: OwnFlow

    def estimate(self, local: Local) -> OwnEstimate:
        if min(local.evaluate(self._observed)) < FEWEST_IN_ARM:
            return OwnEstimate(status=OwnStatus.FEW)
        study = replace(self.study, algorithm=Gradient(optimizer=Newton()), diagnostics=False)
        levels = {**self.levels, **local.evaluate(self._present)}
        if SILO in levels:
            levels[SILO] = (local.name,)
        first, reason = self._attempt(study, levels, local, OwnStatus.SENT)
        if reason not in ("separation", "collinear", "convergence"):
            return first
        roles = ["outcome", "missingness", *(["treatment"] if reason == "collinear" else [])]
        penalised = _penalised(study, roles, 1.0 / (PRIOR_VARIANCE * local.n_rows))
        return self._attempt(penalised, levels, local, OwnStatus.PENALISED)[0]

    def _attempt(
        self, study: Study, levels: Mapping[str, tuple[str, ...]], local: Local, status: OwnStatus
    ) -> tuple[OwnEstimate, str]:
        """Return the estimate, and the reason if a model could not be fitted."""
        try:
            return self._estimate(study, levels, local, status), ""
        except FitError as error:
            return OwnEstimate(status=_STATUS.get(error.reason, OwnStatus.OTHER)), error.reason
        except (FedTMLEError, ArithmeticError):
            return OwnEstimate(status=OwnStatus.OTHER), ""

    def _estimate(
        self, study: Study, levels: Mapping[str, tuple[str, ...]], local: Local, status: OwnStatus
    ) -> OwnEstimate:
        outcome = follow_alone(self.flow(study, levels, local.n_rows), local)
        if not isinstance(outcome, Targeted) or not outcome.status.is_converged:
            return OwnEstimate(status=OwnStatus.CONVERGENCE)
        psi, covariance = outcome.estimate.psi, outcome.estimate.covariance
        if len(psi) != self.dim or not (np.isfinite(psi).all() and np.isfinite(covariance).all()):
            return OwnEstimate(status=OwnStatus.OTHER)
        return OwnEstimate(status=status, psi=psi, covariance=covariance)

    def _observed(self, table: AnyTable) -> list[int]:
        """Return the records with an outcome in each arm."""

        def counted(block: Table) -> IntArray:
            arm = self.columns.arm(block)
            if self.columns.outcome in block.numeric:
                arm = arm[self.columns.observed(block) > 0]
            return np.bincount(arm, minlength=len(self.columns.arms))

        return [int(count) for count in sum(over_blocks(table, counted), np.zeros(1, dtype=np.int64))]

    def _present(self, table: AnyTable) -> dict[str, tuple[str, ...]]:
        """Return the levels of the covariates that occur in the rows."""
        present = {}
        for name in self.study.factors:
            if name in self.levels and name != self.study.target.strata:
                counts = dict(zip(table.levels(name), table.counts(name), strict=True))
                present[name] = tuple(level for level in self.levels[name] if counts.get(level))
        return present


_STATUS = {
    "separation": OwnStatus.SEPARATION,
    "collinear": OwnStatus.COLLINEAR,
    "convergence": OwnStatus.CONVERGENCE,
    "overlap": OwnStatus.OVERLAP,
    "arm": OwnStatus.ARM,
}


def _penalised(study: Study, roles: Sequence[str], ridge: float) -> Study:
    """Return the study with at least this ridge on the GLMs of some roles."""

    def of(model: Any) -> Any:
        if isinstance(model, GLM):
            return replace(model, ridge=max(model.ridge, ridge))
        if isinstance(model, SuperLearner):
            return replace(model, learners=tuple(map(of, model.learners)))
        return model

    models = {f"{role}_model": of(model) for role, model in study.models.items() if role in roles}
    return replace(study, **models)


def compare_silos(
    study: Study, effect: EffectProblem | None, own: OwnTMLE | None, n: int
) -> Flow[ComparedSilos]:
    """Ask in one round whether the silos differ and, with ``own``, for the silos' own estimates.

    ``effect`` is the problem whose models are compared between the silos; None: no model is.
    """
    flows: list[Flow[Any]] = [] if own is None else [ask(OwnEstimateQuery(own_fit=own))]
    departures = None
    roles, preparation = roles_without_silo(study), None if effect is None else effect.prepare
    if effect is not None and isinstance(preparation, Preparation) and roles:
        departures = ModelDepartures(effect=effect, preparation=preparation, roles=roles)
        flows.append(ask(DeparturesQuery(departures=departures, n=n)))
    answers = (yield from together(flows)) if flows else []
    tests = () if departures is None else _tests(departures, answers[-1])
    return ComparedSilos(tests=tests, own=() if own is None else answers[0])


def roles_without_silo(study: Study) -> tuple[str, ...]:
    """Return the fitted models, of treatment and outcome, in whose formulas the silo is not."""
    return tuple(
        role
        for role in ("treatment", "outcome")
        if role in study.models
        and not isinstance(study.models[role], Supplied)
        and SILO not in used_columns(study.models[role])
    )


def _tests(departures: ModelDepartures, pooled: Sums) -> tuple[SiteTest, ...]:
    values, count = pooled.values().tolist(), len(departures.names)
    return tuple(
        SiteTest(model=name, statistic=values[k], silos=int(values[count + k]))
        for k, name in enumerate(departures.names)
    )

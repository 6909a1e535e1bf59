"""Nuisance models as sub-flows: GLMs, pilots and super learners, fitted once or once per left-out fold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.initial.crossfit import CrossFitted, Fitted, Folds
from fedtmle.initial.glm import GLM, AbstractOwnBlock, FittedGLM, FittedMultinomial, Levels
from fedtmle.initial.own import SeparatedBlocks
from fedtmle.initial.superlearner import (
    MAX_CANDIDATES,
    GradientBoostedTrees,
    Learner,
    PerSilo,
    Pilot,
    Rescaled,
    SuperLearned,
    SuperLearner,
    TreeEnsemble,
    simplex_weights,
    unit,
)
from fedtmle.model.submodels import by_person
from fedtmle.model.table import SILO, AbstractBoundedColumns, AnyTable, StreamedTable, Table
from fedtmle.programs.fitting import Fitting, begin, fit_federated
from fedtmle.programs.nuisance import Regression, fit_exactly
from fedtmle.protocol.flows import ask, through, together
from fedtmle.protocol.learners import (
    AbstractLocalFit,
    GLMFormat,
    ModelFormat,
    Models,
    ModelsQuery,
    TreesFormat,
)
from fedtmle.protocol.plan import follow_alone
from fedtmle.protocol.query import Flow, Local
from fedtmle.protocol.sums import PresenceQuery, TallyQuery
from fedtmle_core.types import Array, Family, IntArray, exponent, upper_pairs

# The rows of a study whose models have coefficients of each silo's own: what C(silo) is (`initial.own`).
#
# A model predicts at a silo with the silo's own coefficients, which are columns of the rows that this view
# shows.

Result = TypeVar("Result")


@final
@dataclass(frozen=True, kw_only=True)
class OwnCoefficients:
    """Shows rows with a column for each coefficient of each silo's own in some models.

    The response of a model may be what models before it in ``blocks`` predict. ``known`` are coefficients by
    column and silo; the others are those of the rows that are shown.
    """

    blocks: tuple[AbstractOwnBlock, ...]
    known: Mapping[tuple[str, str], float] = field(default_factory=dict)

    def of(self, rows: AnyTable) -> AnyTable:
        known = self._of_rows(rows)
        if isinstance(rows, StreamedTable):
            read = rows.read
            return replace(rows, read=lambda: (self._shown(batch, known) for batch in read()))
        return self._shown(rows, known)

    def held(self, rows: AnyTable) -> OwnCoefficients:
        """Return the view whose coefficients stay those of these rows, whichever rows it shows."""
        return replace(self, known=self._of_rows(rows))

    @property
    def names(self) -> frozenset[str]:
        """The columns that it adds."""
        return frozenset(name for block in self.blocks for name in block.names)

    def _of_rows(self, rows: AnyTable) -> dict[tuple[str, str], float]:
        known = dict(self.known)
        silos = [silo for silo, count in zip(rows.levels(SILO), rows.counts(SILO), strict=True) if count]
        for k, block in enumerate(self.blocks):
            if all((block.names[0], silo) in known for silo in silos):
                continue
            before = replace(self, blocks=self.blocks[:k], known=known)
            for silo, own in block.by_silo(rows, partial(before.of, rows)).items():
                known = {**dict(zip(((name, silo) for name in block.names), own, strict=True)), **known}
        return known

    def _shown(self, table: Table, known: Mapping[tuple[str, str], float]) -> Table:
        factor = table.factors[SILO]
        for name in (name for block in self.blocks for name in block.names):
            of_silos: Array = np.array([known.get((name, silo), np.nan) for silo in factor.levels])
            table = table.with_numeric(name, of_silos[factor.codes])
        return table


def own_blocks(models: Iterable[object]) -> Iterator[AbstractOwnBlock]:
    """Yield the coefficients of the silos' own in fitted models, with those of which they consist."""
    for model in models:
        if isinstance(model, FittedGLM | FittedMultinomial) and model.own is not None:
            yield model.own
        elif isinstance(model, CrossFitted | SuperLearned):
            yield from own_blocks(model.models)


def own_view(models: Iterable[object]) -> OwnCoefficients | None:
    """Return the view of rows with which these models can predict, None if they need no other rows."""
    blocks = tuple(own_blocks(models))
    return OwnCoefficients(blocks=blocks) if blocks else None


def seen(flow: Flow[Result], view: OwnCoefficients | None) -> Flow[Result]:
    """Return the flow over the rows that the view shows, if there is one."""
    return flow if view is None else through(flow, view)


def count_separated(view: OwnCoefficients | None) -> Flow[Mapping[str, int]]:
    """Return how many silos have own coefficients that predict some response perfectly, by model, if any."""
    if view is None:
        return {}
    columns = SeparatedBlocks(blocks=view.blocks)
    counts = yield PresenceQuery(columns=columns)
    return {label: count for label, count in zip(columns.names, counts, strict=True) if count}


def begin_fits(regressions: Sequence[Regression], fitting: Fitting, folds: Folds | None) -> Flow[Fitting]:
    """Ask for the first sums of all coded fits, usually in one round; return a `Fitting` that has them."""
    fits = [each for regression in regressions for each in _glm_fits(regression, folds)]
    return (yield from begin(fits, fitting))


def fit_together(
    regressions: Sequence[Regression], fitting: Fitting, folds: Folds | None
) -> Flow[list[Fitted]]:
    """Fit several regressions in the same rounds; return the fits in their order.

    Each is fitted on all rows or, with folds, once per fold left out. No fit waits for another. Coded fits
    need what `begin_fits` returned.
    """
    return (yield from together([_fit(regression, fitting, folds) for regression in regressions]))


def _glm_fits(regression: Regression, folds: Folds | None) -> Iterator[tuple[Regression, GLM]]:
    """Yield every GLM that a regression fits across silos, with the rows that it is fitted on."""
    for part in _outer_parts(regression, folds):
        if isinstance(part.model, GLM):
            yield part, part.model
        elif isinstance(part.model, SuperLearner):
            for learner in part.model.learners:
                if isinstance(learner, GLM):
                    yield from ((inner, learner) for inner in _inner_parts(part, part.model)[1])


def _outer_parts(regression: Regression, folds: Folds | None) -> list[Regression]:
    if folds is None:
        return [regression]
    return [replace(regression.without(folds, v), fold=v + 1) for v in range(folds.count)]


def _inner_parts(regression: Regression, spec: SuperLearner) -> tuple[Folds, list[Regression]]:
    """Return a super learner's folds, and the regression without each of them, then on all rows."""
    left_out = regression.fold - 1 if regression.fold else None
    folds = spec.folds_within(left_out, regression.cluster, spanning=regression.spanning)
    return folds, [*(regression.without(folds, v) for v in range(spec.folds)), regression]


def _fit(regression: Regression, fitting: Fitting, folds: Folds | None) -> Flow[Fitted]:
    models = yield from _fit_each(_outer_parts(regression, folds), fitting)
    return models[0] if folds is None else CrossFitted(models=tuple(models), folds=folds)


def _fit_each(parts: Sequence[Regression], fitting: Fitting) -> Flow[Sequence[Fitted]]:
    """Fit the same model on several sets of rows; return the fits in their order."""
    model = parts[0].model
    if isinstance(model, SuperLearner):
        return (yield from together([_fit_super(part, model, fitting) for part in parts]))
    if isinstance(model, Pilot):
        return (yield from _pilot(model, parts, fitting.levels))
    return (yield from together([fit_federated(part, model, fitting) for part in parts]))


@final
@dataclass(frozen=True, kw_only=True)
class ResidualProducts(AbstractBoundedColumns[Table]):
    """Products of the cross-fitted candidates' residuals, which the weights of a super learner minimise."""

    label = "count"
    judged = (0,)

    regression: Regression
    candidates: tuple[CrossFitted, ...]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return upper_pairs(len(self.candidates))

    @property
    def names(self) -> tuple[str, ...]:
        return ("weight", *(f"residual {k} times residual {j}" for k, j in self.pairs))

    @property
    def exponents(self) -> tuple[int, ...]:
        most = self.regression.weight_ceiling * max(self.regression.response.periods, 1)
        return (exponent(most),) * (1 + len(self.pairs))

    def roots(self, piece: Table) -> Array:
        """Return the weights and residuals of each record.

        If two candidates predict differently for one person alone, their sums disclose that person's outcome.
        """
        w, residuals, _ = self._residuals(piece)
        return np.stack([w, *(np.sqrt(w) * residual for residual in residuals)])

    def evaluate(self, piece: Table) -> Array:
        w, residuals, counts = self._residuals(piece)
        products = np.stack([w, *(w * (residuals[k] * residuals[j]) for k, j in self.pairs)])
        return products if counts is None else by_person(products, counts)

    def _residuals(self, piece: Table) -> tuple[Array, list[Array], IntArray | None]:
        """Return weights, each candidate's residuals, and how many rows each person has if not one."""
        response = self.regression.response
        long, counts = piece, None
        if response.periods:
            long, counts = response.expand(self.candidates[0].folds.mark(response.mark(piece)))
        y, w = response.of(long)
        return w, [y - unit(model.predict(long)) for model in self.candidates], counts


def _fit_super(regression: Regression, spec: SuperLearner, fitting: Fitting) -> Flow[SuperLearned]:
    folds, parts = _inner_parts(regression, spec)
    fitted = yield from together([_candidates(learner, parts, fitting) for learner in spec.learners])
    labelled = {f"learner {k}{which}": m for k, each in enumerate(fitted, 1) for which, m in each.items()}
    if len(labelled) > MAX_CANDIDATES:
        raise InputError(
            f"{regression.label}: more than {MAX_CANDIDATES} models to weight; use fewer PerSilo"
        )
    crossed = [CrossFitted(models=models[:-1], folds=folds) for models in labelled.values()]
    products = ResidualProducts(regression=regression, candidates=tuple(crossed))
    pooled = yield from seen(ask(TallyQuery(columns=products, n=fitting.n)), own_view(crossed))
    total, *units = pooled.units
    if total <= 0:
        raise InputError(f"{regression.label}: no row has a positive weight")
    gram = dict(zip(products.pairs, units, strict=True))
    size = range(len(crossed))
    return SuperLearned(
        labels=tuple(labelled),
        models=tuple(models[-1] for models in labelled.values()),
        weights=simplex_weights([[gram[min(k, j), max(k, j)] for j in size] for k in size]),
        risks=tuple(gram[k, k] / total for k in size),
    )


def _candidates(learner: Learner, parts: Sequence[Regression], fitting: Fitting) -> Flow[dict[str, Models]]:
    """Return every model to weight, fitted on each part: one, or one for each silo that has its own."""
    if isinstance(learner, GLM):
        fits = yield from together([fit_federated(part, learner, fitting) for part in parts])
        return {"": tuple(fit for fit in fits if isinstance(fit, FittedGLM))}
    if isinstance(learner, Pilot):
        return {"": (yield from _pilot(learner, parts, fitting.levels))}
    shipped = yield _ship(learner, learner.model, parts, fitting.levels)
    by_silo = {f", silo {m}": models for m, models in enumerate(shipped, start=1) if models is not None}
    if not by_silo:
        raise InputError(f"{parts[0].label}: no silo has the rows to fit its own trees; lower min_leaf")
    return by_silo


def _pilot(pilot: Pilot, parts: Sequence[Regression], levels: Levels) -> Flow[Models]:
    model = pilot.model
    if isinstance(model, FittedGLM | TreeEnsemble):
        low, high = (0.0, 1.0) if pilot.unit_scale else parts[0].bounds
        return (Rescaled(model=model, low=low, width=high - low),) * len(parts)
    models: Models
    (models,) = yield _ship(pilot, model, parts, levels)
    return models


@final
@dataclass(frozen=True, kw_only=True)
class LearnerFit(AbstractLocalFit):
    """The same model fitted to several sets of one silo's rows.

    With ``may_abstain`` a silo whose rows cannot be split by a tree sends none.
    """

    model: GLM | GradientBoostedTrees
    parts: tuple[Regression, ...]
    levels: Levels
    may_abstain: bool

    @property
    def count(self) -> int:
        return len(self.parts)

    def fit(self, local: Local) -> Models | None:
        if self.may_abstain and not local.evaluate(self._can_split):
            return None
        return tuple(fit_alone(self.model, part, self.levels, local) for part in self.parts)

    def _can_split(self, table: Table) -> bool:
        model = self.model
        return isinstance(model, GradientBoostedTrees) and all(
            model.enough(part.response.of(part.response.long(table))[1]) for part in self.parts
        )


def _ship(
    learner: Pilot | PerSilo, model: GLM | GradientBoostedTrees, parts: Sequence[Regression], levels: Levels
) -> ModelsQuery:
    local_fit = LearnerFit(
        model=model, parts=tuple(parts), levels=levels, may_abstain=isinstance(learner, PerSilo)
    )
    return ModelsQuery(
        local_fit=local_fit,
        at=learner.at if isinstance(learner, Pilot) else None,
        model_format=_format(model, parts[0], levels),
    )


def fit_alone(
    model: GLM | GradientBoostedTrees, part: Regression, levels: Levels, local: Local
) -> FittedGLM | TreeEnsemble:
    """Return the fit on one party's rows alone."""
    if isinstance(model, GLM):
        # It is sent to all silos, whose own coefficients are no part of it.
        shipped = replace(part, own=False)
        fit = follow_alone(fit_exactly(shipped, model, levels, local.n_rows), local)
        if not isinstance(fit, FittedGLM):
            raise TypeError("a learner predicts one response")
        return fit

    def grow(table: Table) -> TreeEnsemble:
        rows = part.response.long(table)
        return model.fit(rows, levels, *part.response.of(rows), binary=part.kind == "binary")

    return local.evaluate(grow)


def _format(model: GLM | GradientBoostedTrees, part: Regression, levels: Levels) -> ModelFormat:
    if isinstance(model, GLM):
        return GLMFormat(formula=model.parsed, levels=levels, family=part.family_of(model))
    family = Family.LOGISTIC if part.kind == "binary" else Family.GAUSSIAN
    return TreesFormat(trees=model, levels=levels, family=family)

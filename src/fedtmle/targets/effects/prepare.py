"""From a table and fitted nuisances to the rows of an effect problem, at one silo."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import final

import numpy as np

from fedtmle.errors import DataError
from fedtmle.initial.crossfit import Fitted, Folds
from fedtmle.initial.glm import AbstractResponse
from fedtmle.model.problem import LeftOut
from fedtmle.model.table import Factor, Table
from fedtmle.targets.diagnostics import shown_arms
from fedtmle.targets.effects.components import Component
from fedtmle.targets.effects.moments import EffectRows, Term, is_ever, part, probability_bins
from fedtmle_core import kernels
from fedtmle_core.parallel import done, pieces
from fedtmle_core.types import Array, Bools, Bytes, Codes, IntArray, is_one, product

Q_MARGIN = 1e-6  # predictions are truncated this far inside the outcome's bounds, on the unit scale
LINEAR_REACH = 16.0  # linear predictions are kept within this many widths of the outcome's bounds
DIGEST = 16  # bytes: none collide by chance


def cluster_digest(label: str) -> bytes:
    """Return 128 bits of SHA-256, which stand for a cluster's identifier between silos."""
    return hashlib.sha256(b"fedtmle cluster:" + label.encode()).digest()[:DIGEST]


@dataclass(frozen=True, kw_only=True)
class EffectColumns:
    """The roles of the table's columns, and the study's declared levels and bounds."""

    outcome: str
    outcome_bounds: tuple[float, float]
    treatment: str | None
    arms: tuple[str, ...]
    strata: str | None
    strata_levels: tuple[str, ...]
    weights: str | None
    weight_ceiling: float
    cluster: str | None
    largest_cluster: int
    spanning: tuple[bytes, ...] = ()  # digests of the clusters that are in more than one silo

    def arm(self, table: Table) -> Codes:
        """Return the arm taken, as a code into ``arms``."""
        if self.treatment is None:
            return np.zeros(table.n_rows, dtype=np.int16)
        return table.factors[self.treatment].recode(self.arms).astype(np.int16)

    def taken(self, table: Table, code: int) -> Array:
        """Return whether the arm of this code was taken, 0 or 1."""
        if self.treatment is None:
            return np.full(table.n_rows, float(code == 0))
        codes, taken = table.factors[self.treatment].recode(self.arms), np.empty(table.n_rows)

        def fill(rows: slice) -> None:
            np.equal(codes[rows], code, out=taken[rows])

        done(fill, pieces(table.n_rows))
        return taken

    def in_arm(self, table: Table, code: int) -> Table:
        """Return the table with everyone in one arm."""
        if self.treatment is None:
            return table
        codes = np.broadcast_to(np.int64(code), (table.n_rows,))
        moved = table.with_factor(self.treatment, Factor(codes, self.arms))
        if self.treatment in table.numeric:
            number = np.broadcast_to(np.float64(_number(self.arms[code])), (table.n_rows,))
            moved = moved.with_numeric(self.treatment, number)
        return moved

    def observed(self, table: Table) -> Array:
        """Return Delta: 1 where the outcome was observed, else 0; an event is never missing."""
        if self.outcome not in table.numeric:
            return _ones(table.n_rows)
        if not math.isnan(table.reach[self.outcome]):
            return _ones(table.n_rows)
        return (~np.isnan(table.numeric[self.outcome])).astype(np.float64)

    def y(self, table: Table) -> Array:
        """Return the outcome on the unit scale, zero where missing; do not write to it."""
        low, high = self.outcome_bounds
        column, complete = table.numeric[self.outcome], math.isfinite(table.reach[self.outcome])
        if complete and (low, high) == (0.0, 1.0):
            return column
        y = np.empty(table.n_rows)

        def fill(rows: slice) -> None:
            np.subtract(column[rows], low, out=y[rows])
            y[rows] /= high - low
            if not complete:
                np.nan_to_num(y[rows], copy=False, nan=0.0)

        done(fill, pieces(table.n_rows))
        return y

    def weight(self, table: Table) -> Array:
        return _ones(table.n_rows) if self.weights is None else table.numeric[self.weights]

    def relative_weight(self, table: Table, mean: float) -> Array:
        """Return the weights over their pooled mean; `DataError` if one is above the declared ceiling."""
        if self.weights is None:
            return self.weight(table)
        relative = self.weight(table) / mean
        heavy = int(np.count_nonzero(relative > self.weight_ceiling))
        if heavy:
            raise DataError(
                f"column '{self.weights}' is above {self.weight_ceiling:g} times the mean weight in {heavy} "
                "row(s); trim it, or declare a larger weight_ceiling"
            )
        return relative

    def stratum(self, table: Table) -> IntArray | None:
        return None if self.strata is None else table.factors[self.strata].recode(self.strata_levels)

    def clusters(self, table: Table) -> IntArray | None:
        if self.cluster is None:
            return None
        _, codes, sizes = np.unique(
            table.factors[self.cluster].codes, return_inverse=True, return_counts=True
        )
        large = int(np.count_nonzero(sizes > self.largest_cluster))
        if large:
            raise DataError(
                f"column '{self.cluster}' has {large} cluster(s) of more than {self.largest_cluster} rows; "
                "declare a larger largest_cluster"
            )
        return np.asarray(codes)

    def spanned(self, table: Table) -> IntArray | None:
        """Return each cluster's place among those that span silos, -1 if it does not span any."""
        if self.cluster is None or not self.spanning:
            return None
        place = {digest: position for position, digest in enumerate(self.spanning)}
        factor = table.factors[self.cluster]
        labels = (factor.levels[code] for code in np.unique(factor.codes))
        return np.array([place.get(cluster_digest(label), -1) for label in labels], dtype=np.int64)


@final
@dataclass(frozen=True, kw_only=True)
class ArmResponse(AbstractResponse):
    """1{A = arm ``code``}."""

    columns: EffectColumns
    weight_mean: float
    code: int

    def of(self, table: Table) -> tuple[Array, Array]:
        columns = self.columns
        return columns.taken(table, self.code), columns.relative_weight(table, self.weight_mean)


@final
@dataclass(frozen=True, kw_only=True)
class ArmsResponse(AbstractResponse):
    """A: the code of the arm taken, the class of a multinomial regression."""

    columns: EffectColumns
    weight_mean: float

    def of(self, table: Table) -> tuple[Array, Array]:
        columns = self.columns
        return columns.arm(table).astype(np.float64), columns.relative_weight(table, self.weight_mean)


@final
@dataclass(frozen=True, kw_only=True)
class ObservedResponse(AbstractResponse):
    """Delta: whether the outcome was observed."""

    columns: EffectColumns
    weight_mean: float

    def of(self, table: Table) -> tuple[Array, Array]:
        return self.columns.observed(table), self.columns.relative_weight(table, self.weight_mean)


@final
@dataclass(frozen=True, kw_only=True)
class OutcomeResponse(AbstractResponse):
    """The outcome on the unit scale, among those whose outcome was observed."""

    columns: EffectColumns
    weight_mean: float

    def of(self, table: Table) -> tuple[Array, Array]:
        weight = self.columns.relative_weight(table, self.weight_mean)
        return self.columns.y(table), product(weight, self.columns.observed(table))


@final
@dataclass(frozen=True, kw_only=True)
class WithoutFold(AbstractResponse):
    """The same response on the rows of the other folds."""

    response: AbstractResponse
    folds: Folds
    fold: int

    @property
    def periods(self) -> int:
        return self.response.periods

    @property
    def every_row(self) -> AbstractResponse:
        return self.response.every_row

    @property
    def left_out(self) -> LeftOut:
        return LeftOut(self.fold, self.folds)

    def mark(self, table: Table) -> Table:
        return self.folds.mark(self.response.mark(table))

    def expand(self, table: Table) -> tuple[Table, IntArray]:
        return self.response.expand(table)

    def of(self, table: Table) -> tuple[Array, Array]:
        y, w = self.response.of(table)
        return y, w * (self.folds.of(table) != self.fold)


@dataclass(frozen=True, kw_only=True)
class _Clever:
    """The fields of `EffectRows` that are computed from g and pi."""

    terms: tuple[tuple[Term, ...], ...]
    truncated: Bools
    covariates: Array
    denominator: Array
    g_bins: Bytes


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Evaluate Q, g and pi on a table and compute the weights H of every component.

    ``treatment`` holds the fits of g, from which `arm_probabilities` takes the propensity scores.
    """

    columns: EffectColumns
    components: tuple[Component, ...]
    outcome: tuple[Fitted, ...]  # one per arm where predictions are supplied, else one
    treatment: tuple[Fitted, ...]
    missingness: tuple[Fitted, ...]  # none, one, or one per arm where probabilities are supplied
    g_floor: float
    weight_mean: float
    shares: tuple[float, ...]  # P(v) of each component's population
    shows_g: bool = True  # whether the study reports diagnostics of g
    truncates_q: bool = True  # whether predictions are kept inside the outcome's bounds

    @property
    def overall(self) -> int:
        """How many components are of the first population: everyone, unless the effect is of others."""
        populations = [component.population for component in self.components]
        return sum(1 for population in populations if population == populations[0])

    def __call__(self, table: Table) -> EffectRows:
        columns = self.columns
        arm, strata, observed = columns.arm(table), columns.stratum(table), columns.observed(table)
        fits, pi = self.treatment_fits(table), self._observed_shares(table)
        scores = cache(lambda: arm_probabilities(fits, len(pi), slice(0, table.n_rows)))
        of_population = {
            population: population.indicator(table, arm, strata, scores)
            for population in dict.fromkeys(component.population for component in self.components)
        }
        indicators = [of_population[component.population] for component in self.components]
        clever = self._clever(table, arm, observed, indicators, fits, pi)
        q, logit_q = self._regression(table)
        return EffectRows(
            y=columns.y(table),
            observed=observed,
            arm=arm,
            q=q,
            logit_q=logit_q,
            weight=columns.relative_weight(table, self.weight_mean),
            v=tuple(v if self.shares[r] == 1.0 else v / self.shares[r] for r, v in enumerate(indicators)),
            terms=clever.terms,
            truncated=clever.truncated,
            cluster=columns.clusters(table),
            g_bins=clever.g_bins,
            covariates=clever.covariates,
            denominator=clever.denominator,
            spanned=columns.spanned(table),
            fits=tuple(fits) if self.shows_g else (),
        )

    def _clever(
        self,
        table: Table,
        arm: Codes,
        observed: Array,
        indicators: list[Array],
        fits: list[Array],
        pi: Array,
    ) -> _Clever:
        """Return the weights H of every component from g and pi. Only bins of g itself are stored."""
        n = table.n_rows
        shown = list(shown_arms(len(pi))) if self.shows_g else []
        terms = []
        for component in self.components:
            d = component.regime.probabilities(table, self.columns.arms)
            terms.append(tuple(Term(a, d[a], np.empty(n)) for a in range(len(pi)) if is_ever(d[a])))
        clever = _Clever(
            terms=tuple(terms),
            truncated=np.zeros(pi.shape, dtype=bool),
            covariates=np.empty((len(terms), n)),
            denominator=np.empty(n if self.shows_g else 0),
            g_bins=np.empty((len(shown), n), dtype=np.uint8),
        )

        def fill(rows: slice) -> None:
            g, observed_share = arm_probabilities(fits, len(pi), rows), part(pi, rows)
            denominator = clever.denominator[rows] if self.shows_g else None
            if denominator is not None:
                denominator[:] = 1.0  # in arms that no component has
            below = np.empty(g.shape[1], dtype=bool)
            for r, component in enumerate(self.components):
                v, covariate = part(indicators[r], rows), clever.covariates[r, rows]
                covariate[:] = 0.0
                for term in terms[r]:
                    a, d, H = term.arm, part(term.d, rows), term.H[rows]
                    expected, probability = component.population.ratio(v, a, g, observed_share, self.g_floor)
                    weight = d * expected / self.shares[r]
                    chance = denominator if r < self.overall else None  # the same for all of a population
                    kernels.weigh(
                        weight, probability, self.g_floor, arm[rows], a, H, covariate, below, chance
                    )
                    clever.truncated[a, rows] |= below & (d > 0)
                if not is_one(observed):
                    covariate *= observed[rows]
            clever.g_bins[:, rows] = probability_bins(g[shown])

        done(fill, pieces(n))
        return clever

    def _regression(self, table: Table) -> tuple[Array, Array]:
        """Return the initial Q per arm on the unit scale, and the logit of it truncated; (arms, N) each."""
        arms = len(self.columns.arms)
        q, logit_q = np.empty((arms, table.n_rows)), np.empty((arms, table.n_rows))
        for a, model in enumerate(self._outcome_models):
            predicted = model.predict(self.columns.in_arm(table, a))

            def fill(rows: slice, predicted: Array = predicted, a: int = a) -> None:
                if not kernels.bound(predicted[rows], Q_MARGIN, 1 - Q_MARGIN, q[a, rows], logit_q[a, rows]):
                    raise DataError("the outcome model's prediction is not finite in some rows")
                if not self.truncates_q:
                    np.clip(predicted[rows], 1.0 - LINEAR_REACH, LINEAR_REACH, out=q[a, rows])

            done(fill, pieces(table.n_rows))
        return q, logit_q

    @property
    def _outcome_models(self) -> tuple[Fitted, ...]:
        return self.outcome if len(self.outcome) > 1 else self.outcome * len(self.columns.arms)

    def propensities(self, table: Table) -> tuple[Array, Array]:
        """Return g_a and pi_a before truncation, each of shape (arms, N)."""
        return self.scores(table), self._observed_shares(table)

    def scores(self, table: Table) -> Array:
        """Return the propensity scores g_a before truncation, shape (arms, N)."""
        return arm_probabilities(self.treatment_fits(table), len(self.columns.arms), slice(0, table.n_rows))

    def treatment_fits(self, table: Table) -> list[Array]:
        """Return the predictions of the fits of g, of which `arm_probabilities` makes the scores."""
        return [model.predict(table) for model in self.treatment]

    def _observed_shares(self, table: Table) -> Array:
        """Return pi_a, shape (arms, N)."""
        arms = len(self.columns.arms)
        if not self.missingness:
            return _ones(arms, table.n_rows)
        models = self.missingness * arms if len(self.missingness) == 1 else self.missingness
        return np.stack([model.predict(self.columns.in_arm(table, a)) for a, model in enumerate(models)])

    def bounded(self, probability: Array) -> Array:
        """Return g pi, truncated from below at ``g_floor``."""
        return np.maximum(probability, self.g_floor)


def arm_probabilities(fits: Sequence[Array], arms: int, rows: slice) -> Array:
    """Return the propensity scores of some rows, shape (arms, rows), from the predictions of the fits of g.

    One fit with a probability per arm is multinomial. With a fit for each arm, of one arm against the rest,
    g_a is that of arm a over the sum of all. With one fewer, the reference has the remaining probability.
    """
    g = np.empty((arms, rows.stop - rows.start))
    if fits and fits[0].ndim == 2:
        g[:] = fits[0][:, rows]
    elif len(fits) < arms:
        g[0] = 1.0
        for a, fit in enumerate(fits, start=1):
            g[a] = fit[rows]
            g[0] -= g[a]
        np.maximum(g[0], 0.0, out=g[0])
    else:
        for a, fit in enumerate(fits):
            g[a] = fit[rows]
        total = g[0].copy()
        for share in g[1:]:
            total += share
        np.divide(g, total, out=g, where=total > 0)
        g[:, total <= 0] = 1.0 / arms  # every fit gives its arm the probability 0
    return g


def _ones(*shape: int) -> Array:
    """Return ones that take no memory."""
    return np.broadcast_to(np.float64(1.0), shape)


def _number(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        return float("nan")

"""The statistics that a study asks of its silos, as values: counts, overlap, and the outcome model's fit."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar, final

import numpy as np

from fedtmle.model.table import AbstractBins, AbstractBoundedColumns, AnyTable, Group, Table, over_blocks
from fedtmle.targets.diagnostics import PROBABILITY_EDGES, histogram_pairs, shown_arms
from fedtmle.targets.effects.components import overlap_weight
from fedtmle.targets.effects.moments import EffectRows, probability_bins
from fedtmle.targets.effects.prepare import EffectColumns, Preparation
from fedtmle.targets.effects.problem import EffectLaw, EffectProblem
from fedtmle_core.exact import column_shifts
from fedtmle_core.kernels import OUTSIDE, bins_between
from fedtmle_core.types import Array, Bytes, Codes, Columns, exponent, first, is_one, product

Piece = TypeVar("Piece")
Result = TypeVar("Result")

LARGEST_ERROR = 4.0  # largest error of a prediction, for rough standard errors
LARGEST_LOSS = 64.0  # largest loss of one row: a confident prediction that is wrong
SMALLEST_CHANCE = math.exp(-LARGEST_LOSS)


@final
@dataclass(frozen=True)
class Block:
    """Columns of one kind: how people see each of them, and an exponent c with |value| < 2^c."""

    names: tuple[str, ...]
    exponent: int
    places: int | None = None  # binary places of the sums that are sent; None: exact sums


@final
@dataclass(frozen=True)
class TallyLayout:
    """The one description of the columns of a tally: blocks by name, in the order in which they are sent."""

    blocks: Mapping[str, Block]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for block in self.blocks.values() for name in block.names)

    @property
    def exponents(self) -> tuple[int, ...]:
        return tuple(block.exponent for block in self.blocks.values() for _ in block.names)

    @property
    def grid(self) -> tuple[int, ...]:
        """The grid on which each sum is sent, as `TallyQuery` has it."""
        return tuple(
            column_shifts([block.exponent])[0] if block.places is None else block.places
            for block in self.blocks.values()
            for _ in block.names
        )

    @cached_property
    def places(self) -> dict[str, range]:
        """The places of each block's columns."""
        places: dict[str, range] = {}
        end = 0
        for name, block in self.blocks.items():
            places[name] = range(end, end + len(block.names))
            end += len(block.names)
        return places

    def split(self, values: Array) -> dict[str, Array]:
        """Return the part of ``values`` that belongs to each block, as views: shape (p, ...) to (k, ...)."""
        return {name: values[at.start : at.stop] for name, at in self.places.items()}


class AbstractLaidOutColumns(AbstractBoundedColumns[Piece]):
    """Columns whose names, bounds and places follow from one `TallyLayout`."""

    @property
    @abstractmethod
    def layout(self) -> TallyLayout: ...

    @property
    def names(self) -> tuple[str, ...]:
        return self.layout.names

    @property
    def exponents(self) -> tuple[int, ...]:
        return self.layout.exponents


@final
@dataclass(frozen=True, kw_only=True)
class StudyCounts(AbstractLaidOutColumns[Table]):
    """Who is in each arm, observed in each arm, and in each stratum, and their weights.

    ``weight_exponent`` bounds a weight. Without weights, the sums of weights by stratum are the counts, and
    are sent once.
    """

    label = "count"

    columns: EffectColumns
    weight_exponent: int

    @cached_property
    def layout(self) -> TallyLayout:
        arms, strata, weight = self.columns.arms, self.columns.strata_levels, self.weight_exponent
        blocks = {
            "arm": Block(tuple(f"in arm {arm}" for arm in arms), 1, 0),
            "observed": Block(tuple(f"observed in arm {arm}" for arm in arms), 1, 0),
        }
        places = None if self.columns.weights else 0  # without weights they are counts
        blocks["weight"] = Block(("weight",), weight, places)
        blocks["arm weight"] = Block(tuple(f"weight in arm {arm}" for arm in arms), weight, places)
        counted = tuple(f"in stratum {level}" for level in strata)
        if self.columns.weights:
            blocks["stratum weight"] = Block(tuple(f"weight in stratum {level}" for level in strata), weight)
            blocks["stratum"] = Block(counted, 1, 0)
        else:
            blocks["stratum"] = Block(counted, weight, 0)
        return TallyLayout(blocks)

    @property
    def judged(self) -> Sequence[int]:
        places = self.layout.places
        if not self.columns.weights:
            return ()
        return (*places["weight"], *places["arm weight"], *places["stratum weight"])

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_blocks(rows, work)

    @property
    def terms(self) -> Sequence[tuple[int, ...]]:
        """Each column, or times observed or the weight: of `evaluate`, these two come first."""
        observed, weight, arms = 0, 1, range(2, 2 + len(self.columns.arms))
        strata = range(arms.stop, arms.stop + len(self.columns.strata_levels))
        terms: dict[str, list[tuple[int, ...]]] = {
            "arm": [(arm,) for arm in arms],
            "observed": [(arm, observed) for arm in arms],
            "weight": [(weight,)],
            "arm weight": [(arm, weight) for arm in arms],
            "stratum": [(level,) for level in strata],
            "stratum weight": [(level, weight) for level in strata],
        }
        return [term for block in self.layout.blocks for term in terms[block]]

    def evaluate(self, piece: Table) -> Columns:
        columns = self.columns
        stratum, levels = columns.stratum(piece), range(len(columns.strata_levels))
        return [
            columns.observed(piece),
            columns.weight(piece),
            *(columns.taken(piece, code) for code in range(len(columns.arms))),
            *((stratum == level).astype(np.float64) for level in levels if stratum is not None),
        ]


@final
@dataclass(frozen=True, kw_only=True)
class OverlapMass(AbstractBoundedColumns[Table]):
    """The overlap weights of the rows times those of the observations, and their squares."""

    label = "overlap weight"
    names = ("overlap weight", "overlap weight, squared")
    judged = (0,)

    preparation: Preparation
    weight_ceiling: float

    @property
    def exponents(self) -> tuple[int, ...]:
        return exponent(self.weight_ceiling), exponent(self.weight_ceiling**2)

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_blocks(rows, work)

    def evaluate(self, piece: Table) -> Array:
        columns = self.preparation.columns
        g = self.preparation.scores(piece)
        v = overlap_weight(g, columns.arm(piece))
        v = v * columns.relative_weight(piece, self.preparation.weight_mean)
        return np.stack([v, v * v])


class _OverEffectRows:
    """Reads the rows of an effect problem, nuisances evaluated, in consecutive pieces."""

    effect: EffectProblem

    def over(self, rows: AnyTable, work: Callable[[EffectRows], Result]) -> Iterable[Result]:
        return self.effect.over(rows, work)


@final
@dataclass(frozen=True)
class OverlapColumns(_OverEffectRows, AbstractLaidOutColumns[EffectRows]):
    """The clever covariates H_r with their squares, and the squared scores."""

    label = "inverse probability"

    effect: EffectProblem

    @property
    def count(self) -> int:
        """How many components there are."""
        return len(self.effect.combination[0])

    @cached_property
    def layout(self) -> TallyLayout:
        h = self.effect.ceiling
        score = exponent((h * LARGEST_ERROR) ** 2)
        return TallyLayout(
            {
                "H": Block(tuple(f"H_{r}" for r in range(self.count)), exponent(h), 12),
                "squares of H": Block(
                    tuple(f"H_{r}, squared" for r in range(self.count)), exponent(h * h), 12
                ),
                "squared scores": Block(
                    tuple(f"H_{r} (y - Q), squared" for r in range(self.count)), score, 12
                ),
            }
        )

    @property
    def judged(self) -> Sequence[int]:
        return self.layout.places["H"]

    @property
    def terms(self) -> Sequence[tuple[int, ...]]:
        """H, its squares, and the squares of the scores, which follow H in `evaluate`."""
        h, scores = range(self.count), range(self.count, 2 * self.count)
        return [*((r,) for r in h), *((r, r) for r in h), *((r, r) for r in scores)]

    def evaluate(self, piece: EffectRows) -> Columns:
        h = [product(covariate, piece.weight) for covariate in piece.covariates]
        error = piece.y - piece.factual(piece.q)
        np.clip(error, -LARGEST_ERROR, LARGEST_ERROR, out=error)
        return [*h, *(column * error for column in h)]


@final
@dataclass(frozen=True)
class PredictionMoments(_OverEffectRows, AbstractLaidOutColumns[EffectRows]):
    """The weights of the observed and their predicted outcomes, with the squares of the predictions.

    They are asked in the same round as `OverlapColumns` and judged together with the clever covariates.
    """

    label = "prediction"
    judged = (0, 1)

    effect: EffectProblem

    @cached_property
    def layout(self) -> TallyLayout:
        names = ("weight of the observed", "predicted outcome", "predicted outcome, squared")
        return TallyLayout({"moments": Block(names, exponent(self.effect.population_ceiling), 12)})

    def roots(self, piece: EffectRows) -> Array:
        return np.concatenate([piece.covariates * first(piece.weight), self.disclosed(piece, self.judged)])

    def evaluate(self, piece: EffectRows) -> Columns:
        q = piece.factual(piece.q)
        if self.effect.linear:  # predictions may leave the outcome's bounds
            np.clip(q, 0.0, 1.0, out=q)
        weight = product(piece.weight, piece.observed)
        return [weight, product(q, weight), product(q * q, weight)]


@final
@dataclass(frozen=True)
class TruncationBins(_OverEffectRows, AbstractBins[EffectRows]):
    """Per arm, how many records have a probability below its bound (bin 1)."""

    label = "how many people have a very low treatment probability"

    effect: EffectProblem
    arms: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return (2,) * self.arms

    def groups(self, piece: EffectRows) -> list[Group]:
        return [Group(bins=below) for below in piece.truncated.view(np.uint8)]


def histogram_groups(bins: Bytes, arm: Codes, arms: int) -> list[Group]:
    of = shown_arms(arms)
    outside = [(arm != b) * np.uint8(OUTSIDE) for b in range(arms)]  # all its bits are set
    return [Group(bins=bins[of.index(a)] | outside[b]) for a, b in histogram_pairs(arms)]


def histogram_sizes(arms: int) -> tuple[int, ...]:
    return (len(PROBABILITY_EDGES) - 1,) * len(histogram_pairs(arms))


@final
@dataclass(frozen=True)
class PropensityBins(_OverEffectRows, AbstractBins[EffectRows]):
    """Histograms of the propensity scores of a study's rows, by observed arm."""

    label = "probabilities of treatment"
    on_a_scale = True

    effect: EffectProblem
    arms: int

    @property
    def sizes(self) -> tuple[int, ...]:
        return histogram_sizes(self.arms)

    def groups(self, piece: EffectRows) -> list[Group]:
        return histogram_groups(piece.g_bins, piece.arm, self.arms)


@final
@dataclass(frozen=True)
class FittedPropensityBins(AbstractBins[Table]):
    """`PropensityBins` before the study has an outcome model: from the fitted treatment model alone."""

    label = "probabilities of treatment"
    on_a_scale = True

    preparation: Preparation

    @property
    def arms(self) -> int:
        return len(self.preparation.columns.arms)

    @property
    def sizes(self) -> tuple[int, ...]:
        return histogram_sizes(self.arms)

    def groups(self, piece: Table) -> list[Group]:
        g = self.preparation.scores(piece)
        bins = probability_bins(g[list(shown_arms(len(g)))])
        return histogram_groups(bins, self.preparation.columns.arm(piece), self.arms)


@final
@dataclass(frozen=True, kw_only=True)
class PredictionErrors(_OverEffectRows, AbstractLaidOutColumns[EffectRows]):
    """Squared errors, and of a binary outcome log losses, of Q(A, W) before and after targeting."""

    label = "error of a prediction"
    judged = ()  # the closing sums have the weights, and are judged in the same round

    effect: EffectProblem
    law: EffectLaw
    is_binary: bool

    @cached_property
    def layout(self) -> TallyLayout:
        weight = self.effect.population_ceiling
        largest = exponent(LARGEST_LOSS * weight)
        blocks = {
            "outcome moments": Block(("weight", "outcome", "outcome, squared"), exponent(weight), 12),
            "squared errors": Block(("squared error before", "squared error after"), largest, 12),
        }
        if self.is_binary:
            blocks["log losses"] = Block(("log loss before", "log loss after"), largest, 12)
        return TallyLayout(blocks)

    def evaluate(self, piece: EffectRows) -> Columns:
        weight, y = product(piece.weight, piece.observed), piece.y
        predictions = _predictions(self.effect, self.law, piece)
        errors = [_squared_error(y, q) for q in predictions]
        losses = [_log_loss(y, q) for q in predictions] if self.is_binary else []
        return [weight, *(product(column, weight) for column in (y, y * y, *errors, *losses))]


@final
@dataclass(frozen=True, kw_only=True)
class CalibrationBins(_OverEffectRows, AbstractBins[EffectRows]):
    """Observed and predicted outcomes, by bins of the prediction before targeting.

    Both predictions are compared in the same bins: separate bins for each would differ in a few rows, and
    so disclose these rows. The sums are those of w, w y, w Q before and w Q after.
    """

    label = "outcomes and predictions"
    on_a_scale = True

    effect: EffectProblem
    law: EffectLaw
    edges: tuple[float, ...]  # inner edges, of the initial prediction

    @property
    def sizes(self) -> tuple[int, ...]:
        return (len(self.edges) + 1,)

    @property
    def exponents(self) -> tuple[int, ...]:
        return (exponent(2.0 * self.effect.population_ceiling),) * 4

    def groups(self, piece: EffectRows) -> Sequence[Group]:
        before, after = _predictions(self.effect, self.law, piece)
        bins = bins_between(self.edges, before)
        if not is_one(piece.observed):
            bins[piece.observed == 0.0] = OUTSIDE
        for q in (before, after):  # predictions may leave the outcome's bounds
            np.clip(q, -1.0, 2.0, out=q)
        values = [piece.weight, *(product(column, piece.weight) for column in (piece.y, before, after))]
        return [Group(bins=bins, values=values, sensitive=piece.y)]


def _predictions(effect: EffectProblem, law: EffectLaw, rows: EffectRows) -> tuple[Array, Array]:
    """Return Q(A, W) before and after targeting, shape (N,) each."""
    return effect.factual(effect.start(), rows), effect.factual(law, rows)


def _squared_error(y: Array, q: Array) -> Array:
    error = y - q
    error *= error
    return np.minimum(error, LARGEST_LOSS, out=error)


def _log_loss(y: Array, q: Array) -> Array:
    chance = np.where(y > 0, q, 1.0 - q)
    np.clip(chance, SMALLEST_CHANCE, 1.0, out=chance)
    np.log(chance, out=chance)
    return np.negative(chance, out=chance)

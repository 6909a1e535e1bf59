"""A differentially private study at a silo: the columns of its models in public coordinates, and its sums.

The sums are a Gram matrix, gradients, and moments of the one-step estimate. The rows of the first two lie in
a public ball. The terms of the last sum are clipped to one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import NamedTuple, TypeVar, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.initial.design import (
    UNIT,
    DesignPart,
    Ranges,
    column_names,
    column_ranges,
    design,
    design_columns,
)
from fedtmle.initial.glm import FittedGLM, Levels
from fedtmle.initial.syntax import Categorical, Computed, Formula, Name, names_in
from fedtmle.model.table import AbstractPrivateColumns, AnyTable, Table, over_blocks
from fedtmle.targets.effects.prepare import EffectColumns
from fedtmle.targets.effects.problem import EffectLaw, EffectProblem
from fedtmle_core.types import Array, Family, unpack, upper_pairs

# The columns of a differentially private study's models, in public coordinates.
#
# Columns are clipped to their declared ranges and scaled to [-1, 1]. A row has the weight
# w = min(1, r/|(1, x)|), a function of the covariates alone, so that it lies in a public ball and a correct
# model is still estimated consistently.

NUMBER_SQUARE = Fraction(1, 3)  # a number's part of r^2: the mean square of a uniform one


@final
@dataclass(frozen=True, kw_only=True)
class ScaledDesign:
    """The columns of one model in public coordinates: 1, covariates in [-1, 1], and the arm as -1 or 1.

    ``places`` has, for each column of the formula, its place among the study's covariates, or None for the
    intercept and for the treatment, which is the column ``treated``.
    """

    formula: Formula
    levels: Levels
    centres: tuple[float, ...]
    halves: tuple[float, ...]
    places: tuple[int | None, ...]
    treated: int | None

    @property
    def covariates(self) -> list[int]:
        """The places of the model's covariates among the study's, in the order of its coefficients."""
        return [place for place in self.places if place is not None]

    @property
    def dim(self) -> int:
        """The number of coefficients."""
        return len(self.places)

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the columns in the order of the coefficients."""
        names = column_names(self.formula, self.levels)
        chosen = [j for j, place in enumerate(self.places) if place is not None]
        treated = [] if self.treated is None else [self.treated]
        return ("1", *(names[j] for j in (*chosen, *treated)))

    def stacked(self, covariates: Array, arm: Array | None) -> Array:
        """Return the columns in the order of the coefficients: 1, covariates, the arm; shape (dim, N)."""
        chosen = covariates[self.covariates]
        ones = np.ones((1, covariates.shape[1]))
        return np.concatenate([ones, chosen] if self.treated is None else [ones, chosen, arm[None]])  # type: ignore[index]

    def fitted(self, beta: Array) -> FittedGLM:
        """Return the model with these coefficients, on the columns of its formula."""
        scaled, intercept = iter(beta[1:].tolist()), [float(beta[0])]
        by_column = [0.0] * self.dim
        order = [j for j, place in enumerate(self.places) if place is not None]
        for j in [*order, *([] if self.treated is None else [self.treated])]:
            slope = next(scaled) / self.halves[j]
            by_column[j] = slope
            intercept.append(-slope * self.centres[j])
        by_column[0] = math.fsum(intercept)
        return FittedGLM(
            formula=self.formula, levels=self.levels, family=Family.LOGISTIC, coefficients=tuple(by_column)
        )


@final
@dataclass(frozen=True, kw_only=True)
class PrivateDesign:
    """The designs of a study's models, by role, over one list of covariates."""

    columns: EffectColumns
    models: dict[str, ScaledDesign]
    covariates: tuple[tuple[str, int], ...]  # the first model that has each, and its column there
    squared_radius: Fraction  # r^2, of (1, x)
    strata: Mapping[int, tuple[float, ...]]  # the covariates that a stratum decides: their value in each

    def weight(self, covariates: Array) -> Array:
        """Return w for covariates of shape (p, N)."""
        square = np.ones(covariates.shape[1])
        for column in covariates:
            square += column * column
        return np.minimum(np.sqrt(float(self.squared_radius) / square), 1.0)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the covariates."""
        return tuple(
            column_names(self.models[role].formula, self.models[role].levels)[j]
            for role, j in self.covariates
        )

    @property
    def stratum_places(self) -> tuple[int | None, ...]:
        """The covariate that is 1 in a stratum and -1 in all others, for each stratum; None if there is none.

        One stratum, the reference, has none.
        """
        found: list[int | None] = []
        for code in range(len(self.columns.strata_levels)):
            own = tuple(1.0 if other == code else -1.0 for other in range(len(self.columns.strata_levels)))
            found.append(next((place for place, values in self.strata.items() if values == own), None))
        return tuple(found)

    def scaled(self, table: Table) -> Array:
        """Return the covariates, clipped to their ranges and scaled to [-1, 1]; shape (p, N)."""
        clipped = np.empty((len(self.covariates), table.n_rows))
        for role, model in self.models.items():
            places = [(k, j) for k, (first, j) in enumerate(self.covariates) if first == role]
            if places:
                raw = design(model.formula, table, model.levels)
                for k, j in places:
                    clipped[k] = np.clip((raw[j] - model.centres[j]) / model.halves[j], -1.0, 1.0)
        return clipped

    def arm(self, table: Table) -> Array:
        """Return the arm as -1 or 1."""
        return 2.0 * self.columns.taken(table, 1) - 1.0

    def responses(self, table: Table) -> dict[str, tuple[Array, Array]]:
        """Return the response of each model on the unit scale, and which rows it is fitted on."""
        observed = self.columns.observed(table)
        everyone = np.ones(table.n_rows)
        given = {
            "missingness": (observed, everyone),
            "outcome": (np.clip(self.columns.y(table), 0.0, 1.0), observed),
        }
        if "treatment" in self.models:
            given["treatment"] = self.columns.taken(table, 1), everyone
        return {role: given[role] for role in self.models}


def private_design(
    columns: EffectColumns, formulas: dict[str, Formula], levels: Levels, ranges: Ranges
) -> PrivateDesign:
    """Return the designs of the models with these formulas, or raise `InputError`."""
    models: dict[str, ScaledDesign] = {}
    known: dict[tuple[str, ...], int] = {}
    covariates: list[tuple[str, int]] = []
    strata: dict[int, tuple[float, ...]] = {}
    square = Fraction(1)
    for role, formula in formulas.items():
        bounds: list[tuple[float, float]] = []
        places: list[int | None] = []
        treated = None
        if not formula.intercept:
            raise InputError(f"{role}_model: a study with privacy needs models with an intercept")
        ranged = column_ranges(formula, levels, ranges)
        for j, (column, bound) in enumerate(zip(design_columns(formula, levels), ranged, strict=True)):
            label = tuple(sorted(part.label for part in column))
            if not column:
                bounds.append((0.0, 2.0))
                places.append(None)
            elif any(_is_treatment(part, columns.treatment) for part in column):
                if len(column) > 1 or treated is not None:
                    raise InputError(
                        f"{role}_model: with privacy the treatment enters a model by itself only, not as "
                        f"'{':'.join(label)}'"
                    )
                treated = j
                bounds.append(_arm_values(column[0], columns.arms))
                places.append(None)
            else:
                if bound[0] >= bound[1]:
                    raise InputError(f"{role}_model: the declared range of '{':'.join(label)}' is one value")
                bounds.append(bound)
                if label not in known:
                    known[label] = len(covariates)
                    is_indicator = all(_is_indicator(part, ranges) for part in column)
                    square += 1 if is_indicator else NUMBER_SQUARE
                    covariates.append((role, j))
                    if len(column) == 1 and _name(column[0]) == columns.strata is not None:
                        strata[known[label]] = _stratum_values(column[0], columns.strata_levels, bound)
                places.append(known[label])
        models[role] = ScaledDesign(
            formula=formula,
            levels=levels,
            centres=tuple((low + high) / 2 for low, high in bounds),
            halves=tuple((high - low) / 2 for low, high in bounds),
            places=tuple(places),
            treated=treated,
        )
    private = PrivateDesign(
        columns=columns,
        models=models,
        covariates=tuple(covariates),
        squared_radius=square,
        strata=strata,
    )
    if private.stratum_places.count(None) > 1:
        raise InputError(
            f"strata: with privacy '{columns.strata}' must be in a model by itself; add C({columns.strata}) "
            "to the outcome model's formula"
        )
    return private


def _is_indicator(part: DesignPart, ranges: Ranges) -> bool:
    variable = part.variable
    return isinstance(variable, Categorical) or (isinstance(variable, Name) and ranges[variable.name] == UNIT)


def _name(part: DesignPart) -> str | None:
    return None if isinstance(part.variable, Computed) else part.variable.name


def _stratum_values(
    part: DesignPart, levels: tuple[str, ...], bound: tuple[float, float]
) -> tuple[float, ...]:
    """Return a column that the stratum decides, in each stratum, scaled to [-1, 1]."""
    low, high = bound
    raw = [
        float(part.index == code) if isinstance(part.variable, Categorical) else float(level)
        for code, level in enumerate(levels)
    ]
    return tuple((2.0 * value - low - high) / (high - low) for value in raw)


def _is_treatment(part: DesignPart, treatment: str | None) -> bool:
    variable = part.variable
    if isinstance(variable, Computed):
        return treatment is not None and treatment in names_in(variable.expression)
    return variable.name == treatment


def _arm_values(part: DesignPart, arms: tuple[str, ...]) -> tuple[float, float]:
    """Return the treatment's column in the first and in the second arm."""
    match part.variable:
        case Categorical():
            return (0.0, 1.0) if part.index == 1 else (1.0, 0.0)
        case Name():
            return float(arms[0]), float(arms[1])
        case _:
            raise InputError(
                f"'{part.label}': with privacy a formula must have the treatment itself, not a function of it"
            )


Result = TypeVar("Result")

SQUARE_SCALE = {1: 1.5, 2: 0.7}  # scale of second moments, by the number of coordinates
COUNT_SCALE = 0.7  # scale of the number of rows in a stratum
TRUNCATED_SCALE = 0.125  # scale of the count of truncated rows


@final
@dataclass(frozen=True, kw_only=True)
class GramColumns(AbstractPrivateColumns[Table]):
    """Products of the entries of w z, z = (1, covariates, arm, observed, outcome), each entry in [-1, 1].

    The arm and being observed are -1 or 1; the outcome is scaled to [-1, 1], and 0 where it is missing.
    Products of two different entries are multiplied by sqrt(2), so that the norm of all of them is |w z|^2.
    """

    label = "products of covariates, treatment and outcome"

    design: PrivateDesign

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The names of the entries of z."""
        arm = ("arm",) if self.design.columns.treatment is not None else ()
        seen = ("observed",) if "missingness" in self.design.models else ()
        return ("1", *self.design.names, *arm, *seen, "outcome")

    @cached_property
    def terms(self) -> list[tuple[int, ...]]:
        d = len(self.labels)
        return [(j, k if j == k else d + k) for j, k in upper_pairs(d)]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.labels[j]} * {self.labels[k]}" for j, k in upper_pairs(len(self.labels)))

    @property
    def squared_sensitivity(self) -> Fraction:
        """2 R^4, R the largest norm of w z: |z z' - s s'|^2 = |z|^4 + |s|^4 - 2 (z's)^2 <= 2 R^4."""
        others = len(self.labels) - 1 - len(self.design.covariates)  # each in [-1, 1]
        return 2 * (self.design.squared_radius + others) ** 2

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_blocks(rows, work)

    def evaluate(self, piece: Table) -> Array:
        design, columns = self.design, self.design.columns
        observed, covariates = columns.observed(piece), design.scaled(piece)
        z = [np.ones(piece.n_rows), *covariates]
        if columns.treatment is not None:
            z.append(design.arm(piece))
        if "missingness" in design.models:
            z.append(2.0 * observed - 1.0)
        z.append((2.0 * np.clip(columns.y(piece), 0.0, 1.0) - 1.0) * observed)
        weighted = np.stack(z) * design.weight(covariates)
        return np.concatenate([weighted, math.sqrt(2.0) * weighted])

    def matrix(self, sums: Array) -> Array:
        """Return the symmetric matrix of sums of w^2 z z'."""
        d = len(self.labels)
        scaled = unpack(sums, d)
        return np.asarray(np.where(np.eye(d) > 0, scaled, scaled / math.sqrt(2.0)))


@final
@dataclass(frozen=True, kw_only=True)
class GradientColumns(AbstractPrivateColumns[Table]):
    """The weighted score w x (y - mu) of every model at its coefficients, one model after the other."""

    label = "gradients of the nuisance models"

    design: PrivateDesign
    fits: dict[str, FittedGLM]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{role}: {name}" for role in self.fits for name in self.design.models[role].labels)

    @property
    def terms(self) -> Sequence[tuple[int, ...]]:
        return [(j,) for j in range(len(self.names))]

    @property
    def squared_sensitivity(self) -> Fraction:
        """(2 R)^2, R^2 the sum over the models of r^2, and 1 if a model has the treatment: |y - mu| <= 1."""
        models = [self.design.models[role] for role in self.fits]
        treated = sum(model.treated is not None for model in models)
        return 4 * (len(models) * self.design.squared_radius + treated)

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_blocks(rows, work)

    def evaluate(self, piece: Table) -> Array:
        design = self.design
        covariates, responses = design.scaled(piece), design.responses(piece)
        arm = None if design.columns.treatment is None else design.arm(piece)
        weight = design.weight(covariates)
        scores = []
        for role, fit in self.fits.items():
            y, used = responses[role]
            residual = np.clip((y - fit.predict(piece)) * used, -1.0, 1.0) * weight
            scores.append(design.models[role].stacked(covariates, arm) * residual)
        return np.concatenate(scores)


class StratumMoments(NamedTuple):
    """Sums over the rows of one stratum, over n: their share, and the first and second moments."""

    share: float
    first: Array  # (k,)
    second: Array  # (k, k)


@final
@dataclass(frozen=True, kw_only=True)
class OneStepColumns(AbstractPrivateColumns[Table]):
    """First and second moments of the one-step terms, and the rows of each arm whose g was truncated.

    With u_r the term of component r and L the combination that is estimated, t = (L u / width - centre) /
    radius, clipped to the unit ball. The second moments are scaled by ``SQUARE_SCALE``, those of two
    different coordinates also by sqrt(2). With strata, the moments are summed in each of them, beside the
    number of its rows, which is scaled by ``COUNT_SCALE``.
    """

    problem: EffectProblem
    columns: EffectColumns
    centre: float
    radius: float

    @property
    def strata(self) -> tuple[str, ...]:
        """The levels of the strata, none if only everyone is of interest."""
        return self.columns.strata_levels

    @property
    def arms(self) -> int:
        return len(self.columns.arms)

    @property
    def label(self) -> str:
        return "moments of the influence function" + (" by stratum" if self.strata else "")

    @property
    def dim(self) -> int:
        """The number of coordinates that are estimated, of everyone or in each stratum."""
        return self.problem.dim

    @property
    def scale(self) -> float:
        """The factor of the second moments."""
        return SQUARE_SCALE[2 if self.strata else min(self.dim, 2)]

    @property
    def names(self) -> tuple[str, ...]:
        moments = [f"mean {j + 1}" for j in range(self.dim)]
        moments += [f"{j + 1} * {k + 1}" for j, k in upper_pairs(self.dim)]
        truncated = [f"truncated, arm {a + 1}" for a in range(self.arms)]
        if self.strata:
            moments = [f"{each} in {level}" for level in self.strata for each in ("rows", *moments)]
        return (*moments, *truncated)

    @property
    def terms(self) -> Sequence[tuple[int, ...]]:
        return [(j,) for j in range(len(self.names))]

    @property
    def squared_sensitivity(self) -> Fraction:
        """4 for the moments, with strata or not, and the square of the last scale for each arm's count.

        For t, s in the unit ball and the scale c, |t - s|^2 + c^2 |t t' - s s'|^2 is at most 4 if c^2 is at
        most 1/2, and in one dimension, where it is (t - s)^2 (1 + c^2 (t + s)^2), if c^2 is at most 2.77.

        With strata, a record that is replaced by another of the same stratum changes the sums of that
        stratum alone, as above: its number of rows stays. One that is replaced by a record of another stratum
        takes (c_0, t, c t t') away from the one and adds (c_0, s, c s s') to the other, c_0 the scale of the
        counts. These are different lanes, so that the squares add up: at most 2 (c_0^2 + 1 + c^2), which is
        below 4 because c_0^2 + c^2 = 0.98. More strata add nothing, since no record changes more than two.
        (If records were added or removed instead, one stratum would change: strata would then compose in
        parallel.) The counts of truncated rows are of all strata together.
        """
        moments = Fraction(4)
        if self.strata:
            moments = max(moments, 2 * (1 + Fraction(COUNT_SCALE) ** 2 + Fraction(self.scale) ** 2))
        return moments + self.arms * Fraction(TRUNCATED_SCALE) ** 2

    def over(self, rows: AnyTable, work: Callable[[Table], Result]) -> Iterable[Result]:
        return over_blocks(rows, work)

    def evaluate(self, piece: Table) -> Array:
        problem = self.problem
        rows = problem.prepare(piece)
        u = problem.moment_columns(EffectLaw(), rows).u / problem.width
        t = np.zeros((self.dim, piece.n_rows))
        for k, row in enumerate(problem.combination):
            for r, weight in enumerate(row):
                t[k] += weight * u[r]
        t = (t - self.centre) / self.radius
        length = np.sqrt((t * t).sum(axis=0))
        t /= np.maximum(length, 1.0)
        squares = [
            self.scale * t[j] * t[k] * (1.0 if j == k else math.sqrt(2.0)) for j, k in upper_pairs(self.dim)
        ]
        moments = np.concatenate([t, np.stack(squares)])
        if self.strata:
            counted = np.concatenate([np.full((1, piece.n_rows), COUNT_SCALE), moments])
            stratum = np.asarray(self.columns.stratum(piece))
            moments = np.concatenate([counted * (stratum == code) for code in range(len(self.strata))])
        return np.concatenate([moments, TRUNCATED_SCALE * rows.truncated])

    def split(self, means: Array) -> list[StratumMoments]:
        """Return the moments in each stratum, or those of everyone, from the sums of all terms over n."""
        k, found = self.dim, []
        for part in means[: -self.arms].reshape(max(len(self.strata), 1), -1):
            share = float(part[0]) / COUNT_SCALE if self.strata else 1.0
            moments = part[1:] if self.strata else part
            scaled = unpack(moments[k:], k) / self.scale
            second = np.where(np.eye(k) > 0, scaled, scaled / math.sqrt(2.0))
            found.append(StratumMoments(share, moments[:k], second))
        return found

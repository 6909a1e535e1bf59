"""The columns of a differentially private study's models, in public coordinates.

Columns are clipped to their declared ranges and scaled to [-1, 1]. A row has the weight
w = min(1, r/|(1, x)|), a function of the covariates alone, so that it lies in a public ball and a correct
model is still estimated consistently.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.initial.design import DesignPart, column_names, design, design_columns
from fedtmle.initial.glm import FittedGLM, Levels
from fedtmle.initial.ranges import UNIT, Ranges, column_ranges
from fedtmle.initial.syntax import Categorical, Computed, Formula, Name, names_in
from fedtmle.model.families import Family
from fedtmle.model.table import Table
from fedtmle.model.types import Array
from fedtmle.targets.effects.prepare import EffectColumns

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

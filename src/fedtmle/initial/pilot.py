"""Models fitted at one silo, or on a public sample, and shipped whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from fedtmle.errors import InputError
from fedtmle.initial.crossfit import Fitted
from fedtmle.initial.design import column_names
from fedtmle.initial.formula import parse_formula
from fedtmle.initial.glm import FAMILIES, GLM, FittedGLM, Levels
from fedtmle.initial.trees import GradientBoostedTrees, TreeEnsemble
from fedtmle.model.table import Table
from fedtmle.model.types import Array


@final
@dataclass(frozen=True)
class Pilot:
    """A model that is fitted at one silo and sent to all, or one that is public.

    The coefficients or trees of a model fitted at one silo are seen by everyone. They disclose more about
    its records than pooled sums do, most of all where the silo is small or the model large. Fit it where
    the owner agreed to that, or on public data.

    Parameters
    ----------
    model
        The model to fit, or a fitted one.
    at
        The silo that fits it. None if the model is fitted already.
    unit_scale
        Whether a public model predicts the outcome on the scale of its declared bounds, from 0 to 1.

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> ft.Pilot(ft.GLM("age"), at="north").at
    'north'
    """

    model: GLM | GradientBoostedTrees | FittedGLM | TreeEnsemble
    at: str | None = None
    unit_scale: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.model, FittedGLM | TreeEnsemble) != (self.at is None):
            raise InputError("at: name the silo that fits the model, or give a model already fitted")
        if self.unit_scale and self.at is not None:
            raise InputError("unit_scale: is about a public model; a silo's fit knows its scale")

    @classmethod
    def from_coefficients(
        cls, formula: str, levels: Levels, family: str, coefficients: Sequence[float]
    ) -> Pilot:
        """Return a public GLM: coefficients in the order of the formula's columns, on the outcome's scale."""
        if family not in FAMILIES:
            raise InputError(f"family: expected one of {tuple(FAMILIES)}, not {family!r}")
        parsed = parse_formula(formula)
        names = column_names(parsed, levels)
        if len(names) != len(coefficients):
            raise InputError(
                f"coefficients: expected {len(names)} ({', '.join(names)}), not {len(coefficients)}"
            )
        if not all(map(math.isfinite, coefficients)):
            raise InputError("coefficients: expected finite numbers")
        fitted = FittedGLM(
            formula=parsed,
            levels={name: tuple(levels[name]) for name in parsed.factor_names},
            family=FAMILIES[family],
            coefficients=tuple(map(float, coefficients)),
        )
        return cls(fitted)

    @property
    def is_public(self) -> bool:
        return self.at is None


@final
@dataclass(frozen=True, kw_only=True)
class Rescaled:
    """A prediction on the outcome's own scale, brought to the unit scale of its declared bounds."""

    model: Fitted
    low: float
    width: float

    def predict(self, table: Table) -> Array:
        return (self.model.predict(table) - self.low) / self.width

"""The format of [models]: formulas, predictions, pilots and super learners."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedtmle.errors import InputError
from fedtmle.initial.glm import GLM, Supplied
from fedtmle.initial.pilot import Pilot
from fedtmle.initial.superlearner import PerSilo, SuperLearner
from fedtmle.initial.trees import GradientBoostedTrees
from fedtmle.studies.readers import (
    COUNT,
    NUMBER,
    NUMBERS,
    POSITIVE,
    TEXT,
    TEXTS,
    Key,
    Kind,
    choice,
    level,
    required,
    several,
    table,
    table_of,
    tables,
    text,
)

FAMILIES = {
    "outcome": ("binomial", "gaussian", "poisson"),
    "treatment": ("binomial",),
    "missingness": ("binomial",),
}
FitOnSample = Callable[[GLM | GradientBoostedTrees, str], Pilot]


def _columns_or_formula(value: Any) -> str | tuple[str, ...]:
    return several(text)(value) if isinstance(value, list) else text(value)


TREES = {
    "GradientBoostedTrees": Kind(
        make=GradientBoostedTrees,
        keys={
            "formula": Key(
                read=_columns_or_formula, expected="a formula, or a list of columns", required=True
            ),
            "rounds": COUNT,
            "depth": COUNT,
            "rate": POSITIVE,
            "min_leaf": COUNT,
        },
    )
}
_TREES_KEY = table(TREES, default="GradientBoostedTrees", expected='a table such as {formula = "age + sex"}')
_LEVELS_KEY = Key(read=table_of(several(level)), expected='a table such as {site = ["a", "b"]}')


def _per_silo(trees: GradientBoostedTrees) -> PerSilo:
    return PerSilo(trees)


def _supplied(supplied: tuple[str, ...]) -> Supplied:
    return Supplied(*supplied)


def model_kinds(role: str, on_sample: FitOnSample) -> Mapping[str, Kind]:
    """The kinds of model that a role may have; ``on_sample`` fits one on a public file of the study's."""
    glm = {"formula": required(TEXT), "family": choice("auto", *FAMILIES[role]), "ridge": NUMBER}

    def pilot(**values: Any) -> Pilot:
        return make_pilot(on_sample, **values)

    learners = {
        "GLM": Kind(make=GLM, keys=glm),
        "Pilot": Kind(
            make=pilot,
            keys={
                "at": TEXT,
                "sample": TEXT,
                "coefficients": NUMBERS,
                "levels": _LEVELS_KEY,
                "trees": _TREES_KEY,
                **glm,
                "formula": TEXT,
            },
        ),
        "PerSilo": Kind(make=_per_silo, keys={"trees": required(_TREES_KEY)}),
    }
    return {
        "GLM": learners["GLM"],
        "Pilot": learners["Pilot"],
        "SuperLearner": Kind(
            make=SuperLearner,
            keys={
                "learners": tables(learners, default="GLM", expected=f"[[models.{role}.learners]] tables"),
                "folds": COUNT,
                "seed": COUNT,
            },
        ),
        "Supplied": Kind(make=_supplied, keys={"supplied": required(TEXTS)}),
    }


def make_pilot(
    on_sample: FitOnSample,
    *,
    at: str | None = None,
    sample: str | None = None,
    coefficients: Sequence[float] | None = None,
    levels: Mapping[str, tuple[str, ...]] | None = None,
    trees: GradientBoostedTrees | None = None,
    formula: str | None = None,
    family: str = "auto",
    ridge: float = 0.0,
) -> Pilot:
    """A pilot from what its section says: where it comes from, and the model."""
    sources = [source for source in (at, sample, coefficients) if source is not None]
    if len(sources) != 1:
        raise InputError(
            'Pilot: say where it comes from, once: at = "a silo", sample = "a public file" or '
            "coefficients = [...]"
        )
    if (trees is None) == (formula is None):
        raise InputError('Pilot: give formula = "..." or trees = {formula = "..."}, one of the two')
    if trees is not None and (family != "auto" or ridge):
        raise InputError("trees: family and ridge go with a formula, not with trees")
    if coefficients is None:
        if levels is not None:
            raise InputError("levels: they go with coefficients; a fit takes them from the data")
        model = trees or GLM(formula or "", family, ridge)  # type: ignore[arg-type]  # read as a choice
        return Pilot(model, at=at) if sample is None else on_sample(model, sample)
    if formula is None:
        raise InputError("coefficients: they go with a formula, not with trees")
    if family == "auto" or ridge:
        raise InputError("family: public coefficients need one, and no ridge")
    return Pilot.from_coefficients(formula, levels or {}, family, coefficients)

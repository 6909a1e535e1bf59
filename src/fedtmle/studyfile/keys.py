"""The format of a study file: every section, its kinds, their keys, and how each value is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from functools import partial
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from fedtmle.algorithms.coded import Coded
from fedtmle.algorithms.gradient import Central, Exact, Gradient, OneStep
from fedtmle.algorithms.local import Adaptive, LocalAverage, Personalized
from fedtmle.algorithms.optimizers import (
    Backtracking,
    GradientDescent,
    Newton,
    Schedule,
    StochasticGradientDescent,
)
from fedtmle.defects import Toml
from fedtmle.errors import InputError
from fedtmle.initial.glm import GLM, Supplied
from fedtmle.initial.superlearner import GradientBoostedTrees, PerSilo, Pilot, SuperLearner
from fedtmle.model.budget import Privacy
from fedtmle.model.fit import FirstOrderFits, NewtonFits
from fedtmle.programs.study import NuisanceModel
from fedtmle.protocol.coded import Certified, Estimated
from fedtmle.studyfile.toml import (
    BOUNDS,
    COUNT,
    INTEGER,
    INTEGERS,
    LEVEL,
    LEVELS,
    NUMBER,
    NUMBERS,
    POSITIVE,
    TEXT,
    TEXTS,
    TRUTH,
    Key,
    SectionKind,
    choice,
    date,
    either,
    level,
    named,
    number,
    one_of,
    positive,
    public_key,
    required,
    server_key,
    several,
    table,
    table_of,
    tables,
    text,
)
from fedtmle.targets.effects import estimands
from fedtmle.targets.effects.components import AbstractRegime, Static, Stochastic, Threshold
from fedtmle.targets.effects.estimands import AbstractEffect
from fedtmle.targets.regimes.estimands import REGIME_ESTIMANDS, AbstractRegimeEffect, Onset, Planned, Shift
from fedtmle.targets.residuals import installed_target
from fedtmle.targets.time.estimands import TIME_ESTIMANDS

RULES = {
    "Static": SectionKind(make=Static, keys={"arm": required(LEVEL)}),
    "Threshold": SectionKind(
        make=Threshold,
        keys={
            "column": required(TEXT),
            "cut": required(NUMBER),
            "arm": required(LEVEL),
            "otherwise": required(LEVEL),
        },
    ),
    "Stochastic": SectionKind(make=Stochastic, keys={"shares": required(NUMBERS)}),
}
RULES_OVER_TIME = {
    **RULES,
    "Planned": SectionKind(make=Planned, keys={"plan": required(LEVELS)}),
    "Onset": SectionKind(
        make=Onset,
        keys={
            "column": required(TEXT),
            "cut": required(NUMBER),
            "arm": required(LEVEL),
            "otherwise": required(LEVEL),
            "below": TRUTH,
        },
    ),
    "Shift": SectionKind(
        make=Shift, keys={"by": NUMBER, "factor": POSITIVE, "least": NUMBER, "most": NUMBER}
    ),
}

# How an argument of an estimand is read, by its type.
_BY_TYPE: dict[object, Key] = {
    str: TEXT,
    bool: TRUTH,
    int: INTEGER,
    float: NUMBER,
    tuple[float, float]: BOUNDS,
    tuple[float, ...]: NUMBERS,
    tuple[int, ...]: INTEGERS,
    tuple[str, ...]: LEVELS,
    tuple[tuple[float, ...], ...]: Key(
        read=several(several(number)), expected="a list of points, such as [[0, 0], [1, 2]]"
    ),
    Mapping[str, tuple[str, ...]]: Key(
        read=table_of(several(text)), expected='a table of columns, such as {a = ["a1", "a2"]}'
    ),
}


def target_kinds(named: object = None) -> dict[str, SectionKind[AbstractEffect]]:
    """Return the kinds of [target], one for each registered estimand.

    If ``named`` is not registered, the target of that name from an installed distribution is added
    (`targets.residuals`).
    """
    known: dict[str, type[AbstractEffect]] = {
        estimand.__name__: estimand for estimand in (*estimands.ESTIMANDS, *TIME_ESTIMANDS, *REGIME_ESTIMANDS)
    }
    brought = installed_target(named) if isinstance(named, str) and named not in known else None
    return {
        estimand.__name__: SectionKind(make=estimand, keys=_target_keys(estimand))
        for estimand in (*known.values(), *(() if brought is None else (brought,)))
    }


def own_roles(estimand: type[AbstractEffect]) -> tuple[str, ...]:
    """Return the roles of models that are arguments of the target itself, each a section of [models]."""
    named = {field.name for field in fields(estimand)}
    return tuple(role for role in estimand.roles if f"{role}_model" in named)


def _target_keys(estimand: type[AbstractEffect]) -> dict[str, Key]:
    """Return the keys of an estimand: its arguments, without treatment or strata where it has none."""
    unused = {
        *(() if estimand.has_treatment else ("treatment", "arms")),
        *(() if estimand.has_strata else ("strata",)),
        *(f"{role}_model" for role in own_roles(estimand)),
        *(field.name for field in fields(estimand) if not field.init),
    }
    types = get_type_hints(estimand)
    keys = {}
    for field in fields(estimand):
        if field.name not in unused:
            needed = field.default is MISSING and field.default_factory is MISSING
            key = _argument_key(estimand, field.name, types[field.name])
            keys[field.name] = replace(key, required=needed or field.name == "treatment")
    return keys


def _argument_key(estimand: type[AbstractEffect], name: str, kind: object) -> Key:
    """Return the key that reads an argument of this type; None is written by leaving the key out."""
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    if get_origin(kind) is Literal:
        return choice(*get_args(kind))
    if kind == tuple[AbstractRegime, ...]:
        rules = RULES_OVER_TIME if issubclass(estimand, AbstractRegimeEffect) else RULES
        return tables(rules, expected=f"[[target.{name}]] tables")
    if kind not in _BY_TYPE:
        raise TypeError(f"{estimand.__name__}.{name}: a study file cannot hold values of type {kind}")
    return _BY_TYPE[kind]


FAMILIES = {
    "outcome": ("binomial", "gaussian", "poisson"),
    "treatment": ("binomial",),
    "missingness": ("binomial",),
    "hazard": ("binomial",),
    "censoring": ("binomial",),
}
FitOnSample = Callable[[GLM | GradientBoostedTrees, str], Pilot]


def _columns_or_formula(value: Toml) -> str | tuple[str, ...]:
    return several(text)(value) if isinstance(value, list) else text(value)


TREES = {
    "GradientBoostedTrees": SectionKind(
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


def model_kinds(role: str, on_sample: FitOnSample) -> Mapping[str, SectionKind[NuisanceModel]]:
    """Return the kinds of model that a role may have; ``on_sample`` fits a pilot on a public file."""
    families = FAMILIES.get(role, FAMILIES["outcome"])
    glm_keys = {"formula": required(TEXT), "family": choice("auto", *families), "ridge": NUMBER}
    glm = SectionKind(make=GLM, keys=glm_keys)
    pilot = SectionKind(
        make=partial(make_pilot, on_sample),
        keys={
            "at": TEXT,
            "sample": TEXT,
            "coefficients": NUMBERS,
            "levels": _LEVELS_KEY,
            "trees": _TREES_KEY,
            **glm_keys,
            "formula": TEXT,
        },
    )
    per_silo = SectionKind(make=_per_silo, keys={"trees": required(_TREES_KEY)})
    learners: dict[str, SectionKind[object]] = {"GLM": glm, "Pilot": pilot, "PerSilo": per_silo}
    return {
        "GLM": glm,
        "Pilot": pilot,
        "SuperLearner": SectionKind(
            make=SuperLearner,
            keys={
                "learners": tables(learners, default="GLM", expected=f"[[models.{role}.learners]] tables"),
                "folds": COUNT,
                "seed": COUNT,
            },
        ),
        "Supplied": SectionKind(make=_supplied, keys={"supplied": required(TEXTS)}),
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
    """Return the pilot that a section describes: where it comes from, and its model."""
    sources = [source for source in (at, sample, coefficients) if source is not None]
    if len(sources) != 1:
        raise InputError(
            'Pilot: expected exactly one source: at = "a silo", sample = "a public file" or '
            "coefficients = [...]"
        )
    if (trees is None) == (formula is None):
        raise InputError('Pilot: expected exactly one of formula = "..." and trees = {formula = "..."}')
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


STEP_RULES = {
    "Schedule": SectionKind(
        make=Schedule,
        keys={
            "steps": required(
                Key(
                    read=several(several(positive)),
                    expected="step sizes per update, such as [[0.5, 0.5], [0.1]]",
                )
            )
        },
    ),
    "Backtracking": SectionKind(
        make=Backtracking,
        keys={"first": POSITIVE, "armijo": POSITIVE, "grow": POSITIVE, "max_halvings": COUNT},
    ),
}
OPTIMIZERS = {
    "newton": SectionKind(make=Newton, keys={"max_steps": COUNT, "stop": POSITIVE}),
    "descent": SectionKind(
        make=GradientDescent,
        keys={
            "step": replace(POSITIVE, kinds=STEP_RULES, default="Backtracking"),
            "max_steps": COUNT,
            "stop": POSITIVE,
        },
    ),
    "sgd": SectionKind(
        make=StochasticGradientDescent,
        keys={
            "batch": required(COUNT),
            "step": required(POSITIVE),
            "steps": COUNT,
            "batches": choice("fixed", "fresh"),
            "replace": TRUTH,
            "seed": COUNT,
        },
    ),
}
EXACT = {"exact": SectionKind(make=Exact, keys={"radius": POSITIVE, "exhaustive": TRUTH})}
SMOOTHNESS_KINDS = {
    "estimated": SectionKind(make=Estimated, keys={"factor": POSITIVE, "over": choice("silos", "pooled")}),
    "certified": SectionKind(
        make=Certified,
        keys={"along": choice("segments", "everywhere"), "over": choice("silos", "pooled")},
    ),
}


def _optimizer(kinds: Mapping[str, SectionKind[object]]) -> Key:
    """Return the key of an optimizer: its name, for the default settings, or a table with settings."""
    plain = {
        name: kind.make() for name, kind in kinds.items() if not any(k.required for k in kind.keys.values())
    }
    return replace(one_of(plain), expected=f"{one_of(plain).expected} or a table with a kind", kinds=kinds)


TOLERANCE = either({name: name for name in ("practical", "negligible")}, number, "a number")
SMOOTHNESS = replace(
    either(
        {"certified": Certified(), "estimated": Estimated(), "pooled": Estimated(over="pooled")},
        number,
        "a number",
    ),
    kinds=SMOOTHNESS_KINDS,
    default="estimated",
)
SIZE_OR_UNIFORM = choice("size", "uniform")
SILO_WEIGHTS = Key(
    read=named({"size": "size", "uniform": "uniform"}, table_of(number)),
    expected='"size" or "uniform" or a number per silo, such as {north = 0.25, south = 0.75}',
)

SOLVERS = {
    "newton": SectionKind(make=NewtonFits, keys={"gradient": POSITIVE}),
    "lbfgs": SectionKind(make=FirstOrderFits, keys={"gradient": POSITIVE}),
}
_AVERAGING = {
    "max_updates": INTEGER,
    "radius": NUMBER,
    "exhaustive": TRUTH,
    "solver": _optimizer(SOLVERS),
}
SPACING = either({"none": None}, number, "a number")
_DESCENT = {"tolerance": TOLERANCE, "max_updates": INTEGER}

ALGORITHMS = {
    "Coded": SectionKind(
        make=Coded,
        keys={
            "tolerance": TOLERANCE,
            "coordinates": choice("raw", "whitened"),
            "smoothness": SMOOTHNESS,
            "inner": choice("auto", "step", "secant", "adaptive"),
            "max_rounds": INTEGER,
            "fixed_width": INTEGER,
        },
    ),
    "Adaptive": SectionKind(
        make=Adaptive,
        keys={
            "tolerance": TOLERANCE,
            "coordinates": choice("raw", "whitened"),
            "smoothness": SMOOTHNESS,
            "cost": POSITIVE,
            "max_rounds": INTEGER,
            "radius": NUMBER,
            "solver": _optimizer(SOLVERS),
        },
    ),
    "OneStep": SectionKind(make=OneStep, keys={}),
    "Gradient": SectionKind(make=Gradient, keys={**_DESCENT, "optimizer": _optimizer(OPTIMIZERS)}),
    "Central": SectionKind(make=Central, keys={**_DESCENT, "optimizer": _optimizer({**EXACT, **OPTIMIZERS})}),
    "LocalAverage": SectionKind(
        make=LocalAverage,
        keys={
            "tolerance": TOLERANCE,
            "weights": SILO_WEIGHTS,
            **_AVERAGING,
            "progress_tolerance": NUMBER,
            "lattice": either({"fine": "fine", "none": None}, number, "a number"),
        },
    ),
    "Personalized": SectionKind(
        make=Personalized,
        keys={
            "weights": SIZE_OR_UNIFORM,
            **_AVERAGING,
            "lattice": SPACING,
            "min_active": COUNT,
            "noise": NUMBER,
            "gap": NUMBER,
        },
    ),
}

OPTIONS = {
    "g_bounds": either({"auto": "auto", "none": None}, number, "a number"),
    "clever": choice("covariate", "weight"),
    "submodel": choice("per arm", "contrast"),
    "link": choice("logistic", "linear"),
    "weights": TEXT,
    "weight_ceiling": POSITIVE,
    "cluster": TEXT,
    "cluster_scope": choice("shared", "silo", "spanning"),
    "largest_cluster": COUNT,
    "folds": INTEGER,
    "seed": COUNT,
    "confidence": NUMBER,
    "diagnostics": TRUTH,
    "imputations": COUNT,
    "imputation_sweeps": COUNT,
    "on_refusal": choice("stop", "go on"),
    "sums": choice("auto", "rounded", "exact"),
    "fit_accuracy": POSITIVE,
    "aggregation": choice("auto", "open", "masked"),
}


# Keys of the plan of a deployed run, in addition to the study and the names of its silos.
PLAN = {
    "expires": Key(read=date, expected="a date, such as 2027-06-30"),
    "keys": Key(
        read=table_of(public_key),
        expected='{silo = "128 hexadecimal digits"}, as `fedtmle silo decisions` prints',
    ),
    "server": Key(
        read=server_key,
        expected='"64 hexadecimal digits", the public key that `fedtmle server status` prints',
    ),
    "colluders": COUNT,
}

ABOVE = {"title": TEXT}  # the keys above all sections
PRIVACY = {
    "Privacy": SectionKind(
        make=Privacy,
        keys={
            "epsilon": required(POSITIVE),
            "delta": POSITIVE,
            "colluders": INTEGER,
            "gram": POSITIVE,
            "gradients": POSITIVE,
            "closing": POSITIVE,
            "server": choice("untrusted", "trusted"),
        },
    )
}

SECTIONS = ("target", "variables", "models", "algorithm", "options", "privacy", "plan", "silos")


def homes() -> Mapping[str, set[str]]:
    """Return the keys of each section, to say where a misplaced key belongs."""
    return {
        "target": {name for kind in target_kinds().values() for name in kind.keys},
        "algorithm": {name for kind in ALGORITHMS.values() for name in kind.keys},
        "options": set(OPTIONS),
        "privacy": set(PRIVACY["Privacy"].keys),
        "plan": set(PLAN),
    }

"""The format of a study file: every section, its kinds, their keys, and how each value is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields, replace
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

from fedtmle.algorithms.coded import Coded
from fedtmle.algorithms.gradient import Central, Exact, Gradient
from fedtmle.algorithms.local import LocalAverage, Personalized
from fedtmle.algorithms.optimizers import Backtracking, GradientDescent, Newton, StochasticGradientDescent
from fedtmle.protocol.coded import Certified, Estimated
from fedtmle.studyfile.values import (
    BOUNDS,
    COUNT,
    INTEGER,
    LEVEL,
    LEVELS,
    NUMBER,
    NUMBERS,
    POSITIVE,
    TEXT,
    TRUTH,
    Key,
    Kind,
    choice,
    date,
    either,
    named,
    number,
    one_of,
    public_key,
    required,
    table_of,
    tables,
)
from fedtmle.targets.effects import estimands
from fedtmle.targets.effects.components import AbstractRegime, Static, Stochastic, Threshold
from fedtmle.targets.effects.estimands import AbstractEffect

RULES = {
    "Static": Kind(make=Static, keys={"arm": required(LEVEL)}),
    "Threshold": Kind(
        make=Threshold,
        keys={
            "column": required(TEXT),
            "cut": required(NUMBER),
            "arm": required(LEVEL),
            "otherwise": required(LEVEL),
        },
    ),
    "Stochastic": Kind(make=Stochastic, keys={"shares": required(NUMBERS)}),
}

# How an argument of an estimand is read, by its type.
_BY_TYPE: dict[object, Key] = {
    str: TEXT,
    bool: TRUTH,
    int: INTEGER,
    float: NUMBER,
    tuple[float, float]: BOUNDS,
    tuple[float, ...]: NUMBERS,
    tuple[str, ...]: LEVELS,
}


def target_kinds() -> dict[str, Kind]:
    """Return the kinds of [target], one for each registered estimand."""
    return {
        estimand.__name__: Kind(make=estimand, keys=_target_keys(estimand))
        for estimand in estimands.ESTIMANDS
    }


def _target_keys(estimand: type[AbstractEffect]) -> dict[str, Key]:
    """Return the keys of an estimand: its arguments, without treatment or strata where it has none."""
    unused = {
        *(() if estimand.has_treatment else ("treatment", "arms")),
        *(() if estimand.has_strata else ("strata",)),
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
        return tables(RULES, expected=f"[[target.{name}]] tables")
    if kind not in _BY_TYPE:
        raise TypeError(f"{estimand.__name__}.{name}: a study file cannot hold values of type {kind}")
    return _BY_TYPE[kind]


BACKTRACKING = {
    "Backtracking": Kind(
        make=Backtracking,
        keys={"first": POSITIVE, "armijo": POSITIVE, "grow": POSITIVE, "max_halvings": COUNT},
    )
}
OPTIMIZERS = {
    "newton": Kind(make=Newton, keys={"max_steps": COUNT, "stop": POSITIVE}),
    "descent": Kind(
        make=GradientDescent,
        keys={
            "step": replace(POSITIVE, kinds=BACKTRACKING, default="Backtracking"),
            "max_steps": COUNT,
            "stop": POSITIVE,
        },
    ),
    "sgd": Kind(
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
EXACT = {"exact": Kind(make=Exact, keys={"radius": POSITIVE, "exhaustive": TRUTH})}
SMOOTHNESS_KINDS = {
    "estimated": Kind(make=Estimated, keys={"factor": POSITIVE, "over": choice("silos", "pooled")})
}


def _optimizer(kinds: dict[str, Kind]) -> Key:
    """A name, for its defaults, or a table with settings."""
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

_AVERAGING = {"max_updates": INTEGER, "radius": NUMBER, "exhaustive": TRUTH}
_DESCENT = {"tolerance": TOLERANCE, "max_updates": INTEGER}

ALGORITHMS = {
    "Coded": Kind(
        make=Coded,
        keys={
            "tolerance": TOLERANCE,
            "coordinates": choice("raw", "whitened"),
            "smoothness": SMOOTHNESS,
            "inner": choice("step", "adaptive"),
            "max_rounds": INTEGER,
            "fixed_width": INTEGER,
        },
    ),
    "Gradient": Kind(make=Gradient, keys={**_DESCENT, "optimizer": _optimizer(OPTIMIZERS)}),
    "Central": Kind(make=Central, keys={**_DESCENT, "optimizer": _optimizer({**EXACT, **OPTIMIZERS})}),
    "LocalAverage": Kind(
        make=LocalAverage,
        keys={
            "tolerance": TOLERANCE,
            "weights": SILO_WEIGHTS,
            **_AVERAGING,
            "progress_tolerance": NUMBER,
        },
    ),
    "Personalized": Kind(
        make=Personalized, keys={"weights": SIZE_OR_UNIFORM, **_AVERAGING, "lattice": NUMBER, "noise": NUMBER}
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
}


# What a deployed run's plan holds beside the study and the roster's names.
PLAN = {
    "expires": Key(read=date, expected="a date, such as 2027-06-30"),
    "keys": Key(
        read=table_of(public_key),
        expected='{silo = "64 hexadecimal digits"}, as `fedtmle silo decisions` prints',
    ),
}

SECTIONS = ("target", "models", "algorithm", "options", "plan", "silos")


def homes() -> Mapping[str, set[str]]:
    """Return the keys of each section, to tell where a key that was written elsewhere belongs."""
    return {
        "target": {name for kind in target_kinds().values() for name in kind.keys},
        "algorithm": {name for kind in ALGORITHMS.values() for name in kind.keys},
        "options": set(OPTIONS),
        "plan": set(PLAN),
    }

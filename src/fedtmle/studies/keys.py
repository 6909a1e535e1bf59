"""The format of a study file: every section, its kinds, their keys, and how each value is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedtmle.algorithms.coded import Certified, Coded, Estimated
from fedtmle.algorithms.gradient import Central, Exact, Gradient
from fedtmle.algorithms.local import LocalAverage
from fedtmle.algorithms.optimizers import GradientDescent, Newton
from fedtmle.algorithms.personalized import Personalized
from fedtmle.targets.effects.components import Static, Stochastic, Threshold
from fedtmle.targets.effects.estimands import ATC, ATE, ATT, OR, RR, TSM, OutcomeMean, PolicyMeans


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key: ``read`` turns TOML's value into ours or raises ValueError; ``expected`` says of what kind."""

    read: Callable[[Any], Any]
    expected: str
    required: bool = False


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a section makes: the class, and the keys that are its arguments."""

    make: Callable[..., Any]
    keys: Mapping[str, Key]


def _refuse(value: object) -> Any:
    raise ValueError(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value.strip() else _refuse(value)


def _number(value: Any) -> float:
    """A finite number: TOML has inf and nan, a study has no use for them."""
    real = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    return float(value) if real else _refuse(value)


def _positive(value: Any) -> float:
    return _number(value) if _number(value) > 0 else _refuse(value)


def _integer(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else _refuse(value)


def _count(value: Any) -> int:
    return _integer(value) if _integer(value) >= 0 else _refuse(value)


def _truth(value: Any) -> bool:
    return value if isinstance(value, bool) else _refuse(value)


def _level(value: Any) -> str:
    """A level is text at every silo; a study may write the level 1 as a number."""
    return _text(value) if isinstance(value, str) else str(_integer(value))


def _several(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: tuple(map(read, value)) if isinstance(value, list) and value else _refuse(value)


def _pair(value: Any) -> tuple[float, ...]:
    numbers = _several(_number)(value)
    return numbers if len(numbers) == 2 else _refuse(value)


def _tables(value: Any) -> list[dict[str, Any]]:
    return value if _several(lambda item: isinstance(item, dict) or _refuse(item))(value) else []


def _named(names: Mapping[str, Any], otherwise: Callable[[Any], Any] = _refuse) -> Callable[[Any], Any]:
    """A name from a list, or whatever else ``otherwise`` reads."""
    return lambda value: names[value] if isinstance(value, str) and value in names else otherwise(value)


def _listed(names: Mapping[str, Any]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def _one_of(values: Mapping[str, Any]) -> Key:
    return Key(read=_named(values), expected=_listed(values))


def _choice(*names: str) -> Key:
    return _one_of({name: name for name in names})


def _either(names: Mapping[str, Any], read: Callable[[Any], Any], otherwise: str) -> Key:
    return Key(read=_named(names, read), expected=f"{_listed(names)} or {otherwise}")


TEXT = Key(read=_text, expected="text in quotes")
TEXTS = Key(read=_several(_text), expected='a list of texts, such as ["a", "b"]')
NUMBER = Key(read=_number, expected="a number")
NUMBERS = Key(read=_several(_number), expected="a list of numbers")
POSITIVE = Key(read=_positive, expected="a number above 0")
INTEGER = Key(read=_integer, expected="a whole number")
COUNT = Key(read=_count, expected="a whole number of at least 0")
TRUTH = Key(read=_truth, expected="true or false")
LEVEL = Key(read=_level, expected="a level, text in quotes")
LEVELS = Key(read=_several(_level), expected='a list of levels, such as ["0", "1"]')
BOUNDS = Key(read=_pair, expected="[low, high], two numbers")
TOLERANCE = _either({name: name for name in ("practical", "negligible")}, _number, "a number")
SMOOTHNESS = _either(
    {"certified": Certified(), "estimated": Estimated(), "pooled": Estimated(over="pooled")},
    _number,
    "a number",
)
_OPTIMIZERS = {"newton": Newton(), "descent": GradientDescent()}
SILO_WEIGHTS = _choice("size", "uniform")


def _required(key: Key) -> Key:
    return replace(key, required=True)


_OUTCOME = {
    "outcome": _required(TEXT),
    "outcome_bounds": BOUNDS,
    "outcome_type": _choice("auto", "binary", "continuous", "count"),
}
_TREATMENT = {"treatment": _required(TEXT), "arms": LEVELS}
_STRATA = {"strata": TEXT}
_EFFECT = {**_OUTCOME, **_TREATMENT, **_STRATA}

TARGETS = {
    **{effect.__name__: Kind(make=effect, keys=_EFFECT) for effect in (ATE, TSM, RR, OR)},
    **{effect.__name__: Kind(make=effect, keys={**_OUTCOME, **_TREATMENT}) for effect in (ATT, ATC)},
    "OutcomeMean": Kind(make=OutcomeMean, keys={**_OUTCOME, **_STRATA}),
    "PolicyMeans": Kind(
        make=PolicyMeans,
        keys={**_EFFECT, "rules": Key(read=_tables, expected="[[target.rules]] tables", required=True)},
    ),
}

RULES = {
    "Static": Kind(make=Static, keys={"arm": _required(LEVEL)}),
    "Threshold": Kind(
        make=Threshold,
        keys={
            "column": _required(TEXT),
            "cut": _required(NUMBER),
            "arm": _required(LEVEL),
            "otherwise": _required(LEVEL),
        },
    ),
    "Stochastic": Kind(make=Stochastic, keys={"shares": _required(NUMBERS)}),
}


def _model(*families: str) -> dict[str, Key]:
    return {"formula": TEXT, "family": _choice("auto", *families), "ridge": NUMBER, "supplied": TEXTS}


MODELS = {
    "outcome": _model("binomial", "gaussian", "poisson"),
    "treatment": _model("binomial"),
    "missingness": _model("binomial"),
}

_AVERAGING = {"weights": SILO_WEIGHTS, "max_updates": INTEGER, "radius": NUMBER, "exhaustive": TRUTH}
_DESCENT = {"tolerance": TOLERANCE, "max_updates": INTEGER}

ALGORITHMS = {
    "Coded": Kind(
        make=Coded,
        keys={
            "tolerance": TOLERANCE,
            "coordinates": _choice("raw", "whitened"),
            "smoothness": SMOOTHNESS,
            "inner": _choice("step", "adaptive"),
            "max_rounds": INTEGER,
            "fixed_width": INTEGER,
        },
    ),
    "Gradient": Kind(make=Gradient, keys={**_DESCENT, "optimizer": _one_of(_OPTIMIZERS)}),
    "Central": Kind(make=Central, keys={**_DESCENT, "optimizer": _one_of({"exact": Exact(), **_OPTIMIZERS})}),
    "LocalAverage": Kind(
        make=LocalAverage, keys={"tolerance": TOLERANCE, **_AVERAGING, "progress_tolerance": NUMBER}
    ),
    "Personalized": Kind(make=Personalized, keys={**_AVERAGING, "lattice": NUMBER, "noise": NUMBER}),
}

OPTIONS = {
    "g_bounds": _either({"auto": "auto", "none": None}, _number, "a number"),
    "clever": _choice("covariate", "weight"),
    "submodel": _choice("per arm", "contrast"),
    "link": _choice("logistic", "linear"),
    "weights": TEXT,
    "weight_ceiling": POSITIVE,
    "cluster": TEXT,
    "largest_cluster": COUNT,
    "folds": INTEGER,
    "seed": COUNT,
    "confidence": NUMBER,
}

RELEASE = {"silos": TEXTS}

SECTIONS = ("target", "models", "algorithm", "options", "silos", "release")

# Where a key belongs, to tell someone who wrote it elsewhere.
HOMES = {
    "target": {name for kind in TARGETS.values() for name in kind.keys},
    "algorithm": {name for kind in ALGORITHMS.values() for name in kind.keys},
    "options": set(OPTIONS),
}

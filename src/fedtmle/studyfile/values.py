"""How the keys of a study file are read: each value turned into ours, or refused."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedtmle.errors import InputError
from fedtmle.initial.glm import GLM, Supplied
from fedtmle.initial.pilot import Pilot
from fedtmle.initial.superlearner import PerSilo, SuperLearner
from fedtmle.initial.trees import GradientBoostedTrees


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key: ``read`` turns TOML's value into ours or raises ValueError; ``expected`` says of what kind.

    Where ``kinds`` are given, a table written here makes one of them (``default`` if it does not say
    which); with ``several`` the value is a list of such tables.
    """

    read: Callable[[Any], Any]
    expected: str
    required: bool = False
    kinds: Mapping[str, Kind] | None = None
    default: str | None = None
    several: bool = False


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a section makes: the class, and the keys that are its arguments."""

    make: Callable[..., Any]
    keys: Mapping[str, Key]


def refuse(value: object) -> Any:
    raise ValueError(value)


def text(value: Any) -> str:
    return value if isinstance(value, str) and value.strip() else refuse(value)


def number(value: Any) -> float:
    """A finite number: TOML has inf and nan, a study has no use for them."""
    real = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < math.inf
    return float(value) if real else refuse(value)


def positive(value: Any) -> float:
    return number(value) if number(value) > 0 else refuse(value)


def integer(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else refuse(value)


def count(value: Any) -> int:
    return integer(value) if integer(value) >= 0 else refuse(value)


def truth(value: Any) -> bool:
    return value if isinstance(value, bool) else refuse(value)


def level(value: Any) -> str:
    """A level is text at every silo; a study may write the level 1 as a number."""
    return text(value) if isinstance(value, str) else str(integer(value))


def date(value: Any) -> datetime.date:
    """A day, without a time."""
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return value
    raise ValueError(value)


def public_key(value: Any) -> bytes:
    """An Ed25519 public key: 64 hexadecimal digits."""
    key = bytes.fromhex(text(value))
    return key if len(key) == 32 else refuse(value)


def several(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: tuple(map(read, value)) if isinstance(value, list) and value else refuse(value)


def pair(value: Any) -> tuple[float, ...]:
    numbers = several(number)(value)
    return numbers if len(numbers) == 2 else refuse(value)


def table_of(read: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    """A table whose values are all of one sort."""
    return lambda value: (
        {name: read(item) for name, item in value.items()}
        if isinstance(value, dict) and value
        else refuse(value)
    )


def named(names: Mapping[str, Any], otherwise: Callable[[Any], Any] = refuse) -> Callable[[Any], Any]:
    """A name from a list, or whatever else ``otherwise`` reads."""
    return lambda value: names[value] if isinstance(value, str) and value in names else otherwise(value)


def listed(names: Mapping[str, Any]) -> str:
    return " or ".join(f'"{name}"' for name in names)


def one_of(values: Mapping[str, Any]) -> Key:
    return Key(read=named(values), expected=listed(values))


def choice(*names: str) -> Key:
    return one_of({name: name for name in names})


def either(names: Mapping[str, Any], read: Callable[[Any], Any], otherwise: str) -> Key:
    return Key(read=named(names, read), expected=f"{listed(names)} or {otherwise}")


def required(key: Key) -> Key:
    return replace(key, required=True)


def table(kinds: Mapping[str, Kind], *, default: str | None = None, expected: str = "a table") -> Key:
    """A table that makes one of some kinds."""
    return Key(read=refuse, expected=expected, kinds=kinds, default=default)


def tables(kinds: Mapping[str, Kind], *, default: str | None = None, expected: str) -> Key:
    """A list of such tables."""
    return Key(read=refuse, expected=expected, required=True, kinds=kinds, default=default, several=True)


TEXT = Key(read=text, expected="text in quotes")
TEXTS = Key(read=several(text), expected='a list of texts, such as ["a", "b"]')
NUMBER = Key(read=number, expected="a number")
NUMBERS = Key(read=several(number), expected="a list of numbers")
POSITIVE = Key(read=positive, expected="a number above 0")
INTEGER = Key(read=integer, expected="a whole number")
COUNT = Key(read=count, expected="a whole number of at least 0")
TRUTH = Key(read=truth, expected="true or false")
LEVEL = Key(read=level, expected="a level, text in quotes")
LEVELS = Key(read=several(level), expected='a list of levels, such as ["0", "1"]')
BOUNDS = Key(read=pair, expected="[low, high], two numbers")


# The format of [models]: formulas, predictions, pilots and super learners.


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

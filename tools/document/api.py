"""`docs/api.md`: everything that `import fedtmle as ft` offers, from its docstrings."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import fedtmle as ft
from fedtmle import errors
from fedtmle.targets.effects import estimands
from fedtmle.targets.regimes.estimands import REGIME_ESTIMANDS
from fedtmle.targets.time.estimands import TIME_ESTIMANDS

ESTIMANDS_TITLE = "A study"  # the group that has the registered estimands as well
GROUPS = {
    "Run": ("run", "solve", "load", "plots"),
    "Before a run": ("draft", "read_study", "validate", "preflight", "Policy"),
    ESTIMANDS_TITLE: (
        "Study",
        "Privacy",
        "Variables",
        "Variable",
        "ESTIMANDS",
        "TIME_ESTIMANDS",
        "REGIME_ESTIMANDS",
    ),
    "An estimand of your own": (
        "AbstractEffect",
        "AbstractArmEffect",
        "AbstractTimeEffect",
        "AbstractRegimeEffect",
        "AbstractTarget",
        "Summary",
        "Scale",
    ),
    "Rules": ("Static", "Threshold", "Stochastic", "Planned", "Onset", "Shift"),
    "Models": ("GLM", "Supplied", "Pilot", "PerSilo", "GradientBoostedTrees", "SuperLearner"),
    "Algorithms": ("Central", "Gradient", "LocalAverage", "Coded", "Adaptive", "OneStep", "Personalized"),
    "Settings of algorithms": (
        "Exact",
        "GradientDescent",
        "Backtracking",
        "Schedule",
        "Newton",
        "StochasticGradientDescent",
        "NewtonFits",
        "FirstOrderFits",
        "Certified",
        "Estimated",
    ),
    "Targets": ("Mean",),
    "Target trials": ("TargetTrial", "Cdm", "emulate"),
    "Data": ("LongTable",),
    "Results": ("StudyResult", "Result", "Estimate", "Status", "Transcript", "e_value"),
    "A target or an algorithm of your own": (
        "AbstractProblem",
        "PoolableRows",
        "AbstractSubmodel",
        "GeneralisedLinear",
        "AbstractAlgorithm",
        "AbstractQuery",
        "IntegerSums",
        "check_problem",
    ),
    "Errors": tuple(name for name, error in vars(errors).items() if inspect.isclass(error)),
}


def _registered() -> tuple[type[ft.AbstractEffect], ...]:
    return (*estimands.ESTIMANDS, *TIME_ESTIMANDS, *REGIME_ESTIMANDS)


def page() -> str:
    """The whole page."""
    registered = tuple(estimand.__name__ for estimand in _registered())
    groups = {
        title: (*names, *registered) if title == ESTIMANDS_TITLE else names for title, names in GROUPS.items()
    }
    grouped = {name for names in groups.values() for name in names}
    rest = tuple(name for name in ft.__all__ if name not in grouped)
    groups |= {"More": rest} if rest else {}
    head = [
        "# API reference",
        "",
        "`import fedtmle as ft`. Written from the docstrings by `python -m tools.document`.",
        "",
    ]
    body = [line for title, names in groups.items() for line in (f"## {title}", "", *_group(names))]
    return "\n".join([*head, *body]).rstrip() + "\n"


def _group(names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        thing = getattr(ft, name)
        yield f"### `ft.{name}`"
        yield ""
        if isinstance(thing, tuple):
            yield "The registered estimands: what a study file's `kind` and `import fedtmle` offer."
            yield ""
            yield from estimand_table()
            yield ""
        elif isinstance(thing, ModuleType):
            yield from _doc(thing)
            for member, function in inspect.getmembers(thing, inspect.isfunction):
                if function.__module__ == thing.__name__ and not member.startswith("_"):
                    yield from _code(f"ft.{name}.{member}", function)
                    yield from _doc(function)
        else:
            yield from _one(name, thing)


def estimand_table() -> Iterator[str]:
    """Yield the lines of a table of the registered estimands."""
    yield "| you want | write |"
    yield "|---|---|"
    yield from (f"| {estimand.description} | `{estimand.__name__}` |" for estimand in _registered())


def _one(name: str, thing: Any) -> Iterator[str]:
    if isinstance(thing, type) and issubclass(thing, enum.Enum):
        yield from _doc(thing)
        yield from (f"* `{member.name}`: {member.value}" for member in thing)
        yield ""
        return
    yield from _code(f"ft.{name}", thing)
    yield from _doc(thing)
    if isinstance(thing, type):
        yield from _members(thing)


def _code(name: str, thing: Any) -> Iterator[str]:
    """The signature, one argument a line where it is long; annotations as they are written."""
    try:
        signature = inspect.signature(thing)
    except (TypeError, ValueError):
        return
    parameters = [_parameter(parameter) for parameter in signature.parameters.values()]
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    line = f"{name}({', '.join(parameters)})"
    yield "```text"
    if len(line) <= 90:
        yield line
    else:
        yield f"{name}("
        yield from (f"    {parameter}," for parameter in parameters)
        yield ")"
    yield "```"
    yield ""


def _parameter(parameter: inspect.Parameter) -> str:
    empty = inspect.Parameter.empty
    kind = "" if parameter.annotation is empty else f": {parameter.annotation}"
    default = "" if parameter.default is empty else f" = {parameter.default!r}"
    return f"{parameter.name}{kind}{default}"


def _doc(thing: Any) -> Iterator[str]:
    yield from (inspect.getdoc(thing) or "").splitlines()
    yield ""


def _members(thing: type) -> Iterator[str]:
    """Public methods and properties that the class itself defines, by the first line of their text."""
    fields = {field.name for field in dataclasses.fields(thing)} if dataclasses.is_dataclass(thing) else set()
    for name, member in vars(thing).items():
        if name.startswith("_") or name in fields:
            continue
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        text = inspect.getdoc(function) if inspect.isfunction(function) else None
        if text:
            call = "" if isinstance(member, property) else "()"
            yield f"* `{name}{call}`: {' '.join(text.split())}"
    yield ""

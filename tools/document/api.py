"""`docs/api.md`: everything that `import fedtmle as ft` offers, by group."""

from __future__ import annotations

import inspect
from collections.abc import Iterator

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
        "PrivacyPlan",
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

VALUES = {
    "ESTIMANDS": "the estimands of a treatment at one time, in the order of the study file's template",
    "TIME_ESTIMANDS": "the estimands of time to an event",
    "REGIME_ESTIMANDS": "the estimands of treatment over time",
}


def _registered() -> tuple[type[ft.AbstractEffect], ...]:
    return (*estimands.ESTIMANDS, *TIME_ESTIMANDS, *REGIME_ESTIMANDS)


def page() -> str:
    """Return the page that lists every public name by group; Sphinx writes a page of each."""
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
        "`import fedtmle as ft` offers these names. Examples also use `np` for numpy, and a `study` of a",
        "treatment in two `silos`, with its `result`, as in the example of `fedtmle.Study`.",
        "",
    ]
    body = [line for title, names in groups.items() for line in (f"## {title}", "", *_group(names))]
    return "\n".join([*head, *body]).rstrip() + "\n"


def _group(names: tuple[str, ...]) -> Iterator[str]:
    """Yield the lines of one group: what is a value, an explanation of it, then a list of the rest."""
    values = [name for name in names if isinstance(getattr(ft, name), tuple)]
    yield from (f"* `ft.{name}`: {VALUES[name]}" for name in values)
    yield from [""] if values else []
    yield from ("```{eval-rst}", ".. autosummary::", "   :toctree: generated", "   :nosignatures:", "")
    yield from (f"   fedtmle.{name}" for name in names if name not in values)
    yield from ("```", "")


def estimand_table() -> Iterator[str]:
    """Yield the lines of a table of the registered estimands."""
    yield "| you want | write |"
    yield "|---|---|"
    yield from (f"| {estimand.description} | `{estimand.__name__}` |" for estimand in _registered())

"""Federated targeted maximum likelihood estimation.

State a target, hand over silos, run any of the paper's algorithms:

    >>> import fedtmle as ft
    >>> problem = ft.Mean(bounds=(0.0, 10.0))
    >>> silos = {"a": [1.0, 2.0, 6.0], "b": [4.0, 7.0]}
    >>> result = ft.solve(problem, problem.start(5.0), silos, ft.Gradient(optimizer=ft.Newton()))
    >>> float(result.psi[0])
    4.0

Names are imported when first used, so that ``import fedtmle`` costs little.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedtmle.version import __version__ as __version__

_HOME = {
    "Mean": "fedtmle.targets.mean",
    "TwoArm": "fedtmle.targets.two_arm",
    "OptimalTransport": "fedtmle.targets.optimal_transport",
    "LogisticFluctuation": "fedtmle.model.density.fluctuation",
    "ExponentialTilt": "fedtmle.model.density.fluctuation",
    "Central": "fedtmle.algorithms.gradient",
    "Exact": "fedtmle.algorithms.gradient",
    "Gradient": "fedtmle.algorithms.gradient",
    "GradientDescent": "fedtmle.algorithms.optimizers",
    "Backtracking": "fedtmle.algorithms.optimizers",
    "Newton": "fedtmle.algorithms.optimizers",
    "StochasticGradientDescent": "fedtmle.algorithms.stochastic",
    "LocalAverage": "fedtmle.algorithms.local",
    "Coded": "fedtmle.algorithms.coded",
    "Certified": "fedtmle.algorithms.coded",
    "Estimated": "fedtmle.algorithms.coded",
    "Personalized": "fedtmle.algorithms.personalized",
    "Status": "fedtmle.algorithms.outcome",
    "Result": "fedtmle.runtime.result",
    "Transcript": "fedtmle.runtime.transcript",
    "check_problem": "fedtmle.model.check",
    "solve": "fedtmle.solver",
    "ATE": "fedtmle.targets.effects.estimands",
    "ATT": "fedtmle.targets.effects.estimands",
    "ATC": "fedtmle.targets.effects.estimands",
    "RR": "fedtmle.targets.effects.estimands",
    "OR": "fedtmle.targets.effects.estimands",
    "TSM": "fedtmle.targets.effects.estimands",
    "OutcomeMean": "fedtmle.targets.effects.estimands",
    "PolicyMeans": "fedtmle.targets.effects.estimands",
    "Static": "fedtmle.targets.effects.components",
    "Threshold": "fedtmle.targets.effects.components",
    "Stochastic": "fedtmle.targets.effects.components",
    "GLM": "fedtmle.initial.glm",
    "Supplied": "fedtmle.initial.glm",
    "Pilot": "fedtmle.initial.pilot",
    "GradientBoostedTrees": "fedtmle.initial.trees",
    "PerSilo": "fedtmle.initial.superlearner",
    "SuperLearner": "fedtmle.initial.superlearner",
    "Study": "fedtmle.algorithms.study",
    "StudyResult": "fedtmle.studies.result",
    "run": "fedtmle.studies.run",
    "plots": "fedtmle.plots",
    "load": "fedtmle.studies.result",
}

if TYPE_CHECKING:  # what type checkers and editors see; at run time, __getattr__ below
    from fedtmle import plots
    from fedtmle.algorithms.coded import Certified, Coded, Estimated
    from fedtmle.algorithms.gradient import Central, Exact, Gradient
    from fedtmle.algorithms.local import LocalAverage
    from fedtmle.algorithms.optimizers import Backtracking, GradientDescent, Newton
    from fedtmle.algorithms.outcome import Status
    from fedtmle.algorithms.personalized import Personalized
    from fedtmle.algorithms.stochastic import StochasticGradientDescent
    from fedtmle.algorithms.study import Study
    from fedtmle.initial.glm import GLM, Supplied
    from fedtmle.initial.pilot import Pilot
    from fedtmle.initial.superlearner import PerSilo, SuperLearner
    from fedtmle.initial.trees import GradientBoostedTrees
    from fedtmle.model.check import check_problem
    from fedtmle.model.density.fluctuation import ExponentialTilt, LogisticFluctuation
    from fedtmle.runtime.result import Result
    from fedtmle.runtime.transcript import Transcript
    from fedtmle.solver import solve
    from fedtmle.studies.result import StudyResult, load
    from fedtmle.studies.run import run
    from fedtmle.targets.effects.components import Static, Stochastic, Threshold
    from fedtmle.targets.effects.estimands import ATC, ATE, ATT, OR, RR, TSM, OutcomeMean, PolicyMeans
    from fedtmle.targets.mean import Mean
    from fedtmle.targets.optimal_transport import OptimalTransport
    from fedtmle.targets.two_arm import TwoArm

__all__ = [
    "ATC",
    "ATE",
    "ATT",
    "GLM",
    "OR",
    "RR",
    "TSM",
    "Backtracking",
    "Central",
    "Certified",
    "Coded",
    "Estimated",
    "Exact",
    "ExponentialTilt",
    "Gradient",
    "GradientBoostedTrees",
    "GradientDescent",
    "LocalAverage",
    "LogisticFluctuation",
    "Mean",
    "Newton",
    "OptimalTransport",
    "OutcomeMean",
    "PerSilo",
    "Personalized",
    "Pilot",
    "PolicyMeans",
    "Result",
    "Static",
    "Status",
    "Stochastic",
    "StochasticGradientDescent",
    "Study",
    "StudyResult",
    "SuperLearner",
    "Supplied",
    "Threshold",
    "Transcript",
    "TwoArm",
    "check_problem",
    "load",
    "plots",
    "run",
    "solve",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedtmle' has no attribute '{name}'")
    home = importlib.import_module(_HOME[name])
    value = home if home.__name__ == f"fedtmle.{name}" else getattr(home, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

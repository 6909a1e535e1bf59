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
    "Central": "fedtmle.algorithms.gradient",
    "Exact": "fedtmle.algorithms.gradient",
    "Gradient": "fedtmle.algorithms.gradient",
    "GradientDescent": "fedtmle.algorithms.optimizers",
    "Backtracking": "fedtmle.algorithms.optimizers",
    "Schedule": "fedtmle.algorithms.optimizers",
    "Newton": "fedtmle.algorithms.optimizers",
    "StochasticGradientDescent": "fedtmle.algorithms.optimizers",
    "LocalAverage": "fedtmle.algorithms.local",
    "NewtonFits": "fedtmle.model.fit",
    "FirstOrderFits": "fedtmle.model.fit",
    "Coded": "fedtmle.algorithms.coded",
    "Adaptive": "fedtmle.algorithms.local",
    "OneStep": "fedtmle.algorithms.gradient",
    "Certified": "fedtmle.protocol.coded",
    "Estimated": "fedtmle.protocol.coded",
    "Personalized": "fedtmle.algorithms.local",
    "Status": "fedtmle.protocol.outcome",
    "Result": "fedtmle.runtime.result",
    "Transcript": "fedtmle.runtime.ledger",
    "check_problem": "fedtmle.model.check",
    "solve": "fedtmle.solver",
    "ESTIMANDS": "fedtmle.targets.effects.estimands",
    "TIME_ESTIMANDS": "fedtmle.targets.time.estimands",
    "AbstractTimeEffect": "fedtmle.targets.time.estimands",
    "REGIME_ESTIMANDS": "fedtmle.targets.regimes.estimands",
    "AbstractRegimeEffect": "fedtmle.targets.regimes.estimands",
    "Planned": "fedtmle.targets.regimes.estimands",
    "Onset": "fedtmle.targets.regimes.estimands",
    "Shift": "fedtmle.targets.regimes.estimands",
    "AbstractEffect": "fedtmle.targets.effects.estimands",
    "AbstractArmEffect": "fedtmle.targets.effects.estimands",
    "Scale": "fedtmle.targets.effects.estimands",
    "Summary": "fedtmle.targets.effects.estimands",
    "Static": "fedtmle.targets.effects.components",
    "Threshold": "fedtmle.targets.effects.components",
    "Stochastic": "fedtmle.targets.effects.components",
    "GLM": "fedtmle.initial.glm",
    "Supplied": "fedtmle.initial.glm",
    "Pilot": "fedtmle.initial.superlearner",
    "GradientBoostedTrees": "fedtmle.initial.superlearner",
    "PerSilo": "fedtmle.initial.superlearner",
    "SuperLearner": "fedtmle.initial.superlearner",
    "Study": "fedtmle.programs.study",
    "AbstractTarget": "fedtmle.programs.target",
    "Privacy": "fedtmle.model.budget",
    "StudyResult": "fedtmle.results.result",
    "e_value": "fedtmle.results.sensitivity",
    "run": "fedtmle.studies.run",
    "AbstractProblem": "fedtmle.model.problem",
    "PoolableRows": "fedtmle.model.problem",
    "Estimate": "fedtmle.model.problem",
    "AbstractSubmodel": "fedtmle.model.submodel",
    "GeneralisedLinear": "fedtmle.model.submodel",
    "AbstractAlgorithm": "fedtmle.algorithms.base",
    "AbstractQuery": "fedtmle.protocol.query",
    "IntegerSums": "fedtmle.protocol.query",
    "Policy": "fedtmle.protocol.guard",
    "TargetTrial": "fedtmle.trials.trial",
    "Cdm": "fedtmle.trials.cohort",
    "emulate": "fedtmle.trials.emulate",
    "Variable": "fedtmle.initial.variables",
    "Variables": "fedtmle.initial.variables",
    "LongTable": "fedtmle.data.silofile",
    "draft": "fedtmle.studyfile.draft",
    "read_study": "fedtmle.studyfile.file",
    "validate": "fedtmle.studies.validate",
    "preflight": "fedtmle.studies.preflight",
    "PrivacyPlan": "fedtmle.studies.privacy_cost",
    "FedTMLEError": "fedtmle.errors",
    "InputError": "fedtmle.errors",
    "DataError": "fedtmle.errors",
    "ChangedDataError": "fedtmle.errors",
    "ContributionError": "fedtmle.errors",
    "FitError": "fedtmle.errors",
    "PrecisionError": "fedtmle.errors",
    "CheckFailedError": "fedtmle.errors",
    "NumericalError": "fedtmle.errors",
    "ProtocolError": "fedtmle.errors",
    "DecodeError": "fedtmle.errors",
    "RefusedError": "fedtmle.errors",
    "Reached": "fedtmle.errors",
    "DeadlineError": "fedtmle.errors",
    "JournalError": "fedtmle.errors",
    "plots": "fedtmle.plots",
    "load": "fedtmle.results.result",
}

if TYPE_CHECKING:  # for type checkers and editors; at run time, __getattr__ below
    from fedtmle import plots as plots
    from fedtmle.algorithms.base import AbstractAlgorithm as AbstractAlgorithm
    from fedtmle.algorithms.coded import Coded as Coded
    from fedtmle.algorithms.gradient import Central as Central
    from fedtmle.algorithms.gradient import Exact as Exact
    from fedtmle.algorithms.gradient import Gradient as Gradient
    from fedtmle.algorithms.gradient import OneStep as OneStep
    from fedtmle.algorithms.local import Adaptive as Adaptive
    from fedtmle.algorithms.local import LocalAverage as LocalAverage
    from fedtmle.algorithms.local import Personalized as Personalized
    from fedtmle.algorithms.optimizers import Backtracking as Backtracking
    from fedtmle.algorithms.optimizers import GradientDescent as GradientDescent
    from fedtmle.algorithms.optimizers import Newton as Newton
    from fedtmle.algorithms.optimizers import Schedule as Schedule
    from fedtmle.algorithms.optimizers import StochasticGradientDescent as StochasticGradientDescent
    from fedtmle.data.silofile import LongTable as LongTable
    from fedtmle.errors import ChangedDataError as ChangedDataError
    from fedtmle.errors import CheckFailedError as CheckFailedError
    from fedtmle.errors import ContributionError as ContributionError
    from fedtmle.errors import DataError as DataError
    from fedtmle.errors import DeadlineError as DeadlineError
    from fedtmle.errors import DecodeError as DecodeError
    from fedtmle.errors import FedTMLEError as FedTMLEError
    from fedtmle.errors import FitError as FitError
    from fedtmle.errors import InputError as InputError
    from fedtmle.errors import JournalError as JournalError
    from fedtmle.errors import NumericalError as NumericalError
    from fedtmle.errors import PrecisionError as PrecisionError
    from fedtmle.errors import ProtocolError as ProtocolError
    from fedtmle.errors import Reached as Reached
    from fedtmle.errors import RefusedError as RefusedError
    from fedtmle.initial.glm import GLM as GLM
    from fedtmle.initial.glm import Supplied as Supplied
    from fedtmle.initial.superlearner import GradientBoostedTrees as GradientBoostedTrees
    from fedtmle.initial.superlearner import PerSilo as PerSilo
    from fedtmle.initial.superlearner import Pilot as Pilot
    from fedtmle.initial.superlearner import SuperLearner as SuperLearner
    from fedtmle.initial.variables import Variable as Variable
    from fedtmle.initial.variables import Variables as Variables
    from fedtmle.model.budget import Privacy as Privacy
    from fedtmle.model.check import check_problem as check_problem
    from fedtmle.model.fit import FirstOrderFits as FirstOrderFits
    from fedtmle.model.fit import NewtonFits as NewtonFits
    from fedtmle.model.problem import AbstractProblem as AbstractProblem
    from fedtmle.model.problem import Estimate as Estimate
    from fedtmle.model.problem import PoolableRows as PoolableRows
    from fedtmle.model.submodel import AbstractSubmodel as AbstractSubmodel
    from fedtmle.model.submodel import GeneralisedLinear as GeneralisedLinear
    from fedtmle.programs.study import Study as Study
    from fedtmle.programs.target import AbstractTarget as AbstractTarget
    from fedtmle.protocol.coded import Certified as Certified
    from fedtmle.protocol.coded import Estimated as Estimated
    from fedtmle.protocol.outcome import Status as Status
    from fedtmle.protocol.policy import Policy as Policy
    from fedtmle.protocol.query import AbstractQuery as AbstractQuery
    from fedtmle.protocol.query import IntegerSums as IntegerSums
    from fedtmle.results.result import StudyResult as StudyResult
    from fedtmle.results.result import load as load
    from fedtmle.results.sensitivity import e_value as e_value
    from fedtmle.runtime.ledger import Transcript as Transcript
    from fedtmle.runtime.result import Result as Result
    from fedtmle.solver import solve as solve
    from fedtmle.studies.preflight import preflight as preflight
    from fedtmle.studies.privacy_cost import PrivacyPlan as PrivacyPlan
    from fedtmle.studies.run import run as run
    from fedtmle.studies.validate import validate as validate
    from fedtmle.studyfile.draft import draft as draft
    from fedtmle.studyfile.file import read_study as read_study
    from fedtmle.targets.effects.components import Static as Static
    from fedtmle.targets.effects.components import Stochastic as Stochastic
    from fedtmle.targets.effects.components import Threshold as Threshold
    from fedtmle.targets.effects.estimands import *  # noqa: F403 - all that is public there is public here
    from fedtmle.targets.mean import Mean as Mean
    from fedtmle.targets.regimes.estimands import *  # noqa: F403 - likewise
    from fedtmle.targets.regimes.estimands import Onset as Onset
    from fedtmle.targets.regimes.estimands import Planned as Planned
    from fedtmle.targets.regimes.estimands import Shift as Shift
    from fedtmle.targets.time.estimands import *  # noqa: F403 - likewise
    from fedtmle.trials.cohort import Cdm as Cdm
    from fedtmle.trials.emulate import emulate as emulate
    from fedtmle.trials.trial import TargetTrial as TargetTrial


def __getattr__(name: str) -> Any:
    if name == "__all__":  # includes the estimands, whose module is loaded only now
        return sorted([*_HOME, *_estimands()])
    if name in _HOME:
        home = importlib.import_module(_HOME[name])
        value = home if home.__name__ == f"fedtmle.{name}" else getattr(home, name)
        globals()[name] = value
        return value
    if not name.startswith("_") and name in _estimands():
        return _estimands()[name]
    raise AttributeError(f"module 'fedtmle' has no attribute '{name}'")


def _estimands() -> dict[str, type]:
    """Return the registered estimands by name."""
    from fedtmle.targets.effects import estimands
    from fedtmle.targets.regimes.estimands import REGIME_ESTIMANDS
    from fedtmle.targets.time.estimands import TIME_ESTIMANDS

    every = (*estimands.ESTIMANDS, *TIME_ESTIMANDS, *REGIME_ESTIMANDS)
    return {estimand.__name__: estimand for estimand in every}


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__")})

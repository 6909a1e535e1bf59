"""Targets with a problem of their own, which other distributions bring.

A target of a study is usually made of means under regimes in populations (`AbstractEffect`). An
`AbstractTarget` says itself which columns it reads, which models it needs, how the silos fit them, and which
problem is targeted. Everything else of a study is then the same for it. A distribution declares its class in
the entry point group ``fedtmle.targets`` (`targets.residuals`), and study files can name it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from fedtmle.errors import InputError
from fedtmle.initial.crossfit import Fitted
from fedtmle.model.problem import Estimate
from fedtmle.programs.fitting import Fitting
from fedtmle.programs.missing import MissingCounts
from fedtmle.programs.nuisance import Regression, regressions
from fedtmle.programs.sites import ComparedSilos
from fedtmle.programs.study import Study
from fedtmle.programs.superlearner import begin_fits, fit_together
from fedtmle.protocol.query import Flow, Problem
from fedtmle.targets.diagnostics import Overlap
from fedtmle.targets.effects.components import Component, Everyone, Static
from fedtmle.targets.effects.estimands import AbstractEffect, Summary
from fedtmle.targets.effects.prepare import ArmResponse, EffectColumns
from fedtmle_core.types import Array, Family

Levels = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class AbstractTarget(AbstractEffect):
    """Base of targets with a problem of their own that studies can name.

    A subclass is a frozen dataclass whose fields are the keys of its section in a study file. It gives
    `question_stem`, `summarise` and `start`, and says by its class attributes which models it needs
    (``roles``) and which options of a study it leaves at their defaults. `more_columns` names columns
    besides outcome and treatment. A model of a role that a study does not have is a field of the target,
    called ``<role>_model``, and in a study file the section [models.<role>].

    Raises
    ------
    InputError
        An argument is wrong, or does not fit another; the message names it.

    Examples
    --------
    >>> issubclass(ft.AbstractTarget, ft.AbstractEffect)
    True
    """

    has_treatment: ClassVar[bool] = False
    has_strata: ClassVar[bool] = False
    roles: ClassVar[tuple[str, ...]] = ()
    fixed_options: ClassVar[tuple[str, ...]] = ("weights", "cluster", "clever", "submodel", "link")
    may_impute: ClassVar[bool] = False
    keeps_own: ClassVar[bool] = False

    @property
    def fitted_roles(self) -> tuple[str, ...]:  # type: ignore[override]  # a constant of the class elsewhere
        return self.roles

    def own_models(self) -> dict[str, Any]:
        return {role: getattr(self, f"{role}_model") for role in self.roles if hasattr(self, f"{role}_model")}

    @abstractmethod
    def start(self, begun: BegunStudy) -> Flow[StartedTarget]:
        """Fit what the problem needs, and return the problem with its initial law.

        Every party runs this generator on the same broadcasts. It yields queries, or hands over to the flows
        that ``begun`` has, and reads no data itself.
        """

    @abstractmethod
    def summarise(self, psi: Array, label: str) -> list[Summary]:
        """Return the numbers to report, from all coordinates of the problem's psi; ``label`` is empty."""


@dataclass(frozen=True, kw_only=True)
class StartedTarget:
    """A problem, where its targeting starts, and the fits behind it by role.

    ``g_floor`` is the bound at which probabilities are truncated, 0 if none is.
    """

    problem: Problem
    law: object
    fits: Mapping[str, Fitted] = field(default_factory=dict)
    g_floor: float = 0.0


@dataclass(frozen=True, kw_only=True)
class BegunStudy:
    """The start of a target: the study, the roles of its columns, their levels, and n pooled records."""

    study: Study
    columns: EffectColumns
    levels: Levels
    n: int
    g_floor: float  # the study's bound on a propensity score (``g_bounds``)

    def regression(self, role: str) -> Regression:
        """Return the regression of outcome or treatment that the study declares, on the unit scale."""
        (regression,) = regressions(self.study, self.columns, 1.0)[role]
        return regression

    def indicator(self, role: str, column: str) -> Regression:
        """Return the regression, by the model of ``role``, of whether a factor has its second level."""
        levels = self.levels[column]
        if len(levels) != 2:
            raise InputError(f"variables: '{column}' needs two levels, and has {len(levels)}")
        return Regression(
            label=f"{role} model",
            model=self.study.models[role],  # type: ignore[arg-type]  # supplied columns are refused
            kind="binary",
            response=ArmResponse(columns=self.as_treatment(column), weight_mean=1.0, code=1),
            weight_ceiling=1.0,
            family=Family.LOGISTIC,
            constant=f"everyone it is fitted on has the same '{column}'; check it, or use fewer folds",
            ranges=self.study.ranges,
        )

    def as_treatment(self, column: str) -> EffectColumns:
        """Return the roles of the columns with a factor in the place of the treatment.

        Its methods `arm`, `taken` and `in_arm` are then about that factor.
        """
        return replace(self.columns, treatment=column, arms=self.levels[column])

    def fit(self, asked: Mapping[str, Regression]) -> Flow[dict[str, Fitted]]:
        """Fit regressions in the same rounds, with the study's folds if it has any; return them by role."""
        study, parts = self.study, list(asked.values())
        fitting = Fitting(
            levels=self.levels, n=self.n, accuracy=study.fit_accuracy if study.rounds_sums else None
        )
        fitting = yield from begin_fits(parts, fitting, study.outer_folds)
        fits = yield from fit_together(parts, fitting, study.outer_folds)
        return dict(zip(asked, fits, strict=True))


@dataclass(frozen=True, kw_only=True)
class TargetDetails:
    """The results of a study with such a target besides its estimate; all are pooled and public."""

    problem: Problem
    start: object
    levels: Levels
    arm_counts: tuple[int, ...]
    observed_counts: tuple[int, ...]
    g_floor: float
    nuisances: Mapping[str, tuple[Fitted, ...]]
    silos: ComparedSilos | None
    missing: MissingCounts | None = None
    omitted: int = 0
    strata: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()  # no effective sample sizes are known
    imputed: tuple[Estimate, ...] = ()  # always empty: such a study imputes nothing
    overlap: Overlap = Overlap(truncated=(), disclosing=(), effective_sizes=(), predicted=(0.0, 0.0))

    @property
    def components(self) -> tuple[Component, ...]:
        """The coordinates of psi: quantities of everyone."""
        return tuple(Component(Static("all"), Everyone(), quantity=name) for name in self.problem.names)

    def fit_names(self, target: AbstractEffect, role: str) -> Sequence[str]:
        return (role,)

"""The outcome as imputation models read it: columns without missing values, in known ranges.

An imputation model must hold the outcome; without it, imputed covariates would be unrelated to the outcome
and the estimate too near to "no effect". The columns depend on the kind of outcome:

* A point outcome is itself. If some are missing, two columns hold the outcome, with its least value where it
  is missing, and whether it was observed.
* Time to an event gives the indicator of each cause and a function of the period of exit L. With a hazard
  logit lambda(t) = alpha_t + beta x the density of (L, event) given x depends on x by

      beta 1(event) - sum_{t<=L} log(1 + exp(alpha_t + beta x)),

  so that for a binary x the log odds given the follow-up are linear in the event's indicator and in a
  function of L. White and Royston (2009) derive the same for Cox's model, where that function is the
  cumulative hazard at the end of follow-up, and replace it by the Nelson-Aalen estimate. Here it is a
  polynomial of second degree in L/K, whose coefficients are fitted: the grid is public, and no life table
  must be disclosed. If the study models censoring, an indicator of being censored before the last period is
  there for the same reason.
* Treatment over time gives the same columns, from the columns of the periods, and the outcome at the end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle.initial.ranges import UNIT, Range
from fedtmle.model.table import Table
from fedtmle.model.types import Array
from fedtmle.programs.study import Study
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect
from fedtmle.targets.regimes.timeline import Timeline
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle.targets.time.followup import FollowUp


class AbstractOutcomeColumns(ABC):
    """Columns that hold the outcome for imputation models."""

    @property
    @abstractmethod
    def ranges(self) -> dict[str, Range]:
        """The names of the columns, with their ranges."""

    @abstractmethod
    def of(self, table: Table) -> dict[str, Array]:
        """Return the columns by name, shape (N,) each."""


@final
@dataclass(frozen=True, kw_only=True)
class PartlyObserved(AbstractOutcomeColumns):
    """A point outcome of which some are missing."""

    outcome: str
    bounds: Range

    @property
    def ranges(self) -> dict[str, Range]:
        return {f"{self.outcome} observed": UNIT, f"{self.outcome} or least": self.bounds}

    def of(self, table: Table) -> dict[str, Array]:
        values = table.numeric[self.outcome]
        observed = ~np.isnan(values)
        columns = (observed.astype(np.float64), np.where(observed, values, self.bounds[0]))
        return dict(zip(self.ranges, columns, strict=True))


@final
@dataclass(frozen=True, kw_only=True)
class EndOfFollowUp(AbstractOutcomeColumns):
    """The event of each cause, being censored before the last period if ``censors``, L/K and its square."""

    follow_up: FollowUp
    censors: bool

    @property
    def ranges(self) -> dict[str, Range]:
        event, causes = self.follow_up.event, range(1, len(self.follow_up.causes) + 1)
        names = [*(f"{event} of cause {j}" for j in causes), *([f"{event} censored"] * self.censors)]
        return dict.fromkeys((*names, *_exit_names(self.follow_up.time)), UNIT)

    def of(self, table: Table) -> dict[str, Array]:
        seen, periods = self.follow_up.read(table), self.follow_up.periods
        ends = [seen.cause == j for j in range(1, len(self.follow_up.causes) + 1)]
        ends += [(seen.cause == 0) & (seen.last < periods)] * self.censors
        share = seen.last / periods
        columns = (*(end.astype(np.float64) for end in ends), share, share * share)
        return dict(zip(self.ranges, columns, strict=True))


@final
@dataclass(frozen=True, kw_only=True)
class EndOfPeriods(AbstractOutcomeColumns):
    """Treatment over time: the event or the outcome at the end, being censored, L/K and its square.

    L is the last period at risk. It is left out if nobody can leave before the last period. The outcome at
    the end has its least value for people who are censored.
    """

    timeline: Timeline
    bounds: Range

    @property
    def ranges(self) -> dict[str, Range]:
        timeline = self.timeline
        outcome = f"{timeline.outcome} or least"
        names = {f"{timeline.event} in any period": UNIT} if timeline.event else {outcome: self.bounds}
        if timeline.censoring is not None:
            names[f"{timeline.censoring} in any period"] = UNIT
        leaves = timeline.event is not None or timeline.censoring is not None
        return names | (dict.fromkeys(_exit_names(timeline.treatment), UNIT) if leaves else {})

    def of(self, table: Table) -> dict[str, Array]:
        timeline, followed = self.timeline, self.timeline.follow(table)
        if timeline.event is None:
            values = table.numeric[timeline.outcome]
            columns = [np.where(followed.uncensored[-1], values, self.bounds[0])]
        else:
            periods = range(1, timeline.periods + 1)
            events = [timeline.event_in(table, t) & followed.uncensored[t - 1] for t in periods]
            columns = [np.any(events, axis=0).astype(np.float64)]
        if timeline.censoring is not None:
            censored = followed.at_risk & ~followed.uncensored
            columns.append(np.any(censored, axis=0).astype(np.float64))
        share = followed.at_risk.sum(axis=0) / timeline.periods
        return dict(zip(self.ranges, (*columns, share, share * share), strict=False))


def _exit_names(name: str) -> tuple[str, str]:
    """Return the names of L/K and of its square."""
    return f"{name} until exit", f"{name} until exit squared"


def outcome_columns(study: Study, missing_outcomes: int) -> AbstractOutcomeColumns | None:
    """Return the columns that hold the outcome; None if it is a complete point outcome, which is itself."""
    target = study.target
    if isinstance(target, AbstractTimeEffect):
        return EndOfFollowUp(follow_up=target.follow_up, censors=study.censoring_model is not None)
    if isinstance(target, AbstractRegimeEffect) and study.timeline is not None:
        return EndOfPeriods(timeline=study.timeline, bounds=study.outcome_bounds)
    if missing_outcomes:
        return PartlyObserved(outcome=target.outcome, bounds=study.outcome_bounds)
    return None

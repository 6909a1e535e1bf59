"""How a run ended, where it went, and what was proved about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from fedtmle.model.problem import Estimate
from fedtmle.protocol.lattice import Lattice
from fedtmle.protocol.query import Law, Problem


class Status(enum.Enum):
    """How a run ended. The value is the sentence shown to the user.

    Examples
    --------
    >>> ft.Status.CONVERGED.value
    'the pooled EIF equation holds to the tolerance'
    """

    CONVERGED = "the pooled EIF equation holds to the tolerance"
    ONE_STEP = "no targeting was asked for: the initial estimate plus the mean of its influence function"
    PRIVATE = "one-step estimate from sums with noise (differential privacy); the interval counts the noise"
    UPDATE_BUDGET = "the budget of updates was used up before the tolerance was reached"
    ROUND_BUDGET = "the budget of rounds was used up before the tolerance was reached"
    NO_DESCENT = "no step decreased the loss any further; the tolerance was not reached"
    CANCELLATION = "stagnation: the local fits cancel in the average, the equation is not solved"
    INFEASIBLE = "stagnation: the average of the local fits is not an admissible fluctuation"
    NO_PROGRESS = "stagnation: updates fell below the progress tolerance, the equation is not solved"
    BOUNDARY_FIT = "a silo's local fit has no minimum within the public radius"
    STALLED_FIT = "a silo's local solver could not reach its accuracy"
    ALL_RETIRED = "every silo completed its own targeting and retired"
    UNFINISHED = "the budget was used up while some silos had not completed their own targeting"
    FEW_ACTIVE = (
        "too few silos were left to average their fits: they stopped before their own targeting was complete"
    )

    @property
    def is_converged(self) -> bool:
        return self in (Status.CONVERGED, Status.ONE_STEP, Status.PRIVATE, Status.ALL_RETIRED)


@dataclass(frozen=True, kw_only=True)
class Visit:
    """One query on the trajectory: where it was, and what the parties learned there."""

    round: int
    update: int
    step: int
    eps: tuple[float, ...]
    gradient_norm: float | None  # norm for the pooled loss at eps, raw coordinates; at step 0, the residual
    at_origin: bool
    loss_change: float | None = None  # pooled loss at eps minus that at eps = 0, if it was asked


@dataclass(frozen=True, kw_only=True)
class Smoothness:
    """The smoothness beta, and how it was obtained.

    If beta is set during the steps, ``by_step`` has its value at each, and ``value`` the last and largest.
    """

    value: float
    basis: str  # "certified", "certified along the steps" or "at the start", "estimated", "given"
    by_step: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was proved about the returned law, and what was only assumed.

    ``residual_bound`` bounds the raw norm of the pooled EIF mean, ``residual_bounds`` its coordinates, if
    they are bounded one by one; ``arithmetic`` is the part of each due to exact sums and quadrature.
    """

    tolerance: float
    residual_bound: float
    arithmetic: float
    residual_bounds: tuple[float, ...] | None = None
    smoothness: Smoothness | None = None
    lattice: Lattice | None = None  # the lattice of a coded run
    coordinates: str = "raw"
    history_bits: int | None = None  # H_K less H_init: the exact code of the accepted history
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SiteTest:
    """A test whether silos differ: T over the ``silos`` that contribute to it, in ``dim`` coordinates.

    ``model`` is the "treatment model" or the "outcome model", of an arm where there are several, from which
    silos may depart, or the "influence function", whose mean may differ between them.
    """

    model: str
    statistic: float
    silos: int
    dim: int = 1

    @property
    def df(self) -> int:
        """The degrees of freedom."""
        return self.dim * (self.silos - 1)

    @property
    def p_value(self) -> float:
        """P(X >= T) for X chi-squared; 1 if there is nothing to compare."""
        from scipy.special import chdtrc

        return float(chdtrc(self.df, self.statistic)) if self.df > 0 else 1.0


@dataclass(frozen=True, kw_only=True)
class Targeted:
    """A pooled law, its estimate, and how exactly the EIF equation holds there.

    ``details`` has the other results of the flow: a study's nuisances and diagnostics.
    """

    problem: Problem
    law: Law
    status: Status
    steps: int
    updates: int
    trajectory: tuple[Visit, ...]
    accepted: tuple[tuple[float, ...], ...]
    residual: float
    residual_kind: str  # "computed" or "certified bound"
    certificate: Certificate
    estimate: Estimate
    details: object = None
    populations: SiteTest | None = None  # the test of a run that averages local fits, if asked for


@dataclass(frozen=True, kw_only=True)
class ActiveSilos:
    """The active set of one update: how many silos, and how many people they have where weights count them.

    ``people`` is None with uniform weights, and where no fit was asked for.
    """

    silos: int
    people: int | None = None


@dataclass(frozen=True, kw_only=True)
class Personalised:
    """Each silo has its own law and estimate, which no other party knows; ``law`` is that of the silos
    that did not retire. ``active`` has the active set of each update."""

    problem: Problem
    law: Law
    status: Status
    steps: int
    updates: int
    trajectory: tuple[Visit, ...]
    accepted: tuple[tuple[float, ...], ...]
    active: tuple[ActiveSilos, ...] = ()
    details: object = None
    populations: SiteTest | None = None


@dataclass(frozen=True, kw_only=True)
class Described:
    """Nothing was targeted: pooled descriptions alone, as before a study."""

    details: object


Outcome: TypeAlias = Targeted | Personalised | Described

"""How a run ended, what it visited, and what was proved about it."""

from __future__ import annotations

import enum
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from fedtmle.model.problem import Estimate
from fedtmle.protocol.query import AbstractQuery

Query = AbstractQuery[Any, Any]


class Status(enum.Enum):
    """How a run ended; the value is the sentence shown to the user."""

    CONVERGED = "the pooled EIF equation holds to the tolerance"
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

    @property
    def is_converged(self) -> bool:
        return self in (Status.CONVERGED, Status.ALL_RETIRED)


@dataclass(frozen=True, kw_only=True)
class Point:
    """One query on the trajectory: where it was, and what the parties learned there."""

    round: int
    update: int
    step: int
    eps: tuple[float, ...]
    gradient_norm: float | None  # of the pooled loss at eps, raw coordinates; at step 0, the residual
    at_origin: bool
    loss_change: float | None = None  # pooled loss at eps less at eps = 0, where it was asked


@dataclass(frozen=True, kw_only=True)
class Smoothness:
    """beta, and on what it rests."""

    value: float
    basis: str  # "certified", "certified at the start", "estimated" or "given"


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was proved about the returned law, and what was only assumed.

    ``residual_bound`` bounds the raw norm of the pooled EIF mean; ``arithmetic`` is the part of
    it due to exact sums and quadrature.
    """

    tolerance: float
    residual_bound: float
    arithmetic: float
    smoothness: Smoothness | None = None
    spacing: float | None = None
    coordinates: str = "raw"
    history_bits: int | None = None  # H_K less H_init: the exact code of the accepted history
    assumptions: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a flow returns, at every party alike."""

    law: Any
    status: Status
    steps: int
    updates: int
    residual: float | None  # None where no party can know the pooled one (Personalized)
    residual_kind: str  # "computed", "certified bound" or "each silo's own"
    trajectory: tuple[Point, ...]
    accepted: tuple[tuple[float, ...], ...]
    certificate: Certificate | None
    estimate: Estimate | None  # None where only the silos have one (Personalized)
    problem: Any = None  # what was targeted, where the flow made it itself (a study)
    details: Any = None  # what the flow learned beside it


Flow = Generator[Query, Any, Outcome]

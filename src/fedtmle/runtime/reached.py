"""How far a failed run got: the last pooled estimate, and its distance from convergence."""

from __future__ import annotations

from collections.abc import Sequence

from fedtmle.algorithms.base import arithmetic_error
from fedtmle.errors import Reached
from fedtmle.protocol.query import KnownLaw, Phase, Query
from fedtmle.theory.statistical import Distance, distance_to_convergence

NOT_BEGUN = "targeting had not begun"
NO_RESIDUAL = "the residual of its law was not pooled"

Heard = tuple[Query, object]  # a query and what was pooled for it


def how_far(heard: Sequence[Heard], phases: Sequence[Phase]) -> Reached:
    """Return how far a run got, whose completed rounds had these phases.

    ``heard`` has the rounds in which a law was moved or closed. The residual at a law bounds the distance of
    psi there from its value at convergence (`theory.statistical`).
    """
    phase = phases[-1].value if phases else ""
    parts = [each for query, pooled in heard for each in zip(query.members, query.split(pooled), strict=True)]
    known = [law for query, pooled in parts if (law := query.known_law(pooled)) is not None]
    last = next((each for each in reversed(known) if each.estimate is not None), known[-1] if known else None)
    if last is None:
        begun = any(query.phase is Phase.TARGETING for query, _ in parts)
        return Reached(rounds=len(phases), phase=phase, reason=NO_RESIDUAL if begun else NOT_BEGUN)
    distance, estimate = _distance(last, known), last.estimate
    return Reached(
        rounds=len(phases),
        phase=phase,
        names=last.problem.names,
        is_initial=last.is_initial,
        estimate=None if estimate is None else tuple(estimate.psi.tolist()),
        covariance=() if estimate is None else tuple(map(tuple, estimate.covariance.tolist())),
        bounds=distance.bounds,
        reason=distance.reason or "",
    )


def _distance(at: KnownLaw, known: Sequence[KnownLaw]) -> Distance:
    """Return how far psi at a law may be from its value at convergence, by the residual pooled there."""
    residuals = next((each.residuals for each in known if each.residuals and each.law is at.law), None)
    if residuals is None:
        return Distance(reason=NO_RESIDUAL)
    arithmetic = arithmetic_error(at.problem, at.law)
    bounds = at.problem.convergence_bounds(at.law)
    return distance_to_convergence([each + arithmetic for each in residuals], bounds)

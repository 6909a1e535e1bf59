"""Whether the silos' rows are draws from one population, which bounds on averages of fits assume."""

from __future__ import annotations

import numpy as np

from fedtmle.model import linear
from fedtmle.model.exact import Sums
from fedtmle.model.types import unpack
from fedtmle.protocol.outcome import SiteTest
from fedtmle.protocol.populations import PopulationsQuery, SpreadQuery
from fedtmle.protocol.query import Flow, Law, Problem

TESTED = "influence function"
SINGULAR = 1e-10  # share of the largest variance below which a coordinate has none of its own


def compare_populations(problem: Problem, law: Law, n: int) -> Flow[SiteTest | None]:
    """Ask in two rounds whether the silos' gradients at ``law`` have one mean; None if Sigma is singular.

    Sigma is estimated with f degrees of freedom. T is multiplied by (f - d - 1)/f, since the expected inverse
    of such an estimate is f/(f - d - 1) times the inverse, for normal rows.
    """
    pooled: Sums = yield SpreadQuery(problem=problem, law=law, n=n)
    d, f = problem.dim, pooled.units[-1]
    if f <= d + 1:
        return None
    Sigma = unpack(pooled[d:-1].values(f), d)
    factor = linear.cholesky(Sigma, floor=SINGULAR * float(np.diag(Sigma).max()))
    if factor is None:
        return None
    answer: Sums = yield PopulationsQuery(
        problem=problem, law=law, n=n, mean=pooled[:d].values(n), root=linear.invert_lower(factor)
    )
    statistic, silos = answer.values().tolist()
    return SiteTest(model=TESTED, statistic=statistic * (f - d - 1) / f, silos=int(silos), dim=d)

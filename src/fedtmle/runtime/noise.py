"""A silo's share of noise, drawn from the operating system's randomness, never from a seed in a plan.

A silo records its reply before it sends it, and a repeated request gets the recorded bytes. So the noise of
a round is drawn once for everyone who ever sees it. A reply that was lost before it was recorded was never
sent, and its draw is forgotten.
"""

from __future__ import annotations

import secrets

from fedtmle.model.exact import Sums
from fedtmle.model.noise import Below, discrete_gaussian
from fedtmle.protocol.query import AbstractQuery, Answer, Pooled


def with_noise(
    query: AbstractQuery[Answer, Pooled], answer: Answer, below: Below = secrets.randbelow
) -> Answer:
    """Return the answer with this silo's share of the noise that the query asks for, if it asks for any."""
    variance = query.noise
    if variance is None:
        return answer
    if not isinstance(answer, Sums):
        raise TypeError("noise is added to sums")
    units = tuple(unit + discrete_gaussian(variance, below) for unit in answer.units)
    return Sums(units, answer.shifts)  # type: ignore[return-value]  # it is the query's kind of answer

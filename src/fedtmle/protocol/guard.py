"""The guard: the one place that holds a query and its answer against the silo's policy.

A silo answers in four steps: the guard *admits* the query by limits that do not depend on the rows, it
*examines* the rows behind it, the query computes its answer, and the guard *releases* the answer, with the
parts suppressed that stand for too few people. Limits that do not depend on data have reasons of their
own; all others share one coarse code, so that a refusal discloses as little as it can.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from operator import add, sub
from typing import Any, NamedTuple, Protocol

import numpy as np

from fedtmle.model.concentration import Concentration
from fedtmle.model.exact import Sums
from fedtmle.model.types import Array
from fedtmle.protocol.messages import Reason
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.policy import Policy
from fedtmle.protocol.query import CountCell, Evaluation, Local, Phase, Query


class RefusalError(Exception):
    """The policy refuses; ``reason`` is all that leaves the silo."""

    def __init__(self, reason: Reason, key: str) -> None:
        self.reason = reason
        self.key = key  # which key of the policy, for the owner's ledger
        super().__init__(key)


class DisclosureMeter(Protocol):
    """Keeps the disclosure of named attributes over one session (`privacy.limit`)."""

    def admit(self, query: Query) -> str | None:
        """Count the query in; return the attribute that its answer would disclose too well, or None."""
        ...


class _Examined(NamedTuple):
    """Where the guard last examined the rows, the result, and the radius in eps for which it holds."""

    point: Evaluation
    result: Concentration
    radius: float

    def covers(self, point: Evaluation) -> bool:
        seen = self.point
        if seen.model is not point.model:
            return False
        here, there = point.eps.tolist(), seen.eps.tolist()
        if seen.law is not point.law:  # both in the coordinates of the submodel that the laws share, if any
            origins = point.model.displacement(point.law), point.model.displacement(seen.law)
            if origins[0] is None or origins[1] is None:
                return False
            here, there = map(add, here, origins[0].tolist()), map(add, there, origins[1].tolist())
        return self.result.distance(map(sub, here, there)) <= self.radius


class Guard:
    """One session's meter: what was asked so far, against the policy."""

    def __init__(self, policy: Policy, meter: DisclosureMeter | None = None) -> None:
        self.policy = policy
        self._meter = meter
        self.queries = 0
        self.functionals = 0
        self._travelled: tuple[object, float] = (None, 0.0)  # a law, and the length of its history
        self._examined: _Examined | None = None
        self._joint: Evaluation | None = None  # where two-way tables were last looked at
        self._batch_of: np.ndarray | None = None  # own row -> number of its batch, -1 if in none yet
        self._batch_sizes: list[int] = []

    def open(self, plan: Plan, n_rows: int, smallest_part: int) -> None:
        """Check the plan before anything is answered.

        ``smallest_part`` is the fewest rows in a fold of the study: sums over all folds but one, for each
        one, disclose the sum over that fold.
        """
        if len(plan.roster) < self.policy.min_silos:
            raise RefusalError(Reason.TOO_FEW_SILOS, "min_silos")
        if n_rows < self.policy.min_rows:
            raise RefusalError(Reason.POLICY, "min_rows")
        if smallest_part < min(self.policy.min_fold, n_rows):
            raise RefusalError(Reason.POLICY, "min_fold")

    def admit(self, query: Query, local: Local) -> None:
        """Charge the query and check the limits that do not depend on what the rows hold.

        A silo that restarts admits its earlier queries again, which restores the totals.
        """
        policy = self.policy
        self.queries += 1
        self.functionals += query.functionals
        if self.queries > policy.max_queries:
            raise RefusalError(Reason.TOO_MANY_QUERIES, "max_queries")
        if self.functionals > policy.max_functionals:
            raise RefusalError(Reason.TOO_MANY_FUNCTIONALS, "max_functionals")
        for point in _evaluations(query):
            size = math.hypot(*point.eps.tolist())
            if query.phase is Phase.NUISANCE:
                if not size <= policy.max_coefficient:
                    raise RefusalError(Reason.TOO_FAR, "max_coefficient")
            elif not size <= policy.max_eps:
                raise RefusalError(Reason.TOO_FAR, "max_eps")
            elif not self._length(point.law) + size <= policy.max_path:
                raise RefusalError(Reason.TOO_FAR, "max_path")
            if point.batch is not None:
                self._follow_batch(local.batch(point.batch), local.n_rows)
        # Judged at a public centre, so that a refusal discloses nothing of the rows.
        attribute = None if self._meter is None else self._meter.admit(query)
        if attribute is not None:
            raise RefusalError(Reason.DISCLOSURE, f"disclosure: {attribute}")

    def _length(self, law: object) -> float:
        """The length of the path that led to a law: the sum of the accepted |eps^k|."""
        if self._travelled[0] is not law:
            steps = getattr(law, "history", ())  # a law that keeps none is bounded by its declared range
            self._travelled = (law, sum(math.hypot(*eps) for eps in steps))
        return self._travelled[1]

    def examine(self, query: Query, local: Local) -> None:
        """Check the limits that depend on the rows, before the answer is computed."""
        policy = self.policy
        for member in query.members:
            self._examine_labels(member, local)
        for point in _evaluations(query):
            if policy.min_joint > 0 and point.curvature:
                self._examine_joint(point, local)
            if policy.min_support > 0 or policy.min_effective > 0 or policy.max_share < 1:
                self._examine_concentration(point, local)

    def _examine_labels(self, query: Query, local: Local) -> None:
        """Check who stands behind the labels of an answer, and whether it is a whole model."""
        if not self.policy.allow_models and query.ships_model(local.name):
            raise RefusalError(Reason.POLICY, "allow_models")
        floor = self.policy.floor(*query.floors)
        if floor > 1 and any(0 < people < floor for people in query.people(local)):
            strictest = max(query.floors, key=self.policy.floor)
            raise RefusalError(Reason.POLICY, strictest)

    def release(self, query: Query, answer: Any, n_rows: int) -> Any:
        """Return the answer as it may leave the silo, or refuse it."""
        parts = tuple(zip(query.members, query.split(answer), strict=True))
        for member, part in parts:
            if isinstance(part, Sums):
                self._examine_sums(member, part, n_rows)
        return query.join(suppressed(parts, self.policy))

    def _examine_sums(self, query: Query, sums: Sums, n_rows: int) -> None:
        """Check the counts of people and the sums of weights in an answer."""
        cells, weights = tuple(query.cells()), tuple(query.weight_sums())
        if not cells and not weights:
            return
        values = sums.values()
        for cell in cells:
            self._examine_cell(cell, values, n_rows)
        for weight in weights:
            total, squares = values[weight.at], values[weight.squares]
            if squares > 0 and total * total < self.policy.min_effective * squares:
                raise RefusalError(Reason.POLICY, "min_effective")

    def charge(self, query: Query, bits: int) -> None:
        """Charge an answer whose size its query could not declare."""
        if not query.functionals:
            self.functionals += disclosed_numbers(query, bits)

    def _examine_cell(self, cell: CountCell, values: Array, n_rows: int) -> None:
        """Check that a count is zero or large enough, and so is that of the others."""
        count, total = values[cell.at], n_rows if cell.of is None else values[cell.of]
        if count == 0 and total > 0 and cell.is_arm and not self.policy.allow_one_arm:
            raise RefusalError(Reason.POLICY, "allow_one_arm")
        for people, key in ((count, cell.floor), (total - count, cell.rest_floor)):
            if 0 < people < self.policy.floor(key):
                raise RefusalError(Reason.POLICY, key)

    def _examine_concentration(self, point: Evaluation, local: Local) -> None:
        """Check that no sum rests on a few rows.

        The effective number of rows is at least one over the largest share, so a small largest share
        usually suffices. The result is reused at nearby eps.
        """
        is_batch = point.batch is not None
        if not is_batch and self._examined is not None and self._examined.covers(point):
            return
        policy = self.policy
        enough = min(policy.max_share, 1.0 / max(policy.min_effective, 1.0))
        submodel = local.submodel(point.model, point.law, point.batch)
        if is_batch and not submodel.n_rows:  # none of the silo's rows is in it
            return
        result = submodel.concentration(point.eps, share=enough, least=policy.min_support)
        if result.is_whole and result.support < policy.min_support:  # else the rows seen have enough
            raise RefusalError(Reason.POLICY, "min_support")
        radius = result.radius(enough)
        if radius >= 0:
            if not is_batch:
                self._examined = _Examined(point, result, radius)
            return
        if result.share > policy.max_share:
            raise RefusalError(Reason.POLICY, "max_share")
        if result.effective < policy.min_effective:
            raise RefusalError(Reason.POLICY, "min_effective")

    def _examine_joint(self, point: Evaluation, local: Local) -> None:
        """Check the two-way tables of a disclosed Hessian; they are the same at every eps of a law."""
        if point.batch is None and _same_law(point, self._joint):
            return
        if local.submodel(point.model, point.law, point.batch).fewest_joint() < self.policy.min_joint:
            raise RefusalError(Reason.POLICY, "min_joint")
        if point.batch is None:
            self._joint = point

    def _follow_batch(self, rows: np.ndarray, n_rows: int) -> None:
        """Check that batches are parts of one partition: two that differ in a few rows disclose those."""
        if self.policy.min_batch == 0 or not len(rows):
            return
        if len(rows) < self.policy.min_batch:
            raise RefusalError(Reason.BATCHES, "min_batch")
        if self._batch_of is None:
            self._batch_of = np.full(n_rows, -1)
        owners = self._batch_of[rows]
        first = int(owners[0])
        in_order = (rows[1:] > rows[:-1]).all()  # usually; sorting is left for the exception
        if (owners != first).any() or not (in_order or len(np.unique(rows)) == len(rows)):
            raise RefusalError(Reason.BATCHES, "min_batch")
        if first < 0:
            self._batch_of[rows] = len(self._batch_sizes)
            self._batch_sizes.append(len(rows))
            rest = n_rows - sum(self._batch_sizes)  # all rows less every batch disclose these
            if 0 < rest < self.policy.min_batch:
                raise RefusalError(Reason.BATCHES, "min_batch")
        elif self._batch_sizes[first] != len(rows):
            raise RefusalError(Reason.BATCHES, "min_batch")


def suppressed(parts: Iterable[tuple[Query, Any]], policy: Policy) -> tuple[Any, ...]:
    """Return the parts of an answer without the bins that stand for too few people."""
    return tuple(query.suppress(part, policy.floor(*query.floors)) for query, part in parts)


def _evaluations(query: Query) -> Iterator[Evaluation]:
    return (point for member in query.members for point in member.evaluations())


def _same_law(point: Evaluation, seen: Evaluation | None) -> bool:
    return seen is not None and seen.law is point.law and seen.model is point.model


def disclosed_numbers(query: Query, bits: int) -> int:
    """Return the numbers in an answer: as the query declares, or one per 64 bits if it cannot know."""
    return query.functionals or math.ceil(bits / 64)

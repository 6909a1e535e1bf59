"""The guard: holds every query against the silo's policy, before it is answered and after.

What can be judged without data is judged first, with its own reason; what depends on data shares
one coarse code, so that a refusal tells as little as it can.
"""

from __future__ import annotations

import math
from operator import add, sub
from typing import NamedTuple

import numpy as np

from fedtmle.model.concentration import Concentration
from fedtmle.model.exact import Sums
from fedtmle.model.types import Array
from fedtmle.protocol.messages import Reason
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.policy import Policy
from fedtmle.protocol.query import AbstractQuery, Cell, Local, Phase, Point


class RefusalError(Exception):
    """The policy says no; ``reason`` is all that leaves the silo."""

    def __init__(self, reason: Reason, key: str) -> None:
        self.reason = reason
        self.key = key  # which key of the policy, for the owner's ledger
        super().__init__(key)


class _Examined(NamedTuple):
    """Where the rows were last looked at, what was found, and how far around that it is enough."""

    point: Point
    found: Concentration
    radius: float

    def covers(self, point: Point) -> bool:
        seen = self.point
        if seen.model is not point.model:
            return False
        here, there = point.eps.tolist(), seen.eps.tolist()
        if seen.law is not point.law:  # both in the coordinates of the submodel that the laws share, if any
            origins = point.model.displacement(point.law), point.model.displacement(seen.law)
            if origins[0] is None or origins[1] is None:
                return False
            here, there = map(add, here, origins[0].tolist()), map(add, there, origins[1].tolist())
        return self.found.distance(map(sub, here, there)) <= self.radius


class Guard:
    """One session's meter: what was asked so far, against the policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.queries = 0
        self.functionals = 0
        self._travelled: tuple[object, float] = (None, 0.0)  # a law, and the length of its history
        self._examined: _Examined | None = None
        self._joint: Point | None = None  # where two-way tables were last looked at
        self._batch_of: np.ndarray | None = None  # own row -> number of its batch, -1 if in none yet
        self._batch_sizes: list[int] = []

    def open(self, plan: Plan, n_rows: int, smallest_part: int) -> None:
        """What can be said of the plan before anything is answered.

        ``smallest_part`` is the fewest rows that the study's folds set apart: sums over all folds but
        one, for each one, tell the sum over that fold.
        """
        if len(plan.roster) < self.policy.min_silos:
            raise RefusalError(Reason.TOO_FEW_SILOS, "min_silos")
        if n_rows < self.policy.min_rows:
            raise RefusalError(Reason.POLICY, "min_rows")
        if smallest_part < min(self.policy.min_fold, n_rows):
            raise RefusalError(Reason.POLICY, "min_fold")

    def admit(self, query: AbstractQuery[object, object], local: Local) -> None:
        """Limits that do not depend on what the rows hold; charges the query. After a restart again."""
        policy = self.policy
        self.queries += 1
        self.functionals += query.functionals
        if self.queries > policy.max_queries:
            raise RefusalError(Reason.TOO_MANY_QUERIES, "max_queries")
        if self.functionals > policy.max_functionals:
            raise RefusalError(Reason.TOO_MANY_FUNCTIONALS, "max_functionals")
        for point in query.points():
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

    def _length(self, law: object) -> float:
        """The length of the path that led to a law: the sum of the accepted |eps^k|."""
        if self._travelled[0] is not law:
            steps = getattr(law, "history", ())  # a law that keeps none is bounded by its declared range
            self._travelled = (law, sum(math.hypot(*eps) for eps in steps))
        return self._travelled[1]

    def examine(self, query: AbstractQuery[object, object], local: Local) -> None:
        """Limits that depend on rows, before the answer is computed."""
        policy = self.policy
        if not policy.allow_models and query.ships(local.name):
            raise RefusalError(Reason.POLICY, "allow_models")
        if policy.min_level_rows > 0:
            for count in query.holders(local):
                if 0 < count < policy.min_level_rows:
                    raise RefusalError(Reason.POLICY, "min_level_rows")
        for point in query.points():
            if policy.min_joint > 0 and point.curvature:
                self._examine_joint(point, local)
            if policy.min_support > 0 or policy.min_effective > 0 or policy.max_share < 1:
                self._examine_concentration(point, local)

    def charge(self, query: AbstractQuery[object, object], bits: int) -> None:
        """What an answer told beyond what its query could declare."""
        if not query.functionals:
            self.functionals += told(query, bits)

    def examine_answer(self, query: AbstractQuery[object, object], answer: object, n_rows: int) -> None:
        """Limits on counts of people that an answer tells."""
        for member, part in query.members(answer):
            if not isinstance(part, Sums):
                continue
            cells, spreads = tuple(member.cells()), tuple(member.spreads())
            if cells or spreads:
                values = part.values()
                for cell in cells:
                    self._examine_cell(cell, values, n_rows)
                for spread in spreads:
                    total, squares = values[spread.at], values[spread.squares]
                    if squares > 0 and total * total < self.policy.min_effective * squares:
                        raise RefusalError(Reason.POLICY, "min_effective")

    def _examine_cell(self, cell: Cell, values: Array, n_rows: int) -> None:
        """A count is zero or large enough, and so is the count of the others."""
        count, whole = values[cell.at], n_rows if cell.of is None else values[cell.of]
        if count == 0 and whole > 0 and cell.arm and not self.policy.allow_one_arm:
            raise RefusalError(Reason.POLICY, "allow_one_arm")
        for people, key in ((count, cell.least), (whole - count, cell.rest)):
            if 0 < people < getattr(self.policy, key):
                raise RefusalError(Reason.POLICY, key)

    def _examine_concentration(self, point: Point, local: Local) -> None:
        """The effective number of rows is at least one over the largest share, so that a small share is
        all that mostly needs to be seen; what was seen lasts for other eps of the law."""
        is_batch = point.batch is not None
        if not is_batch and self._examined is not None and self._examined.covers(point):
            return
        policy = self.policy
        enough = min(policy.max_share, 1.0 / max(policy.min_effective, 1.0))
        submodel = local.submodel(point.model, point.law, point.batch)
        if is_batch and not submodel.n_rows:  # none of the silo's rows is in it
            return
        found = submodel.concentration(point.eps, share=enough, least=policy.min_support)
        if found.is_whole and found.support < policy.min_support:  # else it has shown that already
            raise RefusalError(Reason.POLICY, "min_support")
        radius = found.radius(enough)
        if radius >= 0:
            if not is_batch:
                self._examined = _Examined(point, found, radius)
            return
        if found.share > policy.max_share:
            raise RefusalError(Reason.POLICY, "max_share")
        if found.effective < policy.min_effective:
            raise RefusalError(Reason.POLICY, "min_effective")

    def _examine_joint(self, point: Point, local: Local) -> None:
        """A Hessian of two factors' columns is their two-way table; at every eps of a law the same one."""
        if point.batch is None and _same_law(point, self._joint):
            return
        if local.submodel(point.model, point.law, point.batch).fewest_joint() < self.policy.min_joint:
            raise RefusalError(Reason.POLICY, "min_joint")
        if point.batch is None:
            self._joint = point

    def _follow_batch(self, rows: np.ndarray, n_rows: int) -> None:
        """Batches must be parts of one partition: two that differ in a few rows tell those rows."""
        if self.policy.min_batch == 0 or not len(rows):
            return
        if len(rows) < self.policy.min_batch:
            raise RefusalError(Reason.BATCHES, "min_batch")
        if self._batch_of is None:
            self._batch_of = np.full(n_rows, -1)
        owners = self._batch_of[rows]
        first = int(owners[0])
        in_order = (rows[1:] > rows[:-1]).all()  # as a rule: to sort them is left for the exception
        if (owners != first).any() or not (in_order or len(np.unique(rows)) == len(rows)):
            raise RefusalError(Reason.BATCHES, "min_batch")
        if first < 0:
            self._batch_of[rows] = len(self._batch_sizes)
            self._batch_sizes.append(len(rows))
            rest = n_rows - sum(self._batch_sizes)  # told by all rows less every batch
            if 0 < rest < self.policy.min_batch:
                raise RefusalError(Reason.BATCHES, "min_batch")
        elif self._batch_sizes[first] != len(rows):
            raise RefusalError(Reason.BATCHES, "min_batch")


def _same_law(point: Point, seen: Point | None) -> bool:
    return seen is not None and seen.law is point.law and seen.model is point.model


def told(query: AbstractQuery[object, object], bits: int) -> int:
    """Numbers in an answer: as the query declares, or one per 64 bits where it cannot know before."""
    return query.functionals or math.ceil(bits / 64)

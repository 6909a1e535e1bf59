"""The guard: holds every query against the silo's policy, before it is answered and after.

What can be judged without data is judged first, with its own reason; what depends on data shares
one coarse code, so that a refusal tells as little as it can.
"""

from __future__ import annotations

import math

import numpy as np

from fedtmle.model.concentration import Concentration
from fedtmle.model.exact import Sums
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


class Guard:
    """One session's meter: what was asked so far, against the policy."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.queries = 0
        self.functionals = 0
        self._travelled: tuple[object, float] = (None, 0.0)  # a law, and the length of its history
        self._examined: tuple[Point, Concentration] | None = None
        self._batch_of: np.ndarray | None = None  # own row -> number of its batch, -1 if in none yet
        self._batch_sizes: list[int] = []

    def open(self, plan: Plan, n_rows: int) -> None:
        """What can be said of the plan before anything is answered."""
        if len(plan.roster) < self.policy.min_silos:
            raise RefusalError(Reason.TOO_FEW_SILOS, "min_silos")
        if n_rows < self.policy.min_rows:
            raise RefusalError(Reason.POLICY, "min_rows")

    def admit(self, query: AbstractQuery[object, object]) -> None:
        """Public limits; charges the query."""
        policy = self.policy
        self.queries += 1
        self.functionals += query.functionals
        if self.queries > policy.max_queries:
            raise RefusalError(Reason.TOO_MANY_QUERIES, "max_queries")
        if self.functionals > policy.max_functionals:
            raise RefusalError(Reason.TOO_MANY_FUNCTIONALS, "max_functionals")
        for point in query.points():
            size = float(np.linalg.norm(point.eps))
            if query.phase is Phase.NUISANCE:
                if not size <= policy.max_coefficient:
                    raise RefusalError(Reason.TOO_FAR, "max_coefficient")
            elif not size <= policy.max_eps:
                raise RefusalError(Reason.TOO_FAR, "max_eps")
            elif not self._length(point.law) + size <= policy.max_path:
                raise RefusalError(Reason.TOO_FAR, "max_path")

    def _length(self, law: object) -> float:
        """The length of the path that led to a law: the sum of the accepted |eps^k|."""
        if self._travelled[0] is not law:
            steps = getattr(law, "history", ())  # a law that keeps none is bounded by its declared range
            self._travelled = (law, sum(math.hypot(*eps) for eps in steps))
        return self._travelled[1]

    def examine(self, query: AbstractQuery[object, object], local: Local) -> None:
        """Limits that depend on rows, before the answer is computed."""
        for point in query.points():
            rows = None if point.batch is None else local.batch(point.batch)
            if rows is not None:
                self._examine_batch(rows, local.n_rows)
            if self.policy.min_effective > 0 or self.policy.max_share < 1:
                self._examine_concentration(point, local, rows)

    def charge(self, query: AbstractQuery[object, object], bits: int) -> None:
        """What an answer told beyond what its query could declare."""
        self.functionals += told(query, bits) - query.functionals

    def examine_answer(self, query: AbstractQuery[object, object], answer: object, n_rows: int) -> None:
        """Limits on counts of people that an answer tells."""
        for cell in query.cells():
            if isinstance(answer, Sums):
                self._examine_cell(cell, answer, n_rows)

    def _examine_cell(self, cell: Cell, answer: Sums, n_rows: int) -> None:
        """A count is zero or large enough, and so is the count of the others."""
        count = answer.values()[cell.at]
        whole = n_rows if cell.of is None else answer.values()[cell.of]
        least = self.policy.min_arm_rows
        if count == 0:
            if not self.policy.allow_one_arm and whole > 0:
                raise RefusalError(Reason.POLICY, "allow_one_arm")
        elif count < least:
            raise RefusalError(Reason.POLICY, "min_arm_rows")
        rest = whole - count
        if 0 < rest < (least if cell.of is None else self.policy.min_missing):
            raise RefusalError(Reason.POLICY, "min_arm_rows" if cell.of is None else "min_missing")

    def _examine_concentration(self, point: Point, local: Local, rows: np.ndarray | None) -> None:
        enough = min(self.policy.max_share, 1.0 / max(self.policy.min_effective, 1.0))
        if rows is None and self._examined is not None:
            seen, found = self._examined
            same = seen.law is point.law and seen.model is point.model
            if same and found.share_within(point.eps) <= enough:
                return
        if rows is not None and not len(rows):
            return
        found = local.submodel(point.model, point.law).concentration(point.eps, rows)
        if rows is None:
            self._examined = (point, found)
        if found.share > self.policy.max_share:
            raise RefusalError(Reason.POLICY, "max_share")
        if found.effective < self.policy.min_effective:
            raise RefusalError(Reason.POLICY, "min_effective")

    def _examine_batch(self, rows: np.ndarray, n_rows: int) -> None:
        """Batches must be parts of one partition: two that differ in a few rows tell those rows."""
        if self.policy.min_batch == 0 or not len(rows):
            return
        if len(rows) < self.policy.min_batch:
            raise RefusalError(Reason.BATCHES, "min_batch")
        if self._batch_of is None:
            self._batch_of = np.full(n_rows, -1)
        owners = self._batch_of[rows]
        first = int(owners[0])
        if len(np.unique(rows)) < len(rows) or (owners != first).any():
            raise RefusalError(Reason.BATCHES, "min_batch")
        if first < 0:
            self._batch_of[rows] = len(self._batch_sizes)
            self._batch_sizes.append(len(rows))
        elif self._batch_sizes[first] != len(rows):
            raise RefusalError(Reason.BATCHES, "min_batch")


def told(query: AbstractQuery[object, object], bits: int) -> int:
    """Numbers in an answer: as the query declares, or one per 64 bits where it cannot know before."""
    return query.functionals or math.ceil(bits / 64)

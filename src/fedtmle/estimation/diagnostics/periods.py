"""Who is at risk in which period, by arm: the numbers under a survival curve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, final

from fedtmle.estimation.diagnostics.base import AbstractDiagnostic, Pool, StudyKind, read_bins
from fedtmle_core.blocks import Block, Cells
from fedtmle_core.terms import Term
from fedtmle_core.types import Array


@final
@dataclass(frozen=True, kw_only=True)
class PeopleAtRisk(AbstractDiagnostic[tuple[tuple[int, ...], ...]]):
    """The people at risk in each shown period, per arm.

    ``at_risk`` counts the shown periods in which a person is at risk, the first ones: one term, in one block.
    """

    gaps: ClassVar[Mapping[StudyKind, str]] = {"effect": "there is one period, in which everyone is at risk"}

    pool: Pool
    arms: tuple[Term, ...]  # 1 for who takes the arm, at the beginning
    at_risk: Term
    periods: int

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (Cells(of=self.at_risk, edges=tuple(k + 0.5 for k in range(self.periods)), groups=self.arms),)

    def read(self, values: Sequence[Array]) -> tuple[tuple[int, ...], ...]:
        bins = read_bins(values[0], groups=len(self.arms), sums=0, silos=self.pool.silos)
        # Who is at risk in shown period k is so in k or more of them: the counts from the last one back.
        return tuple(tuple(accumulate(cell.count for cell in reversed(arm[1:])))[::-1] for arm in bins)

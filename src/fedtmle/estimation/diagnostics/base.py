"""The protocol of diagnostics: what each asks about the terms of a study, and how its totals are read.

A diagnostic knows terms, and not the kind of study that they are from: an effect at one point in time is one
treatment, one outcome and one weight a mean; times to an event and treatment over time have one for each
period. Nothing is hidden here: cores join bins of few people, and `fedtmle_core.publish` says what goes out.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeAlias, TypeVar, final

from fedtmle.estimation.flow import Flow
from fedtmle.targets.diagnostics import Bin
from fedtmle_core.blocks import Block
from fedtmle_core.types import Array

Result = TypeVar("Result")
StudyKind: TypeAlias = Literal["effect", "time", "regimes"]
STUDY_KINDS: tuple[StudyKind, ...] = ("effect", "time", "regimes")


@final
@dataclass(frozen=True, kw_only=True)
class Pool:
    """All records of a study: how many people, at how many silos."""

    n: int
    silos: int

    def places(self, error: float) -> int:
        """Return the fewest binary places p of a sum with which the mean over all people errs by ``error``.

        Each of M silos rounds its sum to a multiple of 2^-p, so that the mean errs by M 2^-(p+1) / n at most.
        """
        # 2^-p <= 2 n error / M. With a ratio f 2^e, f in [1/2, 1), the largest such power of two is 2^(e-1).
        _, power = math.frexp(2.0 * max(self.n, 1) * error / self.silos)
        return max(1 - power, 0)


class AbstractDiagnostic(ABC, Generic[Result]):
    """A question over the terms of a study; subclasses are frozen dataclasses.

    ``gaps`` says why a kind of study does not have the diagnostic.
    """

    gaps: ClassVar[Mapping[StudyKind, str]] = {}

    @classmethod
    def kinds(cls) -> tuple[StudyKind, ...]:
        """Return the kinds of study that have the diagnostic."""
        return tuple(kind for kind in STUDY_KINDS if kind not in cls.gaps)

    @property
    @abstractmethod
    def blocks(self) -> tuple[Block, ...]:
        """The sums that are asked, in one round."""

    @abstractmethod
    def read(self, values: Sequence[Array]) -> Result:
        """Return the result from the totals of each block."""

    def ask(self) -> Flow[Result]:
        """Return the result, as a flow of one round; of no blocks without a round."""
        blocks = self.blocks
        return self.read((yield blocks) if blocks else [])


def read_bins(values: Array, *, groups: int, sums: int, silos: int) -> list[tuple[Bin, ...]]:
    """Return the bins of each group from the totals of `Cells` with some ``sums`` in each cell."""
    return [
        tuple(Bin(silos=silos, count=round(cell[0]), sums=tuple(cell[1:])) for cell in group)
        for group in values.reshape(groups, -1, 1 + sums).tolist()
    ]

"""Parts of answers that some silos leave out: under masks asked only where no silo stands alone.

A silo leaves out what few of its people are behind: a covariate's sums, a bin, an answer that is optional.
The total is then over the other silos. If one silo alone discloses a part, the total is that silo's own; and
if one alone does not, what is left of the total over all silos, where that is known, is that silo's own. So
under masks the silos first count who would disclose each part. It is asked for if they all do, or if those
who do and those who do not are both at least two more than may collude.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import cast, final

from fedtmle.protocol.codes import Golomb, Integers, Parts
from fedtmle.protocol.masked import AbstractLook
from fedtmle.protocol.masks import Lane
from fedtmle.protocol.query import Local, Phase, Query


@final
@dataclass(frozen=True, kw_only=True)
class ShownQuery(AbstractLook):
    """How many silos would disclose each part of the next answer that silos may leave out."""

    explanation = "which parts of the next answer the silo leaves out, because few people are behind them"

    query: Query
    silos: int
    phase: Phase = Phase.DIAGNOSTICS

    @cached_property
    def asks_about(self) -> tuple[Query, ...]:
        return tuple(member for member in self.query.members if member.hideable)

    @property
    def answer_code(self) -> Golomb:
        return Golomb(blocks=tuple(member.hideable for member in self.asks_about))

    @property
    def pooled_code(self) -> Golomb:
        return self.answer_code

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return (Lane(self.silos),) * self.answer_code.numbers

    def answer(self, local: Local) -> Integers:
        """Return the answers themselves, of which `suppress` leaves one bit for each part."""
        return cast(Integers, tuple(member.answer(local) for member in self.asks_about))

    def suppress(self, answer: Integers, floor: Callable[[Query], int]) -> Integers:
        pairs = zip(self.asks_about, cast(Parts, answer), strict=True)
        parts = (member.shown(member.suppress(part, floor)) for member, part in pairs)
        return tuple(int(is_shown) for part in parts for is_shown in part)

    def kept(self, pooled: Integers, colluders: int) -> Query:
        """Return the query without the parts that too few silos would disclose, or too few would not."""
        enough = colluders + 2

        def is_safe(disclosing: int) -> bool:
            others = self.silos - disclosing
            return disclosing >= enough and (others == 0 or others >= enough)

        hidden = [part for part, disclosing in enumerate(pooled) if not is_safe(disclosing)]
        return self.query.hiding(hidden) if hidden else self.query

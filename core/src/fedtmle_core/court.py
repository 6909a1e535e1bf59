"""What is judged, admitted and published of one plan at one hospital: the rules around its sums."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import msgspec

from fedtmle_core.admit import Judged, admit
from fedtmle_core.cells import shown
from fedtmle_core.errors import DecodeError, FedTMLEError
from fedtmle_core.evaluate import Workspace
from fedtmle_core.judged import before_fits, judge
from fedtmle_core.judgement import RAISE, Judge
from fedtmle_core.plan import Model, Plan, Question
from fedtmle_core.publish import published_result
from fedtmle_core.terms import ONE, Term


@final
class Court:
    """The judgements of a plan over the hospital's own people, and what follows from them."""

    def __init__(self, plan: Plan, workspace: Workspace) -> None:
        self._plan, self._workspace = plan, workspace
        self._judged = Judged.of(plan)

    def before_fits(self, hospitals: int) -> Judge:
        """Return the judgement of the columns that the plan's models ask for."""
        return before_fits(self._plan, self._workspace, hospitals)

    def before_targeting(self, terms: Sequence[Term], hospitals: int) -> Judge:
        """Return the judgement of the columns that the end of the study adds up."""
        columns = tuple(dict.fromkeys((ONE, *terms)))
        self._judged = self._judged.with_named(columns)
        model = Model(columns=columns)
        return judge(self._plan, self._workspace, hospitals, [model], advice=RAISE)

    def admit(self, question: Question) -> None:
        """Raise `NotAdmittedError` unless the question asks for sums of judged columns."""
        admit(question, self._judged)

    def shown(self, question: Question, totals: Sequence[int]) -> tuple[int, ...]:
        """Return the totals that the program may see: bins of few people are joined."""
        return shown(question, totals, self._judged)

    def publish(self, exact: bytes) -> bytes:
        """Return what everybody may read of a result, from its exact document."""
        try:
            published = published_result(msgspec.json.decode(exact), self._plan.floor)
        except FedTMLEError:
            raise
        except Exception:  # a program may bring anything
            raise DecodeError("a result is no document") from None
        return msgspec.json.encode(published, order="deterministic")

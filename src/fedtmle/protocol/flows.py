"""Flows made from flows: over transformed rows, and several that share their rounds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast, final

from fedtmle.errors import FedTMLEError
from fedtmle.model.problem import ClosingBlock
from fedtmle.protocol.codes import AbstractCode, Integers
from fedtmle.protocol.masks import Lane
from fedtmle.protocol.query import (
    AbstractQuery,
    CountCell,
    DisclosedColumns,
    Evaluation,
    Flow,
    JointQuery,
    KnownLaw,
    Law,
    Local,
    MomentsQuery,
    Phase,
    Query,
    Retirement,
    RowMeans,
    View,
    ViewedTerms,
)

# Flows over transformed rows: the same queries, answered from each silo's rows after a public rule.
#
# A view is a value that every party derives itself, such as the rule that completes missing values. `through`
# turns a flow into one whose queries are answered from the rows as the view shows them. Guard, audit and
# replay follow, because they ask the query for the rows that it is about (`AbstractQuery.rows_of`). A view is
# a frozen value with one method, `of`.

Result = TypeVar("Result")


def through(flow: Flow[Result], view: View) -> Flow[Result]:
    """Return the flow with every query asked of the rows that ``view`` shows."""
    pooled: object = None
    while True:
        try:
            query = flow.send(pooled)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # mypy does not follow a generator's result
        pooled = yield _seen(query, view)


def _seen(query: Query, view: View) -> Query:
    if isinstance(query, JointQuery):
        return JointQuery(tuple(_seen(member, view) for member in query.queries))
    return ViewedQuery(query=query, view=view)


@final
@dataclass(frozen=True, kw_only=True)
class ViewedQuery(AbstractQuery[object, object]):
    """A query about the rows that a view shows; everything else is as in the wrapped query."""

    query: Query
    view: View

    def rows_of(self, local: Local) -> Local:
        return self.query.rows_of(local.through(self.view))

    @property
    def phase(self) -> Phase:
        return self.query.phase

    @property
    def explanation(self) -> str:
        return self.query.explanation

    def answer(self, local: Local) -> object:
        return self.query.answer(local.through(self.view))

    def pool(self, answers: Mapping[str, object], sizes: Mapping[str, int]) -> object:
        return self.query.pool(answers, sizes)

    @property
    def lanes(self) -> tuple[Lane, ...] | None:
        return self.query.lanes

    def addends(self, answer: object, n_rows: int) -> Integers:
        return self.query.addends(answer, n_rows)

    def pool_totals(self, totals: Integers) -> object:
        return self.query.pool_totals(totals)

    @property
    def open_consent(self) -> str | None:
        return self.query.open_consent

    @property
    def answer_code(self) -> AbstractCode[object]:
        return self.query.answer_code

    @property
    def pooled_code(self) -> AbstractCode[object]:
        return self.query.pooled_code

    @property
    def functionals(self) -> int:
        return self.query.functionals

    def evaluations(self) -> tuple[Evaluation, ...]:
        return self.query.evaluations()

    def own_evaluations(self, rows: Local) -> tuple[Evaluation, ...]:
        return self.query.own_evaluations(rows)

    def cells(self) -> Iterable[CountCell]:
        return self.query.cells()

    def disclosed_columns(self, local: Local) -> DisclosedColumns | None:
        return self.query.disclosed_columns(local.through(self.view))

    @property
    def closing_blocks(self) -> tuple[ClosingBlock, ...]:
        return self.query.closing_blocks

    @property
    def floors(self) -> tuple[str, ...]:
        return self.query.floors

    def people(self, local: Local) -> Iterable[int]:
        return self.query.people(local.through(self.view))

    def ships_model(self, silo: str) -> bool:
        return self.query.ships_model(silo)

    def suppress(self, answer: object, floor: Callable[[Query], int]) -> object:
        return self.query.suppress(answer, lambda _: floor(self))

    @property
    def hideable(self) -> int:
        return self.query.hideable

    def shown(self, answer: object) -> tuple[bool, ...]:
        return self.query.shown(answer)

    def hiding(self, parts: Collection[int]) -> ViewedQuery:
        return replace(self, query=self.query.hiding(parts))

    @property
    def is_optional(self) -> bool:
        return self.query.is_optional

    @property
    def is_declinable(self) -> bool:
        return self.query.is_declinable

    def row_means(self, answer: object, local: Local) -> RowMeans | None:
        means = self.query.row_means(answer, local.through(self.view))
        if means is None:
            return None
        return replace(means, terms=tuple(ViewedTerms(term, self.view) for term in means.terms))

    def residual(self, pooled: object) -> float | None:
        return self.query.residual(pooled)

    def known_law(self, pooled: object) -> KnownLaw | None:
        return self.query.known_law(pooled)

    @property
    def tolerance(self) -> float | None:
        return self.query.tolerance

    def retirement(self, answer: object) -> Retirement | None:
        return self.query.retirement(answer)

    def retirement_by(self, addends: Integers) -> Retirement | None:
        return self.query.retirement_by(addends)

    def retired_answer(self) -> object | None:
        return self.query.retired_answer()


Rider = TypeVar("Rider")


def ask(query: Query) -> Flow[Any]:
    """Return what one query pools, as a flow."""
    return (yield query)


def together(flows: Sequence[Flow[Result]]) -> Flow[list[Result]]:
    """Return the results of flows that run side by side: each round carries one query of each flow."""
    results: dict[int, Result] = {}
    waiting: dict[int, Query] = {}
    replies: dict[int, object] = dict.fromkeys(range(len(flows)))  # a fresh flow is started by sending None
    while True:
        for k, reply in replies.items():
            try:
                waiting[k] = flows[k].send(reply)
            except StopIteration as stop:
                results[k] = stop.value
        if not waiting:
            return [results[k] for k in range(len(flows))]
        if len(waiting) == 1:
            ((k, query),) = waiting.items()
            replies = {k: (yield query)}
        else:
            pooled = yield JointQuery(tuple(waiting.values()))
            replies = dict(zip(waiting, pooled, strict=True))
        waiting = {}


def both(first: Flow[Result], second: Flow[Rider]) -> Flow[tuple[Result, Rider]]:
    """Return the results of two flows that run side by side, as `together` does for flows of one type."""
    flows: list[Flow[Result | Rider]] = [first, second]
    one, other = yield from together(flows)
    return cast("Result", one), cast("Rider", other)


def attempted(flow: Flow[Result]) -> Flow[Result | FedTMLEError]:
    """Return the flow's result, or the error that ended it: the same at all parties, from pooled numbers."""
    try:
        return (yield from flow)
    except FedTMLEError as error:
        return error


def with_closing(
    flow: Flow[Result], rider: Callable[[Law], Flow[Rider]]
) -> Flow[tuple[Result, Rider | None]]:
    """Return a flow's result, and that of another flow whose first query rides along with the closing sums.

    ``rider`` gives the other flow, at the law of the closing sums. If closing sums are asked more than once,
    the last of these flows counts.
    """
    riding: Flow[Rider] | None = None
    own: Rider | None = None
    pooled: object = None
    reply: object = None
    while True:
        try:
            query = flow.send(pooled)
        except StopIteration as stop:
            result: Result = stop.value
            break
        closing = [
            member
            for member in query.members
            if isinstance(member, MomentsQuery) and member.phase is Phase.CLOSING
        ]
        if not closing:
            pooled = yield query
            continue
        riding = rider(closing[-1].law)
        try:
            first = next(riding)
        except StopIteration as stop:
            riding, own = None, stop.value
            pooled = yield query
        else:
            pooled, reply = yield JointQuery((query, first))
    if riding is not None:
        while True:
            try:
                query = riding.send(reply)
            except StopIteration as stop:
                own = stop.value
                break
            reply = yield query
    return result, own

"""Flows: programs that ask for sums over people, and go on with the totals of all hospitals.

A flow yields the blocks of its next question and receives one array of numbers for each block. Every hospital
runs the same flow on the same totals, so that all of them ask the same next question.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar, cast, final

from fedtmle.errors import FedTMLEError
from fedtmle_core.blocks import Block
from fedtmle_core.evaluate import Workspace, values_of
from fedtmle_core.plan import Plan, Question
from fedtmle_core.sheet import Sheet
from fedtmle_core.terms import Term
from fedtmle_core.types import Array

Result = TypeVar("Result")
Other = TypeVar("Other")


@final
@dataclass(frozen=True)
class Named:
    """Columns that the cores judge before they answer anything that is a sum of them.

    A flow yields it among blocks, or alone, once its models are fitted; no array comes back for it.
    """

    columns: tuple[Term, ...]


Asked: TypeAlias = tuple[Block | Named, ...]
Flow: TypeAlias = Generator[Asked, list[Array], Result]


def blocks_of(asked: Asked) -> tuple[Block, ...]:
    """Return what is asked, without what is named."""
    return tuple(each for each in asked if not isinstance(each, Named))


def named_by(asked: Asked) -> tuple[Term, ...]:
    """Return the columns that are named, each once."""
    return tuple(dict.fromkeys(term for each in asked if isinstance(each, Named) for term in each.columns))


def name(*columns: Term) -> Flow[None]:
    """Name columns that are judged before they are asked for."""
    yield (Named(columns),)


def ask(*blocks: Block) -> Flow[list[Array]]:
    """Return the totals of some blocks, as a flow of one round; of none without a round."""
    return (yield blocks) if blocks else []


def together(flows: Sequence[Flow[Result]]) -> Flow[list[Result]]:
    """Return the results of flows that run side by side: each round carries a question of each.

    A block that several flows ask for in one round is asked once.
    """
    results: dict[int, Result] = {}
    replies: dict[int, list[Array] | None] = dict.fromkeys(range(len(flows)))  # None starts a flow
    while True:
        waiting: dict[int, Asked] = {}
        for k, reply in replies.items():
            try:
                # A generator is started by None, which its type cannot say.
                waiting[k] = flows[k].send(cast("list[Array]", reply))
            except StopIteration as stop:
                results[k] = stop.value
        if not waiting:
            return [results[k] for k in range(len(flows))]
        asked = tuple(dict.fromkeys(block for blocks in waiting.values() for block in blocks))
        totals = dict(zip(blocks_of(asked), (yield asked), strict=True))
        replies = {k: [totals[block] for block in blocks_of(own)] for k, own in waiting.items()}


def both(first: Flow[Result], second: Flow[Other]) -> Flow[tuple[Result, Other]]:
    """Return the results of two flows that run side by side, as `together` does for flows of one type."""
    flows: list[Flow[Result | Other]] = [first, second]
    one, other = yield from together(flows)
    return cast("Result", one), cast("Other", other)


def attempted(flow: Flow[Result]) -> Flow[Result | FedTMLEError]:
    """Return the flow's result, or the error that ended it: the same at all hospitals, from totals."""
    try:
        return (yield from flow)
    except FedTMLEError as error:
        return error


@final
@dataclass(frozen=True, kw_only=True)
class Ran(Generic[Result]):
    """A flow's result, how many rounds it took, and how many numbers each hospital sent."""

    result: Result
    rounds: int
    numbers: int


def run_open(
    flow: Flow[Result],
    sheets: Sequence[Sheet] | Sequence[Workspace],
    plan: Plan,
    *,
    seen: list[Question] | None = None,
) -> Ran[Result]:
    """Run a flow over the sheets of several hospitals in one process, without masks.

    Workspaces, in place of sheets, keep their columns for the next flow. The questions are added to ``seen``.
    """
    workspaces = [each if isinstance(each, Workspace) else Workspace(each) for each in sheets]
    rounds = numbers = 0
    try:
        asked = next(flow)
        while True:
            if not (blocks := blocks_of(asked)):
                asked = flow.send([])
                continue
            question = Question(blocks=blocks)
            if seen is not None:
                seen.append(question)
            answers = [workspace.answer(question, plan) for workspace in workspaces]
            totals = [sum(column) for column in zip(*answers, strict=True)]
            rounds, numbers = rounds + 1, numbers + len(totals)
            asked = flow.send(values_of(question, totals, plan))
    except StopIteration as stop:
        return Ran(result=stop.value, rounds=rounds, numbers=numbers)

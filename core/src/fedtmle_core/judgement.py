"""The judgement of a study: nobody stands out of the totals that it will ask for.

It is made twice among cores, before the fits and before targeting, each time of **judged columns**: the
products of responses and columns that the plan will ask, later the closing terms with their clever
covariates. The rule:

    every judged column is that of nobody or of at least k people, in every compared group, over all
    hospitals, and nobody is more than one half of any linear combination of the judged columns.

A person counts, not a record: a person's records are added up before. The steps are rounds, masked
and sealed like all others, whose totals stay in the cores:

    counts      how many people have each column                      every core finds the same verdict
    coarse      products of columns, rounded coarsely (`span`)        each core judges its own people
    verdicts    how many hospitals refuse, and how many cannot tell
    fine        the same products, rounded finely, if some cannot tell and none refuses; and verdicts again

So nothing is added up of a column before it is known to be that of k people. All that others hear of a core's
verdict is how many refuse. Which column it is, and what to do about it, its owner alone reads.

The rule trusts cores: one that is broken can add to the products until everybody's share looks small. Each
core checks what it can, that the pooled numbers less its own may be those of other people's records.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import NamedTuple, Protocol, final

from fedtmle_core.span import (
    COARSE,
    FINE,
    INVISIBLE,
    SLACK,
    Array,
    Layout,
    Pooled,
    Span,
    entry_reach,
    fixed,
    rounded_gram,
)

HALF = 0.5  # the largest share of a person: `span` says why, and why in squares
LEAVE_OUT = "leave the column out, merge its level with another, or declare the logarithm of a long tail"
BROKEN = (
    "The pooled numbers less the own are not those of any records: the core of another hospital is broken."
)
RAISE = "raise the lower bound on the propensity score, or leave the column out"


class Name(NamedTuple):
    """A judged column, and the group in which it is judged; no group is everybody."""

    column: str
    group: str = ""

    def __str__(self) -> str:
        return f"{self.column!r} among {self.group}" if self.group else repr(self.column)


class Columns(Protocol):
    """The judged columns of a hospital's own people, divided by their public bounds: in [-1, 1]."""

    @property
    def names(self) -> tuple[Name, ...]: ...

    def pieces(self) -> Iterator[Array]:
        """Yield the columns of consecutive people, shape (D, people): a person is in one piece."""
        ...


class Outcome(Enum):
    """What a core finds; the value is the sentence that its owner reads first."""

    PASSED = "nobody stands out"
    REFUSED = "somebody stands out"
    UNCLEAR = "the coarse products do not tell whether somebody stands out"


@final
@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome, and for the owner alone: which column, whose share, and what to do about it."""

    outcome: Outcome
    column: str = ""
    group: str = ""
    share: float = 0.0  # the largest that anybody of this hospital may have
    remedy: str = ""

    @property
    def passed(self) -> bool:
        return self.outcome is Outcome.PASSED


def counts(columns: Columns) -> tuple[int, ...]:
    """Return how many of the hospital's own people have each column: a value that is not 0 in fixed point."""
    found = [0] * len(columns.names)
    for piece in columns.pieces():
        for v in fixed(piece):
            found = [n + int(more) for n, more in zip(found, (v != 0).sum(axis=1), strict=True)]
    return tuple(found)


def verdict_of_counts(names: Sequence[Name], pooled: Sequence[int], k: int) -> Verdict:
    """Return the verdict of the pooled counts: a column is that of nobody or of at least ``k`` people."""
    rare = [(n, name) for n, name in zip(pooled, names, strict=True) if 0 < n < k]
    if not rare:
        return Verdict(outcome=Outcome.PASSED)
    _, name = min(rare)
    others = f" (and {len(rare) - 1} more)" if len(rare) > 1 else ""
    return Verdict(
        outcome=Outcome.REFUSED,
        column=name.column,
        group=name.group,
        remedy=f"Somebody, but fewer than {k} people of all hospitals, has {name}{others}. Merge the level "
        "with another, or leave the column out.",
    )


def gram(columns: Columns, bounds: Sequence[int], bits: int, layout: Layout) -> tuple[int, ...]:
    """Return the hospital's own products of columns by lane, in multiples of 2^-bits (`span`).

    ``bounds`` are pooled counts that bound how many people of all hospitals have each column.
    """
    return rounded_gram(columns.pieces(), bounds, bits, layout)


def verdict_of_gram(
    columns: Columns,
    bounds: Sequence[int],
    pooled: Pooled,
    *,
    own: Sequence[int] | None = None,
    limit: float = HALF,
    advice: str = LEAVE_OUT,
) -> Verdict:
    """Return the verdict of the pooled products about the hospital's own people; ``own`` are its own
    products.

    It is "unclear" only for coarse products. With fine ones whatever cannot be shown is refused.
    """
    others = (
        [total - mine for total, mine in zip(pooled.numbers, own, strict=True)] if own else pooled.numbers
    )
    if not replace(pooled, numbers=others).is_possible(bounds):
        return Verdict(outcome=Outcome.REFUSED, remedy=BROKEN)
    span = Span.of(pooled, bounds)
    limit *= 1.0 + SLACK
    most, least, beyond = 0.0, 0.0, 0.0
    worst = faintest = None
    for piece in columns.pieces():
        for v in fixed(piece):
            upper = span.most(v)
            if upper.size and (top := float(upper.max())) > most:
                most, worst = top, v[:, int(upper.argmax())]
            least = max(least, float(span.least(v).max(initial=0.0)))
            parts = span.beyond(v)
            if parts.size and (part := float(parts.max())) > beyond:
                beyond, faintest = part, v[:, int(parts.argmax())]
    is_fine = pooled.bits >= FINE
    if least <= limit and not is_fine and (most > limit or span.lost.size):
        return Verdict(outcome=Outcome.UNCLEAR, share=most)
    if worst is not None and most > limit:
        place, left = span.remedy(worst)
        name = columns.names[place]
        return Verdict(
            outcome=Outcome.REFUSED,
            column=name.column,
            group=name.group,
            share=min(most, 1.0),
            remedy=f"One person makes up {min(most, 1.0):.0%} of some combination of the judged columns. "
            f"Without {name} it is {left:.0%}: {advice}.",
        )
    if faintest is not None and beyond > INVISIBLE:
        name = columns.names[span.faintest(faintest)]
        return Verdict(
            outcome=Outcome.REFUSED,
            column=name.column,
            group=name.group,
            share=1.0,
            remedy=f"The column {name} is a combination of others for nearly everybody, so that the "
            "difference may single a person out. Leave it out, or declare a range that fits its values.",
        )
    return Verdict(outcome=Outcome.PASSED, share=most)


class Step(Enum):
    """Where a judgement is; the value says what the round adds up."""

    COUNTS = "people behind each judged column"
    COARSE = "products of judged columns, rounded coarsely"
    COARSE_VERDICTS = "hospitals that refuse, and hospitals that cannot tell"
    FINE = "products of judged columns, rounded finely"
    FINE_VERDICTS = "hospitals that refuse"
    PASSED = "nobody stands out"
    REFUSED = "somebody stands out, at some hospital"


# What follows, by what all cores have heard; None where each has found a verdict of its own, to tell next.
TABLE: dict[tuple[Step, Outcome | None], Step] = {
    (Step.COUNTS, Outcome.PASSED): Step.COARSE,
    (Step.COUNTS, Outcome.REFUSED): Step.REFUSED,
    (Step.COARSE, None): Step.COARSE_VERDICTS,
    (Step.COARSE_VERDICTS, Outcome.PASSED): Step.PASSED,
    (Step.COARSE_VERDICTS, Outcome.REFUSED): Step.REFUSED,
    (Step.COARSE_VERDICTS, Outcome.UNCLEAR): Step.FINE,
    (Step.FINE, None): Step.FINE_VERDICTS,
    (Step.FINE_VERDICTS, Outcome.PASSED): Step.PASSED,
    (Step.FINE_VERDICTS, Outcome.REFUSED): Step.REFUSED,
    (Step.FINE_VERDICTS, Outcome.UNCLEAR): Step.REFUSED,  # what cannot be shown is refused
}
BITS = {Step.COARSE: COARSE, Step.FINE: FINE}


@final
@dataclass(kw_only=True)
class Judge:
    """One judgement at one hospital: `lanes` and `answer` of the round to come, then `hear` its total.

    ``counted`` are the columns that nobody or k people may have. Nobody may stand out of ``columns``: each is
    0 where the counted column at its number in ``bounds`` is. ``layout`` says which of their products are
    one. ``people`` bounds how many people all hospitals have. ``verdict`` is the last one, for the owner
    alone.
    """

    counted: Columns
    columns: Columns
    bounds: tuple[int, ...]
    layout: Layout
    people: int
    hospitals: int
    k: int
    advice: str = LEAVE_OUT
    step: Step = Step.COUNTS
    verdict: Verdict = Verdict(outcome=Outcome.UNCLEAR)
    _counts: tuple[int, ...] = ()  # that bound the people of ``columns``
    _own: tuple[int, ...] = ()  # the last answer

    @property
    def is_over(self) -> bool:
        return self.step in (Step.PASSED, Step.REFUSED)

    def lanes(self) -> tuple[int, ...]:
        """Return the public bound of each total of this round; it follows from the plan alone."""
        match self.step:
            case Step.COUNTS:
                return (self.people,) * len(self.counted.names)
            case Step.COARSE | Step.FINE:
                return (entry_reach(BITS[self.step], self.hospitals),) * self._layout.numbers
            case Step.COARSE_VERDICTS | Step.FINE_VERDICTS:
                return (self.hospitals,) * 2
        return ()

    def answer(self) -> tuple[int, ...]:
        """Return the hospital's own part of this round's totals."""
        match self.step:
            case Step.COUNTS:
                self._own = counts(self.counted)
            case Step.COARSE | Step.FINE:
                self._own = gram(self.columns, self._counts, BITS[self.step], self._layout)
            case Step.COARSE_VERDICTS | Step.FINE_VERDICTS:
                found = self.verdict.outcome
                self._own = int(found is Outcome.REFUSED), int(found is Outcome.UNCLEAR)
        return self._own

    def hear(self, pooled: Sequence[int]) -> Step:
        """Take the total of this round, and return the next step."""
        told: Outcome | None = None
        match self.step:
            case Step.COUNTS:
                told = self._hear_counts(pooled)
            case Step.COARSE | Step.FINE:
                products = Pooled(
                    numbers=pooled, bits=BITS[self.step], hospitals=self.hospitals, layout=self._layout
                )
                self.verdict = verdict_of_gram(
                    self.columns, self._counts, products, own=self._own, advice=self.advice
                )
            case Step.COARSE_VERDICTS | Step.FINE_VERDICTS:
                told = self._hear_verdicts(*pooled)
        self.step = TABLE[self.step, told]
        return self.step

    @property
    def _layout(self) -> Layout:
        """Columns in fixed point are not fine enough for fine products of different ones to be one number."""
        return self.layout if self.step is Step.COARSE else Layout.full(self.layout.dim)

    def _hear_counts(self, pooled: Sequence[int]) -> Outcome:
        if any(not own <= total <= self.people for own, total in zip(self._own, pooled, strict=True)):
            self.verdict = Verdict(outcome=Outcome.REFUSED, remedy=BROKEN)
        else:
            self.verdict = verdict_of_counts(self.counted.names, pooled, self.k)
        self._counts = tuple(pooled[place] for place in self.bounds)
        return self.verdict.outcome

    def _hear_verdicts(self, refused: int, unclear: int) -> Outcome:
        """Return what follows for everybody; the own verdict counts even if the total forgets it."""
        if refused or self.verdict.outcome is Outcome.REFUSED:
            return Outcome.REFUSED
        return Outcome.UNCLEAR if unclear or self.verdict.outcome is Outcome.UNCLEAR else Outcome.PASSED

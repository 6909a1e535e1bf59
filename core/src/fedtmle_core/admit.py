"""Which questions a core answers: sums of judged columns, with predictions as their coefficients.

A study is judged twice (`judgement`). Before the fits the judged columns are the plan's: each response times
each column of the vocabulary. Before targeting they are the terms that the programs name, clever covariates
among them. A question is admitted if every number that it asks for is a sum over people of

    a prediction times a judged column,      or, before targeting, combinations of these,

where a prediction is a smooth function of linear predictors over the vocabulary, whose coefficients all
hospitals derived from totals. So the mean of y x and the gradient of a fit, (mu - y) x, are sums of the same
judged columns; a cut on a number that the plan does not have as a column is no prediction, and no sum of it
is answered. Which person has which value decides nothing here: an answer to "is it admitted?" tells nothing.

Judged columns do not prove that a sum at some other point of a fit rests on many people. What is left then is
stated with the attacks (`docs/circles.md`); the bound on the linear predictor and the lattice stand there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias, final

from fedtmle_core import graph
from fedtmle_core.blocks import Block, Cells, Intervals, Layer, Moments, Score, size
from fedtmle_core.errors import FedTMLEError, InputError
from fedtmle_core.leaves import Between, Fold, Known, Level
from fedtmle_core.plan import Plan, Question
from fedtmle_core.terms import ONE, Apply, Constant, Kept, Product, Softmax, Sum, Term, product

# The factors of a column by their digests, each indicator once; () is a column of ones.
Form: TypeAlias = tuple[bytes, ...]
Forms: TypeAlias = frozenset[Form]

INDICATORS = (Level, Known, Between, Fold)  # their powers are themselves
SMOOTH = ("expit", "exp", "logit", "log", "clip", "inverse")  # of a predictor; none of them cuts it in two
MOST_FORMS = 10_000  # of one term; a product of long sums is no column of any study

# The largest linear predictor, from the coefficients and the intervals of the columns. A person whose
# prediction is e^-40 of another's weighs less than the last place of an exact sum. Coefficients searched at
# random bring one person's share from .05 to .42 where the predictor is at most 2 and to 1 where it is at
# most 8 (`core/tests/honest.py`): this bound keeps arithmetic sound, and does not protect people.
LARGEST_PREDICTOR = 700.0


class NotAdmittedError(FedTMLEError):
    """A question asks for what is not judged, or leaves the plan's limits; its text is for the owner."""


@final
@dataclass(frozen=True, kw_only=True)
class Judged:
    """What has been judged so far: forms of the plan's columns, and before targeting ``named`` terms.

    Products of two named terms are judged with them, by their roots; so is a named term times a residual.
    """

    forms: Forms
    named: Forms = frozenset()

    @classmethod
    def of(cls, plan: Plan) -> Judged:
        """Return the columns of the first judgement: every response times every column."""
        return cls(forms=forms_of(columns_of(plan), plan))

    def with_named(self, terms: Iterable[Term]) -> Judged:
        """Return the same with the terms of the second judgement."""
        return Judged(forms=self.forms, named=frozenset(map(_factors, terms)))

    def has(self, term: Term, plan: Plan) -> bool:
        """Return whether a sum of this term is one of judged columns."""
        return self.names(term) or forms_of([term], plan) <= self.forms

    def names(self, term: Term) -> bool:
        """Return whether this term was named before targeting."""
        return _factors(term) in self.named


def columns_of(plan: Plan) -> tuple[Term, ...]:
    """Return the columns of the first judgement, in the order in which they are judged."""
    products = (
        product(response, column)
        for model in plan.models
        for response in model.responses
        for column in model.columns
    )
    return tuple(dict.fromkeys(products))


def admit(question: Question, plan: Plan, judged: Judged) -> None:
    """Raise `NotAdmittedError` unless the core may answer a question."""
    try:
        intervals = question.intervals(plan)
        numbers = len(question.lanes(plan))
    except InputError as error:
        raise NotAdmittedError(str(error)) from None
    if numbers > plan.most_numbers:
        raise NotAdmittedError(f"a question asks for {numbers} numbers; the plan allows {plan.most_numbers}")
    for block in question.blocks:
        if not _is_judged(block, plan, judged, intervals):
            raise NotAdmittedError("a question asks for the sum of a column that was not judged")


def _is_judged(block: Block, plan: Plan, judged: Judged, intervals: Intervals) -> bool:
    """Return whether every number of a block is a sum of judged columns, up to predictions."""
    match block:
        case Score():
            return all(_is_layer_judged(layer, block.at, plan, judged, intervals) for layer in block.layers)
        case Moments():
            products = [tuple(block.columns[j] for j in places) for places in block.products]
            return all(
                judged.has(product(*terms), plan) or all(map(judged.names, terms)) for terms in products
            )
        case Cells():
            asked = [*block.groups, *(product(group, term) for group in block.groups for term in block.sums)]
            return all(judged.has(term, plan) for term in asked)


def _is_layer_judged(
    layer: Layer, at: tuple[float, ...], plan: Plan, judged: Judged, intervals: Intervals
) -> bool:
    factors = layer.factors or (1.0,) * len(layer.X)
    reach = sum(abs(e * f) * size(intervals[x]) for e, f, x in zip(at, factors, layer.X, strict=True))
    if reach + (0.0 if layer.offset is None else size(intervals[layer.offset])) > LARGEST_PREDICTOR:
        raise NotAdmittedError(f"a linear predictor may be beyond {LARGEST_PREDICTOR:g}")
    w, y = ONE if layer.w is None else layer.w, ONE if layer.y is None else layer.y
    return all(
        judged.names(product(w, x))
        or (judged.has(product(w, x), plan) and judged.has(product(w, y, x), plan))
        for x in layer.X
    )


def _factors(term: Term) -> Form:
    """Return the factors of a term as they stand, without public ones, sorted."""
    waiting, found = [term], []
    while waiting:
        bare = _bare(waiting.pop())
        if isinstance(bare, Product):
            waiting += bare.terms
        elif bare != ONE:
            found.append(_mark(bare))
    return _joined(tuple(found), ())


def _bare(term: Term) -> Term:
    """Return a term without a public factor, and whether its column is kept."""
    while True:
        match term:
            case Kept(of=inner):
                term = inner
            case Sum(terms=(inner,)):
                term = inner
            case _:
                return term


def forms_of(terms: Iterable[Term], plan: Plan) -> Forms:
    """Return the columns that terms are sums of, each up to predictions and public factors."""
    return _found(list(terms), _vocabulary(plan))


@lru_cache(maxsize=16)
def _vocabulary(plan: Plan) -> frozenset[bytes]:
    """Return the factors of the plan's columns: predictors over these are predictions, in every world."""
    return frozenset(each for form in _found(plan.columns, frozenset()) for each in form)


def _found(roots: Sequence[Term], vocabulary: frozenset[bytes]) -> Forms:
    found: dict[Term, Forms] = {}
    for term in graph.ordered(roots):
        found[term] = _forms(term, found, vocabulary)
    return frozenset(form for root in roots for form in found[root])


def _forms(term: Term, found: Mapping[Term, Forms], vocabulary: frozenset[bytes]) -> Forms:
    parts = [found[part] for part in term.parts]
    is_predictor = all(vocabulary.issuperset(form) for part in parts for form in part)
    match term:
        case Constant():
            return frozenset({()})
        case Kept() | Sum():
            return _limited(frozenset().union(*parts))
        case Product():
            forms: Forms = frozenset({()})
            for part in parts:
                forms = _limited(frozenset(_joined(one, other) for one in forms for other in part))
            return forms
        case Softmax() if is_predictor:
            return frozenset({()})
        case Apply(function=function) if function in SMOOTH and is_predictor:
            return frozenset({()})
    return frozenset({(_mark(term),)})


def _mark(term: Term) -> bytes:
    """Return the digest of a factor, with a 1 behind that of an indicator."""
    return term.digest + (b"1" if isinstance(term, INDICATORS) else b"")


def _joined(one: Form, other: Form) -> Form:
    """Return the factors of a product; an indicator, whose mark ends with 1, is a factor once."""
    merged = sorted([*one, *other])
    return tuple(
        each
        for place, each in enumerate(merged)
        if not (place and each == merged[place - 1] and len(each) > len(ONE.digest))
    )


def _limited(forms: Forms) -> Forms:
    if len(forms) > MOST_FORMS:
        raise NotAdmittedError("a term is the sum of too many columns")
    return forms

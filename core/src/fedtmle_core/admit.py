"""Which questions a core answers: sums of judged columns, with predictions as their coefficients.

A study is judged twice (`judgement`). Before the fits the judged columns are the plan's: in each model, each
response times each column. Before targeting they are the columns that the programs name: clever covariates,
these times the outcome, and what else is added up at the end. A question is admitted if every number that it
asks for is a sum over people of

    a prediction times a judged column      or of combinations of these,

where a prediction is a smooth function of linear predictors over the vocabulary, in [-1, 1], or the logarithm
of one. The coefficients are what all hospitals derived from totals. So the mean of y x and the gradient of a
fit, (mu - y) x, are sums of the same judged columns, and so is H (y - Q) at every law once H and H y are
named. A cut on a number that the plan does not have as a column is no prediction, nor is an inverse
probability, and no sum of them is answered. Which person has which value decides nothing here: an answer to
"is it admitted?" tells nothing.

**What is not judged is coarse.** A table of forty covariates by arm has too many combinations for all of them
to rest on many people. The sum of a product of factors of judged columns is therefore admitted too, but a
program reads its total in multiples of what two people can change (`coarse`): nobody is more than one half of
the least step. The hospitals' programs ask for each such sum once.

Judged columns do not prove that a sum at some other point of a fit rests on many people. What is left then is
stated with the attacks (`docs/circles.md`); rounding stands there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias, final

from fedtmle_core import graph
from fedtmle_core.blocks import Block, Cells, Intervals, Layer, Moments, Score, size
from fedtmle_core.dictionary import Interval
from fedtmle_core.errors import FedTMLEError, InputError
from fedtmle_core.factors import INDICATORS, Factors, factors
from fedtmle_core.leaves import AbstractPiece, Level, Number
from fedtmle_core.plan import Plan, Question
from fedtmle_core.terms import (
    ONE,
    Apply,
    ByCluster,
    Constant,
    Kept,
    Pick,
    Product,
    Softmax,
    Sum,
    Term,
    product,
)

Forms: TypeAlias = frozenset[Factors]  # columns, each by its factors; () is a column of ones

ONES: Forms = frozenset({()})
SMOOTH = ("expit", "exp", "logit", "log", "clip")  # of a predictor; none of them cuts it in two
CUTS = ("step", "sign", "size", "root")  # of a number: they divide people as no column of the plan does
MOST_FORMS = 10_000  # of one term; a product of long sums is no column of any study

# The largest linear predictor, from the coefficients and the intervals of the columns. Coefficients searched
# at random bring one person's share from .05 to .42 where the predictor is at most 2, and to 1 where it is at
# most 8, which honest fits reach. So this bound keeps arithmetic sound (e^700 is a double), and does not
# protect people: that nobody chooses coefficients does.
LARGEST_PREDICTOR = 700.0

# Of the logarithm of a prediction that is a coefficient: that of 2^-44. Predictions are in [-1, 1], but for
# these, which outweigh others by as much in the log loss of an outcome that was thought impossible.
LARGEST_LOG = 32.0


class NotAdmittedError(FedTMLEError):
    """A question asks for what is not judged, or leaves the plan's limits; its text is for the owner."""


@final
@dataclass(frozen=True, kw_only=True)
class Judged:
    """What has been judged so far: the plan's columns, and those that were named since.

    ``vocabulary`` has the factors of all of these, over which predictors are: a prediction that was moved
    along a clever covariate is one.
    """

    plan: Plan
    vocabulary: frozenset[Term] = frozenset()
    of_plan: Forms = frozenset()
    named: Forms = frozenset()
    _forms: dict[Term, Forms] = field(init=False, default_factory=dict, repr=False, compare=False)
    _predictors: set[Term] = field(init=False, default_factory=set, repr=False, compare=False)
    _then: dict[tuple[Term, ...], Judged] = field(init=False, default_factory=dict, repr=False, compare=False)

    @staticmethod
    def of(plan: Plan) -> Judged:
        """Return the columns of the first judgement: in each model every response times every column."""
        return _of_plan(plan)

    def with_named(self, terms: Sequence[Term]) -> Judged:
        """Return the same with the columns of the second judgement, whose parts the first has seen.

        The two judgements do not see differences between their columns. So a named column reads records by
        parts of the plan's columns and by predictions; the plan has every level, cut and number itself.
        """
        columns = tuple(terms)
        if columns not in self._then:
            named = self.forms_of(columns)
            found = frozenset(part for form in named for part in form)
            for part in found:
                self._require(part)
            self._then[columns] = Judged(
                plan=self.plan, vocabulary=self.vocabulary | found, of_plan=self.of_plan, named=named
            )
        return self._then[columns]

    def has(self, term: Term) -> bool:
        """Return whether a sum of this term is one of judged columns."""
        return self.forms_of([term]) <= self.of_plan | self.named

    def is_exact(self, terms: Sequence[Term]) -> bool:
        """Return whether a program may read the exact sum of a product of one or two terms."""
        return self.has(product(*terms)) or (len(terms) > 1 and all(map(self.has_root, terms)))

    def has_parts(self, term: Term) -> bool:
        """Return whether a term is of factors of judged columns, so that its sum may be read coarsely.

        The reference level of a variable is none of a model's columns; it is the rest of the others.
        """
        levels = {part.name for part in self.vocabulary if isinstance(part, Level)}
        parts = (part for form in self.forms_of([term]) for part in form)
        return all(
            part in self.vocabulary or (isinstance(part, Level) and part.name in levels) for part in parts
        )

    def has_root(self, term: Term) -> bool:
        """Return whether a term is of named columns, by which its square is judged."""
        return self.forms_of([term]) <= self.named

    def forms_of(self, terms: Iterable[Term]) -> Forms:
        """Return the columns that terms are sums of, each up to predictions and public factors."""
        roots = list(terms)
        if not all(root in self._forms for root in roots):
            for term, interval in graph.intervals(roots, self.plan.dictionary).items():
                if term not in self._forms:
                    self._forms[term] = self._found(term, interval)
        return frozenset(form for root in roots for form in self._forms[root])

    def _found(self, term: Term, interval: Interval) -> Forms:
        """Return the columns of a term, given those of its parts."""
        if self._is_predictor(term, self._predictors):
            self._predictors.add(term)
        # A column that is cut in two is itself also where it is of the vocabulary, as when it was judged.
        is_smooth = isinstance(term, Softmax) or (isinstance(term, Apply) and term.function in SMOOTH)
        is_prediction = is_smooth and term in self._predictors
        most = LARGEST_LOG if isinstance(term, Apply) and term.function in ("log", "logit") else 1.0
        if is_prediction and size(interval) <= most:
            return ONES
        return _forms(term, [self._forms[part] for part in term.parts])

    def _require(self, term: Term) -> None:
        """Raise `NotAdmittedError` if a part of a column reads records by what the plan's columns do not."""
        known = self.vocabulary.union(*self.of_plan)
        # A level that is left out is counted too, and balance is of the number whose logarithm a model has.
        divided = {each.name for each in known if isinstance(each, Level)}
        measured = {each.name for each in known if isinstance(each, AbstractPiece)}
        predictors: set[Term] = set()
        for each in graph.ordered([term]):
            if self._is_predictor(each, predictors):
                predictors.add(each)
        waiting = [(term, False)]
        while waiting:
            each, is_cut = waiting.pop()
            is_prediction = isinstance(each, Apply | Softmax) and each in predictors
            if is_prediction or (each in known and (not is_cut or isinstance(each, INDICATORS))):
                continue
            if isinstance(each, Level) and each.name in divided:
                continue
            if isinstance(each, Number) and each.name in measured and not is_cut:
                continue
            if not (each.parts or isinstance(each, Constant)):  # a leaf
                raise NotAdmittedError("a column that is named reads records by what the plan does not have")
            is_cut |= isinstance(each, Apply) and each.function in CUTS
            waiting += [(part, is_cut) for part in each.parts]

    def _is_predictor(self, term: Term, predictors: set[Term]) -> bool:
        """Return whether a term is a smooth function of predictors over the vocabulary, given its parts."""
        match term:
            case Constant():
                return True
            case Apply(function=function) if function not in SMOOTH:
                return term in self.vocabulary
            case Apply() | Softmax() | Sum() | Product() | Kept() | Pick():
                return term in self.vocabulary or all(part in predictors for part in term.parts)
        return term in self.vocabulary


def _forms(term: Term, parts: Sequence[Forms]) -> Forms:
    """Return the columns of a term that is no prediction, given those of its parts."""
    match term:
        case Constant(value=value):
            return ONES if value else frozenset()
        case Kept() | Sum():
            found: Forms = frozenset().union(*parts)
        case Product():
            found = ONES
            for part in parts:
                found = _products(found, part)
        case Pick(name=name):
            levels = [frozenset({(Level(name, code),)}) for code in range(len(parts))]
            found = frozenset().union(*map(_products, levels, parts))
        case ByCluster(name=name):  # a column of clusters: each of its people's, added up
            found = _products(frozenset({(ByCluster(name, ONE),)}), parts[0])
        case _:
            found = frozenset({(term,)})
    if len(found) > MOST_FORMS:
        raise NotAdmittedError("a term is the sum of too many columns")
    return found


def _products(left: Forms, right: Forms) -> Forms:
    """Return the products of two sums' columns, without those that are 0 for everyone."""
    if len(left) * len(right) > MOST_FORMS:
        raise NotAdmittedError("a term is the sum of too many columns")
    joined = (factors(*one, *other) for one in left for other in right)
    return frozenset(each for each in joined if each is not None)


@lru_cache(maxsize=4)  # hospitals of one process share it, and the forms that it has found
def _of_plan(plan: Plan) -> Judged:
    found = frozenset(part for form in Judged(plan=plan).forms_of(plan.columns) for part in form)
    bare = Judged(plan=plan, vocabulary=found)
    return Judged(plan=plan, vocabulary=found, of_plan=bare.forms_of(columns_of(plan)))


def columns_of(plan: Plan) -> tuple[Term, ...]:
    """Return the columns of the first judgement, in the order in which they are judged."""
    products = (
        product(response, column)
        for model in plan.models
        for response in model.responses
        for column in model.columns
    )
    return tuple(dict.fromkeys(products))


def admit(question: Question, judged: Judged) -> None:
    """Raise `NotAdmittedError` unless the core may answer a question."""
    plan = judged.plan
    try:
        intervals = question.intervals(plan)
        numbers = len(question.lanes(plan))
    except InputError as error:
        raise NotAdmittedError(str(error)) from None
    if numbers > plan.most_numbers:
        raise NotAdmittedError(f"a question asks for {numbers} numbers; the plan allows {plan.most_numbers}")
    for block in question.blocks:
        if not _is_judged(block, judged, intervals):
            raise NotAdmittedError("a question asks for the sum of a column that was not judged")


def _is_judged(block: Block, judged: Judged, intervals: Intervals) -> bool:
    """Return whether every number of a block is a sum of judged columns, up to predictions."""
    match block:
        case Score():
            return all(_is_layer_judged(layer, block.at, judged, intervals) for layer in block.layers)
        case Moments():
            products = [tuple(block.columns[j] for j in places) for places in block.products]
            return all(
                judged.is_exact(terms) or judged.has_parts(product(*terms))
                for terms in dict.fromkeys(products)
            )
        case Cells():
            asked = [*block.groups, *(product(group, term) for group in block.groups for term in block.sums)]
            return all(map(judged.has, asked))


def _is_layer_judged(layer: Layer, at: tuple[float, ...], judged: Judged, intervals: Intervals) -> bool:
    factors = layer.factors or (1.0,) * len(layer.X)
    reach = sum(abs(e * f) * size(intervals[x]) for e, f, x in zip(at, factors, layer.X, strict=True))
    if reach + (0.0 if layer.offset is None else size(intervals[layer.offset])) > LARGEST_PREDICTOR:
        raise NotAdmittedError(f"a linear predictor may be beyond {LARGEST_PREDICTOR:g}")
    w, y = ONE if layer.w is None else layer.w, ONE if layer.y is None else layer.y
    return all(judged.has(product(w, x)) and judged.has(product(w, x, y)) for x in layer.X)

"""What is judged of a plan: the products of its responses and columns, and what they have in common.

A term is read as a product of *factors*. An indicator counts once, two levels of one variable make 0, and
"known" goes without saying beside anything that is 0 where the variable is missing. Products that are one are
judged once, and entries of the Gram that are one product share a lane (`span.Layout`): with 21 columns and a
binary outcome that leaves 700 of 1,891 lanes.

Numbers are judged about the middle of their declared range, x - m, where the response is judged by itself
too: that changes nothing in the span of response and response times x, but age is nearly a multiple of 1, and
its distance from the middle is not, which saves four bits of each entry.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from fedtmle_core import graph
from fedtmle_core.dictionary import Dictionary
from fedtmle_core.evaluate import Workspace
from fedtmle_core.factors import Factors, factors
from fedtmle_core.judgement import LEAVE_OUT, Judge, Name
from fedtmle_core.leaves import AbstractPiece, Between, Known, Level
from fedtmle_core.plan import Model, Plan
from fedtmle_core.span import Array, Layout
from fedtmle_core.terms import ONE, Apply, Constant, Sum, Term, product

MOST_NAMED = 3  # variables of a term that is neither a leaf nor a product
INWARD = 1.0 - 2.0**-40  # keeps the ends of a range, which intervals round outward, in [-1, 1]


@final
@dataclass(frozen=True)
class TermColumns:
    """Products of factors over the powers of two that bound them: `judgement.Columns` of a workspace."""

    workspace: Workspace
    products: tuple[Factors, ...]
    names: tuple[Name, ...]
    exponents: tuple[int, ...]

    @classmethod
    def of(cls, workspace: Workspace, named: dict[Factors, Name], dictionary: Dictionary) -> TermColumns:
        """Return the columns of products; powers of two are the factors', so that shared lanes agree."""
        intervals = graph.intervals({part for each in named for part in each}, dictionary)
        size = {part: max(map(abs, ends)) for part, ends in intervals.items()}
        exponents = (sum(_covering(size[part]) for part in each) for each in named)
        return cls(workspace, tuple(named), tuple(named.values()), tuple(exponents))

    def pieces(self) -> Iterator[Array]:
        down = -np.array(self.exponents, dtype=np.int32)[:, None]
        for piece in self.workspace.pieces([product(*each) for each in self.products]):
            yield np.ldexp(piece, down)


def _covering(size: float) -> int:
    """Return the least e with size <= 2^e."""
    fraction, power = math.frexp(size)
    return power - 1 if fraction == 0.5 else power


def judge(
    plan: Plan, workspace: Workspace, hospitals: int, models: Sequence[Model], advice: str = LEAVE_OUT
) -> Judge:
    """Return the judgement of all products of the models' responses and columns.

    They are counted, and so are the columns in the models' groups, each with the level that it is compared
    with.
    """
    counted: dict[Factors, Name] = {}
    for model in models:
        everything = (*model.columns, *reference_levels(model.columns, plan.dictionary))
        for r, c in itertools.product((*model.groups, *model.responses), everything):
            if (each := factors(r, c)) is not None:
                counted.setdefault(each, _name(r, c, plan.dictionary))
    places = {whole: place for place, whole in enumerate(counted)}
    spanned: dict[Factors, Name] = {}
    bounds: list[int] = []
    asked = ((model, r, c) for model in models for r in model.responses for c in model.columns)
    for model, r, c in asked:
        whole, alone = factors(r, c), factors(r)
        if whole is None or alone is None:
            continue
        if isinstance(c, AbstractPiece) and ONE in model.columns:
            moved, bound = factors(r, about_the_middle(c, plan.dictionary)), alone
        else:
            moved, bound = whole, whole
        if moved is not None and moved not in spanned:
            spanned[moved] = _name(r, c, plan.dictionary)
            bounds.append(places[bound])
    kept = [whole for whole in spanned if not _is_rest(whole, spanned.keys(), plan.dictionary)]
    bounds = [bound for whole, bound in zip(spanned, bounds, strict=True) if whole in kept]
    spanned = {whole: spanned[whole] for whole in kept}
    return Judge(
        counted=TermColumns.of(workspace, counted, plan.dictionary),
        columns=TermColumns.of(workspace, spanned, plan.dictionary),
        bounds=tuple(bounds),
        layout=layout(tuple(spanned)),
        people=plan.people,
        hospitals=hospitals,
        k=plan.floor,
        advice=advice,
    )


def reference_levels(columns: Sequence[Term], dictionary: Dictionary) -> list[Term]:
    """Return the levels that columns leave out of a variable: which one it is changes nothing but
    coefficients."""
    levels = dict.fromkeys(column.name for column in columns if isinstance(column, Level))
    every = (Level(name, code) for name in levels for code in range(len(dictionary.levels(name))))
    return [level for level in every if level not in columns]


def _name(response: Term, column: Term, dictionary: Dictionary) -> Name:
    return Name(describe(column, dictionary), describe(response, dictionary) if response != ONE else "")


def _is_rest(whole: Factors, spanned: Collection[Factors], dictionary: Dictionary) -> bool:
    """Return whether a column is another one less its parts by all other levels of a variable.

    It adds nothing to the span, and a Gram with such a column is known to be singular.
    """
    for part in whole:
        if isinstance(part, Level) and dictionary.is_required(part.name):
            last = len(dictionary.levels(part.name)) - 1
            others = [other for other in whole if other != part]
            levels = [factors(*others, Level(part.name, code)) for code in range(last)]
            if part.code == last and factors(*others) in spanned and all(each in spanned for each in levels):
                return True
    return False


def before_fits(plan: Plan, workspace: Workspace, hospitals: int) -> Judge:
    """Return the judgement that precedes all sums of a plan's fits."""
    return judge(plan, workspace, hospitals, plan.models)


def about_the_middle(column: Term, dictionary: Dictionary) -> Term:
    """Return a number less the middle of its interval, over half its length: from -1 to 1."""
    low, high = column.interval((), dictionary)
    half = 0.5 * (high - low) or 1.0
    return Sum((column, ONE), (INWARD / half, -INWARD * (low + half) / half))


def layout(products: Sequence[Factors]) -> Layout:
    """Return which entries of the products' Gram are one number, and which are 0 for everyone."""
    lanes: list[int | None] = []
    known: dict[Factors, int] = {}
    for j, first in enumerate(products):
        for second in products[j:]:
            whole = factors(*first, *second)
            lanes.append(None if whole is None else known.setdefault(whole, len(known)))
    return Layout(len(products), tuple(lanes))


def describe(term: Term, dictionary: Dictionary) -> str:
    """Return a column or a group in an owner's words: its factors, without going into deep terms."""
    found = factors(term)
    if found is None:
        return "nobody"
    return " x ".join(_factor(part, dictionary) for part in found) or "everybody"


def _factor(term: Term, dictionary: Dictionary) -> str:
    match term:
        case Level() | Known() | AbstractPiece() | Between():
            return _leaf(term, dictionary)
        case Sum(terms=(Constant(), Level() | Known() as part), factors=(1.0, -1.0)):
            return f"not {_leaf(part, dictionary)}"
    kind = term.function if isinstance(term, Apply) else type(term).__name__.lower()
    leaves = [
        each for each in graph.ordered([term]) if isinstance(each, Level | Known | AbstractPiece | Between)
    ]
    named = [_leaf(each, dictionary) for each in leaves]
    more = ["more"] if len(named) > MOST_NAMED else []
    return " of ".join([kind, *filter(None, [", ".join([*named[:MOST_NAMED], *more])])])


def _leaf(term: Term, dictionary: Dictionary) -> str:
    match term:
        case Level(name, code):
            return f"{name} = {dictionary.levels(name)[code]}"
        case Known(name):
            return f"{name} known"
        case AbstractPiece() | Between():
            return f"{type(term).__name__.lower()} of {term.name}"
    raise TypeError("a leaf reads one variable")

"""Which factors of a term get a column for every level: as many as the model needs, none twice.

An indicator of all levels spans the constant and the contrasts to the reference, f+ = 1 + f-. A term
a:b thus spans 1, a-, b- and a-:b-; what earlier terms span already is left out, and what is left is
put together again, largest pieces first:

    1 + a      a-          0 + a + b    a+, b-        1 + a:x        a+:x
    0 + a      a+          1 + a:b      b-, a-:b+     1 + x + a:x    a-:x

So "0 + C(site)" has a column for every site, as in R, and no formula is collinear by its coding alone.
Terms with other numeric variables span other things: each such group is counted by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from fedtmle.initial.syntax import Categorical, Formula, Term

Coding = Mapping[str, bool]  # the factors of a piece; True if all levels get a column


def codings(formula: Formula) -> list[list[Coding]]:
    """Return the pieces that each term adds; a term of numeric variables alone is one piece."""
    spanned: dict[tuple[str, ...], set[frozenset[str]]] = {(): {frozenset()} if formula.intercept else set()}
    pieces_of: dict[int, list[Coding]] = {}
    # A factor by itself is coded before an interaction that has it, wherever it was written.
    for index in sorted(range(len(formula.terms)), key=lambda k: len(_factors(formula.terms[k]))):
        term = formula.terms[index]
        numeric = tuple(sorted(str(v) for v in term if not isinstance(v, Categorical)))
        used = spanned.setdefault(numeric, set())
        names = _factors(term)
        parts = [frozenset(part) for size in range(len(names) + 1) for part in combinations(names, size)]
        new = [part for part in parts if part not in used]
        used.update(new)
        pieces_of[index] = _joined(new)
    return [pieces_of[index] for index in range(len(formula.terms))]


def _factors(term: Term) -> tuple[str, ...]:
    return tuple(dict.fromkeys(v.name for v in term if isinstance(v, Categorical)))


def _joined(parts: list[frozenset[str]]) -> list[Coding]:
    """Return the pieces with s- and s-:f- joined to s-:f+, from the left, until nothing joins."""
    pieces: list[Coding] = [dict.fromkeys(part, False) for part in parts]
    while True:
        pair = next(
            (
                (short, long)
                for short in pieces
                for long in pieces
                if len(long) == len(short) + 1 and short.items() <= long.items()
            ),
            None,
        )
        if pair is None:
            return pieces
        short, long = pair
        (extra,) = long.keys() - short.keys()
        pieces[pieces.index(long)] = {**long, extra: True}
        pieces.remove(short)

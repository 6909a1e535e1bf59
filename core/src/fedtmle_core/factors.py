"""A product as its factors: the same column has the same factors, however it is written.

An indicator counts once, two levels of one variable make 0, and "known" goes without saying beside anything
that is 0 where the variable is missing.
"""

from __future__ import annotations

from typing import TypeAlias

from fedtmle_core.leaves import AbstractPiece, Between, Fold, Known, Level
from fedtmle_core.terms import ONE, ZERO, Kept, Product, Term

Factors: TypeAlias = tuple[Term, ...]  # in the order of their digests

INDICATORS = (Level, Known, Between, Fold)  # their powers are themselves


def factors(*terms: Term) -> Factors | None:
    """Return the factors of a product, each indicator once; None if it is 0 for everyone."""
    waiting: list[Term] = list(terms)
    found: list[Term] = []
    while waiting:
        match waiting.pop():
            case Kept(of):
                waiting.append(of)
            case Product(parts):
                waiting += parts
            case part if part != ONE:
                found.append(part)
    indicators: set[Term] = {part for part in found if isinstance(part, INDICATORS)}
    levels = [part.name for part in indicators if isinstance(part, Level)]
    if ZERO in found or len(set(levels)) < len(levels):
        return None
    present = {part.name for part in found if isinstance(part, AbstractPiece | Level | Between)}
    kept = [part for part in indicators if not (isinstance(part, Known) and part.name in present)]
    kept += [part for part in found if part not in indicators]
    return tuple(sorted(kept, key=lambda part: part.digest))

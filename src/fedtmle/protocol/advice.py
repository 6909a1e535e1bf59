"""Advice about a refusal, written for the silo's owner alone: the columns that caused it, and a remedy.

The server learns the code of a refusal and nothing else. The silo's ledger holds the text, which names
columns of models but no value of a record.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedtmle.model.leverage import Pieces, RowSpace, heaviest_combination
from fedtmle.model.types import IntArray

RARE_BELOW = 10  # people in a column
SHARE = 0.5  # a column is named if its part in a combination is at least this share of the largest part
MOST_NAMED = 4  # columns

RARE = "merge the level with another (levels in the silo file), or leave the variable out of the model"
EXTREME = "put log({name}) or a spline into the formula instead, or leave the variable out of the model"
SEVERAL = "leave some of them out of the model, or merge rare levels"
TRUST = "More silos, or colluders = 0 if all owners trust each other, would help (docs/masks.md)."


def about_support(names: Sequence[str] | None, is_rare: Sequence[bool]) -> str:
    """Return advice about columns in which this silo has too few people."""
    if names is None:
        return ""
    rare = [name for name, few in zip(names, is_rare, strict=True) if few]
    return f"Too few people of this silo are in {_listed(rare)}: {RARE}."


def about_rare(names: Sequence[str]) -> str:
    """Return advice about columns and levels that too few people have, counted over all silos."""
    return f"Too few people of all silos are in {_listed(names)}: {RARE}."


def about_combination(names: Sequence[str] | None, pieces: Pieces, space: RowSpace | None = None) -> str:
    """Return advice about the combination of a model's columns in which one person's share is largest.

    ``space`` is a pooled one, by default that of the rows themselves.
    """
    if names is None:
        return ""
    order, people = _heaviest_columns(pieces, space)
    named = [names[j] for j in order]
    if len(order) == 1 and people[order[0]] >= RARE_BELOW:
        return f"One person is most of {_listed(named)}: {EXTREME.format(name=named[0])}."
    if any(people[j] < RARE_BELOW for j in order):
        rare = [names[j] for j in order if people[j] < RARE_BELOW]
        return f"One person dominates {_listed(rare)}: {RARE}."
    return f"One person is most of a combination of {_listed(named)}: {SEVERAL}."


def about_periods(names: Sequence[str] | None, pieces: Pieces, space: RowSpace | None = None) -> str:
    """Return advice about a hazard model whose sums of two periods differ by too few people.

    ``space`` is a pooled one, by default that of the rows themselves.
    """
    if names is None:
        return ""
    named = [names[j] for j in _heaviest_columns(pieces, space)[0]]
    return (
        f"Too few people leave in a period, and one of them is most of a combination of {_listed(named)}: "
        "have fewer and longer periods, put period instead of C(period) into the formula, or leave products "
        "with the period out of it."
    )


def _heaviest_columns(pieces: Pieces, space: RowSpace | None) -> tuple[list[int], IntArray]:
    """Return the columns of the combination in which one person's share is largest, and people by column."""
    parts, people = heaviest_combination(pieces, space)
    return [int(j) for j in np.argsort(-parts, kind="stable") if parts[j] >= SHARE][:MOST_NAMED], people


def about_models(names: Sequence[str] | None, *, shared: bool = False, imputed: bool = False) -> str:
    """Return advice about models of one response whose columns differ for too few people.

    If they are ``shared``, the models share residuals and belong to rules that are compared; if ``imputed``,
    they differ in imputed values alone.
    """
    if names is None:
        return ""
    if shared:
        return (
            "Two rules differ in too few people of this silo: leave one of them out, or compare rules that "
            "more people follow differently."
        )
    if imputed:
        return (
            f"Too few people of this silo lack a value that is imputed, in the model with {_listed(names)}: "
            "imputed data sets differ in these people alone. Leave these records out of the table, or ask "
            "for masked sums."
        )
    return (
        f"The model with {_listed(names)} differs from another model of the same response in too few people: "
        "use the same columns in both."
    )


def about_answer(explanation: str, column: str = "") -> str:
    """Return advice about an answer, other than a model's sums, that rests mostly on one person.

    ``column`` is the one of a fitted model in which that person stands out most, "" if there is none.
    """
    which = f"The person stands out most in {_listed([column])} of a model. " if column else ""
    return (
        f"One person is most of a sum in this answer: {explanation}. {which}Leave variables with extreme or "
        "rare values out of the models, or take logarithms; where weights are asked, truncate them more."
    )


def _listed(names: Sequence[str]) -> str:
    shown = [f"'{name}'" for name in names[:MOST_NAMED]]
    more = ", ..." if len(names) > MOST_NAMED else ""
    return f"the column{'s'[: len(names) != 1]} {', '.join(shown)}{more}"

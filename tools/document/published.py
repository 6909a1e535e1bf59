"""The page of what a study publishes, for an officer: every key of a result by its rule."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fedtmle_core.publish.allowed import RESULT
from fedtmle_core.publish.rules import Allowed, Each, Named, Rule

INTRODUCTION = """# What a study publishes

The result of a deployed study with masked sums is *published*: its readers see rounded numbers only.
`result.published(11)` does the same to any result, with a floor k = 11: nothing is said about 1 to 10
people. A study in one process, where one party holds all records, shows exact numbers. What is not on the
list below does not go out; `fedtmle_core` has the list, and the code that applies it.

## The rules

* **Counts.** One table is exact: people left out, in each arm, and there with and without an outcome. A
  cell of 1 to k - 1 people becomes 0 or k, whichever is nearer, and the largest cell takes the difference.
  Other counts are rounded to multiples of k. So no sum or difference of counts tells of a group below k,
  even to a reader who knows the rule: tests try every small table. A study with an arm below k is not
  published.
* **Estimates** are rounded to a hundredth of their standard errors, these to three digits. Intervals,
  p-values and tests are computed again from the rounded numbers.
* **Means** are rounded to what one person can change at most, and left out if one person could be more than
  half.
* **Other bounds on the propensity score** are shown if nobody, or k people, lie between two of them.

## What remains

One person moves an estimate by about 1/sqrt(n) standard errors, someone unusual by five times as much.
Rounding hides the first from 10,000 people on and the second from 250,000 on. In a smaller study, somebody
who knows everybody else's records may learn something of the last person; so may a reader of two results of
almost the same people. Two tables that divide the same few people in two ways are not judged together; a
floor below five invites that. Estimates of the same means (two arms, their difference, their ratio) narrow
each other a little. [Noise](privacy.md) holds against all of these.

## The list

A key stands for all below it that are not under another rule; [the saved result](result.md) says what each
is.

| rule | keys |
|---|---|
"""


def page() -> str:
    """Return the whole page."""
    by_rule: dict[str, list[str]] = {}
    for key, allowed in RESULT.items():
        for path, rule in collapsed(key, allowed):
            by_rule.setdefault(rule, []).append(path)
    rows = [f"| {rule} | {', '.join(f'`{path}`' for path in paths)} |" for rule, paths in by_rule.items()]
    return INTRODUCTION + "\n".join(rows) + "\n"


def collapsed(path: str, allowed: Allowed) -> Iterator[tuple[str, str]]:
    """Yield the paths of a part of the list with the names of their rules; one if all have the same."""
    if isinstance(allowed, Rule):
        yield path, allowed.name
        return
    if isinstance(allowed, Each | Named):
        yield from collapsed(path, allowed.item)
        return
    found = [each for key, inner in allowed.items() for each in collapsed(f"{path}.{key}", inner)]
    most = Counter(rule for _, rule in found).most_common(1)[0][0]
    yield path, most
    yield from (each for each in found if each[1] != most and each[0].rpartition(".")[2] not in WORDS)


WORDS = {"estimand", "name", "reason", "periods", "handled", "statement", "basis", "hidden_in", "rule"}

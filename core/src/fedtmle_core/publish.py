"""What may be published of a study: the result's exact numbers in, numbers that everybody may read out.

A document is plain data. A list (`allowed`) has a rule for each key; a key without a rule does not go out.
``k`` is the floor: nothing is said about fewer than k people. The rules, and what each hides:

* **One table is exact**: who was left out, the arms, and in each those with and without an outcome. Each of
  its cells, sums and differences is 0 or at least k; a cell of fewer becomes 0 or k (`moved`).
* **Every other count is rounded to multiples of k** (`cut`, `cells`), so that no comparison with another
  count shows a group of 1 to k - 1 people.
* **An estimate is rounded to a hundredth of its standard error**, the standard error to three digits. Limits,
  p-values and tests are computed again from the rounded numbers, whose digits they would otherwise tell.
* **A mean is rounded to what one person can change at most**, and left out if one person could be more than
  half of it.
* Sizes that describe the run or the fit have one or two digits. Iterates, messages and facts about single
  silos are left out.

What remains: one person changes an estimate by D/n, D the value of the influence function. If D is one
standard deviation of it, that is 1/sqrt(n) standard errors: below a hundredth from n = 10,000 on; if it is
five, from n = 250,000 on. In a smaller study, whoever knows everybody else, or sees two results that differ
in one person, learns something of that person. The hospitals' memory of people stands against the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from fedtmle_core.errors import InputError

Plain: TypeAlias = Any  # None, bool, int, float, str, or a list or dict (by text) of such
Document: TypeAlias = dict[str, Plain]

# The rules for counts hold for any k, table by table: the tests try all small ones. They do not cover two
# tables that divide the same few people in two ways: of all small pairs of such tables, tried in the same
# way, many give a cell away with k = 3 and 4, and few with 5.
LEAST_FLOOR = 5
SE_DIGITS = 3
TINY = 1e-12  # a smaller p-value is published as this: the sums behind it have no more digits


class NotPublishableError(InputError):
    """The document as a whole may not go out; the message names no number of it."""


# Counts.


def is_safe(counts: Sequence[int], k: int) -> bool:
    """Return whether each count is 0 or at least k."""
    return all(count == 0 or count >= k for count in counts)


def multiple(count: float, k: int) -> int:
    """Return the nearest multiple of k, at least 0."""
    return max(0, k * math.floor(count / k + 0.5))


def moved(counts: Sequence[int], k: int) -> list[int]:
    """Return the cells of a table as they are, but those of 1 to k - 1 people as 0 or k, the nearer one.

    The largest cell gives or takes the difference, so that the total, at least k, stays. A published 0 may
    be 0 or less than k/2 people, a k may be k or fewer: that a cell was moved is not seen.
    """
    largest, total = counts.index(max(counts)), sum(counts)
    for few_is in (multiple, lambda _count, _k: 0):  # to 0 only, where the largest cell has nothing to give
        found = [count if count == 0 or count >= k else few_is(count, k) for count in counts]
        found[largest] = total - sum(found[:largest]) - sum(found[largest + 1 :])
        if found[largest] >= k:
            return found
    raise NotPublishableError(f"a table of fewer than {k} people")


def cut(count: float, total: int, k: int) -> int:
    """Return the size of a group of ``total`` people, so that neither it nor the rest is 1 to k - 1.

    Each number stands for at least k consecutive sizes, but for 0 and ``total``, which stand for themselves
    and those nearer than k/2. So a second group inside this one may have the same size, or the difference may
    be k or more: it is never known to be in 1..k-1. The same holds for exact counts of other groups.
    """
    if 2 * (total - count) < k:
        return total
    nearest = multiple(count, k)
    return nearest if total - nearest >= k else max(0, k * ((total - k) // k))


def cells(counts: Sequence[float], total: int, k: int) -> list[int]:
    """Return a table's cells so that each sum of neighbours is rounded by `cut`, and all add up to ``total``.

    ``total`` is how many people the table has, as it is published elsewhere. Rounding each cell by itself
    would not do: where the total is known so is the sum of the errors, and if that is the largest possible so
    is every cell (k = 10: 4 and 14 of 18 would be 0 and 10, and nothing else would).
    """
    sums, so_far = [0], 0.0
    for count in counts:
        so_far += max(count, 0.0)
        sums.append(cut(so_far, total, k))
    sums[-1] = total
    return [after - before for before, after in pairwise(sums)]


# Numbers.


def step_above(least: float) -> float:
    """Return the smallest of 1, 2 and 5 times a power of ten that is at least ``least``."""
    if not (math.isfinite(least) and least > 0):
        raise ValueError("a step is a positive number")
    power = math.floor(math.log10(least))
    return next(
        step
        for exponent in (power - 1, power, power + 1)
        for step in (float(f"{lead}e{exponent}") for lead in (1, 2, 5))
        if step >= least
    )


def on_grid(value: float, step: float) -> float:
    """Return the nearest multiple of a step of `step_above`, as the decimal that people write."""
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    return round(round(value / step) * step, places) + 0.0


def digits(value: float, count: int, *, up: bool = False) -> float:
    """Return a number with ``count`` significant digits; ``up`` rounds a bound away from zero."""
    if value == 0 or not math.isfinite(value):
        return value
    shown = float(f"{value:.{count - 1}e}")
    if up and abs(shown) < abs(value):
        unit = 10.0 ** (math.floor(math.log10(abs(shown))) - count + 1)
        shown = float(f"{shown + math.copysign(unit, value):.{count - 1}e}")
    return shown


def estimated(value: float, error: float) -> float:
    """Return an estimate on a grid of a hundredth of its standard error or a little more."""
    if not (math.isfinite(error) and error > 0):
        return digits(value, SE_DIGITS)  # nothing varies: a risk of 0 before the first event
    return on_grid(value, step_above(digits(error, SE_DIGITS) / 100))


def chi2_tail(x: float, df: int) -> float:
    """Return P(X >= x) for X chi-squared with integer degrees of freedom, by its finite sum."""
    if x <= 0 or df <= 0:
        return 1.0
    half = x / 2
    if df % 2 == 0:
        terms = [-half + i * math.log(half) - math.lgamma(i + 1) for i in range(df // 2)]
        return min(1.0, sum(map(math.exp, terms)))
    terms = [-half + (i - 0.5) * math.log(half) - math.lgamma(i + 0.5) for i in range(1, (df + 1) // 2)]
    return min(1.0, math.erfc(math.sqrt(half)) + sum(map(math.exp, terms)))


def student_tail(t: float, df: float | None) -> float:
    """Return P(|T| >= t) for t with df degrees of freedom, rounded down to an integer; None is normal."""
    if df is None or df > 1000:  # the normal p-value then has the same three decimals
        return math.erfc(t / math.sqrt(2))
    whole = max(1, math.floor(df))
    angle = math.atan(t / math.sqrt(whole))
    sine, cosine = math.sin(angle), math.cos(angle)
    total = term = cosine if whole % 2 else 1.0
    for i in range(3 if whole % 2 else 2, whole - 1, 2):
        term *= cosine * cosine * (i - 1) / i
        total += term
    if whole % 2 == 0:
        return max(0.0, 1.0 - sine * total)
    return max(0.0, 1.0 - (angle + (sine * total if whole > 1 else 0.0)) * 2 / math.pi)


def p_value(p: float) -> float:
    return max(TINY, digits(p, 3))


# The table of participants.


@dataclass(frozen=True, kw_only=True)
class Flow:
    """The counts of the one exact table, as they are published."""

    omitted: int
    n: int
    arms: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...] = ()  # by arm, those with an outcome by its kind (causes of events)

    @property
    def records(self) -> int:
        """Everybody, those left out too."""
        return self.n + self.omitted

    @property
    def observed(self) -> tuple[int, ...]:
        """People with an outcome, by arm."""
        return tuple(map(sum, self.parts))

    @property
    def with_outcome(self) -> int:
        """People with an outcome."""
        return sum(self.observed)


def flow(k: int, *, n: int, omitted: int, arms: Sequence[int], parts: Sequence[Sequence[int]] = ()) -> Flow:
    """Return the published table of those left out, the arms, and each arm's ``parts`` with an outcome.

    All counts are as they are, but for cells of 1 to k - 1 people: few left out, or few in a part of an arm,
    are `moved`. An arm of so few is no study that anyone may read.
    """
    if n < k or not is_safe([*arms, max(n - sum(arms), 0)], k):
        raise NotPublishableError(f"fewer than {k} people were analysed, or are in an arm")
    inner = [
        moved([*part, arm - sum(part)], k)[:-1] if arm else [0] * len(part)
        for arm, part in zip(arms, parts, strict=False)
    ]
    return Flow(
        omitted=omitted if is_safe([omitted], k) else multiple(omitted, k),
        n=n,
        arms=tuple(arms),
        parts=tuple(map(tuple, inner)),
    )


# Lists and rules.


@dataclass(frozen=True, kw_only=True)
class Whole:
    """What a rule may look at: the floor, the exact document, and the published table of counts."""

    k: int
    document: Mapping[str, Plain]
    flow: Flow

    @property
    def facts(self) -> Mapping[str, Plain]:
        """The plan's facts about the target: bounds of the outcome, its kind."""
        target: Mapping[str, Plain] = (self.document.get("study") or {}).get("target") or {}
        return target


Apply: TypeAlias = Callable[[Plain, Whole], Plain]


@dataclass(frozen=True)
class Rule:
    """A rule by its name, in words for an officer; ``keys`` are those of an object that it covers."""

    name: str
    apply: Apply
    keys: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True)
class Each:
    """A list, each item by the same rule."""

    item: Allowed


@dataclass(frozen=True)
class Named:
    """An object whose keys are names of the plan: silos, components, variables, levels."""

    item: Allowed


Allowed: TypeAlias = "Rule | Each | Named | Mapping[str, Allowed]"


def published(document: Document, allowed: Mapping[str, Allowed], whole: Whole) -> Document:
    """Return what goes out of a document: the keys on the list, each by its rule; all others stay."""
    if whole.k < LEAST_FLOOR:
        raise NotPublishableError(f"the floor must be at least {LEAST_FLOOR}")
    shown = _apply(document, allowed, whole)
    if not isinstance(shown, dict):
        raise TypeError("a document is an object")
    return shown


def _apply(value: Plain, allowed: Allowed, whole: Whole) -> Plain:
    if isinstance(allowed, Rule):
        return None if value is None else allowed.apply(value, whole)
    if value is None:
        return None
    if isinstance(allowed, Each):
        return [_apply(item, allowed.item, whole) for item in _of(list, value)]
    if isinstance(allowed, Named):
        return {name: _apply(item, allowed.item, whole) for name, item in _of(dict, value).items()}
    return {
        key: _apply(item, allowed[key], whole) for key, item in _of(dict, value).items() if key in allowed
    }


def _of(kind: type, value: Plain) -> Plain:
    if not isinstance(value, kind):
        raise NotPublishableError(f"the list of what may be published has a {kind.__name__} here")
    return value


def unlisted(value: Plain, allowed: Allowed, path: str = "") -> Iterator[str]:
    """Yield the paths of a document's keys that are not on the list, and so do not go out."""
    if isinstance(value, list):
        inner = allowed.item if isinstance(allowed, Each) else allowed
        for item in value:
            yield from unlisted(item, inner, f"{path}[]")
    elif isinstance(value, dict) and isinstance(allowed, Named):
        for item in value.values():
            yield from unlisted(item, allowed.item, f"{path}.*")
    elif isinstance(value, dict):
        for key, item in value.items():
            if isinstance(allowed, Mapping) and key in allowed:
                yield from unlisted(item, allowed[key], f"{path}.{key}")
            elif not isinstance(allowed, Rule) or (allowed.keys and key not in allowed.keys):
                yield f"{path}.{key}"


def listed(allowed: Allowed, path: str = "") -> Iterator[tuple[str, Rule]]:
    """Yield each path of the list with its rule."""
    if isinstance(allowed, Rule):
        yield path, allowed
    elif isinstance(allowed, Each):
        yield from listed(allowed.item, f"{path}[]")
    elif isinstance(allowed, Named):
        yield from listed(allowed.item, f"{path}.*")
    else:
        for key, inner in allowed.items():
            yield from listed(inner, f"{path}.{key}" if path else key)

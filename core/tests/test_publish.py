"""No published counts together show a few people, even to a reader who knows the rule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import combinations, product

import numpy as np
import pytest

from fedtmle_core.publish import (
    LEAST_FLOOR,
    Allowed,
    Named,
    NotPublishableError,
    Rule,
    Whole,
    cells,
    chi2_tail,
    cut,
    digits,
    estimated,
    flow,
    is_safe,
    moved,
    multiple,
    on_grid,
    published,
    step_above,
    student_tail,
    unlisted,
)

K = LEAST_FLOOR
Table = tuple[int, ...]


def tables(size: int, total: int) -> Iterator[Table]:
    """Yield every table of ``size`` cells with this total."""
    if size == 1:
        yield (total,)
        return
    for first in range(total + 1):
        yield from ((first, *rest) for rest in tables(size - 1, total - first))


def unions(size: int) -> list[tuple[int, ...]]:
    return [part for r in range(1, size) for part in combinations(range(size), r)]


def learned(
    shown: Mapping[Hashable, list[Table]], size: int, k: int
) -> list[tuple[Hashable, tuple[int, ...]]]:
    """Return every union of cells of which a reader who knows the rule learns that it has 1 to k - 1 people.

    ``shown`` has, for each thing that may be published, all tables of which it is published.
    """
    found = []
    for seen, possible in shown.items():
        for part in unions(size):
            counts = {sum(table[i] for i in part) for table in possible}
            if min(counts) > 0 and max(counts) < k:
                found.append((seen, part))
    return found


def by_what_is_shown(
    size: int, totals: Iterable[int], show: Callable[[Table], Hashable]
) -> dict[Hashable, list[Table]]:
    shown: dict[Hashable, list[Table]] = defaultdict(list)
    for total in totals:
        for table in tables(size, total):
            shown[show(table)].append(table)
    return shown


@pytest.mark.parametrize("k", [2, 3, 5, 6])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_cells_of_a_table_are_not_learned(size: int, k: int) -> None:
    totals = range(k, 26 if size < 4 else 20)
    shown = by_what_is_shown(size, totals, lambda table: (sum(table), *cells(table, sum(table), k)))
    assert len(shown) < sum(math.comb(total + size - 1, size - 1) for total in totals) / 1.5
    assert learned(shown, size, k) == []


@pytest.mark.parametrize("k", [2, 3, 5, 6])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_cells_of_the_exact_table_are_not_learned(size: int, k: int) -> None:
    totals = range(k, 26 if size < 4 else 20)
    shown = by_what_is_shown(size, totals, lambda table: tuple(moved(table, k)))
    exact = sum(seen in possible for seen, possible in shown.items())
    assert exact == len(shown), "what is published is a possible table"
    assert all(is_safe(seen, k) for seen in shown)  # type: ignore[arg-type]
    assert learned(shown, size, k) == []


@pytest.mark.parametrize("k", [3, 5, 6])
def test_a_table_of_some_of_the_exact_tables_people_is_not_learned(k: int) -> None:
    """Those without an outcome, and two bins of those with one."""

    def show(table: Table) -> tuple[int, ...]:
        seen, lost = moved([table[1] + table[2], table[0]], k)
        return (seen, lost, *cells(table[1:], seen, k))

    assert learned(by_what_is_shown(3, range(k, 24), show), 3, k) == []


def test_rounding_each_cell_by_itself_would_be_learned() -> None:
    def alone(table: Table) -> tuple[int, ...]:
        return (sum(table), *(multiple(count, K) for count in table))

    assert learned(by_what_is_shown(2, range(K, 26), alone), 2, K)


def test_hiding_only_small_cells_would_be_learned() -> None:
    def hidden(table: Table) -> tuple[object, ...]:
        return (sum(table), *(count if count == 0 or count >= K else None for count in table))

    assert learned(by_what_is_shown(2, range(K, 26), hidden), 2, K)


def test_a_group_beside_a_larger_and_a_smaller_exact_one_is_not_learned() -> None:
    """Exact counts of nested groups differ by nobody or K people; the one between them is rounded."""
    n = 27
    for large, small in product(range(n + 1), repeat=2):
        gaps = (n - large, large - small, small)
        if min(gaps) < 0 or not is_safe(gaps, K):
            continue
        between: dict[int, set[int]] = defaultdict(set)
        for count in range(small, large + 1):
            between[cut(count, n, K)].add(count)
        for possible in between.values():
            for other in (n, large, small, 0):
                apart = {abs(count - other) for count in possible}
                assert 0 in apart or max(apart) >= K


def test_two_nested_groups_are_not_learned() -> None:
    shown: dict[Hashable, set[int]] = defaultdict(set)
    for total, (a, b) in product(range(K, 30), product(range(30), repeat=2)):
        if a <= b <= total:
            shown[total, cut(a, total, K), cut(b, total, K)].add(b - a)
    assert len(shown) > 100
    assert not [seen for seen, added in shown.items() if added <= set(range(1, K))]


def test_rounded_groups_keep_their_order() -> None:
    for total, k in product(range(11, 200, 7), (5, 10, 11)):
        shown = [cut(count, total, k) for count in range(total + 1)]
        assert shown == sorted(shown)
        assert (shown[0], shown[-1]) == (0, total)
        assert is_safe(shown, k)
        assert is_safe([total - each for each in shown], k)
        assert max(abs(c - each) for c, each in enumerate(shown)) < 2 * k


def test_cells_add_up_to_the_total_that_is_published_elsewhere() -> None:
    assert cells([0, 8, 418, 182], 608, 10) == [0, 10, 420, 178]
    assert cells([3, 4, 2], 9, 10) == [0, 9, 0]
    assert cells([20.2, -3.0, 11.7], 30, 10) == [20, 0, 10], "noisy counts may be negative"


def test_the_table_of_participants() -> None:
    exact = flow(10, n=985, omitted=0, arms=[608, 377], parts=[[561], [347]])
    assert (exact.records, exact.arms, exact.observed, exact.with_outcome) == (
        985,
        (608, 377),
        (561, 347),
        908,
    )
    few = flow(10, n=985, omitted=3, arms=[608, 377], parts=[[606], [371]])
    assert (few.records, few.omitted, few.observed) == (985, 0, (608, 367))
    causes = flow(10, n=300, omitted=12, arms=[150, 140], parts=[[3, 20], [7, 0]])
    assert (causes.records, causes.parts) == (312, ((0, 20), (10, 0)))
    assert causes.observed == (20, 10)
    empty = flow(10, n=100, omitted=0, arms=[100, 0], parts=[[50], [0]])
    assert empty.observed == (50, 0)


@pytest.mark.parametrize(("n", "arms"), [(9, [9]), (100, [94, 6]), (100, [50, 47])])
def test_a_study_of_few_people_is_not_published(n: int, arms: list[int]) -> None:
    with pytest.raises(NotPublishableError, match="fewer than 10 people"):
        flow(10, n=n, omitted=0, arms=arms)


def test_a_table_of_few_people_is_not_published() -> None:
    with pytest.raises(NotPublishableError, match="fewer than 10"):
        moved([4, 5], 10)


def test_the_floor_is_at_least_five() -> None:
    whole = Whole(k=LEAST_FLOOR - 1, document={}, flow=flow(4, n=9, omitted=0, arms=[9]))
    with pytest.raises(NotPublishableError, match="at least 5"):
        published({}, {}, whole)


# Numbers.


def test_steps_are_one_two_and_five() -> None:
    assert [step_above(x) for x in (1.0, 1.01, 2.1, 5.5, 0.011, 0.02, 0.021, 730.0)] == [
        1.0, 2.0, 5.0, 10.0, 0.02, 0.02, 0.05, 1000.0,
    ]  # fmt: skip
    for x in [10 ** np.random.default_rng(k).uniform(-12, 12) for k in range(500)]:
        assert x <= step_above(x) <= 2.5 * x * (1 + 1e-12)
    with pytest.raises(ValueError, match="positive"):
        step_above(0.0)


def test_numbers_on_a_grid_are_the_decimals_that_people_write() -> None:
    assert on_grid(9.339626, 0.02) == 9.34
    assert on_grid(-0.004, 0.01) == 0.0
    assert math.copysign(1.0, on_grid(-0.004, 0.01)) == 1.0
    assert on_grid(1234.0, 50.0) == 1250.0


def test_digits_and_bounds() -> None:
    assert [digits(x, 2) for x in (0.0, 0.0123, 985.0, -3.14159)] == [0.0, 0.012, 980.0, -3.1]
    assert [digits(x, 1, up=True) for x in (1.18e-7, 9.7e-7, 2e-7, 0.0)] == [2e-7, 1e-6, 2e-7, 0.0]
    assert digits(math.inf, 2) == math.inf
    for k in range(300):
        x = 10 ** np.random.default_rng(k).uniform(-9, 9)
        assert x <= digits(x, 1, up=True) <= 2 * x


def test_an_estimate_moves_by_a_fortieth_of_its_standard_error_at_most() -> None:
    for k in range(300):
        rng = np.random.default_rng(k)
        error, value = 10 ** rng.uniform(-6, 6), rng.normal(0, 3)
        assert abs(estimated(value, error) - value) <= error / 79
    assert estimated(9.339626689852793, 1.0930205) == 9.34
    assert estimated(0.0, 0.0) == 0.0
    assert estimated(0.123456, 0.0) == 0.123


def test_rounding_hides_a_typical_person_from_ten_thousand_on() -> None:
    """One person moves an estimate by D/n, here of one standard deviation: 1/sqrt(n) standard errors."""

    def told(n: int) -> float:
        """Return how often the estimates with and without that person are published as different numbers."""
        rng, error = np.random.default_rng(n), 1.0
        pairs = [(x := rng.uniform(-5, 5), x + error / math.sqrt(n)) for _ in range(4000)]
        return sum(estimated(a, error) != estimated(b, error) for a, b in pairs) / len(pairs)

    assert told(1_000) == 1.0
    assert told(40_000) < 0.55
    assert told(1_000_000) < 0.12


@pytest.mark.parametrize(
    ("df", "x", "tail"),
    [(1, 3.841458820694124, 0.05), (2, 5.991464547107979, 0.05), (7, 14.067140449340169, 0.05),
     (10, 2.5582121601872081, 0.99), (3, 0.0, 1.0), (5, 60.0, 1.2121e-11)],
)  # fmt: skip
def test_chi_squared_tails(df: int, x: float, tail: float) -> None:
    assert chi2_tail(x, df) == pytest.approx(tail, rel=1e-3)


@pytest.mark.parametrize(
    ("df", "t", "tail"),
    [(1.0, 12.706204736, 0.05), (2.0, 4.30265273, 0.05), (3.0, 3.182446305, 0.05), (7.9, 2.364624252, 0.05),
     (180.25, 1.973230823, 0.05), (None, 1.959963985, 0.05), (4000.0, 1.959963985, 0.05), (12.0, 0.0, 1.0)],
)  # fmt: skip
def test_student_tails(df: float | None, t: float, tail: float) -> None:
    assert student_tail(t, df) == pytest.approx(tail, rel=1e-4)


# Lists.

ECHO = Rule("as it is", lambda value, _: value)


def whole(document: Mapping[str, object] | None = None, k: int = 10) -> Whole:
    return Whole(k=k, document=document or {}, flow=flow(k, n=100, omitted=0, arms=[60, 40]))


def test_a_key_that_is_not_on_the_list_stays() -> None:
    document = {"a": 1, "b": {"c": 2, "secret": 3}, "d": {"x": {"e": 4, "f": 5}}, "secret": 6}
    allowed: Mapping[str, Allowed] = {"a": ECHO, "b": {"c": ECHO}, "d": Named({"e": ECHO})}
    assert published(document, allowed, whole()) == {"a": 1, "b": {"c": 2}, "d": {"x": {"e": 4}}}
    assert sorted(unlisted(document, allowed)) == [".b.secret", ".d.*.f", ".secret"]


def test_what_has_another_form_than_the_list_says_does_not_go_out() -> None:
    with pytest.raises(NotPublishableError, match="has a dict here"):
        published({"d": [1, 2]}, {"d": {"e": ECHO}}, whole())

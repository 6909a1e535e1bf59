"""No published counts together show a few people, even to a reader who knows the rule."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import combinations, product

import numpy as np
import pytest

from fedtmle_core.publish.counts import (
    NotPublishableError,
    cells,
    cut,
    flow,
    is_safe,
    moved,
    multiple,
)
from fedtmle_core.publish.numbers import digits, estimated, on_grid, step_above
from fedtmle_core.publish.rules import ESTIMATE, LADDER, Allowed, Named, Rule, Whole, deep, published

K = 5
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
    assert (exact.omitted, exact.arms, exact.observed) == (0, (608, 377), (561, 347))
    few = flow(10, n=985, omitted=3, arms=[608, 377], parts=[[606], [371]])
    assert (few.omitted, few.observed) == (0, (608, 367))
    causes = flow(10, n=300, omitted=12, arms=[150, 140], parts=[[3, 20], [7, 0]])
    assert (causes.omitted, causes.parts) == (12, ((0, 20), (10, 0)))
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


# Lists.

ECHO = Rule("as it is", lambda value, _: value)


def whole(document: Mapping[str, object] | None = None, k: int = 10) -> Whole:
    return Whole(k=k, document=document or {}, flow=flow(k, n=100, omitted=0, arms=[60, 40]))


def test_a_key_that_is_not_on_the_list_stays() -> None:
    document = {"a": 1, "b": {"c": 2, "secret": 3}, "d": {"x": {"e": 4, "f": 5}}, "secret": 6}
    allowed: Mapping[str, Allowed] = {"a": ECHO, "b": {"c": ECHO}, "d": Named({"e": ECHO})}
    assert published(document, allowed, whole()) == {"a": 1, "b": {"c": 2}, "d": {"x": {"e": 4}}}


def test_a_number_is_a_number() -> None:
    half = deep("half", lambda value, _: value / 2, words=True)
    assert half.apply({"a": [4, 1.0, None, "word"]}, whole()) == {"a": [2, 0.5, None, "word"]}
    with pytest.raises(NotPublishableError, match="a number here"):
        deep("half", lambda value, _: value / 2).apply("word", whole())
    with pytest.raises(NotPublishableError, match="a number here"):
        half.apply(True, whole())


def test_what_has_another_form_than_the_list_says_does_not_go_out() -> None:
    with pytest.raises(NotPublishableError, match="has a dict here"):
        published({"d": [1, 2]}, {"d": {"e": ECHO}}, whole())


# Estimates.


def row(scale: str, estimate: float, error: float, **more: object) -> dict[str, object]:
    """Return a row with a 95 % interval."""
    z = 1.959963984540054
    spread = z * error / estimate
    low, high = (
        (estimate * math.exp(-spread), estimate * math.exp(spread))
        if scale == "ratio"
        else (estimate - z * error, estimate + z * error)
    )
    distance = math.log(estimate) * estimate / error if scale == "ratio" else estimate / error
    p = None if scale == "value" else math.erfc(abs(distance) / math.sqrt(2))
    shown = {"estimand": "E", "estimate": estimate, "std_error": error, "conf_low": low, "conf_high": high}
    return {**shown, "p_value": p, "scale": scale, **more}


@pytest.mark.parametrize("scale", ["difference", "ratio", "value"])
def test_whatever_follows_from_an_estimate_follows_from_the_rounded_one(scale: str) -> None:
    """Two estimates that are published as one number give the same row: nothing undoes the rounding."""
    rng, pairs = np.random.default_rng(5), 0
    for _ in range(500):
        error = 10 ** rng.uniform(-3, 3)
        value = abs(rng.normal(3, 1)) * error + 0.2 * error
        first, second = (row(scale, value * (1 + d), error) for d in (0.0, 1e-4))
        shown = [ESTIMATE.apply(each, whole()) for each in (first, second)]
        if shown[0]["estimate"] == shown[1]["estimate"]:
            pairs += 1
            assert shown[0] == shown[1]
        for key in ("estimate", "conf_low", "conf_high"):
            assert abs(shown[0][key] - first[key]) < 0.2 * error * max(1, first[key] / value)  # type: ignore[operator]
        if scale == "value":
            assert shown[0]["p_value"] is None
    assert pairs > 300


def test_a_limit_at_a_bound_of_the_parameter_stays_there() -> None:
    shown = ESTIMATE.apply({**row("value", 0.02, 0.015), "conf_low": 0.0}, whole())
    assert shown["conf_low"] == 0.0
    assert shown["conf_high"] == pytest.approx(0.049, abs=5e-4)
    assert "secret" not in ESTIMATE.apply(row("value", 2.0, 1.0, secret=3), whole())


def test_an_estimate_that_does_not_vary_is_its_interval() -> None:
    shown = ESTIMATE.apply({**row("value", 0.5, 1.0), "std_error": 0.0}, whole())
    assert (shown["conf_low"], shown["conf_high"], shown["std_error"]) == (0.5, 0.5, 0.0)


def test_the_difference_of_a_finer_grid_has_two_decimals() -> None:
    assert ESTIMATE.apply(row("value", 2.0, 1.0, difference=0.0063762), whole())["difference"] == 0.01


def test_a_p_value_of_a_t_interval_has_one_digit() -> None:
    imputed = whole({"imputation": {"datasets": 5}})
    assert ESTIMATE.apply(row("difference", 2.0, 1.0), imputed)["p_value"] == 0.05
    assert ESTIMATE.apply(row("difference", 2.0, 1.0), whole())["p_value"] == 0.0455


def ladder(people: list[list[int]] | None, estimates: list[float], truncated: list[int]) -> list[float]:
    """Return the bounds of the rungs that are published."""
    rungs = [
        {"bound": 0.01 * (k + 1), "estimates": [row("difference", each, 1.0)]}
        for k, each in enumerate(estimates)
    ]
    for rung, counts in zip(rungs, people or [], strict=False):
        rung["people"] = counts
    return [rung["bound"] for rung in LADDER.apply(rungs, whole({"truncated": truncated}))]


def test_rungs_differ_by_nobody_or_by_k_people() -> None:
    assert ladder(None, [2.0, 2.0, 2.0], [0, 0]) == [0.01, 0.02, 0.03]
    assert ladder(None, [2.0, 2.0, 2.1], [0, 0]) == [0.01, 0.02]
    assert ladder(None, [2.0, 2.0], [0, 12]) == []
    assert ladder([[0, 0], [3, 0], [10, 0], [10, 9], [12, 10], [20, 10]], [2.0] * 6, [0, 0]) == [
        0.01,
        0.03,
        0.06,
    ]

"""Judging whom a study is about: pairs, snapshots and combinations, against a longhand search."""

from __future__ import annotations

import hashlib
import hmac
import itertools
import time

import numpy as np
import pytest

from fedtmle_core.people import (
    PERSON,
    Asked,
    Basis,
    Census,
    Conflict,
    Digester,
    Refusal,
    Snapshot,
    atoms,
    judge,
)
from fedtmle_core.types import Array

KEY = bytes(range(32))
RECORD: Basis = ("id", "y", "w")


def asked(*people: int, basis: Basis = PERSON, plan: str = "") -> Asked:
    name = plan or "plan " + " ".join(map(str, people[:5]))
    return Asked(plans=(name,), basis=basis, people=np.array(sorted(people), dtype=np.uint64))


def census(*people: int, basis: Basis = PERSON) -> Census:
    digests = np.array(people, dtype=np.uint64)
    return Census(views={basis: digests}, own=(basis,), reads=frozenset({"y"}))


def kept(verdict: Snapshot | Refusal) -> list[bool]:
    assert isinstance(verdict, Snapshot)
    return [bool(row) for row in verdict.kept]


def test_a_digest_is_hmac_sha256_of_label_and_identifier() -> None:
    """So that another implementation can read the sets of a restored home."""
    plain = hmac.new(KEY, len(b"person").to_bytes(4, "big") + b"person" + b"17", hashlib.sha256).digest()
    assert Digester(KEY).of_people([b"17"]).tolist() == [int.from_bytes(plain[:8], "little")]
    names = b"".join(len(name).to_bytes(4, "big") + name for name in (b"id", b"y"))
    label = b"record" + names
    message = len(label).to_bytes(4, "big") + label + (5).to_bytes(8, "little") + (6).to_bytes(8, "little")
    plain = hmac.new(KEY, message, hashlib.sha256).digest()
    found = Digester(KEY).of_records(("id", "y"), np.array([[5, 6]], dtype=np.uint64))
    assert found.tolist() == [int.from_bytes(plain[:8], "little")]


def test_digests_depend_on_key_label_and_columns() -> None:
    cells = np.array([[1, 2]], dtype=np.uint64)
    digester, other = Digester(KEY), Digester(bytes(32))
    found = [
        digester.of_people([b"1"]),
        other.of_people([b"1"]),
        digester.of([b"1"]),
        digester.of_records(("a", "b"), cells),
        digester.of_records(("b", "a"), cells),
        digester.of_records(("ab", ""), cells),
        other.of_records(("a", "b"), cells),
    ]
    assert len({int(each[0]) for each in found}) == len(found)


def test_equal_records_are_different_people_and_rows_of_a_person_are_one() -> None:
    records = census(7, 7, 9, 7, basis=("y",))
    assert len(set(records.rows(("y",)).tolist())) == 4
    assert len(records.people(("y",))) == 4
    again = census(7, 9, 7, 7, basis=("y",))
    assert records.people(("y",)).tolist() == again.people(("y",)).tolist()  # the order of rows is no matter
    assert len(census(7, 7, 9, 7).people(PERSON)) == 2
    assert census(basis=("y",)).people(("y",)).tolist() == []


def test_nobody_new_and_many_new_are_answered_from_all_rows() -> None:
    assert kept(judge(census(1, 2, 3), [], least=5)) == [True] * 3
    assert kept(judge(census(3, 1, 2), [asked(1, 2, 3)], least=5)) == [True] * 3
    many = range(10)
    assert kept(judge(census(*many), [asked(*range(5))], least=5)) == [True] * 10
    assert kept(judge(census(*range(5)), [asked(*many)], least=5)) == [True] * 5


def test_few_newcomers_are_left_out() -> None:
    verdict = judge(census(9, 1, 2, 3, 8, 4, 5), [asked(1, 2, 3, 4, 5, plan="first")], least=3)
    assert kept(verdict) == [False, True, True, True, False, True, True]
    assert isinstance(verdict, Snapshot)
    assert verdict.plans == ("first",)
    assert verdict.left_out == 2


def test_all_rows_of_a_newcomer_are_left_out() -> None:
    assert kept(judge(census(1, 9, 2, 9, 3), [asked(1, 2, 3)], least=2)) == [True, False, True, False, True]


def test_few_who_left_are_refused_with_the_earlier_study_named() -> None:
    verdict = judge(census(1, 2, 3), [asked(1, 2, 3, 4, plan="first")], least=3)
    assert isinstance(verdict, Refusal)
    assert (verdict.conflict, verdict.plans, verdict.people) == (Conflict.LEFT, ("first",), 1)


def test_one_side_counts_even_if_many_differ_on_the_other() -> None:
    """Nine came and one left: the sum of the nine less the one is judged by each side."""
    verdict = judge(census(*range(2, 30)), [asked(*range(1, 21))], least=5)
    assert isinstance(verdict, Refusal)
    assert verdict.conflict is Conflict.LEFT


def test_a_cut_may_lead_to_another_and_to_a_refusal() -> None:
    base = tuple(range(20))
    first, second = asked(*base, plan="a"), asked(*base, *range(20, 30), 98, plan="b")
    both = judge(census(*base, *range(20, 30), 98, 99), [first, second], least=5)
    assert isinstance(both, Snapshot)
    assert both.plans == ("b",)  # 99 is left out: eleven more than in the first are many
    assert both.left_out == 1
    # Without 98, who is not in the third, the second lacks one person: that cannot be undone.
    third = asked(*base, *range(20, 30), plan="c")
    verdict = judge(census(*base, *range(20, 30), 98), [third, second], least=5)
    assert isinstance(verdict, Refusal)
    assert verdict.plans == ("b",)


def test_cohorts_that_single_out_one_person_only_together() -> None:
    """A + B less A + C is B less C, and so is B + D less C + D: but for one more, any two differ by many."""
    a, b, c, d = range(100), range(100, 140), range(140, 180), range(200, 300)
    earlier = [asked(*a, *b, plan="1"), asked(*a, *c, plan="2"), asked(*b, *d, plan="3")]
    for some in itertools.chain.from_iterable(itertools.combinations(earlier, k) for k in range(4)):
        verdict = judge(census(*c, *d, 999), some, least=5)
        assert isinstance(verdict, Refusal) == (len(some) == 3), some
    assert isinstance(verdict, Refusal)
    assert verdict.conflict is Conflict.COMBINED
    assert verdict.people == 1
    assert verdict.plans == ("1", "2", "3")
    assert isinstance(judge(census(*c, *d), earlier, least=5), Snapshot)


def test_the_same_people_are_never_refused_for_what_was_answered_before() -> None:
    """Sets from before this rule may already single somebody out; a study of the same people adds nothing."""
    sets = [asked(*range(10)), asked(*range(11))]
    assert isinstance(judge(census(*range(10)), sets[:1], least=5), Snapshot)
    more = [*sets, asked(*range(40, 60))]
    assert isinstance(judge(census(*range(40, 60)), more, least=5), Snapshot)
    assert isinstance(judge(census(*range(70, 90)), more, least=5), Snapshot)


def test_records_are_compared_if_the_study_reads_a_column_of_theirs() -> None:
    other: Basis = ("id", "z")
    people = np.arange(10, dtype=np.uint64)
    records, corrected = people + 100, people + 100
    corrected[3] = 999
    today = Census(
        views={PERSON: people, RECORD: corrected, other: corrected},
        own=(PERSON, RECORD),
        reads=frozenset({"y", "w"}),
    )
    before = Asked(plans=("p",), basis=RECORD, people=records)
    verdict = judge(today, [asked(*range(10)), before], least=5)
    assert isinstance(verdict, Refusal)
    assert verdict.basis == RECORD
    elsewhere = Asked(plans=("p",), basis=other, people=records)
    assert isinstance(judge(today, [asked(*range(10)), elsewhere], least=5), Snapshot)


def test_a_newcomer_whose_record_is_new_is_left_out_once() -> None:
    people = np.arange(10, dtype=np.uint64)
    today = Census(views={PERSON: people, RECORD: people + 100}, own=(PERSON, RECORD), reads=frozenset({"y"}))
    earlier = [asked(*range(9)), asked(*range(100, 109), basis=RECORD)]
    assert kept(judge(today, earlier, least=5)) == [True] * 9 + [False]
    assert kept(judge(today, earlier[1:], least=5)) == [True] * 9 + [False]


def longhand(sets: list[frozenset[int]], least: int) -> float:
    """The largest share of a group of fewer than ``least``, by the best combination that a solver finds."""
    everyone = sorted(frozenset().union(*sets))
    design = np.array([[float(person in each) for each in sets] for person in everyone])
    kinds = {tuple(row) for row in design}
    largest = 0.0
    for kind in kinds:
        here = (design == kind).all(axis=1)
        if here.sum() < least:
            target: Array = here.astype(np.float64)
            fit = np.linalg.lstsq(design, target, rcond=None)[0]
            weights = design @ fit
            if (weights**2).sum() > 0:
                largest = max(largest, float((weights[here] ** 2).sum() / (weights**2).sum()))
    return largest


def test_combinations_are_judged_as_a_longhand_search_does() -> None:
    """The projection of a group's indicator is the combination in which its share is largest."""
    random = np.random.default_rng(3)
    decided = {True: 0, False: 0}
    for _ in range(400):
        blocks = [frozenset((10 * k + j) for j in range(random.integers(1, 9))) for k in range(5)]
        sets: list[frozenset[int]] = []
        while len(sets) < 4:
            chosen = [block for block in blocks if random.random() < 0.6]
            if chosen:
                sets.append(frozenset().union(*chosen))
        *before, last = sets
        if any(0 < len(one - other) < 4 for each in before for one, other in ((each, last), (last, each))):
            continue  # by pairs
        verdict = judge(census(*last), [asked(*each) for each in before], least=4)
        share = longhand(sets, 4)
        expected = share > 0.5 + 1e-9 and share > longhand(before, 4) + 1e-9 and last not in before
        assert isinstance(verdict, Refusal) == expected, (share, verdict)
        decided[expected] += 1
    assert min(decided.values()) > 10, decided  # both answers occurred


def test_atoms_are_the_distinct_histories() -> None:
    sets = [np.array(each, dtype=np.uint64) for each in ([1, 2, 3], [3, 4], [])]
    histories, counts = atoms(sets)
    found = {tuple(column.tolist()): int(count) for column, count in zip(histories.T, counts, strict=True)}
    assert found == {(True, False, False): 2, (True, True, False): 1, (False, True, False): 1}


def test_an_empty_study_and_an_empty_set_are_no_error() -> None:
    assert kept(judge(census(), [asked(*range(9))], least=5)) == []
    assert kept(judge(census(1), [asked()], least=1)) == [True]


@pytest.mark.slow
def test_a_million_people_take_seconds() -> None:
    random = np.random.default_rng(1)
    began = time.monotonic()
    digests = Digester(KEY).of_people(b"%d" % k for k in range(1_000_000))
    after_digests = time.monotonic()
    sets = [
        Asked(plans=(str(k),), basis=PERSON, people=np.sort(digests[random.random(10**6) < 0.9]))
        for k in range(5)
    ]
    today = Census(views={PERSON: digests}, own=(PERSON,), reads=frozenset())
    after_sets = time.monotonic()
    assert isinstance(judge(today, sets, least=5), Snapshot)
    assert after_digests - began < 10
    assert time.monotonic() - after_sets < 30

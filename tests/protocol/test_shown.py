"""What some silos leave out is asked for under masks only where no silo stands alone."""

from __future__ import annotations

import itertools
from operator import add
from typing import Any, cast

import numpy as np
import pytest

from fedtmle.protocol.bins import PooledBin, PooledBins
from fedtmle.protocol.looks import LookGroups
from fedtmle.protocol.masked import ShownQuery
from fedtmle.protocol.query import JointQuery
from fedtmle.protocol.sums import TallyQuery
from fedtmle.runtime.certificate import heard_rounds
from fedtmle.targets.effects.balance import BalanceBins
from tests.premise import Premise
from tests.protocol.test_looks import asked, cohort, masked

SILOS = 8
ALL = ["many"] * SILOS


def silos_with(counts: list[str]) -> dict[str, Any]:
    """Silos in which many have the rare covariate, or three people in each arm: too few to be disclosed."""
    silos = cohort(5, (60,) * len(counts), 0.0)
    for rows, count in zip(silos.values(), counts, strict=True):
        in_arm = [np.flatnonzero(rows["a"] == arm) for arm in (0.0, 1.0)]
        for people in in_arm:
            rows["rare"][people[: 12 if count == "many" else 3]] = 1.0
    return silos


def rare_by_arm(silos: dict[str, Any]) -> tuple[PooledBin, ...]:
    """Run a masked study under the default policy; return what is pooled of the rare covariate by arm."""
    finished, plan = masked(asked("a + w + rare"), silos)
    for heard in heard_rounds(plan, finished.transcript, finished.sizes):
        for member, part in zip(heard.query.members, heard.query.split(heard.pooled), strict=True):
            bins = getattr(member, "bins", None)
            if isinstance(bins, BalanceBins):
                pooled = cast(PooledBins, part)
                return pooled[[each.name for each in bins.covariates].index("rare")]
    raise AssertionError("no covariates by arm")


def own_counts(rows: Any) -> list[tuple[int, float]]:
    return [(int((rows["a"] == arm).sum()), float(rows["rare"][rows["a"] == arm].sum())) for arm in (0, 1)]


@pytest.mark.parametrize(
    ("few", "disclosing"), [(0, 8), (1, 0), (2, 0), (3, 0), (4, 4), (5, 0), (6, 0), (7, 0), (8, 0)]
)
def test_a_covariate_is_shown_only_if_those_who_hide_it_are_none_or_several(
    few: int, disclosing: int
) -> None:
    pooled = rare_by_arm(silos_with(["few"] * few + ["many"] * (SILOS - few)))
    assert [each.silos for each in pooled] == [disclosing, disclosing]
    if not disclosing:
        assert [(each.count, *each.sums) for each in pooled] == [(0,) * 5] * 2


@pytest.mark.parametrize("few", [1, 7])
def test_else_a_silos_own_numbers_would_follow(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the only one that shows the covariate, or by subtraction of the only one that hides it."""
    silos = silos_with(["few"] * few + ["many"] * (SILOS - few))
    monkeypatch.setattr(ShownQuery, "kept", lambda self, _: (self.query, frozenset()))
    told = [(each.count, each.sums[0]) for each in rare_by_arm(silos)]
    if few == SILOS - 1:
        assert told == own_counts(silos[f"silo {SILOS - 1}"])
        return
    everyone = np.array([own_counts(rows) for rows in silos.values()]).sum(axis=0)
    assert (everyone - told == own_counts(silos["silo 0"])).all()


def asked_of(groups: Any, liars: int) -> ShownQuery:
    tally = TallyQuery(columns=None, n=100, optional=True)
    return ShownQuery(query=tally, groups=groups, liars=liars)


def is_asked(shown: ShownQuery, pooled: tuple[int, ...]) -> tuple[bool, bool]:
    """Whether the part is asked for, and whether all are said to disclose it."""
    query, by_all = shown.kept(pooled)
    assert isinstance(query, TallyQuery)
    return not query.is_hidden, bool(by_all)


@pytest.mark.parametrize("colluders", [0, 1, 2])
def test_in_one_group_two_are_left_on_either_side_when_colluders_subtract_theirs(colluders: int) -> None:
    for silos in range(colluders + 2, 13):
        shown = asked_of((tuple("abcdefghijklm"[:silos]),), colluders)
        for disclosing in range(silos + 1):
            hiding = silos - disclosing
            expected = hiding == 0 or min(disclosing, hiding) - colluders >= 2
            assert is_asked(shown, (disclosing,)) == (expected, hiding == 0)


@pytest.mark.parametrize("sizes", [(3, 3), (4, 4), (3, 3, 3)])
def test_a_liar_in_a_group_leaves_no_honest_silo_alone(sizes: tuple[int, ...]) -> None:
    """Whatever it says; an honest silo that hides what all are said to disclose refuses."""
    groups = LookGroups.of([f"silo {k}" for k in range(sum(sizes))], 1).groups
    assert tuple(map(len, groups)) == sizes
    shown, silos = asked_of(groups, 1), [(g, k) for g, size in enumerate(sizes) for k in range(size)]
    hidden_by_some = False
    with Premise("it is asked", at_least=0.002) as premise:
        for bits in itertools.product([0, 1], repeat=len(silos)):
            shows = dict(zip(silos, bits, strict=True))
            counts = [sum(shows[g, k] for k in range(size)) for g, size in enumerate(sizes)]
            for (g, _), claim in itertools.product([(g, 0) for g in range(len(sizes))], range(5)):
                honest = {silo: is_shown for silo, is_shown in shows.items() if silo != (g, 0)}
                pooled = tuple(claim if j == g else count for j, count in enumerate(counts))
                is_sent, by_all = is_asked(shown, pooled)
                if by_all and not all(honest.values()):
                    continue  # that silo refuses
                disclosing, hiding = sum(honest.values()), len(honest) - sum(honest.values())
                hidden_by_some |= premise.holds(is_sent) and hiding > 0
                assert not is_sent or (disclosing >= 2 and hiding != 1)
    assert hidden_by_some == (sizes != (3, 3))  # of three, two cannot show what two hide


def test_a_silo_refuses_if_it_is_said_to_disclose_what_it_leaves_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Silo 2, of the same group, counts for it too."""
    silos = silos_with(["few"] + ["many"] * (SILOS - 1))
    silos["silo 2"] = {name: np.append(column, column[0]) for name, column in silos["silo 2"].items()}
    finished, plan = masked(asked("a + w + rare"), silos)
    heard = heard_rounds(plan, finished.transcript, finished.sizes)
    told = [each.pooled for each in heard if isinstance(each.query, ShownQuery)]
    few = {len(pooled) // 2: pooled[: len(pooled) // 2] for pooled in told}  # of the first group, by parts
    assert any(count < SILOS // 2 for counts in few.values() for count in counts)

    def lie(_: ShownQuery, answer: Any, n_rows: int) -> Any:
        missing = [SILOS // 2 - count for count in few[len(answer)]]
        return tuple(map(add, answer, missing)) if n_rows == 61 else answer

    monkeypatch.setattr(ShownQuery, "addends", lie)
    with pytest.raises(AssertionError, match=r"refused: .*min_cell"):
        masked(asked("a + w + rare"), silos)


class Bits:
    """Stands for a query with so many parts, each shown or not as the answer says."""

    def __init__(self, parts: int) -> None:
        self.hideable, self.hidden = parts, frozenset[int]()

    @property
    def members(self) -> tuple[Bits, ...]:
        return (self,)

    def hiding(self, parts: Any) -> Bits:
        other = Bits(self.hideable)
        other.hidden = frozenset(parts)
        return other


def test_parts_are_hidden_at_their_members_of_a_joint_query() -> None:
    joint: Any = JointQuery((Bits(2), Bits(0), JointQuery((Bits(1), Bits(3)))))  # type: ignore[arg-type]
    assert joint.hideable == 6
    for hidden in itertools.chain.from_iterable(itertools.combinations(range(6), k) for k in range(7)):
        pooled = tuple(4 if part in hidden else 5 for part in range(6))
        kept: Any = ShownQuery(query=joint, groups=(tuple("abcde"),), liars=1).kept(pooled)[0]
        found = [part.hidden for part in kept.members]
        firsts = (0, 2, 2, 3)
        assert {first + part for first, own in zip(firsts, found, strict=True) for part in own} == set(hidden)


def test_a_silo_answers_one_bit_for_each_part() -> None:
    finished, plan = masked(asked("a + w + rare"), silos_with(ALL))
    heard = heard_rounds(plan, finished.transcript, finished.sizes)
    shown = [each for each in heard if isinstance(each.query, ShownQuery)]
    assert len(shown) == 2  # overlap, diagnostics
    for each in shown:
        assert isinstance(each.query, ShownQuery)
        assert len(each.pooled) == 2 * each.query.query.hideable  # of two groups
        assert set(each.pooled) <= set(range(SILOS // 2 + 1))

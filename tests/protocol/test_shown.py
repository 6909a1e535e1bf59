"""What some silos leave out is asked for under masks only where no silo stands alone."""

from __future__ import annotations

import itertools
from typing import Any, cast

import numpy as np
import pytest

from fedtmle.protocol.bins import PooledBin, PooledBins
from fedtmle.protocol.masked import ShownQuery
from fedtmle.protocol.query import JointQuery
from fedtmle.protocol.sums import TallyQuery
from fedtmle.runtime.certificate import heard_rounds
from fedtmle.targets.effects.balance import BalanceBins
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
    ("few", "disclosing"), [(0, 8), (1, 0), (2, 0), (3, 5), (5, 3), (6, 0), (7, 0), (8, 0)]
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
    monkeypatch.setattr(ShownQuery, "kept", lambda self, *_: self.query)
    told = [(each.count, each.sums[0]) for each in rare_by_arm(silos)]
    if few == SILOS - 1:
        assert told == own_counts(silos[f"silo {SILOS - 1}"])
        return
    everyone = np.array([own_counts(rows) for rows in silos.values()]).sum(axis=0)
    assert (everyone - told == own_counts(silos["silo 0"])).all()


@pytest.mark.parametrize("colluders", [0, 1, 2])
def test_no_total_of_shown_parts_is_that_of_a_silo_after_colluders_subtract_theirs(colluders: int) -> None:
    for silos in range(3, 13):
        tally = TallyQuery(columns=None, n=100, optional=True)
        shown = ShownQuery(query=tally, silos=silos)
        for disclosing in range(silos + 1):
            query = shown.kept((disclosing,), colluders)
            assert isinstance(query, TallyQuery)
            honest_apart = min(disclosing, silos - disclosing or silos) - colluders
            assert query.is_hidden == (honest_apart < 2)


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
        pooled = tuple(0 if part in hidden else 5 for part in range(6))
        kept: Any = ShownQuery(query=joint, silos=5).kept(pooled, 1)
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
        assert len(each.pooled) == each.query.query.hideable
        assert set(each.pooled) <= set(range(SILOS + 1))

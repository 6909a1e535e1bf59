"""Table 1, missing values and people at risk equal the present package's, and longhand counts."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtmle.errors import InputError
from fedtmle.estimation.diagnostics.balance import Measured
from fedtmle.estimation.diagnostics.base import STUDY_KINDS, AbstractDiagnostic
from fedtmle.estimation.diagnostics.characteristics import Characteristics, Step
from fedtmle.estimation.diagnostics.missing import MayBeMissing, MissingValues
from fedtmle.estimation.diagnostics.periods import PeopleAtRisk
from fedtmle.targets.diagnostics import Covariate
from fedtmle_core.leaves import Known
from fedtmle_core.publish.counts import is_safe
from fedtmle_core.terms import product
from tests.estimation.diagnostics.supplied import Supplied
from tests.kinds import concrete
from tests.premise import Premise
from tests.studies.test_preflight import frame


def with_gaps(n: int, seed: int) -> pd.DataFrame:
    data = frame(n, seed)
    rng = np.random.default_rng(seed)
    data["y"] = data.y.mask(rng.random(n) < 0.1)
    data["x"] = data.x.mask(rng.random(n) < 0.15)
    return data


def rows_of(frames: list[pd.DataFrame]) -> Supplied:
    return Supplied.of(
        [
            {
                "x": data.x.to_numpy(dtype=float),
                "y": data.y.to_numpy(dtype=float),
                "b": data.b.to_numpy(dtype=float),
                **{f"taken {a}": (data.a == a).to_numpy(dtype=float) for a in (0, 1)},
                **{f"f {level}": (data.f == level).to_numpy(dtype=float) for level in "uvw"},
            }
            for data in frames
        ]
    )


def characteristics(rows: Supplied, floor: int | None = None) -> Characteristics:
    known, seen = Known("x"), Known("y")
    levels = ("u", "v", "w")
    x = product(known, rows.term("x") * (1 / 50) + 20 / 50)
    return Characteristics(
        pool=rows.pool,
        arms=("0", "1"),
        taken=rows.terms("taken"),
        covariates=(
            Measured(covariate=Covariate(name="x", low=-20.0, high=30.0), x=x, known=known),
            Measured(covariate=Covariate(name="b", is_binary=True), x=rows.term("b")),
            *(
                Measured(covariate=Covariate(name="f", level=level, levels=levels), x=rows.term(f"f {level}"))
                for level in levels
            ),
        ),
        lost=(Step(name="x", lost=1.0 - known), Step(name="y", lost=known * (1.0 - seen))),
        missing=(Step(name="x", lost=1.0 - known), Step(name="y", lost=1.0 - seen)),
        floor=floor,
    )


def test_table_1_is_that_of_all_rows() -> None:
    frames = [with_gaps(150, 1), with_gaps(90, 2), with_gaps(200, 3)]
    data, rows = pd.concat(frames), rows_of(frames)
    found = rows.ask(characteristics(rows))
    by_arm = data.groupby("a")
    assert [(c.name, c.count, c.of) for c in found.arms] == [
        (str(a), count, len(data)) for a, count in by_arm.size().items()
    ]
    lost = data.x.isna()
    assert [c.count for c in found.lost] == [lost.sum(), (~lost & data.y.isna()).sum()]
    assert [c.count for c in found.missing] == [lost.sum(), data.y.isna().sum()]
    x, b, *levels = found.lines
    assert x.mean == pytest.approx(by_arm.x.mean().tolist(), abs=2e-3)
    assert x.sd == pytest.approx(by_arm.x.std().tolist(), rel=2e-3)
    spread = math.sqrt(by_arm.x.var().mean())
    assert x.difference == pytest.approx(float(np.diff(by_arm.x.mean())[0]) / spread, abs=1e-3)
    assert (b.level, b.sd) == ("1", None)
    assert b.mean == pytest.approx(by_arm.b.mean().tolist())
    p = by_arm.b.mean()
    spread = math.sqrt((p * (1 - p)).mean())
    assert b.difference == pytest.approx(float(np.diff(p)[0]) / spread, abs=1e-3)
    for line in levels:
        assert line.mean == pytest.approx(
            by_arm.f.agg(lambda f, level=line.level: (f == level).mean()).tolist()
        )


is_rounded = Premise("something is rounded", at_least=0.5)


@is_rounded
@given(
    n=st.integers(20, 300),
    seed=st.integers(0, 1000),
    treated=st.floats(0.02, 0.6),
    rare=st.floats(0.0, 0.3),
    floor=st.integers(5, 12),
)
def test_nothing_is_said_about_few_people(n: int, seed: int, treated: float, rare: float, floor: int) -> None:
    rng = np.random.default_rng(seed)
    data = with_gaps(n, seed).assign(a=(rng.random(n) < treated).astype(int))
    data["b"] = (rng.random(n) < rare).astype(int)
    rows = rows_of([data])
    exact, shown = rows.ask(characteristics(rows)), rows.ask(characteristics(rows, floor))
    is_rounded.holds(exact.arms != shown.arms or exact.lost != shown.lost or exact.lines != shown.lines)
    counts = [[c.count for c in part] for part in (shown.arms, shown.lost)]
    assert all(is_safe([*part, n - sum(part)], floor) for part in counts)
    assert all(is_safe([c.count, n - c.count], floor) for c in shown.missing)
    for line, whole in zip(shown.lines, exact.lines, strict=True):
        if line.mean == ():
            assert line.silos == 0
            continue
        for a, mean in enumerate(line.mean):
            people = exact.arms[a].count
            assert people >= floor
            if line.sd is None:
                assert is_safe([round(mean * people), round((1 - mean) * people)], floor)
                assert abs(mean - whole.mean[a]) * people <= 1.5 * floor
            else:
                known = people - 0.5 * people  # at least; the range is 50
                assert abs(mean - whole.mean[a]) <= max(5 * whole.sd[a] / math.sqrt(people), 1.3 * 50 / known)


def missing_values(rows: Supplied) -> MissingValues:
    return MissingValues(
        variables=(
            MayBeMissing(name="x", known=Known("x")),
            MayBeMissing(name="z", known=Known("z")),
            MayBeMissing(name="w", known=Known("w")),
            MayBeMissing(name="more", known=Known("more")),
            MayBeMissing(name="later", known=Known("later"), at_risk=rows.term("stays")),
        )
    )


GAPS = {
    "x": np.array([1.0, np.nan, 2.0, np.nan, 1.0, 0.0]),
    "z": np.array([np.nan, 1.0, 2.0, np.nan, 1.0, 0.0]),
    "w": np.array([3.0, np.nan, 2.0, np.nan, 1.0, 0.0]),
    "more": np.array([3.0, np.nan, 2.0, np.nan, 1.0, np.nan]),
    "later": np.array([np.nan, np.nan, np.nan, 1.0, 2.0, np.nan]),
    "stays": np.array([0.0, 1.0, 0.0, 1.0, 1.0, 1.0]),
}


@pytest.mark.parametrize("parts", [([0, 1, 2, 3, 4, 5],), ([0, 3], [1, 4], [2, 5])])
def test_missing_values_are_counted(parts) -> None:
    rows = Supplied.of([{name: column[part] for name, column in GAPS.items()} for part in parts])
    found = rows.ask(missing_values(rows))
    assert found.n == 6
    assert found.counts == {"x": 2, "z": 2, "w": 2, "more": 3, "later": 2}
    assert found.at_risk == {"later": 4}
    assert found.doubles == {"w": "x"}
    assert MissingValues(variables=()).blocks == ()
    assert rows.ask(MissingValues(variables=())).counts == {}


def test_a_variable_that_nobody_has_is_refused() -> None:
    lacking = {**GAPS, "x": np.array([0.0, np.nan]), "z": np.array([np.nan, 0.0])}
    held = {name: column[:2] for name, column in lacking.items()}
    held |= {"later": np.array([0.5, np.nan]), "stays": np.array([0.0, 1.0]), "w": np.array([0.0, 1.0])}
    held |= {"more": np.array([0.0, 1.0])}
    rows = Supplied.of([held])
    with pytest.raises(InputError, match="'later' is missing for everyone at risk"):
        rows.ask(missing_values(rows))
    whole = Supplied.of([{"x": np.array([0.0])}, {"x": np.array([1.0])}])
    nobody = MissingValues(variables=(MayBeMissing(name="x", known=Known("x") * 0.0 + 0.0),))
    with pytest.raises(InputError, match="'x' is missing in every record"):
        whole.ask(nobody)


def test_people_at_risk_are_counted_by_arm() -> None:
    at_risk = np.array([1.0, 3.0, 2.0, 3.0, 1.0, 1.0, 2.0])
    arm = np.array([0, 0, 0, 1, 1, 0, 1])
    columns = {"at risk": at_risk, **{f"taken {a}": (arm == a) * 1.0 for a in (0, 1)}}
    for parts in ([np.arange(7)], [np.arange(3), np.arange(3, 7)]):
        rows = Supplied.of([{name: column[part] for name, column in columns.items()} for part in parts])
        diagnostic = PeopleAtRisk(
            pool=rows.pool, arms=rows.terms("taken"), at_risk=rows.term("at risk"), periods=3
        )
        assert rows.ask(diagnostic) == ((4, 2, 1), (3, 2, 1))


def test_every_diagnostic_is_for_every_kind_of_study_or_says_why_not() -> None:
    kinds = concrete(AbstractDiagnostic)  # type: ignore[type-abstract]
    assert len(kinds) >= 9
    for kind in kinds:
        assert {*kind.kinds(), *kind.gaps} == set(STUDY_KINDS)
        assert all(kind.gaps.values())
    assert {kind.__name__ for kind in kinds if kind.gaps} == {"PeopleAtRisk"}

"""The rules of memory, beside longhand ones; the files of digests."""

from __future__ import annotations

import itertools
import os
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle.errors import JournalError
from fedtmle.model.table import Factor, StreamedTable, Table
from fedtmle.runtime.ledger import ReadColumn
from fedtmle.studies.memory import DIGEST, Digests, RowStore, fewest_people, isolated, row_digests
from tests.premise import Premise

COLUMNS = (ReadColumn("x", "numeric", None, "X"), ReadColumn("sex", "factor", ("f", "m"), "SEX"))
KEY = b"k" * 32


def table(x: list[float], sex: str, levels: tuple[str, ...] = ("f", "m")) -> Table:
    codes = np.array([levels.index(each) if each in levels else -1 for each in sex])
    return Table(n_rows=len(x), numeric={"x": np.array(x)}, factors={"sex": Factor(codes, levels)})


def digests(*people: int) -> Digests:
    return np.sort(np.array([person.to_bytes(DIGEST, "big") for person in people], dtype=f"S{DIGEST}"))


def test_a_record_has_one_digest_whatever_its_place_coding_and_batch() -> None:
    rows = row_digests(table([1.0, 2.0, np.nan, -0.0], "fm?f"), COLUMNS, KEY)
    other = table([0.0, np.float64("nan"), 2.0, 1.0], "f?mf", levels=("m", "f"))
    assert (rows == row_digests(other, COLUMNS, KEY)).all()
    parts = (other.part(slice(0, 1)), other.part(slice(1, 4)))
    streamed = StreamedTable(n_rows=4, factor_counts={}, digest=b"", read=lambda: iter(parts))
    assert (rows == row_digests(streamed, COLUMNS, KEY)).all()


def test_a_digest_needs_the_key_and_sees_every_column() -> None:
    rows = row_digests(table([1.0], "f"), COLUMNS, KEY)
    for changed in (table([1.0000001], "f"), table([1.0], "m"), table([1.0], "?"), table([np.nan], "f")):
        assert row_digests(changed, COLUMNS, KEY)[0] != rows[0]
    assert row_digests(table([1.0], "f"), COLUMNS, b"j" * 32)[0] != rows[0]


@pytest.mark.parametrize(
    ("versions", "people"),
    [
        ([range(9), range(9)], None),
        ([range(9), range(10)], 1.0),
        ([range(10), range(9)], 1.0),
        ([range(9), range(12)], 3.0),
        ([range(9), [*range(8), 99]], 1.0),  # corrected, or exchanged
        ([[1, 1, 2, 3], [1, 2, 3]], 1.0),  # of two that are alike, one left
        ([[1, 1, 2, 3], [3, 1, 2, 1]], None),
    ],
)
def test_the_fewest_people_behind_a_difference(versions: list[list[int]], people: float | None) -> None:
    found = fewest_people([digests(*version) for version in versions])
    assert found == (None if people is None else pytest.approx(people))


def test_versions_of_which_only_all_together_single_out_a_person() -> None:
    A, B, C = range(40), range(100, 120), range(200, 230)
    versions = [digests(*A), digests(*A, *B), digests(*A, *C), digests(*range(1, 40), *B, *C)]
    for pair in itertools.combinations(versions, 2):
        assert (fewest_people(pair) or 0) > 15
    assert fewest_people(versions) == pytest.approx(1.0, rel=1e-6)


has_change = Premise("the versions differ", at_least=0.5)


@has_change
@settings(max_examples=60, deadline=None)
@given(st.lists(st.sets(st.integers(0, 7), min_size=1), min_size=2, max_size=3))
def test_the_leverage_is_the_largest_share_in_any_combination(versions: list[set[int]]) -> None:
    """Longhand: the share of a person's square in the sum of squares, over a grid of combinations."""
    found = fewest_people([digests(*version) for version in versions])
    has_change.holds(found is not None)
    if found is None:
        return
    weights = np.array(list(itertools.product(np.linspace(-1, 1, 21), repeat=len(versions))))
    parts = weights @ np.array([[float(person in version) for person in range(8)] for version in versions])
    squares = (parts**2)[(parts**2).sum(axis=1) > 1e-9]
    assert found <= (squares.sum(axis=1) / squares.max(axis=1)).min() + 1e-6


def solved(rosters: list[frozenset[str]], silos: set[str]) -> bool:
    """Longhand: whether some combination of the rosters is zero outside ``silos`` and not zero inside."""
    names = sorted(frozenset().union(*rosters))
    outside = [[Fraction(int(n in roster)) for n in names if n not in silos] for roster in rosters]
    inside = [[Fraction(int(n in roster)) for n in names if n in silos] for roster in rosters]
    return any(any(_combined(inside, weights)) for weights in _null_space(outside))


def _combined(rows: list[list[Fraction]], weights: list[Fraction]) -> list[Fraction]:
    return [
        sum((w * x for w, x in zip(weights, column, strict=True)), Fraction(0))
        for column in zip(*rows, strict=True)
    ]


def _null_space(rows: list[list[Fraction]]) -> list[list[Fraction]]:
    """The combinations of rows that vanish, by elimination beside the identity."""
    count = len(rows)
    extended = [row + [Fraction(int(i == j)) for j in range(count)] for i, row in enumerate(rows)]
    rank, width = 0, len(rows[0])
    for column in range(width):
        pivot = next((i for i in range(rank, count) if extended[i][column]), None)
        if pivot is None:
            continue
        extended[rank], extended[pivot] = extended[pivot], extended[rank]
        for i in range(rank + 1, count):
            share = extended[i][column] / extended[rank][column]
            extended[i] = [x - share * y for x, y in zip(extended[i], extended[rank], strict=True)]
        rank += 1
    return [row[width:] for row in extended[rank:]]


is_solved = Premise("some silos' totals follow", at_least=0.2)


@is_solved
@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.frozensets(st.sampled_from("abcdef"), min_size=3), min_size=1, max_size=4), st.integers(0, 2)
)
def test_the_rank_rule_finds_what_elimination_finds(rosters: list[frozenset[str]], colluders: int) -> None:
    names = sorted(frozenset().union(*rosters))
    expected = [
        chosen
        for size in range(1, colluders + 2)
        for chosen in itertools.combinations(names, size)
        if solved(rosters, set(chosen))
    ]
    found = isolated(rosters, colluders)
    is_solved.holds(found is not None)
    assert found == (expected[0] if expected else None)


def test_a_version_is_stored_once_and_survives_a_crash(tmp_path: Path) -> None:
    store, rows = RowStore(tmp_path / "rows"), digests(1, 2, 3)
    name = store.keep(rows)
    assert store.keep(rows) == name
    (path,) = store.folder.iterdir()
    assert path.stat().st_size < 3 * DIGEST + 32
    assert path.stat().st_mode & 0o077 == 0
    assert (store.read(name) == rows).all()
    # A process that was killed while it wrote leaves a file of another name, which nobody reads.
    (store.folder / f"{name}.77.new").write_bytes(path.read_bytes()[:20])
    assert store.keep(rows) == name
    assert (store.read(name) == rows).all()


@pytest.mark.parametrize("harm", ["gone", "cut", "changed"])
def test_a_version_that_is_lost_or_changed_is_noticed(tmp_path: Path, harm: str) -> None:
    store = RowStore(tmp_path / "rows")
    name = store.keep(digests(1, 2, 3))
    (path,) = store.folder.iterdir()
    data = bytearray(path.read_bytes())
    if harm == "gone":
        os.unlink(path)
    else:
        data[-1] ^= 1
        path.write_bytes(data[:-DIGEST] if harm == "cut" else data)
    with pytest.raises(JournalError, match=r"gone; restore" if harm == "gone" else "were changed"):
        store.read(name)

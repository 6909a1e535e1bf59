"""The layout of a tally: names, bounds and places follow from one description."""

from __future__ import annotations

import numpy as np

from fedtmle.targets.effects.statistics import Block, TallyLayout


def test_the_parts_of_a_layout_cover_its_columns_in_order() -> None:
    layout = TallyLayout({"a": Block(("a0", "a1"), 3), "none": Block((), 9), "b": Block(("b0",), -2)})
    assert layout.names == ("a0", "a1", "b0")
    assert layout.exponents == (3, 3, -2)
    assert [at for place in layout.places.values() for at in place] == [0, 1, 2]
    values = np.arange(6.0).reshape(3, 2)
    parts = layout.split(values)
    assert {name: part.tolist() for name, part in parts.items()} == {
        "a": [[0.0, 1.0], [2.0, 3.0]],
        "none": [],
        "b": [[4.0, 5.0]],
    }
    parts["b"][0] = 7.0  # views: a column is filled in its place
    assert values[2].tolist() == [7.0, 7.0]


def test_a_layout_of_nothing() -> None:
    assert TallyLayout({}).places == {}

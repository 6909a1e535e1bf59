"""The harness of the table of coverage gives the numbers of the product's own flow."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
from benchmarks.privacy import (
    KINDS,
    Cell,
    answered,
    draw,
    first_lines,
    markdown,
    run_flow,
    simulate,
    study_of,
)
from benchmarks.private_records import Records, floats


@pytest.mark.parametrize("kind", ["rare", "trial", "missing", "continuous", "strata"])
def test_sums_in_floats_give_the_product_s_result(kind: str) -> None:
    assert kind in KINDS
    cell = Cell(n=2000, p=4, kind=kind)
    columns, _ = draw(cell, cell.n, np.random.default_rng(2))
    study = study_of(cell)
    exact = run_flow(study, columns, np.random.default_rng(3))
    with floats():
        quick = answered(study, cell.n, Records(columns).sums, np.random.default_rng(3))
    np.testing.assert_allclose(quick.estimate.psi, exact.estimate.psi, rtol=1e-9)
    np.testing.assert_allclose(quick.estimate.covariance, exact.estimate.covariance, rtol=1e-9)


def test_a_row_of_the_table_counts_labels_and_coverage() -> None:
    wide, narrow = simulate(Cell(n=1000, p=3), [0.2, 8.0], 12, seed=1)
    assert wide["labelled"] == 1.0
    assert narrow["labelled"] == 0.0
    assert float(wide["width"]) > 2 * float(narrow["width"])
    assert 0.5 <= float(narrow["coverage"]) <= 1.0


@pytest.mark.parametrize(("kind", "epsilon", "n"), [("trial", 0.5, 300), ("binary", 0.1, 100)])
def test_a_small_study_is_always_labelled(kind: str, epsilon: float, n: int) -> None:
    """Noise in the second moment must not pass for sampling error, with which widths are compared."""
    cell, rng = Cell(n=n, p=3, kind=kind, epsilon=epsilon), np.random.default_rng(1)
    study, understated = study_of(cell), 0
    with floats():
        for _ in range(100):
            outcome = answered(study, n, Records(draw(cell, n, rng)[0]).sums, rng)
            account = outcome.details.privacy  # type: ignore[attr-defined]  # of a study
            total = account.sampling[0] + account.noise[0] + account.remainder[0]
            assert any("times wider" in limit for limit in account.limits)
            understated += total < 4 * account.sampling[0]
    if kind == "trial":  # where the noisy second moment alone would have left the label out
        assert understated > 0


DOCS = Path(__file__).parents[2] / "docs"
COVERAGE = DOCS / "privacy" / "coverage.csv"


def test_the_page_has_the_table_of_the_file() -> None:
    page = (DOCS / "privacy.md").read_text(encoding="utf-8")
    assert "\n".join(markdown(COVERAGE)) in page


def test_intervals_that_are_promised_cover() -> None:
    """The page's rule: a line outside 93 to 97.5 % is run again with 2,000 studies and another seed."""

    def where(row: dict[str, str]) -> tuple[str, ...]:
        return tuple(row[key] for key in ("kind", "place", "n", "p", "g_bounds", "epsilon"))

    with COVERAGE.open(newline="", encoding="utf-8") as file:
        again = {where(row): row for row in csv.DictReader(file) if row["replications"] == "2000"}
    promised = [row for row in first_lines(COVERAGE) if float(row["labelled"]) < 0.5]
    outside = [row for row in promised if not 0.93 <= float(row["coverage"]) <= 0.975]
    assert len(promised) > 200
    for row in outside:
        second = again[where(row)]
        assert second["seed"] != row["seed"]
        assert 0.93 <= float(second["coverage"]) <= 0.975, row
    assert {row["kind"] for row in promised} == set(KINDS)

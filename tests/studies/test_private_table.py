"""The harness of the table of coverage gives the numbers of the product's own flow."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.privacy import KINDS, Cell, answered, draw, run_flow, simulate, study_of
from benchmarks.private_records import Records, floats


@pytest.mark.parametrize("kind", ["rare", "trial", "missing", "continuous"])
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

"""A problem with several residuals per record: two responses, each with the weights of two arms."""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np

import fedtmle as ft
from fedtmle.model.check import FiniteLaw
from fedtmle.model.table import StreamedTable, Table
from fedtmle.targets.residuals import Residual, ResidualProblem
from fedtmle_core.types import Part

LOW, HIGH = -3.0, 5.0
G = 0.4  # P(Z = 1)


def prepared(table: Table) -> tuple[Residual, ...]:
    """Residuals of y in [LOW, HIGH] and of a in [0, 1], with regressions that are wrong on purpose."""
    z, w = table.numeric["z"], table.numeric["w"]
    inverse = np.stack([np.full(len(z), 1 / (1 - G)), np.full(len(z), 1 / G)])
    weights = np.where(z == np.array([[0.0], [1.0]]), inverse, 0.0)

    def residual(y: np.ndarray, slope: float) -> Residual:
        means = 0.5 + slope * (np.array([[-1.0], [1.0]]) + 0.5 * w)
        q = np.where(z == 1, means[1], means[0])
        return Residual(y=y, q=q, weights=weights, plug_in=means, plug_in_weights=inverse)

    y = (table.numeric["y"] - LOW) / (HIGH - LOW)
    return residual(y, 0.1), residual(table.numeric["a"], 0.2)


PROBLEM = ResidualProblem(
    components=(("y0", "y1"), ("a0", "a1")),
    bounds=((LOW, HIGH), (0.0, 1.0)),
    ceiling=1 / min(G, 1 - G),
    prepare=prepared,
)


def table(n: int, seed: int = 1) -> Table:
    rng = np.random.default_rng(seed)
    z = rng.binomial(1, G, n).astype(float)
    w = rng.uniform(-1, 1, n)
    a = rng.binomial(1, 0.3 + 0.4 * z).astype(float)
    y = np.clip(a + w + rng.normal(size=n), LOW, HIGH)
    return Table(n_rows=n, numeric={"z": z, "w": w, "a": a, "y": y}, factors={})


def test_the_problem_keeps_what_it_promises() -> None:
    report = ft.check_problem(PROBLEM, PROBLEM.start(), table(300))
    report.raise_if_failed()
    passed = {check.name for check in report.checks if check.outcome.name == "PASSED"}
    assert {"score = D, row by row", "closing message gives the covariance", "displacement of laws"} <= passed


def test_d_at_a_moved_law_is_the_formula_row_by_row() -> None:
    """D_r = H_r (Y - Q) + m_r - psi_r, where logit Q moves by -width H_r eps_r at the arm that is taken."""
    rows, eps, psi = table(40), [0.1, -0.2, 0.3, -0.4], np.array([0.5, 1.0, 0.3, 0.7])
    law = PROBLEM.move(PROBLEM.start(), np.array(eps))
    expected = np.empty((40, 4))
    for i in range(40):
        z, w, a, y = (float(rows.numeric[name][i]) for name in "zway")
        for r, (value, slope, low, high) in enumerate([(y, 0.1, LOW, HIGH)] * 2 + [(a, 0.2, 0.0, 1.0)] * 2):
            arm, width = r % 2, high - low
            q = 0.5 + slope * ((1 if arm else -1) + 0.5 * w)
            H = 1 / (G if arm else 1 - G)
            moved = 1 / (1 + (1 - q) / q * math.exp(width * H * eps[r]))
            m = low + width * moved
            expected[i, r] = (H * (value - m) if z == arm else 0.0) + m - psi[r]
    np.testing.assert_allclose(PROBLEM.eif(law, rows, psi), expected, atol=1e-12)


def test_d_is_the_derivative_of_psi_on_a_finite_law() -> None:
    """Z is drawn independently of W; the regressions at the law are the true ones, so D is centred."""
    atoms = [(z, w, a, y) for z in (0.0, 1.0) for w in (-0.5, 0.5) for a in (0.0, 1.0) for y in (-1.0, 2.0)]
    rng = np.random.default_rng(5)
    given = rng.uniform(0.5, 1.5, (2, 2, 4))  # of (a, y) given (z, w)
    given /= given.sum(axis=2, keepdims=True)
    share = np.array([1 - G, G])[:, None, None] * 0.5
    masses = (share * given).ravel()
    support = Table(n_rows=len(atoms), numeric=dict(zip("zway", np.array(atoms).T, strict=True)), factors={})

    def longhand(p: np.ndarray) -> np.ndarray:
        cells = p.reshape(2, 2, 4)  # (z, w, (a, y))
        of_w = cells.sum(axis=(0, 2)) / p.sum()
        a, y = np.array([0.0, 0.0, 1.0, 1.0]), np.array([-1.0, 2.0, -1.0, 2.0])
        means = [[(cells[z] @ v) / cells[z].sum(axis=1) @ of_w for z in (0, 1)] for v in (y, a)]
        return np.array(means).ravel()

    def true(rows: Table) -> tuple[Residual, ...]:
        z, w = rows.numeric["z"], rows.numeric["w"]
        column = (w > 0).astype(int)
        inverse = np.stack([np.full(len(z), 1 / (1 - G)), np.full(len(z), 1 / G)])
        weights = np.where(z == np.array([[0.0], [1.0]]), inverse, 0.0)
        residuals = []
        for name, values, (low, high) in (
            ("y", [-1.0, 2.0, -1.0, 2.0], (LOW, HIGH)),
            ("a", [0.0, 0.0, 1.0, 1.0], (0.0, 1.0)),
        ):
            mean = ((given @ np.array(values)) - low) / (high - low)  # (z, w)
            plug_in = mean[:, column]
            q = np.where(z == 1, plug_in[1], plug_in[0])
            y = (rows.numeric[name] - low) / (high - low)
            residuals.append(Residual(y=y, q=q, weights=weights, plug_in=plug_in, plug_in_weights=inverse))
        return tuple(residuals)

    problem = replace(PROBLEM, prepare=true)
    finite = FiniteLaw(support=support, masses=masses, law=problem.start(), psi=longhand)
    report = ft.check_problem(problem, problem.start(), support, finite=finite)
    report.raise_if_failed()
    checked = {check.name: check.outcome.name for check in report.checks}
    assert checked["D is the derivative of Psi"] == checked["psi is Psi"] == "PASSED"
    wrong = replace(problem, prepare=lambda rows: (true(rows)[0], true(rows)[0]))
    broken = ft.check_problem(wrong, wrong.start(), support, finite=finite)
    assert "D is the derivative of Psi" in {check.name for check in broken.failures}


def test_all_residuals_are_targeted_at_once() -> None:
    rows = table(500)
    silos = {"a": rows.take(np.arange(200)), "b": rows.take(np.arange(200, 500))}
    result = ft.solve(PROBLEM, PROBLEM.start(), silos, ft.Gradient(optimizer=ft.Newton()))
    law = PROBLEM.move(PROBLEM.start(), np.array(result.trajectory.accepted[0]))
    for accepted in result.trajectory.accepted[1:]:
        law = PROBLEM.move(law, np.array(accepted))
    scores = PROBLEM.submodel(law, rows).sums(np.zeros(4), Part.GRADIENT).values(500)
    assert np.abs(scores).max() < 1e-9
    np.testing.assert_allclose(
        result.psi, PROBLEM.finish(law, PROBLEM.moments(law, rows), 500).psi, atol=1e-12
    )


def test_a_streamed_table_has_the_sums_of_one_in_memory() -> None:
    rows = table(1000)
    streamed = StreamedTable(
        n_rows=1000,
        factor_counts={},
        digest=b"",
        read=lambda: iter([rows.part(slice(0, 300)), rows.part(slice(300, 1000))]),
    )
    law = PROBLEM.move(PROBLEM.start(), np.array([0.1, -0.2, 0.3, 0.05]))
    assert PROBLEM.moments(law, streamed) == PROBLEM.moments(law, rows)
    eps, parts = np.array([0.02, 0.01, -0.1, 0.2]), Part.LOSS | Part.GRADIENT | Part.HESSIAN
    assert PROBLEM.submodel(law, streamed).sums(eps, parts) == PROBLEM.submodel(law, rows).sums(eps, parts)


def test_psi_is_the_mean_of_the_plug_ins() -> None:
    rows = table(50)
    estimate = PROBLEM.finish(PROBLEM.start(), PROBLEM.moments(PROBLEM.start(), rows), 50)
    w = [Fraction(v) for v in rows.numeric["w"]]
    mean = float(sum(Fraction(1, 2) + Fraction(1, 5) * (-1 + v / 2) for v in w) / 50)
    np.testing.assert_allclose(estimate.psi[2], mean, rtol=1e-12)
    assert np.all(np.linalg.eigvalsh(estimate.covariance) > 0)

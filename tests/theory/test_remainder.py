"""The terms of thm:statistical that a result states, against the theorem written longhand."""

from __future__ import annotations

import math

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.protocol.query import Phase
from fedtmle.theory.statistical import LEVEL, SMALL, history_of_doubles, remainder
from fedtmle_paper.optimal_transport import OptimalTransport
from tests.theory.test_anytime import STUDY, silos


def test_terms_against_the_theorem() -> None:
    n, d, H_init, H, G, se = 400, 3, 200, 91, 7.0, 0.02
    terms = remainder(
        n=n, dim=d, initial_bits=H_init, history_bits=H, residual=1e-9, std_error=se, envelope=G
    )
    x = (H_init + H) * math.log(2) + math.log(2 * d / 0.05)
    assert LEVEL == 0.05
    assert terms.process == pytest.approx(math.sqrt(2 * x / n) * se * math.sqrt(n), rel=1e-12)
    assert terms.envelope == pytest.approx(4 * G * math.sqrt(d) * x / (3 * n), rel=1e-12)
    assert terms.process * terms.largest_share == pytest.approx(SMALL * se, rel=1e-12)
    alone = H * math.log(2) + math.log(2 * d / 0.05)
    assert terms.process_alone == pytest.approx(terms.process * math.sqrt(alone / x), rel=1e-12)
    assert terms.envelope_alone == pytest.approx((terms.envelope or 0) * alone / x, rel=1e-12)
    assert terms.condition_process == pytest.approx(math.sqrt(H_init + H + math.log(n)), rel=1e-12)
    size = se * math.sqrt(n)
    third = G * math.sqrt(d) * (H_init + H + math.log(n)) / math.sqrt(n) / size
    assert terms.condition_envelope == pytest.approx(third, rel=1e-12)


def test_at_the_rows_needed_the_envelope_is_a_tenth_of_a_standard_error() -> None:
    def at(n: int) -> float:
        terms = remainder(
            n=n,
            dim=1,
            initial_bits=0,
            history_bits=40,
            residual=0.0,
            std_error=1 / math.sqrt(n),
            envelope=3.0,
        )
        return (terms.envelope or 0) / terms.std_error

    start = remainder(
        n=100, dim=1, initial_bits=0, history_bits=40, residual=0.0, std_error=0.1, envelope=3.0
    )
    assert at(round(start.rows_needed or 0)) == pytest.approx(SMALL, rel=1e-4)


def test_an_unknown_envelope_stays_open() -> None:
    terms = remainder(n=10, dim=1, initial_bits=0, history_bits=1, residual=0.0, std_error=0.1, envelope=None)
    assert terms.envelope is terms.envelope_alone is terms.rows_needed is terms.condition_envelope is None
    assert terms.process > 0


def test_the_history_of_doubles_is_a_prefix_free_code() -> None:
    assert [history_of_doubles(K, 2) for K in (0, 1, 3)] == [1, 3 + 128, 5 + 384]


def test_a_study_counts_the_broadcasts_that_fix_its_start() -> None:
    result = ft.run(STUDY, silos(1))
    assert result.run is not None
    assert result.run.certificate is not None
    stated, account = result.run.certificate.remainder, result.run.account
    assert stated is not None
    one = [bits for (phase, silo), bits in account.bits_down.items() if silo == "s0" and phase in START]
    assert stated.initial_bits == sum(one) > 0
    assert stated.history_bits == result.run.certificate.history_bits
    assert stated.std_error == pytest.approx(math.sqrt(np.trace(result.run.covariance)))
    # The declared bounds: |D| <= width (1/g + 1).
    floor = result.document["g_floor"]
    assert stated.envelope_constant == pytest.approx(10 * (1 / floor + 1), rel=1e-12)


START = (Phase.NUISANCE, Phase.CALIBRATION)


def test_on_transport_the_terms_are_tens_of_standard_errors() -> None:
    """Honestly large at n = 10^4, as documented."""
    rng = np.random.default_rng(0)
    problem = OptimalTransport(spacing=0.25)
    rows = rng.normal(size=(10_000, 2))
    law = problem.start(rng.normal(size=(200, 2)))
    result = ft.solve(problem, law, {"a": rows[:4000], "b": rows[4000:]}, ft.Coded(tolerance=1e-2))
    terms = result.certificate.remainder if result.certificate else None
    assert terms is not None
    assert 5 < (terms.process + (terms.envelope or 0)) / terms.std_error < 100

"""What the figures show is what the run did."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedtmle.report import series
from fedtmle.report.charts import label, log_ticks, ticks
from fedtmle.runtime.session import Account
from tests.report.studies import ALGORITHMS, TARGETS, result


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_bits_by_round_add_up_to_the_account(algorithm: str) -> None:
    kept = result(algorithm)
    document = kept.document
    data, account = series.bits_by_round(document), document["account"]
    assert len(data.phases) == sum(account["rounds"].values()) == len(data.down)
    assert {phase: data.phases.count(phase) for phase in data.phases} == account["rounds"]
    assert kept.run is not None
    rounds = kept.run.account.by_round
    for silo, sent in data.up.items():
        by_phase = dict.fromkeys(account["bits_up"][silo], 0)
        for phase, bits, booked in zip(data.phases, sent, rounds, strict=False):
            shares = booked.up_shares[silo]  # of the queries that share the round
            assert sum(shares.values()) == bits
            assert phase == booked.phase.value
            assert phase in {share.value for share in shares}
            for share, count in shares.items():
                by_phase[share.value] += count
        assert by_phase == account["bits_up"][silo]
        assert sum(sent) == sum(by_phase.values())
    if algorithm != "personal":  # there a silo that leaves hears no more
        assert all(sum(data.down) == sum(down.values()) for down in account["bits_down"].values())


def test_the_account_books_what_is_sent() -> None:
    kept = result("personal").run
    assert kept is not None
    again = Account()
    for booked in kept.account.by_round:
        again.book(booked)
    assert again.bits_up == kept.account.bits_up
    assert again.bits_down == kept.account.bits_down
    assert again.rounds == kept.account.rounds


def test_the_transcripts_hash_is_that_of_its_file(tmp_path: Path) -> None:
    kept = result()
    assert kept.run is not None
    kept.run.transcript.save(tmp_path / "transcript")
    saved = hashlib.sha256((tmp_path / "transcript").read_bytes()).hexdigest()
    assert kept.document["transcript"] == saved


def test_forest_rows_are_the_documents() -> None:
    document = result(release=2).document
    (data,) = series.forests(document)
    assert [row.name for row in data.rows] == [
        "silo 0",
        "silo 1",
        "random effects",
        "prediction",
        "pooled",
    ]
    assert data.rows[-1].estimate == document["estimates"][0]["estimate"]
    assert data.null == 0.0


@pytest.mark.parametrize("target", TARGETS)
def test_forests_have_the_scale_of_their_estimand(target: str) -> None:
    document = result(target=target).document
    drawn = series.forests(document)
    assert [forest.estimand for forest in drawn] == [row["estimand"] for row in document["estimates"]]
    for forest, row in zip(drawn, document["estimates"], strict=True):
        assert (forest.null is None) == (row["p_value"] is None)
        assert forest.ratio == (row["scale"] == "ratio")
    expected = {"ATE": (0.0, False), "RR": (1.0, True), "OR": (1.0, True), "TSM": (None, False)}
    assert {(forest.null, forest.ratio) for forest in drawn} == {
        expected.get(target, (drawn[0].null, drawn[0].ratio))
    }


def test_distances_square_up_to_q() -> None:
    (data,) = series.heterogeneity(result(release=3).document)
    assert sum(value**2 for value in data.distance.values()) == pytest.approx(data.Q, rel=1e-12)
    assert data.p == pytest.approx(stats.chi2.sf(data.Q, data.df), rel=1e-12)


def test_the_observed_loss_is_the_pooled_one() -> None:
    """At the first and the last round, against the mean loss of all rows computed at once."""
    kept = result(observe=True)
    data = series.path(kept.document)
    assert data.loss is not None
    assert data.loss[0] == 0.0
    assert all(b is not None and b <= 0.0 for b in data.loss)
    assert data.tolerance == kept.document["certificate"]["tolerance"]
    assert series.path(result().document).loss is None
    asked = series.path(result("descent").document).loss  # its line search asks for the loss itself
    assert asked is not None


def test_ticks_are_round_and_within() -> None:
    assert ticks(0.0, 10.0, 5) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert np.allclose(ticks(-0.31, 0.29, 4), [-0.2, 0.0, 0.2])
    assert log_ticks(1e-7, 0.2, 4) == [1e-7, 1e-5, 1e-3, 1e-1]
    assert log_ticks(0.4, 3.0) == [0.5, 1.0, 2.0]
    assert label(-2e-06) == "\N{MINUS SIGN}2e\N{MINUS SIGN}6"
    assert label(0.1 + 0.2) == "0.3"

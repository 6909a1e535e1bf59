"""Every golden run gives the recorded bytes and numbers, and together they use all there is to use.

A change that is meant to alter bytes or numbers says so in the changelog, and records the runs that it alters
again: `python -m tests.golden.record`, whose ``--check`` lists them.
"""

from __future__ import annotations

import json
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedtmle.protocol.messages import Reason
from fedtmle.protocol.outcome import Status
from fedtmle.protocol.policy import Policy
from tests.golden import pinned
from tests.golden.record import differences, load, perform
from tests.golden.runs import RUNS
from tests.golden.tap import USED_BY, message_digest, tapped
from tests.golden.wire import NAMES

RECORDED = load()

# Keys of the policy by which a silo hides something, or shows it; the runs "file/..." have them.
NO_REFUSAL = {
    "reasons",  # words, not a limit
    "min_cell",
    "min_truncated",
    "release",
    "fresh_batches",
    "max_bits",
    "max_epsilon",
    "max_epsilon_total",
    "allow_unsigned",
    "trust_looks",  # without it the own rows are judged: min_support and min_people refuse
}
# Endings that no small run has: they need a loss that is not convex or an inner solver that fails.
RARE_ENDINGS = {Status.NO_DESCENT, Status.INFEASIBLE, Status.STALLED_FIT}

OVER_QUESTIONS = {"TermProblem"}  # of the programs of `fedtmle.estimation`, which these runs do not use


@cache
def seen() -> dict[str, Any]:
    """Return what every run gives, in an environment that makes processors alike."""
    return dict(json.loads(pinned.python("tests.golden.record", "--print").stdout))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", RUNS)
def test_the_run_gives_the_recorded_bytes_and_numbers(name: str) -> None:
    recorded, entry = RECORDED["runs"][name], seen()["runs"][name]
    if seen()["arithmetic"] == RECORDED["arithmetic"]:
        assert differences(recorded, entry) == []
        return
    # Elementary functions have other last bits on this platform: what people read must agree all the same.
    assert entry["ended"] == recorded["ended"]
    assert (entry["psi"] is None) == (recorded["psi"] is None)
    if entry["psi"] is not None:
        np.testing.assert_allclose(np.float64(entry["psi"]), np.float64(recorded["psi"]), rtol=1e-8)


def test_every_recorded_run_is_still_made() -> None:
    assert RECORDED["runs"].keys() == RUNS.keys()


@pytest.mark.parametrize("base", USED_BY, ids=lambda base: base.__name__)
def test_every_class_is_used_by_a_run(base: type) -> None:
    assert seen()["classes"][base.__name__] >= 3  # the search itself works
    assert set(seen()["unused"][base.__name__]) <= OVER_QUESTIONS


def test_every_reason_to_refuse_is_given_by_a_run() -> None:
    given = {reason for _, reason, _ in seen()["refusals"]}
    assert {reason.value for reason in Reason} - given == set()


def test_every_key_of_the_policy_refuses_in_a_run() -> None:
    refused = {key for _, _, key in seen()["refusals"]}
    assert {key.name for key in fields(Policy)} - refused - NO_REFUSAL - {"max_refusals"} == set()


def test_every_ending_but_the_rare_ones_is_that_of_a_run() -> None:
    endings = {entry["ended"] for entry in seen()["runs"].values()}
    assert {status.value for status in Status if status not in RARE_ENDINGS} - endings == set()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fedtmle.protocol.plan.__version__", "another"),  # and so another digest of the plan
        ("tests.golden.wire.SESSION", b"another session"),
        ("tests.golden.wire.SECRET", b"another seed"),
    ],
    ids=["plan", "session", "signatures"],
)
@pytest.mark.parametrize("run", ["wire/signed", "wire/no relay"])
def test_the_digest_of_messages_blanks_what_derives_from_the_plan(
    run: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    recorded = perform(run)[1].in_order()
    monkeypatch.setattr(name, value)
    with tapped() as tap:
        RUNS[run](tmp_path)
    assert tap.in_order() != recorded
    assert message_digest(tap.in_order()) == message_digest(recorded)


def test_the_digest_of_messages_depends_on_every_byte_that_is_not_blanked() -> None:
    recorded = perform("wire/signed")[1].in_order()
    digest, unseen = message_digest(recorded), 0
    for number, (silo, request, reply) in enumerate(recorded):
        for at in range(len(reply)):
            changed = reply[:at] + bytes([reply[at] ^ 1]) + reply[at + 1 :]
            unseen += (
                message_digest([*recorded[:number], (silo, request, changed), *recorded[number + 1 :]])
                == digest
            )
    assert unseen == len(NAMES) * 64  # the signatures

"""kill -9 of silos that add noise: no question ever gets a second draw, and the budget is taken once."""

from __future__ import annotations

import base64
import multiprocessing
from collections import defaultdict
from fractions import Fraction
from pathlib import Path

import pytest

from fedtmle.runtime.ledger import Transcript, epsilon_taken, read, scopes
from fedtmle.runtime.session import Session
from tests.replay import Replay
from tests.runtime.faults import NOISY, PASSING, encoded, records

KILLS = 40
PER_RUN = 10
MOST_RUNS = 20
CASE = "study, noisy"
LANES = 4 * 5 // 2 + 2 * (2 + 3) + (1 + 1 + 2)  # of the Gram matrix, two gradients and the closing sums


@pytest.mark.slow
def test_no_question_gets_two_draws_though_silos_are_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.runtime import processes

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.runtime.processes"])
    killed = runs = lost = torn = 0
    while killed < KILLS or (lost == 0 and runs < MOST_RUNS):
        folder = tmp_path / str(runs)
        folder.mkdir()
        party = processes.run_and_kill(folder, CASE, PER_RUN, runs, context)
        runs += 1
        lost += check(folder)
        torn += party.torn
        killed += sum(count for name, count in party.kills.items() if name != processes.SERVER)
    with capsys.disabled():
        print(f"\n{killed} silos killed in {runs} runs, {torn} with a torn record, {lost} draws lost")  # noqa: T201
    assert lost > 0  # else no silo was killed between a draw and its record, where the danger is


def check(folder: Path) -> int:
    """Hold journal, ledger and wire of each silo against each other; return how many draws were lost."""
    from tests.runtime.processes import appended

    plan, _ = NOISY[CASE]()
    privacy = plan.program.privacy
    assert privacy is not None
    transcript = Transcript.load(folder / "transcript")
    assert encoded(Session(plan, Replay(transcript)).run()) == (folder / "transcript").read_bytes()
    lost = 0
    for silo in plan.silos:
        recorded = dict(records((folder / f"{silo}.journal").read_bytes()))
        sent: dict[bytes, set[bytes]] = defaultdict(set)
        for request, reply in appended(folder / f"{silo}.wire"):
            sent[request].add(reply)
        answers = {request: replies - PASSING for request, replies in sent.items()}
        assert {request: replies for request, replies in answers.items() if replies} == {
            request: {reply} for request, reply in recorded.items()
        }
        lines = list(read(folder / f"{silo}.ledger"))
        answered = [(line["asked"], line["replied"]) for line in lines if line["decision"] == "answered"]
        assert [tuple(map(base64.b64decode, pair)) for pair in answered] == list(recorded.items())
        taken = [record.zcdp for _, record in scopes(lines).values()]
        assert list(map(Fraction, taken)) == [privacy.taken]
        assert sum(line.get("told") is not None for line in lines) == 1
        assert epsilon_taken(taken) == privacy.owners_epsilon
        lost += len(appended(folder / f"{silo}.draws")) - LANES
    return lost

"""kill -9 for real: processes of a server and of silos, killed at random moments and started again."""

from __future__ import annotations

import base64
import multiprocessing
import statistics
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from fedtmle.runtime.ledger import read
from fedtmle_core.journal import FileJournal
from tests.runtime.faults import encoded, records, reference

KILLS = 100
PER_RUN = 12
CASES = (
    "mean, coded",
    "two arms, coded",
    "study",
    "mean, personalized",
    "two arms, newton",
    "study, relayed",
    "study, looks",
    "study, void",
    "mean, personalized and relayed",
)


@pytest.mark.slow
def test_a_hundred_processes_killed_and_the_same_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.runtime import processes

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.runtime.processes"])
    killed: Counter[str] = Counter()
    resumed: dict[str, list[float]] = defaultdict(list)
    torn = runs = 0
    while killed.total() < KILLS:
        case = CASES[runs % len(CASES)]
        folder = tmp_path / str(runs)
        folder.mkdir()
        party = processes.run_and_kill(folder, case, PER_RUN, runs, context)
        runs += 1
        check(folder, case)
        torn += party.torn
        for name, count in party.kills.items():
            killed["server" if name == "server" else "silos"] += count
        for one in party.resumed():
            resumed["server" if one["name"] == "server" else "silo"].append(one["seconds"])
    assert min(killed["server"], killed["silos"]) > 0
    with capsys.disabled():
        print(f"\n{dict(killed)} processes killed in {runs} runs, {torn} with a torn record")  # noqa: T201
        for who, seconds in resumed.items():
            middle, longest = statistics.median(seconds) * 1e3, max(seconds) * 1e3
            print(f"{who}: resumed {len(seconds)} times, median {middle:.0f} ms, most {longest:.0f} ms")  # noqa: T201


def check(folder: Path, case: str) -> None:
    """Transcript, journals and ledgers are those of the run in which nothing was killed."""
    expected = reference(case)
    assert (folder / "transcript").read_bytes() == encoded(expected.finished)
    for silo in expected.plan.silos:
        assert records((folder / f"{silo}.journal").read_bytes()) == expected.records[silo]
        said: dict[str, set[str]] = defaultdict(set)
        for line in read(folder / f"{silo}.ledger"):
            if line["decision"] != "refused":
                said[line["asked"]].add(line["replied"])
        answers = {base64.b64decode(asked): list(map(base64.b64decode, told)) for asked, told in said.items()}
        assert answers == {request: [reply] for request, reply in expected.records[silo]}
    FileJournal(folder / "server.journal").close()

"""How long a round and a study take over FLARE: masked beside open sums, and both beside a bare echo.

    .venv/bin/python -m benchmarks.flare_round [--silos 3] [--turns 3] [--folder DIR]

All of it in one deployment, in turns, so that the machine's load is the same for all. The median round of a
study must be within 1.5 times that of an echo by the engine's own calls, and a masked study within 1.2 times
the open one. An echo over the engine's cells, as our rounds travel, is shown beside it. The rounds of the
echoes that count have the same numbers as the study's: the engine itself gets faster over its first thirty
rounds. Masked studies have more rounds than open ones, because silos look at pooled sums before they
answer; so the time of a round and that of a study are compared separately. Every round of ours is written to
a journal and a ledger at each silo before it is answered, and to the server's journal: the time of an fsync
in DIR is shown beside it (DIR in memory, such as /dev/shm, leaves it out).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tests.deploy.session import engine_session

from fedtmle.deploy import kits, provision
from fedtmle.deploy.demo import approve_everywhere, local_deployment, run_here, write_example
from fedtmle.deploy.kits import Deployment, Kit
from fedtmle.deploy.launch import RunsHere, follow
from fedtmle.engine import flare_server
from fedtmle.engine.runs import RunState
from fedtmle.studyfile.file import StudyFile, read_study

ECHO_LIMIT, MASKED_LIMIT = 1.5, 1.2
WARM_UP = 5  # rounds in which a silo still imports
SETTINGS = ("open", "masked")


@dataclass(frozen=True)
class Timed:
    """A study's rounds, in seconds, and the time from its posting to its result."""

    rounds: list[float]
    whole: float


def main() -> int:
    """Measure, print, and return 1 if a limit is exceeded."""
    options = argparse.ArgumentParser(description=__doc__)
    # All eight hospitals have covariates that their policies answer for under masks only.
    options.add_argument("--silos", type=int, default=3, choices=range(3, 8))
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--folder", type=Path, default=None)
    asked = options.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    )
    with (
        tempfile.TemporaryDirectory(dir=asked.folder) as scratch,
        mock.patch.object(provision, "write_policy", _with_echo),
    ):
        folder = Path(scratch)
        study = read_study(write_example(folder / "hospitals", asked.silos, keys=True))
        run_here(study)  # compiles the kernels
        echo: list[dict[str, list[float]]] = []
        ours: dict[str, list[Timed]] = defaultdict(list)
        with local_deployment(folder / "consortium", study, within=300.0) as made:
            for turn in range(asked.turns):
                echo.append(_echo(made, folder / f"echo{turn}"))
                for setting in SETTINGS if turn % 2 == 0 else SETTINGS[::-1]:
                    ours[setting].append(_study(made, _plan(study, turn, setting)))
        fsync = _fsync(folder)
    return _report(asked.silos, echo, ours, fsync)


def _report(
    silos: int, echo: list[dict[str, list[float]]], ours: dict[str, list[Timed]], fsync: float
) -> int:
    """Print the times and ratios; return 1 if a limit is exceeded.

    The least turn counts, of its median round, of the sum of its rounds, and of its whole time.
    """
    print(f"{silos} silos, {len(echo)} turns; fsync {1e3 * fsync:.2f} ms; load {os.getloadavg()[1]:.1f}")
    least: dict[str, tuple[float, float, float]] = {}
    beside: list[float] = []
    for setting, runs in ours.items():
        rounds = slice(WARM_UP, len(runs[0].rounds))
        same = {way: [statistics.median(each[way][rounds]) for each in echo] for way in echo[0]}
        bare = {way: min(medians) for way, medians in same.items()}
        medians = [statistics.median(run.rounds[WARM_UP:]) for run in runs]
        least[setting] = (min(medians), min(sum(run.rounds) for run in runs), min(run.whole for run in runs))
        one, total, whole = least[setting]
        print(f"{setting}: {_each(medians)} ms a round; least {1e3 * one:.1f}")
        for way, seconds in same.items():
            print(f"    {one / bare[way]:.2f} of an echo by {way} ({_each(seconds)})")
        print(f"    {len(runs[0].rounds)} rounds take {total:.2f} s, the study {whole:.1f} s")
        beside.append(one / bare["calls"])
    ratios = [masked / open_ for masked, open_ in zip(least["masked"], least["open"], strict=True)]
    print("masked / open: a round {:.2f}, all rounds {:.2f}, the study {:.2f}".format(*ratios), flush=True)
    holds = max(beside) <= ECHO_LIMIT and ratios[2] <= MASKED_LIMIT
    return 0 if holds else 1


def _each(seconds: Iterable[float]) -> str:
    return ", ".join(f"{1e3 * each:.1f}" for each in seconds)


def _with_echo(kit: Kit) -> None:
    """The benchmark's silos also build the echo's classes."""
    kits.write_policy(kit)
    path = kit.path / "local" / "resources.json"
    document = json.loads(path.read_text())
    document["class_allow_list"] += ["flare_echo.EchoServer", "flare_echo.EchoSilo"]
    path.write_text(json.dumps(document))


def _echo(made: Deployment, out: Path) -> dict[str, list[float]]:
    job = out.with_suffix(".job")
    sites = list(made.sites.values())
    server, silo = flare_server.server_config(""), flare_server.silo_config({})
    server["components"] = [{"id": "_server", "path": "flare_echo.EchoServer", "args": {"out": str(out)}}]
    silo["components"] = [{"id": "_client", "path": "flare_echo.EchoSilo", "args": {}}]
    meta = {"name": job.stem, "resource_spec": {}, "min_clients": len(sites), "mandatory_clients": sites}
    meta["deploy_map"] = {"coordinator": ["server"], "silo": sites}
    for path, document in {
        "meta.json": meta,
        "coordinator/config/config_fed_server.json": server,
        "silo/config/config_fed_client.json": silo,
    }.items():
        (job / path).parent.mkdir(parents=True, exist_ok=True)
        (job / path).write_text(json.dumps(document))
    with engine_session(made) as session:
        name = session.submit_job(str(job))
        until = time.monotonic() + 120
        while not str(session.get_job_meta(name).get("status")).startswith("FINISHED"):
            if time.monotonic() > until:
                raise RuntimeError("the echo did not end")
            time.sleep(0.5)
    seconds: dict[str, list[float]] = json.loads(out.read_text())
    return seconds


def _plan(study: StudyFile, turn: int, setting: str) -> StudyFile:
    """A plan is run once; another seed makes another plan of the same study."""
    path = study.path.with_name(f"study-{turn}-{setting}.toml")
    text = study.path.read_text()
    path.write_text(f'[options]\nseed = {turn}\naggregation = "{setting}"\n\n{text}')
    return read_study(path)


def _study(made: Deployment, study: StudyFile) -> Timed:
    approve_everywhere(study)
    runs = RunsHere(made)
    began = time.monotonic()
    record = runs.new(study, deadline=120.0, patience=120.0)
    *_, last = follow(runs, record)
    if last.state is not RunState.DONE:
        raise RuntimeError(last.why)
    return Timed(list(last.seconds), time.monotonic() - began)


def _fsync(folder: Path) -> float:
    seconds = []
    with (folder / "sync").open("wb") as file:
        for _ in range(50):
            file.write(bytes(500))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())

"""How long one round takes over FLARE, beside a bare Collab echo in the same deployment.

    python benchmarks/flare_round.py [--silos 3] [--folder DIR]

The median round of a Coded study must be within 1.5 times of the echo's. Every round of ours is written
to a journal and a ledger at each silo before it is answered, and to the server's journal: the time of an
fsync in DIR is shown beside it (DIR in memory, such as /dev/shm, leaves it out).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))

from fedtmle.deploy import jobs, policy, provision
from fedtmle.deploy.demo import write_example
from fedtmle.deploy.kits import Deployment, Kit
from fedtmle.deploy.launch import RunsHere, follow
from fedtmle.deploy.local import approve_everywhere, local_deployment
from fedtmle.engine.runs import RunState
from fedtmle.studies.run import run
from fedtmle.studyfile.file import StudyFile, read_study

LIMIT = 1.5
WARM_UP = 5  # rounds in which a silo still imports and compiles
REPEATS = 2


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--silos", type=int, default=3)
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
        study = read_study(write_example(folder / "hospitals", asked.silos))
        run(study.study, study.silos)  # compiles the kernels
        with local_deployment(folder / "consortium", study) as made:
            echo, ours = _echo(made, folder / "echo0"), []
            for repeat in range(1, REPEATS + 1):  # in turns: the machine's load is the same for both
                ours += _study(made, _plan(study, repeat))
                echo += _echo(made, folder / f"echo{repeat}")
        report = {
            "silos": asked.silos,
            "echo_ms": 1e3 * statistics.median(echo),
            "ours_ms": 1e3 * statistics.median(ours),
            "ratio": statistics.median(ours) / statistics.median(echo),
            "fsync_ms": _fsync(folder),
            "rounds": len(ours),
            "study_seconds": sum(ours) / REPEATS,
        }
    print(json.dumps(report, indent=1))
    return 0 if report["ratio"] <= LIMIT else 1


def _with_echo(kit: Kit) -> None:
    """The benchmark's silos also build the echo's classes."""
    policy.write_policy(kit)
    path = kit.path / "local" / "resources.json"
    document = json.loads(path.read_text())
    document["class_allow_list"] += ["flare_echo.EchoServer", "flare_echo.EchoSilo"]
    path.write_text(json.dumps(document))


def _echo(made: Deployment, out: Path) -> list[float]:
    job = out.with_suffix(".job")
    sites = list(made.sites.values())
    server, silo = jobs.server_config(""), jobs.silo_config({})
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
    with jobs.engine_session(made) as session:
        name = session.submit_job(str(job))
        until = time.monotonic() + 120
        while not str(session.get_job_meta(name).get("status")).startswith("FINISHED"):
            if time.monotonic() > until:
                raise RuntimeError("the echo did not end")
            time.sleep(0.5)
    seconds: list[float] = json.loads(out.read_text())
    return seconds


def _plan(study: StudyFile, seed: int) -> StudyFile:
    """A plan is run once; another seed makes another plan of the same study."""
    path = study.path.with_name(f"study-{seed}.toml")
    path.write_text(f"[options]\nseed = {seed}\n\n{study.path.read_text()}")
    return read_study(path)


def _study(made: Deployment, study: StudyFile) -> list[float]:
    approve_everywhere(study)
    runs = RunsHere(made)
    record = runs.new(study, deadline=60.0, patience=60.0)
    *_, last = follow(runs, record)
    if last.state is not RunState.DONE:
        raise RuntimeError(last.why)
    return list(last.seconds[WARM_UP:])


def _fsync(folder: Path) -> float:
    seconds = []
    with (folder / "sync").open("wb") as file:
        for _ in range(50):
            file.write(bytes(500))
            file.flush()
            began = time.perf_counter()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return 1e3 * statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())

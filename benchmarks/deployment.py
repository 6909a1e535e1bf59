"""Memory and start time of a deployment with many silos on this machine, and of studies that wait.

    .venv/bin/python -m benchmarks.deployment [--silos 30] [--waiting 20]

Resident memory counts a page once per process that shares it ("summed") or once in all ("shared").
The study is run, and its result and messages are compared with those of one process.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from fedtmle.deploy import processes
from fedtmle.deploy.demo import approve_everywhere, compare, local_deployment, run_here, silo_kit
from fedtmle.deploy.kits import Deployment, Role, read_kit
from fedtmle.deploy.launch import RunsHere
from fedtmle.engine.runs import RunState
from fedtmle.studyfile.file import StudyFile, read_study

ROWS = 300  # at each silo
MIB = 2**20
STUDY = """\
[target]
kind = "ATE"
outcome = "y"
treatment = "a"

[variables]
y = {kind = "number", range = [-10, 10]}
a = {kind = "binary"}
x = {kind = "number", range = [-5, 5]}

[models.outcome]
formula = "a + x"

[models.treatment]
formula = "x"

[options]
seed = {seed}

[silos]
{silos}
"""


def write_study(folder: Path, silos: int) -> StudyFile:
    """Write a study of randomly drawn records at many silos; return it."""
    draw = random.Random(1)  # noqa: S311 - a benchmark
    names = [f"silo {number + 1}" for number in range(silos)]
    for name in names:
        home = folder / name.replace(" ", "-")
        home.mkdir(parents=True)
        lines = ["y,a,x"]
        for _ in range(ROWS):
            x = round(draw.uniform(-2, 2), 3)
            a = int(draw.random() < 0.5 + 0.1 * x)
            lines.append(f"{a + x + draw.uniform(-1, 1):.3f},{a},{x}")
        (home / "records.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        text = f'[silo]\nname = "{name}"\n\n[data]\npath = "records.csv"\n'
        (home / "silo.toml").write_text(text, encoding="utf-8")
    return with_seed(folder / "study.toml", names, 0)


def with_seed(path: Path, names: Sequence[str], seed: int) -> StudyFile:
    """Write the study with a seed, and thereby a plan, of its own."""
    listed = "\n".join(f'"{name}" = "{name.replace(" ", "-")}/silo.toml"' for name in names)
    path.write_text(STUDY.replace("{seed}", str(seed)).replace("{silos}", listed), encoding="utf-8")
    return read_study(path)


def memory(made: Deployment) -> tuple[int, float, float]:
    """Return the number of processes of all parties, and their memory in MiB, summed and shared."""
    kits = [read_kit(made.server, Role.SERVER), *(silo_kit(made, silo) for silo in made.sites)]
    count, summed, shared = 0, 0, 0
    for kit in kits:
        supervisor = processes.running(kit)
        for process in [] if supervisor is None else [supervisor, *processes.descendants(supervisor)]:
            with suppress(psutil.Error):
                used = process.memory_full_info()
                count, summed, shared = count + 1, summed + used.rss, shared + used.pss
    return count, summed / MIB, shared / MIB


class Peak:
    """The largest memory while the block runs."""

    def __init__(self, made: Deployment) -> None:
        self._made = made
        self._ending = threading.Event()
        self.largest = (0, 0.0, 0.0)

    def __enter__(self) -> Peak:
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._ending.wait(2.0):
            self.largest = max(self.largest, memory(self._made), key=lambda seen: seen[2])


def told(what: str, seen: tuple[int, float, float]) -> None:
    """Print a measurement."""
    count, summed, shared = seen
    print(f"{what}: {count} processes, {summed:,.0f} MiB summed, {shared:,.0f} MiB shared", flush=True)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--silos", type=int, default=30)
    parser.add_argument("--waiting", type=int, default=20)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fedtmle-") as scratch:
        folder = Path(scratch)
        study = write_study(folder / "silos", given.silos)
        embedded = run_here(study)
        began = time.monotonic()
        with local_deployment(folder / "consortium", study, within=600.0) as made:
            start_up = time.monotonic() - began
            print(f"{given.silos} silos connected after {start_up:.0f} s", flush=True)
            time.sleep(30)
            told("idle", memory(made))
            runs = RunsHere(made)
            approve_everywhere(study)
            began = time.monotonic()
            with Peak(made) as peak:
                run = runs.new(study, deadline=300.0, patience=600.0)
                processes.wait_until(lambda: run.status().state.is_over, 900)
            if run.status().state is not RunState.DONE:
                raise SystemExit(run.status().why)
            took = time.monotonic() - began
            compared = compare(embedded, run, run.status(), start_up=start_up, stopping=0.0)
            told("while a study runs", peak.largest)
            print(
                f"the study took {took:.0f} s, its {compared.rounds} rounds {compared.study_seconds:.0f} s; "
                f"same result: {compared.same_result}, same messages: {compared.same_transcript}",
                flush=True,
            )
            time.sleep(30)
            before = memory(made)
            told("idle again", before)
            for number in range(given.waiting):
                runs.new(
                    with_seed(folder / "silos" / f"study-{number}.toml", list(study.silos), number + 1),
                    deadline=300.0,
                    patience=600.0,
                )
            time.sleep(60)
            told(f"{given.waiting} studies wait", memory(made))


if __name__ == "__main__":
    main()

"""The demonstration's files: the IHDP study, and each hospital's silo file and records."""

from __future__ import annotations

import csv
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedtmle.datasets import ihdp
from fedtmle.deploy.launch import follow, launch, new_run, show
from fedtmle.deploy.local import approve_everywhere, local_deployment
from fedtmle.engine.runs import RunFolder, RunState, RunStatus
from fedtmle.errors import InputError, ProtocolError
from fedtmle.layout import number, wrapped
from fedtmle.results.result import StudyResult
from fedtmle.studies.run import run
from fedtmle.studyfile.file import read_study

# As in `fedtmle demo`, without what some hospital has only a few people with: a sum over a few people is
# what a silo's policy refuses.
LEFT_OUT = ("mlt_birt", "mom_scoll", "momhisp")
BABY = "bw + nnhealth + sex"
MOTHER = "momage + b_marr + mom_lths + mom_hs + momblack + cigs"
STUDY = f"""\
[target]
kind = "ATE"
outcome = "iqsb_36"
outcome_bounds = [40, 160]
treatment = "treat"

[models.outcome]
formula = "treat + {BABY} + {MOTHER} + C(site)"

[models.treatment]
formula = "bw + C(site)"

[models.missingness]
formula = "treat + {BABY} + {MOTHER} + C(site)"

"""
HOSPITALS = 8


def write_example(folder: Path, hospitals: int = HOSPITALS, *, algorithm: str = 'kind = "Coded"') -> Path:
    """Writes study.toml and a folder per hospital; returns the study's path."""
    if not 2 <= hospitals <= HOSPITALS:
        raise InputError(f"hospitals: expected 2 to {HOSPITALS}, not {hospitals}")
    columns = {name: [float(cell) for cell in cells] for name, cells in ihdp().items()}
    names = []
    for site in sorted(set(columns["site"]))[:hospitals]:
        name = f"hospital {site:.0f}"
        own = folder / name.replace(" ", "-")
        own.mkdir(parents=True)
        _write_records(own / "infants.csv", columns, [at == site for at in columns["site"]])
        text = f'[silo]\nname = "{name}"\n\n[data]\npath = "infants.csv"\n'
        (own / "silo.toml").write_text(text, encoding="utf-8")
        names.append(name)
    listed = "\n".join(f'"{name}" = "{name.replace(" ", "-")}/silo.toml"' for name in names)
    study = folder / "study.toml"
    study.write_text(f"{STUDY}[algorithm]\n{algorithm}\n\n[silos]\n{listed}\n", encoding="utf-8")
    return study


def _write_records(path: Path, columns: Mapping[str, Sequence[float]], keep: Sequence[bool]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(columns)
        for kept, row in zip(keep, zip(*columns.values(), strict=True), strict=True):
            if kept:
                table.writerow("" if math.isnan(cell) else repr(cell) for cell in row)


# `fedtmle deploy demo`: a real server and real silos on this machine, beside the same study in-process.


PATIENCE = 120.0


def run_demo(hospitals: int, *, port: int | None, as_json: bool, quiet: bool) -> bool:
    """Runs, compares, prints; whether the two runs are the same to the byte."""
    quiet = quiet or as_json
    with tempfile.TemporaryDirectory(prefix="fedtmle-demo-") as scratch:
        folder = Path(scratch)
        study = read_study(write_example(folder / "hospitals", hospitals))
        _tell(f"starting a server and {hospitals} hospitals, each a process of its own", quiet=quiet)
        here = run(study.study, study.silos)  # first: it compiles for all that follow
        began = time.monotonic()
        with local_deployment(folder / "consortium", study, port=port) as made:
            start_up = time.monotonic() - began
            approve_everywhere(study)
            record = new_run(made, study, deadline=60.0, patience=PATIENCE)
            launch(made, record)
            last = show(follow(made, record), quiet=quiet)
            began = time.monotonic()
        stopping = time.monotonic() - began
        if last.state is not RunState.DONE:
            raise ProtocolError(last.why)
        compared = compare(here, record, folder / "transcript")
    compared |= _times(last) | {"start_up_seconds": start_up, "stop_seconds": stopping}
    print(json.dumps(compared) if as_json else _text(compared))  # noqa: T201 - the command's output
    return bool(compared["same_result"] and compared["same_transcript"])


def compare(here: StudyResult, record: RunFolder, scratch: Path) -> dict[str, Any]:
    """The deployed run beside the same study in this process, byte by byte."""
    if here.run is None:
        raise AssertionError("a fresh result has its run")
    here.run.transcript.save(scratch)
    deployed = record.result.read_text(encoding="utf-8")
    return {
        "estimates": json.loads(deployed)["estimates"],
        "n": here.document["n"],
        "silos": len(here.document["sizes"]),
        "same_result": deployed == here.to_json() + "\n",
        "same_transcript": record.transcript.read_bytes() == scratch.read_bytes(),
        "transcript_bytes": record.transcript.stat().st_size,
    }


def _times(last: RunStatus) -> dict[str, Any]:
    return {
        "rounds": len(last.seconds),
        "median_round_ms": 1e3 * statistics.median(last.seconds),
        "study_seconds": sum(last.seconds),
    }


def _text(compared: dict[str, Any]) -> str:
    (row,) = compared["estimates"]
    same = "identical, byte for byte" if compared["same_result"] else "DIFFERENT"
    messages = "identical, byte for byte" if compared["same_transcript"] else "DIFFERENT"
    return "\n".join(
        [
            f"Early intervention and IQ, {compared['n']} infants at {compared['silos']} hospitals:",
            f"  effect {number(row['estimate'], 3)} ({number(row['conf_low'], 2)} to "
            f"{number(row['conf_high'], 2)})",
            *wrapped(
                f"Not the effect of `fedtmle demo`: the models leave out {', '.join(LEFT_OUT)}, which too "
                "few people of some hospital have for its policy to answer."
            ),
            f"Across processes, over mutual TLS: {compared['rounds']} rounds in "
            f"{compared['study_seconds']:.1f} s, {compared['median_round_ms']:.0f} ms in the median.",
            f"Beside the same study in one process: result {same};",
            f"all {compared['transcript_bytes']:,} bytes of messages {messages}.",
            f"Start-up took {compared['start_up_seconds']:.0f} s; everything was stopped in "
            f"{compared['stop_seconds']:.1f} s.",
        ]
    )


def _tell(line: str, *, quiet: bool) -> None:
    if not quiet:
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - progress

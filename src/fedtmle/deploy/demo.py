"""`fedtmle deploy demo`: a server and the IHDP hospitals as processes here, beside the same study in one.

`local_deployment` starts a whole deployment on one machine, on loopback; tests and benchmarks use it too.
"""

from __future__ import annotations

import csv
import json
import math
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType

from fedtmle.datasets import ihdp, ihdp_variables
from fedtmle.deploy.kits import Deployment, Kit, Role, read_kit
from fedtmle.deploy.launch import RunsHere, follow, presence, show
from fedtmle.deploy.parties import start_server, start_silo
from fedtmle.deploy.processes import stop, wait_until
from fedtmle.deploy.provision import provision
from fedtmle.engine.runs import RunFolder, RunState, RunStatus, server_key
from fedtmle.errors import InputError, ProtocolError
from fedtmle.initial.variables import Variables
from fedtmle.layout import number, wrapped
from fedtmle.results.result import StudyResult
from fedtmle.runtime.session import InProcess
from fedtmle.studies.home import Home, open_party
from fedtmle.studies.over import leaving, run_over
from fedtmle.studyfile.draft import variables_text
from fedtmle.studyfile.file import StudyFile, file_plan, read_study
from fedtmle_core import kernels

START_UP = 60.0  # seconds until the server and every silo are connected


@contextmanager
def local_deployment(
    folder: Path,
    study: StudyFile,
    *,
    host: str = "localhost",
    port: int | None = None,
    spare: tuple[str, ...] = (),
    within: float = START_UP,
) -> Iterator[Deployment]:
    """Provision and start a server and the study's silos; stop all of them at the end, however it ends.

    ``spare`` names silos that get a kit and are not started. All others must be connected ``within`` so many
    seconds.
    """
    made = provision(folder, silos=[*study.silos, *spare], host=host, port=port or free_port())
    try:
        with _interrupted_by_terminate():
            start_server(read_kit(made.server, Role.SERVER))
            for silo, path in study.silos.items():
                start_silo(silo_kit(made, silo), path)
            await_silos(made, list(study.silos), seconds=within)
            yield made
    finally:
        for silo in study.silos:
            stop(silo_kit(made, silo))
        stop(read_kit(made.server, Role.SERVER))


def await_silos(made: Deployment, silos: list[str], *, seconds: float = START_UP) -> None:
    """Wait until the server runs and these silos are connected to it."""
    expected = {made.sites[silo] for silo in silos}

    def connected() -> bool:
        seen = presence(made.server)
        return seen is not None and expected <= set(seen.sites)

    if not wait_until(connected, seconds):
        raise ProtocolError(f"the server and its silos were not connected within {seconds:g} s")


def approve_everywhere(study: StudyFile) -> None:
    """Approve a study at every silo, as each owner would on the silo's own machine."""
    for path in study.silos.values():
        home = Home.of(path)
        home.approvals.decide(file_plan(study).digest, approved=True, lowered=home.file.policy.lowered)


def silo_kit(made: Deployment, silo: str) -> Kit:
    """Return the kit of a silo."""
    return read_kit(made.kit(silo), Role.SILO)


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def _interrupted_by_terminate() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that started processes are stopped."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# Only a few people at some hospital have these covariates: a silo's policy refuses to send a sum over a few
# people as it is. Under masks all hospitals together have enough of them.
RARE = ("mlt_birt", "mom_scoll", "momhisp")
COVARIATES = (
    *("bw", "nnhealth", "sex", "mlt_birt", "momage", "b_marr", "mom_lths", "mom_hs", "mom_scoll", "momblack"),
    *("momhisp", "cigs"),
)
STUDY = """\
[target]
kind = "ATE"
outcome = "iqsb_36"
treatment = "treat"

[models.outcome]
formula = "treat + {covariates} + C(site)"

[models.treatment]
formula = "bw + C(site)"

[models.missingness]
formula = "treat + {covariates} + C(site)"

"""
HOSPITALS = 8
PATIENCE = 120.0  # seconds to wait for approvals


def write_example(
    folder: Path, hospitals: int = HOSPITALS, *, algorithm: str = 'kind = "Coded"', keys: bool = False
) -> Path:
    """Write study.toml and a folder per hospital; return the study's path.

    With ``keys`` the study lists the hospitals' public keys, so that three or more send masked sums. All
    eight then have the study of `fedtmle demo`; elsewhere the models leave out the covariates in ``RARE``.
    """
    if not 2 <= hospitals <= HOSPITALS:
        raise InputError(f"hospitals: expected 2 to {HOSPITALS}, got {hospitals}")
    columns = {name: [float(cell) for cell in cells] for name, cells in ihdp().items()}
    names, listed_keys = [], []
    for site in sorted(set(columns["site"]))[:hospitals]:
        name = f"hospital {site:.0f}"
        hospital = folder / name.replace(" ", "-")
        hospital.mkdir(parents=True)
        _write_records(hospital / "infants.csv", columns, [at == site for at in columns["site"]])
        text = f'[silo]\nname = "{name}"\nhome = "home"\n\n[data]\npath = "infants.csv"\n'
        (hospital / "silo.toml").write_text(text, encoding="utf-8")
        home = Home.create(hospital / "silo.toml")
        names.append(name)
        if keys:
            listed_keys.append(f'"{name}" = "{home.key.public_keys.hex()}"')
    listed = "\n".join(f'"{name}" = "{name.replace(" ", "-")}/silo.toml"' for name in names)
    study = folder / "study.toml"
    left_out = () if keys and hospitals == HOSPITALS else RARE
    variables = variables_text(_variables(names, left_out))
    covariates = " + ".join(name for name in COVARIATES if name not in left_out)
    plan = f"\n[plan]\nkeys = {{{', '.join(listed_keys)}}}\n" if keys else ""
    text = f"{variables}\n[algorithm]\n{algorithm}\n{plan}\n[silos]\n{listed}\n"
    study.write_text(STUDY.format(covariates=covariates) + text, encoding="utf-8")
    return study


def _pinned(study: StudyFile, server: bytes) -> StudyFile:
    """Return the example with the server's public key under [plan]."""
    text = study.path.read_text(encoding="utf-8")
    study.path.write_text(text.replace("[plan]\n", f'[plan]\nserver = "{server.hex()}"\n'), encoding="utf-8")
    return read_study(study.path)


def _variables(names: list[str], left_out: Sequence[str]) -> Variables:
    """Return the dictionary of the study, with the hospitals that take part as the levels of the site."""
    variables = {name: each for name, each in ihdp_variables().items() if name not in left_out}
    levels = tuple((code, words) for code, words in variables["site"].levels if words in names)
    return Variables({**variables, "site": replace(variables["site"], levels=levels)})


def _write_records(path: Path, columns: Mapping[str, Sequence[float]], is_here: Sequence[bool]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(columns)
        for here, row in zip(is_here, zip(*columns.values(), strict=True), strict=True):
            if here:
                table.writerow("" if math.isnan(cell) else repr(cell) for cell in row)


def run_here(study: StudyFile) -> StudyResult:
    """Run the plan of a study file in this process, with the policies and keys of all its silos."""
    plan = file_plan(study)
    homes = {name: Home.of(path) for name, path in study.silos.items()}
    silos = [
        open_party(plan, name, home.file, keeper=home.unrecorded_keeper(plan)) for name, home in homes.items()
    ]
    return run_over(plan, InProcess(silos))


def run_demo(hospitals: int, *, port: int | None, as_json: bool, quiet: bool) -> bool:
    """Run the study deployed and in this process, print the comparison, return whether no byte differs."""
    quiet = quiet or as_json
    with tempfile.TemporaryDirectory(prefix="fedtmle-demo-") as scratch:
        folder = Path(scratch)
        study = read_study(write_example(folder / "hospitals", hospitals, keys=True))
        if not quiet:
            line = f"starting a server and {hospitals} hospitals, each a process of its own"
            print(line, file=sys.stderr, flush=True)  # noqa: T201 - progress
        kernels.exp(0.0)  # compile the kernels for all that follow
        began = time.monotonic()
        with local_deployment(folder / "consortium", study, port=port) as made:
            start_up = time.monotonic() - began
            study = _pinned(study, server_key(made.server).public)
            embedded = run_here(study)
            approve_everywhere(study)
            runs = RunsHere(made)
            record = runs.new(study, deadline=60.0, patience=PATIENCE)
            last = show(follow(runs, record), quiet=quiet)
            began = time.monotonic()
        stopping = time.monotonic() - began
        if last.state is not RunState.DONE:
            raise ProtocolError(last.why)
        compared = compare(embedded, record, last, start_up=start_up, stopping=stopping)
    print(json.dumps(asdict(compared)) if as_json else compared)  # noqa: T201 - the command's output
    return compared.same_result and compared.same_transcript


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A deployed run beside the same study in one process."""

    estimates: list[dict[str, float]]
    n: int
    silos: int
    same_result: bool
    same_transcript: bool
    transcript_bytes: int
    rounds: int
    median_round_ms: float
    study_seconds: float
    start_up_seconds: float
    stop_seconds: float

    def _about_models(self) -> list[str]:
        if self.silos == HOSPITALS:
            return wrapped("Sums are masked, and every hospital's policy is the default.")
        return wrapped(
            f"This is not the effect of `fedtmle demo`: the models leave out {', '.join(RARE)}, "
            "which too few people at some hospital have for its policy to answer."
        )

    def __str__(self) -> str:
        (row,) = self.estimates
        result, messages = (
            "identical, byte for byte" if same else "DIFFERENT"
            for same in (self.same_result, self.same_transcript)
        )
        return "\n".join(
            [
                f"Early intervention and IQ, {self.n} infants at {self.silos} hospitals:",
                f"  effect {number(row['estimate'], 3)} ({number(row['conf_low'], 2)} to "
                f"{number(row['conf_high'], 2)})",
                *self._about_models(),
                f"Across processes, over mutual TLS: {self.rounds} rounds in {self.study_seconds:.1f} s, "
                f"{self.median_round_ms:.0f} ms in the median.",
                f"Beside the same study in one process: result {result};",
                f"all {self.transcript_bytes:,} bytes of messages {messages}.",
                f"Start-up took {self.start_up_seconds:.0f} s; everything was stopped in "
                f"{self.stop_seconds:.1f} s.",
            ]
        )


def compare(
    embedded: StudyResult, record: RunFolder, last: RunStatus, *, start_up: float, stopping: float
) -> Comparison:
    """Compare a deployed run, byte by byte, with the same study in this process."""
    if embedded.run is None:
        raise AssertionError("a fresh result has its run")
    deployed = record.result.read_text(encoding="utf-8")
    transcript = record.transcript.read_bytes()
    return Comparison(
        estimates=json.loads(deployed)["estimates"],
        n=embedded.document["n"],
        silos=len(embedded.document["sizes"]),
        same_result=deployed == leaving(embedded).to_json() + "\n",
        same_transcript=transcript == embedded.run.transcript.encode(),
        transcript_bytes=len(transcript),
        rounds=len(last.seconds),
        median_round_ms=1e3 * statistics.median(last.seconds),
        study_seconds=sum(last.seconds),
        start_up_seconds=start_up,
        stop_seconds=stopping,
    )

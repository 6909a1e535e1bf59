"""The server's office: what a statistician may ask of it, here or from another machine.

A statistician posts a study, follows its run, fetches the result, resumes or cancels it. From another machine
the requests come over the server's one port, under the certified name in the sender's kit. Each statistician
sees the runs that they posted; the coordinator sees all. Messages of silos stay at the server.
"""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from fedtmle.engine.post import LONGEST_LETTER, LONGEST_STUDY, MAX_STUDIES
from fedtmle.engine.runs import Move, RunFolder, RunState, RunStatus, Terms, server_key, sites
from fedtmle.errors import DecodeError, FedTMLEError, InputError
from fedtmle.studyfile.file import StudyFile, file_plan, read_study
from fedtmle_core.journal import read_document

COORDINATOR = "admin@fedtmle.org"  # the engine requires the form of an address; no such mailbox exists
PIECE = 1 << 20  # bytes of a file in one reply
AGAIN = "to run the study again, change its seed and have the new plan approved"


class Submit(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="submit"):
    """Make a run of a study; ``plan`` is the digest that the sender's version computes."""

    name: str
    text: bytes
    plan: str
    version: str
    deadline: float
    patience: float


class LookAt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="look"):
    """Ask for the status of a run."""

    run: str


class Fetch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="fetch"):
    """Ask for a part of a run's events or result."""

    run: str
    file: Literal["events", "result"]
    offset: int


class Resume(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="resume"):
    """Let a run that stopped go on."""

    run: str


class Cancel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="cancel"):
    """End a run."""

    run: str


class RunNews(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="news"):
    """The status of a run, without the server's process."""

    run: str
    status: RunStatus


class Piece(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="piece"):
    """A part of a file that has ``size`` bytes in all."""

    data: bytes
    size: int


class Denied(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="denied"):
    """The server cannot do what was asked, and why."""

    message: str


OfficeRequest: TypeAlias = Submit | LookAt | Fetch | Resume | Cancel
OfficeReply: TypeAlias = RunNews | Piece | Denied


def write_message(message: OfficeRequest | OfficeReply) -> bytes:
    """Return a message as bytes."""
    return msgspec.json.encode(message)


def read_request(data: object) -> OfficeRequest:
    """Return the request in these bytes; raise `DecodeError` if there is none."""
    request: OfficeRequest = _read(data, OfficeRequest)
    return request


def read_reply(data: object) -> OfficeReply:
    """Return the reply in these bytes; raise `DecodeError` if there is none."""
    reply: OfficeReply = _read(data, OfficeReply)
    return reply


def _read(data: object, kind: object) -> Any:
    if isinstance(data, bytes | bytearray | memoryview) and len(data) <= LONGEST_LETTER:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(data, type=kind)
    raise DecodeError("not a message of the server's office")


class Office:
    """Answer the requests of statisticians on other machines; ``server`` is the server's kit."""

    def __init__(self, server: Path, *, version: str) -> None:
        self._server, self._version = server, version
        self._runs = server / "runs"
        self._lock = threading.Lock()  # two requests must not claim one plan

    def answer(self, sender: str, data: object) -> OfficeReply:
        """Return the reply to ``sender``, a name that the engine has checked against its certificate."""
        try:
            request = read_request(data)
            if not is_statistician(sender):
                raise InputError("this is not the kit of a statistician or coordinator")
            if isinstance(request, Submit):
                with self._lock:
                    return self._news(self._submit(sender, request))
            run = self._find(sender, request.run)
            if isinstance(request, Fetch):
                return _piece(run.events if request.file == "events" else run.result, request.offset)
            if isinstance(request, Resume):
                resume(run)
            elif isinstance(request, Cancel):
                cancel(run)
            return self._news(run)
        except FedTMLEError as error:
            return Denied(message=str(error))
        except OSError as error:
            return Denied(message=f"a file at the server cannot be used: {error.strerror}")

    def _submit(self, sender: str, request: Submit) -> RunFolder:
        if len(request.text) > LONGEST_STUDY:
            raise InputError(f"a deployed study has at most {LONGEST_STUDY >> 10} KiB of text")
        stem = re.sub(r"[^A-Za-z0-9_-]+", "-", request.name)[:40] or "study"
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch) / f"{stem}.toml"
            path.write_bytes(request.text)
            try:
                study = read_study(path, samples=False)
                plan = file_plan(study).digest.hex()
            except InputError as error:
                raise InputError(str(error).replace(str(path), request.name)) from None
            if plan != request.plan:
                raise InputError(
                    f"the server, with fedtmle {self._version}, reads another plan in this study than you do "
                    f"with {request.version}; install the same version"
                )
            return new_run(
                self._runs,
                study,
                known=known_sites(self._server),
                deadline=request.deadline,
                patience=request.patience,
                owner=sender,
            )

    def _find(self, sender: str, name: str) -> RunFolder:
        """Return a run of this sender; the runs of others are reported as absent."""
        try:
            run = RunFolder.named(self._runs, name)
            if sender == COORDINATOR or run.terms().owner == sender:
                return run
        except InputError:
            pass
        raise InputError(f"the server has no run '{name}' of yours")

    @staticmethod
    def _news(run: RunFolder) -> RunNews:
        return RunNews(run=run.name, status=replace(run.look(), process=None, job=""))


def is_statistician(name: str) -> bool:
    """Return whether a certified name is a person's; names of silos and of the server have no @."""
    return "@" in name


def known_sites(server: Path) -> Mapping[str, str] | None:
    """Return the deployment's silos and their names on the network, None if the server does not know them."""
    try:
        return {
            str(silo): str(site) for silo, site in read_document(server / "fedtmle" / "sites.json").items()
        }
    except (OSError, ValueError):
        return None


def _piece(path: Path, offset: int) -> Piece:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(min(max(offset, 0), size))
            return Piece(data=file.read(PIECE), size=size)
    except FileNotFoundError:
        return Piece(data=b"", size=0)


def new_run(
    runs: Path,
    study: StudyFile,
    *,
    known: Mapping[str, str] | None,
    deadline: float,
    patience: float,
    owner: str = "",
) -> RunFolder:
    """Make a run; the server announces it to the silos and starts it when all have approved.

    ``known`` are the deployment's silos with their names on the network, ``owner`` is the statistician who
    posted the study from another machine.
    """
    study = read_study(study.path, samples=False)
    if min(deadline, patience) < 1.0:
        raise InputError("deadline, patience: expected at least 1 second each")
    if study.study.algorithm.pools_rows:
        raise InputError("algorithm: 'Central' pools the rows; it cannot run on a deployment")
    if len(study.path.read_bytes()) > LONGEST_STUDY:
        raise InputError(f"{study.path}: a deployed study has at most {LONGEST_STUDY >> 10} KiB of text")
    named = sites(study.silos) if known is None else dict(known)
    unknown = [silo for silo in study.silos if silo not in named]
    if unknown:
        raise InputError(
            f"{study.path.name}: the deployment has no silo {' or '.join(map(repr, unknown))}; "
            f"it has {', '.join(map(repr, named))}"
        )
    key = server_key(runs.parent).public
    if study.server not in (b"", key):
        raise InputError(
            f"{study.path.name}: server under [plan] is the key of another server; this one's is {key.hex()}"
        )
    terms = Terms(
        plan=file_plan(study).digest.hex(),
        sites={silo: named[silo] for silo in study.silos},
        deadline=deadline,
        patience=patience,
        goes_on=study.study.on_refusal == "go on",
        owner=owner,
    )
    _check_is_new(runs, terms)
    return RunFolder.new(runs, study, terms)


def _check_is_new(runs: Path, terms: Terms) -> None:
    """Check that a plan was not started before: silos answer each plan once."""
    going_on = 0
    for run in RunFolder.every(runs):
        state = run.status().state
        going_on += not state.is_over
        if run.terms().plan != terms.plan:
            continue
        if terms.owner not in ("", run.terms().owner):
            raise InputError(f"somebody else has posted this plan; {AGAIN}")
        if state is RunState.DONE:
            raise InputError(f"this plan was run already, as run '{run.name}'; {AGAIN}")
        if state is RunState.CANCELLED:
            raise InputError(f"this plan was cancelled, as run '{run.name}'; {AGAIN}")
        raise InputError(
            f"this plan was started already, as run '{run.name}'; continue it with `fedtmle resume`"
        )
    if going_on >= MAX_STUDIES:
        raise InputError(f"the server has {going_on} runs that are not over; cancel some, or wait")


def resume(run: RunFolder) -> None:
    """Let a run that stopped go on; one that waits or runs does so by itself."""
    status = run.look()
    if status.state is RunState.DONE:
        raise InputError(f"run '{run.name}': this run is done; `fedtmle show` prints its result.json")
    if status.state is RunState.CANCELLED:
        raise InputError(f"run '{run.name}': this run was cancelled; {AGAIN}")
    if status.state is RunState.STOPPED:
        run.move(Move.RESUME, lost=0, silos={})


def cancel(run: RunFolder) -> None:
    """Cancel a run: the server ends its job, and silos are asked nothing more."""
    state = run.status().state
    if state in (RunState.DONE, RunState.CANCELLED):
        raise InputError(f"run '{run.name}': this run is {state} already")
    run.move(Move.CANCEL, why="cancelled by the coordinator")

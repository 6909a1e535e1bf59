"""Make, follow, resume and cancel the runs of a server; its dispatcher carries them out.

`RunsHere` are those of a server on this machine, `RemoteRuns` those of one elsewhere.
"""

from __future__ import annotations

import io
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, TextIO

from fedtmle.deploy.kits import Deployment, Kit, Role, read_deployment, read_kit
from fedtmle.engine import office
from fedtmle.engine.office import (
    Cancel,
    Denied,
    Fetch,
    LookAt,
    OfficeReply,
    OfficeRequest,
    Piece,
    Resume,
    RunNews,
    Submit,
    read_reply,
    write_message,
)
from fedtmle.engine.process import Process
from fedtmle.engine.runs import RunFolder, RunState, RunStatus, Terms, full_disk, is_run_name, sites
from fedtmle.errors import InputError, ProtocolError
from fedtmle.layout import phase_name
from fedtmle.studyfile.file import StudyFile, file_plan
from fedtmle_core.journal import read_document, write_document

# What the server's engine wrote about itself: whether it runs, and which silos are connected.

STALE = 15.0  # seconds without a sign of life


@dataclass(frozen=True, kw_only=True)
class Presence:
    """The last sign of life of a server's engine."""

    alive: bool
    age: float  # seconds
    sites: Mapping[str, Mapping[str, Any]]  # the connected silos: when heard, which version


def presence(server: Path) -> Presence | None:
    """Return the sign of life in a server's kit, judged against the machine; None if there is none."""
    try:
        document = read_document(server / "fedtmle" / "server.json")
        process, written = Process(**document["process"]), float(document["time"])
        sites: Mapping[str, Mapping[str, Any]] = document["sites"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    age = max(time.time() - written, 0.0)
    is_alive = process.find() is not None and age < STALE
    return Presence(alive=is_alive, age=age, sites=sites if is_alive else {})


def server_trouble(server: Path) -> str:
    """Return what is wrong with the server, an empty string if it runs.

    A server whose disk is full cannot give a sign of life.
    """
    for folder in (server / "runs", server):
        full = full_disk(folder)
        if full:
            return full
    seen = presence(server)
    if seen is None or not seen.alive:
        return f"the server is not running; start it with `fedtmle server start {server}`"
    return ""


SERVER_INTERVAL = 5.0  # seconds between two looks at the server


def show(statuses: Iterable[RunStatus], *, quiet: bool, to: TextIO | None = None) -> RunStatus:
    """Print a line per change of status, to standard error by default; return the last status."""
    out = sys.stderr if to is None else to
    printed, last = "", None
    for last in statuses:
        line = _line(last, live=out.isatty())
        if not quiet and line and line != printed:
            print(line, file=out, flush=True)
            printed = line
    if last is None:
        raise AssertionError("a run has a status")
    return last


def _line(status: RunStatus, *, live: bool) -> str:
    if status.state is RunState.RUNNING:
        return _progress(status, live=live)
    if status.state is RunState.STOPPED:
        return f"stopped after round {status.round}: {status.why}"
    if status.state is RunState.DONE:
        return f"done in {status.round} rounds, {sum(status.seconds):.1f} s"
    return "; ".join(filter(None, (status.state, status.why, _silos(status))))


def _progress(status: RunStatus, *, live: bool) -> str:
    if not status.round and not status.absent:
        return "all silos are ready; running"
    if not status.round:
        return f"running without {_silos(replace(status, silos=status.absent))}"
    awaited = {silo: words for silo, words in status.silos.items() if words != "ready"}
    if awaited:
        return f"round {status.round}; {_silos(replace(status, silos=awaited))}"
    phase = phase_name(status.phase)
    return f"round {status.round}, {phase}, {status.bits / 1000:.1f} kbit so far" if live else ""


def _silos(status: RunStatus) -> str:
    by_words: dict[str, list[str]] = {}
    for silo, words in status.silos.items():
        by_words.setdefault(words, []).append(silo)
    return "; ".join(f"{words}: {', '.join(silos)}" for words, silos in by_words.items())


class Runs(ABC):
    """The runs of one server, as a statistician uses them."""

    folder: Path  # the folder that holds the runs on this machine
    interval: float  # seconds between two looks at a run

    @abstractmethod
    def require(self) -> None:
        """Raise `ProtocolError` unless the server runs: nobody would carry out a run."""

    @abstractmethod
    def new(self, study: StudyFile, *, deadline: float, patience: float) -> RunFolder:
        """Make a run; the server announces it to the silos and starts it when all have approved."""

    @abstractmethod
    def named(self, name: str) -> RunFolder:
        """Return the run of this name."""

    @abstractmethod
    def look(self, run: RunFolder) -> RunStatus:
        """Return the status of a run, judged by the machine that carries it out."""

    @abstractmethod
    def trouble(self) -> str:
        """Return what is wrong with the server, an empty string if it runs."""

    @abstractmethod
    def resume(self, run: RunFolder) -> None:
        """Let a run that stopped go on; one that waits or runs does so by itself."""

    @abstractmethod
    def cancel(self, run: RunFolder) -> None:
        """Cancel a run: the server ends its job, and silos are asked nothing more."""

    @abstractmethod
    def close(self) -> None:
        """End a connection that is open."""


class RunsHere(Runs):
    """The runs of a deployment whose server is on this machine."""

    interval = 0.2

    def __init__(self, deployment: Deployment) -> None:
        self.folder = deployment.runs
        self._deployment = deployment
        self._looked, self._seen = -SERVER_INTERVAL, ""

    def require(self) -> None:
        """Raise `ProtocolError` unless the server runs."""
        trouble = server_trouble(self._deployment.server)
        if trouble:
            raise ProtocolError(trouble)

    def new(self, study: StudyFile, *, deadline: float, patience: float) -> RunFolder:
        """Make a run in the server's folder."""
        known = self._deployment.sites
        return office.new_run(self.folder, study, known=known, deadline=deadline, patience=patience)

    def named(self, name: str) -> RunFolder:
        """Return the run of this name."""
        return RunFolder.named(self.folder, name)

    def look(self, run: RunFolder) -> RunStatus:
        """Return the status of a run, judged against this machine."""
        return run.look()

    def trouble(self) -> str:
        """Return what is wrong with the server, as it was some seconds ago."""
        if time.monotonic() - self._looked > SERVER_INTERVAL:
            self._looked, self._seen = time.monotonic(), server_trouble(self._deployment.server)
        return self._seen

    def resume(self, run: RunFolder) -> None:
        """Let a run that stopped go on."""
        office.resume(run)

    def cancel(self, run: RunFolder) -> None:
        """Cancel a run."""
        office.cancel(run)

    def close(self) -> None:
        """There is no connection to end."""


def follow(runs: Runs, run: RunFolder) -> Iterator[RunStatus]:
    """Yield each new status until the run is over; while the server is down, the status says so."""
    last = None
    while True:
        status = runs.look(run)
        trouble = runs.trouble()
        if trouble and not status.state.is_over:
            status = replace(status, state=RunState.WAITING, why=trouble, silos={})
        if status != last:
            last = status
            yield status
        if status.state.is_over:
            return
        time.sleep(runs.interval)


def runs_on(path: Path) -> Runs:
    """Return the runs of the deployment in this folder, or of the server that a statistician's kit names."""
    if (path / "fedtmle" / "kit.json").is_file():
        return RemoteRuns(read_kit(path, Role.ADMIN))
    return RunsHere(read_deployment(path))


def copying(statuses: Iterable[RunStatus], source: Path, target: Path | None) -> Iterator[RunStatus]:
    """Yield the statuses; meanwhile append what ``source``, the run's events, gets to the file ``target``."""
    copied = 0
    for status in statuses:
        yield status
        if target is not None and source.exists():
            with source.open("rb") as read, target.open("ab") as write:
                read.seek(copied)
                write.write(read.read())
                copied = read.tell()


@contextmanager
def find_run(path: Path) -> Iterator[tuple[Runs, RunFolder]]:
    """Yield the run in this folder, and the runs that it belongs to; end their connection."""
    whole = path.absolute()
    for place in (whole.parent.parent.parent, whole.parent.parent):  # a deployment, a statistician's kit
        with suppress(InputError):
            runs = runs_on(place)
            break
    else:
        raise InputError(
            f"{path}: not a run's folder; expected DEPLOYMENT/server/runs/NAME or KIT/runs/NAME, as "
            "`fedtmle run --on` prints it when it starts"
        )
    with closing(runs):
        yield runs, runs.named(whole.name)


# The runs of a server on another machine, over its one port, with a statistician's kit.
#
# The kit keeps a copy of each run in ``runs/``, in the form of the server's own folder, so that `fedtmle
# watch` and `fedtmle show` read it as they would there. The server's certificate is checked against the kit's
# authority, the statistician's against the server's.

CONNECT_WITHIN = 20.0  # seconds
REPLY_WITHIN = 20.0  # seconds


class RemoteRuns(Runs):
    """The runs of the server that a statistician's kit names."""

    interval = 1.0

    def __init__(self, kit: Kit) -> None:
        self.folder = kit.path / "runs"
        self._kit = kit
        self._cell: Any = None
        self._trouble = ""

    def require(self) -> None:
        """Raise `ProtocolError` unless the server can be reached and knows this kit."""
        self._connect()

    def new(self, study: StudyFile, *, deadline: float, patience: float) -> RunFolder:
        """Post a study to the server; return the kit's copy of its run."""
        plan = file_plan(study).digest.hex()
        news = self._ask_news(
            Submit(
                name=study.path.stem,
                text=study.path.read_bytes(),
                plan=plan,
                version=version("fedtmle"),
                deadline=deadline,
                patience=patience,
            )
        )
        run = RunFolder(self.folder / news.run)
        run.path.mkdir(parents=True)
        (run.path / "study.toml").write_bytes(study.path.read_bytes())
        run.write(news.status)
        named = sites(study.silos)
        terms = Terms(plan=plan, sites=named, deadline=deadline, patience=patience, owner=self._kit.site)
        write_document(run.path / "terms.json", asdict(terms))
        return run

    def named(self, name: str) -> RunFolder:
        """Return the kit's copy of a run; one that was posted from elsewhere is copied now."""
        news = self._ask_news(LookAt(run=name))
        run = RunFolder(self.folder / news.run)
        run.path.mkdir(parents=True, exist_ok=True)
        run.write(news.status)
        return run

    def look(self, run: RunFolder) -> RunStatus:
        """Bring the kit's copy up to date, and return the status; the last known one without a server."""
        try:
            news = self._ask_news(LookAt(run=run.name))
            self._copy(run, "events", run.events)
            if news.status.state is RunState.DONE and not run.result.exists():
                self._copy(run, "result", run.result)
        except ProtocolError as error:
            self._trouble = str(error)
            return run.status()
        self._trouble = ""
        run.write(news.status)
        return news.status

    def trouble(self) -> str:
        """Return why the last look failed, an empty string if it did not."""
        return self._trouble

    def resume(self, run: RunFolder) -> None:
        """Let a run that stopped go on."""
        run.write(self._ask_news(Resume(run=run.name)).status)

    def cancel(self, run: RunFolder) -> None:
        """Cancel a run at the server."""
        run.write(self._ask_news(Cancel(run=run.name)).status)

    def close(self) -> None:
        """End the connection."""
        if self._cell is not None:
            with _quiet():
                self._cell.stop()
            self._cell = None

    def _copy(self, run: RunFolder, file: str, target: Path) -> None:
        """Append to the kit's copy of a file what the server has added to it."""
        whole = file == "result"  # a result appears in one step, or not at all
        path = target.with_suffix(".part") if whole else target
        offset = path.stat().st_size if path.exists() else 0
        while True:
            reply = self._ask(Fetch(run=run.name, file="result" if whole else "events", offset=offset))
            if not isinstance(reply, Piece):
                raise ProtocolError("the server sent a reply of another kind")
            if reply.data:
                with path.open("ab") as out:
                    out.write(reply.data)
                offset += len(reply.data)
            if offset >= reply.size or not reply.data:
                break
        if whole:
            path.replace(target)

    def _ask_news(self, request: OfficeRequest) -> RunNews:
        reply = self._ask(request)
        if not isinstance(reply, RunNews) or not is_run_name(reply.run):
            raise ProtocolError("the server sent a reply of another kind")
        return reply

    def _ask(self, request: OfficeRequest) -> OfficeReply:
        """Return the reply; raise `InputError` if the server denies it, `ProtocolError` if it is silent."""
        from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
        from nvflare.fuel.f3.cellnet.fqcn import FQCN
        from nvflare.fuel.f3.message import Message

        from fedtmle.engine.flare_post import CHANNEL, OFFICE

        self._connect()
        got = self._cell.send_request(
            channel=CHANNEL,
            topic=OFFICE,
            target=FQCN.ROOT_SERVER,
            request=Message(payload=write_message(request)),
            timeout=REPLY_WITHIN,
            optional=True,
        )
        code = None if got is None else got.get_header(MessageHeaderKey.RETURN_CODE)
        if code == ReturnCode.UNAUTHENTICATED:
            raise InputError(f"{self._kit.path}: the coordinator has removed this kit from the deployment")
        if code != ReturnCode.OK:
            raise ProtocolError(self._unreachable())
        reply = read_reply(got.payload)
        if isinstance(reply, Denied):
            raise InputError(reply.message)
        return reply

    def _connect(self) -> None:
        if self._cell is None:
            with _quiet():
                self._cell = _cell(self._kit)
            if self._cell is None:
                raise ProtocolError(self._unreachable())

    def _unreachable(self) -> str:
        where = f"{self._kit.host}:{self._kit.port}"
        return f"the server at {where} cannot be reached; `fedtmle deploy doctor {self._kit.path}` says why"


def _cell(kit: Kit) -> Any:
    """Return a connection to the server on which each side has proved its name, None if there is none."""
    from nvflare.apis.fl_constant import ReservedKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.signal import Signal
    from nvflare.apis.utils.decomposers import flare_decomposers
    from nvflare.fuel.f3.cellnet.cell import Cell
    from nvflare.fuel.f3.cellnet.fqcn import FQCN
    from nvflare.fuel.f3.drivers.driver_params import DriverParams
    from nvflare.fuel.sec.authn import set_add_auth_headers_filters
    from nvflare.fuel.utils.admin_name_utils import new_admin_client_name
    from nvflare.private.defs import ClientType
    from nvflare.private.fed.authenticator import Authenticator, validate_auth_headers

    files = {"root_cert_file": kit.authority, "private_key_file": kit.key, "cert_file": kit.certificate}
    flare_decomposers.register()
    cell = Cell(
        fqcn=new_admin_client_name(),
        root_url=f"grpc://{kit.host}:{kit.port}",
        secure=True,
        credentials={
            DriverParams.CA_CERT.value: str(kit.authority),
            DriverParams.CLIENT_CERT.value: str(kit.certificate),
            DriverParams.CLIENT_KEY.value: str(kit.key),
        },
        create_internal_listener=False,
        parent_url=None,
        auth_identity_map={FQCN.ROOT_SERVER: "server"},
    )
    cell.start()
    context = FLContext()
    context.set_public_props({ReservedKey.IDENTITY_NAME: kit.site})
    try:
        token, signature, session, verifier = Authenticator(
            cell=cell,
            project_name=kit.project,
            client_name=kit.site,
            client_type=ClientType.ADMIN,
            expected_sp_identity="server",
            secure_mode=True,
            msg_timeout=5.0,
            retry_interval=1.0,
            timeout=CONNECT_WITHIN,
            **{name: str(path) for name, path in files.items()},
        ).authenticate(shared_fl_ctx=context, abort_signal=Signal())
    except Exception:
        logging.getLogger("fedtmle.remote").debug("no connection", exc_info=True)
        cell.stop()
        return None
    set_add_auth_headers_filters(cell, kit.site, token, signature, session)
    cell.core_cell.add_incoming_filter(
        channel="*",
        topic="*",
        cb=validate_auth_headers,
        token_verifier=verifier,
        logger=logging.getLogger("nvflare"),
        local_cell_fqcn=cell.get_fqcn(),
    )
    return cell


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the engine's own words off the terminal: failures are reported by us."""
    logger = logging.getLogger("nvflare")
    if not logger.handlers:
        logger.addHandler(logging.NullHandler())
    logger.propagate = False
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        yield

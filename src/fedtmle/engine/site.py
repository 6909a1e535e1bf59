"""A silo in a deployment: open an endpoint for the study that a job brought, if its owner has approved it."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import psutil

from fedtmle.engine import frames
from fedtmle.engine.frames import Answer, Declined, Ready, Reply, Waiting, unsealed
from fedtmle.engine.post import LONGEST_STUDY, studies_folder
from fedtmle.engine.process import Process
from fedtmle.engine.runs import sites
from fedtmle.errors import ChangedDataError, DecodeError, FedTMLEError, InputError, JournalError
from fedtmle.protocol.plan import Plan
from fedtmle.runtime.ledger import Entry
from fedtmle.runtime.rows import LocalOutcome
from fedtmle.runtime.silo import Silo
from fedtmle.studies.home import Home, open_party
from fedtmle.studyfile.file import StudyFile, file_plan, read_study
from fedtmle_core import kernels
from fedtmle_core.journal import read_document, write_document

# A silo's endpoint in one run: frames in, frames out, and never an exception.
#
# An exception that an engine catches may travel to the server with its text. Here each becomes a reason
# without data, and the details go to the silo's own log.

_log = logging.getLogger("fedtmle.silo")

BUSY_AFTER = 5.0  # seconds that a repeated request waits for the answer to the first

Permission = Callable[[], Declined | Waiting | None]  # None: the owner has approved the plan


class Endpoint:
    """Wait for the owner's approval, read the data once, then answer requests.

    ``permission`` is called until it returns None; from then on the silo checks its owner's approvals itself.
    ``open_silo`` reads the data and opens the journal, in a thread of its own: no engine waits for it.
    ``keep`` is called with the silo's own outcome of a personalised run; ``close`` at the end. ``unseal``
    returns the frame that the server signed, or raises `DecodeError`; such a frame changes nothing, and is
    logged once. ``release``: whether the silo's own estimate may be shown.
    """

    def __init__(
        self,
        permission: Permission,
        open_silo: Callable[[], Silo],
        *,
        keep: Callable[[LocalOutcome], None] = lambda _: None,
        close: Callable[[], None] = lambda: None,
        unseal: Callable[[bytes], object] = lambda frame: frame,
        release: bool = False,
    ) -> None:
        self._ready = Ready(release=release)
        self._permission, self._open, self._keep = permission, open_silo, keep
        self._lock = threading.Lock()  # an engine may repeat a call while the first is being answered
        self._loading: threading.Thread | None = None
        self._silo: Silo | None = None
        self._declined: Declined | None = None
        self._is_closed = False
        self._kept = False
        self._close, self._unseal = close, unseal
        self._is_warned = False  # whether a request from another sender was logged

    def close(self) -> None:
        """Close the journal; nothing is answered from then on.

        The engine may end a job, because another silo's process was lost, while a request is on its way. The
        run goes on in another job, so the silo does not decline.
        """
        if self._loading is not None:
            self._loading.join()
        with self._lock:
            self._silo, self._is_closed = None, True
            self._close()

    def step(self, frame: bytes) -> bytes:
        """Return the answer to one frame."""
        try:
            return frames.answer(self._answer(frame))
        except Exception:
            _log.exception("unexpected fault")
            return frames.answer(Declined.FAULT)

    def _answer(self, frame: bytes) -> Answer:
        try:
            opened = self._unseal(frame)
        except DecodeError as error:
            if not self._is_warned:
                _log.warning("%s; this and all such frames are declined", error)
            self._is_warned = True
            return Declined.UNSIGNED
        try:
            request = frames.read_request(opened)
        except DecodeError:
            return Declined.FAULT
        if not self._lock.acquire(timeout=BUSY_AFTER):
            return Waiting.ANSWER  # the server asks again, and then gets the finished answer
        try:
            state = self._state()
            if request is None or self._silo is None:
                return state
            return Reply(self._reply(self._silo, request))
        finally:
            self._lock.release()

    def _reply(self, silo: Silo, request: bytes) -> bytes:
        reply = silo.step(request)
        if silo.error is not None:
            _log.error("this silo could not answer: %s", silo.error)
        if silo.local is not None and not self._kept:
            self._kept = True
            self._keep(silo.local)
        return reply

    def _state(self) -> Ready | Waiting | Declined:
        if self._silo is not None:
            return self._ready
        if self._is_closed:
            return Waiting.END
        state = self._declined or self._permission()
        if state is not None:
            return state
        if self._loading is None:
            self._loading = threading.Thread(target=self._load, name="fedtmle-data", daemon=True)
            self._loading.start()
        self._loading.join(timeout=0.2)  # small data are read at once
        return self._declined or (Waiting.DATA if self._silo is None else self._ready)

    def _load(self) -> None:
        try:
            self._silo = self._open()
        except InputError as error:
            _log.error("%s", error)
            is_change = isinstance(error, ChangedDataError)
            self._declined = Declined.CHANGED if is_change else Declined.DATA
        except (FedTMLEError, OSError):
            _log.exception("the journal or the ledger cannot be used")
            self._declined = Declined.JOURNAL
        except Exception:
            _log.exception("unexpected fault")
            self._declined = Declined.FAULT


LOCK_WAIT = 60.0  # seconds for an earlier process of this silo to end
LOCK_GRACE = 5.0  # seconds after which it is ended


class _DeclinesError(Exception):
    def __init__(self, reason: Declined) -> None:
        self.reason = reason


def open_endpoint(
    kit: Path, site: str, text: bytes, announced: bytes, *, opened: Callable[[], None] = lambda: None
) -> Endpoint:
    """Return a silo's endpoint for the study that a job brought.

    ``kit`` is our folder of the silo's kit, ``site`` the silo's name on the network, ``text`` the study and
    ``announced`` the digest of its plan. ``opened`` is called when the data are read, before the first round.
    """
    try:
        return _open(kit, site, text, announced, opened)
    except _DeclinesError as declines:
        reason = declines.reason
    except Exception:
        # The engine would send the text of an exception to the server.
        _log.exception("unexpected fault")
        reason = Declined.FAULT
    return Endpoint(lambda: reason, _no_silo)


def _open(kit: Path, site: str, text: bytes, announced: bytes, opened: Callable[[], None]) -> Endpoint:
    home = _home(kit)
    study, plan = _study(home, text)
    if plan.digest != announced:
        raise _DeclinesError(Declined.PLAN)
    name = {site_name: silo for silo, site_name in sites(study.silos).items()}.get(site)
    if name is None or home.file.name != name:
        raise _DeclinesError(Declined.ROSTER)
    if not plan.server and not home.file.policy.allow_unsigned:
        raise _DeclinesError(Declined.NO_SERVER_KEY)

    held = ExitStack()

    def open_silo() -> Silo:
        kernels.load()  # while no round waits for them
        held.callback(os.close, _lock(home.journal_path(plan).with_suffix(".lock")))
        approved = home.as_approved(plan)
        keeper = approved.keeper(plan)
        held.callback(keeper.close)
        # Nobody could check a signature for which the plan has no key.
        signs = any(member.name == name and member.key for member in plan.roster)
        keeper = replace(keeper, approves=_watched(home), key=keeper.key if signs else None)
        decision = home.approvals.current().get(plan.digest.hex())
        expected = "" if decision is None else decision.data
        try:
            silo = open_party(plan, name, approved.file, keeper=keeper, expected=expected, home=approved)
        except ChangedDataError:
            if keeper.ledger is not None:
                keeper.ledger.add(
                    Entry(
                        time=keeper.clock().isoformat(),
                        session="",
                        request="open",
                        round=0,
                        decision="refused",
                        reason=Declined.CHANGED.value,
                        plan=plan.digest.hex(),
                    )
                )
            raise
        opened()
        return silo

    return Endpoint(
        _permission(home, plan),
        open_silo,
        keep=_keep(home, plan),
        close=held.close,
        unseal=lambda frame: unsealed(frame, plan),
        release=home.file.policy.release,
    )


def _home(kit: Path) -> Home:
    try:
        home = Home.of(read_document(kit / "silo.json")["silo_file"])
        _ = home.folder  # make it now, where a failure is reported
        return home
    except (OSError, ValueError, KeyError, TypeError, JournalError) as error:
        _log.error("%s: `fedtmle deploy doctor` says how to fix it (%s)", kit / "silo.json", error)
        raise _DeclinesError(Declined.CONFIGURATION) from None


def _study(home: Home, text: bytes) -> tuple[StudyFile, Plan]:
    """Return the study that came and its plan; save it under the plan's digest for the owner to read."""
    if len(text) > LONGEST_STUDY:
        raise _DeclinesError(Declined.STUDY)
    arrived = home.folder / "studies" / f"arrived-{os.getpid()}.toml"
    try:
        folder = studies_folder(home.folder)
        arrived.write_bytes(text)
        study = read_study(arrived, samples=False)
        plan = file_plan(study)
        stored = folder / f"{plan.digest.hex()}.toml"
        if _has_digest(stored, plan.digest):  # a study that came is never replaced
            arrived.unlink()
        else:
            arrived.replace(stored)
        return study, plan
    except InputError as error:
        _log.error("the study of a job cannot be read: %s", error)
        arrived.unlink(missing_ok=True)
        raise _DeclinesError(Declined.STUDY) from None
    except OSError:
        _log.exception("the silo's folder cannot be written")
        raise _DeclinesError(Declined.JOURNAL) from None


def _has_digest(path: Path, digest: bytes) -> bool:
    """Return whether a study is stored here, and is the one whose plan has this digest.

    The post stores a study under the digest that the server announces, and parses none.
    """
    try:
        return path.exists() and file_plan(read_study(path, samples=False)).digest == digest
    except InputError:
        return False


def _permission(home: Home, plan: Plan) -> Callable[[], Declined | Waiting | None]:
    def permission() -> Declined | Waiting | None:
        try:
            decision = home.approvals.current().get(plan.digest.hex())
            is_closed = plan.digest.hex() in home.closed
        except (FedTMLEError, OSError) as error:
            _log.error("%s", error)
            return Declined.CONFIGURATION
        if decision is None:
            return Waiting.APPROVAL
        return None if decision.approved and not is_closed else Declined.REJECTED

    return permission


def _watched(home: Home) -> Callable[[bytes], bool]:
    """Return a check of the owner's approvals that reads the file again only when it has changed."""
    known: dict[tuple[bytes, int, int, int], bool] = {}

    def approves(plan: bytes) -> bool:
        try:
            file = home.approvals.path.stat()
        except OSError:
            return False
        key = (plan, file.st_ino, file.st_size, file.st_mtime_ns)
        if key not in known:
            known.clear()
            known[key] = home.approvals.approves(plan)
        return known[key]

    return approves


def _keep(home: Home, plan: Plan) -> Callable[[LocalOutcome], None]:
    """Return a function that saves the silo's own estimate of a personalised run, for its owner alone."""

    def keep(outcome: LocalOutcome) -> None:
        path = home.journal_path(plan).with_suffix(".own.json")
        document = {
            "retired_at": outcome.retired_at,
            "n_rows": outcome.n_rows,
            "psi": outcome.estimate.psi.tolist(),
            "covariance": outcome.estimate.covariance.tolist(),
            "gap_bound": outcome.gap_bound,
        }
        write_document(path, document)
        path.chmod(0o600)

    return keep


def _lock(path: Path) -> int:
    """Lock the journal of a plan for this process; the lock ends with the handle, and so with the process.

    A silo that the server could not reach keeps its process for an earlier job of the run, and the engine may
    take minutes to end it. The server has started another job since, so the earlier one is ended here. It
    recorded its answers before it sent them: nothing is lost.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    began = time.monotonic()
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waited = time.monotonic() - began
            if waited > LOCK_WAIT:
                os.close(handle)
                raise JournalError(f"{path}: another process of this silo is running this plan") from None
            if waited > LOCK_GRACE:
                _end_holder(handle)
            time.sleep(0.2)
        else:
            with suppress(OSError):  # on a full disk the journal reports it
                os.ftruncate(handle, 0)
                os.pwrite(handle, msgspec.json.encode(Process.here()), 0)
            return handle


def _end_holder(handle: int) -> None:
    """Kill the process that is recorded in a lock, unless it is this one."""
    try:
        holder = msgspec.json.decode(os.pread(handle, 1000, 0), type=Process)
    except msgspec.MsgspecError:
        return
    process = holder.find()
    if process is not None and process.pid != os.getpid():
        _log.warning("the process for an earlier job of this run is still there; it is ended")
        with suppress(psutil.Error):
            process.kill()


def _no_silo() -> Silo:
    raise AssertionError("a silo that declines opens no data")

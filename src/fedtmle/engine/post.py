"""The post between a silo and the server, outside any job: which studies wait, and what the owner decided.

Each silo writes to the server every few seconds. Its report says which version it has, and how its owner has
decided about the studies that it holds. The reply lists the studies that are open, with the text of those
that the silo does not hold yet. So a study that waits for approval costs a file at each silo, nothing else.
"""

from __future__ import annotations

import enum
import json
import logging
import os
import re
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from fedtmle.errors import DecodeError, FedTMLEError, InputError
from fedtmle.location import Located, locate
from fedtmle.runtime.signing import Approvals
from fedtmle_core.home import Home, is_home, records_folder
from fedtmle_core.journal import Document, read_document, write_document

_log = logging.getLogger("fedtmle.silo")
POST_EVERY = 5.0  # seconds between two reports of a silo
LONGEST_STUDY = 64 << 10  # bytes of a study's text
MAX_STUDIES = 200  # open studies that a silo holds
LONGEST_LETTER = 4 << 20  # bytes
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Standing(enum.StrEnum):
    """Where a study stands at a silo."""

    READY = "ready"
    APPROVAL = "waiting for its owner's approval"
    REJECTED = "its owner rejected the plan"
    CONFIGURATION = "its silo file or approvals are missing or damaged; its own log has the details"


class SiloReport(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A silo's letter: its version, and the standing of each open study that it holds, by plan.

    ``engine`` is another text after each start of the silo's engine, which ends all its jobs.
    """

    version: str
    engine: str = ""
    standings: dict[str, Standing]


class Notice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server's reply: its clock and version, the open plans, and texts that the silo does not hold."""

    time: float
    version: str
    open: list[str]
    texts: dict[str, bytes] = {}


_Letter = TypeVar("_Letter", SiloReport, Notice)


def write_letter(letter: SiloReport | Notice) -> bytes:
    """Return a letter as bytes."""
    return msgspec.json.encode(letter)


def read_report(data: object) -> SiloReport:
    """Return the report in these bytes; raise `DecodeError` if there is none."""
    return _read(data, SiloReport)


def read_notice(data: object) -> Notice:
    """Return the notice in these bytes; raise `DecodeError` if there is none."""
    notice = _read(data, Notice)
    names = [*notice.open, *notice.texts]
    if len(notice.open) > MAX_STUDIES or not all(map(_DIGEST.fullmatch, names)):
        raise DecodeError("a notice of the server names what is no plan")
    if any(len(text) > LONGEST_STUDY for text in notice.texts.values()):
        raise DecodeError("a notice of the server brings a study that is too long")
    return notice


def _read(data: object, kind: type[_Letter]) -> _Letter:
    if not isinstance(data, bytes | bytearray | memoryview) or len(data) > LONGEST_LETTER:
        raise DecodeError("not a letter of this protocol")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise DecodeError("not a letter of this protocol") from None


class Desk:
    """A silo's end of the post; ``kit`` is our folder of the silo's kit.

    The desk parses no study: it stores the text under the digest that the server announced. The owner's own
    commands compute the digest of what they show and approve.
    """

    def __init__(self, kit: Path, *, version: str, clock: Callable[[], float] = time.time) -> None:
        self._kit = kit
        self._version = version
        self._clock = clock
        self._engine = secrets.token_hex(8)
        self._open = self._held()  # until the server sends the list of open plans
        self._since = 0.0  # since when the server has been heard without interruption
        self._heard = 0.0

    def _held(self) -> list[str]:
        """Return the plans of the latest studies that came, so that a restart loses no time."""
        try:
            paths = list(studies_folder(silo_folder(self._kit)).glob("[0-9a-f]*.toml"))
        except (OSError, ValueError, KeyError, TypeError):
            return []
        paths.sort(key=lambda path: path.stat().st_mtime)
        return [path.stem for path in paths if _DIGEST.fullmatch(path.stem)][-MAX_STUDIES:]

    def report(self) -> SiloReport:
        """Return the report to send."""
        try:
            folder = studies_folder(silo_folder(self._kit))
            held = [plan for plan in self._open if (folder / f"{plan}.toml").is_file()]
            decisions = approvals_of(self._kit).current() if held else {}
        except (OSError, ValueError, KeyError, TypeError, FedTMLEError) as error:
            _log.error("%s: `fedtmle deploy doctor` says how to fix it (%s)", self._kit, error)
            standings = dict.fromkeys(self._open, Standing.CONFIGURATION)
            return SiloReport(version=self._version, engine=self._engine, standings=standings)
        standings = {}
        for plan in held:
            decision = decisions.get(plan)
            approved = None if decision is None else decision.approved
            standings[plan] = {
                None: Standing.APPROVAL,
                True: Standing.READY,
                False: Standing.REJECTED,
            }[approved]
        return SiloReport(version=self._version, engine=self._engine, standings=standings)

    def take(self, notice: Notice) -> list[Path]:
        """Store the studies that came, note when the server was heard; return the new files."""
        now = self._clock()
        if now - self._heard > 4 * POST_EVERY:
            self._since = now
        self._heard = now
        self._open = notice.open
        self._close_unknown(notice)
        contact = {
            "heard": now,
            "since": self._since,
            "ahead": now - notice.time,  # seconds between this clock and the server's
            "version": notice.version,
            "open": notice.open,
        }
        with suppress(OSError):
            write_document(self._kit / "server.json", contact)
        new = []
        try:
            folder = studies_folder(silo_folder(self._kit))
            for plan in notice.open:
                path = folder / f"{plan}.toml"
                if plan in notice.texts and not path.exists():  # a study that came is never replaced
                    scratch = path.with_suffix(".new")
                    scratch.write_bytes(notice.texts[plan])
                    scratch.replace(path)
                    new.append(path)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.error("a study that came cannot be stored: %s", error)
        return new

    def _close_unknown(self, notice: Notice) -> None:
        """After a restoration, close the open plans that this silo may have answered and does not know of."""
        mark = self._kit / "restored.json"
        if not mark.exists():
            return
        try:
            unknown = [plan for plan in notice.open if plan not in approvals_of(self._kit).current()]
            close_plans(
                self._kit, unknown, note="open at the server when the silo was restored from a backup"
            )
            mark.unlink()
        except (OSError, ValueError, KeyError, TypeError, FedTMLEError) as error:
            _log.error("plans that were open before a restoration cannot be closed: %s", error)


def close_plans(kit: Path, plans: Iterable[str], *, note: str) -> None:
    """Reject plans for good: no later approval opens them again, because they may have been answered."""
    approvals = approvals_of(kit)
    with open(silo_folder(kit) / "closed", "a", encoding="ascii") as file:
        for plan in plans:
            file.write(f"{plan}\n")
            file.flush()
            os.fsync(file.fileno())
            approvals.decide(bytes.fromhex(plan), approved=False, note=note)


def silo_folder(kit: Path) -> Path:
    """Return the folder of a kit's silo in its home; raise `InputError` if there is no home."""
    located = located_by(kit)
    if not is_home(located.home):
        raise InputError(f"{located.home}: the home is not there; `fedtmle deploy doctor` says what to do")
    folder = records_folder(located.home, located.hospital)
    return folder if folder.is_dir() else Home.open(located.home).records(located.hospital)


def located_by(kit: Path) -> Located:
    """Return the home of the silo whose kit this is, and the silo's name."""
    return locate(Path(read_document(kit / "silo.json")["silo_file"]))


def studies_folder(folder: Path) -> Path:
    """Return the folder for the studies that came to a silo, each named by its plan's digest."""
    studies = folder / "studies"
    studies.mkdir(mode=0o700, exist_ok=True)
    return studies


def approvals_of(kit: Path) -> Approvals:
    """Return the owner's decisions at the silo whose kit this is."""
    located = located_by(kit)
    return Approvals(silo_folder(kit) / "approvals.jsonl", Home.open(located.home).key(located.hospital))


def last_contact(kit: Path) -> Document:
    """Return what a silo noted when it last heard the server, {} if it never did."""
    try:
        return read_document(kit / "server.json")
    except (OSError, json.JSONDecodeError, ValueError):
        return {}


# Tell a silo's owner that a study waits: run a command of the owner's, with JSON on its standard input.
#
# The command is run without a shell, and nothing of the study is among its arguments.

LIMIT = 30.0  # seconds for the command
TRIES = 3
PAUSE = 60.0  # seconds between two tries


def set_command(kit: Path, command: Sequence[str]) -> None:
    """Write the owner's command into the kit; an empty one turns notices off."""
    if command and not (Path(command[0]).is_absolute() and os.access(command[0], os.X_OK)):
        raise InputError(f"command: expected the whole path of a program, got '{command[0]}'")
    write_document(kit / "notice.json", {"command": list(command)})


def command_of(kit: Path) -> list[str]:
    """Return the owner's command, [] if there is none."""
    try:
        return [str(word) for word in read_document(kit / "notice.json")["command"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def notice_of(silo: str, study: Path) -> Document:
    """Return what the command reads: which silo, which plan, where its text is, and when it came."""
    return {
        "event": "study waits",
        "silo": silo,
        "plan": study.stem,
        "study": str(study),
        "time": time.time(),
    }


def tell(command: Sequence[str], notice: Document) -> str:
    """Run the command once; return what went wrong, an empty string if it ended with 0."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    try:
        done = subprocess.run(  # noqa: S603 - the owner's own command
            list(command),
            input=json.dumps(notice).encode(),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {LIMIT:g} s"
    except OSError as error:
        return f"it could not be started ({error.strerror})"
    return "" if done.returncode == 0 else f"it ended with {done.returncode}"


def tell_later(
    command: Sequence[str], notices: Sequence[Document], *, pause: float = PAUSE
) -> threading.Thread:
    """Notify the owner in a separate thread, and try again if that fails: the post must not wait."""

    def work() -> None:
        for notice in notices:
            for attempt in range(TRIES):
                trouble = tell(command, notice)
                if not trouble:
                    break
                _log.error("%s: the owner was not notified of a study: %s", command[0], trouble)
                if attempt + 1 < TRIES:
                    time.sleep(pause)

    thread = threading.Thread(target=work, name="fedtmle-notice", daemon=True)
    thread.start()
    return thread

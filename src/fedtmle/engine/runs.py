"""A run at the server: the engine's names of its silos, and its folder: study, terms, status and result."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import msgspec

from fedtmle.errors import InputError
from fedtmle.runtime.documents import write_document
from fedtmle.studyfile.file import StudyFile, read_study

_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")
_Record = TypeVar("_Record")


def site_name(silo: str) -> str:
    """Return the engine's name of a silo: lower case letters, digits, ``_`` and ``-``."""
    return re.sub(r"[^a-z0-9_-]+", "-", silo.lower()).strip("-")


def sites(silos: Iterable[str]) -> dict[str, str]:
    """Return the engine's name of each silo; raise if two would share one."""
    named: dict[str, str] = {}
    for silo in silos:
        site = site_name(silo)
        if not site:
            raise InputError(f"silos: '{silo}' has no ASCII letter or digit; choose another name")
        if site in named.values() or site in ("server", "admin"):
            raise InputError(
                f"silos: '{silo}' would be '{site}' on the network, which is taken; choose another name"
            )
        named[silo] = site
    return named


class RunState(StrEnum):
    """How far a run has come."""

    SUBMITTED = "submitted"  # the engine has not started it: not all silos are connected
    WAITING = "waiting"  # for approvals, or for silos that read their data
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"  # `fedtmle resume` can continue it


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The terms of a run, the same each time it is resumed."""

    plan: str  # the plan's digest, in hex
    sites: Mapping[str, str]  # engine's name by silo, in the plan's order
    deadline: float  # seconds that a silo may take to answer one request
    patience: float  # seconds to wait for approvals


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The last status that a run reported."""

    state: RunState
    why: str = ""
    refused: bool = False  # whether a silo refused
    silos: Mapping[str, str] = field(default_factory=dict)
    round: int = 0
    phase: str = ""
    bits: int = 0
    pid: int = 0  # of the engine's process for this run, at the server
    attempt: int = 0
    seconds: tuple[float, ...] = ()  # of each round, once the run has ended


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "journal"
        self.result = path / "result.json"
        self.transcript = path / "transcript"
        self.job = path / "job"  # the engine's name of the last attempt

    @classmethod
    def new(cls, runs: Path, study: StudyFile, terms: Terms) -> RunFolder:
        """Make a folder with the text of the study and the terms of its run."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        folder = cls(runs / f"{study.path.stem[:40]}-{stamp}-{secrets.token_hex(2)}")
        if not _NAME.fullmatch(folder.path.name):
            folder = cls(runs / f"run-{stamp}-{secrets.token_hex(2)}")
        folder.path.mkdir(parents=True)
        (folder.path / "study.toml").write_bytes(study.path.read_bytes())
        write_document(folder.path / "terms.json", asdict(terms))
        return folder

    @classmethod
    def named(cls, runs: Path, name: str) -> RunFolder:
        """Return the folder of a run that was started; ``name`` cannot point outside ``runs``."""
        folder = cls(runs / name)
        if not _NAME.fullmatch(name) or not (folder.path / "terms.json").is_file():
            raise InputError(f"there is no run '{name}' in {runs}")
        return folder

    @property
    def name(self) -> str:
        return self.path.name

    def study(self) -> StudyFile:
        """Return the study as it was when the run was made."""
        return read_study(self.path / "study.toml", samples=False)

    def terms(self) -> Terms:
        """Return the terms."""
        return _read(self.path / "terms.json", Terms)

    def status(self) -> RunStatus:
        """Return the status that was reported last."""
        return _read(self.path / "status.json", RunStatus)

    def report(self, status: RunStatus) -> None:
        """Replace the status."""
        write_document(self.path / "status.json", asdict(status))


def _read(path: Path, kind: type[_Record]) -> _Record:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        raise InputError(f"{path}: missing or damaged; this is not the folder of a run") from None

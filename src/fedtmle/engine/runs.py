"""The roster: the study's silos in their order, and the engine's name of each."""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from fedtmle.errors import InputError
from fedtmle.studyfile.file import StudyFile, read_study


def site_name(silo: str) -> str:
    """The engine's name of a silo: lower case letters, digits, ``_`` and ``-``."""
    return re.sub(r"[^a-z0-9_-]+", "-", silo.lower()).strip("-")


def sites(silos: Iterable[str]) -> dict[str, str]:
    """Engine's name by silo; raises where two would share one."""
    named: dict[str, str] = {}
    for silo in silos:
        site = site_name(silo)
        if not site:
            raise InputError(f"silos: '{silo}' has no letter or digit; choose another name")
        if site in named.values() or site in ("server", "admin"):
            raise InputError(
                f"silos: '{silo}' is '{site}' on the network, which is taken; choose another name"
            )
        named[silo] = site
    return named


# A run's folder at the server: what was asked, how far it is, and how it ended.


_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")


class State(StrEnum):
    """Where a run is."""

    SUBMITTED = "submitted"  # the engine has not started it: not all silos are connected
    WAITING = "waiting"  # for approvals, or for silos that read their data
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"  # `fedtmle resume` may take it up again


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the run was started with; the same at every resume."""

    plan: str  # the plan's digest, in hex
    sites: Mapping[str, str]  # engine's name by silo, in the plan's order
    deadline: float  # seconds that a silo may take to answer one request
    patience: float  # seconds to wait for approvals


@dataclass(frozen=True, kw_only=True)
class Status:
    """What the run said last."""

    state: State
    why: str = ""
    refused: bool = False  # whether a silo said no
    silos: Mapping[str, str] = field(default_factory=dict)
    round: int = 0
    phase: str = ""
    bits: int = 0
    pid: int = 0  # of the engine's process for this run, at the server
    attempt: int = 0
    seconds: tuple[float, ...] = ()  # of each round, once the run has ended


class RunFolder:
    """Reads and writes the files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal = path / "journal"
        self.result = path / "result.json"
        self.transcript = path / "transcript"
        self.job = path / "job"  # the engine's name of the last attempt

    @classmethod
    def new(cls, runs: Path, study: StudyFile, terms: Terms) -> RunFolder:
        """A fresh folder with the study as it was written."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        folder = cls(runs / f"{study.path.stem[:40]}-{stamp}-{secrets.token_hex(2)}")
        if not _NAME.fullmatch(folder.path.name):
            folder = cls(runs / f"run-{stamp}-{secrets.token_hex(2)}")
        folder.path.mkdir(parents=True)
        (folder.path / "study.toml").write_bytes(study.path.read_bytes())
        _write(folder.path / "terms.json", asdict(terms))
        return folder

    @classmethod
    def named(cls, runs: Path, name: str) -> RunFolder:
        """The folder of a run that was started; ``name`` cannot lead elsewhere."""
        folder = cls(runs / name)
        if not _NAME.fullmatch(name) or not (folder.path / "terms.json").is_file():
            raise InputError(f"there is no run '{name}' in {runs}")
        return folder

    @property
    def name(self) -> str:
        return self.path.name

    def study(self) -> StudyFile:
        return read_study(self.path / "study.toml", samples=False)

    def terms(self) -> Terms:
        return Terms(**_read(self.path / "terms.json"))

    def status(self) -> Status:
        document = _read(self.path / "status.json")
        return Status(
            **{**document, "state": State(document["state"]), "seconds": tuple(document["seconds"])}
        )

    def report(self, status: Status) -> None:
        """Replaces the status; a reader sees the old one or the new one, whole."""
        _write(self.path / "status.json", asdict(status))


def _write(path: Path, document: Mapping[str, Any]) -> None:
    scratch = path.with_suffix(f".{os.getpid()}.new")
    scratch.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    scratch.replace(path)


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise InputError(f"{path}: cannot be read") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: not a record of a run")
    return document

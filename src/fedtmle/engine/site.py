"""A silo in a deployment: the study that a job brought, beside what its owner keeps and has approved."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from fedtmle.engine.endpoint import Endpoint
from fedtmle.engine.frames import Declined, Hello, Waiting
from fedtmle.engine.runs import sites
from fedtmle.errors import FedTMLEError, InputError, JournalError
from fedtmle.model import kernels
from fedtmle.protocol.plan import Plan
from fedtmle.runtime.rows import LocalOutcome
from fedtmle.runtime.silo import Silo
from fedtmle.studies.home import Home, open_party
from fedtmle.studyfile.file import StudyFile, file_plan, read_study

_log = logging.getLogger("fedtmle.silo")
LONGEST_STUDY = 1 << 20  # bytes
LOCK_WAIT = 60.0  # seconds for an earlier process of this silo to end


class _DeclinesError(Exception):
    def __init__(self, reason: Declined) -> None:
        self.reason = reason


def open_endpoint(kit: Path, site: str, text: bytes, announced: bytes) -> Endpoint:
    """The endpoint of the silo whose kit's own folder is ``kit``, for the study that a job brought."""
    try:
        return _open(kit, site, text, announced)
    except _DeclinesError as declines:
        reason = declines.reason
        return Endpoint(lambda: reason, _no_silo)


def _open(kit: Path, site: str, text: bytes, announced: bytes) -> Endpoint:
    home = _home(kit)
    study, plan = _study(home, text)
    if plan.digest != announced:
        raise _DeclinesError(Declined.PLAN)
    name = {theirs: silo for silo, theirs in sites(study.silos).items()}.get(site)
    if name is None or home.file.name != name:
        raise _DeclinesError(Declined.ROSTER)

    held = ExitStack()

    def open_silo() -> Silo:
        kernels.exp(0.0)  # loads what is compiled, while no round waits for it
        held.callback(os.close, _lock(home.journal_path(plan).with_suffix(".lock")))
        keeper = home.keeper(plan)
        held.callback(keeper.close)
        # A signature that the plan has no key for could not be checked by anyone.
        signs = any(member.name == name and member.key for member in plan.roster)
        keeper = replace(keeper, approves=_watched(home), key=keeper.key if signs else None)
        return open_party(plan, name, home.file, keeper=keeper)

    def heard(hello: Hello) -> None:
        with suppress(OSError):
            (kit / "clock.json").write_text(json.dumps({"ahead": time.time() - hello.time}) + "\n")

    return Endpoint(
        _permission(home, plan),
        open_silo,
        heard=heard,
        keep=_keep(home, plan),
        close=held.close,
        release=home.file.policy.release,
    )


def _home(kit: Path) -> Home:
    try:
        document = json.loads((kit / "silo.json").read_text(encoding="utf-8"))
        home = Home.of(document["silo_file"])
        _ = home.folder
        return home
    except (OSError, ValueError, KeyError, TypeError) as error:
        _log.error("%s: `fedtmle deploy doctor` tells what to mend (%s)", kit / "silo.json", error)
        raise _DeclinesError(Declined.CONFIGURATION) from None


def _study(home: Home, text: bytes) -> tuple[StudyFile, Plan]:
    """The study as it came, kept under its plan's digest for the owner to read."""
    if len(text) > LONGEST_STUDY:
        raise _DeclinesError(Declined.STUDY)
    folder = studies_folder(home)
    came = folder / f"coming-{os.getpid()}.toml"
    try:
        came.write_bytes(text)
        study = read_study(came, samples=False)
        plan = file_plan(study)
        came.replace(folder / f"{plan.digest.hex()[:16]}.toml")
        return study, plan
    except InputError as error:
        _log.error("a study came that cannot be read: %s", error)
        came.unlink(missing_ok=True)
        raise _DeclinesError(Declined.STUDY) from None
    except OSError:
        _log.exception("the silo's folder cannot be written")
        raise _DeclinesError(Declined.JOURNAL) from None


def studies_folder(home: Home) -> Path:
    """Where studies that came are kept."""
    folder = home.folder / "studies"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _permission(home: Home, plan: Plan) -> Callable[[], Declined | Waiting | None]:
    def permission() -> Declined | Waiting | None:
        try:
            decision = home.approvals.current().get(plan.digest.hex())
        except (FedTMLEError, OSError) as error:
            _log.error("%s", error)
            return Declined.CONFIGURATION
        if decision is None:
            return Waiting.APPROVAL
        return None if decision.approved else Declined.REJECTED

    return permission


def _watched(home: Home) -> Callable[[bytes], bool]:
    """The owner's approvals, read again when the file changes: checking signatures takes time."""
    seen: dict[tuple[bytes, int, int, int], bool] = {}

    def approves(plan: bytes) -> bool:
        try:
            file = home.approvals.path.stat()
        except OSError:
            return False
        key = (plan, file.st_ino, file.st_size, file.st_mtime_ns)
        if key not in seen:
            seen.clear()
            seen[key] = home.approvals.approves(plan)
        return seen[key]

    return approves


def _keep(home: Home, plan: Plan) -> Callable[[LocalOutcome], None]:
    """A personalised run's own estimate stays here."""

    def keep(own: LocalOutcome) -> None:
        path = home.journal_path(plan).with_suffix(".own.json")
        document = {
            "retired_at": own.retired_at,
            "n_rows": own.n_rows,
            "psi": own.estimate.psi.tolist(),
            "covariance": own.estimate.covariance.tolist(),
            "gap_bound": own.gap_bound,
        }
        path.write_text(json.dumps(document) + "\n", encoding="utf-8")
        path.chmod(0o600)

    return keep


def _lock(path: Path) -> int:
    """One process per plan writes its journal; the lock goes with the handle, and so with the process."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    until = time.monotonic() + LOCK_WAIT
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(handle)
                raise JournalError(f"{path}: another process of this silo works on this plan") from None
            time.sleep(0.2)


def _no_silo() -> Silo:
    raise AssertionError("a silo that declines opens no data")

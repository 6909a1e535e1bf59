"""The studies that came to a silo: which plan each is, what its owner decided, and whether it has run.

A study is known by the digest under which it came. An upgrade of fedtmle gives the same text another digest;
the studies that came before keep theirs, and their decisions.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedtmle.data.silofile import CsvFile
from fedtmle.engine.post import studies_folder
from fedtmle.errors import FedTMLEError
from fedtmle.layout import wrapped
from fedtmle.runtime.approvals import Decision
from fedtmle.studies.home import Home, data_digest
from fedtmle.studyfile.file import file_plan, read_study

LARGEST_COMPARED = 20_000_000  # bytes of a file that is read to see whether it changed


@dataclass(frozen=True, kw_only=True)
class ReceivedStudy:
    """One study that came, and its owner's decision; ``begun``: whether the silo has answered any of it."""

    plan: str
    path: Path
    decision: Decision | None
    begun: bool


def came_to(home: Home) -> list[ReceivedStudy]:
    """Return the studies that came to a silo, the latest last."""
    decisions = home.approvals.current()
    paths = studies_folder(home.folder).glob("[0-9a-f]*.toml")
    return [
        ReceivedStudy(
            plan=path.stem,
            path=path,
            decision=decisions.get(path.stem),
            begun=(home.folder / f"{path.stem}.journal").exists(),
        )
        for path in sorted(paths, key=lambda path: (path.stat().st_mtime, path.name))
    ]


def words(study: ReceivedStudy, home: Home, open_plans: Sequence[str] | None) -> str:
    """Return where a study stands, its title, and what its owner can do, on several lines.

    ``open_plans`` are the plans that the server lists.
    """
    arguments = f"{shlex.quote(str(study.path))} --silo {shlex.quote(str(home.file.path))}"
    preview, approve = f"    fedtmle silo preview {arguments}", f"    fedtmle silo approve {arguments}"
    named = wrapped(described(study), first="    Study: ", indent=" " * 8)
    is_closed = open_plans is not None and study.plan not in open_plans
    if study.decision is not None:
        decided = f"{'approved' if study.decision.approved else 'rejected'} {study.decision.time}"
        if is_closed and study.decision.approved and not study.begun:
            return "\n".join([f"{decided}, then closed by the coordinator; nothing was asked", *named])
        if not _has_other_data(study, study.decision, home):
            return "\n".join([decided, *named])
        return "\n".join([f"{decided}, but the data changed since: approve it again", *named, approve])
    if is_closed:
        return "\n".join(["closed by the coordinator; nothing was decided", *named])
    return "\n".join(["waits for you:", *named, preview, approve])


def described(study: ReceivedStudy) -> str:
    """Return the title of a study that came, or its question."""
    try:
        content = read_study(study.path, samples=False).study
    except FedTMLEError:
        return "(a study of another version of fedtmle)"
    return content.title or content.target.question


def _has_other_data(study: ReceivedStudy, decision: Decision, home: Home) -> bool:
    """Return whether an approval without an answer yet is for other rows; large sources are not read."""
    data = home.file.data
    path = data.path if isinstance(data, CsvFile) else data
    if not decision.approved or not decision.data or not isinstance(path, Path):
        return False
    try:
        if path.stat().st_size > LARGEST_COMPARED or study.plan in home.earlier():
            return False
        plan = file_plan(read_study(study.path, samples=False))
        return plan.digest.hex() == study.plan and data_digest(plan, home.file).hex() != decision.data
    except (FedTMLEError, OSError):
        return False

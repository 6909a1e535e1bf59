"""What a core asks its hospital: may this plan be opened, with these hospitals, and who is charged.

The owner's decisions come from outside; whose rows were asked about, which plans ran and what was refused is
in the home. A plan is *admitted* when its roster is settled, before its first answer: from then on it
goes on with the same people, the same run and the same hospitals, or not at all.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import msgspec

from fedtmle_core.around import Office, utc_now
from fedtmle_core.errors import JournalError
from fedtmle_core.home import Home, OpenHome, Standing
from fedtmle_core.journal import FileJournal
from fedtmle_core.memory import Study
from fedtmle_core.people import Census, Refusal
from fedtmle_core.plan import Plan

NOT_APPROVED = "its owner has not approved this plan"
MORE_ROWS = "another study was answered since these rows were read; read them again"


class Run(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The one run of a plan, and the digest of its roster."""

    plan: bytes
    run: bytes
    roster: bytes


@final
@dataclass(frozen=True, kw_only=True)
class HomeOffice(Office):
    """The office of one hospital of a home.

    ``census`` is of the rows that the core reads, which its loader has cut back to the snapshot that the
    memory asks for. ``approves`` says whether the owner's approval of a plan is in force.
    """

    home: Home
    hospital: str
    census: Census
    approves: Callable[[Plan], bool]
    clock: Callable[[], datetime.datetime] = utc_now

    def refuses(self, plan: Plan) -> str:
        """Return why the plan may not be opened, empty if it may; the reason is for the owner alone.

        A refusal that depends on whose rows these are is charged to the plan's author.
        """
        if not self.approves(plan):
            return NOT_APPROVED
        with self.home.held() as opened:
            return self._refuses(opened, plan)

    def has_withdrawn(self, plan: Plan) -> bool:
        """Return whether the owner has withdrawn the approval since."""
        return not self.approves(plan)

    def settles(self, plan: Plan, run: bytes, roster: bytes) -> bool:
        """Remember the run and the people of a plan; return False if it had others, or may not follow others.

        The plan is judged again: of two that opened at once, the second may differ from the first by few.
        """
        with self.home.held() as opened:
            journal = FileJournal(self.home.records(self.hospital) / "runs.journal")
            try:
                runs = [_decoded(record) for record in journal.records]
                wanted = Run(plan.digest, run, roster)
                known = next((each for each in runs if each.plan == plan.digest), None)
                if known not in (None, wanted) or self._refuses(opened, plan):
                    return False
                # The people first: after a crash between the two, the plan is judged by the same people.
                study = Study(
                    plan=plan.digest.hex(),
                    hospital=self.hospital,
                    author=plan.author,
                    time=self.clock().isoformat(timespec="seconds"),
                )
                opened.memory.remember(study, self.census)
                if known is None:
                    journal.append(msgspec.msgpack.encode(wanted))
                return True
            finally:
                journal.close()

    def charge(self, plan: Plan) -> None:
        """Charge a refusal that depends on records to the plan's author; a plan is charged once."""
        with self.home.held() as opened:
            self._charge(opened, plan)

    def _refuses(self, opened: OpenHome, plan: Plan) -> str:
        """Return why the people forbid this plan; one that was admitted has been judged already.

        Noise that a plan promises is no reason to judge it less: its questions carry the noise, not the plan.
        """
        digest = plan.digest.hex()
        if opened.memory.find(digest, self.hospital) is None:
            standing = opened.charges.standing(plan.author, digest, self.clock())
            if standing is not Standing.OPEN:
                return str(standing.value)
        verdict = opened.memory.judge(digest, self.hospital, self.census, least=plan.floor)
        if isinstance(verdict, Refusal):
            self._charge(opened, plan)
            return verdict.conflict.value
        return MORE_ROWS if verdict.left_out else ""

    def _charge(self, opened: OpenHome, plan: Plan) -> None:
        author, digest, now = plan.author, plan.digest.hex(), self.clock()
        if opened.charges.standing(author, digest, now) is not Standing.REFUSED:
            opened.charges.add(author, digest, now)


def _decoded(record: bytes) -> Run:
    try:
        return msgspec.msgpack.decode(record, type=Run)
    except (msgspec.MsgspecError, RecursionError):
        raise JournalError("the runs of this hospital cannot be read; restore its home") from None

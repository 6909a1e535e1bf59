"""Approvals: which plans a silo's owner has said yes to, signed with the silo's key.

A file of JSON lines; the last line about a plan holds. Any change of a plan, the package's version
included, is another plan with another digest, to which nobody has said yes yet.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from fedtmle.errors import JournalError
from fedtmle.runtime.signing import SigningKey, is_signed


class Decision(msgspec.Struct, frozen=True, kw_only=True):
    """One line: what the owner decided of a plan, and when."""

    plan: str
    approved: bool
    time: str
    note: str = ""
    signature: str = ""

    @property
    def signed(self) -> bytes:
        """What the signature is of."""
        return msgspec.msgpack.encode(("fedtmle approval", self.plan, self.approved, self.time, self.note))


@dataclass(frozen=True)
class Approvals:
    """The decisions in one file, checked against the silo's key."""

    path: Path
    key: SigningKey

    def decisions(self) -> list[Decision]:
        """Every decision, oldest first; a line that the silo's key did not sign is refused."""
        if not self.path.exists():
            return []
        found = []
        for number, line in enumerate(self.path.read_bytes().splitlines(), start=1):
            try:
                decision = msgspec.json.decode(line, type=Decision)
                signature = bytes.fromhex(decision.signature)
            except (msgspec.MsgspecError, ValueError):
                raise JournalError(f"{self.path}, line {number}: this is not a decision") from None
            if not is_signed(decision.signed, signature, self.key.public):
                raise JournalError(f"{self.path}, line {number}: the silo's key did not sign this")
            found.append(decision)
        return found

    def current(self) -> dict[str, Decision]:
        """The decision in force for each plan."""
        return {decision.plan: decision for decision in self.decisions()}

    def approves(self, plan: bytes) -> bool:
        """Whether the owner approved the plan and still does; a file that was tampered with says no."""
        try:
            decision = self.current().get(plan.hex())
        except JournalError:
            return False
        return decision is not None and decision.approved

    def decide(self, plan: bytes, *, approved: bool, note: str = "") -> Decision:
        """Write a decision."""
        self.decisions()  # never add to a file that was tampered with
        time = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        bare = Decision(plan=plan.hex(), approved=approved, time=time, note=note)
        decision = msgspec.structs.replace(bare, signature=self.key.sign(bare.signed).hex())
        with open(self.path, "ab", buffering=0) as file:
            file.write(msgspec.json.encode(decision) + b"\n")
            os.fsync(file.fileno())
        os.chmod(self.path, 0o600)
        return decision

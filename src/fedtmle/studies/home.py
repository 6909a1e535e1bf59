"""A silo's home: its silo file, and beside it the folder with its key, approvals, ledger and journals."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fedtmle.data.silofile import SiloFile, read_silo_file
from fedtmle.protocol.plan import Plan
from fedtmle.runtime.approvals import Approvals
from fedtmle.runtime.journal import FileJournal
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.ledger import Ledger
from fedtmle.runtime.signing import SigningKey
from fedtmle.studies.floors import floor_of
from fedtmle.studies.plan import study_of


@dataclass(frozen=True)
class Home:
    """Everything that one silo keeps; nothing of it leaves the silo but the public key."""

    file: SiloFile

    @classmethod
    def of(cls, silo_file: str | Path) -> Home:
        """The home of the silo whose file this is."""
        return cls(read_silo_file(silo_file))

    @cached_property
    def folder(self) -> Path:
        """`silo.fedtmle/` beside `silo.toml`; made when first needed, readable by its owner only."""
        folder = self.file.path.with_suffix(".fedtmle")
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    @cached_property
    def key(self) -> SigningKey:
        return SigningKey.at(self.folder / "key")

    @cached_property
    def approvals(self) -> Approvals:
        return Approvals(self.folder / "approvals.jsonl", self.key)

    @property
    def ledger_path(self) -> Path:
        return self.folder / "ledger.jsonl"

    def journal_path(self, plan: Plan) -> Path:
        """One journal per plan: a plan runs once."""
        return self.folder / f"{plan.digest.hex()[:16]}.journal"

    def keeper(self, plan: Plan) -> Keeper:
        """What guards this silo in a deployed run of ``plan``."""
        return Keeper(
            policy=self.file.policy,
            floor=floor_of(study_of(plan), self.file),
            approves=self.approvals.approves,
            key=self.key,
            journal=FileJournal(self.journal_path(plan)),
            ledger=Ledger(self.ledger_path),
        )

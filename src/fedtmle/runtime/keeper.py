"""What stands behind a silo: its owner's policy, floor, approval, key, journal and ledger."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, field

from fedtmle.privacy.limit import DisclosureLimit
from fedtmle.protocol.messages import Answered
from fedtmle.protocol.policy import Policy
from fedtmle.protocol.query import Query
from fedtmle.runtime.journal import Journal
from fedtmle.runtime.ledger import Ledger, now
from fedtmle.runtime.signing import SigningKey


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """Everything optional: without any of it, rows are as unguarded as arrays in one's own session.

    ``approves`` says whether the owner has approved the plan of this digest, and still does;
    ``floor`` is what must stay unknown of named attributes;
    ``witness`` sees every query beside the answer that leaves.
    """

    policy: Policy = field(default_factory=Policy.unguarded)
    floor: DisclosureLimit | None = None
    approves: Callable[[bytes], bool] | None = None
    key: SigningKey | None = None
    journal: Journal | None = None
    ledger: Ledger | None = None
    witness: Callable[[Query, Answered], None] | None = None
    clock: Callable[[], datetime.datetime] = now

    def close(self) -> None:
        """Close what is on disk."""
        for record in (self.journal, self.ledger):
            if record is not None:
                record.close()

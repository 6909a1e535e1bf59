"""The keeper of a silo: its owner's policy, disclosure limit, approval, key, journal and ledger."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from fedtmle.privacy.limit import DisclosureLimit
from fedtmle.protocol.masks import MaskKey
from fedtmle.protocol.messages import Answered
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.protocol.query import Query
from fedtmle.runtime.journal import Journal
from fedtmle.runtime.ledger import Ledger, StudyScope
from fedtmle.runtime.signing import SigningKey

utc_now = functools.partial(datetime.datetime.now, datetime.UTC)


class Memory(Protocol):
    """What a silo remembers of earlier studies (`studies.memory`)."""

    def refusal(self, plan: Plan, /) -> str:
        """Return the key of the policy that forbids this study after the earlier ones, or an empty string."""
        ...

    def record_scope(self, plan: Plan, /) -> StudyScope:
        """Store which rows the silo has now; return the scope of a study with this plan, for the ledger."""
        ...


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """How a silo's owner guards and records its answers. Without any of it, the rows are unguarded.

    ``examines`` raises `CheckFailedError` if the plan's target does not keep what its interface promises.
    ``limit`` is the uncertainty that must remain about named attributes. ``approves`` returns whether the
    owner has approved the plan with this digest, and has not revoked it. ``peers`` are the public keys
    (`SigningKey.public_keys`) of the silos that the owner vouches for; None trusts every roster that the
    owner approves. ``memory`` compares a study with the earlier ones. ``witness`` is called with every query
    and the answer that leaves. ``rehearses`` is the plan of the study that is rehearsed on one silo's rows.
    """

    policy: Policy = UNGUARDED
    limit: DisclosureLimit | None = None
    examines: Callable[[Plan], None] | None = None
    approves: Callable[[bytes], bool] | None = None
    key: SigningKey | None = None
    mask_key: MaskKey | None = None
    peers: frozenset[bytes] | None = None
    journal: Journal | None = None
    ledger: Ledger | None = None
    memory: Memory | None = None
    witness: Callable[[Query, Answered], None] | None = None
    clock: Callable[[], datetime.datetime] = utc_now
    rehearses: Plan | None = None

    def close(self) -> None:
        """Close the journal and the ledger."""
        for record in (self.journal, self.ledger):
            if record is not None:
                record.close()

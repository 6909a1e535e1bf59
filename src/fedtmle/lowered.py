"""A limit that a silo's owner made laxer: the value that approvals sign, silos send and results state."""

from __future__ import annotations

import msgspec


class LoweredLimit(msgspec.Struct, frozen=True, array_like=True):
    """A limit of the policy that the silo's owner made laxer than the package's own, and the reason."""

    key: str
    value: float
    reason: str

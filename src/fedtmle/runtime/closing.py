"""The close: what a silo signs, and whether all silos signed that they heard the same."""

from __future__ import annotations

import msgspec

from fedtmle.protocol.messages import Compare
from fedtmle.protocol.plan import Plan
from fedtmle.runtime.position import Position
from fedtmle.runtime.signing import is_signed


def closing_statement(plan: Plan, session: bytes, silo: str, digest: bytes) -> bytes:
    """What a silo signs at the close: that it heard this digest, in this session of this plan."""
    return msgspec.msgpack.encode(("fedtmle close", plan.digest, session, silo, digest))


def all_heard_the_same(plan: Plan, silo: str, position: Position, message: Compare) -> bool:
    """Whether the roster's silos signed what ``silo`` heard."""
    own = position.heard.digest()
    closings = {closing.silo: closing for closing in message.closings}
    expected = set(plan.silos) if position.all_close else set(plan.silos) & set(closings)
    if set(closings) != expected or len(closings) != len(message.closings) or silo not in closings:
        return False
    for member in plan.roster:
        closing = closings.get(member.name)
        if closing is None:
            continue
        said = closing_statement(plan, position.session, member.name, own)
        if closing.digest != own or (member.key and not is_signed(said, closing.signature, member.key)):
            return False
    return True

"""The embedded run: a session over silos in this process, with their own typed errors at hand."""

from __future__ import annotations

from collections.abc import Sequence

from fedtmle.errors import RefusedError
from fedtmle.protocol.plan import Plan
from fedtmle.runtime.federation import InProcess
from fedtmle.runtime.session import Finished, Progress, Session
from fedtmle.runtime.silo import Silo


def run_embedded(plan: Plan, silos: Sequence[Silo], *, threads: int, progress: Progress | None) -> Finished:
    """Runs the session; where a silo could not answer, raises what it said itself."""
    try:
        return Session(plan, InProcess(silos, threads=threads), progress=progress).run()
    except RefusedError as refused:
        for silo in silos:
            if silo.name == refused.silo and silo.error is not None:
                raise silo.error from None
        raise

"""A run that writes its events and waits where it is told to, for a browser to follow.

    python gated_run.py STUDY EVENTS GATES [SILO ROUND]

GATES are rounds, such as 5,23: after each the run waits until a file EVENTS.5 is there. With a silo
and a round, that silo dies there: its machine answers no more questions.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedtmle.data import load_all
from fedtmle.errors import FedTMLEError
from fedtmle.protocol import messages
from fedtmle.protocol.messages import Reason, Refused
from fedtmle.protocol.outcome import Targeted
from fedtmle.protocol.plan import roster
from fedtmle.runtime.session import InProcess, RoundReport, Session
from fedtmle.runtime.silo import Silo
from fedtmle.studies.progress import following
from fedtmle.studyfile.file import read_study, study_plan
from fedtmle.studyfile.schema import schema_of


class Mortal:
    """A federation in which one silo dies in one round."""

    def __init__(self, inner: InProcess, silo: str, at: int) -> None:
        self._inner, self._silo, self._left = inner, silo, at

    @property
    def silos(self) -> Sequence[str]:
        return self._inner.silos

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        replies = dict(self._inner.exchange(requests))
        self._left -= 1
        if self._left < 0:
            replies[self._silo] = messages.encode(Refused(Reason.CANNOT_ANSWER))
        return replies


def main(study: str, events: str, gates: str, silo: str = "", at: str = "0") -> None:
    file = read_study(Path(study))
    tables = load_all(file.silos, schema_of(file.study))
    plan = study_plan(file.study, roster(list(tables)))
    federation = InProcess([Silo(name, plan, table) for name, table in tables.items()])
    with following(Path(events), "study", file.study, list(tables)) as log:
        assert log is not None

        def gated(report: RoundReport) -> None:
            assert log is not None
            log.round(report)
            while str(report.round) in gates.split(",") and not Path(f"{events}.{report.round}").exists():
                time.sleep(0.02)

        carrier = Mortal(federation, silo, int(at)) if silo else federation
        finished = Session(plan, carrier, progress=gated).run()
        assert isinstance(finished.outcome, Targeted)
        status = finished.outcome.status
        log.finished(text=status.value, converged=status.is_converged)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except FedTMLEError:
        sys.exit(3)

"""Running a study over any federation: the server's side, which reads no data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fedtmle.algorithms.coded import Coded
from fedtmle.errors import InputError
from fedtmle.model.table import Table
from fedtmle.protocol.plan import Plan
from fedtmle.results.document import document
from fedtmle.results.result import StudyResult
from fedtmle.runtime.federation import Federation
from fedtmle.runtime.session import Finished, Progress, Session
from fedtmle.runtime.silo import LocalOutcome
from fedtmle.solver import complete
from fedtmle.studyfile.file import study_of
from fedtmle.targets.effects.problem import EffectLaw


def run_over(
    plan: Plan,
    federation: Federation,
    *,
    progress: Progress | None = None,
    release: Sequence[str] = (),
) -> StudyResult:
    """Run the plan of a study over ``federation``, whose silos are those of the roster in their order.

    ``release`` names the silos that consent to having their own estimate shown. In a personalised run a
    silo's estimate stays with the silo, so that it cannot be shown here.
    """
    if study_of(plan).algorithm.pools_rows:
        raise InputError("algorithm: 'Central' pools the rows; it cannot run over a federation")
    check_release(release, federation.silos)
    finished = Session(plan, federation, progress=progress).run()
    return conclude(plan, finished, release=release)


def conclude(
    plan: Plan,
    finished: Finished,
    *,
    release: Sequence[str] = (),
    local: Mapping[str, LocalOutcome] | None = None,
    rows: Mapping[str, Table] | None = None,
    pooled: Table | None = None,
) -> StudyResult:
    """Return the result of a finished session.

    ``local`` has the outcomes of the silos in this process. An observed run has the ``pooled`` rows; a coded
    one also has the ``rows`` of each silo, from which its constants are computed.
    """
    algorithm = study_of(plan).algorithm
    result = complete(
        plan,
        finished,
        law=EffectLaw(),
        algorithm=algorithm,
        local=local or {},
        rows=rows if isinstance(algorithm, Coded) else None,
        pooled=pooled,
    )
    return StudyResult(document=document(plan, finished, result, release), run=result)


def check_release(release: Sequence[str], silos: Collection[str]) -> None:
    """Raise `InputError` if a releasing silo is not one of the study's."""
    if isinstance(release, str):
        raise InputError(f"release: expected a list of silos, such as [{release!r}], not one text")
    unknown = sorted(set(release) - set(silos))
    if unknown:
        raise InputError(f"release: there is no silo {' or '.join(map(repr, unknown))}")

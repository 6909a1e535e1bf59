"""Running a study over any federation: the server's side, which reads no data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from fedtmle.algorithms.coded import Coded
from fedtmle.errors import InputError
from fedtmle.programs.flow import study_details
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.policy import Policy
from fedtmle.results.document import document
from fedtmle.results.inference import reporting_progress
from fedtmle.results.result import StudyResult
from fedtmle.runtime.session import Federation, Progress, Session
from fedtmle.solver import CompletedRun
from fedtmle.studyfile.file import study_of


def run_over(
    plan: Plan,
    federation: Federation,
    *,
    progress: Progress | None = None,
    release: Sequence[str] = (),
    absent: Mapping[str, str] | None = None,
) -> StudyResult:
    """Run the plan of a study over ``federation``, whose silos are those of the roster in their order.

    ``release`` names the silos that consent to having their own estimate shown. In a personalised run a
    silo's estimate stays with the silo, so that it cannot be shown here. A study that goes on without silos
    may lack some in the federation; ``absent`` says why.
    """
    if study_of(plan).algorithm.pools_rows:
        raise InputError("algorithm: 'Central' pools the rows; it cannot run over a federation")
    check_release(release, federation.silos)
    with reporting_progress(study_of(plan)):
        finished = Session(plan, federation, progress=progress, absent=absent).run()
    return conclude(CompletedRun(plan=plan, finished=finished), release=release)


def conclude(completed: CompletedRun, *, release: Sequence[str] = ()) -> StudyResult:
    """Return the result of a completed run of a study's plan.

    An observed run has the pooled loss; a coded one is also followed on each silo's rows, for its constants.
    """
    algorithm = study_of(completed.plan).algorithm
    if not isinstance(algorithm, Coded):
        completed = replace(completed, rows=None)
    start = study_details(completed.finished.outcome).start
    result = completed.result(law=start, algorithm=algorithm)
    return StudyResult(document=document(completed.plan, completed.finished, result, release), run=result)


def leaving(result: StudyResult) -> StudyResult:
    """Return the result that a deployed study gives to its author: published if the sums are masked.

    The floor is that of the package's own policy. Numbers with noise may be read by everybody as they are.
    """
    masked = all(size is None for size in result.document["sizes"].values())  # nobody knows the sizes
    return result.published(Policy().min_cell) if masked and "privacy" not in result.document else result


def check_release(release: Sequence[str], silos: Collection[str]) -> None:
    """Raise `InputError` if a releasing silo is not one of the study's."""
    if isinstance(release, str):
        raise InputError(f"release: expected a list of silos, such as [{release!r}], not one text")
    unknown = sorted(set(release) - set(silos))
    if unknown:
        raise InputError(f"release: there is no silo {' or '.join(map(repr, unknown))}")

"""A deployed run that a silo refuses, or that loses a silo, says how far it got, as one process would."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedtmle.deploy import processes
from fedtmle.deploy.demo import run_here
from fedtmle.engine.runs import RunFolder, RunState
from fedtmle.errors import DeadlineError
from fedtmle.protocol.query import Phase
from fedtmle.studies.home import open_party
from fedtmle.studies.over import run_over
from fedtmle.studyfile.file import StudyFile, file_plan
from tests.deploy.rig import Rig, same
from tests.engine.lines import approve
from tests.homes import home_at
from tests.runtime.test_reached import Losing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
H3 = "hospital 3"


def expected(study: StudyFile, exchange: int) -> str:
    """How far one process gets that loses a silo in this exchange, in words without the full stop."""
    plan = file_plan(study)
    homes = {name: home_at(path) for name, path in study.silos.items()}
    parties = [
        open_party(plan, name, home.file, keeper=home.unrecorded_keeper(plan)) for name, home in homes.items()
    ]
    with pytest.raises(DeadlineError) as caught:
        run_over(plan, Losing(parties, exchange))
    assert caught.value.reached is not None
    assert caught.value.reached.rounds == exchange - 1  # the first exchange opens the run
    return str(caught.value.reached).rstrip(".")


def exchanges(study: StudyFile) -> tuple[int, int]:
    """The exchange of the second round of targeting, and that of the last round."""
    run = run_here(study).run
    assert run is not None
    phases = [bits.phase for bits in run.account.by_round]
    return phases.index(Phase.TARGETING) + 2, len(phases)


def at_exchange(rig: Rig, study: StudyFile, number: int, *, deadline: float) -> RunFolder:
    """Start a run whose third silo takes some seconds over its request of this exchange, and wait for it."""
    run = rig.start(study, deadline=deadline)
    rig.at_round(run, "hospital-3", at=number, seconds=4.0)
    return run


@pytest.mark.parametrize("which", [0, 1], ids=["in targeting", "in the last round"])
def test_a_refused_run_says_how_far_it_got(rig: Rig, which: int) -> None:
    """Its owner revokes the approval while the run goes on."""
    study = rig.plan(1 + which)
    number = exchanges(study)[which]
    run = at_exchange(rig, study, number, deadline=60.0)
    approve(study, H3, approved=False)
    assert processes.wait_until(lambda: run.status().state.is_over, 60), run.status()
    status = run.status()
    assert status.state is RunState.STOPPED
    assert status.refused
    assert status.why.startswith(f"silo '{H3}' refused: ")
    assert status.why.endswith(f". {expected(study, number)}")
    assert any(f"After round {number - 1} (" in line for line in rig.lines(run))


def test_a_run_that_lost_a_silo_says_how_far_it_got_and_goes_on(rig: Rig, tmp_path: Path) -> None:
    study = rig.plan(3)
    number, _ = exchanges(study)
    run = at_exchange(rig, study, number, deadline=20.0)
    rig.proxy.hold()
    words = f"{DeadlineError((H3,), 20.0)}. {expected(study, number)}"
    assert processes.wait_until(lambda: words in run.status().why, 90), (run.status(), words)
    assert run.status().state is RunState.WAITING
    rig.proxy.mend()
    rig.finish(run, within=180)
    same(study, run, tmp_path)

"""Studies of time to an event and of treatment over time on a real deployment: the bytes are the same."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedtmle.deploy.demo import approve_everywhere, compare, local_deployment, run_here
from fedtmle.deploy.launch import RunsHere, follow, show
from fedtmle.engine.runs import RunState
from fedtmle.studyfile.file import read_study
from tests.regimes.test_files import write as write_regimes
from tests.time.test_files import write as write_time

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("write", [write_time, write_regimes], ids=["time to an event", "regimes"])
def test_a_deployed_run_has_the_bytes_of_the_embedded_one(
    write: Callable[[Path], Path], tmp_path: Path
) -> None:
    path = _apart(write(tmp_path))
    study = read_study(path)
    embedded = run_here(study)
    with local_deployment(tmp_path / "consortium", study, within=180.0) as made:
        approve_everywhere(study)
        runs = RunsHere(made)
        record = runs.new(study, deadline=60.0, patience=300.0)
        last = show(follow(runs, record), quiet=True)
    assert last.state is RunState.DONE, last.why
    compared = compare(embedded, record, last, start_up=0.0, stopping=0.0)
    assert compared.same_result
    assert compared.same_transcript
    assert compared.rounds == sum(embedded.document["account"]["rounds"].values())


def _apart(study: Path) -> Path:
    """Give each silo a folder of its own, as hospitals have."""
    folder, text = study.parent, study.read_text()
    for name in ("silo0", "silo1"):
        (folder / name).mkdir()
        for suffix in ("csv", "toml"):
            (folder / f"{name}.{suffix}").rename(folder / name / f"{name}.{suffix}")
        text = text.replace(f'"{name}.toml"', f'"{name}/{name}.toml"')
    study.write_text(text)
    return study

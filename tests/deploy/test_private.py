"""A study with noise on a real deployment, masked: the path and numbers of one process, one draw each."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from fedtmle.deploy import processes
from fedtmle.deploy.demo import approve_everywhere, compare, local_deployment, run_here
from fedtmle.deploy.kits import Deployment
from fedtmle.deploy.launch import RunsHere
from fedtmle.engine.runs import RunFolder, RunState, sites
from fedtmle.runtime import ledger
from fedtmle.runtime import silo as silo_module
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import StudyFile, file_plan, read_study
from tests.deploy import faults
from tests.homes import home_at
from tests.runtime.faults import records

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SILOS, ROWS, KILLS = 3, 400, 3
LANES = 4 * 5 // 2 + 2 * (2 + 3) + (1 + 1 + 2)  # of the Gram matrix, two gradients and the closing sums
STUDY = """\
[target]
kind = "ATE"
outcome = "y"
treatment = "a"

[variables]
y = {kind = "binary"}
a = {kind = "binary"}
x = {kind = "number", range = [-1, 1]}

[models.outcome]
formula = "a + x"

[models.treatment]
formula = "x"

[privacy]
epsilon = 2.0
"""


@dataclass(frozen=True)
class Noisy:
    made: Deployment
    folder: Path
    orders: Path
    witness: Path

    def study(self, seed: int) -> StudyFile:
        return approved(with_seed(self.folder, seed))

    def run(self, study: StudyFile) -> RunFolder:
        for path in self.witness.iterdir():
            path.unlink()
        return RunsHere(self.made).new(study, deadline=30.0, patience=300.0)

    def draws(self, study: StudyFile) -> dict[str, list[int]]:
        """The noise that each silo drew, in order."""
        found = {}
        for silo, site in sites(study.silos).items():
            found[silo] = [int(text) for text in faults.written(self.witness / f"{site}.draws")]
        return found


def write_silos(folder: Path) -> None:
    draw = random.Random(4)  # noqa: S311 - simulated records
    for number in range(SILOS):
        home = folder / f"clinic-{number}"
        home.mkdir(parents=True)
        lines = ["y,a,x"]
        for _ in range(ROWS):
            x = round(draw.uniform(-1, 1), 3)
            a = int(draw.random() < 0.5 + 0.2 * x)
            lines.append(f"{int(draw.random() < 0.4 + 0.2 * a + 0.2 * x)},{a},{x}")
        (home / "records.csv").write_text("\n".join(lines) + "\n")
        (home / "silo.toml").write_text(f'[silo]\nname = "clinic {number}"\n\n[data]\npath = "records.csv"\n')


def with_seed(folder: Path, seed: int) -> StudyFile:
    names = {f"clinic {number}": f"clinic-{number}/silo.toml" for number in range(SILOS)}
    keys = {name: home_at(folder / path).key.public_keys.hex() for name, path in names.items()}
    listed, pinned = (
        "\n".join(f'"{name}" = "{value}"' for name, value in table.items()) for table in (names, keys)
    )
    path = folder / f"study-{seed}.toml"
    path.write_text(f"{STUDY}\n[options]\nseed = {seed}\n\n[plan.keys]\n{pinned}\n\n[silos]\n{listed}\n")
    return read_study(path)


def approved(study: StudyFile) -> StudyFile:
    approve_everywhere(study)
    return study


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Noisy]:
    folder = tmp_path_factory.mktemp("noisy")
    silos, orders, witness = (folder / name for name in ("silos", "orders", "witness"))
    write_silos(silos)
    orders.mkdir()
    witness.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDTMLE_FAULTS", str(orders))
        patch.setenv("FEDTMLE_WITNESS", str(witness))
        patch.setenv("PYTHONPATH", str(faults.write_hook(folder / "hook")), prepend=os.pathsep)
        with local_deployment(folder / "consortium", with_seed(silos, 0), within=180.0) as made:
            yield Noisy(made, silos, orders, witness)


def check_same(noisy: Noisy, study: StudyFile, run: RunFolder, patch: pytest.MonkeyPatch) -> None:
    """One process in which each silo has the draws of the deployed one sends the same bytes."""
    left = {silo: iter(drawn) for silo, drawn in noisy.draws(study).items()}
    step, silo_of = Silo.step, [""]

    def stepped(self: Silo, request: bytes) -> bytes:
        silo_of[0] = self.name
        return step(self, request)

    def drawn(_variance: Any, _below: Any) -> int:
        return next(left[silo_of[0]])

    patch.setattr(Silo, "step", stepped)
    patch.setattr(silo_module, "discrete_gaussian", drawn)
    embedded = run_here(study)
    assert all(next(draws, None) is None for draws in left.values())  # each was needed
    compared = compare(embedded, run, run.status(), start_up=0.0, stopping=0.0)
    assert compared.same_result
    assert compared.same_transcript
    assert embedded.document["study"]["options"]["aggregation"] == "masked"
    assert embedded.document["privacy"]["epsilon"] == 2.0


def check_records(noisy: Noisy, study: StudyFile) -> None:
    """Wire, journal and ledger have one answer to each request; the budget is taken once."""
    plan = file_plan(study)
    privacy = plan.program.privacy
    assert privacy is not None
    for silo, path in study.silos.items():
        home = home_at(path)
        recorded = dict(records(home.journal_path(plan).read_bytes()))
        pieces = faults.written(noisy.witness / f"{sites(study.silos)[silo]}.wire")
        sent = {
            (pieces[k][1:], pieces[k + 1][1:]) for k in range(0, len(pieces), 2) if pieces[k + 1][:1] == b"<"
        }
        assert sent == set(recorded.items())
        lines = [line for line in ledger.read(home.ledger_path) if line.get("plan") == plan.digest.hex()]
        answered = [(line["asked"], line["replied"]) for line in lines if line["decision"] == "answered"]
        assert answered == [(ledger.text(asked), ledger.text(told)) for asked, told in recorded.items()]
        assert all(
            (line["asked"], line["replied"]) in answered for line in lines
        )  # repeats are the same bytes
        taken = [line["told"] for line in lines if line.get("told")]
        assert [Fraction(each.zcdp) for each in taken if each is not None] == [privacy.taken]


def test_it_is_the_embedded_run_with_the_same_draws(noisy: Noisy, monkeypatch: pytest.MonkeyPatch) -> None:
    study = noisy.study(1)
    run = noisy.run(study)
    assert processes.wait_until(lambda: run.status().state.is_over, 240), run.status()
    assert run.status().state is RunState.DONE, run.status().why
    assert {silo: len(drawn) for silo, drawn in noisy.draws(study).items()} == dict.fromkeys(
        study.silos, LANES
    )
    check_records(noisy, study)
    check_same(noisy, study, run, monkeypatch)


def test_a_silo_that_is_killed_and_resumes_draws_nothing_again(
    noisy: Noisy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its engine and its process for the run are killed with SIGKILL; nobody gives a command."""
    draw = random.Random("kills")  # noqa: S311 - which moments, not a secret
    study = noisy.study(2)
    run = noisy.run(study)
    order = noisy.orders / "clinic-1.json"
    for kill in range(KILLS):
        faults.order(noisy.orders, "clinic-1", at=draw.randint(0, 1), what=["kill-after", "kill"][kill % 2])
        assert processes.wait_until(lambda: not order.exists(), 120), run.status()
    assert processes.wait_until(lambda: run.status().state.is_over, 240), run.status()
    assert run.status().state is RunState.DONE, run.status().why
    assert run.status().attempt > KILLS
    assert {silo: len(drawn) for silo, drawn in noisy.draws(study).items()} == dict.fromkeys(
        study.silos, LANES
    )
    check_records(noisy, study)
    check_same(noisy, study, run, monkeypatch)

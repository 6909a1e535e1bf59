"""[disclosure] in a silo file: the query that would tell too much of a column is refused."""

from __future__ import annotations

import base64
import math
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.data import DataErrors, read_silo_file
from fedtmle.errors import InputError, RefusedError
from fedtmle.privacy.audit import DisclosureLimit
from fedtmle.protocol import messages
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.query import Query
from fedtmle.runtime.certificate import rehearse
from fedtmle.runtime.ledger import LedgerLine, read
from fedtmle.runtime.rows import LocalRows
from fedtmle.runtime.session import InProcess, Session
from fedtmle.studies.home import Home, disclosure_limit, open_party
from fedtmle.studies.preview import preview
from fedtmle.studyfile.file import file_plan, read_study
from fedtmle.studyfile.schema import schema_of
from fedtmle_paper.privacy.design import design_modulus
from tests.homes import home_at
from tests.narrow import load

runner = CliRunner()
STATED = {
    "centre": '"public.csv"',
    "column": '"sbp_12"',
    "attributes": '["mean"]',
    "min_uncertainty": "1.0",
    "radius": "95",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert runner.invoke(app, ["init", str(tmp_path), "--all-keys"]).exit_code == 0
    return tmp_path


def exact(folder: Path) -> None:
    """Let the study's sums be exact: counts then have a round of their own, before any outcome is read."""
    study = folder / "study.toml"
    study.write_text(study.read_text().replace("[options]\n", '[options]\nsums = "exact"\n', 1))


def state(folder: Path, **changed: str | None) -> Path:
    """The northern silo's file with a section [disclosure]."""
    silo = folder / "north.toml"
    keys = {key: value for key, value in {**STATED, **changed}.items() if value is not None}
    lines = "\n".join(f"{key} = {value}" for key, value in keys.items())
    silo.write_text(silo.read_text().partition("\n[disclosure]")[0] + f"\n[disclosure]\n{lines}\n")
    return silo


class Mortal:
    """A silo at home that dies after every reply, if it ``restarts``, and goes on from its journal."""

    def __init__(self, plan: Plan, home: Home, *, restarts: bool) -> None:
        self.name = home.file.name
        self._plan, self._home, self._restarts = plan, home, restarts
        self._open()

    def _open(self) -> None:
        self.keeper = self._home.keeper(self._plan)
        self.silo = open_party(self._plan, self.name, self._home.file, keeper=self.keeper)

    def step(self, request: bytes) -> bytes:
        reply = self.silo.step(request)
        if self._restarts:
            self.close()
            self._open()
        return reply

    def close(self) -> None:
        self.keeper.close()


def deployed(folder: Path, *, restarts: bool = False) -> tuple[ft.Transcript | None, list[LedgerLine]]:
    """A run of approved silos: the transcript, if it came to its end, and the northern ledger."""
    file = read_study(folder / "study.toml")
    plan = file_plan(file)
    homes = {name: home_at(path) for name, path in file.silos.items()}
    with ExitStack() as stack:
        parties = []
        for name, home in homes.items():
            home.approvals.decide(plan.digest, approved=True)
            parties.append(Mortal(plan, home, restarts=restarts and name == "north"))
            stack.callback(parties[-1].close)
        try:
            transcript = Session(plan, InProcess(parties)).run().transcript  # type: ignore[arg-type]
        except RefusedError:
            transcript = None
    return transcript, list(read(homes["north"].ledger_path))


def answers(ledger: list[LedgerLine]) -> int:
    return sum(line["decision"] == "answered" and bool(line["query"]) for line in ledger)


def last_line(folder: Path, *, restarts: bool = False) -> tuple[Any, ...]:
    """How a run at new homes ends for the northern silo: reason, key, round, and how much it answered."""
    for name in ("north", "south"):
        shutil.rmtree(folder / f"{name}.home", ignore_errors=True)
    _, ledger = deployed(folder, restarts=restarts)
    return ledger[-1]["reason"], ledger[-1]["key"], ledger[-1]["round"], answers(ledger)


def first_telling(folder: Path) -> int:
    """The number of queries before the first whose answer changes with the outcomes, on north alone."""
    file = read_study(folder / "study.toml")
    table = load(folder / "north.toml", schema_of(file.study), silo="north")
    replayed = rehearse(file_plan(file), table, "north")
    higher = table.with_numeric("sbp_12", table.numeric["sbp_12"] + 1.0)
    other = LocalRows("north", higher, higher.n_rows)
    for count, asked in enumerate(replayed.answered):
        if asked.query.answer(other) != asked.answer:
            return count
    raise AssertionError("no answer depends on the outcome")


def test_the_query_that_tells_the_mean_is_refused(folder: Path) -> None:
    state(folder)
    exact(folder)
    transcript, ledger = deployed(folder)
    assert transcript is None
    last = ledger[-1]
    assert (last["decision"], last["reason"], last["key"]) == (
        "refused",
        "disclosure",
        "disclosure: mean of sbp_12",
    )
    reply = messages.decode_reply(base64.b64decode(last["replied"]))
    assert reply == messages.Refused(messages.Reason.DISCLOSURE)
    assert b"sbp_12" not in base64.b64decode(last["replied"])  # the server is not told which
    assert answers(ledger) > 0


@pytest.mark.parametrize("sums", ["rounded", "exact"])
def test_it_is_the_first_query_that_sees_the_column(folder: Path, sums: str) -> None:
    if sums == "exact":
        exact(folder)
    first = first_telling(folder)
    view = preview(file_plan(read_study(folder / "study.toml")), read_silo_file(state(folder)))
    assert view.refused_by == "disclosure: mean of sbp_12"
    assert view.reason == messages.Reason.DISCLOSURE
    assert sum(kind.times for kind in view.kinds) == first
    assert (first > 0) == (sums == "exact")  # rounded sums of outcomes share the first round with the counts


def test_the_embedded_run_is_refused_too(folder: Path) -> None:
    state(folder)
    file = read_study(folder / "study.toml")
    with pytest.raises(RefusedError, match="more of an attribute"):
        ft.run(file.study, file.silos)


@pytest.mark.parametrize("term", ["", " + C(silo)", " + C(programme):C(silo)", " + age:C(silo)"])
def test_a_low_floor_changes_nothing(folder: Path, term: str) -> None:
    """The public centre has an intercept of its own, which is not that of the silo's records."""
    study = folder / "study.toml"
    study.write_text(study.read_text().replace('"C(programme) + sbp_0', f'"C(programme){term} + sbp_0'))
    file = read_study(study)
    assert file.study.uses_silo is bool(term)
    plain = ft.run(file.study, file.silos).run
    state(folder, attributes='["mean", "record"]', min_uncertainty="1e-9", noise="1e-3")
    limited = ft.run(file.study, file.silos).run
    assert plain is not None
    assert limited is not None
    assert limited.transcript == plain.transcript
    assert deployed(folder)[0] == plain.transcript


def test_the_silos_own_outcomes_do_not_matter(folder: Path) -> None:
    state(folder)
    rows = pd.read_csv(folder / "north.csv")
    there = rows["SBP_FOLLOWUP"].notna()
    rng = np.random.default_rng(0)
    ends = [last_line(folder)]
    for outcomes in (rng.uniform(80, 250, len(rows)), np.full(len(rows), 150.0)):
        rows["SBP_FOLLOWUP"] = np.where(there, outcomes, np.nan)
        rows.to_csv(folder / "north.csv", index=False)
        ends.append(last_line(folder))
    assert ends == [ends[0]] * 3
    assert ends[0][0] == "disclosure"
    (folder / "north.csv").unlink()  # nothing of it is needed to judge a query
    assert disclosure_limit(
        file_plan(read_study(folder / "study.toml")), read_silo_file(folder / "north.toml")
    )


def test_whatever_happened_to_the_process_it_is_the_same_query(folder: Path) -> None:
    state(folder)
    steady = last_line(folder)
    assert steady[0] == "disclosure"
    assert last_line(folder, restarts=True) == steady


def test_what_was_answered_before_a_restart_counts(folder: Path) -> None:
    """Repeats wear noise down: the floor is set so that no single answer crosses it, but several do."""
    file = read_study(folder / "study.toml")
    table = load(folder / "north.toml", schema_of(file.study), silo="north")
    asked = [one.query for one in rehearse(file_plan(file), table, "north").answered]

    def left(floor: DisclosureLimit | None, queries: list[Query]) -> list[float]:
        assert floor is not None
        meter = floor.meter()
        found = []
        for query in queries:
            meter.admit(query)
            found.append(meter.omega()["mean of sbp_12"])
        return found

    low = disclosure_limit(
        file_plan(file), read_silo_file(state(folder, min_uncertainty="1e-9", noise="1e-2"))
    )
    together = left(low, asked)
    alone = [left(low, [query])[0] for query in asked]
    between = (min(alone) + together[-1]) / 2
    assert together[-1] < between < min(alone)
    state(folder, min_uncertainty=repr(between), noise="1e-2")
    steady = last_line(folder)
    assert steady[0] == "disclosure"
    assert last_line(folder, restarts=True) == steady


def test_the_meter_is_omega_of_all_blocks_together(folder: Path) -> None:
    file = read_study(folder / "study.toml")
    stated = state(folder, attributes='["mean", "record"]', noise="1e-2")
    table = load(stated, schema_of(file.study), silo="north")
    pd.read_csv(folder / "public.csv").head(30).to_csv(folder / "public.csv", index=False)
    centre = load(folder / "public.csv", schema_of(file.study), silo="north")
    floor = disclosure_limit(file_plan(file), read_silo_file(stated))
    assert floor is not None
    asked = [one.query for one in rehearse(file_plan(file), table, "north").answered]
    meter = floor.meter()
    for query in asked:
        meter.admit(query)
    A = np.concatenate([block for query in asked if (block := floor.jacobian(query)) is not None])
    there = ~np.isnan(centre.numeric["sbp_12"])
    rho = 95 * math.sqrt(there.sum())
    expected = design_modulus(A, there / there.sum(), radius=rho, noise=1e-2)
    assert meter.omega()["mean of sbp_12"] == pytest.approx(expected, rel=1e-6)
    each = [design_modulus(A, row, radius=rho, noise=1e-2) for row in np.eye(len(there))]
    assert meter.omega()["record of sbp_12"] == pytest.approx(min(each), rel=1e-6)


def test_the_preview_shows_the_refusal(folder: Path) -> None:
    silo = state(folder)
    found = runner.invoke(app, ["silo", "preview", str(folder / "study.toml"), "--silo", str(silo)])
    assert found.exit_code == 4
    assert "disclosure: mean of sbp_12" in " ".join(found.output.split())
    assert max(map(len, found.output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"centre": None}, "[disclosure] centre: this is missing"),
        ({"column": "3"}, "[disclosure] column: this is missing, or not text"),
        ({"attributes": '["median"]'}, "[disclosure] attributes: this is not a list"),
        ({"attributes": "[]"}, "[disclosure] attributes: this is not a list"),
        ({"min_uncertainty": "0"}, "[disclosure] min_uncertainty: this is missing, or not a number above 0"),
        ({"min_uncertainty": "96"}, "[disclosure] min_uncertainty: more must stay unknown"),
        ({"radius": "true"}, "[disclosure] radius: this is missing, or not a number above 0"),
        ({"noise": "-1"}, "[disclosure] noise: this is not a number"),
        ({"noise": "nan"}, "[disclosure] noise: this is not a number"),
        ({"radus": "1"}, "[disclosure] radus: unknown key"),
    ],
)
def test_mistakes_are_named_with_their_line(folder: Path, changed: dict[str, str | None], what: str) -> None:
    silo = state(folder, **changed)
    with pytest.raises(DataErrors) as caught:
        read_silo_file(silo)
    (defect,) = caught.value.defects
    assert what in defect.message
    ((key, value),) = changed.items()
    lines = silo.read_text().splitlines()
    assert defect.line is not None
    assert lines[defect.line - 1] == ("[disclosure]" if value is None else f"{key} = {value}")


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"centre": '"nowhere.csv"'}, "nowhere.csv"),
        ({"column": '"height"'}, "reads no numeric column 'height'; it reads sbp_12"),
        ({"column": '"programme"'}, "reads no numeric column 'programme'"),
        ({"column": '"smoker"'}, "are 0 or 1"),
    ],
)
def test_a_section_that_does_not_fit_the_study_is_named(
    folder: Path, changed: dict[str, str], what: str
) -> None:
    silo = state(folder, **changed)
    with pytest.raises(InputError) as caught:
        disclosure_limit(file_plan(read_study(folder / "study.toml")), read_silo_file(silo))
    assert "[disclosure]" in str(caught.value)
    assert what in str(caught.value)

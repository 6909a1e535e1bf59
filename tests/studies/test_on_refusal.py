"""A study stops at a silo that refuses or is absent when it opens, or goes on without it, as it declares."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.errors import InputError, ProtocolError, RefusedError
from fedtmle.protocol import messages
from fedtmle.protocol.messages import Begin, Reason, Refused
from fedtmle.protocol.plan import roster
from fedtmle.protocol.policy import Policy
from fedtmle.report import page
from fedtmle.runtime.certificate import replay
from fedtmle.runtime.session import InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import study_plan
from fedtmle.studyfile.schema import schema_of
from fedtmle.text.result import render
from tests.declare import declare
from tests.narrow import load_all

NAMES = ("north", "east", "south", "west")
VARIABLES = declare(x=(-8, 8), a="binary", y="binary")


def frame(seed: int, n: int = 120) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n).clip(-7, 7)
    a = rng.random(n) < 1 / (1 + np.exp(-0.4 * x))
    y = rng.random(n) < 1 / (1 + np.exp(-0.5 * x - 0.4 * a))
    return pd.DataFrame({"x": x, "a": a.astype(int), "y": y.astype(int)})


FRAMES = {name: frame(k, 100 + 20 * k) for k, name in enumerate(NAMES)}


def study(formula: str = "a + x", **options: Any) -> ft.Study:
    arguments = {
        "target": ft.ATE(outcome="y", treatment="a"),
        "outcome_model": ft.GLM(formula),
        "treatment_model": ft.GLM("x"),
        "variables": VARIABLES,
        "on_refusal": "go on",
    }
    return ft.Study(**{**arguments, **options})


def silo_files(folder: Path, policies: Mapping[str, str] | None = None) -> dict[str, Path]:
    files = {}
    for name, table in FRAMES.items():
        table.to_csv(folder / f"{name}.csv", index=False)
        text = f'[silo]\nname = "{name}"\n[data]\npath = "{name}.csv"\n'
        text += f"[policy]\n{(policies or {}).get(name, '')}\n"
        files[name] = folder / f"{name}.toml"
        files[name].write_text(text, encoding="utf-8")
    return files


def rest(absent: str) -> dict[str, pd.DataFrame]:
    return {name: table for name, table in FRAMES.items() if name != absent}


def same_estimates(one: ft.StudyResult, other: ft.StudyResult) -> bool:
    keys = ("estimates", "n", "sizes", "arm_counts", "ladder", "balance", "diagnostics", "certificate")
    return all(one.document[key] == other.document[key] for key in keys)


@pytest.mark.parametrize("formula", ["a + x", "a + x + C(silo)"])
def test_a_refusing_silo_is_left_out_and_named(tmp_path: Path, formula: str) -> None:
    files = silo_files(tmp_path, {"east": "min_rows = 5000"})
    result = ft.run(study(formula), files)
    assert same_estimates(result, ft.run(study(formula), rest("east")))
    assert result.document["absent"] == {"east": Reason.POLICY.value}
    assert "3 of 4 silos took part" in result.warnings[0]
    assert "'east'" in result.warnings[0]
    text = render(result.document)
    assert "records in 3 of 4 silos" in text.splitlines()[1]
    assert "3 of 4 silos took part." in repr(result)
    assert "3 of 4 silos" in result._repr_html_()
    assert "3 of 4 silos" in page.render(result.document)
    with pytest.raises(RefusedError, match="'east' refused"):
        ft.run(study(formula, on_refusal="stop"), files)


@pytest.mark.parametrize(
    "algorithm", [ft.Coded(), ft.LocalAverage(max_updates=4), ft.Personalized(max_updates=4)], ids=str
)
@pytest.mark.parametrize("lost", ["east.csv", "east.toml", "west.csv"])
def test_an_absent_silo_is_left_out_and_named(
    tmp_path: Path, lost: str, algorithm: ft.AbstractAlgorithm
) -> None:
    files, absent = silo_files(tmp_path), lost.partition(".")[0]
    (tmp_path / lost).unlink()
    result = ft.run(study(algorithm=algorithm), files)
    assert same_estimates(result, ft.run(study(algorithm=algorithm), rest(absent)))
    assert list(result.document["absent"]) == [absent]
    assert "3 of 4 silos" in render(result.document)
    with pytest.raises(InputError):
        ft.run(study(algorithm=algorithm, on_refusal="stop"), files)


def test_a_complete_run_has_nothing_to_say_about_it() -> None:
    result = ft.run(study(), FRAMES)
    assert result.document["absent"] == {}
    assert "took part" not in repr(result) + render(result.document)
    assert "in 4 silos" in render(result.document)
    stops = ft.run(study(on_refusal="stop"), FRAMES)
    assert same_estimates(result, stops)


def test_data_against_the_dictionary_are_a_refusal_too(tmp_path: Path) -> None:
    files = silo_files(tmp_path)
    FRAMES["south"].assign(x=900.0).to_csv(tmp_path / "south.csv", index=False)
    assert list(ft.run(study(), files).document["absent"]) == ["south"]


def test_nobody_left_is_an_error(tmp_path: Path) -> None:
    files = silo_files(tmp_path, dict.fromkeys(NAMES, "min_rows = 5000"))
    with pytest.raises(RefusedError):
        ft.run(study(), files)
    for name in NAMES:
        (tmp_path / f"{name}.csv").unlink()
    with pytest.raises(InputError):
        ft.run(study(), files)


def test_the_floors_of_those_that_stay_hold(tmp_path: Path) -> None:
    """With three of four silos, one that asks for four refuses, and the run stops."""
    files = silo_files(tmp_path, {"east": "min_rows = 5000", "west": "min_silos = 4"})
    with pytest.raises(RefusedError, match="fewer silos") as refused:
        ft.run(study(), files)
    assert refused.value.silo == "west"


def test_what_needs_the_absent_silo_stops(tmp_path: Path) -> None:
    files = silo_files(tmp_path, {"east": "min_rows = 5000"})
    with pytest.raises(InputError, match="the reference is not one of the study's levels"):
        ft.run(study(outcome_model=ft.Pilot(ft.GLM('a + C(silo, ref="east")'), at="north")), files)
    assert ft.run(study('a + x*C(silo, ref="east")'), files).table()["std_error"][0] > 0  # each keeps its own
    at_east = ft.Pilot(ft.GLM("a + x"), at="east")
    with pytest.raises(InputError, match="east"):
        ft.run(study(outcome_model=at_east), files)
    with pytest.raises(InputError, match="on_refusal: weights by silo"):
        study(algorithm=ft.LocalAverage(weights=dict.fromkeys(NAMES, 0.25)))
    with pytest.raises(InputError, match="on_refusal: where all rows are pooled"):
        study(algorithm=ft.Central())
    with pytest.raises(InputError, match="on_refusal: expected 'stop' or 'go on'"):
        study(on_refusal="ignore")


# The protocol.


def parties(asked: ft.Study) -> tuple[Any, list[Silo]]:
    plan = study_plan(asked, roster(NAMES))
    tables = load_all(FRAMES, schema_of(asked))
    return plan, [Silo(name, plan, table) for name, table in tables.items()]


@pytest.mark.parametrize(
    ("asked", "absent", "admitted"),
    [
        (study(), ("east",), True),
        (study(), ("east", "south", "west"), True),
        (study(on_refusal="stop"), ("east",), False),
        (study(), ("north",), False),  # the silo itself
        (study(), ("west", "east"), False),  # another order: two messages would mean the same
        (study(), ("east", "east"), False),
        (study(), ("elsewhere",), False),
        (study(), NAMES, False),
    ],
)
def test_a_silo_admits_absent_silos_only_if_its_plan_does(
    asked: ft.Study, absent: tuple[str, ...], admitted: bool
) -> None:
    plan, (silo, *_) = parties(asked)
    opening = messages.Open(messages.WIRE_FORMAT, b"session", plan.digest)
    silo.step(messages.encode(opening))
    reply = messages.decode_reply(silo.step(messages.encode(Begin(b"session", 500, 0, absent=absent))))
    assert isinstance(reply, Refused) is not admitted
    if isinstance(reply, Refused):
        assert reply.reason is Reason.OUT_OF_ORDER


class TwoStories(InProcess):
    """A server that says to one silo that nobody is absent."""

    def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
        changed = dict(requests)
        first = next(iter(changed))
        message = messages.decode_request(changed[first])
        if isinstance(message, Begin):
            changed[first] = messages.encode(msgspec.structs.replace(message, absent=()))
        return super().exchange(changed)


def test_two_rosters_are_noticed_at_the_close() -> None:
    plan, silos = parties(study())
    assert Session(plan, InProcess(silos[1:]), absent={"north": "gone"}).run().absent == {"north": "gone"}
    plan, silos = parties(study())
    with pytest.raises(ProtocolError, match="different broadcasts"):
        Session(plan, TwoStories(silos[1:])).run()


def test_the_transcript_of_the_rest_can_be_replayed(tmp_path: Path) -> None:
    asked = study("a + x + C(silo)")
    files = silo_files(tmp_path, {"north": "min_rows = 5000"})
    result = ft.run(asked, files)
    plan = study_plan(asked, roster(NAMES))
    table = load_all({"west": FRAMES["west"]}, schema_of(asked))["west"]
    assert result.run is not None
    replayed = replay(plan, table, result.run.transcript, "west", policy=Policy())
    assert replayed.n == sum(result.run.sizes.values()) == 420


def test_from_the_study_file_to_its_page(tmp_path: Path) -> None:
    silo_files(tmp_path, {"east": "min_rows = 5000"})
    (tmp_path / "study.toml").write_text(
        'title = "Visits and falls"\n[target]\nkind = "ATE"\noutcome = "y"\ntreatment = "a"\n'
        '[variables]\ny = {kind = "binary"}\na = {kind = "binary"}\nx = {kind = "number", range = [-8, 8]}\n'
        '[models.outcome]\nformula = "a + x"\n[models.treatment]\nformula = "x"\n'
        '[options]\non_refusal = "go on"\n[silos]\n' + "".join(f'{name} = "{name}.toml"\n' for name in NAMES),
        encoding="utf-8",
    )
    runner = CliRunner()
    arguments = ["run", str(tmp_path / "study.toml"), "--quiet", "--report", str(tmp_path / "page.html")]
    ran = runner.invoke(app, [*arguments, "--out", str(tmp_path / "result.json")])
    assert ran.exit_code == 0, ran.output
    assert ran.output.splitlines()[0] == "Visits and falls"
    assert "3 of 4 silos" in ran.output.splitlines()[1]
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<title>Visits and falls" in html
    assert "3 of 4 silos" in html
    shown = runner.invoke(app, ["show", str(tmp_path / "result.json")])
    assert "3 of 4 silos" in shown.output
    preview = ["silo", "preview", str(tmp_path / "study.toml"), "--silo", str(tmp_path / "west.toml")]
    assert "goes on without some" in " ".join(runner.invoke(app, preview).output.split())
    missing = runner.invoke(app, ["silo", "approve", *preview[2:], "--yes"])
    assert "make it, once for your institution: fedtmle silo home --silo" in missing.output
    made = runner.invoke(app, ["silo", "home", *preview[3:], "--create"])
    assert made.exit_code == 0, made.output
    assert "No study was answered yet." in made.output
    approved = runner.invoke(app, ["silo", "approve", *preview[2:], "--yes"])
    assert "goes on without a silo" in approved.output

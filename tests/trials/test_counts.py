"""Counts that owners share, and the trial in the result of a deployed run."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import fedtmle as ft
from fedtmle.errors import InputError
from fedtmle.trials import Cdm, TargetTrial, read_cohort
from fedtmle.trials.cohort import read_counts, write_counts
from tests.command import invoke
from tests.trials.test_compile import BASE, TRIALS
from tests.trials.test_eunomia import SILOS, STRICTER, in_duckdb, write


@pytest.fixture
def shared(invented: Path, tmp_path: Path) -> Path:
    cdm = Cdm(name="north", path=invented)
    write_counts(tmp_path / "north.json", BASE, read_cohort(BASE, cdm), cdm)
    return tmp_path / "north.json"


def test_counts_come_back_as_others_may_see_them(shared: Path, invented: Path) -> None:
    cohort = read_cohort(BASE, Cdm(name="north", path=invented))
    assert read_counts([shared], BASE, ("south", "north")) == {"north": cohort.attrition.for_others(5)}
    assert read_counts([], BASE, ("north",)) == {}


def test_the_strictest_floor_holds_for_all(shared: Path, invented: Path, tmp_path: Path) -> None:
    strict = Cdm(name="south", path=invented, policy=ft.Policy(min_cell=40))
    cohort = read_cohort(BASE, strict)
    write_counts(tmp_path / "south.json", BASE, cohort, strict)
    views = read_counts([tmp_path / "south.json", shared], BASE, ("north", "south"))
    assert list(views) == ["north", "south"]
    assert {view.floor for view in views.values()} == {40}
    assert views["south"] == cohort.attrition.for_others(40)
    north = [count for count in views["north"].people if count is not None]
    assert all(count >= 40 for count in north)
    assert all(a - b == 0 or a - b >= 40 for a, b in pairwise(north))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other"}, "belong to another trial"),
        ({"trial": "0" * 64}, "belong to another trial"),
        ({"silo": "west"}, "the trial lists no silo 'west'; it lists north, south"),
        ({"people": [1]}, "damaged"),
        ({"arms": []}, "damaged"),
        ({"floor": 0}, "damaged"),
        ({"floor": "5"}, "not a readable file of a silo's counts"),
        ({"more": 1}, "not a readable file of a silo's counts"),
    ],
)
def test_other_files_are_refused(shared: Path, change: dict[str, object], message: str) -> None:
    shared.write_text(json.dumps(json.loads(shared.read_text()) | change), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        read_counts([shared], BASE, ("north", "south"))


def test_two_files_of_one_silo_and_no_file(shared: Path) -> None:
    with pytest.raises(InputError, match="two files are for silo 'north'"):
        read_counts([shared, shared], BASE, ("north",))
    with pytest.raises(InputError, match="not a readable file of a silo's counts"):
        read_counts([shared.with_name("absent.json")], BASE, ("north",))


def test_every_change_of_the_trial_has_another_digest() -> None:
    def other(trial: TargetTrial) -> TargetTrial:
        drugs = replace(trial.strategies[0].drugs, ids=(trial.strategies[0].drugs.ids[0] + 500,))
        first = replace(trial.strategies[0], drugs=drugs)
        return replace(trial, strategies=(first, *trial.strategies[1:]))

    digests = [trial.digest for trial in TRIALS.values()]
    assert len({*digests, *(other(trial).digest for trial in TRIALS.values())}) == 2 * len(TRIALS)
    assert replace(BASE, name="another name").digest == BASE.digest
    assert other(BASE).study != BASE.study  # so that an approval of the one is none of the other


def test_owners_write_and_the_coordinator_adds_the_trial(eunomia: Path, tmp_path: Path) -> None:
    """As in a deployment: nobody but its owner has a silo's file. The study runs over the written tables."""
    paths = "\n".join(f'{name} = "{name}.toml"' for name in SILOS)
    together = tmp_path / "together"
    together.mkdir()
    texts = set()
    for index, name in enumerate(SILOS):
        own = tmp_path / name
        own.mkdir()
        (own / "trial.toml").write_text(f"{STRICTER}\n[silos]\n{paths}\n", encoding="utf-8")
        cdm = f'[cdm]\ndatabase = "{eunomia}"\npart = [{index}, 4]\n'
        (own / f"{name}.toml").write_text(f'[silo]\nname = "{name}"\n{cdm}', encoding="utf-8")
        done = invoke("emulate", own / "trial.toml", "--silo", name, "--write", own / "study")
        assert done.exit_code == 0, done.output
        texts.add((own / "study" / "study.toml").read_text())
        for path in (own / "study").iterdir():
            (together / path.name).write_bytes(path.read_bytes())
    assert len(texts) == 1
    result = tmp_path / "result.json"
    assert invoke("run", together / "study.toml", "--out", result, "--quiet").exit_code == 0
    trial, page, whole = together / "trial.toml", tmp_path / "report.html", tmp_path / "whole.json"
    trial.write_text((tmp_path / "north" / "trial.toml").read_text(), encoding="utf-8")
    for name in SILOS:
        (together / f"{name}.toml").unlink()  # the coordinator has none of them
    counts = [word for name in SILOS[:3] for word in ("--counts", together / f"{name}.counts.json")]
    done = invoke("emulate", trial, "--result", result, *counts, "--report", page, "--out", whole)
    assert done.exit_code == 0, done.output
    assert "Without the counts of west." in done.output
    assert "Without the counts of west" in page.read_text(encoding="utf-8")
    # It is the result of the trial emulated in one process, but for what the fourth owner has not sent.
    here = invoke("emulate", write(tmp_path, STRICTER, in_duckdb(eunomia)).path, "--json")
    assert here.exit_code == 0, here.output
    embedded, deployed = json.loads(here.output), json.loads(whole.read_text(encoding="utf-8"))
    shown = embedded["emulation"]
    del shown["table1"], shown["silos"]["west"]
    assert deployed["emulation"] == {**shown, "not_shared": ["west"]}
    assert deployed == {**embedded, "emulation": deployed["emulation"]}
    # Without any counts, and with a result of another trial.
    bare = invoke("emulate", trial, "--result", result)
    assert "No silo has shared its counts." in bare.output
    trial.write_text(trial.read_text().replace("192671", "192670"), encoding="utf-8")
    refused = invoke("emulate", trial, "--result", result)
    assert refused.exit_code == 1
    assert "not a result of the trial's study" in refused.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--on", "x", "--sql"), "--sql does not go with --on"),
        (("--on", "x", "--result", "y"), "--result does not go with --on"),
        (("--result", "x", "--write", "y"), "--write does not go with --result"),
        (("--counts", "x"), "--counts goes with --on or --result"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    done = invoke("emulate", tmp_path / "trial.toml", *options)
    assert done.exit_code == 2
    assert message in " ".join(done.output.replace("\N{BOX DRAWINGS LIGHT VERTICAL}", " ").split())

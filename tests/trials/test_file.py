"""Trial files: every key is read, and every defect is reported at once with its file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedtmle as ft
from fedtmle.errors import InputError
from fedtmle.studyfile.file import StudyFileErrors
from fedtmle.trials import (
    AgeAtBaseline,
    AnyRecord,
    Censoring,
    ConceptSet,
    Criterion,
    Domain,
    Eligibility,
    LastMeasurement,
    Sex,
    TargetTrial,
    TimeZero,
    TreatmentStrategy,
    TrialOutcome,
    VisitCount,
)
from fedtmle.trials.file import TrialFile, read_trial

FULL = """\
[trial]
name = "A trial with every key"
effect = "risk ratio"

[concepts]
old = [1]
new = {ids = [2, 3], exclude = [4], descendants = false}
ill = [5]
event = [6]
lab = [7]

[[strategies]]
name = "the old drug"
drugs = "old"

[[strategies]]
name = "the new drug"
drugs = "new"

[time_zero]
condition = "ill"
grace_days = 30
washout_days = 180

[eligibility]
age = [18, 80]
observation_days_before = 365

[[eligibility.present]]
conditions = "ill"
from_day = -90

[[eligibility.absent]]
drugs = "old"
from_day = -365
to_day = -1

[outcome]
name = "bad_end"
conditions = "event"
days = 180

[follow_up]
censor = ["end of observation", "switch"]

[covariates]
age = {kind = "age"}
sex = {kind = "sex"}
visits = {kind = "visits", from_day = -365, most = 50}
ill = {kind = "condition", concepts = "ill", to_day = -1}
old = {kind = "drug", concepts = "old"}
lab = {kind = "measurement", concepts = "lab", range = [1, 9], if_missing = 4.5, units = [9], from_day = -30}

[models.outcome]
formula = "C(strategy)*age + lab + lab_measured"

[algorithm]
kind = "Gradient"

[options]
folds = 5

[silos]
south = "south.toml"

[silos.north]
database = "north.duckdb"
schema = "cdm"
vocabulary_schema = "vocab"
part = [1, 4]
"""
SOUTH = """\
[silo]
name = "south"

[cdm]
database = {url_env = "SOUTH_CDM", timeout = 60}
schema = "omop"

[policy]
min_cell = 11
"""


def read(folder: Path, text: str, south: str = SOUTH) -> TrialFile:
    (folder / "trial.toml").write_text(text, encoding="utf-8")
    (folder / "south.toml").write_text(south, encoding="utf-8")
    return read_trial(folder / "trial.toml")


def defects(folder: Path, text: str, south: str = SOUTH) -> list[str]:
    with pytest.raises(StudyFileErrors) as caught:
        read(folder, text, south)
    return [str(defect).replace(f"{folder}/", "") for defect in caught.value.defects]


def test_every_key_is_the_same_word_in_python(tmp_path: Path) -> None:
    file = read(tmp_path, FULL)
    old, new = (
        ConceptSet(name="old", ids=(1,)),
        ConceptSet(name="new", ids=(2, 3), exclude=(4,), descendants=False),
    )
    ill, event, lab = (ConceptSet(name=name, ids=(i,)) for name, i in (("ill", 5), ("event", 6), ("lab", 7)))
    assert file.trial == TargetTrial(
        name="A trial with every key",
        effect="risk ratio",
        strategies=(
            TreatmentStrategy(name="the old drug", drugs=old),
            TreatmentStrategy(name="the new drug", drugs=new),
        ),
        time_zero=TimeZero(condition=ill, grace_days=30, washout_days=180),
        eligibility=Eligibility(
            age=(18, 80),
            observation_days_before=365,
            criteria=(
                Criterion(domain=Domain.CONDITION, concepts=ill, present=True, from_day=-90),
                Criterion(domain=Domain.DRUG, concepts=old, present=False, from_day=-365, to_day=-1),
            ),
        ),
        outcome=TrialOutcome(name="bad_end", conditions=event, days=180),
        censoring=(Censoring.END_OF_OBSERVATION, Censoring.SWITCH),
        covariates=(
            AgeAtBaseline(name="age"),
            Sex(name="sex"),
            VisitCount(name="visits", from_day=-365, most=50),
            AnyRecord(name="ill", domain=Domain.CONDITION, concepts=ill, to_day=-1),
            AnyRecord(name="old", domain=Domain.DRUG, concepts=old),
            LastMeasurement(name="lab", concepts=lab, range=(1, 9), if_missing=4.5, units=(9,), from_day=-30),
        ),
        models={"outcome": ft.GLM("C(strategy)*age + lab + lab_measured")},
        algorithm=ft.Gradient(),
        options={"folds": 5},
    )
    covariates = "age + C(sex) + visits + ill + old + lab + lab_measured"
    assert file.trial.study == ft.Study(
        target=ft.RR(
            outcome="bad_end",
            treatment="strategy",
            arms=("the old drug", "the new drug"),
        ),
        outcome_model=ft.GLM("C(strategy)*age + lab + lab_measured"),
        treatment_model=ft.GLM(covariates),
        missingness_model=ft.GLM(f"C(strategy) + {covariates}"),
        algorithm=ft.Gradient(),
        folds=5,
        variables=ft.Variables(
            {
                "strategy": {
                    "kind": "category",
                    "levels": ["the old drug", "the new drug"],
                    "label": f"treatment strategy of trial {file.trial.digest[:16]}",
                },
                "bad_end": {"kind": "binary", "label": "condition event, day 1 to 180"},
                "age": {"kind": "number", "range": (18, 80), "label": "age at time zero", "unit": "years"},
                "sex": {"kind": "category", "levels": ["female", "male", "other"], "label": "sex"},
                "visits": {"kind": "count", "range": (0, 50), "label": "visits, day -365 to 0"},
                "ill": {"kind": "binary", "label": "condition ill, any day to -1"},
                "old": {"kind": "binary", "label": "drug old, any day to 0"},
                "lab": {"kind": "number", "range": (1, 9), "label": "last lab, day -30 to 0"},
                "lab_measured": {"kind": "binary", "label": "lab was measured, day -30 to 0"},
            }
        ),
    )
    north, south = file.silos["north"], file.silos["south"]
    assert north.path == tmp_path / "north.duckdb"
    assert north.layout.part == (1, 4)
    assert (north.layout.schema, north.layout.vocabulary_schema) == ("cdm", "vocab")
    assert north.policy is None
    assert (south.url_env, south.timeout) == ("SOUTH_CDM", 60.0)
    assert south.policy is not None
    assert south.policy.min_cell == 11
    assert (north.dialect.name, south.dialect.name) == ("duckdb", "postgresql")


def test_death_is_an_outcome_and_effects_have_their_words(tmp_path: Path) -> None:
    text = FULL.replace('name = "bad_end"\nconditions = "event"', "death = true")
    for words, effect in (
        ("risk difference", ft.ATE),
        ("risk ratio", ft.RR),
        ("odds ratio", ft.OR),
        ("risks", ft.TSM),
    ):
        trial = read(tmp_path, text.replace('"risk ratio"', f'"{words}"')).trial
        assert isinstance(trial.study.target, effect)
        assert trial.outcome == TrialOutcome(name="death", days=180)


def test_all_defects_come_at_once_with_file_and_line(tmp_path: Path) -> None:
    text = (
        FULL.replace('effect = "risk ratio"', 'effect = "risk rato"')
        .replace("ill = [5]", "ill = [-5]")
        .replace('drugs = "new"', 'drugs = "nwe"')
        .replace("age = [18, 80]", "age = [80, 18]")
        .replace("from_day = -90", "from_day = 3")
        .replace("days = 180\n\n[follow", "dayz = 180\n\n[follow")
        .replace('"switch"]', '"swich"]')
        .replace('{kind = "sex"}', '{kind = "gender"}')
        .replace("if_missing = 4.5, ", "")
        .replace('formula = "C(strategy)*age + lab + lab_measured"', 'formula = "age + ("')
        .replace("folds = 5", "folds = 5\nweights = 3")
        .replace("part = [1, 4]", "part = [4, 4]")
    )
    south = (
        SOUTH.replace('"south"', '"sud"').replace("min_cell = 11", "min_cell = 2").replace("schema", "shema")
    )
    reported = defects(tmp_path, text, south)
    expected = (
        "trial.toml:3: [trial] effect: expected",
        "trial.toml:8: [concepts.ill] ids: a concept id is a whole number above 0",
        "did you mean 'new'?",
        "trial.toml:26: [eligibility] age: expected (least, most)",
        "trial.toml:31: [eligibility.present] from_day: expected",
        "[outcome] days: is missing",
        "[outcome] dayz: unknown key; did you mean 'days'?",
        "trial.toml:44: [follow_up] censor: expected",
        "trial.toml:48: [covariates.sex] kind: is not known",
        "trial.toml:52: [covariates.lab] if_missing: is missing",
        "trial.toml:55: [models.outcome]",
        "[options] weights: unknown key",
        "[silos.north] part: expected [index, count]",
        "south.toml:2: [silo] name: the silo is called 'sud' here and 'south' in the trial",
        "south.toml:6: [cdm] shema: unknown key; did you mean 'schema'?",
        "south.toml:9: [policy] min_cell: may be raised; lowered only",
    )
    for message in expected:
        assert any(message in defect for defect in reported), (message, reported)
    assert len(reported) == len(expected), reported


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "observation_days_before = 365",
            "observation_days_before = 90",
            "[time_zero] washout_days: earlier use",
        ),
        ("observation_days_before = 365\n", "", "[follow_up] censor: censoring at the end of observation"),
        ('name = "the new drug"', 'name = "the old drug"', "two strategies are called 'the old drug'"),
        ("ids = [2, 3]", "ids = [2, 1]", "concept 1 is in the drugs of two strategies"),
        ('censor = ["end of observation", "switch"]', "", "no defect"),
        ("[models.outcome]", "[models.missingness]", "no defect"),
        ("age + lab", "age + hgt", "[models.outcome]: it uses 'hgt', which the trial does not define"),
        ("ill = {kind", "BAD_END = {kind", "two columns of the table are called 'bad_end'"),
        ("visits = {kind", "strategy = {kind", "two columns of the table are called 'strategy'"),
        ("visits = {kind", '"a b" = {kind', "'a b' cannot be a column"),
        ('condition = "ill"\n', "", "[time_zero] grace_days: with time zero at the start of a drug"),
        ("folds = 5", "folds = 1", "[options] folds: expected at least 2"),
        ('database = "north.duckdb"\n', "", "[silos.north] database: is missing"),
        ("days = 180\n\n[follow", "days = 0\n\n[follow", "[outcome] days: expected a number of days, 1 to"),
        ('conditions = "event"', 'conditions = "event"\ndeath = true', "give exactly one of conditions"),
        (
            'drugs = "old"\nfrom',
            'drugs = "old"\nconditions = "ill"\nfrom',
            "give exactly one of conditions and drugs",
        ),
        ("[silos.north]", "[silos.north", "not TOML"),
        ("[[strategies]]", "[strategies]", "not TOML"),
        ("old = [1]", 'old = "1"', "expected a list of concept ids"),
        ("exclude = [4]", "exclude = [2]", "both included and excluded"),
        ("lab = {kind", "lab_measured = {kind", "no defect"),
        ("range = [1, 9]", "range = [9, 1]", "[covariates.lab] range: expected the least and the largest"),
        ("range = [1, 9]", "range = [1]", "[covariates.lab] range: expected the least and the largest"),
        ("range = [1, 9]", "range = [5, 9]", "[covariates.lab] if_missing: expected a number in range"),
        ("range = [1, 9], ", "", "[covariates.lab] range: is missing"),
        ("most = 50", "most = 0", "[covariates.visits] most: expected a number of visits"),
        ('name = "the new drug"', 'name = "the\\nnew drug"', "expected one line of at most 200 printable"),
        ('"north.duckdb"', '"postgresql://reader:hunter2@host/cdm"', "[silos.north] database: this is a URL"),
        ('"north.duckdb"', '{url_env = "A B"}', "[silos.north] database: url_env is not the name"),
        ('"north.duckdb"', '{url_file = "secret.url"}', "[silos.north] database: url_file is inside"),
    ],
)
def test_one_defect(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = FULL.replace(old, new)
    assert text != FULL
    if message == "no defect":
        if "lab_measured = {" in new:
            text = text.replace("lab + lab_measured", "lab_measured")
        read(tmp_path, text)
        return
    reported = defects(tmp_path, text)
    assert any(message in defect for defect in reported), reported
    assert len(reported) == 1 + (old == "observation_days_before = 365\n"), reported  # which two keys need


@pytest.mark.parametrize(
    ("parts", "overlap"),
    [
        (([0, 4], [1, 4]), False),
        (([0, 2], [1, 4]), False),
        (([0, 2], [2, 4]), True),
        (([0, 3], [1, 4]), True),
        (([1, 4], [1, 4]), True),
        ((None, [1, 4]), True),
    ],
)
def test_nobody_counts_twice(
    tmp_path: Path, parts: tuple[list[int] | None, list[int]], overlap: bool
) -> None:
    head = FULL.partition("[silos]")[0]
    for index, part in enumerate(parts):
        head += f'[silos.s{index}]\ndatabase = "cdm.duckdb"\n' + (f"part = {part}\n" if part else "")
    if overlap:
        assert "silos 's0' and 's1' read the same people" in defects(tmp_path, head)[0]
    else:
        assert len(read(tmp_path, head).silos) == 2


def test_missing_sections_are_told(tmp_path: Path) -> None:
    reported = defects(tmp_path, "")
    for section in ("trial", "strategies", "outcome", "silos"):
        assert any(f"[{section}]" in defect for defect in reported), reported
    with pytest.raises(StudyFileErrors, match="there is no such file"):
        read_trial(tmp_path / "absent.toml")


def test_python_refuses_what_the_file_refuses() -> None:
    drugs = [ConceptSet(name=name, ids=(i,)) for i, name in enumerate(("a", "b"), start=1)]
    strategies = tuple(TreatmentStrategy(name=each.name, drugs=each) for each in drugs)
    outcome = TrialOutcome(name="death", days=30)
    with pytest.raises(InputError, match="at least two strategies"):
        TargetTrial(name="x", strategies=strategies[:1], outcome=outcome)
    with pytest.raises(InputError, match="washout_days"):
        TargetTrial(name="x", strategies=strategies, outcome=outcome, time_zero=TimeZero(washout_days=9))
    with pytest.raises(InputError, match="effect"):
        TargetTrial(name="x", strategies=strategies, outcome=outcome, effect="hazard ratio")
    with pytest.raises(InputError, match="strategies"):
        TargetTrial(name="x", strategies=("a", "b"), outcome=outcome)  # type: ignore[arg-type]  # refused
    trial = TargetTrial(name="x", strategies=strategies, outcome=outcome)
    assert trial.columns == ("strategy", "death")
    assert trial.study.missingness_model is None

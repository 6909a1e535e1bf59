"""`validate` finds on the silos' tables what would stop a run or make a silo refuse it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.data import read_silo_file
from fedtmle.errors import FedTMLEError
from fedtmle.studies.preview import preview
from fedtmle.studyfile.file import file_plan
from fedtmle.text.approval import render_preview

STUDY = """\
[target]
kind = "ATE"
outcome = "y"
treatment = "a"
[variables]
y = {kind = "number", range = [-20, 20]}
a = {kind = "binary"}
x = {kind = "number", range = [-9, 9]}
f = {kind = "category", levels = ["u", "v", "w"]}
[models.outcome]
formula = "a + x + C(f)"
[models.treatment]
formula = "TREATMENT"
[silos]
"""


def frame(n: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    x, a = rng.normal(size=n).clip(-5, 5), rng.integers(0, 2, n)
    f = rng.choice(["u", "v", "w"], n)
    return pd.DataFrame({"y": x + a + rng.normal(size=n), "a": a, "x": x, "f": f})


def written(
    folder: Path, frames: dict[str, pd.DataFrame], *, treatment: str = "x", policy: str | None = None
) -> Path:
    lines = []
    for name, data in frames.items():
        data.to_csv(folder / f"{name}.csv", index=False)
        text = f'[silo]\nname = "{name}"\n[data]\npath = "{name}.csv"\n'
        (folder / f"{name}.toml").write_text(text + (f"[policy]\n{policy}\n" if policy else ""))
        lines.append(f'{name} = "{name}.{"csv" if policy is None else "toml"}"\n')
    path = folder / "study.toml"
    path.write_text(STUDY.replace("TREATMENT", treatment) + "".join(lines), encoding="utf-8")
    return path


def constant(data: pd.DataFrame) -> pd.DataFrame:
    return data.assign(x=2.0)


def rare(data: pd.DataFrame) -> pd.DataFrame:
    f = np.where(np.arange(len(data)) < 3, "w", np.where(data.f == "w", "u", data.f))
    return data.assign(f=f)


def separated(data: pd.DataFrame) -> pd.DataFrame:
    return data.assign(a=np.where(data.f == "w", 1, data.a))


def by_x(data: pd.DataFrame) -> pd.DataFrame:
    return data.assign(a=(data.x > 0.1).astype(int))


TWO = {"north": frame(120, 1), "south": frame(100, 2)}
DEFAULT = "min_cell = 5"  # a silo file with the default limits
Case = tuple[dict[str, pd.DataFrame], dict[str, Any], str]
CASES: dict[str, Case] = {
    "n = 3": ({"north": frame(3, 1)}, {}, "the outcome model has 5 columns, and the study 3 records"),
    "a single silo": (
        {"north": TWO["north"]},
        {"policy": DEFAULT},
        "silo 'north': its policy asks for 2 silos (min_silos), and the study has 1",
    ),
    "a small silo": (
        {**TWO, "west": frame(12, 3)},
        {"policy": DEFAULT},
        "silo 'west': has 12 records, and its policy asks for 20 (min_rows)",
    ),
    "a constant column": (
        {name: constant(data) for name, data in TWO.items()},
        {},
        "column 'x': has the same value in every record of every silo",
    ),
    "a rare level": (
        {"north": TWO["north"], "south": rare(TWO["south"])},
        {"policy": DEFAULT},
        "silo 'south', column 'f': level 'w' has 3 records, and the policy asks for 5 (min_support)",
    ),
    "separation by a level": (
        {name: separated(data) for name, data in TWO.items()},
        {"treatment": "x + C(f)"},
        "column 'f': nobody with level 'w' is in arm '0': the treatment model is separated",
    ),
    "separation by a number": (
        {name: by_x(data) for name, data in TWO.items()},
        {},
        "treatment model: its response is perfectly predicted, mostly by x",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_validate_finds_what_stops_the_run(name: str, tmp_path: Path) -> None:
    frames, options, expected = CASES[name]
    path = written(tmp_path, frames, **options)
    found = [defect.text for defect in ft.validate(path).defects]
    assert any(expected in each for each in found), found
    file = ft.read_study(path)
    with pytest.raises(FedTMLEError):
        ft.run(file.study, file.silos)


@pytest.mark.parametrize("policy", [None, DEFAULT])
def test_a_study_that_runs_has_no_obstacles(policy: str | None, tmp_path: Path) -> None:
    path = written(tmp_path, TWO, policy=policy, treatment="x + C(f)")
    assert ft.validate(path).defects == ()
    file = ft.read_study(path)
    assert ft.run(file.study, file.silos).document["converged"]


def test_all_obstacles_come_at_once(tmp_path: Path) -> None:
    frames = {name: constant(rare(data)) for name, data in TWO.items()}
    path = written(tmp_path, {**frames, "west": frame(12, 3).assign(x=2.0)}, policy=DEFAULT)
    found = "\n".join(defect.text for defect in ft.validate(path).defects)
    for part in ("min_rows", "'north', column 'f': level 'w'", "'south', column 'f'", "'x': has the same"):
        assert part in found


def test_the_owner_of_a_silo_is_told_column_level_and_remedy(tmp_path: Path) -> None:
    """The server would learn a code alone."""
    path = written(tmp_path, {"north": TWO["north"], "south": rare(TWO["south"])}, policy=DEFAULT)
    view = preview(file_plan(ft.read_study(path)), read_silo_file(tmp_path / "south.toml"))
    assert view.refused_by == "min_support"
    assert any("column 'f': level 'w' has 3 records" in text for text in view.obstacles)
    text = " ".join(render_preview(view).split())
    assert "merge it with another level (levels in the silo file)" in text
    fine = preview(file_plan(ft.read_study(path)), read_silo_file(tmp_path / "north.toml"))
    assert fine.obstacles == ()
    assert "may still refuse one" in " ".join(render_preview(fine).split())


def advice(path: Path, name: str = "north") -> tuple[str, str]:
    """Return the key by which a silo would refuse, and what its owner reads of it."""
    view = preview(file_plan(ft.read_study(path)), read_silo_file(path.parent / f"{name}.toml"))
    return view.refused_by, " ".join(view.obstacles)


def test_an_arm_that_is_too_small_is_neither_merged_nor_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, TWO, policy="min_arm_rows = 80")
    key, words = advice(path)
    assert key == "min_arm_rows"
    assert "column 'a': arm '1' has 6" in words
    assert "none can be merged or left out: the owner may lower the limit, below 10 with a reason" in words
    assert "level" not in words
    stratified = path.read_text().replace('kind = "ATE"', 'kind = "ATE"\nstrata = "f"')
    path.write_text(stratified)
    assert "column 'f': level 'u' has" in advice(path)[1]
    assert "group the strata in the study" in advice(path)[1]


@pytest.mark.parametrize("key", ["max_epsilon", "max_epsilon_total"])
def test_a_study_with_too_little_noise_is_told_how_much_there_must_be(tmp_path: Path, key: str) -> None:
    path = written(tmp_path, TWO, policy=f"{key} = 0.5")
    remedy = "ask the statistician for a [privacy] section with epsilon of at most 0.5"
    refused, words = advice(path)
    assert refused == key
    assert f"the study adds no noise, and its policy asks for noise ({key} = 0.5); {remedy}" in words
    assert any(words in defect.text for defect in ft.validate(path).defects)
    path.write_text(f'{path.read_text()}\n[privacy]\nepsilon = 1.0\nserver = "trusted"\n')
    refused, words = advice(path)
    assert refused == key
    less = "the study adds less noise than its policy asks for: epsilon 1 at delta 1e-06"
    assert f"{less}, and {key} = 0.5; {remedy}" in words


def test_a_few_missing_outcomes_are_counted_by_arm(tmp_path: Path) -> None:
    first = int(np.flatnonzero(TWO["north"].a == 1)[0])
    frames = {**TWO, "north": TWO["north"].assign(y=TWO["north"].y.mask(TWO["north"].index == first))}
    path = written(tmp_path, frames, policy="min_missing = 3")
    path.write_text(path.read_text().replace("[silos]", '[models.missingness]\nformula = "a"\n[silos]'))
    key, words = advice(path)
    assert key == "min_missing"
    assert "column 'y': is missing in 1 of the records of arm '1', and the policy asks for none or 3" in words
    assert "the owner may also lower the limit, to 1 without a reason" in words


def test_a_key_without_advice_of_its_own_is_explained(tmp_path: Path) -> None:
    path = written(tmp_path, TWO, policy="max_queries = 1")
    key, words = advice(path)
    assert key == "max_queries"
    assert words.startswith(
        "max_queries is 1 in your policy: Queries answered in one study. Change it in [policy]"
    )


def test_missing_values_have_a_remedy_by_the_part_of_the_column(tmp_path: Path) -> None:
    gaps = {name: data.astype({"a": float}) for name, data in TWO.items()}
    for row, name in enumerate(("y", "a", "x", "f")):
        gaps["north"].loc[row, name] = np.nan
    path = written(tmp_path, gaps, policy=DEFAULT)
    found = {each.column: each.fix for each in ft.validate(path).defects if "is missing" in each.message}
    covariate = 'it is a covariate, and the study can declare missing = "impute" or "indicator"'
    assert "it is the outcome, and the study can have a model of its missingness" in found["y"]
    assert (
        'it is the treatment, and the study can leave such records out, with missing = "omit"' in found["a"]
    )
    assert covariate in found["x"]
    assert covariate in found["f"]

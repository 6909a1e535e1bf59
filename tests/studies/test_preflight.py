"""Table 1 by arm before a study runs: the table of all rows, rounded once the silos are added up."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.studies import preflight as room
from fedtmle.studies.preflight import Preflight, baseline
from fedtmle.studyfile.file import StudyFile
from fedtmle.targets.diagnostics import Characteristic
from fedtmle.text.preflight import render_preflight
from tests.declare import declare
from tests.effects.longhand import irls

STUDY = ft.Study(
    target=ft.ATE(outcome="y", treatment="a"),
    outcome_model=ft.GLM("a + x + b + C(f)"),
    treatment_model=ft.GLM("x"),
    missingness_model=ft.GLM("x"),
    variables=declare(y=(-9, 9), a="binary", x=(-20, 30), b="binary", f=["u", "v", "w"]),
)


def frame(n: int, seed: int) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    return pd.DataFrame(
        {
            "y": rng.normal(size=n),
            "a": rng.integers(0, 2, size=n),
            "x": rng.normal(5, 2, size=n).round(2),
            "b": rng.integers(0, 2, size=n),
            "f": rng.choice(["u", "v", "w"], size=n),
        }
    )


def study_file(folder: Path, frames: dict[str, pd.DataFrame]) -> StudyFile:
    silos = {}
    for name, data in frames.items():
        silos[name] = folder / f"{name}.csv"
        data.to_csv(silos[name], index=False)
    return StudyFile(path=folder / "study.toml", study=STUDY, silos=silos)


def preflight(file: StudyFile, silo: str | None = None) -> Preflight:
    return room.preflight(file.study, file.silos, silo=silo)


def line(view: Preflight, name: str, level: str | None = None) -> Characteristic:
    return next(line for line in view.lines if (line.name, line.level) == (name, level))


def test_large_silos_pool_to_the_table_of_all_rows(tmp_path: Path) -> None:
    frames = {"one": frame(300, 1), "two": frame(200, 2)}
    view = preflight(study_file(tmp_path, frames))
    rows = pd.concat(frames.values())
    by_arm = rows.groupby("a")
    assert [count.count for count in view.arm_counts] == by_arm.size().tolist()
    x = line(view, "x")
    assert x.silos == 2
    assert (np.abs(np.array(x.mean) - by_arm.x.mean()) <= 50 / by_arm.size() * 1.3).all()
    assert x.sd == ()  # of a range of 25 deviations one person could be most of the squares
    assert x.difference is None
    large = preflight(study_file(tmp_path, {"one": frame(2000, 1), "two": frame(1500, 2)}))
    rows = pd.concat([frame(2000, 1), frame(1500, 2)])
    of_arm = rows.groupby("a").x
    x = line(large, "x")
    assert x.sd == pytest.approx(of_arm.std().tolist(), rel=0.05)
    error = of_arm.std() / np.sqrt(rows.groupby("a").size())  # a mean is rounded to 1 to 2.5 of this
    assert (np.abs(np.array(x.mean) - of_arm.mean()) <= 1.3 * error).all()
    assert x.difference == pytest.approx((x.mean[1] - x.mean[0]) / np.mean(x.sd), abs=1e-3)
    rows = pd.concat(frames.values())
    assert line(view, "b", "1").sd is None  # 0 and 1: a share
    assert (np.abs(np.array(line(view, "b", "1").mean) - by_arm.b.mean()) * by_arm.size() <= 2.5).all()
    shares = rows.assign(u=rows.f == "u").groupby("a").u.mean()
    assert (np.abs(np.array(line(view, "f", "u").mean) - shares) * by_arm.size() <= 2.5).all()
    assert [count.count for count in view.missing] == [0] * 5


def test_a_small_cell_is_rounded_once_the_silos_are_added_up(tmp_path: Path) -> None:
    rare = frame(200, 2)
    rare["f"] = np.where(np.arange(200) < 6, "u", rare.f.replace("u", "v"))
    frames = {"one": frame(300, 1), "two": rare}
    shown = line(preflight(study_file(tmp_path, frames)), "f", "u")
    rows = pd.concat(frames.values())
    shares = rows.assign(u=rows.f == "u").groupby("a").u.agg(["mean", "size"])
    assert shown.silos == 2
    assert (np.abs(np.array(shown.mean) - shares["mean"]) * shares["size"] <= 2.5).all()
    alone = line(preflight(study_file(tmp_path, {"two": rare})), "f", "u")
    counts = np.array(alone.mean) * rare.groupby("a").size().to_numpy()
    assert set(np.round(counts, 6)) <= {0.0, 5.0}  # six people in two arms


def test_nothing_by_arm_is_shown_of_a_small_arm(tmp_path: Path) -> None:
    lopsided = frame(100, 3)
    lopsided["a"] = (np.arange(100) < 4).astype(int)
    both = preflight(study_file(tmp_path, {"one": frame(300, 1), "two": lopsided}))
    assert {line.silos for line in both.lines} == {2}  # the arm is large in all silos together
    alone = preflight(study_file(tmp_path, {"two": lopsided}))
    assert all(line.silos == 0 and line.mean == () for line in alone.lines)
    assert [count.count for count in alone.arm_counts] in ([100, 0], [95, 5])
    assert "hidden" in render_preflight(alone)
    assert (
        len(re.findall(r"^f\b", render_preflight(alone), flags=re.MULTILINE)) == 1
    )  # its levels in one line
    assert "96" not in render_preflight(alone)


@pytest.mark.parametrize(("lost", "told"), [(0, {0}), (2, {0}), (3, {0, 5}), (13, {15}), (60, {60})])
def test_missing_values_are_counted_in_multiples_of_the_floor(
    tmp_path: Path, lost: int, told: set[int]
) -> None:
    data = frame(300, 1)
    data.loc[np.arange(300) < lost, "x"] = np.nan
    view = preflight(study_file(tmp_path, {"one": data, "two": frame(200, 2)}))
    counts = {count.name: count for count in view.missing}
    assert counts["x"].count in told
    assert view.lost[0].count in {*told, lost}  # a table of large cells is exact
    assert line(view, "x").silos == 2


def test_who_is_lost_at_a_step_is_not_lost_again(tmp_path: Path) -> None:
    data = frame(300, 1)
    data.loc[np.arange(300) < 40, "x"] = np.nan
    data.loc[(np.arange(300) >= 20) & (np.arange(300) < 80), "y"] = np.nan
    view = preflight(study_file(tmp_path, {"one": data}))
    assert [count.count for count in view.lost] == [40, 40]
    assert {count.name: count.count for count in view.missing}["y"] == 60


def test_outcomes_by_arm_are_nowhere_in_it(tmp_path: Path) -> None:
    view = preflight(study_file(tmp_path, {"one": frame(300, 1)}))
    assert "y" not in {line.name for line in view.lines}
    assert "y" in {count.name for count in view.missing}


def test_predictions_weights_and_clusters_are_no_characteristics() -> None:
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.Supplied("q0", "q1"),
        treatment_model=ft.GLM("x"),
        weights="b",
        cluster="f",
        variables=declare(STUDY.variables, f="identifier"),
    )
    what = baseline(study)
    assert [number.name for number in what.numbers] == ["x"]
    assert what.factors == {}


def test_one_silo_in_full_for_its_owner(tmp_path: Path) -> None:
    data = frame(30, 4)
    data.loc[:2, "y"] = np.nan
    file = study_file(tmp_path, {"one": frame(300, 1), "two": data})
    view = preflight(file, silo="two")
    assert [count.count for count in view.arm_counts] == data.groupby("a").size().tolist()
    assert {count.name: count.count for count in view.missing}["y"] == 3
    assert "hidden" not in render_preflight(view).partition("Each line")[0]
    assert "in full, for its owner" in render_preflight(view)


def test_the_command(tmp_path: Path) -> None:
    runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})
    runner.invoke(app, ["init", str(tmp_path), "--all-keys"])
    study = str(tmp_path / "study.toml")
    text = runner.invoke(app, ["preflight", study])
    assert text.exit_code == 0, text.output
    assert max(map(len, text.output.splitlines())) <= 80
    document = json.loads(runner.invoke(app, ["preflight", study, "--json"]).stdout)
    assert document["n_rows"] == 400
    assert [count["count"] for count in document["arm_counts"]] == [237, 163]
    own = runner.invoke(app, ["preflight", study, "--silo", "south"])
    assert "160 records" in own.output
    assert runner.invoke(app, ["preflight", study, "--silo", "nowhere"]).exit_code == 2


# Overlap: the study's own treatment model, its histogram by arm from what each silo may tell.


def cells(view: Preflight) -> list[dict[str, Any]]:
    assert view.overlap is not None
    assert view.overlap.problem is None
    return list(view.overlap.histograms)


def test_overlap_is_the_histogram_of_the_pooled_fit(tmp_path: Path) -> None:
    frames = {"one": frame(3000, 1), "two": frame(2000, 2)}
    for data in frames.values():
        chance = 1 / (1 + np.exp(-(data.x - 5) / 2))
        data["a"] = (np.random.default_rng(7).random(len(data)) < chance).astype(int)
    rows = pd.concat(frames.values())
    X = np.column_stack([np.ones(len(rows)), rows.x])
    g = 1 / (1 + np.exp(-X @ irls(X, rows.a.to_numpy(dtype=float), np.ones(len(rows)))))
    found = cells(preflight(study_file(tmp_path, frames)))
    assert [(each["probability_of"], each["arm"]) for each in found] == [("1", "0"), ("1", "1")]
    for arm, each in enumerate(found):
        expected, _ = np.histogram(g[rows.a == arm], bins=each["edges"])
        assert each["hidden_in"] == [0] * len(expected)
        # Sums of neighbours are multiples of 5: few people are moved over an edge.
        moved = np.abs(np.cumsum(each["counts"]) - np.cumsum(expected))
        assert moved.max() < 2 * 5
        assert sum(count > 0 for count in each["counts"]) >= 8
        assert sum(each["counts"]) == (rows.a == arm).sum()


def test_the_strictest_floor_of_the_silo_files_holds_and_no_study_can_lower_it(tmp_path: Path) -> None:
    frames = {"one": frame(300, 1), "two": frame(200, 2)}
    file = study_file(tmp_path, frames)
    (tmp_path / "two.toml").write_text(
        '[silo]\nname = "two"\n[data]\npath = "two.csv"\n[policy]\nmin_cell = 40\n', encoding="utf-8"
    )
    strict = preflight(
        StudyFile(path=file.path, study=file.study, silos={**file.silos, "two": tmp_path / "two.toml"})
    )
    assert (preflight(file).floor, strict.floor) == (5, 40)
    assert "nothing is said about fewer than 40" in render_preflight(strict)
    told = [count for each in cells(strict) for count in each["counts"] if count]
    assert told
    assert min(told) >= 40


def test_a_treatment_model_that_cannot_be_fitted_is_told_beside_the_table(tmp_path: Path) -> None:
    data = frame(300, 1)
    data["x"] = data.a + 0.0
    view = preflight(study_file(tmp_path, {"one": data, "two": data}))
    assert view.overlap is not None
    assert "perfectly predicted" in str(view.overlap.problem)
    assert "The treatment model could not be fitted" in render_preflight(view)
    assert "records" in render_preflight(view)


def test_rows_without_a_covariate_or_an_outcome_do_not_stop_the_overlap(tmp_path: Path) -> None:
    data = frame(400, 1)
    data.loc[:39, "x"] = np.nan
    data.loc[100:160, "y"] = np.nan
    file = study_file(tmp_path, {"one": data, "two": frame(200, 2)})
    without = dataclasses.replace(file.study, missingness_model=None)
    view = preflight(StudyFile(path=file.path, study=without, silos=file.silos))
    assert view.overlap is not None
    assert view.overlap.n_rows == 560
    assert "P(1)" in render_preflight(view)
    own = preflight(file, silo="one")
    assert own.overlap is not None
    histograms: Any = own.overlap.histograms
    assert sum(sum(each["counts"]) for each in histograms) == 360  # in full, for its owner


@pytest.mark.parametrize("value", [0.0, 7.25])
def test_a_constant_column_keeps_its_value(tmp_path: Path, value: float) -> None:
    frames = {"one": frame(300, 1).assign(x=value), "two": frame(200, 2).assign(x=value)}
    view = preflight(study_file(tmp_path, frames))
    assert line(view, "x").mean == ()
    assert re.search(r"^x +hidden +hidden +-$", render_preflight(view), flags=re.MULTILINE)
    assert "7.25" not in json.dumps(view.to_dict())


def test_labels_units_and_words_are_those_of_the_dictionary() -> None:
    variables = ft.Variables(
        {
            **STUDY.variables,
            "a": {"kind": "binary", "levels": {"0": "usual care", "1": "exercise"}},
            "x": {"kind": "number", "range": (-20, 30), "label": "Haemoglobin", "unit": "g/dL"},
            "b": {"kind": "binary", "label": "Current smoker"},
            "f": {"kind": "category", "levels": {"u": "urban", "v": "village", "w": ""}, "label": "Home"},
        }
    )
    study = dataclasses.replace(STUDY, variables=variables)
    view = room.preflight(study, {"one": frame(300, 1), "two": frame(200, 2)})
    text = render_preflight(view)
    for words in ("usual care", "exercise", "Haemoglobin (g/dL)", "Current smoker", "Home: urban", "Home: w"):
        assert words in text
    assert view.to_dict()["labels"]["x"] == "Haemoglobin (g/dL)"  # type: ignore[index]

"""Preflight: what leaves a silo is thresholded, complements too; the pooled view is made of that alone."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.protocol.bins import visible
from fedtmle.studies import preflight as room
from fedtmle.studies.preflight import (
    Preflight,
    SiloTable,
    describe_silo,
    table1_columns,
    thresholded,
)
from fedtmle.studyfile.file import StudyFile
from fedtmle.studyfile.schema import schema_of
from fedtmle.targets.diagnostics import Characteristic
from fedtmle.text.preflight import render_preflight
from tests.declare import declare
from tests.effects.longhand import irls
from tests.narrow import load
from tests.premise import Premise

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
    assert np.allclose(x.mean, by_arm.x.mean())
    assert x.sd is not None
    assert np.allclose(x.sd, by_arm.x.std())
    spread = math.sqrt(by_arm.x.var().mean())
    assert x.difference == pytest.approx((x.mean[1] - x.mean[0]) / spread)
    assert line(view, "b", "1").sd is None  # 0 and 1: a share
    assert np.allclose(line(view, "b", "1").mean, by_arm.b.mean())
    shares = rows.assign(u=rows.f == "u").groupby("a").u.mean()
    assert np.allclose(line(view, "f", "u").mean, shares)
    assert [count.count for count in view.missing] == [0] * 5


def test_a_small_cell_hides_its_line_in_that_silo_only(tmp_path: Path) -> None:
    rare = frame(200, 2)
    rare["f"] = np.where(np.arange(200) < 6, "u", rare.f.replace("u", "v"))
    frames = {"one": frame(300, 1), "two": rare}
    view = preflight(study_file(tmp_path, frames))
    shown = line(view, "f", "u")
    assert shown.silos == 1
    one = frames["one"].assign(u=frames["one"].f == "u").groupby("a").u.mean()
    assert np.allclose(shown.mean, one)
    assert line(view, "x").silos == 2


@pytest.mark.parametrize(("rare", "silos"), [(3, 1), (40, 2)])
def test_sums_of_few_values_are_counts_in_disguise(tmp_path: Path, rare: int, silos: int) -> None:
    """Of 0, 1 and 2 the sum and the sum of squares tell how many have each."""
    data = frame(300, 1)
    data["x"] = np.where(np.arange(300) < rare, 2, np.arange(300) % 2)
    view = preflight(study_file(tmp_path, {"one": data, "two": frame(200, 2)}))
    assert line(view, "x").silos == silos


def test_a_silo_whose_arm_is_small_shows_nothing_by_arm(tmp_path: Path) -> None:
    lopsided = frame(100, 3)
    lopsided["a"] = (np.arange(100) < 4).astype(int)
    view = preflight(study_file(tmp_path, {"one": frame(300, 1), "two": lopsided}))
    assert [count.silos for count in view.arm_counts] == [1, 1]
    assert {line.silos for line in view.lines} == {1}
    assert "1 of 2 silos have at least 5 records in every arm" in " ".join(render_preflight(view).split())
    alone = preflight(study_file(tmp_path, {"two": lopsided}))
    assert all(line.silos == 0 and line.mean == () for line in alone.lines)
    assert "hidden" in render_preflight(alone)
    assert (
        len(re.findall(r"^f\b", render_preflight(alone), flags=re.MULTILINE)) == 1
    )  # its levels in one line
    assert "96" not in render_preflight(alone).replace("2 silos", "")


@pytest.mark.parametrize(("lost", "told"), [(0, 0), (4, None), (12, None), (60, 60)])
def test_missing_values_are_counted_only_where_every_arm_lost_none_or_enough(
    tmp_path: Path, lost: int, told: int | None
) -> None:
    """Twelve are above the floor, but not in each arm: with sums by arm they would tell both parts."""
    data = frame(300, 1)
    data.loc[: lost - 1, "x"] = np.nan
    if lost == 60:
        data["a"] = np.arange(300) % 2
    if lost == 12:
        data["a"] = (np.arange(300) % 4 == 0).astype(int)
    view = preflight(study_file(tmp_path, {"one": data, "two": frame(200, 2)}))
    counts = {count.name: count for count in view.missing}
    two = 0 if told is None else told
    assert counts["x"].count == two
    assert counts["x"].silos == (1 if told is None else 2)
    assert view.lost[0].silos == counts["x"].silos
    assert line(view, "x").silos == (1 if told is None else 2)


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
    what = table1_columns(study)
    assert what.numeric == ("x",)
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


def sums(table: SiloTable) -> list[int]:
    """Every count that is a function of what left the silo by one subtraction within a total."""
    told: list[int] = []
    if None in table.arms and table.arms != (None, None):
        told.append(table.n_rows - sum(count for count in table.arms if count is not None))
    told += [count for count in table.arms if count is not None]
    for name in {name for name, _ in table.levels}:
        for a, arm in enumerate(table.arms):
            cells = [counts[a] for (factor, _), counts in table.levels.items() if factor == name]
            seen = [cell for cell in cells if cell is not None]
            told += seen
            if seen and arm is not None and None in cells:
                told.append(arm - sum(seen))
    for by_arm in table.numeric.values():
        for moments, arm in zip(by_arm, table.arms, strict=True):
            if moments is not None and arm is not None:
                told.append(moments.count)
                told += [arm - moments.count] if arm > moments.count else []
                told += [moments.smallest_cell] if moments.smallest_cell is not None else []
    told += [lost.count for lost in table.missing.values() if lost is not None and lost.count]
    return told


is_shown = Premise("a count is shown", at_least=0.25)


@is_shown
@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    n=st.integers(20, 200),
    gaps=st.floats(0, 0.4),
    treated=st.floats(0.05, 0.95),
    floor=st.integers(2, 15),
)
def test_no_count_below_the_floor_leaves_a_silo(
    seed: int, n: int, gaps: float, treated: float, floor: int
) -> None:
    rng = np.random.default_rng(seed)
    data = frame(n, seed)
    data["a"] = (rng.random(n) < treated).astype(int)
    data["x"] = data.x.mask(rng.random(n) < gaps)
    schema = schema_of(STUDY)
    lenient = type(schema)(tuple(type(c)(**{**vars(c), "may_be_missing": True}) for c in schema.columns))
    table = load(data, lenient, silo="one")
    left = thresholded(describe_silo(table1_columns(STUDY), table), floor)
    shown = list(sums(left))
    if is_shown.holds(shown):
        assert min(shown) >= floor


is_partly_hidden = Premise("some counts are shown and others are not", at_least=0.06)


@is_partly_hidden
@given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    rest=st.integers(0, 30),
    floor=st.integers(1, 12),
)
def test_what_is_hidden_of_a_total_is_nothing_or_at_least_the_floor(
    counts: list[int], rest: int, floor: int
) -> None:
    shown = visible(counts, sum(counts) + rest, floor)
    seen = [count for count in shown if count is not None]
    assert all(count >= floor for count in seen)
    hidden = sum(counts) + rest - sum(seen)
    is_partly_hidden.holds(seen and None in shown)
    assert not seen or hidden >= floor or (hidden == 0 and None not in shown)
    assert all(a is None or a == b for a, b in zip(shown, counts, strict=True))


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
        # Each of two silos joins bins of fewer than 5 with a neighbour: few people are moved over an edge.
        moved = np.abs(np.cumsum(each["counts"]) - np.cumsum(expected))
        assert moved.max() < 2 * 5
        assert (moved == 0).mean() > 0.7
        assert sum(count > 0 for count in each["counts"]) >= 8
        assert sum(each["counts"]) == (rows.a == arm).sum()


def test_a_table_from_some_silos_only_says_so_and_claims_no_balance(tmp_path: Path) -> None:
    frames = {"one": frame(2000, 1), "two": frame(2000, 2)}
    for data in frames.values():
        data["a"] = np.arange(2000) % 2
    whole = render_preflight(preflight(study_file(tmp_path, frames)))
    assert "No characteristic differs between the arms" in whole.replace("\n", " ")
    assert "of some silos only" not in whole
    frames["two"]["a"] = (np.arange(2000) < 3).astype(int)  # three people in an arm: nothing by arm is shown
    part = render_preflight(preflight(study_file(tmp_path, frames)))
    assert "of some silos only" in part
    assert "does not say whether these are balanced" in part.replace("\n", " ")
    assert "No characteristic differs" not in part


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
    assert "cells below 40 stay in their silo" in render_preflight(strict)
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
def test_a_constant_column_says_so_and_keeps_its_value(tmp_path: Path, value: float) -> None:
    frames = {"one": frame(300, 1).assign(x=value), "two": frame(200, 2).assign(x=value)}
    view = preflight(study_file(tmp_path, frames))
    assert line(view, "x").constant
    assert line(view, "x").mean == ()
    assert re.search(r"^x +one value +one value +- +2 of 2$", render_preflight(view), flags=re.MULTILINE)
    assert "7.25" not in json.dumps(view.to_dict())
    mixed = preflight(study_file(tmp_path, {**frames, "two": frame(200, 2)}))
    assert (line(mixed, "x").constant, line(mixed, "x").silos) == (False, 1)


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

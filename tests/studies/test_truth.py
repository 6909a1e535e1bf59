"""What a new user tried, on studies with known truth, and what the product says now: one test per row.

The rows are those of the table of the issue "A study that tells the truth about its data", in its order. Each
quotes what happened before. The parts are tested closely elsewhere: sites in `tests/effects/test_sites.py`,
overlap in `test_overlap.py`, hints in `tests/studies/test_hints.py`, obstacles in `test_obstacles.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from typer.testing import Result

import fedtmle as ft
from fedtmle.report import page
from tests.command import invoke
from tests.effects import longhand
from tests.effects.studies import expit
from tests.studies.test_silo_variable import HOSPITALS, hospitals

Frames = Mapping[str, pd.DataFrame]
BINARY = {"y": '{kind = "binary"}', "a": '{kind = "binary"}'}
NUMBER = '{kind = "number", range = [-8, 8]}'


def write(
    folder: Path,
    frames: Frames,
    variables: Mapping[str, str],
    *,
    outcome: str = "a + x",
    treatment: str = "x",
    target: str = 'kind = "ATE"',
    options: str = "",
    policies: Mapping[str, str] | None = None,
    files: bool = True,
) -> Path:
    """Write a study file and its tables, as a user has them; ``files``: with silo files and policies."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, frame in frames.items():
        frame.to_csv(folder / f"{name}.csv", index=False)
        policy = "release = true\n" + (policies or {}).get(name, "")
        text = f'[silo]\nname = "{name}"\n[data]\npath = "{name}.csv"\n[policy]\n{policy}\n'
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    declared = "\n".join(f"{name} = {entry}" for name, entry in variables.items())
    silos = "\n".join(f'{name} = "{name}.{"toml" if files else "csv"}"' for name in frames)
    path = folder / "study.toml"
    path.write_text(
        f'[target]\n{target}\noutcome = "y"\ntreatment = "a"\n[variables]\n{declared}\n'
        f'[models.outcome]\nformula = "{outcome}"\n[models.treatment]\nformula = "{treatment}"\n'
        f"[options]\n{options}\n[silos]\n{silos}\n",
        encoding="utf-8",
    )
    return path


def run(path: Path) -> tuple[Result, dict[str, Any]]:
    """`fedtmle run`, and the result's document."""
    out = path.with_name("result.json")
    ran = invoke("run", path, "--quiet", "--out", out)
    return ran, json.loads(out.read_text()) if out.exists() else {}


def words(text: str) -> str:
    return " ".join(text.split())


def split(data: Mapping[str, np.ndarray], count: int) -> dict[str, pd.DataFrame]:
    frame = pd.DataFrame(data)
    return {f"s{m}": frame.iloc[rows] for m, rows in enumerate(np.array_split(np.arange(len(frame)), count))}


def test_1_hospitals_that_differ_and_no_effect_at_any(tmp_path: Path) -> None:
    """Was: effect 0.168, p < 0.001, no word; own estimates 0.237 and 0.293 instead of -0.027 and -0.033."""
    frames = {name: frame.drop(columns="site") for name, frame in hospitals(600).items()}
    variables = {**BINARY, "age": '{kind = "number", range = [-6, 6]}'}
    path = write(tmp_path, frames, variables, outcome="a + age", treatment="age")
    for said in (invoke("validate", path).output, invoke("preflight", path).output):
        assert "differ between silos beyond what the models explain" in words(said)
    ran, document = run(path)
    assert document["estimates"][0]["estimate"] > 0.1  # what the models ask for, and wrong
    assert "differ between silos beyond what the models explain" in words(ran.output)
    assert "Add C(silo) to the formulas" in words(ran.output)
    study = ft.read_study(path).study
    for name in HOSPITALS:  # each hospital's own estimate is the TMLE of its own records
        (own,), (alone,) = document["silos"][name], ft.run(study, {name: frames[name]}).document["estimates"]
        assert own["estimate"] == pytest.approx(alone["estimate"], abs=1e-4)
        assert own["conf_low"] < 0 < own["conf_high"]
    (line,) = document["heterogeneity"]
    assert line["p_value"] > 0.05
    assert line["summaries"][0]["conf_low"] < 0 < line["summaries"][0]["conf_high"]
    mended = write(
        tmp_path / "mended", frames, variables, outcome="a + age + C(silo)", treatment="age + C(silo)"
    )
    (row,) = run(mended)[1]["estimates"]
    assert row["conf_low"] < 0 < row["conf_high"]
    assert "between silos" not in invoke("validate", mended).output


def test_2_half_of_the_scores_truncated(tmp_path: Path) -> None:
    """Was: +0.101 (truth -0.068), p = 0.022, no warning, a green badge, exit code 0."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=1800).clip(-7, 7)
    a = (rng.random(1800) < expit(12 * x)).astype(int)
    y = (rng.random(1800) < expit(0.6 * x - 0.5 * a * x - 0.3 * a)).astype(int)
    truth = (expit(0.1 * x - 0.3) - expit(0.6 * x)).mean()
    assert -0.08 < truth < -0.05
    frames, variables = split({"x": x, "a": a, "y": y}, 3), {**BINARY, "x": NUMBER}
    ran, document = run(write(tmp_path, frames, variables, files=False))
    assert sum(document["truncated"]) > 890
    assert ran.exit_code == 5
    assert words(ran.output).index("Poor overlap") < words(ran.output).index("std. error")
    assert any("the estimate depends on the bound" in warning for warning in document["warnings"])
    (row,) = document["estimates"]
    assert not row["conf_low"] < truth < row["conf_high"]  # it is wrong, and says so
    estimates = [row["estimate"] for line in document["ladder"] for row in line["estimates"]]
    assert max(estimates) - min(estimates) > 0.02  # and how far it depends on the bound
    html = page.render(document)
    assert "Warning: poor overlap" in html
    assert 'class="status noted"' in html  # no green badge
    _, document = run(write(tmp_path / "ato", frames, variables, target='kind = "ATO"', files=False))
    weight = expit(12 * x) * expit(-12 * x)
    truth = np.average(expit(0.1 * x - 0.3) - expit(0.6 * x), weights=weight)
    (row,) = document["estimates"]
    assert row["conf_low"] < truth < row["conf_high"]


def test_3_labels_and_units_that_differ_between_sites(tmp_path: Path) -> None:
    """Was: f/m, F/M and "f "; 01 and 1; creatinine in mg/dL: six levels, "No mistakes found"."""
    rng = np.random.default_rng(2)
    frames = {}
    for name in ("north", "south", "west"):
        columns = {"y": rng.integers(0, 2, 200), "a": rng.integers(0, 2, 200)}
        columns |= {"sex": rng.choice(["f", "m"], 200), "ward": rng.choice(["1", "2"], 200)}
        frames[name] = pd.DataFrame({**columns, "creatinine": rng.uniform(50.5, 140.5, 200).round(1)})
    frames["south"]["sex"] = frames["south"].sex.str.upper()
    frames["south"]["ward"] = "0" + frames["south"].ward
    frames["west"]["sex"] = frames["west"].sex.replace("f", "f ")
    frames["west"]["creatinine"] = (frames["west"].creatinine / 88.42).round(3)
    variables = {
        **BINARY,
        "sex": '{kind = "category", levels = ["f", "m"]}',
        "ward": '{kind = "category", levels = ["1", "2"]}',
        "creatinine": '{kind = "number", range = [20, 1500], unit = "umol/L"}',
    }
    path = write(tmp_path, frames, variables, outcome="a + C(sex) + C(ward) + creatinine", treatment="C(sex)")
    for name in (
        "south",
        "west",
    ):  # a .csv has no types: there, blanks around a label and 01 for 1 are nothing
        frames[name].to_parquet(tmp_path / f"{name}.parquet")
        silo = tmp_path / f"{name}.toml"
        silo.write_text(silo.read_text().replace(".csv", ".parquet"))
    checked = invoke("validate", path)
    assert checked.exit_code != 0
    said = words(checked.output)
    for expected in (
        "silo 'south', column 'sex': has labels that differ from the declared level 'f' in upper and lower "
        f"case only, in {(frames['south'].sex == 'F').sum()} rows",
        "silo 'south', column 'ward': has labels that differ from the declared level '1' in how the number "
        f"is written, such as 01 for 1 only, in {(frames['south'].ward == '01').sum()} rows",
        "silo 'west', column 'sex': has labels that differ from the declared level 'f' in blanks around it "
        f"only, in {(frames['west'].sex == 'f ').sum()} rows",
        "silo 'west', column 'creatinine': is outside the declared range 20 to 1500 in 200 rows",
        "scale = 88.42 would fit (creatinine in mg/dL instead of umol/L)",
    ):
        assert expected in said, expected
    assert "silo 'north'" not in said
    assert "'F'" not in said
    assert not [value for value in map(str, frames["west"].creatinine) if len(value) > 3 and value in said]
    mended = {
        "south": 'sex = {levels = {F = "f", M = "m"}}\nward = {levels = {01 = "1", 02 = "2"}}',
        "west": 'sex = {levels = {"f " = "f", m = "m"}}\ncreatinine = {scale = 88.42}',
    }
    for name, lines in mended.items():
        silo = tmp_path / f"{name}.toml"
        silo.write_text(f"{silo.read_text()}[columns]\n{lines}\n")
    assert words(invoke("validate", path).output).endswith("No defects found.")


def test_4_a_binary_outcome(tmp_path: Path) -> None:
    """Was: fitted as gaussian without `outcome_type`, silently: 0.0136 instead of 0.0080."""
    rng = np.random.default_rng(4)
    x = rng.normal(size=900).clip(-7, 7)
    a = (rng.random(900) < expit(0.8 * x)).astype(int)
    y = (rng.random(900) < expit(-3 + 1.2 * x + 0.3 * a)).astype(int)
    path = write(tmp_path, split({"x": x, "a": a, "y": y}, 3), {**BINARY, "x": NUMBER})
    document = run(path)[1]
    (row,) = document["estimates"]
    one = np.ones(900)
    beta, gamma = (
        longhand.irls(np.column_stack(columns), response, one)
        for columns, response in (((one, a, x), y), ((one, x), a))
    )
    score = expit(gamma[0] + gamma[1] * x)
    q = np.stack([expit(beta[0] + beta[1] * arm + beta[2] * x) for arm in (0, 1)])
    means = longhand.tmle(
        y=y.astype(float),
        observed=one.astype(bool),
        arm=a,
        q=q,
        g=np.stack([1 - score, score]),
        pi=one,
        d=np.eye(2)[:, :, None] * one,
        v=np.ones((2, 900)),
        expected=np.ones((2, 900)),
        w=one,
        floor=5 / np.sqrt(900) / np.log(900),
    )
    assert row["estimate"] == pytest.approx(means.psi[1] - means.psi[0], abs=1e-4 * row["std_error"])
    spread = np.sqrt(np.array([-1, 1]) @ means.covariance @ np.array([-1, 1]))
    assert row["std_error"] == pytest.approx(spread, rel=1e-4)
    path.write_text(path.read_text().replace('y = {kind = "binary"}\n', ""))
    refused = invoke("run", path, "--quiet")
    assert refused.exit_code != 0
    assert "'y'" in refused.output
    assert "[variables]" in refused.output


def test_5_a_covariate_with_missing_values(tmp_path: Path) -> None:
    """Was: the study stops, and there is no remedy in the product."""
    rng = np.random.default_rng(5)
    x = rng.normal(size=1200).clip(-7, 7)
    a = (rng.random(1200) < expit(0.6 * x)).astype(int)
    y = (0.5 * a + x + rng.normal(size=1200)).clip(-12, 12)
    seen = np.where(rng.random(1200) < expit(-1.4 + 0.4 * y), np.nan, x)
    frames = split({"x": seen, "a": a, "y": y}, 3)
    variables = {**BINARY, "y": '{kind = "number", range = [-12, 12]}', "x": NUMBER}
    refused = invoke("validate", write(tmp_path, frames, variables))
    assert refused.exit_code != 0
    assert "column 'x'" in words(refused.output)
    assert 'missing = "impute"' in words(refused.output)
    for how in ("impute", "indicator"):
        changed = {**variables, "x": NUMBER.replace("}", f', missing = "{how}"}}')}
        ran, document = run(write(tmp_path / how, frames, changed))
        assert document["missing"]["x"] == {**document["missing"]["x"], "count": int(np.isnan(seen).sum())}
        if how == "impute":  # missing at random: right
            (row,) = document["estimates"]
            assert row["conf_low"] < 0.5 < row["conf_high"]
            assert 0 < document["imputation"]["estimands"][0]["missing_information"] < 1
            assert "over 5 imputed data sets" in words(ran.output)


def test_6_calibration_of_small_hospitals(tmp_path: Path) -> None:
    """Was, with small bins hidden: 33 % observed against 27 % predicted; truth 23 % against 23 %."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=2400).clip(-7, 7)
    a = (rng.random(2400) < expit(0.3 * x)).astype(int)
    y = (rng.random(2400) < expit(-1.3 + 0.8 * x)).astype(int)
    assert 0.22 < y.mean() < 0.26
    document = run(write(tmp_path, split({"x": x, "a": a, "y": y}, 12), {**BINARY, "x": NUMBER}))[1]
    table = document["diagnostics"]["outcome_fit"]["calibration"]
    assert sum(table["counts"]) == 2400
    assert not any(table["hidden_in"])
    for key in ("observed", "initial", "targeted"):
        shown = sum(c * m for c, m in zip(table["counts"], table[key], strict=True) if c) / 2400
        assert shown == pytest.approx(y.mean(), abs=1e-9 if key == "observed" else 0.005), key
    # Where the model is right, so is every line of the table.
    for observed, predicted, count in zip(table["observed"], table["initial"], table["counts"], strict=True):
        assert not count or abs(observed - predicted) < 4 * np.sqrt(predicted * (1 - predicted) / count)


def test_7_percentages_of_the_overlap_table(tmp_path: Path) -> None:
    """Was: "684 (111 %)" of an arm. More scores of an arm may be truncated than it has records."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=1800).clip(-7, 7)
    a = ((rng.random(1800) < expit(4 * x)) & ((x > 1.2) | (rng.random(1800) < 0.1))).astype(int)
    y = (rng.random(1800) < expit(0.6 * x)).astype(int)
    ran, document = run(write(tmp_path, split({"x": x, "a": a, "y": y}, 3), {**BINARY, "x": NUMBER}))
    below, in_arm = document["truncated"][1], document["arm_counts"][1]
    assert below > in_arm
    assert f"{below:,} of 1,800" in ran.output
    html = page.render(document)
    assert f"truncated in {below:,} of 1,800 records" in html
    for shown in (ran.output, re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)):
        percentages = [float(number) for number in re.findall(r"(\d+(?:\.\d+)?)\s?%", shown)]
        assert percentages
        assert max(percentages) <= 100


def test_8_what_would_stop_the_run_is_found_before_it(tmp_path: Path) -> None:
    """Was: `validate` says "No mistakes found", and `run` stops; one refusing silo ends the study."""
    rng = np.random.default_rng(8)

    def frame(n: int) -> pd.DataFrame:
        x, ward = rng.normal(size=n).clip(-7, 7), rng.choice(["u", "v"], n)
        a = np.arange(n) % 2
        return pd.DataFrame({"x": x, "ward": ward, "a": a, "y": (rng.random(n) < expit(x)).astype(int)})

    variables = {**BINARY, "x": NUMBER, "ward": '{kind = "category", levels = ["u", "v"]}'}
    rare = frame(120).assign(ward=["v"] * 3 + ["u"] * 117)
    for name, (frames, expected) in {
        "three": ({"north": frame(3)}, "the outcome model has 4 columns, and the study 3 records"),
        "single": ({"north": frame(120)}, "its policy asks for 2 silos (min_silos), and the study has 1"),
        "constant": (
            {"north": frame(120).assign(x=2.0), "south": frame(100).assign(x=2.0)},
            "column 'x': has the same value in every record of every silo",
        ),
        "rare": (
            {"north": frame(120), "south": rare},
            "silo 'south', column 'ward': level 'v' has 3 records",
        ),
    }.items():
        path = write(tmp_path / name, frames, variables, outcome="a + x + C(ward)")
        checked = invoke("validate", path)
        assert checked.exit_code != 0, name
        assert expected in words(checked.output), name
        assert invoke("run", path, "--quiet").exit_code != 0, name
    frames = {name: frame(120) for name in ("north", "south", "west")}
    path = write(
        tmp_path, frames, variables, policies={"west": "min_rows = 5000"}, options='on_refusal = "go on"'
    )
    ran, document = run(path)
    assert ran.exit_code == 0, ran.output
    assert "2 of 3 silos" in ran.output
    assert list(document["absent"]) == ["west"]
    assert document["n"] == 240


def test_9_three_arms_in_any_order(tmp_path: Path) -> None:
    """Was: sequential logits; the order of the arms moved the SE from 43.2 to 44.2 (multinomial 45.4)."""
    rng = np.random.default_rng(9)
    x = rng.normal(size=900).clip(-7, 7)
    powers = np.exp(np.stack([0 * x, 0.2 + 0.8 * x, -0.3 - 0.6 * x]))
    chances = powers / powers.sum(axis=0)
    a = (rng.random(900) > np.cumsum(chances, axis=0)).sum(axis=0).clip(0, 2)
    shifts = np.array([0.0, 0.6, -0.4])
    y = (rng.random(900) < expit(-0.3 + 0.7 * x + shifts[a])).astype(int)
    by_order = []
    for order in (("0", "1", "2"), ("2", "0", "1")):  # all six: `test_multinomial.py`
        variables = {**BINARY, "x": NUMBER, "a": '{kind = "category", levels = ["0", "1", "2"]}'}
        path = write(
            tmp_path / "".join(order),
            split({"x": x, "a": a, "y": y}, 3),
            variables,
            outcome="C(a) + x",
            target=f'kind = "TSM"\narms = {json.dumps(order)}',
        )
        rows = run(path)[1]["estimates"]
        by_arm = dict(zip(order, rows, strict=True))
        by_order.append([[by_arm[arm][key] for key in ("estimate", "std_error")] for arm in "012"])
    found = np.array(by_order)
    np.testing.assert_allclose(found, found[:1] + 0 * found, rtol=1e-6)
    g = longhand.softmax(np.column_stack([np.ones(900), x]), a, np.ones(900), 3)
    design = np.column_stack([np.ones(900), a == 1, a == 2, x]).astype(float)
    beta = longhand.irls(design, y, np.ones(900))
    q = np.stack([expit(beta[0] + (beta[arm] if arm else 0) + beta[3] * x) for arm in range(3)])
    one = np.ones(900)
    means = longhand.tmle(
        y=y.astype(float),
        observed=one.astype(bool),
        arm=a,
        q=q,
        g=g,
        pi=one,
        d=np.eye(3)[:, :, None] * one,
        v=np.ones((3, 900)),
        expected=np.ones((3, 900)),
        w=one,
        floor=5 / np.sqrt(900) / np.log(900),
    )
    np.testing.assert_allclose(found[0, :, 0], means.psi, atol=1e-6)
    np.testing.assert_allclose(found[0, :, 1], np.sqrt(np.diag(means.covariance)), rtol=1e-5)
    truth = expit(-0.3 + 0.7 * x + shifts[:, None]).mean(axis=1)
    assert (np.abs(found[0, :, 0] - truth) < 3 * found[0, :, 1]).all()


def test_10_strata_beside_the_overall_effect(tmp_path: Path) -> None:
    """Was: adding `strata` moves the *overall* effect by 0.29 SE."""
    rng = np.random.default_rng(10)
    x, ward = rng.normal(size=900).clip(-7, 7), rng.integers(0, 3, 900)
    a = (rng.random(900) < expit(0.9 * x * (ward - 1) + 0.3 * ward)).astype(int)
    y = (rng.random(900) < expit(-0.4 + 0.7 * x**2 - 0.8 * a * x + 0.5 * ward)).astype(int)
    frames = split({"x": x, "a": a, "y": y, "ward": np.array(["u", "v", "w"])[ward]}, 3)
    variables = {**BINARY, "x": NUMBER, "ward": '{kind = "category", levels = ["u", "v", "w"]}'}
    alone = run(write(tmp_path / "alone", frames, variables))[1]["estimates"]
    target = 'kind = "ATE"\nstrata = "ward"'
    beside = run(write(tmp_path / "strata", frames, variables, target=target))[1]["estimates"]
    assert len(beside) == 4
    assert beside[0]["estimate"] == pytest.approx(alone[0]["estimate"], abs=1e-4 * alone[0]["std_error"])
    assert beside[0]["std_error"] == pytest.approx(alone[0]["std_error"], rel=1e-6)

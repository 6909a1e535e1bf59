"""A study of time to an event from its file: every command, the report and the figures."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest

import fedtmle as ft
from tests.command import called
from tests.time.law import Law
from tests.time.studies import colon, split

mpl.use("Agg")
STUDY = """\
[target]
kind = "{kind}"
outcome = "what"
time = "t"
treatment = "a"
periods = 4
horizons = {horizons}
causes = ["first", "second"]
censored = "none"

[variables]
t = {{kind = "count", range = [0, 4], label = "Time", unit = "years"}}
what = {{kind = "category", levels = ["none", "first", "second"], label = "Event"}}
a = {{kind = "category", levels = ["0", "1"], label = "Arm"}}
x = {{kind = "number", range = [-1, 1]}}
z = {{kind = "binary"}}

[models.hazard]
formula = "C(a) + x + z + period"

[models.treatment]
formula = "x + z"

[models.censoring]
formula = "C(a) + x"

[silos]
silo0 = "silo0.toml"
silo1 = "silo1.toml"
"""


def write(folder: Path, kind: str = "RiskDifference", horizons: str = "[2, 4]") -> Path:
    for name, part in split(Law(2).draw(500, seed=9), 2).items():
        part[["t", "what", "a", "x", "z"]].to_csv(folder / f"{name}.csv", index=False)
        (folder / f"{name}.toml").write_text(f'[silo]\nname = "{name}"\n[data]\npath = "{name}.csv"\n')
    (folder / "study.toml").write_text(STUDY.format(kind=kind, horizons=horizons))
    return folder / "study.toml"


def test_every_command(tmp_path: Path) -> None:
    study, out, html = write(tmp_path), tmp_path / "result.json", tmp_path / "report.html"
    question = "How much does a (1 against 0) change the risk of an event by the end of period 2, 4 of 4?"
    assert question in called("validate", study)
    assert "x" in called("preflight", study)
    assert (
        "hazard"
        not in called("silo", "preview", study, "--silo", tmp_path / "silo0.toml").split("stopped")[0]
    )
    transcript = tmp_path / "t.bin"
    called("run", study, "--out", out, "--transcript", transcript)
    text = called("show", out)
    assert "what at t, causes first, second" in text
    assert "at risk in period" in text
    assert "RiskDifference of second at 4" in text
    called("report", out, "--out", html)
    assert "Survival curves" in html.read_text()
    audited = called("risk", study, "--silo", "silo0", "--transcript", transcript, "--attribute", "t")
    assert "one of 4 periods" in audited


def test_defects_have_their_lines(tmp_path: Path) -> None:
    study = write(tmp_path, horizons="[2, 9]")
    text = called("validate", study, code=1)
    assert "horizons: expected numbers of periods from 1 to 4, not 9" in text
    assert "hazard" not in text  # no defect but this one
    study = write(tmp_path)
    study.write_text(study.read_text().replace("periods = 4", "periods = 3").replace("[2, 4]", "[2]"))
    text = called("validate", study, code=1)
    assert "silo 'silo0': column 't' is beyond the end of the grid, 3, in" in text


def test_figures() -> None:
    from tests.time.law import study

    records = split(Law(2).draw(300, seed=9), 2)
    result = ft.run(study(ft.RMSTDifference, 2, horizons=(2, 3, 4)), records)
    line = ft.plots.horizons(result)
    assert line.get_ylabel() == "RMSTDifference"
    assert all(tick == round(tick) for tick in line.get_xticks())
    drawn = ft.plots.curves(result)
    assert [text.get_text() for text in drawn.get_legend().get_texts()] == ["0", "1"]
    shown = {text.get_text() for text in drawn.texts}
    assert "hidden" not in shown
    at_risk = result.document["at_risk"]
    first, second = at_risk["counts"]
    some_hidden = {"counts": [[None, *first[1:]], [*second[:-1], None]], "hidden_in": [[2, 0, 0], [0, 0, 2]]}
    without = {**result.document, "at_risk": {**at_risk, **some_hidden}}
    shown_without = [text.get_text() for text in ft.plots.curves(without).texts]
    assert shown_without.count("hidden") == 1  # of the last period, nothing is known
    assert f"{first[1]}+" in shown_without  # as many as later, at least
    assert ft.plots.curves(result).get_ylabel() == "RMST in periods"
    assert ft.plots.curves(result).get_xlabel() == "t"
    (upper, _, _, _) = drawn.get_lines()
    assert np.asarray(upper.get_ydata())[-1] == result.document["curves"][0]["estimate"][-1]
    for counts in result.document["at_risk"]["counts"]:
        assert {str(count) for count in counts if count is not None} <= {text.rstrip("+") for text in shown}
    risks = ft.run(study(ft.Risk, 2, horizons=(2, 4)), records)
    assert ft.plots.curves(risks, cause="second").get_ylabel() == "Risk of second"
    with pytest.raises(ft.InputError, match="cause: expected one of first, second"):
        ft.plots.curves(risks, cause="third")


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    """The study of docs/survival.md, on the trial's records."""
    page = (Path(__file__).parents[2] / "docs" / "survival.md").read_text()
    text = page.split("```toml\n")[1].split("```")[0] + '\n[silos]\none = "one.csv"\ntwo = "two.csv"\n'
    (tmp_path / "study.toml").write_text(text)
    records = colon().rename(columns={"time": "days"})[["days", "status", "rx", "age", "node4"]]
    records[::2].to_csv(tmp_path / "one.csv", index=False)
    records[1::2].to_csv(tmp_path / "two.csv", index=False)
    assert "RiskDifference at 10" in called("run", tmp_path / "study.toml")
    offered = {kind.__name__ for kind in ft.TIME_ESTIMANDS}
    assert offered == {name for name in offered if f"`{name}`" in page}

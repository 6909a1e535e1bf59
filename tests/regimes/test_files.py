"""A study of treatment over time from its file: every command, the report and the figures."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from tests.command import called
from tests.regimes.law import RULES, draw

mpl.use("Agg")
STUDY = """\
[target]
kind = "{kind}"
outcome = "{outcome}"
treatment = "a"
censoring = "c"
{horizons}
over_time = {over_time}

[[target.rules]]
kind = "Static"
arm = 0

[[target.rules]]
kind = "Onset"
column = "l"
cut = 0.5
arm = 1
otherwise = 0

[variables]
w = {{kind = "number", range = [-3, 3]}}
l = {{kind = "number", range = [-4, 4], label = "Severity"}}
a = {{kind = "binary", label = "Drug"}}
c = {{kind = "binary"}}
b = {{kind = "binary"}}
y = {{kind = "binary"}}

[models.outcome]
formula = "w + l + a + lag1_a"

[models.treatment]
formula = "w + l + lag1_a"

[models.censoring]
formula = "l + a"

[silos]
silo0 = "silo0.toml"
silo1 = "silo1.toml"
"""


def write(
    folder: Path, kind: str = "RegimeDifference", *, survival: bool = False, periods: int = 2, **replaced: str
) -> Path:
    records = draw(350 * periods, periods, 21, survival=survival)
    for k, part in enumerate((records[:320], records[320:])):
        part.drop(columns=["pair", "weight"]).to_csv(folder / f"silo{k}.csv", index=False)
        (folder / f"silo{k}.toml").write_text(f'[silo]\nname = "silo{k}"\n[data]\npath = "silo{k}.csv"\n')
    names = ("a", "l", "c", *(("y",) if survival else ()))
    each = {name: ", ".join(f'"{name}{t}"' for t in range(1, periods + 1)) for name in names}
    columns = ", ".join(f"{name} = [{listed}]" for name, listed in each.items())
    text = STUDY.format(
        kind=kind,
        outcome="y" if survival else "b",
        horizons="horizons = [1, 2]" if survival else "",
        over_time="{" + columns + "}",
    )
    for old, new in replaced.items():
        text = text.replace(old, new)
    (folder / "study.toml").write_text(text)
    return folder / "study.toml"


@pytest.mark.parametrize("survival", [False, True])
def test_every_command(tmp_path: Path, survival: bool) -> None:
    study, out, html = write(tmp_path, survival=survival), tmp_path / "result.json", tmp_path / "report.html"
    assert "How much would another rule for a than the first change" in called("validate", study)
    assert "Severity" in called("preflight", study)
    called("silo", "preview", study, "--silo", tmp_path / "silo0.toml")
    transcript = tmp_path / "t.bin"
    called("run", study, "--out", out, "--transcript", transcript)
    text = called("show", out)
    assert "1 once l >= 0.5, 0 before vs 0" in text
    assert "followed the rule" in text
    called("report", out, "--out", html)
    page = html.read_text()
    assert "Adherence" in page
    assert "Weights over time" in page
    if not survival:
        audited = called("risk", study, "--silo", "silo0", "--transcript", transcript, "--attribute", "l2")
        assert "l2" in audited


def test_strata_and_folds_from_the_file(tmp_path: Path) -> None:
    study = write(tmp_path)
    text = study.read_text().replace('censoring = "c"', 'censoring = "c"\nstrata = "half"')
    text = text.replace(
        "[models.outcome]", 'half = {kind = "category", levels = ["p", "q"]}\n\n[models.outcome]'
    )
    study.write_text(f"{text}\n[options]\nfolds = 2\n")
    records = draw(2400, 2, 21).drop(columns=["pair", "weight"])  # in a fold, enough people are censored
    records["half"] = ["p" if w > 0 else "q" for w in records["w"]]
    for k, part in enumerate((records[:1200], records[1200:])):
        part.to_csv(tmp_path / f"silo{k}.csv", index=False)
    assert "overall and by half" in called("validate", study)
    called("silo", "preview", study, "--silo", tmp_path / "silo0.toml")
    out, html = tmp_path / "result.json", tmp_path / "report.html"
    called("run", study, "--out", out)
    text = called("show", out)
    assert "1 once l >= 0.5, 0 before vs 0 in q" in text
    assert "difference between half" in text
    called("report", out, "--out", html)
    page = html.read_text()
    assert "Models were cross-fitted over 2 folds." in page
    assert "Effects were also estimated within levels of half." in page


def test_one_large_weight_among_many_followers_is_no_reason_to_refuse(tmp_path: Path) -> None:
    """Effective sample sizes need sums of squared weights; a silo judges them by the weights themselves."""
    study = write(tmp_path, periods=3)
    head, rest = study.read_text().split('kind = "Onset"')
    study.write_text(f'{head}kind = "Static"\narm = 1\n\n[variables]{rest.split("[variables]")[1]}')
    records = draw(1200, 3, 5).drop(columns=["pair", "weight"])
    for k, part in enumerate((records[:560], records[560:])):
        part.to_csv(tmp_path / f"silo{k}.csv", index=False)
    assert "1 vs 0" in called("run", study)


def test_defects_have_their_lines(tmp_path: Path) -> None:
    study = write(tmp_path)
    study.write_text(study.read_text().replace('"l1", "l2"', '"l1"'))
    assert "over_time: 'l' has 1 column(s) and the treatment 2" in called("validate", study, code=1)
    study = write(tmp_path)
    study.write_text(study.read_text().replace("w + l + lag1_a", "w + l + lag1_q"))
    assert "lag1_q" in called("validate", study, code=1)


def test_figures(tmp_path: Path) -> None:
    from tests.regimes.law import study

    records = draw(500, 2, 22)
    result = ft.run(study(periods=2, diagnostics=True), {"one": records[:200], "two": records[200:]})
    drawn = ft.plots.adherence(result)
    assert drawn.get_ylabel() == "Followed the rule so far"
    rules = [each["rule"] for each in result.document["adherence"]]
    labels = [text.get_text() for text in drawn.get_legend().get_texts()]
    assert labels == ["always 0", "always 1", *rules[2:]]
    shown = result.document["adherence"][1]
    share = shown["followers"][1] / shown["at_risk"][1]
    assert np.asarray(drawn.get_lines()[1].get_ydata())[1] == share
    hidden = {**result.document, "adherence": [{**each, "hidden_in": [0, 1]} for each in (shown,)]}
    assert np.array_equal(ft.plots.adherence(hidden).get_lines()[0].get_xdata(), [1])  # a part is no share
    bars = ft.plots.weights(result, rule="1")
    counts = shown["weight_counts"]
    largest = max(count / sum(row) for row in counts for count in row)
    assert "always 1" in bars.get_title()
    widths = [width for bar in bars.patches if (width := bar.get_window_extent().width) > 0]
    assert len(widths) == sum(1 for row in counts for count in row if count)
    assert max(widths) == pytest.approx(0.95 * bars.get_window_extent().width / 2)  # of two periods
    assert f"{largest:.0%}" in bars.get_title()
    with pytest.raises(ft.InputError, match="rule: expected one of 0, 1"):
        ft.plots.weights(result, rule="2")
    with pytest.raises(ft.InputError, match="with several horizons"):
        ft.plots.curves(result)
    result.save(tmp_path / "r.json")
    assert ft.load(tmp_path / "r.json").document["adherence"] == result.document["adherence"]


def test_risks_over_time_are_drawn_with_the_people_at_risk() -> None:
    from fedtmle.report.page import render
    from tests.regimes.law import study

    records = draw(900, 2, 22, survival=True)
    asked = study(ft.RegimeDifference, periods=2, survival=True, horizons=(1, 2), rules=RULES[:2])
    result = ft.run(asked, {"one": records[:400], "two": records[400:]})
    drawn = ft.plots.curves(result)
    risks = result.document["rules"]
    assert [np.asarray(line.get_ydata())[-1] for line in drawn.get_lines()[::2]] == [
        each["estimate"][-1] for each in risks
    ]
    at_risk = [f"{each['at_risk']:,}" for each in result.document["periods"]]
    assert [text.get_text() for text in drawn.texts] == ["at risk", "everyone", *at_risk]
    html = render(result.document)
    assert "1 vs 0 by horizon; bars are 95% intervals" in html
    assert html.count(f">{at_risk[1]}</text>") == 2  # in the wide and in the narrow drawing


def test_weights_that_some_silos_hide_are_marked() -> None:
    """A silo adds a bin of few people to its neighbour, and hides a period only if it has few followers."""
    from fedtmle.report.page import render
    from tests.regimes.law import study

    records = draw(900, 3, 22)
    parts = {"few": records[:24], "many": records[24:]}
    result = ft.run(study(periods=3, diagnostics=True, rules=RULES[1:2]), parts)
    (shown,) = result.document["adherence"]
    for counts, by, followers, hidden in zip(
        shown["weight_counts"],
        shown["weights_hidden_in"],
        shown["followers"],
        shown["hidden_in"],
        strict=True,
    ):
        assert by == hidden
        assert sum(counts) == followers
        assert all(count == 0 or count >= 5 for count in counts)
    assert 1 in shown["weights_hidden_in"]
    assert "+: some silos hide this period" in render(result.document)


def test_streamed_tables_give_the_same_numbers(tmp_path: Path) -> None:
    study = write(tmp_path)
    called("run", study, "--out", tmp_path / "held.json")
    for k in (0, 1):
        silo = tmp_path / f"silo{k}.toml"
        silo.write_text(f"{silo.read_text()}stream = true\n")
    called("run", study, "--out", tmp_path / "streamed.json")
    held, streamed = (ft.load(tmp_path / f"{name}.json").document for name in ("held", "streamed"))
    assert held["psi"] == streamed["psi"]
    assert held["std_error"] == streamed["std_error"]


def test_a_table_with_one_row_per_period_gives_the_same_bytes(tmp_path: Path) -> None:
    study = write(tmp_path, survival=True)
    called("run", study, "--out", tmp_path / "wide.json", "--transcript", tmp_path / "wide.bin")
    for k in (0, 1):
        wide = pd.read_csv(tmp_path / f"silo{k}.csv")
        rows = [
            wide[["w"]].assign(patient=wide.index, period=t, **{name: wide[f"{name}{t}"] for name in "lacy"})
            for t in (1, 2)
        ]
        long = pd.concat(rows)
        long[long.l.notna()].sample(frac=1.0, random_state=k).to_csv(tmp_path / f"silo{k}.csv", index=False)
        with (tmp_path / f"silo{k}.toml").open("a") as silo:
            silo.write('person = "patient"\nperiod = "period"\n')
    called("run", study, "--out", tmp_path / "long.json", "--transcript", tmp_path / "long.bin")
    assert (tmp_path / "wide.bin").read_bytes() == (tmp_path / "long.bin").read_bytes()


def test_the_example_of_the_page_runs(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "regimes.md").read_text()
    text = page.split("```toml\n")[1].split("```")[0] + '\n[silos]\none = "one.csv"\ntwo = "two.csv"\n'
    (tmp_path / "study.toml").write_text(text)
    records = draw(800, 3, 5).rename(columns={"b": "relapse", "w": "age"})
    records[:300].to_csv(tmp_path / "one.csv", index=False)
    records[300:].to_csv(tmp_path / "two.csv", index=False)
    assert "1 once l >= 0.5, 0 before vs 0" in called("run", tmp_path / "study.toml")
    assert {kind.__name__ for kind in ft.REGIME_ESTIMANDS} <= {*page.replace("`", " ").split()}

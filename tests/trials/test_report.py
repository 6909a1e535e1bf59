"""The report of an emulated trial: protocol, flow of people, Table 1 and the TARGET checklist."""

from __future__ import annotations

import copy
import json
import re
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedtmle.cli import app
from fedtmle.report.emulation import AUTHORS, TARGET, anchor
from fedtmle.report.page import render
from fedtmle.trials import emulate
from fedtmle.trials.trial import protocol
from tests.trials.test_compile import TRIALS
from tests.trials.test_eunomia import STRICTER, in_duckdb, write


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory, eunomia: Path) -> dict[str, Any]:
    file = write(tmp_path_factory.mktemp("trial"), STRICTER, in_duckdb(eunomia))
    return json.loads(emulate(file.trial, file.silos).result.to_json())


def section(page: str, title: str) -> str:
    found = re.search(rf"<section[^>]*><h2>{title}</h2>(.*?)</section>", page, flags=re.DOTALL)
    assert found, title
    return found[1]


def test_the_flow_shows_the_sums_over_the_silos(document: dict[str, Any]) -> None:
    document = copy.deepcopy(document)
    emulation = document["emulation"]
    emulation["silos"]["east"]["people"][2] = None
    flow = section(render(document), "Flow of people")
    people = [[silo["people"][k] for silo in emulation["silos"].values()] for k in range(7)]
    drawn = unescape(re.sub("<[^>]+>", " ", flow))
    for step, counts in zip(emulation["steps"], people, strict=True):
        known = [count for count in counts if count is not None]
        shown = f"{sum(known):,}{'+' if None in counts else ''}"
        assert f"{step[0].upper()}{step[1:]}: {shown}" in drawn
    known = [(a, b) for a, b in pairwise(people) if None not in a + b]
    assert [f"{sum(a) - sum(b):,}" for a, b in known if sum(a) > sum(b)] == ["673", "53"]
    assert all(f"left out: {sum(a) - sum(b):,}" in drawn for a, b in known)
    assert drawn.count("left out: not shown") == 2  # the narrow drawing breaks the line
    assert flow.count("<svg") == 2  # for wide and for narrow screens


def test_silos_that_share_no_counts_are_named(document: dict[str, Any]) -> None:
    changed = copy.deepcopy(document)
    del changed["emulation"]["silos"]["west"]
    changed["emulation"]["not_shared"] = ["west"]
    assert "Without the counts of west" in section(render(changed), "Flow of people")
    changed["emulation"]["silos"] = {}
    assert "No silo has shared" in section(render(changed), "Flow of people")


def test_table_1_has_labels_and_shares(document: dict[str, Any]) -> None:
    table = section(render(document), "Baseline characteristics")
    lines = {(line["name"], line["level"]): line for line in document["emulation"]["table1"]["lines"]}
    ulcer = lines["peptic_ulcer", "1"]
    row = re.search(r"<th[^>]*>condition peptic_ulcer, any day to 0</th>(.*?)</tr>", table)
    assert row
    assert re.findall(r"<td[^>]*>(.*?)</td>", row[1])[:2] == [f"{share:.1%}" for share in ulcer["mean"]]
    assert "sex: female" in table


def test_every_place_of_the_checklist_is_in_the_page(document: dict[str, Any]) -> None:
    page = render(document)
    ids = set(re.findall(r'id="([^"]+)"', page))
    items = [item for _, part in TARGET.parts for item in part]
    assert len(TARGET.parts) == 6
    checklist = section(page, "TARGET checklist")
    reported = [item for item in items if any(anchor(title) in ids for title in item.sections)]
    assert set(re.findall(r'href="#([^"]+)"', checklist)) <= ids
    assert checklist.count(f">{AUTHORS}<") == len(items) - len(reported)
    assert len(reported) >= 15
    changed = copy.deepcopy(document)
    del changed["emulation"]["table1"]
    page = render(changed)
    assert "Baseline characteristics</h2>" not in page
    assert "#baseline-characteristics" not in page


def test_text_of_the_trial_is_escaped(document: dict[str, Any]) -> None:
    attack = "<script>alert(1)</script>"
    changed = copy.deepcopy(document)
    changed["emulation"]["trial"] = attack
    changed["emulation"]["steps"][0] = attack
    changed["emulation"]["labels"]["age"] = attack
    changed["emulation"]["protocol"][0]["target"] = attack
    for silo in changed["emulation"]["silos"].values():
        silo["arms"][0]["name"] = attack
    assert "<script" not in render(changed)


def test_show_prints_the_attrition_of_a_saved_result(document: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(document), encoding="utf-8")
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "result.json")])
    assert shown.exit_code == 0, shown.output
    assert "people in the database" in shown.output
    assert "ATE of strategy" in shown.output


@pytest.mark.parametrize("name", TRIALS)
def test_the_protocol_says_what_the_trial_is(name: str) -> None:
    trial = TRIALS[name]
    parts = {part.name: part for part in protocol(trial)}
    assert len(parts) == 8
    assert all(text.endswith(".") for part in parts.values() for text in (part.target, part.emulation))
    eligibility = parts["Eligibility criteria"]
    for criterion in trial.eligibility.criteria:
        assert criterion.words in eligibility.target
    assert ("aged 30 to 60 years" in eligibility.target.lower()) == (trial.eligibility.age is not None)
    for strategy in trial.strategies:
        assert strategy.name in parts["Treatment strategies"].target.lower()
        assert str(strategy.drugs.ids[0]) in parts["Treatment strategies"].emulation
    follow_up = parts["Time zero and follow-up"].emulation
    word = "is unknown" if trial.outcome.period_days is None else "is censored"
    assert (word in follow_up) == bool(trial.censoring)
    assert f"day {trial.outcome.days}" in parts["Outcome"].target
    switch = any(reason.value == "switch" for reason in trial.censoring)
    assert ("nobody switched" in parts["Causal contrast"].target) == switch

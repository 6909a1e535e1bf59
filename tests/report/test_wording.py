"""Words, methods paragraph and checklists of the report, from documents of real runs."""

from __future__ import annotations

import copy
import html
import re
from typing import Any

import pytest

import fedtmle as ft
from fedtmle.report import emulation, series
from fedtmle.report.page import render
from tests.report.studies import result


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return result().document


def test_an_estimand_brings_the_words_of_its_measure(document: dict[str, Any]) -> None:
    assert document["study"]["target"]["response"] == "binary"
    assert series.measure(document) == "risk difference" == ft.ATE.measures[0]
    assert series.title(document).lower().startswith("risk difference")
    changed = copy.deepcopy(document)
    changed["study"]["target"] |= {"kind": "OfAnotherPackage", "measure": None}
    assert series.measure(changed) == "of another package"
    assert series.title(changed) == changed["question"]


def test_labels_units_and_levels_come_from_the_dictionary(document: dict[str, Any]) -> None:
    changed = copy.deepcopy(document)
    target = changed["study"]["target"]
    changed["study"]["variables"] = {
        target["outcome"]: {"label": "Blood pressure", "unit": "mmHg"},
        target["treatment"]: {"label": "Programme", "levels": {target["arms"][1]: "exercise"}},
    }
    assert series.outcome(changed) == "Blood pressure (mmHg)"
    assert series.arm(changed, target["arms"][1]) == "exercise"
    assert series.arm(changed, target["arms"][0]) == target["arms"][0]
    assert series.component(changed, f"E[Y({target['arms'][1]})] in x") == "exercise in x"
    assert f"Programme exercise against {target['arms'][0]}" in series.caption(changed)
    changed["study"]["variables"][target["treatment"]]["label"] = "Exercise"
    assert series.comparison(changed) == f"exercise against {target['arms'][0]}"


def test_the_methods_paragraph_states_what_was_done(document: dict[str, Any]) -> None:
    paragraph = " ".join(series.methods(document))
    for role, model in document["study"]["models"].items():
        assert model in paragraph, role
    assert f"{document['n']:,} records" in paragraph
    assert document["plan"][:16] in paragraph
    changed = copy.deepcopy(document)
    changed["study"]["options"] |= {"folds": 7, "weights": "w", "cluster": "c"}
    changed["g_floor"] = 0.0
    paragraph = " ".join(series.methods(changed))
    for expected in ("over 7 folds", "weighted by w", "clustered by c", "not truncated"):
        assert expected in paragraph


def test_a_checklist_links_only_to_sections_of_the_page(document: dict[str, Any]) -> None:
    page = render(document)
    ids = set(re.findall(r'id="([^"]+)"', page))
    links = re.findall(r'href="#([^"]+)"', page)
    assert "strobe-checklist" in ids
    assert set(links) <= ids
    items = [item for _, part in emulation.STROBE.parts for item in part]
    numbers = {int(match[0]) for item in items if (match := re.match(r"\d+", item.words))}
    assert numbers == set(range(1, 23))


def test_a_section_that_is_missing_is_for_the_authors() -> None:
    small = emulation.Checklist("x", "note", "source", (("Part", (emulation.Item("a", ("Here",)),)),))
    assert 'href="#here"' in emulation.render(small, {"Here"})
    assert emulation.AUTHORS in emulation.render(small, {"Elsewhere"})


def test_silos_that_stayed_away_are_counted(document: dict[str, Any]) -> None:
    changed = copy.deepcopy(document)
    changed["absent"] = {"east": "it was absent when the study opened"}
    joined = len(document["sizes"])
    assert f"{joined} of {joined + 1} silos" in render(changed)


def test_two_arms_have_one_standardised_difference() -> None:
    line = {"label": "Age", "mean": [60.0] * 3, "sd": [9.0] * 3, "difference": 0.1}
    for arms, head in (("ab", "standardised difference"), ("abc", "largest standardised difference")):
        table = emulation.table1(list(arms), ["9"] * len(arms), [line], "")
        assert f">{head}<" in table


def test_the_ladder_of_bounds_says_which_is_the_studys(document: dict[str, Any]) -> None:
    assert f"bound {document['g_floor']:.3g} (the study's)" in html.unescape(render(document))

"""The tables of cost add up: a phase whose messages rode along with others' rounds is shown too."""

from __future__ import annotations

import re
from dataclasses import replace

import fedtmle as ft
from fedtmle.demo import IHDP, ihdp_silos
from fedtmle.report import page
from fedtmle.text.result import cost

DOCUMENT = ft.run(IHDP, ihdp_silos()).document


def kilobits(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"bit": 1e-3, "kbit": 1.0, "Mbit": 1e3}[unit]


def test_the_rows_of_the_printed_table_add_up() -> None:
    account = DOCUMENT["account"]
    phases = {phase for by_phase in account["bits_up"].values() for phase in by_phase}
    assert phases - account["rounds"].keys()  # the premise: some phase has bits and no rounds of its own
    _, *rows, total = [re.split(r" {2,}", line.strip()) for line in cost(DOCUMENT)]
    assert len(rows) == len(phases)
    assert total[1] == str(sum(int(row[1]) for row in rows if row[1] != "shared"))
    for way in (2, 3):
        added = sum(kilobits(row[way]) for row in rows)
        assert abs(kilobits(total[way]) - added) < 0.06 * len(phases)


def test_the_demonstration_keeps_to_its_rounds_and_bits() -> None:
    """Default settings, with every hospital's own estimate, balance and the ladder of bounds."""
    silos = ihdp_silos()
    document = ft.run(IHDP, silos, release=tuple(silos)).document
    account = document["account"]
    bits = sum(sum(by.values()) for way in ("bits_up", "bits_down") for by in account[way].values())
    assert sum(account["rounds"].values()) <= 18
    assert bits <= 150_000
    assert document["ladder"]
    assert document["balance"]["covariates"]
    assert len(document["silos"]) == 8
    pooled = ft.run(replace(IHDP, algorithm=ft.Central(tolerance=1e-10)), silos).document["estimates"][0]
    gap = abs(document["estimates"][0]["estimate"] - pooled["estimate"])
    assert gap <= 1e-6 * pooled["std_error"]


def test_the_page_has_every_phase() -> None:
    html = page.sent(DOCUMENT)
    assert "closing (shared)" in html
    assert "sums for the estimate and its covariance" in html

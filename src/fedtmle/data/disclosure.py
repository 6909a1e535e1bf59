"""The section `[disclosure]` of a silo file: of which attributes no study may tell too much.

[disclosure]
centre = "public.csv"        # a public table with the study's names; no silo's records
column = "sbp_12"            # the study's name of a numeric column
attributes = ["mean", "record"]
floor = 0.5                  # what must stay unknown of each, in the column's units
radius = 95                  # how closely an attacker is assumed to know each value beforehand
noise = 0.0                  # declared norm of all errors of the answers together
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ATTRIBUTES = ("mean", "record")
_KEYS = ("centre", "column", "attributes", "floor", "radius", "noise")
_WHERE = {"centre": "the path of a public table", "column": "the study's name of a numeric column"}


@dataclass(frozen=True, kw_only=True)
class Disclosure:
    """A floor on omega of a column's attributes, as a hospital states it."""

    centre: Path
    column: str
    attributes: tuple[str, ...]
    floor: float
    radius: float
    noise: float = 0.0

    @classmethod
    def parse(
        cls, section: Mapping[str, Any], folder: Path
    ) -> tuple[Disclosure | None, dict[str, tuple[str, str]]]:
        """What the section says, or by key what is wrong with it and what to do."""
        mistakes = {
            key: ("unknown key", f"the keys of [disclosure] are {', '.join(_KEYS)}")
            for key in section
            if key not in _KEYS
        }
        for key, what in _WHERE.items():
            if not isinstance(section.get(key), str) or not section[key]:
                mistakes[key] = ("this is missing, or not text", f"give {what}, in quotes")
        named = section.get("attributes")
        if not (isinstance(named, list) and named and all(name in ATTRIBUTES for name in named)):
            mistakes["attributes"] = ("this is no list of attributes", f"name some of {list(ATTRIBUTES)}")
        for key in ("floor", "radius"):
            if not (_is_number(section.get(key)) and section[key] > 0):
                mistakes[key] = ("this is missing, or no number above 0", "give it in the column's units")
        if not (_is_number(section.get("noise", 0.0)) and section.get("noise", 0.0) >= 0):
            mistakes["noise"] = ("this is no number of at least 0", "correct it, or leave it out for 0")
        if not {"floor", "radius"} & mistakes.keys() and section["floor"] > section["radius"]:
            what = "more must stay unknown than is unknown beforehand: every study would be refused"
            mistakes["floor"] = (what, "give a floor below the radius")
        if mistakes:
            return None, mistakes
        return cls(
            centre=folder / section["centre"],
            column=section["column"],
            attributes=tuple(dict.fromkeys(section["attributes"])),
            floor=float(section["floor"]),
            radius=float(section["radius"]),
            noise=float(section.get("noise", 0.0)),
        ), {}


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)

"""The demonstration's files: the IHDP study, and each hospital's silo file and records."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedtmle.datasets import ihdp
from fedtmle.errors import InputError

# As in `fedtmle demo`, without what some hospital has only a few people with: a sum over a few people is
# what a silo's policy refuses.
LEFT_OUT = ("mlt_birt", "mom_scoll", "momhisp")
BABY = "bw + nnhealth + sex"
MOTHER = "momage + b_marr + mom_lths + mom_hs + momblack + cigs"
STUDY = f"""\
[target]
kind = "ATE"
outcome = "iqsb_36"
outcome_bounds = [40, 160]
treatment = "treat"

[models.outcome]
formula = "treat + {BABY} + {MOTHER} + C(site)"

[models.treatment]
formula = "bw + C(site)"

[models.missingness]
formula = "treat + {BABY} + {MOTHER} + C(site)"

"""
HOSPITALS = 8


def write_example(folder: Path, hospitals: int = HOSPITALS, *, algorithm: str = 'kind = "Coded"') -> Path:
    """Writes study.toml and a folder per hospital; returns the study's path."""
    if not 2 <= hospitals <= HOSPITALS:
        raise InputError(f"hospitals: expected 2 to {HOSPITALS}, not {hospitals}")
    columns = {name: [float(cell) for cell in cells] for name, cells in ihdp().items()}
    names = []
    for site in sorted(set(columns["site"]))[:hospitals]:
        name = f"hospital {site:.0f}"
        own = folder / name.replace(" ", "-")
        own.mkdir(parents=True)
        _write_records(own / "infants.csv", columns, [at == site for at in columns["site"]])
        text = f'[silo]\nname = "{name}"\n\n[data]\npath = "infants.csv"\n'
        (own / "silo.toml").write_text(text, encoding="utf-8")
        names.append(name)
    listed = "\n".join(f'"{name}" = "{name.replace(" ", "-")}/silo.toml"' for name in names)
    study = folder / "study.toml"
    study.write_text(f"{STUDY}[algorithm]\n{algorithm}\n\n[silos]\n{listed}\n", encoding="utf-8")
    return study


def _write_records(path: Path, columns: Mapping[str, Sequence[float]], keep: Sequence[bool]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(columns)
        for kept, row in zip(keep, zip(*columns.values(), strict=True), strict=True):
            if kept:
                table.writerow("" if math.isnan(cell) else repr(cell) for cell in row)

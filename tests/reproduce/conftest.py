"""A tiny scale of the experiments, and tables read back."""

from __future__ import annotations

import csv
from pathlib import Path

from fedtmle_paper.reproduce.scenario import Scale

TINY = Scale(n=400, pilot=60, clients=(2, 3), reference_clients=3, tolerance=1e-2, coded_tolerance=0.1)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))

"""A silo's table, as its owner's software reads it for a study."""

from __future__ import annotations

import numpy as np

import fedtmle as ft
from fedtmle.model.table import Table
from fedtmle.studyfile.schema import schema_of
from tests.narrow import load_all


def table_of(study: ft.Study, columns: dict[str, np.ndarray]) -> Table:
    return load_all({"a": columns}, schema_of(study))["a"]

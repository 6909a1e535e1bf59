"""A silo file's floor on what a study may tell of a column, at the public table that it names."""

from __future__ import annotations

import math

import numpy as np

from fedtmle.algorithms.study import Study
from fedtmle.data import DataErrors, SiloFile, load
from fedtmle.errors import InputError
from fedtmle.model.table import Table
from fedtmle.model.types import Array
from fedtmle.privacy.floor import FloorAttribute, OmegaFloor, at_centre
from fedtmle.runtime.rows import LocalRows
from fedtmle.studies.schema import schema_of
from fedtmle.studies.streams import in_memory


def floor_of(study: Study, file: SiloFile | None) -> OmegaFloor | None:
    """The floor that the section [disclosure] states for this study; None where there is no section."""
    if file is None or file.disclosure is None:
        return None
    stated, name = file.disclosure, file.disclosure.column
    try:
        table = in_memory({file.name: load(stated.centre, schema_of(study), silo=file.name)}, "a centre")[
            file.name
        ]
        there = ~np.isnan(_column(study, table, name))
    except DataErrors as errors:
        mistakes = "; ".join(str(problem) for problem in errors.problems)
        raise InputError(f"{file.path}: [disclosure] centre: {mistakes}") from None
    except InputError as error:
        raise InputError(f"{file.path}: [disclosure] {error}") from None
    # Each value is known within the radius; together they are in a ball of radius rho sqrt(N).
    joint = stated.radius * math.sqrt(int(there.sum()))
    gradients = {"mean": there / there.sum(), "record": None}
    centre = LocalRows(file.name, table, table.n_rows, None)
    centre.place(0)  # batches are asked of it as if its rows came first
    return OmegaFloor(
        attributes=tuple(
            FloorAttribute(name=f"{kind} of {name}", gradient=gradients[kind], radius=joint)
            for kind in stated.attributes
        ),
        floor=stated.floor,
        noise=stated.noise,
        records=table.n_rows,
        jacobian=at_centre(centre, table, name),
    )


def _column(study: Study, table: Table, name: str) -> Array:
    """The column's values, if it is one whose values move the answers smoothly."""
    if name not in table.numeric or name == study.weights:
        known = ", ".join(column for column in table.numeric if column != study.weights)
        raise InputError(f"column: the study reads no numbers '{name}'; it reads {known}")
    column = table.numeric[name]
    values = column[~np.isnan(column)]
    if not len(values):
        raise InputError(f"column: the centre has no value of '{name}'")
    if np.isin(values, (0.0, 1.0)).all():
        raise InputError(f"column: '{name}' is 0 or 1 throughout; a floor is for a column of numbers")
    return column

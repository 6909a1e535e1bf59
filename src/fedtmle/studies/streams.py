"""Which studies can read a silo's table in batches, and where whole columns are needed."""

from __future__ import annotations

from collections.abc import Mapping

from fedtmle.algorithms.study import Study
from fedtmle.errors import InputError
from fedtmle.initial.glm import GLM, Supplied
from fedtmle.model.table import AnyTable, StreamedTable, Table


def check_streams(study: Study, tables: Mapping[str, AnyTable]) -> None:
    """Raises where a silo streams its table and the study needs all its rows at once."""
    streams = [name for name, table in tables.items() if isinstance(table, StreamedTable)]
    if not streams:
        return
    whole = [
        f"the {role} model, which is neither a GLM nor supplied"
        for role, model in study.models.items()
        if not isinstance(model, GLM | Supplied)
    ]
    whole += ["cluster"] if study.cluster else []
    whole += ["folds"] if study.folds else []
    if whole:
        raise InputError(
            f"silo '{streams[0]}' streams its table, and this study needs all rows at once "
            f"({'; '.join(whole)}); leave out stream in the silo file, or change the study"
        )


def in_memory(tables: Mapping[str, AnyTable], what: str) -> dict[str, Table]:
    """The tables, if no silo streams its own."""
    held: dict[str, Table] = {}
    for name, table in tables.items():
        if isinstance(table, StreamedTable):
            raise InputError(
                f"silo '{name}' streams its table, and {what} needs all rows at once; leave out stream in "
                "the silo file, or give it a smaller table"
            )
        held[name] = table
    return held

"""A silo's own data: read from files or frames, checked against the study's schema, never quoted.

`silofile` says what a study asks of a table, where a hospital keeps its table and what it calls the columns;
`source` has `load`, which returns a table or raises all its defects at once.
"""

from __future__ import annotations

from fedtmle.data.counted import CountedTable, check
from fedtmle.data.database import DatabaseQuery
from fedtmle.data.silofile import (
    Column,
    ColumnMap,
    CsvFile,
    Database,
    Disclosure,
    Kind,
    LongTable,
    Schema,
    SiloFile,
    read_silo_file,
)
from fedtmle.data.source import check_readable, load, load_all, load_people, restricted
from fedtmle.defects import DataErrors, Defect

__all__ = [
    "Column",
    "ColumnMap",
    "CountedTable",
    "CsvFile",
    "DataErrors",
    "Database",
    "DatabaseQuery",
    "Defect",
    "Disclosure",
    "Kind",
    "LongTable",
    "Schema",
    "SiloFile",
    "check",
    "check_readable",
    "load",
    "load_all",
    "load_people",
    "read_silo_file",
    "restricted",
]

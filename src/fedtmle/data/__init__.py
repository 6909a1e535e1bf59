"""A silo's own data: read from files or frames, checked against the study's schema, never quoted.

`schema` is what a study asks of a table; `mapping` and `silofile` are what the hospital calls it and
where it is kept; `source` has `load`, which returns a `Table` or raises every problem at once.
"""

from __future__ import annotations

from fedtmle.data.database import DatabaseQuery
from fedtmle.data.schema import Column, DataErrors, Kind, Problem, Schema
from fedtmle.data.silofile import ColumnMap, Database, Disclosure, SiloFile, read_silo_file
from fedtmle.data.source import check_readable, load, load_all

__all__ = [
    "Column",
    "ColumnMap",
    "DataErrors",
    "Database",
    "DatabaseQuery",
    "Disclosure",
    "Kind",
    "Problem",
    "Schema",
    "SiloFile",
    "check_readable",
    "load",
    "load_all",
    "read_silo_file",
]

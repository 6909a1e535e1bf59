"""A silo's own data: read from files or frames, checked against the study's schema, never quoted.

    schema     what a study asks of a table
    silofile   `silo.toml`: where the hospital keeps it and what it calls things
    source     `load`: source + schema -> `Table`, or every problem at once
    problems   how a problem is told without telling a value
"""

from __future__ import annotations

from fedtmle.data.problems import DataErrors, Problem
from fedtmle.data.schema import Column, Kind, Schema
from fedtmle.data.silofile import ColumnMap, Database, SiloFile, read_silo_file
from fedtmle.data.source import load, load_all

__all__ = [
    "Column",
    "ColumnMap",
    "DataErrors",
    "Database",
    "Kind",
    "Problem",
    "Schema",
    "SiloFile",
    "load",
    "load_all",
    "read_silo_file",
]

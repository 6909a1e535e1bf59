"""`silo.toml`: where a hospital keeps its table, and its own names, units and level codes.

    [silo]
    name = "north"

    [data]                       # relative to this file's folder
    path = "infants.parquet"     # .csv or .parquet; or `database = "..."` with `table` or `query`

    [columns]                    # study's name = hospital's; columns not mentioned keep their name
    age = "AGE_YEARS"
    weight = {column = "WT_LB", scale = 0.4536}              # value * scale + shift
    sex = {column = "SEX", levels = {M = "male", F = "female"}}
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtmle.data.problems import Findings
from fedtmle.errors import InputError


@dataclass(frozen=True, kw_only=True)
class ColumnMap:
    """The hospital's column behind a study's: unit conversion value * scale + shift, or level codes."""

    column: str
    scale: float = 1.0
    shift: float = 0.0
    levels: Mapping[str, str] | None = None  # the hospital's code -> the study's level

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and math.isfinite(self.shift)) or self.scale == 0.0:
            raise InputError("scale and shift are finite numbers, scale not zero")
        if self.levels is not None and self.converts:
            raise InputError("a column has a scale and shift or has levels, not both")

    @property
    def converts(self) -> bool:
        """Whether the hospital's unit is another than the study's."""
        return (self.scale, self.shift) != (1.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Database:
    """A DuckDB file, opened read-only, and what to read in it: a table or a query."""

    path: Path
    table: str | None = None
    query: str | None = None

    def __post_init__(self) -> None:
        if (self.table is None) == (self.query is None):
            raise InputError("a database needs a table or a query, and not both")


@dataclass(frozen=True, kw_only=True)
class SiloFile:
    """What a hospital states about its own table."""

    path: Path
    name: str
    data: Path | Database
    columns: Mapping[str, ColumnMap]


_KEYS: Mapping[str, Mapping[str, type]] = {
    "silo": {"name": str},
    "data": {"path": str, "database": str, "table": str, "query": str},
}
_COLUMN_KEYS = frozenset({"column", "scale", "shift", "levels"})


def read_silo_file(path: str | Path) -> SiloFile:
    """The silo file at ``path``; raises `DataErrors` with all its mistakes."""
    path = Path(path)
    findings = Findings(file=str(path))
    text = _text(path, findings)
    document = _document(text, findings)
    findings.settle()
    reader = _Reader(text, document, findings)
    name, data, columns = reader.name(), reader.data(path.parent), reader.columns()
    findings.settle()
    return SiloFile(path=path, name=name, data=data, columns=columns)


def _text(path: Path, findings: Findings) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        findings.add("the file does not exist", "check the path")
    except (OSError, UnicodeDecodeError):
        findings.add("the file cannot be read", "check that it is UTF-8 text and its permissions")
    return ""


def _document(text: str, findings: Findings) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # The parser's message may quote a level code; only its line number goes on.
        line = re.search(r"at line (\d+)", str(error))
        findings.add("this is not TOML", "mend its syntax", line=int(line[1]) if line else None)
    return {}


class _Reader:
    """Turns the document into values and notes every mistake on the way."""

    def __init__(self, text: str, document: dict[str, Any], findings: Findings) -> None:
        self._lines = text.splitlines()
        self._findings = findings
        self._sections = {name: self._section(document, name) for name in ("silo", "data", "columns")}
        for name in document:
            if name not in self._sections:
                self._mistake(name, None, "unknown section", "a silo file has [silo], [data] and [columns]")

    def name(self) -> str:
        name = self._sections["silo"].get("name", "")
        if not name:
            self._mistake("silo", "name", "the silo has no name", "state it as text")
        return str(name)

    def data(self, folder: Path) -> Path | Database:
        given = self._sections["data"]
        if given.keys() == {"path"}:
            return folder / given["path"]
        if given.keys() in ({"database", "table"}, {"database", "query"}):
            return Database(
                path=folder / given["database"], table=given.get("table"), query=given.get("query")
            )
        fix = "give path, or database and table, or database and query"
        self._mistake("data", None, "does not say what to read", fix)
        return folder

    def columns(self) -> dict[str, ColumnMap]:
        maps = {name: self._column(name, entry) for name, entry in self._sections["columns"].items()}
        return {name: column for name, column in maps.items() if column is not None}

    def _section(self, document: dict[str, Any], name: str) -> dict[str, Any]:
        section = document.get(name, {})
        if not isinstance(section, dict):
            self._mistake(name, None, "is not a section", f"write [{name}] and its keys below")
            return {}
        allowed = _KEYS.get(name)
        for key in section if allowed is not None else ():
            if key not in allowed:
                self._mistake(name, key, "unknown key", f"the keys of [{name}] are {', '.join(allowed)}")
            elif not isinstance(section[key], allowed[key]):
                self._mistake(name, key, "is not text", "write it in quotes")
        return {
            key: value
            for key, value in section.items()
            if allowed is None or (key in allowed and isinstance(value, allowed[key]))
        }

    def _column(self, name: str, entry: object) -> ColumnMap | None:
        entry = {"column": entry} if isinstance(entry, str) else entry
        if not isinstance(entry, dict):
            self._mistake("columns", name, "is neither a name nor a table", 'write "their_name" or {column = ...}')
            return None
        unknown = [key for key in entry if key not in _COLUMN_KEYS]
        for key in unknown:
            self._mistake("columns", name, f"unknown key '{key}'", "use column, scale, shift and levels")
        wrong = _wrong_types(entry)
        for key, fix in wrong.items():
            self._mistake("columns", name, f"'{key}' is of the wrong type", fix)
        if unknown or wrong:
            return None
        levels = entry.get("levels")
        try:
            return ColumnMap(
                column=entry.get("column", name),
                scale=float(entry.get("scale", 1.0)),
                shift=float(entry.get("shift", 0.0)),
                levels=levels and {code: str(level) for code, level in levels.items()},
            )
        except InputError as error:
            self._mistake("columns", name, str(error), "correct it")
            return None

    def _mistake(self, section: str, key: str | None, what: str, fix: str) -> None:
        place = f"[{section}]" if key is None else f"[{section}] {key}"
        self._findings.add(f"{place}: {what}", fix, line=self._line(section, key))

    def _line(self, section: str, key: str | None) -> int | None:
        """Where a key stands, if it is written plainly on a line of its own."""
        current: str | None = None
        for number, line in enumerate(self._lines, start=1):
            header = re.match(r"\s*\[([^\[\]]+)\]", line)
            current = header[1].strip() if header else current
            if key is None and header and current == section:
                return number
            if key is not None and current == section and re.match(rf'\s*["\']?{re.escape(key)}["\']?\s*=', line):
                return number
        return None


def _wrong_types(entry: Mapping[str, object]) -> dict[str, str]:
    """The keys of a column's table that hold the wrong type, with what each should be."""
    wrong = {}
    if not isinstance(entry.get("column", ""), str):
        wrong["column"] = "write the hospital's column name in quotes"
    for key in ("scale", "shift"):
        value = entry.get(key, 1.0)
        if isinstance(value, bool) or not isinstance(value, int | float):
            wrong[key] = "write a number"
    levels = entry.get("levels", {"": ""})
    if not isinstance(levels, dict) or not levels or not all(_is_level(level) for level in levels.values()):
        wrong["levels"] = 'write {"their code" = "study\'s level", ...}'
    return wrong


def _is_level(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))

"""The two descriptions of a silo's table: what a study asks of it, and what the hospital says about it.

`Schema` has the study's columns with their kinds, bounds and levels. `silo.toml` says where a hospital keeps
its table, its own names, units and level codes, and what it allows:

[silo]
name = "north"
home = "/srv/fedtmle"        # one folder for all silos of the institution; the account's own if left out

[data]                       # relative to this file's folder
path = "infants.parquet"     # .csv or .parquet; or a `database` with `table` or `query` (`data.database`)
encoding = "latin-1"         # of a .csv: utf-8 (the default), latin-1, cp1252 or utf-16
decimal = ","                # of the numbers in a .csv, with thousands = "." if they are grouped: 1.234,5
stream = true                # read it in batches at every pass: for a table larger than memory
person = "id"                # the column of the person, by which the home knows whose rows these are
period = "visit"             # of a table with one row per person and period: the period's column, 1, 2, ...

[columns]                    # study's name = hospital's; columns not mentioned keep their name
age = "AGE_YEARS"
weight = {column = "WT_LB", unit = "lb"}                 # to the unit that the study's dictionary declares
height = {column = "HT", scale = 2.54}                   # or value * scale + shift
glucose = {column = "GLUC", unit = "mg/dL", molar_mass = 180.16}    # to mmol/L: in g/mol
stay = {from = "ADMITTED", to = "DISCHARGED", format = "%d.%m.%Y"}   # dates; ISO dates need no format
sex = {column = "SEX", levels = {M = "male", F = "female"}, missing = ["U", 9]}
crp = {absent = true}        # not measured here: missing in every record, where the study allows it
family = {column = "FAM_NO", secret = "words that the hospitals alone share"}

[policy]                     # may be stricter than the package's own limits; laxer only with a reason
min_rows = 50                # the keys are those of `protocol.guard.Policy`
release = true               # this silo's own estimate may be shown
min_arm_rows = 5             # laxer than 10: it needs the reason below, which every approval signs

[policy.reasons]             # shown to all parties, in the result: nothing about records belongs here
min_arm_rows = "rare disease; decision 12/2026 of the data protection officer"

[disclosure]                 # how much of a column no study may disclose
centre = "public.csv"        # a public table with the study's names; no silo's records
column = "sbp_12"            # the study's name of a numeric column
attributes = ["mean", "record"]
min_uncertainty = 0.5        # what must stay unknown of each attribute, in the column's units
radius = 95                  # how closely an attacker is assumed to know each value beforehand
noise = 0.0                  # declared norm of all errors of the answers together
"""

from __future__ import annotations

import difflib
import enum
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeGuard

from fedtmle.data.database import DatabaseQuery, names_database, sqlite_query
from fedtmle.defects import Defects, Lines, Toml
from fedtmle.errors import InputError
from fedtmle.location import home_of
from fedtmle.protocol.policy import Policy
from fedtmle_core.home import is_home, records_folder


class Kind(enum.Enum):
    """How the study reads a column."""

    NUMERIC = "numeric"
    COUNT = "count"  # 0, 1, 2, ...; numeric in the table
    BINARY = "binary"  # 0 and 1; numeric in the table
    FACTOR = "factor"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column that a study needs.

    ``bounds`` are for numbers and counts. ``levels`` are for factors and binary columns; those of a binary
    column are (the name of 0, the name of 1).
    ``outside`` is the message for values beyond the bounds, and what to do about them; ``if_missing`` is
    what to do about missing values. ``unit`` is the unit in the study's dictionary.
    """

    name: str
    kind: Kind
    may_be_missing: bool = False
    bounds: tuple[float, float] | None = None
    levels: tuple[str, ...] | None = None
    outside: tuple[str, str] = (
        "is outside the declared bounds",
        "check the unit (scale and shift in the silo file), the records or the study's bounds",
    )
    if_missing: str = "complete it"
    unit: str = ""

    def __post_init__(self) -> None:
        if self.bounds is not None:
            if self.kind not in (Kind.NUMERIC, Kind.COUNT):
                raise InputError(f"column '{self.name}': bounds are for numeric columns")
            low, high = self.bounds
            if math.isnan(low) or math.isnan(high) or low >= high:
                raise InputError(f"column '{self.name}': bounds must be (low, high) with low < high")
        if self.levels is not None:
            if self.kind in (Kind.NUMERIC, Kind.COUNT):
                raise InputError(f"column '{self.name}': levels are for factors and binary columns")
            if not self.levels or len(set(self.levels)) != len(self.levels):
                raise InputError(
                    f"column '{self.name}': levels must be distinct, and there must be at least one"
                )
            if self.kind is Kind.BINARY and len(self.levels) != 2:
                raise InputError(f"column '{self.name}': a binary column needs two levels, that of 0 first")


@dataclass(frozen=True)
class Schema:
    """The columns that a study needs; one name may be asked both as numbers and as a factor."""

    columns: tuple[Column, ...]

    def __post_init__(self) -> None:
        if not self.columns:
            raise InputError("a schema must have at least one column")
        object.__setattr__(self, "columns", tuple(dict.fromkeys(self.columns)))
        declared: dict[tuple[str, bool], Column] = {}
        for column in self.columns:
            as_factor = column.kind is Kind.FACTOR
            if declared.setdefault((column.name, as_factor), column) != column:
                reading = "as a factor" if as_factor else "as numbers"
                raise InputError(
                    f"column '{column.name}' is declared twice {reading}, and differently: declare it once"
                )

    @property
    def names(self) -> tuple[str, ...]:
        """The distinct names, in the order in which they are first declared."""
        return tuple(dict.fromkeys(column.name for column in self.columns))

    def __getitem__(self, name: str) -> tuple[Column, ...]:
        """Return the declarations of one name: one column, or its numeric and its factor reading."""
        return tuple(column for column in self.columns if column.name == name)


SHORTEST_SECRET = 16  # characters; a shorter one is soon guessed
TABLES = (".csv", ".parquet")  # extensions of tables, which are no silo files
ATTRIBUTES = ("mean", "record")
ENCODINGS = ("utf-8", "latin-1", "cp1252", "utf-16")
_CSV_KEYS = ("encoding", "decimal", "thousands")
_LONG_KEYS = ("person", "period")
_SECTIONS = ("silo", "data", "columns", "policy", "disclosure")
_COLUMN_KEYS = ("column", "scale", "shift", "unit", "molar_mass", "levels", "missing", "secret", "absent")
_DATE_KEYS = ("from", "to", "format")  # keys for the difference of two dates
_TEXT_KEYS = ("column", "unit", "secret", *_DATE_KEYS)
_DISCLOSURE_KEYS = ("centre", "column", "attributes", "min_uncertainty", "radius", "noise")


@dataclass(frozen=True, kw_only=True)
class ColumnMap:
    """The hospital's column behind a study's: unit conversion value * scale + shift, or level codes.

    ``missing`` are codes for a missing value, such as 999 or "unknown", in the hospital's own units; they are
    removed first. ``secret`` replaces cluster identifiers by keyed digests, which are the same in every silo
    that was given the same secret. ``absent`` says that the hospital has no such column: the variable is
    missing in all of its records, which the study must allow. ``unit`` is the name of the hospital's
    unit, from which scale and shift follow; ``molar_mass`` (g/mol) is for concentrations. ``start`` and
    ``end``, given instead of ``column``, are two columns of dates: the variable is the time between them, in
    the unit of the dictionary. ``format`` is that of dates stored as text, as in "%d.%m.%Y".
    """

    column: str = ""
    scale: float = 1.0
    shift: float = 0.0
    levels: Mapping[str, str] | None = None  # the hospital's code -> the study's level
    missing: tuple[str, ...] = ()
    secret: str | None = field(default=None, repr=False)
    absent: bool = False
    unit: str = ""
    molar_mass: float | None = None
    start: str = ""
    end: str = ""
    format: str = ""

    def __post_init__(self) -> None:
        self._check_dates()
        if self.molar_mass is not None and not (math.isfinite(self.molar_mass) and self.molar_mass > 0):
            raise InputError("molar_mass must be a number above 0, in g/mol")
        if self.unit and (self.converts or self.levels is not None or self.is_difference):
            raise InputError(
                "a column whose unit is given by name can have no scale, shift, levels or dates, "
                "because the unit converts it"
            )
        if self.molar_mass is not None and not self.unit:
            raise InputError("molar_mass needs a unit by name, such as mg/dL")
        if not (math.isfinite(self.scale) and math.isfinite(self.shift)) or self.scale == 0.0:
            raise InputError("scale and shift must be finite numbers, and scale must not be zero")
        if self.levels is not None and self.converts:
            raise InputError("a column can have scale and shift, or levels, but not both")
        if self.levels is not None and set(self.missing) & set(self.levels):
            raise InputError("a code is both a level and missing")
        if self.secret is not None and len(self.secret) < SHORTEST_SECRET:
            raise InputError(f"a secret must have at least {SHORTEST_SECRET} characters")

    def _check_dates(self) -> None:
        if bool(self.start) != bool(self.end):
            raise InputError("a difference of dates needs both from and to")
        if self.format and not self.is_difference:
            raise InputError("format is only for dates, which from and to name")
        if self.is_difference and (self.column or self.levels is not None or self.secret is not None):
            raise InputError("a difference of dates can have from, to, format and missing, and no other key")
        if not self.is_difference and not self.column:
            raise InputError("a column must have a name")

    @property
    def is_difference(self) -> bool:
        """Whether this is the time between two dates."""
        return bool(self.start)

    @property
    def sources(self) -> tuple[str, ...]:
        """The hospital's columns."""
        return (self.start, self.end) if self.is_difference else (self.column,)

    @property
    def converts(self) -> bool:
        """Whether the hospital's unit differs from the study's."""
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
class CsvFile:
    """A .csv file with the encoding and the number format that the silo file states."""

    path: Path
    encoding: str = "utf-8"
    decimal: str = "."
    thousands: str = ""

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            raise InputError(f"encoding: expected one of {', '.join(ENCODINGS)}")
        if self.decimal not in (".", ","):
            raise InputError('decimal: expected "." or ","')
        if self.thousands not in ("", ".", ",", " ", "'") or self.thousands == self.decimal:
            raise InputError("thousands: expected a point, a comma, a blank or ', other than decimal")


Place = Path | CsvFile | Database | DatabaseQuery


@dataclass(frozen=True, kw_only=True)
class LongTable:
    """A table with one row per person and period. It is read as a wide table with one row per person.

    A column "sev" of the long table gives "sev1", "sev2", ... in the wide one, "sev" if it is the same in
    all rows of a person, and "sev_last" from the person's last row.

    Parameters
    ----------
    data
        Any source of a table.
    person
        The column that says whose a row is.
    period
        The column that numbers the periods: 1, 2, and so on.

    Examples
    --------
    >>> ft.LongTable(data="visits.csv", person="id", period="visit").person
    'id'
    """

    data: object
    person: str
    period: str


@dataclass(frozen=True, kw_only=True)
class Disclosure:
    """The section [disclosure]: how much of a column's attributes must stay unknown to any study."""

    centre: Path
    column: str
    attributes: tuple[str, ...]
    min_uncertainty: float
    radius: float
    noise: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SiloFile:
    """What a hospital states about its own table."""

    path: Path
    name: str
    data: Place | LongTable
    columns: Mapping[str, ColumnMap]
    policy: Policy
    # The folder with the institution's key and records, which may not be made yet.
    home: Path = field(default_factory=lambda: home_of("", Path()))
    disclosure: Disclosure | None = None
    person: str = ""  # the hospital's column that identifies a person; empty if the file names none
    stream: bool = False  # read in batches at every pass, never held in memory


def read_silo_file(path: str | Path) -> SiloFile:
    """Read the silo file at ``path``; raise `DataErrors` with all its defects."""
    path = Path(path)
    defects = Defects(file=str(path))
    if path.suffix.lower() in TABLES:
        defects.add("this is a table", "give a silo file (.toml) whose section [data] names it")
    defects.raise_if_any()
    text = _text(path, defects)
    document = _document(text, defects)
    defects.raise_if_any()
    reader = _SiloFileReader(text, document, defects)
    data, person, period = reader.data(path.parent), reader.person(), reader.period()
    file = SiloFile(
        path=path,
        name=reader.name(),
        home=reader.home(path.parent),
        data=data,
        person=person,
        stream=reader.stream(),
        columns=reader.columns(),
        policy=reader.policy(),
        disclosure=reader.disclosure(path.parent),
    )
    defects.raise_if_any()
    if isinstance(data, Database):
        data = sqlite_query(data.path, data.table, data.query) or data
    if isinstance(data, DatabaseQuery):
        folder = records_folder(file.home, file.name)
        # A run in one process needs no home; its copies of streamed rows are then beside the silo file.
        data = replace(data, folder=folder if is_home(file.home) else path.with_suffix(".copies"))
    return replace(file, data=LongTable(data=data, person=person, period=period) if period else data)


def _text(path: Path, defects: Defects) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        defects.add("the file does not exist", "check the path")
    except (OSError, UnicodeDecodeError):
        defects.add("the file cannot be read", "check its permissions and that it is UTF-8 text")
    return ""


def _document(text: str, defects: Defects) -> dict[str, Toml]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # The parser's message may quote a level code, so that only its line number is passed on.
        line = re.search(r"at line (\d+)", str(error))
        defects.add("this is not TOML", "correct its syntax", line=int(line[1]) if line else None)
    return {}


class _SiloFileReader:
    """Reads the sections of a silo file and collects their defects."""

    def __init__(self, text: str, document: dict[str, Toml], defects: Defects) -> None:
        self._lines = Lines(text)
        self._document = document
        self._defects = defects
        for name in (name for name in document if name not in _SECTIONS):
            self._add(name, None, "unknown section", f"the sections are {', '.join(_SECTIONS)}")

    def name(self) -> str:
        name = self._texts("silo", ("name", "home")).get("name", "")
        if not name:
            self._add("silo", None, "the silo has no name", 'give name = "..."')
        return name

    def home(self, folder: Path) -> Path:
        stated = self._section("silo").get("home", "")
        return home_of(stated if isinstance(stated, str) else "", folder)

    def data(self, folder: Path) -> Place:
        section = {key: value for key, value in self._section("data").items() if key not in _LONG_KEYS}
        if names_database(section):
            query, defects = DatabaseQuery.parse(section, folder)
            for key, (message, fix) in defects.items():
                self._add("data", key, message, fix)
            return folder if query is None else query
        other = ("stream", *_LONG_KEYS)
        given = self._texts("data", ("path", "database", "table", "query", *_CSV_KEYS), other=other)
        written = {key: given.pop(key) for key in _CSV_KEYS if key in given}
        if given.keys() == {"path"}:
            return self._file(folder / given["path"], written)
        for key in written:
            self._add("data", key, "this is for a .csv file only", "leave it out")
        if given.keys() in ({"database", "table"}, {"database", "query"}):
            where = folder / given["database"]
            return Database(path=where, table=given.get("table"), query=given.get("query"))
        fix = "give path, or database and table, or database and query"
        self._add("data", None, "this does not say what to read", fix)
        return folder

    def _file(self, path: Path, written: Mapping[str, str]) -> Path | CsvFile:
        """Return the file to read, with the encoding and number format of a .csv if they are stated."""
        if not written:
            return path
        if path.suffix.lower() != ".csv":
            self._add("data", next(iter(written)), "this is for a .csv file only", "leave it out")
            return path
        try:
            return CsvFile(path=path, **written)
        except InputError as error:
            key, _, message = str(error).partition(": ")
            self._add("data", key, message, "correct it")
            return path

    def person(self) -> str:
        """Return the column that identifies a person; empty if the file names none."""
        person, has_periods = self._column_name("person"), "period" in self._section("data")
        if has_periods and not person:
            self._add("data", "period", "a long table also needs person", 'give person = "their column"')
        return person

    def period(self) -> str:
        """Return the column of the period of a long table; empty for a wide one."""
        period = self._column_name("period")
        if period and self.stream():
            fix = "leave out stream, or let a query of a database make the table wide"
            self._add("data", "stream", "a long table cannot be read in batches", fix)
        return period

    def _column_name(self, key: str) -> str:
        value = self._section("data").get(key)
        if value is None:
            return ""
        if not (isinstance(value, str) and value):
            self._add("data", key, "this is not the name of a column", "write it in quotes")
            return ""
        return value

    def stream(self) -> bool:
        given = self._section("data").get("stream", False)
        if not isinstance(given, bool):
            self._add("data", "stream", "this is neither true nor false", "write it without quotes")
        return given is True

    def columns(self) -> dict[str, ColumnMap]:
        maps = {name: self._column(name, entry) for name, entry in self._section("columns").items()}
        return {name: column for name, column in maps.items() if column is not None}

    def policy(self) -> Policy:
        policy, messages = Policy.parse(self._section("policy"))
        for key, message in messages.items():
            self._add("policy", key, message, "correct it, or leave it out for the package's own limit")
        return policy

    def disclosure(self, folder: Path) -> Disclosure | None:
        if "disclosure" not in self._document:
            return None
        section, before = self._section("disclosure"), len(self._defects)

        def add(key: str, message: str, fix: str) -> None:
            self._add("disclosure", key, message, fix)

        for key in (key for key in section if key not in _DISCLOSURE_KEYS):
            add(key, "unknown key", f"the keys of [disclosure] are {', '.join(_DISCLOSURE_KEYS)}")
        centre, column = section.get("centre"), section.get("column")
        if not (isinstance(centre, str) and centre):
            add("centre", "this is missing, or not text", "give the path of a public table, in quotes")
        if not (isinstance(column, str) and column):
            fix = "give the study's name of a numeric column, in quotes"
            add("column", "this is missing, or not text", fix)
        attributes = section.get("attributes")
        if not (isinstance(attributes, list) and attributes and all(a in ATTRIBUTES for a in attributes)):
            add("attributes", "this is not a list of attributes", f"name some of {list(ATTRIBUTES)}")
        required, radius = section.get("min_uncertainty"), section.get("radius")
        for key, value in {"min_uncertainty": required, "radius": radius}.items():
            if not (_is_number(value) and value > 0):
                add(key, "this is missing, or not a number above 0", "give it in the column's units")
        noise = section.get("noise", 0.0)
        if not (_is_number(noise) and noise >= 0):
            add("noise", "this is not a number of at least 0", "correct it, or leave it out for 0")
        if _is_number(required) and _is_number(radius) and required > radius > 0:
            message = "more must stay unknown than is unknown beforehand: every study would be refused"
            add("min_uncertainty", message, "give a number below the radius")
        if len(self._defects) > before:
            return None
        return Disclosure(
            centre=folder / str(centre),
            column=str(column),
            attributes=tuple(map(str, dict.fromkeys(attributes))) if isinstance(attributes, list) else (),
            min_uncertainty=_float(required),
            radius=_float(radius),
            noise=_float(noise),
        )

    def _section(self, name: str) -> dict[str, Toml]:
        section = self._document.get(name, {})
        if isinstance(section, dict):
            return section
        self._add(name, None, "this is not a section", f"write [{name}] and its keys below it")
        return {}

    def _texts(self, name: str, allowed: tuple[str, ...], other: tuple[str, ...] = ()) -> dict[str, str]:
        """Return the texts of a section by key; keys in ``other`` are read elsewhere, and are not text."""
        section = {key: value for key, value in self._section(name).items() if key not in other}
        for key, value in section.items():
            if key not in allowed:
                known = ", ".join((*allowed, *other))
                self._add(name, key, "unknown key", f"the keys of [{name}] are {known}")
            elif not isinstance(value, str):
                self._add(name, key, "this is not text", "write it in quotes")
        return {key: value for key, value in section.items() if key in allowed and isinstance(value, str)}

    def _column(self, name: str, entry: Toml) -> ColumnMap | None:
        entry = {"column": entry} if isinstance(entry, str) else entry
        defects = _column_defects(entry)
        if isinstance(entry, dict) and not defects:
            levels, missing, secret = entry.get("levels"), entry.get("missing", []), entry.get("secret")
            mass = entry.get("molar_mass")
            is_difference = "from" in entry or "to" in entry
            try:
                return ColumnMap(
                    column=str(entry.get("column", "" if is_difference else name)),
                    unit=str(entry.get("unit", "")),
                    molar_mass=None if mass is None else _float(mass),
                    start=str(entry.get("from", "")),
                    end=str(entry.get("to", "")),
                    format=str(entry.get("format", "")),
                    scale=_float(entry.get("scale", 1.0)),
                    shift=_float(entry.get("shift", 0.0)),
                    levels=_as_text(levels) if isinstance(levels, dict) else None,
                    missing=tuple(map(str, missing)) if isinstance(missing, list) else (),
                    secret=secret if isinstance(secret, str) else None,
                    absent=entry.get("absent", False) is True,
                )
            except (InputError, OverflowError) as error:
                defects = {str(error): "correct it"}
        for message, fix in defects.items():
            self._add("columns", name, message, fix)
        return None

    def _add(self, section: str, key: str | None, message: str, fix: str) -> None:
        where = f"[{section}]" if key is None else f"[{section}] {key}"
        line = self._lines.of((section,) if key is None else (section, key))
        self._defects.add(f"{where}: {message}", fix, line=line)


def _is_number(value: Toml | None) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _float(value: Toml | None) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _as_text(levels: Mapping[str, Toml]) -> dict[str, str]:
    return {code: str(level) for code, level in levels.items()}


def _column_defects(entry: Toml) -> dict[str, str]:
    """Return what is wrong with a column's entry, and what to do about each defect."""
    if not isinstance(entry, dict):
        return {"this is neither a name nor a table": 'write "their_name" or {column = "their_name", ...}'}
    defects = {}
    known = (*_COLUMN_KEYS, *_DATE_KEYS)
    for key in (key for key in entry if key not in known):
        # A key that resembles none of ours may be a misplaced level code, and is not quoted.
        quoted = f" '{key}'" if difflib.get_close_matches(key, known) else ""
        defects[f"unknown key{quoted}"] = f"the keys of a column are {', '.join(known)}"
    for key in _TEXT_KEYS:
        if not isinstance(entry.get(key, ""), str):
            defects[f"'{key}' is not text"] = "write it in quotes"
    for key in ("scale", "shift", "molar_mass"):
        if isinstance(entry.get(key), bool) or not isinstance(entry.get(key, 1.0), int | float):
            defects[f"'{key}' is not a number"] = "write it without quotes"
    levels = entry.get("levels", {"": ""})
    if not isinstance(levels, dict) or not levels or not all(type(v) in (str, int) for v in levels.values()):
        defects["'levels' is not a table of codes"] = 'write {"their code" = "the study\'s level", ...}'
    missing = entry.get("missing", [""])
    if not (
        isinstance(missing, list) and missing and all(type(code) in (str, int, float) for code in missing)
    ):
        defects["'missing' is not a list of codes"] = 'write a list such as [999, "unknown"]'
    if not isinstance(entry.get("absent", False), bool):
        defects["'absent' is neither true nor false"] = "write it without quotes"
    return defects

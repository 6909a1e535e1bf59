"""A hospital's side of the study: its columns behind the study's names, and its database."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedtmle.data.schema import Findings
from fedtmle.errors import InputError
from fedtmle.protocol.guard import Policy

SHORTEST_SECRET = 16  # a shorter one is soon guessed


@dataclass(frozen=True, kw_only=True)
class ColumnMap:
    """The hospital's column behind a study's: unit conversion value * scale + shift, or level codes.

    ``missing`` are codes that stand for no value, such as 999 or "unknown", in the hospital's own units;
    they are taken out first. ``secret`` replaces identifiers of clusters by keyed digests, the same in
    every silo that was given the same secret.
    """

    column: str
    scale: float = 1.0
    shift: float = 0.0
    levels: Mapping[str, str] | None = None  # the hospital's code -> the study's level
    missing: tuple[str, ...] = ()
    secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and math.isfinite(self.shift)) or self.scale == 0.0:
            raise InputError("scale and shift are finite numbers, scale not zero")
        if self.levels is not None and self.converts:
            raise InputError("a column has scale and shift or has levels, not both")
        if self.levels is not None and set(self.missing) & set(self.levels):
            raise InputError("a code is both a level and missing")
        if self.secret is not None and len(self.secret) < SHORTEST_SECRET:
            raise InputError(f"a secret has at least {SHORTEST_SECRET} characters")

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


# The section `[disclosure]` of a silo file: of which attributes no study may tell too much.
#
# [disclosure]
# centre = "public.csv"        # a public table with the study's names; no silo's records
# column = "sbp_12"            # the study's name of a numeric column
# attributes = ["mean", "record"]
# floor = 0.5                  # what must stay unknown of each, in the column's units
# radius = 95                  # how closely an attacker is assumed to know each value beforehand
# noise = 0.0                  # declared norm of all errors of the answers together


ATTRIBUTES = ("mean", "record")
_KEYS = ("centre", "column", "attributes", "floor", "radius", "noise")
_WHERE = {"centre": "the path of a public table", "column": "the study's name of a numeric column"}


@dataclass(frozen=True, kw_only=True)
class Disclosure:
    """A floor on omega of a column's attributes, as a hospital states it."""

    centre: Path
    column: str
    attributes: tuple[str, ...]
    floor: float
    radius: float
    noise: float = 0.0

    @classmethod
    def parse(
        cls, section: Mapping[str, Any], folder: Path
    ) -> tuple[Disclosure | None, dict[str, tuple[str, str]]]:
        """What the section says, or by key what is wrong with it and what to do."""
        mistakes = {
            key: ("unknown key", f"the keys of [disclosure] are {', '.join(_KEYS)}")
            for key in section
            if key not in _KEYS
        }
        for key, what in _WHERE.items():
            if not isinstance(section.get(key), str) or not section[key]:
                mistakes[key] = ("this is missing, or not text", f"give {what}, in quotes")
        named = section.get("attributes")
        if not (isinstance(named, list) and named and all(name in ATTRIBUTES for name in named)):
            mistakes["attributes"] = ("this is no list of attributes", f"name some of {list(ATTRIBUTES)}")
        for key in ("floor", "radius"):
            if not (_is_number(section.get(key)) and section[key] > 0):
                mistakes[key] = ("this is missing, or no number above 0", "give it in the column's units")
        if not (_is_number(section.get("noise", 0.0)) and section.get("noise", 0.0) >= 0):
            mistakes["noise"] = ("this is no number of at least 0", "correct it, or leave it out for 0")
        if not {"floor", "radius"} & mistakes.keys() and section["floor"] > section["radius"]:
            what = "more must stay unknown than is unknown beforehand: every study would be refused"
            mistakes["floor"] = (what, "give a floor below the radius")
        if mistakes:
            return None, mistakes
        return cls(
            centre=folder / section["centre"],
            column=section["column"],
            attributes=tuple(dict.fromkeys(section["attributes"])),
            floor=float(section["floor"]),
            radius=float(section["radius"]),
            noise=float(section.get("noise", 0.0)),
        ), {}


def _is_number(given: object) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool) and math.isfinite(given)


# `silo.toml`: where a hospital keeps its table, and its own names, units and level codes.
#
# [silo]
# name = "north"
#
# [data]                       # relative to this file's folder
# path = "infants.parquet"     # .csv or .parquet; or `database = "..."` with `table` or `query`
# stream = true                # read it in batches at every pass: for a table larger than memory
#
# [columns]                    # study's name = hospital's; columns not mentioned keep their name
# age = "AGE_YEARS"
# weight = {column = "WT_LB", scale = 0.4536}              # value * scale + shift
# sex = {column = "SEX", levels = {M = "male", F = "female"}, missing = ["U", 9]}   # codes of no value
# family = {column = "FAM_NO", secret = "words that the hospitals alone share"}      # cluster identifiers
#
# [policy]                     # may be stricter than the package's own limits, never laxer
# min_rows = 50                # the keys are those of `protocol.guard.Policy`
# release = true               # this silo's own estimate may be shown
#
# [disclosure]                 # what no study may tell of a column: see `data.silofile`


@dataclass(frozen=True, kw_only=True)
class SiloFile:
    """What a hospital states about its own table."""

    path: Path
    name: str
    data: Path | Database
    columns: Mapping[str, ColumnMap]
    policy: Policy
    disclosure: Disclosure | None = None
    stream: bool = False  # read in batches at every pass, never held in memory


_SECTIONS = ("silo", "data", "columns", "policy", "disclosure")
_COLUMN_KEYS = ("column", "scale", "shift", "levels", "missing", "secret")


def read_silo_file(path: str | Path) -> SiloFile:
    """The silo file at ``path``; raises `DataErrors` with all its mistakes."""
    path = Path(path)
    findings = Findings(file=str(path))
    text = _text(path, findings)
    document = _document(text, findings)
    findings.settle()
    reader = _Reader(text, document, findings)
    name, data, stream, columns, policy, disclosure = (
        reader.name(),
        reader.data(path.parent),
        reader.stream(),
        reader.columns(),
        reader.policy(),
        reader.disclosure(path.parent),
    )
    findings.settle()
    return SiloFile(
        path=path,
        name=name,
        data=data,
        columns=columns,
        policy=policy,
        disclosure=disclosure,
        stream=stream,
    )


def _text(path: Path, findings: Findings) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        findings.add("the file does not exist", "check the path")
    except (OSError, UnicodeDecodeError):
        findings.add("the file cannot be read", "check its permissions and that it is UTF-8 text")
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
        self._document = document
        self._findings = findings
        for name in (name for name in document if name not in _SECTIONS):
            self._mistake(name, None, "unknown section", "a silo file has [silo], [data] and [columns]")

    def name(self) -> str:
        name = self._texts("silo", ("name",)).get("name", "")
        if not name:
            self._mistake("silo", None, "the silo has no name", 'give name = "..."')
        return name

    def data(self, folder: Path) -> Path | Database:
        given = self._texts("data", ("path", "database", "table", "query"), apart=("stream",))
        if given.keys() == {"path"}:
            return folder / given["path"]
        if given.keys() in ({"database", "table"}, {"database", "query"}):
            where = folder / given["database"]
            return Database(path=where, table=given.get("table"), query=given.get("query"))
        fix = "give path, or database and table, or database and query"
        self._mistake("data", None, "this does not say what to read", fix)
        return folder

    def stream(self) -> bool:
        given = self._section("data").get("stream", False)
        if not isinstance(given, bool):
            self._mistake("data", "stream", "this is neither true nor false", "write it without quotes")
        return given is True

    def columns(self) -> dict[str, ColumnMap]:
        maps = {name: self._column(name, entry) for name, entry in self._section("columns").items()}
        return {name: column for name, column in maps.items() if column is not None}

    def policy(self) -> Policy:
        policy, mistakes = Policy.parse(self._section("policy"))
        for key, what in mistakes.items():
            self._mistake("policy", key, what, "correct it, or leave it out for the package's own limit")
        return policy

    def disclosure(self, folder: Path) -> Disclosure | None:
        if "disclosure" not in self._document:
            return None
        disclosure, mistakes = Disclosure.parse(self._section("disclosure"), folder)
        for key, (what, fix) in mistakes.items():
            self._mistake("disclosure", key, what, fix)
        return disclosure

    def _section(self, name: str) -> dict[str, Any]:
        section = self._document.get(name, {})
        if isinstance(section, dict):
            return section
        self._mistake(name, None, "this is not a section", f"write [{name}] and its keys below it")
        return {}

    def _texts(self, name: str, allowed: tuple[str, ...], apart: tuple[str, ...] = ()) -> dict[str, str]:
        """A section of texts with known keys; those ``apart`` are no texts, and read elsewhere."""
        section = {key: value for key, value in self._section(name).items() if key not in apart}
        for key, value in section.items():
            if key not in allowed:
                known = ", ".join((*allowed, *apart))
                self._mistake(name, key, "unknown key", f"the keys of [{name}] are {known}")
            elif not isinstance(value, str):
                self._mistake(name, key, "this is not text", "write it in quotes")
        return {key: value for key, value in section.items() if key in allowed and isinstance(value, str)}

    def _column(self, name: str, entry: object) -> ColumnMap | None:
        entry = {"column": entry} if isinstance(entry, str) else entry
        mistakes = _column_mistakes(entry)
        if isinstance(entry, dict) and not mistakes:
            levels = entry.get("levels")
            try:
                return ColumnMap(
                    column=entry.get("column", name),
                    scale=float(entry.get("scale", 1.0)),
                    shift=float(entry.get("shift", 0.0)),
                    levels=levels and {code: str(level) for code, level in levels.items()},
                    missing=tuple(map(str, entry.get("missing", ()))),
                    secret=entry.get("secret"),
                )
            except (InputError, OverflowError) as error:
                mistakes = {str(error): "correct it"}
        for what, fix in mistakes.items():
            self._mistake("columns", name, what, fix)
        return None

    def _mistake(self, section: str, key: str | None, what: str, fix: str) -> None:
        place = f"[{section}]" if key is None else f"[{section}] {key}"
        line = self._line(section, key) or self._line(section, None)  # a key that is not there: its section
        self._findings.add(f"{place}: {what}", fix, line=line)

    def _line(self, section: str, key: str | None) -> int | None:
        """Where a section or a key of it stands, if it is written plainly on a line of its own."""
        written = None if key is None else re.compile(rf"""\s*["']?{re.escape(key)}["']?\s*=""")
        current = None
        for number, line in enumerate(self._lines, start=1):
            header = re.match(r"\s*\[([^\[\]]+)\]", line)
            current = header[1].strip() if header else current
            if current == section and (header if written is None else written.match(line)):
                return number
        return None


def _column_mistakes(entry: object) -> dict[str, str]:
    """What is wrong with a column's entry, and what to do about each."""
    if not isinstance(entry, dict):
        return {"this is neither a name nor a table": 'write "their_name" or {column = "their_name", ...}'}
    mistakes = {}
    for key in (key for key in entry if key not in _COLUMN_KEYS):
        # A key that resembles none of ours may be a misplaced level code, and is not quoted.
        quoted = f" '{key}'" if difflib.get_close_matches(key, _COLUMN_KEYS) else ""
        mistakes[f"unknown key{quoted}"] = f"the keys of a column are {', '.join(_COLUMN_KEYS)}"
    if not isinstance(entry.get("column", ""), str):
        mistakes["'column' is not text"] = "write the hospital's column name in quotes"
    for key in ("scale", "shift"):
        if isinstance(entry.get(key), bool) or not isinstance(entry.get(key, 1.0), int | float):
            mistakes[f"'{key}' is not a number"] = "write it without quotes"
    levels = entry.get("levels", {"": ""})
    if not isinstance(levels, dict) or not levels or not all(type(v) in (str, int) for v in levels.values()):
        mistakes["'levels' is not a table of codes"] = 'write {"their code" = "the study\'s level", ...}'
    missing = entry.get("missing", [""])
    if not (
        isinstance(missing, list) and missing and all(type(code) in (str, int, float) for code in missing)
    ):
        mistakes["'missing' is not a list of codes"] = 'write such as [999, "unknown"]'
    if not isinstance(entry.get("secret", ""), str):
        mistakes["'secret' is not text"] = "write it in quotes"
    return mistakes

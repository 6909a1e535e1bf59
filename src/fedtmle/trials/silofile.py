"""The silos of a trial: a section of the trial file, or the hospital's own file with its policy.

    [silo]
    name = "north"

    [cdm]
    database = {url_env = "NORTH_CDM"}   # holds postgresql://...; or database = "cdm.duckdb"
    schema = "cdm"

    [policy]
    min_cell = 10

`database` is as in the section [data] of a study's silo file (`data.database`).
"""

from __future__ import annotations

import math
import re
import tomllib
from pathlib import Path

from fedtmle.data.database import parse_place
from fedtmle.defects import Defect, Lines, Toml
from fedtmle.errors import InputError
from fedtmle.protocol.policy import Policy
from fedtmle.studyfile import values
from fedtmle.studyfile.file import StudyFileErrors
from fedtmle.studyfile.toml import Sections
from fedtmle.studyfile.values import TEXT, Key, required
from fedtmle.trials.cohort import Cdm

CDM = {
    "database": required(Key(read=lambda written: written, expected="where the database is")),
    "schema": TEXT,
    "vocabulary_schema": TEXT,
    "part": Key(read=values.several(values.count), expected="[index, count], two whole numbers"),
}


def read_silo(path: Path, name: str) -> Cdm:
    """Return the silo ``name`` from its own file; raise `StudyFileErrors` with all its defects."""
    text, document = read_toml(path)
    sections = Sections(str(path), Lines(text), document, {"silo": {"name"}, "cdm": set(CDM)})
    sections.refuse_unknown((), document, ("silo", "cdm", "policy"))
    stated = sections.values(("silo",), {"name": required(TEXT)})
    if stated.get("name", name) != name:
        message = f"the silo is called '{stated['name']}' here and '{name}' in the trial"
        sections.add(("silo",), "name", message)
    policy, wrong = Policy.parse(sections.table(("policy",)) or {})
    for key, message in wrong.items():
        sections.add(("policy",), key, message)
    cdm = None
    if sections.table(("cdm",)) is None:
        sections.add(("cdm",), None, "the section is missing: where is the database?")
    else:
        cdm = read_cdm(sections, ("cdm",), name=name, folder=path.parent, policy=policy, silo_file=path)
    if sections.defects or cdm is None:
        raise StudyFileErrors(sections.defects)
    return cdm


def read_cdm(
    sections: Sections,
    place: tuple[str, ...],
    *,
    name: str,
    folder: Path,
    policy: Policy | None = None,
    silo_file: Path | None = None,
) -> Cdm | None:
    """Return the database that a section describes; None, with its defects added, if it cannot be read."""

    def make(
        database: object,
        schema: str | None = None,
        vocabulary_schema: str | None = None,
        part: tuple[int, ...] | None = None,
    ) -> Cdm:
        where, defect = parse_place(database, folder)
        if defect is not None:
            raise InputError(f"database: {'; '.join(defect)}")
        if part is not None and len(part) != 2:
            raise InputError("part: expected [index, count], two whole numbers")
        return Cdm(
            name=name,
            part=None if part is None else (part[0], part[1]),
            policy=policy,
            silo_file=silo_file,
            schema=schema,
            vocabulary_schema=vocabulary_schema,
            **where,
        )

    before = len(sections.defects)
    given = sections.values(place, CDM)
    if before != len(sections.defects):
        return None
    made: Cdm | None = sections.construct(place, make, given)
    return made


def share_people(one: Cdm, other: Cdm) -> bool:
    """Return whether two silos read the same schema of the same database, in parts that overlap."""

    def place(cdm: Cdm) -> tuple[object, ...]:
        path = cdm.path or cdm.url_file
        return (path and path.resolve(), cdm.url_env, cdm.schema)

    if place(one) != place(other):
        return False
    if one.part is None or other.part is None:
        return True
    (index, count), (other_index, other_count) = one.part, other.part
    return (index - other_index) % math.gcd(count, other_count) == 0


def read_toml(path: Path) -> tuple[str, dict[str, Toml]]:
    """Return a TOML file's text and content."""
    line, text = None, ""
    try:
        text = path.read_text(encoding="utf-8")
        return text, tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r" \(at line (\d+), column \d+\)", str(error))
        line = int(at[1]) if at else len(text.splitlines())
        message = f"not TOML: {re.sub(r' [(]at .*[)]', '', str(error))}"
    except FileNotFoundError:
        message = "there is no such file"
    except (OSError, UnicodeDecodeError):
        message = "the file cannot be read; check its permissions and that it is UTF-8 text"
    raise StudyFileErrors([Defect(file=str(path), line=line, message=message)])

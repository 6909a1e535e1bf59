"""A draft of a study's dictionary from one table, for a person to edit, and the study file that holds it.

The draft is made from records and so belongs to their owner: levels are labels that occur, and ranges are
rounded outward from the least and the largest value. Both must be replaced by what is possible before the
study is shared.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedtmle.data.convert import Cells, Numbers, in_order
from fedtmle.data.silofile import ColumnMap, read_silo_file
from fedtmle.data.source import read_cells
from fedtmle.errors import InputError
from fedtmle.initial.variables import MOST_LEVELS, Variable, Variables
from fedtmle.model.table import Factor
from fedtmle_core.types import Array

# A dictionary as the section [variables] of a study file, and values as TOML.


def variables_text(variables: Variables) -> str:
    """Return the section [variables] that declares these variables, one line for each."""
    lines = [f"{toml_key(name)} = {toml_text(entry(variable))}" for name, variable in variables.items()]
    return "\n".join(["[variables]", *lines, ""])


def entry(variable: Variable) -> dict[str, object]:
    """Return one variable as the plain values of its entry; keys without a value are left out."""
    levels: object = [code for code, _ in variable.levels]
    if any(words for _, words in variable.levels):
        levels = dict(variable.levels)
    given = {
        "kind": variable.kind,
        "range": None if variable.range is None else [_shortest(end) for end in variable.range],
        "levels": levels,
        "label": variable.label,
        "unit": variable.unit,
        "missing": "" if variable.missing == "refuse" else variable.missing,
    }
    return {key: value for key, value in given.items() if value not in (None, [], "")}


def _shortest(number: float) -> float | int:
    return int(number) if number.is_integer() and abs(number) < 2.0**53 else number


def toml_text(value: object) -> str:
    """Return a value as TOML; a table is inline."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(map(toml_text, value))}]"
        case Mapping():
            return (
                f"{{{', '.join(f'{toml_key(str(key))} = {toml_text(item)}' for key, item in value.items())}}}"
            )
        case _:
            raise InputError(f"a study file cannot hold a value of type {type(value).__name__}")


def toml_key(name: str) -> str:
    """Return a key, in quotes unless it is plain."""
    return name if name and all(c.isascii() and (c.isalnum() or c in "_-") for c in name) else toml_text(name)


FEW_CODES = 8  # whole numbers with at most this many distinct values may be codes
LARGEST_COUNT = 30  # whole numbers up to this are drafted as counts, others as numbers
MOST_REPEATED = 0.5  # text with a larger share of distinct labels identifies records or clusters


@dataclass(frozen=True, kw_only=True)
class Drafted:
    """A column with its guessed declaration (None if there is no guess) and a note to the table's owner."""

    name: str
    variable: Variable | None
    note: str = ""
    has_missing: bool = False


def draft(table: object) -> Variables:
    """Return a draft of a dictionary for the columns of ``table``, for a person to edit.

    Kinds are guessed and ranges are rounded outward: both are yours to correct. A range says what is
    possible, for every silo, and not what occurs in one table. Columns of dates, and columns without
    values, are left out.

    Parameters
    ----------
    table
        A pandas or polars frame, a mapping of arrays, or the path of a .csv, .parquet or silo file.

    Returns
    -------
    Variables
        The draft.

    Raises
    ------
    DataErrors
        The table cannot be read.
    InputError
        ``table`` is of another type.

    Examples
    --------
    >>> ft.draft({"age": np.array([34.0, 71.5]), "sex": np.array(["f", "m"])})["age"].kind
    'number'
    """
    return Variables({each.name: each.variable for each in drafted(table) if each.variable is not None})


def drafted(table: object) -> list[Drafted]:
    """Return what each column of a table seems to be, in the table's order.

    The columns that a silo file maps have the study's names, units and levels.
    """
    if isinstance(table, str | os.PathLike) and Path(table).suffix.lower() == ".toml":
        silo = read_silo_file(Path(table))
        _, theirs = read_cells(silo.data)
        cells = dict(_mapped(theirs, silo.columns))
    else:
        _, read = read_cells(table)
        cells = dict(read)
    return [replace(_of(name, each), has_missing=_has_missing(each)) for name, each in cells.items()]


def _mapped(theirs: Mapping[str, Cells], columns: Mapping[str, ColumnMap]) -> Iterator[tuple[str, Cells]]:
    """Yield the hospital's columns as the study sees them, by the study's names."""
    by_theirs = {column.column: (name, column) for name, column in columns.items() if column.column}
    for name, cells in theirs.items():
        ours, column = by_theirs.get(name, (name, ColumnMap(column=name)))
        yield ours, _converted(cells, column)


def _converted(cells: Cells, column: ColumnMap) -> Cells:
    if isinstance(cells, Numbers):
        codes = [float(code) for code in column.missing if _is_number(code)]
        values = np.where(np.isin(cells.values, codes), np.nan, cells.values)
        return Numbers(values * column.scale + column.shift)
    if isinstance(cells, Factor):
        given = column.levels or {level: level for level in cells.levels}
        kept = {
            level: given[level] for level in cells.levels if level in given and level not in column.missing
        }
        levels = tuple(dict.fromkeys(kept.values()))
        place = [levels.index(kept[level]) if level in kept else -1 for level in cells.levels]
        return Factor(np.array([*place, -1], dtype=np.int64)[cells.codes], levels)
    return cells


def _is_number(code: str) -> bool:
    try:
        float(code)
    except ValueError:
        return False
    return True


def _has_missing(cells: Cells) -> bool:
    if isinstance(cells, Numbers):
        return bool(np.isnan(cells.values).any())
    return isinstance(cells, Factor) and bool((cells.codes < 0).any())


def _of(name: str, cells: Cells) -> Drafted:
    match cells:
        case Numbers():
            return _numbers(name, cells.values[~np.isnan(cells.values)])
        case Factor():
            return _labels(name, cells)
        case _:
            return Drafted(name=name, variable=None, note=f"has {cells.contents}: derive numbers from it")


def _numbers(name: str, values: Array) -> Drafted:
    if not len(values):
        return Drafted(name=name, variable=None, note="has no values")
    if not np.isfinite(values).all():
        return Drafted(name=name, variable=None, note="has infinite values: correct them")
    low, high = float(values.min()), float(values.max())
    distinct = np.unique(values)
    if np.isin(distinct, (0.0, 1.0)).all():
        return Drafted(name=name, variable=Variable(kind="binary"))
    is_whole = bool((values == np.floor(values)).all())
    if is_whole and len(distinct) == len(values) > MOST_LEVELS:
        return Drafted(name=name, variable=Variable(kind="identifier"), note="differs in every row")
    ends = rounded_out(low, high)
    codes = "or a category with these codes as levels" if is_whole and len(distinct) <= FEW_CODES else ""
    if is_whole and low >= 0 and high <= LARGEST_COUNT:
        return Drafted(name=name, variable=Variable(kind="count", range=(0.0, ends[1])), note=codes)
    return Drafted(name=name, variable=Variable(kind="number", range=ends), note=codes)


def _labels(name: str, factor: Factor) -> Drafted:
    used = in_order(level for level, count in zip(factor.levels, factor.counts, strict=True) if count)
    if not used:
        return Drafted(name=name, variable=None, note="has no values")
    if len(used) > max(MOST_REPEATED * sum(factor.counts), 2) or len(used) > MOST_LEVELS:
        return Drafted(name=name, variable=Variable(kind="identifier"), note="labels that hardly repeat")
    if len(used) == 1:
        return Drafted(name=name, variable=None, note="has one level: list the others that are possible")
    try:
        variable = Variable(kind="category", levels=tuple((level, "") for level in used))
    except InputError:
        return Drafted(name=name, variable=None, note="has labels that cannot be codes: map them")
    return Drafted(name=name, variable=variable, note="add levels that other silos may have")


def rounded_out(low: float, high: float) -> tuple[float, float]:
    """Return ends at one significant digit that enclose both, so that neither is a record's value."""
    unit = 10.0 ** math.floor(math.log10(max(abs(low), abs(high)) or 1.0))
    below, above = math.floor(low / unit) * unit, math.ceil(high / unit) * unit
    if below == low and below != 0.0:
        below -= unit
    if above == high:
        above += unit
    return below, above


# `fedtmle init --from`: a study file whose dictionary is drafted from one silo's table.

_HEAD = """\
# A study with a dictionary drafted from {table}. Before you share it, edit it:
# * Kinds are guesses. Levels are those of this one table: add what other silos may have.
# * Ranges were rounded outward from this table's own values, so they come from its records. Replace each by
#   the least and the largest value that is possible, such as [18, 110] for the age of adults.
# * Delete the variables that the study does not use. Give the others a label, and a unit where there is one.
# * The formulas have every column. Take out what was measured after the treatment, and what is no confounder.
# * List every silo under [silos]. When the study goes to the hospitals, each names its own silo file there.
# Then check it with `fedtmle validate study.toml`.

"""


def write_draft(
    folder: Path, table: Path, outcome: str | None, treatment: str | None, *, force: bool
) -> Path:
    """Write study.toml into ``folder`` and return its path; without ``force`` nothing is overwritten."""
    study = folder / "study.toml"
    if study.exists() and not force:
        raise InputError(f"{study}: already exists; choose another folder, or --force")
    text = draft_study(table, Path(os.path.relpath(table, folder)), outcome, treatment)
    folder.mkdir(parents=True, exist_ok=True)
    study.write_text(text, encoding="utf-8")
    return study


def draft_study(table: Path, place: Path, outcome: str | None, treatment: str | None) -> str:
    """Return the text of a study file over the variables of ``table``, its one silo, found at ``place``."""
    columns = drafted(table)
    known = {each.name: each for each in columns if each.variable is not None}
    for key, name in (("outcome", outcome), ("treatment", treatment)):
        if name is not None and name not in known:
            raise InputError(f"{key}: expected one of {', '.join(known)}, not {name!r}")
    covariates = [_term(each) for each in known.values() if each.name not in (outcome, treatment)]
    terms = " + ".join(term for term in covariates if term) or "1"
    treated = "" if treatment is None else f"{_term(known[treatment])} + "
    if outcome is None or treatment is None:  # without both, the covariates are not known
        terms, treated = "...", ""
    missingness = f"\n[models.missingness]\nformula = {toml_text(treated + terms)}\n"
    parts = [
        _HEAD.format(table=table.name),
        f'[target]\nkind = "ATE"\n{_role("outcome", outcome)}{_role("treatment", treatment)}',
        "\n[variables]\n",
        *map(_line, columns),
        f"\n[models.outcome]\nformula = {toml_text(treated + terms)}\n",
        f"\n[models.treatment]\nformula = {toml_text(terms)}\n",
        *([missingness] if outcome is not None and known[outcome].has_missing else []),
        f"\n[silos]                         # add the other silos\n{toml_key(_silo_name(table))} = "
        f"{toml_text(place.as_posix())}\n",
    ]
    return "".join(parts)


def _silo_name(table: Path) -> str:
    return read_silo_file(table).name if table.suffix.lower() == ".toml" else table.stem


def _role(key: str, name: str | None) -> str:
    return f'# {key} = "..."\n' if name is None else f"{key} = {toml_text(name)}\n"


def _term(column: Drafted) -> str:
    """Return the column as a term of a formula; empty if it cannot be one."""
    kind = "identifier" if column.variable is None else column.variable.kind
    if kind == "identifier" or not column.name.isidentifier():
        return ""
    return f"C({column.name})" if kind == "category" else column.name


def _line(column: Drafted) -> str:
    note = f"    # {column.note}" if column.note else ""
    if column.variable is None:
        return f"# {toml_key(column.name)}:{note.replace('    #', '')}\n"
    labelled = {**entry(column.variable), "label": column.name}
    return f"{toml_key(column.name)} = {toml_text(labelled)}{note}\n"

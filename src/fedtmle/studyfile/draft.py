"""`fedtmle init --from`: a study file whose dictionary is drafted from one silo's table."""

from __future__ import annotations

import os
from pathlib import Path

from fedtmle.data.draft import Drafted, drafted
from fedtmle.data.silofile import read_silo_file
from fedtmle.errors import InputError
from fedtmle.studyfile.dictionary import entry, toml_key, toml_text

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

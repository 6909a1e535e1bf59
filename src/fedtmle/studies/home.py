"""A silo's home: its silo file, and beside it the folder with its key, approvals, ledger and journals."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np

from fedtmle.data import DataErrors, SiloFile, load, read_silo_file
from fedtmle.errors import InputError
from fedtmle.model.table import Table
from fedtmle.model.types import Array
from fedtmle.privacy.limit import DisclosureLimit, LimitedAttribute, at_centre
from fedtmle.programs.study import Study
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.policy import Policy
from fedtmle.runtime.journal import FileJournal
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.ledger import Ledger
from fedtmle.runtime.rows import LocalRows
from fedtmle.runtime.signing import Approvals, SigningKey
from fedtmle.runtime.silo import Silo
from fedtmle.studyfile.file import study_of
from fedtmle.studyfile.schema import check_streams, in_memory, schema_of


@dataclass(frozen=True)
class Home:
    """Everything that one silo keeps; nothing of it leaves the silo but the public key."""

    file: SiloFile

    @classmethod
    def of(cls, silo_file: str | Path) -> Home:
        """The home of the silo whose file this is."""
        return cls(read_silo_file(silo_file))

    @cached_property
    def folder(self) -> Path:
        """`silo.fedtmle/` beside `silo.toml`; made when first needed, readable by its owner only."""
        folder = self.file.path.with_suffix(".fedtmle")
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    @cached_property
    def key(self) -> SigningKey:
        return SigningKey.at(self.folder / "key")

    @cached_property
    def approvals(self) -> Approvals:
        return Approvals(self.folder / "approvals.jsonl", self.key)

    @property
    def ledger_path(self) -> Path:
        return self.folder / "ledger.jsonl"

    def journal_path(self, plan: Plan) -> Path:
        """One journal per plan: a plan runs once."""
        return self.folder / f"{plan.digest.hex()[:16]}.journal"

    def keeper(self, plan: Plan) -> Keeper:
        """What guards this silo in a deployed run of ``plan``."""
        return Keeper(
            policy=self.file.policy,
            floor=floor_of(study_of(plan), self.file),
            approves=self.approvals.approves,
            key=self.key,
            journal=FileJournal(self.journal_path(plan)),
            ledger=Ledger(self.ledger_path),
        )


# Whose policy holds for a source of data: the silo file's own, never the study's.


def policy_of(source: object) -> Policy | None:
    """What the silo file that ``source`` is, or names, states; None where there is no silo file."""
    file = silo_file(source)
    return None if file is None else file.policy


def silo_file(source: object) -> SiloFile | None:
    """The silo file that ``source`` is, or names; None where it is no such file."""
    if isinstance(source, str | os.PathLike) and Path(source).suffix.lower() == ".toml":
        source = read_silo_file(Path(source))
    return source if isinstance(source, SiloFile) else None


def session_policy() -> Policy:
    """For data without a silo file, in one's own session: no limit but on the cells that are shown."""
    return replace(Policy.unguarded(), min_cell=Policy().min_cell)


def released(policies: Mapping[str, Policy | None], named: Sequence[str]) -> tuple[str, ...]:
    """The silos whose own estimate may be shown: by their silo file, or ``named`` and without one."""
    for name in named:
        policy = policies[name]
        if policy is not None and not policy.release:
            raise InputError(
                f"release: the silo file of '{name}' does not allow it; its owner may, with release = true "
                "in [policy]"
            )
    return tuple(name for name, policy in policies.items() if name in named or (policy and policy.release))


# A silo file's floor on what a study may tell of a column, at the public table that it names.


def floor_of(study: Study, file: SiloFile | None) -> DisclosureLimit | None:
    """The floor that the section [disclosure] states for this study; None where there is no section."""
    if file is None or file.disclosure is None:
        return None
    stated, name = file.disclosure, file.disclosure.column
    try:
        table = in_memory({file.name: load(stated.centre, schema_of(study), silo=file.name)}, "a centre")[
            file.name
        ]
        there = ~np.isnan(_column(study, table, name))
    except DataErrors as errors:
        mistakes = "; ".join(str(problem) for problem in errors.problems)
        raise InputError(f"{file.path}: [disclosure] centre: {mistakes}") from None
    except InputError as error:
        raise InputError(f"{file.path}: [disclosure] {error}") from None
    # Each value is known within the radius; together they are in a ball of radius rho sqrt(N).
    joint = stated.radius * math.sqrt(int(there.sum()))
    gradients = {"mean": there / there.sum(), "record": None}
    centre = LocalRows(file.name, table, table.n_rows, None)
    centre.place(0)  # batches are asked of it as if its rows came first
    return DisclosureLimit(
        attributes=tuple(
            LimitedAttribute(name=f"{kind} of {name}", gradient=gradients[kind], radius=joint)
            for kind in stated.attributes
        ),
        smallest_omega=stated.floor,
        noise=stated.noise,
        records=table.n_rows,
        jacobian=at_centre(centre, table, name),
    )


def _column(study: Study, table: Table, name: str) -> Array:
    """The column's values, if it is one whose values move the answers smoothly."""
    if name not in table.numeric or name == study.weights:
        known = ", ".join(column for column in table.numeric if column != study.weights)
        raise InputError(f"column: the study reads no numbers '{name}'; it reads {known}")
    column = table.numeric[name]
    values = column[~np.isnan(column)]
    if not len(values):
        raise InputError(f"column: the centre has no value of '{name}'")
    if np.isin(values, (0.0, 1.0)).all():
        raise InputError(f"column: '{name}' is 0 or 1 throughout; a floor is for a column of numbers")
    return column


# A silo's side of a study: its own table, read once, behind `Silo.step`.


def open_party(plan: Plan, name: str, source: object, *, keeper: Keeper | None = None) -> Silo:
    """The silo ``name`` of a study's plan over its own ``source`` (a silo file's path, as a rule)."""
    table = load(source, schema_of(study_of(plan)), silo=name)
    check_streams(study_of(plan), {name: table})
    return Silo(name, plan, table, keeper=keeper)

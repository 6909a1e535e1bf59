"""A silo's side of a study: what guards its rows, and the silo itself behind `Silo.step`.

A silo's home is a folder of its institution, with its key, approvals, ledger and journals
(`fedtmle_core.home`).
The policy that holds for a source of data is the silo file's own, never the study's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fedtmle.algorithms.gradient import Gradient
from fedtmle.algorithms.optimizers import Newton
from fedtmle.data import DataErrors, Kind, Schema, SiloFile, load, load_people, read_silo_file, restricted
from fedtmle.errors import ChangedDataError, CheckFailedError, FedTMLEError, InputError, JournalError
from fedtmle.initial.glm import GLM
from fedtmle.lowered import LoweredLimit
from fedtmle.model.check import check_problem
from fedtmle.model.table import AnyTable, Factor, Table
from fedtmle.privacy.audit import DisclosureLimit, LimitedAttribute, at_centre
from fedtmle.programs.flow import StudyProgram, study_details
from fedtmle.programs.study import Study
from fedtmle.programs.target import AbstractTarget
from fedtmle.protocol.plan import Plan, brought, follow_alone
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.runtime.ledger import Ledger, StudyScope
from fedtmle.runtime.ledger import read as read_ledger
from fedtmle.runtime.ledger import studies as ledger_studies
from fedtmle.runtime.records import Keeper, utc_now
from fedtmle.runtime.rows import LocalRows, fingerprint
from fedtmle.runtime.signing import Approvals, Decision
from fedtmle.runtime.silo import Silo
from fedtmle.studies.memory import (
    Conflict,
    Earlier,
    SiloMemory,
    beyond_max_bits,
    source_names,
    spent_bits,
)
from fedtmle.studyfile.file import study_of
from fedtmle.studyfile.schema import check_follow_up, check_streams, in_memory, schema_of
from fedtmle_core import home as core_home
from fedtmle_core.journal import FileJournal
from fedtmle_core.memory import Totals
from fedtmle_core.people import Snapshot
from fedtmle_core.signing import SigningKey
from fedtmle_core.types import Array

# The check of a target that another distribution brings, on synthetic rows, before a silo's first answer.
#
# The rows are drawn from the study's dictionary alone: numbers within their declared ranges, levels at
# random. The study's own flow fits its models to them, and `check_problem` measures what the target's problem
# promises.

ROWS = 240
SEED = 2026
SILO = "synthetic"
UNSIGNED = "unsigned"  # the author of a study whose server has no key

_passed: set[bytes] = set()  # digests of plans whose target was checked in this process


def examine_target(plan: Plan) -> None:
    """Raise `CheckFailedError` if the target of a plan is of another distribution and fails its checks.

    A plan is checked once in a process.
    """
    target = study_of(plan).target
    if not isinstance(target, AbstractTarget) or not brought(target) or plan.digest in _passed:
        return
    kind = type(target).__name__
    try:
        check_target(study_of(plan))
    except (FedTMLEError, ArithmeticError) as error:
        if type(error) in (CheckFailedError, InputError):  # from the check or the study's arguments
            raise
        raise CheckFailedError(f"{kind}: it could not be run on synthetic rows: {error}") from error
    _passed.add(plan.digest)


def check_target(study: Study) -> None:
    """Run the study on synthetic rows, and check the problem that its target makes of them."""
    table = synthetic_rows(schema_of(study))
    study = replace(_plain(study), algorithm=Gradient(optimizer=Newton()), diagnostics=False)
    program = StudyProgram.of(study, (SILO,))
    rows = program.at(SILO, table)
    local = LocalRows(SILO, rows, table.n_rows)
    local.place(0)
    details = study_details(follow_alone(program.flow(table.n_rows), local))
    check_problem(details.problem, details.start, rows).raise_if_failed()


def _plain(study: Study) -> Study:
    """Return the study with an intercept in the place of models that no single silo can fit."""
    simple = {role: GLM("1") for role, model in study.models.items() if not isinstance(model, GLM)}
    arguments: dict[str, Any] = {f"{role}_model": model for role, model in simple.items()}
    of_target = {f"{role}_model" for role in study.target.own_models()}
    target = replace(study.target, **{name: model for name, model in arguments.items() if name in of_target})
    return replace(study, target=target, **{k: model for k, model in arguments.items() if k not in of_target})


def synthetic_rows(schema: Schema, n: int = ROWS, seed: int = SEED) -> Table:
    """Return rows with values that the schema allows, drawn independently of each other."""
    rng = np.random.default_rng(seed)
    numeric: dict[str, Array] = {}
    factors: dict[str, Factor] = {}
    for column in schema.columns:
        low, high = column.bounds or (0.0, 1.0)
        match column.kind:
            case Kind.FACTOR:
                levels = column.levels or tuple(map(str, range(n // 4)))  # clusters, say
                factors[column.name] = Factor(rng.integers(len(levels), size=n), tuple(levels))
            case Kind.NUMERIC:
                numeric[column.name] = rng.uniform(low, high, size=n)
            case _:  # 0 and 1, or a count
                numeric[column.name] = rng.integers(int(low), int(high) + 1, size=n).astype(np.float64)
    return Table(n_rows=n, numeric=numeric, factors=factors)


@dataclass(frozen=True, kw_only=True)
class HomeAccount:
    """What an institution's home remembers: its silos, the studies, and the refusals of a year by author."""

    folder: Path
    hospitals: tuple[str, ...]
    studies: int
    forgotten: int  # studies whose people were lost, at this silo
    asked: Totals
    refused: Mapping[str, int]


@dataclass(frozen=True)
class Home:
    """Everything that the institution keeps for one silo; only the public key leaves it."""

    file: SiloFile

    @classmethod
    def of(cls, silo_file: str | Path) -> Home:
        """Return the home of the silo whose file this is."""
        return cls(read_silo_file(silo_file))

    @classmethod
    def create(cls, silo_file: str | Path) -> Home:
        """Make the home that a silo file states, or the account's own; raise if there is one."""
        home = cls.of(silo_file)
        core_home.Home.create(home.file.home)
        return home

    @cached_property
    def institution(self) -> core_home.Home:
        """The home of the institution, with its secret; raise if it was not made or is damaged."""
        if not core_home.is_home(self.file.home):
            raise InputError(
                f"{self.file.home}: the home of silo '{self.file.name}' is not there; restore it from a "
                "backup, or make it, once for your institution: "
                f"fedtmle silo home --silo {self.file.path} --create"
            )
        return core_home.Home.open(self.file.home)

    @cached_property
    def folder(self) -> Path:
        """The silo's own folder in the home; made when first needed, for its owner alone."""
        return self.institution.records(self.file.name)

    def account(self) -> HomeAccount:
        """Return what the home remembers, for its owner."""
        institution, numbers = self.institution, dict[str, int]()
        for name in institution.hospitals:
            path = core_home.records_folder(institution.folder, name) / "ledger.jsonl"
            for each in ledger_studies(read_ledger(path)) if path.exists() else ():
                numbers[each.plan] = numbers.get(each.plan, 0) + each.numbers
        with institution.held() as opened:
            return HomeAccount(
                folder=institution.folder,
                hospitals=institution.hospitals,
                studies=len(opened.memory.studies),
                forgotten=len(self.forgotten),
                asked=opened.memory.totals(numbers),
                refused=opened.charges.counts(utc_now()),
            )

    def pardon(self, author: str) -> None:
        """Strike out the refusals that are charged to the server with this key, or to those without one."""
        with self.institution.held() as opened:
            charged, now = opened.charges.counts(utc_now()), utc_now()
            if author == UNSIGNED:
                author = ""
            if author not in charged:
                known = ", ".join(each or UNSIGNED for each in charged) or "nobody"
                raise InputError(f"--pardon: no refusal is charged to '{author}'; there are for {known}")
            opened.charges.pardon(author, now)

    @property
    def _place(self) -> Path:
        return core_home.records_folder(self.file.home, self.file.name)

    @cached_property
    def key(self) -> SigningKey:
        return self.institution.key(self.file.name)

    @cached_property
    def approvals(self) -> Approvals:
        return Approvals(self.folder / "approvals.jsonl", self.key)

    @property
    def peers(self) -> frozenset[bytes] | None:
        """The public keys in the file `peers`, one silo on each line, None without the file.

        A line has the 128 digits that the other silo's owner reads from `fedtmle silo decisions`, then
        anything, such as its name. Empty lines and those that start with # are skipped.
        """
        path = self._place / "peers"
        if not path.exists():
            return None
        keys = set()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            if not line.strip() or line.startswith("#"):
                continue
            digits = line.split()[0]
            if len(digits) != 128 or set(digits.lower()) - set("0123456789abcdef"):
                raise InputError(
                    f"{path}, line {number}: expected the 128 hexadecimal digits of a silo's public keys, as "
                    "`fedtmle silo decisions` prints them at that silo"
                )
            keys.add(bytes.fromhex(digits))
        return frozenset(keys)

    @property
    def closed(self) -> frozenset[str]:
        """The plans that this silo never answers again: it was restored from a backup that may be older."""
        try:
            return frozenset((self.folder / "closed").read_text(encoding="ascii").split())
        except FileNotFoundError:
            return frozenset()

    def approve(self, plan: Plan, *, note: str = "", bits: Mapping[str, float] | None = None) -> None:
        """Sign the owner's approval of a plan for the rows as they are now, with what `risk` found of it.

        The limits that the silo file makes laxer, and their reasons, are signed too. A plan that was opened
        here keeps to those that its last approval had: the opening stated them to all parties.
        """
        if plan.digest.hex() in self.closed:
            raise InputError(
                "this silo may have answered this plan before it was restored from a backup; ask the "
                "statistician for the study with another seed"
            )
        late = self._lowered_late(plan)
        if late:
            raise InputError(
                f"{', '.join(late)}: this plan was opened here with other limits, which all parties know; "
                "approve it with those, or ask the statistician for the study with another seed"
            )
        data = self.data_digest(plan)
        self.approvals.decide(
            plan.digest,
            approved=True,
            note=note,
            data=data,
            bits=bits,
            title=study_of(plan).title or "",
            lowered=self.file.policy.lowered,
        )

    def _lowered_late(self, plan: Plan) -> list[str]:
        """Return the limits that are laxer now and were not when this plan was opened here."""
        digest, lowered = plan.digest.hex(), self.file.policy.lowered
        if not lowered or not self.has_past:
            return []
        if not any(
            (line["plan"], line["request"], line["decision"]) == (digest, "open", "answered")
            for line in read_ledger(self.ledger_path)
            if "plan" in line
        ):
            return []
        approved = [each for each in self.approvals.decisions() if each.plan == digest and each.approved]
        known = {(limit.key, limit.value) for limit in (approved[-1].lowered if approved else ())}
        return [limit.key for limit in lowered if (limit.key, limit.value) not in known]

    def reject(self, plan: Plan, *, note: str = "") -> None:
        """Sign the owner's rejection of a plan, which also withdraws an approval."""
        self.approvals.decide(plan.digest, approved=False, note=note, title=study_of(plan).title or "")

    def lowering(self, limits: Iterable[LoweredLimit]) -> Home:
        """Return this home with exactly these limits of the policy laxer than the package's own."""
        return Home(replace(self.file, policy=self.file.policy.lower(limits)))

    def as_approved(self, plan: Plan) -> Home:
        """Return this home under the policy that holds for a plan.

        Limits are laxer than the package's own only as the approval that is in force says.
        """
        decision = self.approvals.current().get(plan.digest.hex())
        return self.lowering(decision.lowered if decision is not None and decision.approved else ())

    @property
    def ledger_path(self) -> Path:
        return self.folder / "ledger.jsonl"

    def journal_path(self, plan: Plan) -> Path:
        """Return the journal of a plan, by its whole digest; a plan runs once."""
        return self.folder / f"{plan.digest.hex()}.journal"

    def keeper(self, plan: Plan) -> Keeper:
        """Return what guards this silo in a deployed run of ``plan``."""
        return Keeper(
            policy=self.file.policy,
            limit=disclosure_limit(plan, self.file),
            examines=examine_target,
            approves=self.approvals.approves,
            key=self.key,
            mask_key=self.key.mask_key,
            peers=self.peers,
            journal=FileJournal(self.journal_path(plan)),
            ledger=Ledger(self.ledger_path, key=self.key),
        )

    @property
    def has_key(self) -> bool:
        """Whether this silo has a home, and so a key; none is made."""
        return core_home.is_home(self.file.home)

    @property
    def has_past(self) -> bool:
        """Whether this silo has a ledger; no folder is made."""
        return (self._place / "ledger.jsonl").exists()

    def earlier(self) -> Earlier:
        """Return the scope of each earlier study of this silo, by its plan, from the ledger."""
        return self._scopes(self.file.name) if self.has_past else {}

    def institution_wide(self) -> Earlier:
        """Return the scopes of the earlier studies of all silos of the institution; budgets are over all."""
        hospitals = self.institution.hospitals if self.has_key else ()
        found: dict[str, tuple[str, StudyScope]] = {}
        for name in (*hospitals, self.file.name):
            found |= self._scopes(name)
        return found

    def _scopes(self, silo: str) -> Earlier:
        path = core_home.records_folder(self.file.home, silo) / "ledger.jsonl"
        if not path.exists():
            return {}
        with closing(Ledger(path, key=self.institution.key(silo))) as ledger:
            return ledger.scopes()

    def _decisions(self) -> Mapping[str, Decision]:
        """Return the decisions in force at all silos of the institution; of one plan, this silo's."""
        found: dict[str, Decision] = {}
        for name in self.institution.hospitals:
            path = core_home.records_folder(self.file.home, name) / "approvals.jsonl"
            found |= Approvals(path, self.institution.key(name)).current()
        return found | self.approvals.current()

    def read(self, plan: Plan) -> tuple[AnyTable, SiloMemory | None]:
        """Return the rows from which a study is answered after the earlier ones, and what is remembered.

        Without a home nothing is remembered, and nothing is made.
        """
        schema = schema_of(study_of(plan))
        if not self.has_key:
            return load(self.file, schema, silo=self.file.name), None
        reads = frozenset(theirs for each in source_names(plan, self.file).values() for theirs in each)
        with self.institution.held() as opened:
            self._check_remembered(opened)
            bases = opened.memory.bases(reads)
        table, census = load_people(self.file, schema, digester=self.institution.digester, bases=bases)
        memory = SiloMemory(
            file=self.file,
            plan=plan,
            census=census,
            institution=self.institution,
            peers=self.peers,
            earlier=self.earlier,
            institution_wide=self.institution_wide,
            decisions=self._decisions,
        ).judged()
        if isinstance(memory.verdict, Snapshot):
            table = restricted(table, memory.verdict.kept, schema)
        return table, memory

    def _check_remembered(self, opened: core_home.OpenHome) -> None:
        """Raise unless the memory has every study of which the ledger holds an answer."""
        lacking = self.earlier().keys() - {plan for plan, _ in opened.memory.plans} - self.forgotten
        if lacking:
            plans = ", ".join(plan[:16] for plan in sorted(lacking))
            raise JournalError(
                f"{self.file.home}: the memory lacks studies that were answered ({plans}); restore the home"
            )

    @property
    def forgotten(self) -> frozenset[str]:
        """The plans whose people are not remembered: the home was restored from a backup that was older."""
        try:
            return frozenset((self._place / "forgotten").read_text(encoding="ascii").split())
        except FileNotFoundError:
            return frozenset()

    def data_digest(self, plan: Plan) -> bytes:
        """Return the digest of plan and rows that an approval of ``plan`` holds for."""
        return fingerprint(plan.digest, self.file.name, self.read(plan)[0])

    def conflicts(self, plan: Plan, bits: Mapping[str, float] | None) -> tuple[Conflict, ...]:
        """Return every reason why this silo would refuse a plan after the earlier ones; no home is made.

        ``bits`` is what `risk` found of each column.
        """
        if not self.has_key:
            return beyond_max_bits(plan, self.file.policy, bits, {})
        _, memory = self.read(plan)
        return () if memory is None else memory.conflicts(plan, bits)

    def spent(self, plan: Plan) -> dict[str, float]:
        """Return the bits that other studies of the institution disclosed of each column."""
        if not self.has_key:
            return {}
        earlier = self.institution_wide()
        others = {digest: each for digest, each in earlier.items() if digest != plan.digest.hex()}
        return spent_bits(others, self._decisions()) if others else {}

    def unrecorded_keeper(self, plan: Plan) -> Keeper:
        """Return what guards this silo in a run of ``plan`` by its own owner, which leaves no record."""
        return Keeper(
            policy=self.file.policy,
            limit=disclosure_limit(plan, self.file),
            key=self.key,
            mask_key=self.key.mask_key,
            peers=self.peers,
        )


def policy_of(source: object) -> Policy | None:
    """Return the policy of the silo file that ``source`` is or names, or None if it is no silo file."""
    file = silo_file(source)
    return None if file is None else file.policy


def silo_file(source: object) -> SiloFile | None:
    """Return the silo file that ``source`` is or names, or None."""
    if isinstance(source, str | os.PathLike) and Path(source).suffix.lower() == ".toml":
        source = read_silo_file(Path(source))
    return source if isinstance(source, SiloFile) else None


def session_policy() -> Policy:
    """Return the policy for data without a silo file in one's own session: it limits shown cells only."""
    return replace(UNGUARDED, min_cell=Policy().min_cell)


def released(policies: Mapping[str, Policy | None], named: Sequence[str]) -> tuple[str, ...]:
    """Return the silos whose own estimate may be shown: their silo file allows it, or they are ``named``.

    Naming a silo whose silo file does not allow it is an error.
    """
    for name in named:
        policy = policies[name]
        if policy is not None and not policy.release:
            raise InputError(
                f"release: the silo file of '{name}' does not allow it; its owner may, with release = true "
                "in [policy]"
            )
    return tuple(name for name, policy in policies.items() if name in named or (policy and policy.release))


def disclosure_limit(plan: Plan, file: SiloFile | None) -> DisclosureLimit | None:
    """Return the limit of [disclosure] on what a study may disclose of a column, or None if there is none.

    It is computed at the public table that the section names as the centre.
    """
    if file is None or file.disclosure is None:
        return None
    study, stated, name = study_of(plan), file.disclosure, file.disclosure.column
    try:
        centre_table = load(stated.centre, schema_of(study), silo=file.name)
        table = in_memory({file.name: plan.program.at(file.name, centre_table)}, "a centre")[file.name]
        known = ~np.isnan(_column(study, table, name))
    except DataErrors as errors:
        defects = "; ".join(map(str, errors.defects))
        raise InputError(f"{file.path}: [disclosure] centre: {defects}") from None
    except InputError as error:
        raise InputError(f"{file.path}: [disclosure] {error}") from None
    # Each value is known within the radius; together they are in a ball of radius rho sqrt(N).
    joint = stated.radius * math.sqrt(int(known.sum()))
    gradients = {"mean": known / known.sum(), "record": None}
    centre = LocalRows(file.name, table, table.n_rows, None)
    centre.place(0)  # batches are drawn as if its rows came first
    return DisclosureLimit(
        attributes=tuple(
            LimitedAttribute(name=f"{kind} of {name}", gradient=gradients[kind], radius=joint)
            for kind in stated.attributes
        ),
        smallest_omega=stated.min_uncertainty,
        noise=stated.noise,
        records=table.n_rows,
        jacobian=at_centre(centre, table, name),
    )


def _column(study: Study, table: Table, name: str) -> Array:
    """Return the column's values; raise `InputError` unless the answers depend on them smoothly."""
    if name not in table.numeric or name == study.weights:
        known = ", ".join(column for column in table.numeric if column != study.weights)
        raise InputError(f"column: the study reads no numeric column '{name}'; it reads {known}")
    column = table.numeric[name]
    values = column[~np.isnan(column)]
    if not len(values):
        raise InputError(f"column: the centre has no value of '{name}'")
    if np.isin(values, (0.0, 1.0)).all():
        raise InputError(f"column: all values of '{name}' are 0 or 1; [disclosure] is for numbers")
    return column


def open_party(
    plan: Plan,
    name: str,
    source: object,
    *,
    keeper: Keeper | None = None,
    expected: str = "",
    home: Home | None = None,
) -> Silo:
    """Return the silo ``name`` of a study's plan over its ``source``, usually the path of a silo file.

    ``expected`` is the digest of plan and rows that the owner approved; `ChangedDataError` if it is another.
    With its ``home`` the silo holds the study against the earlier ones, and reads the table of the silo file.
    """
    memory = None
    if home is None:
        table = load(source, schema_of(study_of(plan)), silo=name)
    else:
        table, memory = home.read(plan)
    check_streams(study_of(plan), {name: table})
    check_follow_up(study_of(plan), {name: table})
    if expected and fingerprint(plan.digest, name, table).hex() != expected:
        raise ChangedDataError("the data changed since the plan was approved; approve it again")
    if memory is not None:
        keeper = replace(keeper or Keeper(), memory=memory)
    return Silo(name, plan, table, keeper=keeper)

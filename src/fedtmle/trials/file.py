"""`trial.toml`: a target trial and the silos on whose databases it is emulated.

Every defect is reported at once, with its file and line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast, final

from fedtmle.algorithms.coded import Coded
from fedtmle.data.database import parse_place
from fedtmle.defects import Defect, Lines, Toml
from fedtmle.errors import InputError
from fedtmle.initial.glm import GLM
from fedtmle.initial.superlearner import GradientBoostedTrees, Pilot
from fedtmle.location import home_of
from fedtmle.programs.study import NuisanceModel
from fedtmle.protocol.policy import Policy
from fedtmle.studyfile import keys, toml
from fedtmle.studyfile.file import StudyFileErrors, read_toml
from fedtmle.studyfile.toml import (
    COUNT,
    INTEGER,
    NUMBER,
    TEXT,
    TRUTH,
    Arguments,
    Key,
    SectionKind,
    Sections,
    required,
)
from fedtmle.trials.cohort import Cdm
from fedtmle.trials.elements import (
    AbstractCovariate,
    AgeAtBaseline,
    AnyRecord,
    Censoring,
    ConceptSet,
    Criterion,
    Domain,
    Eligibility,
    LastMeasurement,
    Sex,
    TimeZero,
    TreatmentStrategy,
    TrialOutcome,
    VisitCount,
)
from fedtmle.trials.trial import EFFECTS, StudyOptions, TargetTrial, contradictions

# The silos of a trial: a section of the trial file, or the hospital's own file with its policy.
#
#     [silo]
#     name = "north"
#
#     [cdm]
#     database = {url_env = "NORTH_CDM"}   # holds postgresql://...; or database = "cdm.duckdb"
#     schema = "cdm"
#
#     [policy]
#     min_cell = 10
#
# `database` is as in the section [data] of a study's silo file (`data.database`).

CDM = {
    "database": required(Key(read=lambda written: written, expected="where the database is")),
    "schema": TEXT,
    "vocabulary_schema": TEXT,
    "part": Key(read=toml.several(toml.count), expected="[index, count], two whole numbers"),
}


def read_silo(path: Path, name: str) -> Cdm:
    """Return the silo ``name`` from its own file; raise `StudyFileErrors` with all its defects."""
    text, document = read_toml(path)
    sections = Sections(str(path), Lines(text), document, {"silo": {"name", "home"}, "cdm": set(CDM)})
    sections.refuse_unknown((), document, ("silo", "cdm", "policy"))
    stated = sections.values(("silo",), {"name": required(TEXT), "home": TEXT})
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
        if cdm is not None and "home" in stated:
            cdm = replace(cdm, home=home_of(str(stated["home"]), path.parent))
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


T = TypeVar("T")
SECTIONS = (
    "trial",
    "concepts",
    "strategies",
    "time_zero",
    "eligibility",
    "outcome",
    "follow_up",
    "covariates",
    "models",
    "algorithm",
    "options",
    "silos",
)
# Options of a study that name no column; the columns of a trial's table are fixed.
OPTIONS = {
    name: keys.OPTIONS[name]
    for name in ("g_bounds", "clever", "submodel", "link", "folds", "seed", "confidence", "diagnostics")
}
IDS = Key(read=toml.several(toml.integer), expected="a list of concept ids, such as [1118084]")
_TRIAL = {"name": required(TEXT), "effect": toml.choice(*EFFECTS)}
_CONCEPTS = {"ids": required(IDS), "exclude": IDS, "descendants": TRUTH}
_TIME_ZERO_KEYS = ("condition", "grace_days", "washout_days")
_ELIGIBILITY_KEYS = ("age", "observation_days_before", "present", "absent")
_OUTCOME_KEYS = ("name", "days", "conditions", "death", "period_days", "horizons")
_CENSOR = Key(
    read=toml.several(toml.named({reason.value: reason for reason in Censoring})),
    expected="a list of " + " and ".join(f'"{reason.value}"' for reason in Censoring),
)
_HORIZONS = Key(read=toml.several(toml.integer), expected="a list of days, such as [90, 365]")
_RANGE = Key(
    read=toml.several(toml.number), expected="[least, largest], two plausible numbers, such as [20, 250]"
)
_AGE = Key(read=toml.several(toml.integer), expected="[least, most], two whole numbers of years")


@final
@dataclass(frozen=True, kw_only=True)
class TrialFile:
    """A trial, and the silos on whose databases it is emulated.

    ``names`` has all silos; ``silos`` has the databases of the silos that were asked for.
    """

    path: Path
    trial: TargetTrial
    names: tuple[str, ...]
    silos: Mapping[str, Cdm]
    study_sections: Mapping[str, Mapping[str, object]]  # sections that a study file has too, as written


def read_trial(path: str | Path, *, only: Collection[str] | None = None) -> TrialFile:
    """Return the trial file at ``path``; raise `StudyFileErrors` with the defects of all files.

    ``only`` names the silos whose databases are needed, so that the files of the others, which are at other
    hospitals, are not looked for; None means all silos.
    """
    path = Path(path)
    text, document = read_toml(path)
    reader = _TrialReader(path, text, document)
    trial, silos = reader.trial(), reader.silos(only)
    if reader.defects or trial is None:
        raise StudyFileErrors(reader.defects)
    shared = {
        name: table
        for name, table in document.items()
        if name in ("models", "algorithm", "options") and isinstance(table, dict)
    }
    return TrialFile(path=path, trial=trial, names=reader.names, silos=silos, study_sections=shared)


class _TrialReader:
    """Turns a document into a trial and its silos, and collects all defects."""

    def __init__(self, path: Path, text: str, document: dict[str, Toml]) -> None:
        self._path, self._document = path, document
        homes: dict[str, set[str]] = {
            "trial": set(_TRIAL),
            "time_zero": set(_TIME_ZERO_KEYS),
            "eligibility": set(_ELIGIBILITY_KEYS),
            "outcome": set(_OUTCOME_KEYS),
            "follow_up": {"censor"},
            "options": set(OPTIONS),
        }
        self._sections = Sections(str(path), Lines(text), document, homes)
        self._others: list[Defect] = []  # defects of the silos' own files
        self._concepts: dict[str, ConceptSet] = {}

    @property
    def defects(self) -> list[Defect]:
        """All defects so far."""
        return [*self._sections.defects, *self._others]

    def trial(self) -> TargetTrial | None:
        """Return the trial, or None if a defect leaves it unknown."""
        sections = self._sections
        sections.refuse_unknown((), self._document, SECTIONS)
        self._read_concepts()
        stated = self._required("trial", _TRIAL)
        strategies = self._strategies()
        outcome = self._outcome()
        time_zero = self._made("time_zero", TimeZero, self._time_zero_keys())
        eligibility = self._eligibility()
        follow_up = sections.values(("follow_up",), {"censor": _CENSOR})
        covariates = self._covariates()
        covariates_unread = len(covariates) < len(sections.table(("covariates",)) or {})
        models = self._models()
        algorithm = sections.make(("algorithm",), keys.ALGORITHMS, default="Coded") or Coded()
        options = sections.values(("options",), OPTIONS)
        for section, key, message in contradictions(
            strategies=strategies,
            outcome=outcome,
            time_zero=time_zero,
            eligibility=eligibility,
            censoring=follow_up.get("censor", ()),
            covariates=covariates,
            models={role: model for role, model in models.items() if model is not None},
        ):
            # A part that cannot be read is not reported as absent.
            unread = covariates_unread if section[0] == "models" else bool(sections.defects)
            if not (section[0] in ("strategies", "models") and unread):
                sections.add(section, key, message)
        if sections.defects or outcome is None or time_zero is None or eligibility is None:
            return None
        try:
            return TargetTrial(
                **stated,
                strategies=strategies,
                outcome=outcome,
                time_zero=time_zero,
                eligibility=eligibility,
                censoring=follow_up.get("censor", ()),
                covariates=covariates,
                models={role: model for role, model in models.items() if model is not None},
                algorithm=algorithm,
                options=cast("StudyOptions", options),  # their keys are those of `OPTIONS`
            )
        except InputError as error:
            named, _, rest = str(error).partition(": ")
            role = named.removesuffix("_model")
            if role in keys.FAMILIES:
                sections.add(("models", role), None, rest)
            elif named in OPTIONS:
                sections.add(("options",), named, rest)
            else:
                sections.add(("trial",), None, str(error))
            return None

    def _required(self, name: str, known: Mapping[str, Key]) -> dict[str, str]:
        if self._sections.table((name,)) is None:
            self._sections.add((name,), None, "the section is missing")
            return {}
        return self._sections.values((name,), known)

    def _made(self, name: str, make: Callable[..., T], known: Mapping[str, Key]) -> T | None:
        """Return the object that a section describes; None, with its defects added, if it has any."""
        before = len(self._sections.defects)
        given = self._sections.values((name,), known)
        sound = before == len(self._sections.defects)
        if not {key for key, reader in known.items() if reader.required} <= given.keys():
            return None
        made: T | None = self._sections.construct((name,), make, given)  # its defects are reported as well
        return made if sound else None

    # Concept sets.

    def _read_concepts(self) -> None:
        for name, written in (self._sections.table(("concepts",)) or {}).items():
            # A concept set that cannot be read gets a placeholder, so that its uses are not reported.
            self._concepts[name] = ConceptSet(name=name, ids=(1,))
            place = ("concepts", name)
            table = isinstance(written, dict)
            given = self._sections.values(place, _CONCEPTS) if table else self._ids(name, written)
            if "ids" in given:
                made = self._sections.construct(place, partial(ConceptSet, name=name), given)
                self._concepts[name] = made or self._concepts[name]

    def _ids(self, name: str, written: Toml) -> Arguments:
        try:
            return {"ids": IDS.read(written)}
        except ValueError:
            self._sections.add(("concepts",), name, f"expected {IDS.expected}, or a table with ids")
            return {}

    def _concept_key(self) -> Key:
        """A key whose value is the name of a concept set."""
        known = " or ".join(f'"{name}"' for name in self._concepts) or "none is defined"
        return Key(read=toml.named(self._concepts), expected=f"a name from [concepts]: {known}")

    # Sections.

    def _strategies(self) -> tuple[TreatmentStrategy, ...]:
        written = self._document.get("strategies")
        if not (isinstance(written, list) and all(isinstance(each, dict) for each in written)):
            self._sections.add(
                ("strategies",),
                None,
                "list them as [[strategies]] tables; the first is the reference",
            )
            return ()
        known = {"name": required(TEXT), "drugs": required(self._concept_key())}
        kinds = {"strategy": SectionKind(make=TreatmentStrategy, keys=known)}
        made = [
            self._sections.make(("strategies", index), kinds, default="strategy")
            for index in range(len(written))
        ]
        return tuple(strategy for strategy in made if strategy is not None)

    def _time_zero_keys(self) -> dict[str, Key]:
        return {"condition": self._concept_key(), "grace_days": COUNT, "washout_days": COUNT}

    def _eligibility(self) -> Eligibility | None:
        def criteria(present: bool) -> Key:
            def criterion(
                conditions: ConceptSet | None = None, drugs: ConceptSet | None = None, **window: int
            ) -> Criterion:
                domain, concepts = _one_domain(conditions, drugs)
                return Criterion(domain=domain, concepts=concepts, present=present, **window)

            kinds = {"criterion": SectionKind(make=criterion, keys={**self._records(), **_WINDOW})}
            section = f"[[eligibility.{'present' if present else 'absent'}]] tables"
            return replace(toml.tables(kinds, default="criterion", expected=section), required=False)

        def eligibility(
            age: tuple[int, int] | None = None,
            observation_days_before: int | None = None,
            present: tuple[Criterion, ...] = (),
            absent: tuple[Criterion, ...] = (),
        ) -> Eligibility:
            return Eligibility(
                age=age, observation_days_before=observation_days_before, criteria=(*present, *absent)
            )

        known = {
            "age": _AGE,
            "observation_days_before": COUNT,
            "present": criteria(True),
            "absent": criteria(False),
        }
        return self._made("eligibility", eligibility, known)

    def _records(self) -> dict[str, Key]:
        return {"conditions": self._concept_key(), "drugs": self._concept_key()}

    def _outcome(self) -> TrialOutcome | None:
        def outcome(
            days: int,
            name: str | None = None,
            conditions: ConceptSet | None = None,
            death: bool = False,
            **grid: Any,
        ) -> TrialOutcome:
            if death == (conditions is not None):
                raise InputError('outcome: give exactly one of conditions = "a concept set" and death = true')
            default = "death" if conditions is None else conditions.name
            return TrialOutcome(name=name or default, days=days, conditions=conditions, **grid)

        known = {
            "name": TEXT,
            "days": required(COUNT),
            "conditions": self._concept_key(),
            "death": TRUTH,
            "period_days": COUNT,
            "horizons": _HORIZONS,
        }
        if self._sections.table(("outcome",)) is None:
            self._sections.add(("outcome",), None, "the section is missing: which event is the outcome?")
            return None
        return self._made("outcome", outcome, known)

    def _covariates(self) -> tuple[AbstractCovariate, ...]:
        made = []
        for name, written in (self._sections.table(("covariates",)) or {}).items():
            if isinstance(written, dict):
                made.append(self._sections.make(("covariates", name), self._covariate_kinds(name)))
            else:
                self._sections.add(("covariates",), name, 'expected a table such as {kind = "age"}')
        return tuple(covariate for covariate in made if covariate is not None)

    def _covariate_kinds(self, name: str) -> dict[str, SectionKind[AbstractCovariate]]:
        concepts = {"concepts": required(self._concept_key())}
        return {
            "age": SectionKind(make=partial(AgeAtBaseline, name=name), keys={}),
            "sex": SectionKind(make=partial(Sex, name=name), keys={}),
            "visits": SectionKind(make=partial(VisitCount, name=name), keys={**_WINDOW, "most": COUNT}),
            "condition": SectionKind(
                make=partial(AnyRecord, name=name, domain=Domain.CONDITION), keys={**concepts, **_WINDOW}
            ),
            "drug": SectionKind(
                make=partial(AnyRecord, name=name, domain=Domain.DRUG), keys={**concepts, **_WINDOW}
            ),
            "measurement": SectionKind(
                make=partial(LastMeasurement, name=name),
                keys={
                    **concepts,
                    **_WINDOW,
                    "range": required(_RANGE),
                    "if_missing": required(NUMBER),
                    "units": IDS,
                },
            ),
        }

    def _models(self) -> dict[str, NuisanceModel | None]:
        def on_sample(model: GLM | GradientBoostedTrees, sample: str) -> Pilot:  # noqa: ARG001
            raise InputError("sample: a trial file cannot name a file of records")

        table = self._sections.table(("models",)) or {}
        self._sections.refuse_unknown(("models",), table, keys.FAMILIES)
        return {
            role: self._sections.make(("models", role), keys.model_kinds(role, on_sample), default="GLM")
            for role in keys.FAMILIES
            if role in table
        }

    # Silos.

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all silos."""
        return tuple(self._sections.table(("silos",)) or {})

    def silos(self, only: Collection[str] | None) -> dict[str, Cdm]:
        """Return the silos in ``only`` (all if None), from their sections or their own files."""
        table = self._sections.table(("silos",))
        if not table:
            self._sections.add(("silos",), None, 'list the silos, each as name = "its file" or [silos.name]')
        silos: dict[str, Cdm] = {}
        for name, written in (table or {}).items():
            if only is not None and name not in only:
                continue
            cdm = self._silo(name, written)
            if cdm is not None:
                for other in (other for other, earlier in silos.items() if share_people(cdm, earlier)):
                    message = f"silos '{other}' and '{name}' read the same people, who would count twice"
                    self._sections.add(("silos",), name, f"{message}; name another database, schema or part")
                silos[name] = cdm
        return silos

    def _silo(self, name: str, written: Toml) -> Cdm | None:
        if isinstance(written, dict):
            return read_cdm(self._sections, ("silos", name), name=name, folder=self._path.parent)
        if not (isinstance(written, str) and written.strip()):
            self._sections.add(("silos",), name, "expected the path of a silo file, or a section")
            return None
        try:
            return read_silo(self._path.parent / written, name)
        except StudyFileErrors as errors:
            self._others += errors.defects
        return None


def _one_domain(conditions: ConceptSet | None, drugs: ConceptSet | None) -> tuple[Domain, ConceptSet]:
    if conditions is not None and drugs is None:
        return Domain.CONDITION, conditions
    if drugs is not None and conditions is None:
        return Domain.DRUG, drugs
    raise InputError("give exactly one of conditions and drugs")


_WINDOW = {"from_day": INTEGER, "to_day": INTEGER}

"""`study.toml`: the study that a consortium's statistician writes, where its silos are, and its plan.

All defects are reported at once, each with its line. `keys` has the format, `toml` reads it.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from fedtmle.algorithms.coded import Coded
from fedtmle.defects import Defect, Lines, Place, Toml, near
from fedtmle.errors import InputError
from fedtmle.initial.glm import GLM, Supplied
from fedtmle.initial.superlearner import GradientBoostedTrees, Pilot, formulas, pilots, used_columns
from fedtmle.initial.variables import Variables, read_variable
from fedtmle.model.table import SILO
from fedtmle.programs.flow import StudyProgram
from fedtmle.programs.study import DRAFT, NuisanceModel, Study
from fedtmle.protocol.learners import absent_pilot
from fedtmle.protocol.plan import FEWEST_MASKED, Member, Plan
from fedtmle.studyfile import keys
from fedtmle.studyfile.keys import FAMILIES
from fedtmle.studyfile.sample import fit_on_sample
from fedtmle.studyfile.toml import DEEPEST, Arguments, SectionKind, Sections, too_deep
from fedtmle.targets.effects.estimands import ATE, AbstractEffect, OutcomeMean
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect
from fedtmle.targets.regimes.timeline import LAG
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle.targets.time.followup import PERIOD


@dataclass(frozen=True, kw_only=True)
class StudyFile:
    """A study, the file of each silo by its name, and the further parts of a deployed run's plan.

    ``keys`` are each silo's public keys: 32 bytes for its signatures and, for masked sums, 32 more for masks
    (`SigningKey.public_keys`); ``expires`` is the last day on which silos answer; ``server`` is the public
    key with which the server signs its requests; ``colluders`` is how many silos may lie (`Plan`).
    """

    path: Path
    study: Study
    silos: Mapping[str, Path]
    keys: Mapping[str, bytes] = field(default_factory=dict)
    expires: datetime.date | None = None
    server: bytes = b""
    colluders: int = 1


class StudyFileErrors(InputError):  # noqa: N818 (several errors in one)
    """All defects of a study file.

    ``silos`` are the silos that can be read nevertheless, and ``study`` is the study as far as its target and
    models are free of defects, so that the silos' data can be checked as well.
    """

    def __init__(
        self,
        defects: Iterable[Defect],
        silos: Mapping[str, Path] | None = None,
        study: Study | None = None,
    ) -> None:
        self.study = study
        self.defects = tuple(sorted(dict.fromkeys(defects), key=lambda defect: defect.line or 0))
        self.silos = dict(silos or {})
        super().__init__("\n".join(map(str, self.defects)))

    def __reduce__(self) -> tuple[type[StudyFileErrors], tuple[object, ...]]:
        # The default would rebuild from the message, and fail in the parent of a worker process.
        return (StudyFileErrors, (self.defects, self.silos, self.study))


def read_study(path: str | Path, *, samples: bool = True) -> StudyFile:
    """Read a study file.

    Parameters
    ----------
    path
        The study file.
    samples
        Whether the study may name a file on which a pilot is fitted. A study that came from another machine
        must not decide which files are read here.

    Returns
    -------
    StudyFile
        The study and its silos.

    Raises
    ------
    StudyFileErrors
        The file has defects. All of them are listed, with their lines.

    Examples
    --------
    >>> ft.read_study("example/study.toml").study.target.outcome
    'sbp_12'
    """
    path = Path(path)
    text, document = read_toml(path)
    return _StudyReader(path, text, document, samples=samples).file()


def read_toml(path: Path) -> tuple[str, dict[str, Toml]]:
    """Return the text and the content of a study's or a trial's file; raise `StudyFileErrors` if not TOML."""
    line, text = None, ""
    try:
        text = path.read_text(encoding="utf-8")
        line = too_deep(text)
        if line is None:
            return text, tomllib.loads(text)
        # tomllib takes minutes and gigabytes to parse a key of a thousand parts
        message = f"a key or value is nested more than {DEEPEST} levels deep"
    except tomllib.TOMLDecodeError as error:
        at = re.search(r" \(at line (\d+), column \d+\)", str(error))
        line = int(at[1]) if at else len(text.splitlines())
        message = f"not TOML: {_bare_text(text, error) or re.sub(r' [(]at .*[)]', '', str(error))}"
    except FileNotFoundError:
        message = "there is no such file"
    except (OSError, UnicodeDecodeError):
        message = "the file cannot be read; check its permissions and that it is UTF-8 text"
        if path.is_dir():
            inside = [str(each) for name in ("study.toml", "trial.toml") if (each := path / name).is_file()]
            message = f"this is a folder; give the file itself{': ' if inside else ''}{' or '.join(inside)}"
    raise StudyFileErrors([Defect(file=str(path), line=line, message=message)])


_BARE_TEXT = re.compile(r"[^\W\d][^,\]}#\"'=]*")


def _bare_text(text: str, error: tomllib.TOMLDecodeError) -> str:
    """Return how to write text that lacks quotes, if the parser stopped at some, else ""."""
    at = re.match(r"Invalid value \(at line (\d+), column (\d+)\)", str(error))
    bare = at and _BARE_TEXT.match(text.split("\n")[int(at[1]) - 1], int(at[2]) - 1)
    if not bare:
        return ""
    value = bare[0].strip()
    if value.lower() in ("true", "false"):
        return f"write {value.lower()} in small letters"
    return f'text needs quotes, as in "{value}"'


class _StudyReader:
    """Reads the study that a TOML document describes, and collects its defects."""

    def __init__(self, path: Path, text: str, document: dict[str, Toml], *, samples: bool) -> None:
        self._samples = samples
        self._path, self._document = path, document
        self._own_roles: tuple[str, ...] = ()  # roles of models that are arguments of the target
        self._columns_known = False  # whether target and models, and so the columns, are free of defects
        self._sections = Sections(str(path), Lines(text), document, keys.homes())

    def file(self) -> StudyFile:
        sections = self._sections
        above = sections.values((), keys.ABOVE, sections=keys.SECTIONS)
        variables = self._variables()
        target = self._target(variables)
        models = self._models(target, variables)
        self._columns_known = not sections.defects
        if self._columns_known and variables:
            self._refuse_undeclared(models, target, variables)
        if not self._columns_known and not variables:
            sections.add(("variables",), None, f"declare every variable that the study uses; {DRAFT}")
        study = self._study(
            {
                "target": target or _stand_in_target("treatment_model" in models),
                "variables": variables if target else Variables({**variables, **_STAND_IN_VARIABLES}),
                **(models if target is not None else {**models, **_NO_HAZARDS}),
                "algorithm": sections.make(("algorithm",), keys.ALGORITHMS, default="Coded") or Coded(),
                **sections.values(("options",), keys.OPTIONS),
                **above,
                "privacy": sections.make(("privacy",), keys.PRIVACY, default="Privacy")
                if sections.table(("privacy",))
                else None,
            }
        )
        silos = self._silos()
        self._check_names(silos)
        plan = sections.values(("plan",), keys.PLAN)
        for name in (name for name in plan.get("keys", {}) if name not in silos):
            sections.add(("plan",), "keys", f"no silo is called '{name}'{near(name, silos)}")
        if sections.defects or study is None:
            raise StudyFileErrors(sections.defects, silos, study if self._columns_known else None)
        return StudyFile(path=self._path, study=study, silos=silos, **plan)

    def _study(self, arguments: Arguments) -> Study | None:
        """Return the study; an invalid argument becomes a defect and is dropped, to check the others."""
        has_stand_ins = False
        while True:
            try:
                return Study(**arguments)
            except InputError as error:
                name, _, rest = str(error).partition(": ")
                role = name.removesuffix("_model")
                if role in FAMILIES:
                    section = ("models", role)
                    formula = "formula" in (self._sections.table(section) or {}) and name in arguments
                    self._sections.add(section, "formula" if formula else None, rest)
                    treated = arguments["target"].treatment is not None
                    used = role in arguments["target"].roles and (treated or role != "treatment")
                    arguments[name] = _STAND_IN if used else None
                    self._columns_known = False
                    continue
                if role in self._own_roles:
                    self._sections.add(("models", role), None, rest)
                    arguments["target"] = replace(arguments["target"], **{name: _STAND_IN})
                    self._columns_known = False
                    continue
                if name in ("variables", "arms", "strata") and not has_stand_ins:
                    has_stand_ins = True
                    self._refuse_dictionary(name, rest)
                    arguments |= _stand_ins(arguments["target"].treatment is not None)
                    arguments |= {"weights": None, "cluster": None, **_NO_HAZARDS}
                    continue
                if name == "privacy":
                    self._sections.add(("privacy",), None, rest)
                else:
                    self._sections.add(() if name in keys.ABOVE else ("options",), name, rest)
                if name not in arguments:
                    return None
                del arguments[name]

    def _refuse_undeclared(
        self, models: dict[str, NuisanceModel], target: AbstractEffect | None, variables: Variables
    ) -> None:
        """Add a defect for each model column that the dictionary lacks, and use a stand-in for the model."""
        known = {*variables, SILO, *(() if target is None else (target.outcome, target.treatment))}
        if target is None or isinstance(target, AbstractTimeEffect):
            known.add(PERIOD)
        if isinstance(target, AbstractRegimeEffect):
            lags = (LAG.fullmatch(name) for model in models.values() for name in used_columns(model))
            known |= {lag[0] for lag in lags if lag and lag[2] in target.over_time and lag[2] in variables}
        for name, model in models.items():
            names = [
                each for f in formulas(model, public=True) for each in (*f.numeric_names, *f.factor_names)
            ]
            for column in (column for column in dict.fromkeys(names) if column not in known):
                role = name.removesuffix("_model")
                has_formula = "formula" in (self._sections.table(("models", role)) or {})
                message = f"[variables] does not declare '{column}'{near(column, variables)}"
                self._sections.add(("models", role), "formula" if has_formula else None, message)
                models[name] = _STAND_IN

    def _refuse_dictionary(self, name: str, message: str) -> None:
        """Add a defect of the dictionary, unless it or the columns in use already have defects."""
        if self._columns_known and name == "variables":
            self._sections.add(("variables",), None, message)
        elif self._columns_known:
            self._sections.add(("target",), name, message)
        self._columns_known = False

    def _variables(self) -> Variables:
        """Return the dictionary; every entry's defects are collected."""
        variables = {}
        for name, entry in (self._sections.table(("variables",)) or {}).items():
            try:
                variables[name] = read_variable(entry)
            except InputError as error:
                key, _, rest = str(error).partition(": ")
                is_there = isinstance(entry, dict) and key in entry
                message = rest if is_there else str(error)
                self._sections.add(("variables", name), key if is_there else None, message)
        return Variables(variables)

    def _target(self, variables: Variables) -> AbstractEffect | None:
        table = self._sections.table(("target",))
        if table is None:
            self._sections.add(("target",), None, "the section is missing: what should be estimated?")
            return None
        kind = table.get("kind")
        try:
            kinds = keys.target_kinds(kind)
        except InputError as error:  # the target of another distribution cannot be loaded
            self._sections.add(("target",), "kind", str(error).partition(": ")[2])
            return None
        if isinstance(kind, str) and kind in kinds:
            known = kinds[kind].keys
            rules = [name for name, key in known.items() if key.kinds is keys.RULES]
            fits = [self._rules_fit(table, name, variables) for name in rules]  # a list: report every defect
            if not all(fits):
                self._sections.values(("target",), known, kind=kind)
                return None
            kinds[kind] = self._with_own_models(kinds[kind], variables)
        return self._sections.make(("target",), kinds)

    def _with_own_models(
        self, kind: SectionKind[AbstractEffect], variables: Variables
    ) -> SectionKind[AbstractEffect]:
        """Return the kind of a target with the models that are its own arguments, from their sections."""
        self._own_roles = keys.own_roles(kind.make) if isinstance(kind.make, type) else ()
        given = self._sections.table(("models",)) or {}
        models = {f"{r}_model": self._model(r, None, variables) for r in self._own_roles if r in given}
        return replace(kind, make=partial(kind.make, **models)) if models else kind

    def _rules_fit(self, target: Mapping[str, Toml], name: str, variables: Variables) -> bool:
        """Return whether the rules at a key name only arms of the study; add a defect for each other one."""
        names, written = self._arms(target, variables), target.get(name)
        if not (isinstance(written, list) and names):
            return True
        before = len(self._sections.defects)
        for index, rule in enumerate(written):
            section = ("target", name, index)
            if not isinstance(rule, dict):
                continue
            for key in ("arm", "otherwise"):
                arm = rule.get(key)
                if isinstance(arm, str | int) and str(arm) not in names:
                    self._sections.add(section, key, f"'{arm}' is none of the arms{near(arm, names)}")
            shares = rule.get("shares")
            if isinstance(shares, list) and len(shares) != len(names):
                self._sections.add(section, "shares", f"expected one share per arm, {len(names)}")
        return before == len(self._sections.defects)

    def _arms(self, target: Mapping[str, Toml], variables: Variables) -> tuple[str, ...]:
        """Return the arms that the target lists, or else those that the dictionary declares."""
        arms, treatment = target.get("arms"), target.get("treatment")
        if isinstance(arms, list):
            return tuple(map(str, arms))
        return variables[treatment].codes if isinstance(treatment, str) and treatment in variables else ()

    def _models(self, target: AbstractEffect | None, variables: Variables) -> dict[str, NuisanceModel]:
        table = self._sections.table(("models",)) or {}
        self._sections.refuse_unknown(("models",), table, (*FAMILIES, *self._own_roles))
        models = {role: self._model(role, target, variables) for role in FAMILIES if role in table}
        if "outcome" not in models and (target is None or "outcome" in target.roles):
            self._sections.add(
                ("models", "outcome"), None, "the section is missing: what does the outcome depend on?"
            )
            models["outcome"] = _STAND_IN
        return {f"{role}_model": model for role, model in models.items()}

    def _model(self, role: str, target: AbstractEffect | None, variables: Variables) -> NuisanceModel:
        section = ("models", role)

        def on_sample(model: GLM | GradientBoostedTrees, sample: str) -> Pilot:
            if not self._samples:
                raise InputError("sample: a study that is run across machines cannot name a file")
            if role in self._own_roles:
                raise InputError("sample: models of this role are not fitted on a sample; let silos fit it")
            if target is None:  # the target's own defect is known already
                return Pilot.from_coefficients("1", {}, "gaussian", (0.0,))
            return fit_on_sample(target, variables, role, model, self._path.parent / sample)

        table = self._sections.table(section) or {}
        default = "Supplied" if "supplied" in table else "GLM"
        made = self._sections.make(section, keys.model_kinds(role, on_sample), default=default)
        arms = len(self._arms(self._sections.table(("target",)) or {}, variables)) or 1
        if isinstance(made, Supplied) and (arms > 1 or (target is not None and target.treatment is None)):
            counts = {"outcome": (arms,), "treatment": (arms - 1,), "missingness": (1, arms)}
            expected = counts.get(role)
            if expected is not None and len(made.columns) not in expected:
                self._sections.add(
                    section, "supplied", f"expected {expected[0]} column(s), one per prediction"
                )
        return made or _STAND_IN

    def _check_names(self, silos: Mapping[str, Path]) -> None:
        """Check that pilots are fitted at silos of the study, and that each silo has a weight if any has."""
        for role in (*FAMILIES, *self._own_roles):
            table = self._sections.table(("models", role)) or {}
            learners = table.get("learners")
            places: list[tuple[Place, Toml]] = [(("models", role), table)]
            if isinstance(learners, list):
                places += [(("models", role, "learners", i), each) for i, each in enumerate(learners)]
            for place, model in places:
                at = model.get("at") if isinstance(model, dict) else None
                if isinstance(at, str) and at not in silos:
                    self._sections.add(place, "at", f"no silo is called '{at}'{near(at, silos)}")
        algorithm = self._sections.table(("algorithm",)) or {}
        weights = algorithm.get("weights")
        if isinstance(weights, dict) and set(weights) != set(silos):
            self._sections.add(
                ("algorithm",), "weights", f"expected one weight for each of the silos {', '.join(silos)}"
            )

    def _silos(self) -> dict[str, Path]:
        table = self._sections.table(("silos",))
        if not table:
            self._sections.add(("silos",), None, 'list the silos, each as name = "its silo or data file"')
        silos = {}
        for name, where in (table or {}).items():
            if isinstance(where, str) and where.strip():
                silos[name] = self._path.parent / where
            else:
                self._sections.add(("silos",), name, "expected the path of a silo or data file, in quotes")
        return silos


KEY = 32  # bytes of a public key

# Stand-ins for parts that cannot be read, so that the rest of the study is still checked.
_NO_HAZARDS = {"hazard_model": None, "censoring_model": None}  # a stand-in target has no time
_STAND_IN = GLM("1")
_OUTCOME, _TREATMENT = "\0outcome", "\0treatment"  # names that no formula can contain
_STAND_IN_VARIABLES = Variables({_OUTCOME: {"kind": "binary"}, _TREATMENT: {"kind": "binary"}})


def _stand_in_target(treated: bool) -> AbstractEffect:
    return ATE(outcome=_OUTCOME, treatment=_TREATMENT) if treated else OutcomeMean(outcome=_OUTCOME)


def _stand_ins(treated: bool) -> Arguments:
    """Return stand-ins for everything that names a column."""
    return {
        "target": _stand_in_target(treated),
        "variables": _STAND_IN_VARIABLES,
        "outcome_model": _STAND_IN,
        "treatment_model": _STAND_IN if treated else None,
        "missingness_model": None,
    }


def study_plan(
    study: Study,
    members: tuple[Member, ...],
    expires: datetime.date | None = None,
    *,
    silos: tuple[str, ...] | None = None,
) -> Plan:
    """Return the plan that every party derives from the study and the roster.

    ``silos`` are the levels of C(silo), by default the roster; where one member has the pooled rows of all
    silos, they are given.
    """
    names = tuple(member.name for member in members) if silos is None else silos
    for pilot in (pilot for model in study.models.values() for pilot in pilots(model)):
        if pilot.at is not None and pilot.at not in names and not study.algorithm.pools_rows:
            raise InputError(absent_pilot(pilot.at))
    return Plan(program=StudyProgram.of(study, names), roster=members, expires=expires)


def study_of(plan: Plan) -> Study:
    """Return the study that a plan is about."""
    if not isinstance(plan.program, StudyProgram):
        raise TypeError("this plan is not the plan of a study")
    return plan.program.study


def study_here(file: StudyFile) -> Study:
    """Return the study of a file as it runs in one process: masked if the deployed run is."""
    is_masked = file.study.aggregation == "auto" and bool(file.keys) and file_plan(file).is_masked
    return replace(file.study, aggregation="masked") if is_masked else file.study


def file_plan(file: StudyFile) -> Plan:
    """Return the plan of a study file; its roster is the silos of the file, in their order."""
    keys = {name: file.keys.get(name, b"") for name in file.silos}
    has_masks = all(len(key) == 2 * KEY for key in keys.values())
    is_masked = file.study.aggregation == "masked"
    if is_masked and not has_masks:
        lacking = ", ".join(f"'{name}'" for name, key in keys.items() if len(key) < 2 * KEY)
        raise InputError(
            f"{file.path}: masked sums need 128 digits of each silo's public keys under keys in [plan], as "
            f"`fedtmle silo decisions` prints them; there are none of {lacking}"
        )
    if file.study.aggregation == "auto":
        is_masked = has_masks and len(keys) >= FEWEST_MASKED and file.study.algorithm.adds_integers
        if is_masked:
            file.study.refuse_silo_columns()
    members = tuple(
        Member(name=name, key=key[:KEY], mask_key=key[KEY:] if is_masked else b"")
        for name, key in keys.items()
    )
    plan = study_plan(file.study, members, file.expires)
    return replace(plan, server=file.server, colluders=file.colluders)

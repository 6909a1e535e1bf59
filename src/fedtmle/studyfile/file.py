"""`study.toml`: the study that a consortium's statistician writes, and where its silos are.

Every mistake is reported at once, with the line it stands on; `keys` has the format.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedtmle.algorithms.coded import Coded
from fedtmle.errors import InputError
from fedtmle.initial.glm import GLM, Supplied
from fedtmle.initial.pilot import Pilot
from fedtmle.initial.superlearner import pilots
from fedtmle.initial.trees import GradientBoostedTrees
from fedtmle.programs.flow import StudyProgram
from fedtmle.programs.study import NuisanceModel, Study
from fedtmle.protocol.learners import absent_pilot
from fedtmle.protocol.plan import Member, Plan
from fedtmle.studyfile import keys
from fedtmle.studyfile.sample import fit_on_sample
from fedtmle.studyfile.toml import Lines, Mistake, Place, Sections, near
from fedtmle.studyfile.values import FAMILIES, model_kinds
from fedtmle.targets.effects.estimands import ATE, AbstractEffect, OutcomeMean


@dataclass(frozen=True, kw_only=True)
class StudyFile:
    """A study, each silo's file by its name, and what the plan of a deployed run says beside these."""

    path: Path
    study: Study
    silos: Mapping[str, Path]
    keys: Mapping[str, bytes] = field(default_factory=dict)  # with which silos sign what they heard
    expires: datetime.date | None = None


class StudyFileErrors(InputError):  # noqa: N818 (several errors in one)
    """Everything that is wrong with a study file; ``silos`` are those it names all the same, and
    ``study`` what it asks of their data, where its mistakes leave no doubt about that."""

    def __init__(
        self,
        mistakes: Iterable[Mistake],
        silos: Mapping[str, Path] | None = None,
        study: Study | None = None,
    ) -> None:
        self.study = study
        self.mistakes = tuple(sorted(dict.fromkeys(mistakes), key=lambda mistake: mistake.line or 0))
        self.silos = dict(silos or {})
        super().__init__("\n".join(map(str, self.mistakes)))

    def __reduce__(self) -> tuple[type[StudyFileErrors], tuple[Any, ...]]:
        # The default would rebuild from the message, and fail in the parent of a worker process.
        return (StudyFileErrors, (self.mistakes, self.silos, self.study))


def read_study(path: str | Path, *, samples: bool = True) -> StudyFile:
    """The study file at ``path``; raises `StudyFileErrors` with all its mistakes.

    Without ``samples``, a study that names a file to fit a pilot on is refused: one that came from
    elsewhere must not say what is read here.
    """
    path = Path(path)
    line, text = None, ""
    try:
        text = path.read_text(encoding="utf-8")
        return _Reader(path, text, tomllib.loads(text), samples=samples).file()
    except tomllib.TOMLDecodeError as error:
        at = re.search(r" \(at line (\d+), column \d+\)", str(error))
        line = int(at[1]) if at else len(text.splitlines())
        what = f"not TOML: {re.sub(r' [(]at .*[)]', '', str(error))}"
    except FileNotFoundError:
        what = "there is no such file"
    except (OSError, UnicodeDecodeError):
        what = "the file cannot be read; check its permissions and that it is UTF-8 text"
    raise StudyFileErrors([Mistake(file=str(path), line=line, what=what)])


class _Reader:
    """Turns a document into a study."""

    def __init__(self, path: Path, text: str, document: dict[str, Any], *, samples: bool) -> None:
        self._samples = samples
        self._path, self._document = path, document
        self._reads_clearly = False  # whether target and models are what was written
        self._sections = Sections(str(path), Lines(text), document, keys.homes())

    def file(self) -> StudyFile:
        sections = self._sections
        sections.refuse_unknown((), self._document, keys.SECTIONS)
        target = self._target()
        models = self._models(target)
        self._reads_clearly = not sections.mistakes  # which columns are asked depends on these alone
        study = self._study(
            {
                "target": target or _stand_in_target("treatment_model" in models),
                **models,
                "algorithm": sections.make(("algorithm",), keys.ALGORITHMS, default="Coded") or Coded(),
                **sections.values(("options",), keys.OPTIONS),
            }
        )
        silos = self._silos()
        self._check_names(silos)
        plan = sections.values(("plan",), keys.PLAN)
        for name in (name for name in plan.get("keys", {}) if name not in silos):
            sections.add(("plan",), "keys", f"no silo is called '{name}'{near(name, silos)}")
        if sections.mistakes or study is None:
            raise StudyFileErrors(sections.mistakes, silos, study if self._reads_clearly else None)
        return StudyFile(path=self._path, study=study, silos=silos, **plan)

    def _study(self, arguments: dict[str, Any]) -> Study | None:
        """The study; an argument that it refuses is noted and left out, so that the next can be tried."""
        while True:
            try:
                return Study(**arguments)
            except InputError as error:
                named, _, rest = str(error).partition(": ")
                role = named.removesuffix("_model")
                if role in FAMILIES:
                    section = ("models", role)
                    formula = "formula" in (self._sections.table(section) or {}) and named in arguments
                    self._sections.add(section, "formula" if formula else None, rest)
                    treated = arguments["target"].treatment is not None
                    arguments[named] = _STAND_IN if treated or role != "treatment" else None
                    self._reads_clearly = False
                    continue
                self._sections.add(("options",), named, rest)
                if named not in arguments:
                    return None
                del arguments[named]

    def _target(self) -> AbstractEffect | None:
        table = self._sections.table(("target",))
        if table is None:
            self._sections.add(("target",), None, "the section is missing: what should be estimated?")
            return None
        kinds, kind = keys.target_kinds(), table.get("kind")
        if isinstance(kind, str) and kind in kinds:
            known = kinds[kind].keys
            rules = [name for name, key in known.items() if key.kinds is keys.RULES]
            fits = [self._rules_fit(table, name) for name in rules]  # every one, to note all mistakes
            if not all(fits):
                self._sections.values(("target",), known, kind=kind)
                return None
        made: AbstractEffect | None = self._sections.make(("target",), kinds)
        return made

    def _rules_fit(self, target: Mapping[str, Any], name: str) -> bool:
        """Return whether the rules at a key are about the arms; note each that is not at its own line."""
        arms, written = target.get("arms", ["0", "1"]), target.get(name)
        if not (isinstance(written, list) and isinstance(arms, list)):
            return True
        arms, before = [str(arm) for arm in arms], len(self._sections.mistakes)
        for index, rule in enumerate(written):
            section = ("target", name, index)
            for key in ("arm", "otherwise") if isinstance(rule, dict) else ():
                arm = rule.get(key)
                if isinstance(arm, str | int) and str(arm) not in arms:
                    self._sections.add(section, key, f"'{arm}' is none of the arms{near(arm, arms)}")
            shares = rule.get("shares") if isinstance(rule, dict) else None
            if isinstance(shares, list) and len(shares) != len(arms):
                self._sections.add(section, "shares", f"expected one share per arm, {len(arms)}")
        return before == len(self._sections.mistakes)

    def _models(self, target: AbstractEffect | None) -> dict[str, NuisanceModel]:
        table = self._sections.table(("models",)) or {}
        self._sections.refuse_unknown(("models",), table, FAMILIES)
        models = {role: self._model(role, target) for role in FAMILIES if role in table}
        if "outcome" not in models:
            self._sections.add(
                ("models", "outcome"), None, "the section is missing: what does the outcome depend on?"
            )
            models["outcome"] = _STAND_IN
        return {f"{role}_model": model for role, model in models.items()}

    def _model(self, role: str, target: AbstractEffect | None) -> NuisanceModel:
        section = ("models", role)

        def on_sample(model: GLM | GradientBoostedTrees, sample: str) -> Pilot:
            if not self._samples:
                raise InputError("sample: a study that is run across machines cannot name a file")
            if target is None:  # which is a mistake already
                return Pilot.from_coefficients("1", {}, "gaussian", (0.0,))
            return fit_on_sample(target, role, model, self._path.parent / sample)

        table = self._sections.table(section) or {}
        default = "Supplied" if "supplied" in table else "GLM"
        made: NuisanceModel | None = self._sections.make(
            section, model_kinds(role, on_sample), default=default
        )
        arms = self._arm_count(target)
        if isinstance(made, Supplied) and arms is not None:
            expected = {"outcome": (arms,), "treatment": (arms - 1,), "missingness": (1, arms)}[role]
            if len(made.columns) not in expected:
                self._sections.add(
                    section, "supplied", f"expected {expected[0]} column(s), one per prediction"
                )
        return made or _STAND_IN

    def _arm_count(self, target: AbstractEffect | None) -> int | None:
        """How many arms there are, if that can be read although the target has other mistakes."""
        if target is not None:
            return len(target.arms)
        arms = (self._sections.table(("target",)) or {}).get("arms", ["0", "1"])
        return len(arms) if isinstance(arms, list) else None

    def _check_names(self, silos: Mapping[str, Path]) -> None:
        """Pilots are at silos of the study, and a weight per silo is for each of them."""
        for role in FAMILIES:
            table = self._sections.table(("models", role)) or {}
            learners = table.get("learners")
            places: list[tuple[Place, Any]] = [(("models", role), table)]
            if isinstance(learners, list):
                places += [(("models", role, "learners", i), own) for i, own in enumerate(learners)]
            for place, own in places:
                at = own.get("at") if isinstance(own, dict) else None
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


# For what cannot be read, so that the rest of the study is checked as well.
_STAND_IN = GLM("1")


def _stand_in_target(treated: bool) -> AbstractEffect:
    outcome, treatment = "\0outcome", "\0treatment"  # which no formula can name
    return ATE(outcome=outcome, treatment=treatment) if treated else OutcomeMean(outcome=outcome)


# The plan of a study: what every party derives from the study and the roster.


def study_plan(study: Study, silos: tuple[Member, ...], expires: datetime.date | None = None) -> Plan:
    """The plan that every party of a study derives from the study and the roster."""
    names = {member.name for member in silos}
    for pilot in (pilot for model in study.models.values() for pilot in pilots(model)):
        if pilot.at is not None and pilot.at not in names and not study.algorithm.pools_rows:
            raise InputError(absent_pilot(pilot.at))
    return Plan(program=StudyProgram(study=study), roster=silos, expires=expires)


def study_of(plan: Plan) -> Study:
    """Return the study that a plan is about."""
    if not isinstance(plan.program, StudyProgram):
        raise TypeError("this plan is not a study's")
    return plan.program.study


def file_plan(file: StudyFile) -> Plan:
    """The plan of a study file: its roster is the silos that the file lists, in its order."""
    members = tuple(Member(name=name, key=file.keys.get(name, b"")) for name in file.silos)
    return study_plan(file.study, members, file.expires)

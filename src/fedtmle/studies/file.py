"""`study.toml`: the study that a consortium's statistician writes, and where its silos are.

Every mistake is reported at once, with the line it stands on; `keys` has the format.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtmle.algorithms.coded import Coded
from fedtmle.algorithms.study import Study
from fedtmle.errors import InputError
from fedtmle.initial.glm import GLM, Supplied
from fedtmle.studies import keys
from fedtmle.studies.lines import Lines
from fedtmle.studies.sections import Mistake, Sections, near
from fedtmle.targets.effects.components import Static, Stochastic
from fedtmle.targets.effects.estimands import ATE, AbstractEffect, OutcomeMean


@dataclass(frozen=True, kw_only=True)
class StudyFile:
    """A study, each silo's file by its name, and the silos that release their own estimate."""

    path: Path
    study: Study
    silos: Mapping[str, Path]
    release: tuple[str, ...] = ()


class StudyFileErrors(InputError):  # noqa: N818 (several errors in one)
    """Everything that is wrong with a study file; ``silos`` are those it names all the same."""

    def __init__(self, mistakes: Iterable[Mistake], silos: Mapping[str, Path] | None = None) -> None:
        self.mistakes = tuple(sorted(dict.fromkeys(mistakes), key=lambda mistake: mistake.line or 0))
        self.silos = dict(silos or {})
        super().__init__("\n".join(map(str, self.mistakes)))

    def __reduce__(self) -> tuple[type[StudyFileErrors], tuple[tuple[Mistake, ...], dict[str, Path]]]:
        # The default would rebuild from the message, and fail in the parent of a worker process.
        return (StudyFileErrors, (self.mistakes, self.silos))


def read_study(path: str | Path) -> StudyFile:
    """The study file at ``path``; raises `StudyFileErrors` with all its mistakes."""
    path = Path(path)
    line, text = None, ""
    try:
        text = path.read_text(encoding="utf-8")
        return _Reader(path, text, tomllib.loads(text)).file()
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

    def __init__(self, path: Path, text: str, document: dict[str, Any]) -> None:
        self._path, self._document = path, document
        self._sections = Sections(str(path), Lines(text), document, keys.HOMES)

    def file(self) -> StudyFile:
        sections = self._sections
        sections.refuse_unknown((), self._document, keys.SECTIONS)
        target = self._target()
        models = self._models(target)
        study = self._study(
            {
                "target": target or _stand_in_target("treatment_model" in models),
                **models,
                "algorithm": sections.make(("algorithm",), keys.ALGORITHMS, default="Coded") or Coded(),
                **sections.values(("options",), keys.OPTIONS),
            }
        )
        silos = self._silos()
        release = sections.values(("release",), keys.RELEASE).get("silos", ())
        for name in (name for name in release if name not in silos):
            sections.add(("release",), "silos", f"no silo is called '{name}'{near(name, silos)}")
        if sections.mistakes or study is None:
            raise StudyFileErrors(sections.mistakes, silos)
        return StudyFile(path=self._path, study=study, silos=silos, release=release)

    def _study(self, arguments: dict[str, Any]) -> Study | None:
        """The study; an argument that it refuses is noted and left out, so that the next can be tried."""
        while True:
            try:
                return Study(**arguments)
            except InputError as error:
                named, _, rest = str(error).partition(": ")
                role = named.removesuffix("_model")
                if role in keys.MODELS:
                    self._sections.add(("models", role), None, rest)
                else:
                    self._sections.add(("options",), named, rest)
                if named in arguments:
                    del arguments[named]
                elif role in keys.MODELS:
                    arguments[named] = _STAND_IN
                else:
                    return None

    def _target(self) -> AbstractEffect | None:
        table = self._sections.table(("target",))
        if table is None:
            self._sections.add(("target",), None, "the section is missing: what should be estimated?")
            return None
        rules = self._rules(table) if table.get("kind") == "PolicyMeans" else None
        made: AbstractEffect | None = self._sections.make(("target",), keys.TARGETS, ready=rules)
        return made

    def _rules(self, target: Mapping[str, Any]) -> dict[str, Any] | None:
        """The rules of `PolicyMeans`, each checked against the arms."""
        written, arms = target.get("rules"), target.get("arms", ["0", "1"])
        if not (isinstance(written, list) and isinstance(arms, list)):
            return None
        arms = [str(arm) for arm in arms]
        rules, before = [], len(self._sections.mistakes)
        for index in range(len(written)):
            section = ("target", "rules", index)
            rule = self._sections.make(section, keys.RULES)
            for key in ("arm", "otherwise"):
                arm = getattr(rule, key, None)
                if arm is not None and arm not in arms:
                    self._sections.add(section, key, f"'{arm}' is none of the arms{near(arm, arms)}")
            if isinstance(rule, Stochastic) and len(rule.shares) != len(arms):
                self._sections.add(section, "shares", f"expected one share per arm, {len(arms)}")
            rules.append(rule)
        sound = before == len(self._sections.mistakes)
        return {"rules": tuple(rules) if sound else tuple(map(Static, arms))}

    def _models(self, target: AbstractEffect | None) -> dict[str, GLM | Supplied]:
        table = self._sections.table(("models",)) or {}
        self._sections.refuse_unknown(("models",), table, keys.MODELS)
        models = {role: self._model(role, target) for role in keys.MODELS if role in table}
        if "outcome" not in models:
            self._sections.add(
                ("models", "outcome"), None, "the section is missing: what does the outcome depend on?"
            )
            models["outcome"] = _STAND_IN
        return {f"{role}_model": model for role, model in models.items()}

    def _model(self, role: str, target: AbstractEffect | None) -> GLM | Supplied:
        section, before = ("models", role), len(self._sections.mistakes)
        values = self._sections.values(section, keys.MODELS[role])
        supplied = values.pop("supplied", None)
        if supplied is not None:
            if values:
                self._sections.add(section, next(iter(values)), "goes with a formula, not with predictions")
            arms = 0 if target is None else len(target.arms)
            expected = {"outcome": arms, "treatment": arms - 1, "missingness": 1}[role]
            if target is not None and len(supplied) != expected:
                self._sections.add(section, "supplied", f"expected {expected} column(s), one per prediction")
            return Supplied(*supplied)
        if "formula" in values:
            model: GLM | None = self._sections.construct(section, GLM, values)
            return model or _STAND_IN
        if before == len(self._sections.mistakes):
            self._sections.add(section, None, 'give formula = "..." or supplied = ["..."]')
        return _STAND_IN

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
    return ATE(outcome="y", treatment="a") if treated else OutcomeMean(outcome="y")

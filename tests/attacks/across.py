"""Attacks across studies: each study is honest, and their differences are a person or a silo."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedtmle.runtime.certificate import heard_rounds, overhear
from fedtmle.runtime.session import Finished, InProcess, Session
from fedtmle.studies.home import Home, open_party
from fedtmle.studyfile.file import StudyFile, file_plan, read_study
from fedtmle_core.exact import Sums

STUDY = """
[target]
kind = "ATE"
outcome = "y"
treatment = "a"

[variables]
y = {kind = "binary"}
a = {kind = "binary"}
w = {kind = "number", range = [0, 100]}

[models.outcome]
formula = "C(a) + w"

[models.treatment]
formula = "w"

[options]
seed = SEED
sums = "exact"
diagnostics = false
"""
ROWS = 200
NEWCOMER = (1.0, 0.0, 61.25)  # y, a, w of the person who comes


class Hospitals:
    """Hospitals with homes of their own, each a folder with a table and a silo file."""

    def __init__(
        self,
        folder: Path,
        names: Sequence[str],
        policy: str = "",
        *,
        person: bool = False,
        covariates: str = "w",
    ) -> None:
        self.folder, self.person, self.columns = folder, person, ["y", "a", *covariates]
        self._everyone: dict[str, np.ndarray] = {}
        key = 'person = "id"\n' if person else ""
        for number, name in enumerate(names):
            (folder / name).mkdir(parents=True)
            silo = f'[silo]\nname = "{name}"\nhome = "home"\n\n[data]\npath = "table.csv"\n{key}'
            (folder / name / "silo.toml").write_text(f"{silo}\n[policy]\n{policy}")
            random = np.random.default_rng(number)
            w = np.round(random.uniform(20, 80, ROWS), 2)
            a = random.random(ROWS) < 0.5
            y = random.random(ROWS) < 0.3 + 0.2 * a
            more = [np.round(random.uniform(20, 80, ROWS), 2) for _ in covariates[1:]]
            self.keep(name, np.column_stack([y, a, w, *more]).astype(float))
            self.write(name, self.everyone(name))
            Home.create(folder / name / "silo.toml")

    def home(self, name: str) -> Home:
        return Home.of(self.folder / name / "silo.toml")

    def rows(self, name: str) -> np.ndarray:
        return np.loadtxt(self.folder / name / "table.csv", delimiter=",", skiprows=1)

    def write(self, name: str, rows: np.ndarray) -> None:
        """Write the table; a person's identifier is the place of the record among all that were kept."""
        path, columns = self.folder / name / "table.csv", list(self.columns)
        if self.person:
            first = [tuple(row[:3]) for row in self._everyone[name].tolist()]
            identifiers = [first.index(tuple(row[:3])) for row in rows.tolist()]
            rows, columns = np.column_stack([rows, identifiers]), [*columns, "id"]
        np.savetxt(path, rows, delimiter=",", header=",".join(columns), comments="", fmt="%.17g")

    def everyone(self, name: str) -> np.ndarray:
        return self._everyone[name].copy()

    def keep(self, name: str, rows: np.ndarray) -> None:
        self._everyone[name] = rows.copy()

    def add(self, name: str, *people: tuple[float, float, float]) -> None:
        self.write(name, np.vstack([self.rows(name), people]))

    def study(self, names: Sequence[str], *, seed: int, masked: bool = False, more: str = "") -> StudyFile:
        """The study of these hospitals; ``more`` goes to its end."""
        text = STUDY.replace("SEED", str(seed)) + more
        if masked:
            keys = (f'{name} = "{self.home(name).key.public_keys.hex()}"' for name in names)
            text += f"\n[plan]\nkeys = {{{', '.join(keys)}}}\n"
        text += "\n[silos]\n" + "\n".join(f'{name} = "{name}/silo.toml"' for name in names)
        path = self.folder / f"study-{seed}.toml"
        path.write_text(text)
        return read_study(path)

    def run(self, study: StudyFile, *, remembers: bool = True, approved: bool = False) -> AnsweredStudy:
        """Run the study as it is deployed; ``approved``: whether the owners have decided already."""
        plan = file_plan(study)
        with ExitStack() as stack:
            silos = []
            for name in study.silos:
                home = Home.of(study.silos[name])
                if not approved:
                    home.approvals.decide(plan.digest, approved=True)
                keeper = home.keeper(plan)
                stack.callback(keeper.close)
                keeper = replace(keeper, key=home.key if plan.is_masked else None)
                silos.append(
                    open_party(plan, name, home.file, keeper=keeper, home=home if remembers else None)
                )
            return AnsweredStudy(study, Session(plan, InProcess(silos)).run())


def newcomer(first: AnsweredStudy, second: AnsweredStudy, silo: str) -> tuple[float, float, float]:
    """The whole record of the person who came between two studies.

    The first round of the models asks for gradients and Hessians at zero, where every prediction is 1/2.
    """
    treatment, outcome = (
        after - before for before, after in zip(first.sums(silo), second.sums(silo), strict=True)
    )
    # Columns are scaled by public powers of two: the constant by 1/2, w by 1/128.
    y, a = 0.5 - outcome[0] / 0.5, 0.5 - treatment[0] / 0.5
    return y, a, 64.0 * treatment[3] / treatment[2]


@dataclass(frozen=True)
class AnsweredStudy:
    """A study that was run, as the server has it."""

    file: StudyFile
    finished: Finished

    def sums(self, silo: str) -> list[np.ndarray]:
        """The sums that a silo sent in the first round of the models, of each model."""
        asked = overhear(file_plan(self.file), self.finished.transcript, silo)[1]
        return [part.values() for part in asked.query.split(asked.answer) if isinstance(part, Sums)]

    def totals(self) -> np.ndarray:
        """The totals over all silos in the first round, as everybody hears them."""
        heard = next(heard_rounds(file_plan(self.file), self.finished.transcript, self.finished.sizes))
        return heard.pooled.values()

"""A look at the cohort before a study runs: Table 1 by arm, missing values, cohort flow, overlap.

The server's view is made of thresholded tables only: every silo hides first whatever is below the
strictest of the silos' floors, which their own files state, and names no level of a factor that too
few of its people have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from fedtmle.data import Schema, load_all
from fedtmle.errors import FedTMLEError
from fedtmle.initial.syntax import quoted_level
from fedtmle.model.table import Table
from fedtmle.programs.flow import PreflightProgram, propensity_histograms
from fedtmle.programs.study import Study
from fedtmle.protocol.guard import Policy
from fedtmle.protocol.plan import Plan, roster
from fedtmle.results.document import histogram_document
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.session import run_embedded
from fedtmle.runtime.silo import Silo
from fedtmle.studies.home import policy_of, session_policy
from fedtmle.studies.table1 import (
    STEPS,
    Characteristics,
    Lost,
    SiloTable,
    characteristics,
    complete,
    describe_silo,
    thresholded,
)
from fedtmle.studyfile.file import StudyFile
from fedtmle.studyfile.schema import in_memory, schema_of


@dataclass(frozen=True, kw_only=True)
class Line:
    """One characteristic: a mean and its standard deviation, or a share (``sd`` None), per arm.

    It is made of the ``silos`` that show it in all arms, so that the arms are comparable; empty
    tuples if there are none. ``difference`` is the largest standardised one to the reference arm.
    """

    name: str
    level: str | None
    mean: tuple[float, ...]
    sd: tuple[float, ...] | None
    difference: float | None
    silos: int
    constant: bool = False  # every silo has one value of it, which stays there: it is everyone's


@dataclass(frozen=True, kw_only=True)
class Count:
    """A count over the silos that show it; None if none does."""

    name: str
    count: int | None
    of: int  # the records of those silos
    silos: int


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The view of several silos together, or of one."""

    silos: tuple[str, ...]
    n_rows: int
    arms: tuple[str, ...]
    arm_counts: tuple[Count, ...]
    lost: tuple[Count, ...]  # records that fall out, step by step
    missing: tuple[Count, ...]
    lines: tuple[Line, ...]
    floor: int | None  # None where nothing is hidden
    unnamed: tuple[str, ...] = ()  # factors with a level that no silo may name
    overlap: FittedOverlap | None = None  # None where there is one arm

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def preflight(file: StudyFile, *, silo: str | None = None) -> Preflight:
    """All silos from tables thresholded by the strictest of their floors; or one ``silo`` in full."""
    sources = file.silos if silo is None else {silo: file.silos[silo]}
    tables = in_memory(load_all(sources, _lenient(schema_of(file.study))), "preflight")
    if silo is not None:
        what = characteristics(file.study, list(tables.values()))
        full = {name: describe_silo(what, table) for name, table in tables.items()}
        overlap = fitted_overlap(file.study, what, tables, dict.fromkeys(tables, Policy.unguarded()))
        return pool(what, full, floor=None, overlap=overlap)
    policies = {name: policy_of(source) or session_policy() for name, source in sources.items()}
    floor = max(policy.min_cell for policy in policies.values())
    strict = {name: replace(policy, min_cell=floor) for name, policy in policies.items()}
    least = [max(policies[name].min_level_rows, floor) for name in tables]
    what = characteristics(file.study, list(tables.values()), least)
    overlap = _without_names(fitted_overlap(file.study, what, tables, strict), what)
    hidden = {name: thresholded(describe_silo(what, table), floor) for name, table in tables.items()}
    return pool(what, hidden, floor=floor, overlap=overlap)


def _without_names(overlap: FittedOverlap | None, what: Characteristics) -> FittedOverlap | None:
    """Why a model could not be fitted, which may be by a column of a level that is not named."""
    if overlap is None or overlap.problem is None:
        return overlap
    problem = overlap.problem
    for level in (level for levels in what.unnamed.values() for level in levels):
        for label in (level, quoted_level(level)):  # as columns of a design are called
            problem = problem.replace(f"[{label}]", "[not named]")
    return replace(overlap, problem=problem)


def _lenient(schema: Schema) -> Schema:
    """The study's columns with missing values let through: to count them is the point."""
    return Schema(tuple(replace(column, may_be_missing=True) for column in schema.columns))


def pool(
    what: Characteristics,
    silos: Mapping[str, SiloTable],
    *,
    floor: int | None,
    overlap: FittedOverlap | None = None,
) -> Preflight:
    """Sums over the silos of whatever each of them shows."""
    tables = list(silos.values())
    names = (*what.factors, *what.numeric, *([what.treatment] if what.treatment else []), what.outcome)
    return Preflight(
        silos=tuple(silos),
        n_rows=sum(table.n_rows for table in tables),
        arms=what.arms,
        arm_counts=tuple(
            _count(arm, [table.arms[a] for table in tables], tables) for a, arm in enumerate(what.arms)
        ),
        lost=tuple(
            _count(step, [_told(table.lost[k]) for table in tables], tables) for k, step in enumerate(STEPS)
        ),
        missing=tuple(
            _count(name, [_told(table.missing[name]) for table in tables], tables) for name in names
        ),
        lines=(
            *(_mean(name, tables) for name in what.numeric),
            *(
                _share(name, level, tables)
                for name, levels in what.factors.items()
                for level in levels or (None,)
            ),
        ),
        floor=floor,
        unnamed=tuple(what.unnamed),
        overlap=overlap,
    )


def _count(name: str, counts: Sequence[int | None], tables: Sequence[SiloTable]) -> Count:
    shown = [(count, t.n_rows) for count, t in zip(counts, tables, strict=True) if count is not None]
    return Count(
        name=name,
        count=sum(count for count, _ in shown) if shown else None,
        of=sum(rows for _, rows in shown),
        silos=len(shown),
    )


def _told(lost: Lost | None) -> int | None:
    return None if lost is None else lost.count


def _mean(name: str, tables: Sequence[SiloTable]) -> Line:
    silos = [table.numeric[name] for table in tables]
    shown = [[m for m in by_arm if m is not None] for by_arm in silos if None not in by_arm]
    means, deviations = [], []
    for arm in zip(*shown, strict=True):
        count, total = sum(m.count for m in arm), sum(m.total for m in arm)
        mean = total / count if count else math.nan
        spread = sum(m.squares for m in arm) - count * mean**2
        means.append(mean)
        deviations.append(math.sqrt(max(spread, 0.0) / (count - 1)) if count > 1 else math.nan)
    zero_one = bool(shown) and all(m.zero_one for by_arm in shown for m in by_arm)
    variances = [m * (1 - m) for m in means] if zero_one else [sd**2 for sd in deviations]
    return Line(
        name=name,
        level="1" if zero_one else None,
        mean=tuple(means),
        sd=None if zero_one else tuple(deviations),
        difference=_difference(means, variances),
        silos=len(shown),
        constant=all(name in table.constant for table in tables),
    )


def _share(name: str, level: str | None, tables: Sequence[SiloTable]) -> Line:
    """A level's share of each arm; nothing is shown of a factor without a level that may be named."""
    silos = [] if level is None else [(table.levels[name, level], table.arms) for table in tables]
    shown = [(cells, arms) for cells, arms in silos if None not in cells]
    shares = []
    for a in range(len(tables[0].arms) if shown else 0):
        count, total = (sum(pair[k][a] or 0 for pair in shown) for k in (0, 1))
        shares.append(count / total if total else math.nan)
    return Line(
        name=name,
        level=level,
        mean=tuple(shares),
        sd=None,
        difference=_difference(shares, [share * (1 - share) for share in shares]),
        silos=len(shown),
    )


def _difference(means: Sequence[float], variances: Sequence[float]) -> float | None:
    """The largest standardised difference to the reference arm, (m_a - m_0) / sqrt((v_a + v_0) / 2)."""
    found = []
    for mean, variance in zip(means[1:], variances[1:], strict=True):
        scale = math.sqrt((variance + variances[0]) / 2)
        gap = mean - means[0]
        if gap == 0 or scale > 0:
            found.append(gap / scale if gap else 0.0)
    return max(found, key=abs, default=None)


# Overlap before a study runs: its treatment model, fitted across silos, and what it predicts in each arm.


@dataclass(frozen=True, kw_only=True)
class FittedOverlap:
    """Histograms of P(arm | W) by arm (`diagnosed.histogram_document`), or why there are none."""

    histograms: tuple[dict[str, Any], ...] = ()
    problem: str | None = None
    n_rows: int = 0  # with treatment and covariates: those of the model


def fitted_overlap(
    study: Study, what: Characteristics, tables: Mapping[str, Table], policies: Mapping[str, Policy]
) -> FittedOverlap | None:
    """By the rounds of the study itself; a model that cannot be fitted is told, not raised."""
    if study.target.treatment is None:
        return None
    kept = {}
    for name, table in tables.items():
        rows = np.flatnonzero(complete(what, table))
        if len(rows):
            kept[name] = table if len(rows) == table.n_rows else table.take(rows)
    if not kept:
        return FittedOverlap(problem="no record has both its treatment and its covariates")
    plan = Plan(program=PreflightProgram(study=study), roster=roster(list(kept)))
    silos = [Silo(name, plan, table, keeper=Keeper(policy=policies[name])) for name, table in kept.items()]
    try:
        finished = run_embedded(plan, silos)
    except FedTMLEError as error:
        return FittedOverlap(problem=str(error))
    return FittedOverlap(
        histograms=tuple(
            histogram_document(each, len(kept)) for each in propensity_histograms(finished.outcome)
        ),
        n_rows=sum(finished.sizes.values()),
    )

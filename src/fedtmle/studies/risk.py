"""The disclosure audit of a silo, for its owner: before a study (planned queries) or after (a transcript)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedtmle.data import SiloFile, load
from fedtmle.data.silofile import read_silo_file
from fedtmle.errors import DecodeError, FedTMLEError, InputError, NumericalError, RefusedError
from fedtmle.layout import Document
from fedtmle.model.table import Factor, Table
from fedtmle.privacy.audit import AttackedColumn, Attacker, Audit, ColumnRisk, Continuous, Discrete, audit
from fedtmle.programs.study import Study
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.policy import UNGUARDED
from fedtmle.protocol.query import AnsweredQuery, ClosingTerms, Phase
from fedtmle.protocol.sums import SumsQuery
from fedtmle.runtime.certificate import Replayed, rehearse, replay
from fedtmle.runtime.ledger import Transcript
from fedtmle.studies.home import Home, policy_of, session_policy, silo_file
from fedtmle.studies.memory import source_names
from fedtmle.studyfile.file import StudyFile, file_plan, study_of
from fedtmle.studyfile.schema import in_memory, schema_of
from fedtmle.targets.effects.problem import LINK_REACH, EffectProblem
from fedtmle.targets.regimes.estimands import AbstractRegimeEffect
from fedtmle.targets.residuals import ResidualProblem
from fedtmle.targets.time.estimands import AbstractTimeEffect
from fedtmle.targets.time.followup import FollowUp
from fedtmle_core.signing import MaskKey
from fedtmle_core.types import Array, Part

EDGES = (0.0, 1e-6, 1e-3, 0.01, 0.1, 0.5, 0.99, 1.0)  # remaining shares of the prior uncertainty
KNOWN = 0.01  # a value counts as known if less than this share remains
MOST_AUDITED = 20_000  # records, beyond which an audit takes minutes
MOST_BITS = 20.0  # bits of a number that is known to a millionth of its range


@dataclass(frozen=True, kw_only=True)
class SiloRisk:
    """The audit of one silo.

    A ``planned`` audit, before the study, is of rehearsed queries and ``probes``. ``ranges`` says where the
    prior of each column comes from. The audit is of the silo's own answers, also if the study ``is_masked``.
    """

    silo: str
    question: str
    is_masked: bool
    planned: bool
    probes: int
    audit: Audit
    ranges: dict[str, str]

    def to_dict(self) -> Document:
        """Return summaries as plain data, with no record's value and no estimate of one."""
        audit = self.audit
        return {
            "silo": self.silo,
            "question": self.question,
            "masked": self.is_masked,
            "queries": "planned" if self.planned else "answered",
            "probes": self.probes,
            "n_rows": audit.n_rows,
            "answers": audit.answers,
            "numbers": audit.numbers,
            "kinds": audit.labels,
            "not_covered": audit.uncovered,
            "noise": audit.noise,
            "priors": self.ranges,
            "findings": [summarise(finding) for finding in audit.findings],
        }


def summarise(finding: ColumnRisk) -> Document:
    """Return the worst and the median record, the number of known records, and a histogram."""
    remaining = finding.after / finding.prior if finding.prior > 0 else np.zeros_like(finding.after)
    summary: Document = {
        "column": finding.column,
        "attacker": finding.attacker.value,
        "discrete": finding.discrete,
        "prior": finding.prior,
        "records": len(finding.after),
        "worst": float(finding.after.min(initial=np.inf)),
        "median": float(np.median(finding.after)) if len(finding.after) else None,
        "known": int(np.count_nonzero(remaining < KNOWN)),
        "histogram": {"edges": list(EDGES), "counts": histogram(remaining)},
        "mean": None,
        "noisy": None,
    }
    if finding.mean_after is not None:
        summary["mean"] = {
            "prior": finding.mean_prior,
            "after": finding.mean_after,
            "noisy": finding.mean_noisy,
        }
    if finding.noisy is not None:
        low, high = finding.noisy
        summary["noisy"] = {
            "worst": float(low.min(initial=np.inf)),
            "median": float(np.median(low)),
            "achieved_worst": float(high.min(initial=np.inf)),
            "achieved_median": float(np.median(high)),
        }
    return summary


def histogram(remaining: Array) -> list[int]:
    """Count records by remaining share; the last bin has those about which nothing was learned."""
    at = np.searchsorted(EDGES[1:], np.minimum(remaining, 1.0), side="right")
    return [int(count) for count in np.bincount(np.minimum(at, len(EDGES) - 1), minlength=len(EDGES))]


def find_silo(file: StudyFile, given: str | Path) -> tuple[str, Path]:
    """Return the name and source of the silo that ``given`` names or whose file it is."""
    if str(given) in file.silos:
        return str(given), file.silos[str(given)]
    path = Path(given)
    for name, where in file.silos.items():
        if where.resolve() == path.resolve():
            return name, where
    if path.suffix.lower() == ".toml":
        name = read_silo_file(path).name
        if name in file.silos:
            return name, path
    raise InputError(f"{given}: none of the study's silos {', '.join(file.silos)} has this name or file")


def risk(
    file: StudyFile,
    silo: str | Path,
    *,
    transcript: str | Path | None = None,
    attributes: Sequence[str] = (),
    attackers: Sequence[Attacker] = tuple(Attacker),
    noise: float = 0.0,
    radius: float | None = None,
) -> SiloRisk:
    """Audit one silo on its own machine; its table is read, and nothing is sent.

    ``silo`` is its name in the study or its silo file. With a ``transcript`` the answered queries are
    audited, else those of a rehearsal. ``attributes`` are the attacked columns, by default outcome and
    treatment. ``noise`` is the declared norm of all errors in the answers, and ``radius`` half the range in
    which an attacker knows each value beforehand.
    """
    name, source = find_silo(file, silo)
    plan = file_plan(file)
    return _risk(plan, name, source, transcript, attributes, attackers, noise=noise, radius=radius)


@dataclass(frozen=True, kw_only=True)
class PlannedRisk:
    """What the audit of a study finds before the study.

    ``findings`` has one for each column and attacker, and ``bits`` those of each of the hospital's columns
    that an attacker gets who knows every other record. Without an audit ``unaudited`` says why.
    """

    findings: tuple[Document, ...]
    bits: Mapping[str, float] | None
    unaudited: str


def planned_risk(plan: Plan, file: SiloFile, n_rows: int) -> PlannedRisk:
    """Audit a plan at the silo of ``file``, which has ``n_rows`` records, before the study."""
    if file.stream or n_rows > MOST_AUDITED:
        why = f"the table is streamed, or has more than {MOST_AUDITED:,} records"
        return PlannedRisk(findings=(), bits=None, unaudited=why)
    try:
        findings = _risk(plan, file.name, file).to_dict()["findings"]
    except FedTMLEError as error:
        return PlannedRisk(findings=(), bits=None, unaudited=str(error))
    sources = {name: theirs[0] for name, theirs in source_names(plan, file).items()}
    bits = {
        sources.get(each["column"], each["column"]): bits_of(each)
        for each in findings
        if each["attacker"] == Attacker.OTHERS.value
    }
    return PlannedRisk(findings=tuple(findings), bits=bits, unaudited="")


def bits_of(finding: Document) -> float:
    """Return by how many bits the answers narrow the range in which the most exposed record can be.

    That is log2 of the range before over the range after. A level that can be worked out counts 1.
    """
    before, after = finding["prior"], finding["worst"]
    if finding["discrete"]:
        return 1.0 if after == 0.0 else 0.0
    if not before > 0:
        return 0.0
    return MOST_BITS if after <= before * 2.0**-MOST_BITS else max(0.0, math.log2(before / after))


def _risk(
    plan: Plan,
    name: str,
    source: Path | SiloFile,
    transcript: str | Path | None = None,
    attributes: Sequence[str] = (),
    attackers: Sequence[Attacker] = tuple(Attacker),
    *,
    noise: float = 0.0,
    radius: float | None = None,
) -> SiloRisk:
    study = study_of(plan)
    if study.algorithm.pools_rows:
        raise InputError("algorithm: 'Central' pools the rows themselves, so that there is nothing to audit")
    if study.privacy is not None:
        raise InputError(
            "privacy: the audit is of sums without noise. The guarantee holds for every attacker: "
            f"({study.privacy.epsilon:g}, {study.privacy.delta:g})-differential privacy (docs/privacy.md)"
        )
    table = in_memory({name: load(source, schema_of(study), silo=name)}, "the audit")[name]
    table = plan.program.at(name, table)
    columns = [attacked(study, table, column, radius) for column in attributes or _default(study)]
    replayed = _answered(plan, source, table, name, transcript)
    extra = probes(replayed) if transcript is None else ()
    result = audit(
        [*replayed.answered, *extra],
        replayed.local,
        table,
        [c for c, _ in columns],
        attackers=attackers,
        noise=noise,
    )
    return SiloRisk(
        silo=name,
        question=study.target.question,
        is_masked=plan.is_masked,
        planned=transcript is None,
        probes=len(extra),
        audit=result,
        ranges={column.name: words for column, words in columns},
    )


def _answered(
    plan: Plan, source: Path | SiloFile, table: Table, name: str, transcript: str | Path | None
) -> Replayed:
    policy = policy_of(source) or session_policy()
    if transcript is not None:
        try:
            recorded = Transcript.load(transcript)
        except DecodeError:
            raise InputError(f"{transcript}: this is not a transcript of the study's messages") from None
        return replay(plan, table, recorded, name, policy=policy, mask_key=_mask_key(source))
    try:  # the rehearsal has one silo, so that only the smallest cell of the policy is kept
        rehearsal = replace(UNGUARDED, min_cell=policy.min_cell)
        return rehearse(plan, table, name, policy=rehearsal)
    except (InputError, NumericalError, RefusedError) as error:
        raise InputError(
            f"silo '{name}': the study cannot be rehearsed on this silo alone ({error}); audit it after "
            "the run, with --transcript"
        ) from None


def _mask_key(source: Path | SiloFile) -> MaskKey | None:
    """Return the silo's key for masks if it has a home, None otherwise."""
    file = silo_file(source)
    home = None if file is None else Home(file)
    return home.key.mask_key if home is not None and home.has_key else None


def probes(replayed: Replayed) -> tuple[AnsweredQuery, ...]:
    """Return gradients at the edge of the accepted region, to which a dishonest server may steer eps."""
    closing = [asked for asked in replayed.answered if asked.query.phase is Phase.CLOSING]
    means = closing[-1].query.row_means(closing[-1].answer, replayed.local) if closing else None
    terms = () if means is None else means.terms
    if not terms or not isinstance(terms[0], ClosingTerms):
        return ()
    problem, law = terms[0].problem, terms[0].law
    if not isinstance(problem, EffectProblem | ResidualProblem):
        return ()
    widths = problem.widths
    probes = []
    for reach in (1.0, LINK_REACH):
        for sign in (1.0, -1.0):
            for k in range(problem.dim):
                eps = np.zeros(problem.dim)
                eps[k] = sign * reach / widths[k]
                query = SumsQuery(problem=problem, law=law, eps=eps, parts=Part.GRADIENT, n=replayed.n)
                probes.append(AnsweredQuery(query=query, answer=None))
    return tuple(probes)


def _default(study: Study) -> list[str]:
    target = study.target
    time = [target.time] if isinstance(target, AbstractTimeEffect) else []
    if isinstance(target, AbstractRegimeEffect):
        columns = target.over_time
        return [*columns.get(target.outcome, (target.outcome,)), *columns[str(target.treatment)]]
    return [target.outcome, *time, *([target.treatment] if target.treatment else [])]


def attacked(
    study: Study, table: Table, name: str, radius: float | None
) -> tuple[AttackedColumn[Table], str]:
    """Return a column as the audit attacks it, and where its prior range comes from."""
    target = study.target
    if name == target.treatment:
        return _arms(study, table), f"one of {len(target.arms)} arms"
    if isinstance(target, AbstractTimeEffect) and name in (target.outcome, target.time, target.entry):
        return _follow_up(target, table, name)
    if name == target.outcome and not _is_binary(table.numeric[name]):
        low, high = study.outcome_bounds
        half = radius if radius is not None else (high - low) / 2
        return _continuous(table, name, half), "the declared bounds" if radius is None else "as given"
    if name in table.numeric:
        if _is_binary(table.numeric[name]):
            return _binary(table, name), "0 or 1"
        if name == study.weights:
            raise InputError(f"attribute: '{name}' is the weight of the observations; audit another column")
        half = (
            radius
            if radius is not None
            else float(np.nanmax(table.numeric[name]) - np.nanmin(table.numeric[name])) / 2
        )
        return _continuous(table, name, half), "this silo's own range" if radius is None else "as given"
    if name in table.factors:
        return _factor(table, name), f"one of {len(table.factors[name].levels)} levels"
    known = ", ".join(dict.fromkeys([*table.numeric, *table.factors]))
    raise InputError(f"attribute: the study reads no column '{name}'; it reads {known}")


def _is_binary(column: Array) -> bool:
    return bool(np.isin(column[~np.isnan(column)], (0.0, 1.0)).all())


def _continuous(table: Table, name: str, radius: float) -> Continuous[Table]:
    return Continuous(
        name=name,
        radius=radius,
        values=table.numeric[name],
        move=lambda rows, by: rows.with_numeric(name, rows.numeric[name] + by),
    )


def _binary(table: Table, name: str) -> Discrete[Table]:
    column = table.numeric[name]
    missing = np.isnan(column)

    def assign(rows: Table, k: int) -> Table:
        moved = rows.with_numeric(name, np.where(missing, np.nan, float(k)))
        factor = rows.factors.get(name)
        return moved if factor is None else moved.with_factor(name, _constant(factor, str(k), rows.n_rows))

    truth = np.where(missing, -1, np.nan_to_num(column)).astype(np.int64)
    return Discrete(name=name, levels=(0.0, 1.0), truth=truth, assign=assign)


def _arms(study: Study, table: Table) -> Discrete[Table]:
    target = study.target
    name = str(target.treatment)

    def assign(rows: Table, k: int) -> Table:
        moved = rows.with_factor(name, Factor(np.full(rows.n_rows, k, dtype=np.int64), target.arms))
        if name in rows.numeric:
            moved = moved.with_numeric(name, np.full(rows.n_rows, float(target.arms[k])))
        return moved

    levels = tuple(float(k) for k in range(len(target.arms)))
    return Discrete(name=name, levels=levels, truth=table.factors[name].recode(target.arms), assign=assign)


def _follow_up(target: AbstractTimeEffect, table: Table, name: str) -> tuple[Discrete[Table], str]:
    """Return the event, or its period, as the audit attacks it."""
    if name == target.entry:
        raise InputError(f"attribute: '{name}' is the time of entry; audit '{target.time}' instead")
    if name == target.time:
        periods = _periods((target.finer or target).follow_up, table)
        return periods, f"one of {len(periods.levels)} periods"
    codes = (target.censored, *target.causes)
    return _factor(table, name, codes), f"one of {len(codes)} codes"


def _periods(follow_up: FollowUp, table: Table) -> Discrete[Table]:
    """Return the time of an event as the audit attacks it: in which period of the grid it is."""
    truth = follow_up.read(table).last - 1

    def assign(rows: Table, k: int) -> Table:
        begun = 0.0 if follow_up.entry is None else rows.numeric[follow_up.entry]
        exact = rows.numeric[follow_up.time]  # within its period, or beyond the grid, the time stays as it is
        return rows.with_numeric(follow_up.time, np.where(truth == k, exact, begun + follow_up.edges[k]))

    levels = tuple(float(k + 1) for k in range(follow_up.periods))
    return Discrete(name=follow_up.time, levels=levels, truth=truth, assign=assign)


def _factor(table: Table, name: str, codes: tuple[str, ...] = ()) -> Discrete[Table]:
    factor = table.factors[name]
    if codes:
        factor = Factor(factor.recode(codes), codes)
    if len(factor.levels) < 2:
        raise InputError(
            f"attribute: column '{name}' has one level here, so that there is nothing to learn about it"
        )

    def assign(rows: Table, k: int) -> Table:
        return rows.with_factor(name, Factor(np.full(rows.n_rows, k, dtype=np.int64), factor.levels))

    levels = tuple(float(k) for k in range(len(factor.levels)))
    return Discrete(name=name, levels=levels, truth=factor.codes, assign=assign)


def _constant(factor: Factor, level: str, n_rows: int) -> Factor:
    levels = factor.levels if level in factor.levels else (*factor.levels, level)
    return Factor(np.full(n_rows, levels.index(level), dtype=np.int64), levels)

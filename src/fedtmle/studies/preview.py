"""The preview: what a silo would send, rehearsed on its own rows before its owner approves a plan.

The study is run on this silo's rows alone, as if it were the only one, under its own policy. With other silos
the numbers and the number of rounds differ; the kinds of message are the same. Nothing is recorded or sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace

import numpy as np

from fedtmle.data import SiloFile, load
from fedtmle.defects import Defect
from fedtmle.errors import FedTMLEError, InputError, RefusedError
from fedtmle.initial.design import column_names
from fedtmle.initial.glm import GLM
from fedtmle.initial.superlearner import SuperLearner, formulas
from fedtmle.model.budget import OWNER_DELTA
from fedtmle.model.table import SILO, Table
from fedtmle.programs.flow import StudyProgram
from fedtmle.programs.missing import missing_mask
from fedtmle.programs.study import Study
from fedtmle.protocol.guard import Guard, RefusalError, disclosed_numbers, too_few_silos
from fedtmle.protocol.looks import LookGroups
from fedtmle.protocol.messages import Answered, Reason
from fedtmle.protocol.plan import Plan, brought
from fedtmle.protocol.policy import TARGETS, Policy, lowered_limit
from fedtmle.protocol.query import Query
from fedtmle.runtime.records import Keeper, utc_now
from fedtmle.runtime.session import InProcess, Session
from fedtmle.runtime.silo import Silo, check_standing
from fedtmle.studies.home import Home, disclosure_limit, examine_target, open_party
from fedtmle.studies.memory import Conflict
from fedtmle.studies.risk import MOST_BITS, PlannedRisk, planned_risk
from fedtmle.studyfile.schema import first_period, schema_of
from fedtmle_core.types import Array, IntArray

# Find what would stop a study or make a silo refuse it, on the silos' own tables, before anything leaves.
#
# Each obstacle names the silo, the column, the level and a remedy, for the owner of the table. Levels are the
# dictionary's, which are public; no record's value is named.

NO_GROUPS = LookGroups()
MERGE = "merge it with another level (levels in the silo file), or leave the variable out of the models"
ARM = (
    "the study compares its arms, so that none can be merged or left out: the owner may lower the limit, "
    f"below {Policy().min_arm_rows} with a reason, or the silo stays out of the study"
)
STRATUM = (
    "group the strata in the study: the owner may also lower the limit, below "
    f"{Policy().min_arm_rows} with a reason, or the silo stays out of the study"
)
FEW_MISSING = (
    "complete them where the values are known: the owner may also lower the limit, to "
    f"{Policy().min_missing} without a reason, or the silo stays out of the study"
)


def obstacles(
    study: Study,
    tables: Mapping[str, Table],
    policies: Mapping[str, Policy],
    *,
    groups: LookGroups = NO_GROUPS,
) -> list[Defect]:
    """Return what stands in the way of a study over these tables, all of it at once.

    ``policies`` has the limits of each silo; those of `UNGUARDED` refuse nothing. ``groups`` are those
    in which masked silos judge the columns of models together, so that `min_support` does not apply.
    """
    policies = {
        name: replace(policy, min_support=0) if policy.judges_together(groups) else policy
        for name, policy in policies.items()
    }
    found: list[Defect] = []
    tables = first_period(study, tables)
    for name, table in tables.items():
        found += _refusals(study, name, table, policies[name], len(tables))
    found += _pooled(study, tables)
    return found


def _refusals(study: Study, silo: str, table: Table, policy: Policy, silos: int) -> Iterator[Defect]:
    """Yield what the silo's own policy would refuse."""
    if silos < policy.min_silos:
        message = f"its policy asks for {policy.min_silos} silos (min_silos), and the study has {silos}"
        yield Defect(message=message, fix="invite more silos", silo=silo)
    for each in brought(study):
        if not policy.allows(each):
            message = f"its policy does not allow {each} ({TARGETS})"
            yield Defect(message=message, fix=f'write {TARGETS} = ["{each.source}"] in [policy]', silo=silo)
    if table.n_rows < policy.min_rows:
        message = f"has {table.n_rows} records, and its policy asks for {policy.min_rows} (min_rows)"
        yield Defect(message=message, fix="leave the silo out of the study", silo=silo)
    yield from _small_arms(study, silo, table, policy)
    for column in sorted(_fitted_factors(study)):
        for level, count in _level_counts(study, table, column).items():
            if 0 < count < policy.min_support:
                yield _few(silo, column, f"level '{level}'", count, "min_support", policy, MERGE)
    for column in sorted(_fitted_numbers(study) & set(table.numeric)):
        count = int(np.count_nonzero(np.nan_to_num(table.numeric[column])))
        if 0 < count < policy.min_support:
            message = (
                f"is not zero in {count} records, and the policy asks for {policy.min_support} (min_support)"
            )
            yield Defect(message=message, fix="leave it out of the models", silo=silo, column=column)
    for column, where, count in _missing(study, table):
        if 0 < count < policy.min_missing:
            message = (
                f"is missing in {count} of the records{where}, and the policy asks for none or "
                f"{policy.min_missing} (min_missing)"
            )
            yield Defect(message=message, fix=FEW_MISSING, silo=silo, column=column)
    yield from _too_little_noise(study, silo, policy)


def _small_arms(study: Study, silo: str, table: Table, policy: Policy) -> Iterator[Defect]:
    """Yield a defect for each arm and each stratum that has too few records."""
    target = study.target
    treatment = None if target.is_modified else target.treatment
    for column in (name for name in (treatment, target.strata) if name is not None):
        for level, count in _level_counts(study, table, column).items():
            if 0 < count < policy.min_arm_rows:
                what, fix = (f"arm '{level}'", ARM) if column == treatment else (f"level '{level}'", STRATUM)
                yield _few(silo, column, what, count, "min_arm_rows", policy, fix)


def _few(silo: str, column: str, what: str, count: int, key: str, policy: Policy, fix: str) -> Defect:
    message = f"{what} has {count} records, and the policy asks for {getattr(policy, key)} ({key})"
    return Defect(message=message, fix=fix, silo=silo, column=column)


def _missing(study: Study, table: Table) -> Iterator[tuple[str, str, int]]:
    """Yield each column whose missing values the study counts: its name, the arm and their number."""
    target = study.target
    there = {*table.numeric, *table.factors}
    named = [name for name in study.may_be_missing if name in there]
    for name in [*named, *([str(target.treatment)] if study.omits else [])]:
        yield name, "", int(np.count_nonzero(missing_mask(table, name)))
    if study.missingness_model is None or target.outcome not in table.numeric:
        return
    is_missing = missing_mask(table, target.outcome)
    if target.treatment is None or target.is_modified:
        yield target.outcome, "", int(np.count_nonzero(is_missing))
        return
    arm = table.factors[target.treatment].recode(target.arms)
    for code, level in enumerate(target.arms):
        yield target.outcome, f" of arm '{level}'", int(np.count_nonzero(is_missing & (arm == code)))


def _too_little_noise(study: Study, silo: str, policy: Policy) -> Iterator[Defect]:
    """Yield a defect for each limit on epsilon by which the study has too little noise, or none."""
    privacy = study.privacy
    for key in ("max_epsilon", "max_epsilon_total"):
        limit = getattr(policy, key)
        if limit >= getattr(Policy(), key) or (privacy is not None and privacy.owners_epsilon <= limit):
            continue
        if privacy is None:
            message = f"the study adds no noise, and its policy asks for noise ({key} = {limit:g})"
        else:
            message = (
                f"the study adds less noise than its policy asks for: epsilon {privacy.owners_epsilon:.3g} "
                f"at delta {OWNER_DELTA:g}, and {key} = {limit:g}"
            )
        fix = f"ask the statistician for a [privacy] section with epsilon of at most {limit:g}"
        yield Defect(message=message, fix=fix, silo=silo)


def _pooled(study: Study, tables: Mapping[str, Table]) -> Iterator[Defect]:
    """Yield what stops the fits whatever the policies are: too few records, constant columns, separation."""
    n = sum(table.n_rows for table in tables.values())
    for role, model in _glms(study):
        levels = {**study.levels, SILO: tuple(tables)}
        count = len(column_names(model.parsed, levels))
        if count >= n:
            message = f"the {role} model has {count} columns, and the study {n} records"
            yield Defect(message=message, fix="give it fewer terms, or invite more silos")
    constant = [name for name in sorted(_fitted_numbers(study)) if _is_constant(name, tables)]
    for name in constant:
        message = "has the same value in every record of every silo: no model can use it"
        yield Defect(message=message, fix="leave it out of the models", column=name)
    for name in sorted(_fitted_factors(study)):
        present = [level for level, count in _pooled_counts(study, tables, name).items() if count]
        if len(present) == 1:
            message = f"only level '{present[0]}' occurs at the silos: no model can use it"
            yield Defect(message=message, fix="leave it out of the models", column=name)
    yield from _separated(study, tables)


def _separated(study: Study, tables: Mapping[str, Table]) -> Iterator[Defect]:
    """Yield the levels of the treatment model's factors in which only some of the arms occur."""
    treatment = None if study.target.is_modified else study.target.treatment
    model = study.models.get("treatment")
    if treatment is None or not isinstance(model, GLM) or model.ridge:
        return
    for name in sorted({*model.parsed.factor_names} - {SILO}):
        levels = study.levels[name]
        counts = np.zeros((len(levels), len(study.target.arms)), dtype=np.int64)
        for table in tables.values():
            arm, code = _codes(study, table, treatment), _codes(study, table, name)
            known = (arm >= 0) & (code >= 0)
            np.add.at(counts, (code[known], arm[known]), 1)
        for level, row in zip(levels, counts, strict=True):
            absent = [arm for arm, count in zip(study.target.arms, row, strict=True) if not count]
            if row.sum() and absent:
                message = (
                    f"nobody with level '{level}' is in arm {', '.join(map(repr, absent))}: the treatment "
                    "model is separated and has no finite coefficients"
                )
                fix = "merge the level with another, leave the variable out, or give the model a small ridge"
                yield Defect(message=message, fix=fix, column=name)


def _glms(study: Study) -> Iterator[tuple[str, GLM]]:
    for role, model in study.models.items():
        members = model.learners if isinstance(model, SuperLearner) else (model,)
        yield from ((role, each) for each in members if isinstance(each, GLM))


def _fitted_factors(study: Study) -> set[str]:
    fitted = {name for _, model in _glms(study) for name in model.parsed.factor_names}
    return fitted - {SILO, study.target.treatment, *study.derived_levels}


def _fitted_numbers(study: Study) -> set[str]:
    used = {name for _, model in _glms(study) for f in formulas(model) for name in f.numeric_names}
    return used - {study.target.treatment, *study.derived_levels}


def _codes(study: Study, table: Table, name: str) -> IntArray:
    return table.factors[name].recode(study.levels[name])


def _level_counts(study: Study, table: Table, name: str) -> dict[str, int]:
    codes = _codes(study, table, name)
    counts = np.bincount(codes[codes >= 0], minlength=len(study.levels[name]))
    return dict(zip(study.levels[name], counts.tolist(), strict=True))


def _pooled_counts(study: Study, tables: Mapping[str, Table], name: str) -> dict[str, int]:
    by_silo = [_level_counts(study, table, name) for table in tables.values()]
    return {level: sum(counts[level] for counts in by_silo) for level in study.levels[name]}


def _is_constant(name: str, tables: Mapping[str, Table]) -> bool:
    values: list[Array] = [table.numeric[name] for table in tables.values() if name in table.numeric]
    known = np.concatenate(values) if values else np.empty(0)
    known = known[~np.isnan(known)]
    return len(known) > 0 and bool((known == known[0]).all())


@dataclass
class MessageKind:
    """A kind of message: what it discloses, how often it would be sent, and the size of all of them."""

    explanation: str
    phase: str
    times: int = 0
    numbers: int = 0
    bits: int = 0


@dataclass(frozen=True)
class CheckedLimit:
    """A limit of the policy that can be checked before the study, with the number that it limits."""

    name: str
    text: str
    is_met: bool


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What a silo's owner sees before approving a plan.

    ``refused_by`` is the key of the policy that would refuse the study, and ``reason`` what the server would
    learn; both are empty if it would not. ``numbers_sent`` counts the numbers that would leave, up to
    the refusal if there is one. ``stopped`` is any other error that ended the rehearsal.
    ``conflicts`` say why the study may not follow the earlier ones, or discloses too much by itself.
    ``obstacles`` name the columns and levels behind a refusal, and what to do, for the owner's eyes only.
    ``brought`` are the classes of other distributions that the study would run here. If the study
    ``judges_together``, the sums of its models are not judged here: that needs the rows of all silos.
    ``lowered`` are the limits of the policy that are laxer than the package's own, with the reasons.
    ``shared_levels`` are levels in a masked study's models that everyone at the silo has.
    """

    silo: str
    plan: str
    silos: int
    n_rows: int
    kinds: tuple[MessageKind, ...]
    limits: tuple[CheckedLimit, ...]
    refused_by: str
    reason: str
    stopped: str
    numbers_sent: int
    conflicts: tuple[Conflict, ...] = ()
    obstacles: tuple[str, ...] = ()
    brought: tuple[str, ...] = ()
    is_masked: bool = False
    judges_together: bool = False
    lowered: tuple[str, ...] = ()
    shared_levels: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def preview(plan: Plan, file: SiloFile, audited: PlannedRisk | None = None) -> Preview:
    """Rehearse ``plan`` on the rows of the silo of ``file``; ``audited`` is its audit, if it was made."""
    if file.name not in plan.silos:
        raise InputError(f"silo '{file.name}': the study's silos are {', '.join(plan.silos)}")
    kinds: dict[tuple[str, str], MessageKind] = {}
    refused_by = reason = stopped = ""
    sent = 0

    def witness(query: Query, reply: Answered) -> None:
        nonlocal refused_by, reason, sent
        if plan.is_masked and not refused_by:
            try:
                guard.admit_open(query)
            except RefusalError as refusal:
                refused_by, reason = refusal.key, refusal.reason.value
        phase = query.phase.value
        kind = kinds.setdefault((query.explanation, phase), MessageKind(query.explanation, phase))
        kind.times += 1
        numbers = disclosed_numbers(query, reply.payload.length)
        kind.numbers += numbers
        sent += 0 if refused_by else numbers
        kind.bits += reply.payload.length

    guard = Guard(file.policy, is_masked=plan.is_masked)
    peers = Home(file).peers
    opening = _refused_at_opening(plan, file)
    if opening is not None:
        refused_by, reason = opening
    alone = plan.alone(file.name)
    # The number of silos is checked below, because the rehearsal has only one.
    policy = replace(file.policy, min_silos=0)
    limit = disclosure_limit(alone, file)
    keeper = Keeper(
        policy=policy,
        limit=limit,
        examines=examine_target,
        witness=witness,
        peers=peers,
        rehearses=plan,
    )
    silo = open_party(alone, file.name, file, keeper=keeper)
    try:
        Session(alone, InProcess([silo])).run()
    except RefusedError as refused:
        if silo.refused_by:
            refused_by, reason = silo.refused_by, refused.code
        else:
            stopped = str(silo.error or refused)
    except FedTMLEError as error:
        stopped = str(error)
    conflicts = conflicts_of(plan, file, silo.n_rows, audited)
    if opening is not None:
        refused_by, reason = opening
    elif conflicts:
        refused_by, reason, sent = f"memory: {conflicts[0].key}", Reason.POLICY.value, 0
    advice = _obstacles(plan, file) or tuple(
        filter(None, [silo.advice or about_limit(file.policy, refused_by)])
    )
    return Preview(
        silo=file.name,
        plan=plan.digest.hex(),
        silos=len(plan.roster),
        n_rows=silo.n_rows,
        kinds=tuple(kinds.values()),
        limits=_limits(plan, file, silo, kinds),
        refused_by=refused_by,
        reason=reason,
        stopped=stopped,
        numbers_sent=sent,
        conflicts=conflicts,
        obstacles=advice,
        brought=tuple(map(str, plan.brought)),
        is_masked=plan.is_masked,
        judges_together=file.policy.judges_together(plan.look_groups),
        lowered=tuple(map(lowered_limit, file.policy.lowered)),
        shared_levels=silo.alone,
    )


def conflicts_of(
    plan: Plan, file: SiloFile, n_rows: int, audited: PlannedRisk | None = None
) -> tuple[Conflict, ...]:
    """Return why a study may not follow the earlier ones at a silo, or discloses too much by itself.

    The study is audited, which takes a while, only if the owner limits bits or few are left.
    """
    home, limit = Home(file), file.policy.max_bits
    spent = max(home.spent(plan).values(), default=0.0)
    if audited is None and (limit < Policy().max_bits or spent + MOST_BITS > limit):
        audited = planned_risk(plan, file, n_rows)
    return home.conflicts(plan, None if audited is None else audited.bits)


def _refused_at_opening(plan: Plan, file: SiloFile) -> tuple[str, str] | None:
    """Return the key and the reason of a refusal before the first query, whatever the rows are, or None."""
    policy = file.policy
    if not plan.server and not policy.allow_unsigned:
        return "allow_unsigned", "its policy wants signed requests, and the plan has no key of the server"
    key = too_few_silos(plan, policy)
    if key:
        return key, Reason.TOO_FEW_SILOS.value
    try:
        check_standing(plan, file.name, Keeper(policy=policy, peers=Home(file).peers), utc_now().date())
    except RefusalError as refusal:
        return refusal.key, refusal.reason.value
    return None


def about_limit(policy: Policy, key: str) -> str:
    """Return what a key of the policy that refuses a study means, and what to do; nothing of another key."""
    limit = next((limit for limit in Policy.limits() if limit.name == key), None)
    if limit is None:
        return ""
    value = getattr(policy, key)
    stated = str(value).lower() if isinstance(value, bool) else f"{value:g}"
    return (
        f"{key} is {stated} in your policy: {limit.meaning} Change it in [policy] of the silo file ("
        f"{limit.direction.value}), or leave the silo out of the study."
    )


def _obstacles(plan: Plan, file: SiloFile) -> tuple[str, ...]:
    """Return what the policy would refuse of this silo's own table, with column, level and remedy."""
    if not isinstance(plan.program, StudyProgram) or file.stream:
        return ()
    study = plan.program.study
    table = load(file, schema_of(study), silo=file.name)
    if not isinstance(table, Table):
        return ()
    policies = {file.name: replace(file.policy, min_silos=0)}
    defects = obstacles(study, {file.name: table}, policies, groups=plan.look_groups)
    return tuple(defect.text for defect in defects if defect.silo is not None)


def _limits(
    plan: Plan, file: SiloFile, silo: Silo, kinds: dict[tuple[str, str], MessageKind]
) -> tuple[CheckedLimit, ...]:
    """Return the limits of the policy on what can be counted before the study."""
    policy = file.policy
    queries, numbers = sum(k.times for k in kinds.values()), sum(k.numbers for k in kinds.values())
    max_queries, max_numbers = policy.max_queries, policy.max_functionals
    return (
        CheckedLimit(
            "rows", f"{silo.n_rows:,} (at least {policy.min_rows:,})", silo.n_rows >= policy.min_rows
        ),
        CheckedLimit(
            "silos",
            f"{len(plan.roster)} (at least {policy.min_silos})"
            + (", also once the study goes on without some" if plan.program.goes_on else ""),
            len(plan.roster) >= policy.min_silos,
        ),
        CheckedLimit(
            "sums",
            f"masked: totals over {len(plan.roster)} silos are read ({policy.colluders} may lie or collude)"
            if plan.is_masked
            else "open: the server reads your silo's own",
            not plan.is_masked or plan.fewest_together >= policy.colluders + 2,
        ),
        CheckedLimit("queries", f"{queries:,} (at most {max_queries:,})", queries <= max_queries),
        CheckedLimit("numbers", f"{numbers:,} (at most {max_numbers:,})", numbers <= max_numbers),
    )

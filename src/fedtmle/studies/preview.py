"""The preview: what a silo would send, rehearsed on its own rows before its owner approves a plan.

The study is run on this silo's rows alone, as if it were the only one, under its own policy. With other silos
the numbers and the number of rounds differ; the kinds of message are the same. Nothing is recorded or sent.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from fedtmle.data import SiloFile, load
from fedtmle.errors import FedTMLEError, InputError, RefusedError
from fedtmle.model.table import Table
from fedtmle.programs.flow import StudyProgram
from fedtmle.protocol.guard import Guard, RefusalError, disclosed_numbers, too_few_silos
from fedtmle.protocol.messages import Answered, Reason
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.policy import lowered_limit
from fedtmle.protocol.query import Query
from fedtmle.runtime.keeper import Keeper, utc_now
from fedtmle.runtime.session import InProcess, Session
from fedtmle.runtime.silo import Silo, check_standing
from fedtmle.studies.conformance import examine_target
from fedtmle.studies.home import Home, disclosure_limit, open_party
from fedtmle.studies.obstacles import obstacles
from fedtmle.studyfile.schema import schema_of

EXAMPLE_BYTES = 12  # shown of a message


@dataclass
class MessageKind:
    """One kind of message: its explanation, how often it would be sent, and the start of the first one."""

    explanation: str
    phase: str
    times: int = 0
    numbers: int = 0
    bits: int = 0
    example: str = ""


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
    ``obstacles`` name the columns and levels behind a refusal, and what to do, for the owner's eyes only.
    ``brought`` are the classes of other distributions that the study would run here. If the study
    ``judges_together``, the sums of its models are not judged here: that needs the rows of all silos.
    ``lowered`` are the limits of the policy that are laxer than the package's own, with the reasons.
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
    obstacles: tuple[str, ...] = ()
    brought: tuple[str, ...] = ()
    is_masked: bool = False
    judges_together: bool = False
    lowered: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def preview(plan: Plan, file: SiloFile) -> Preview:
    """Rehearse ``plan`` on the rows of the silo of ``file``."""
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
        kind.example = kind.example or reply.payload.data[:EXAMPLE_BYTES].hex(" ")

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
    conflicts = Home(file).memory(plan).conflicts(plan) if Home(file).has_past else ()
    if opening is not None:
        refused_by, reason = opening
    elif conflicts:
        refused_by, reason, sent = f"memory: {conflicts[0].key}", Reason.POLICY.value, 0
    advice = _obstacles(plan, file) or tuple(filter(None, [silo.advice]))
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
        obstacles=(*(conflict.text for conflict in conflicts), *advice),
        brought=tuple(map(str, plan.brought)),
        is_masked=plan.is_masked,
        judges_together=file.policy.judges_together(plan.look_groups),
        lowered=tuple(map(lowered_limit, file.policy.lowered)),
    )


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
        CheckedLimit("numbers disclosed", f"{numbers:,} (at most {max_numbers:,})", numbers <= max_numbers),
    )

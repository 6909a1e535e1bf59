"""The preview: what would leave a silo, rehearsed on its own rows before its owner approves a plan.

The study is run on this silo's rows alone, as if it were the only one, under its own policy. With
other silos the numbers differ and rounds may be more or fewer; the kinds of message are the same.
Nothing is recorded and nothing leaves.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from fedtmle.data.silofile import SiloFile
from fedtmle.errors import FedTMLEError, InputError, RefusedError
from fedtmle.layout import aligned, bits, phase_name, wrapped
from fedtmle.protocol.guard import disclosed_numbers
from fedtmle.protocol.messages import Answered, Reason
from fedtmle.protocol.plan import Member, Plan
from fedtmle.protocol.query import Query
from fedtmle.runtime.federation import InProcess
from fedtmle.runtime.keeper import Keeper
from fedtmle.runtime.session import Session
from fedtmle.runtime.silo import Silo
from fedtmle.studies.home import disclosure_limit, open_party
from fedtmle.studyfile.file import study_of

EXAMPLE = 12  # bytes shown of a message


@dataclass
class MessageKind:
    """One kind of message: its explanation, how often it would be sent, and the first one's bytes."""

    explanation: str
    phase: str
    times: int = 0
    numbers: int = 0
    bits: int = 0
    example: str = ""


@dataclass(frozen=True, kw_only=True)
class Preview:
    """What the owner sees.

    ``refused_by`` is the key of the policy that would stop the study here, ``told`` the reason that the
    server would be given; ``stopped`` is what else ended the rehearsal.
    """

    silo: str
    plan: str
    silos: int
    n_rows: int
    kinds: tuple[MessageKind, ...]
    floors: tuple[tuple[str, str, bool], ...]
    refused_by: str
    told: str
    stopped: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def preview(plan: Plan, file: SiloFile) -> Preview:
    """Rehearse ``plan`` on the rows of one silo."""
    if file.name not in plan.silos:
        raise InputError(f"silo '{file.name}': the study's silos are {', '.join(plan.silos)}")
    kinds: dict[tuple[str, str], MessageKind] = {}

    def witness(query: Query, reply: Answered) -> None:
        phase = query.phase.value
        kind = kinds.setdefault((query.explanation, phase), MessageKind(query.explanation, phase))
        kind.times += 1
        kind.numbers += disclosed_numbers(query, reply.payload.length)
        kind.bits += reply.payload.length
        kind.example = kind.example or reply.payload.data[:EXAMPLE].hex(" ")

    alone = replace(plan, roster=(Member(name=file.name),))
    # The roster's size is judged below, from the plan as it is; the rest of the policy as it stands.
    policy = replace(file.policy, min_silos=0)
    keeper = Keeper(policy=policy, floor=disclosure_limit(study_of(alone), file), witness=witness)
    silo = open_party(alone, file.name, file, keeper=keeper)
    refused_by = reason = stopped = ""
    try:
        Session(alone, InProcess([silo])).run()
    except RefusedError as refused:
        refused_by = silo.refused_by
        if refused_by:
            reason = refused.code
        else:
            stopped = str(silo.error or refused)
    except FedTMLEError as error:
        stopped = str(error)
    if len(plan.roster) < file.policy.min_silos:  # judged before the first question
        refused_by, reason = "min_silos", Reason.TOO_FEW_SILOS.value
    return Preview(
        silo=file.name,
        plan=plan.digest.hex(),
        silos=len(plan.roster),
        n_rows=silo.n_rows,
        kinds=tuple(kinds.values()),
        floors=_floors(plan, file, silo, kinds),
        refused_by=refused_by,
        told=reason,
        stopped=stopped,
    )


def _floors(
    plan: Plan, file: SiloFile, silo: Silo, kinds: dict[tuple[str, str], MessageKind]
) -> tuple[tuple[str, str, bool], ...]:
    """What can be counted before the study, against the policy."""
    policy = file.policy
    queries, numbers = sum(k.times for k in kinds.values()), sum(k.numbers for k in kinds.values())
    most, most_told = policy.max_queries, policy.max_functionals
    return (
        ("rows", f"{silo.n_rows:,} (at least {policy.min_rows:,})", silo.n_rows >= policy.min_rows),
        ("silos", f"{len(plan.roster)} (at least {policy.min_silos})", len(plan.roster) >= policy.min_silos),
        ("queries", f"{queries:,} (at most {most:,})", queries <= most),
        ("numbers told", f"{numbers:,} (at most {most_told:,})", numbers <= most_told),
    )


def render(view: Preview) -> str:
    """The preview at 80 columns."""
    lines = [
        *wrapped(f"What silo '{view.silo}' would send in plan {view.plan[:16]}, one of {view.silos} silos."),
        "",
        *wrapped(
            f"Rehearsed on your {view.n_rows:,} rows alone. With the other silos the numbers differ and "
            "rounds may be more or fewer; the kinds of message are the same. Nothing has left."
        ),
        "",
    ]
    for kind in view.kinds:
        lines += wrapped(f"{kind.explanation} ({phase_name(kind.phase)})", first="* ", indent="  ")
        lines += [
            f"    {kind.times} time{'s'[: kind.times != 1]}, {kind.numbers:,} numbers, {bits(kind.bits)}; "
            "the first begins",
            f"    {kind.example}",
        ]
    lines += ["", "Your limits:"]
    lines += aligned([(what, held, "ok" if ok else "NOT MET") for what, held, ok in view.floors], indent="  ")
    lines += ["", *_verdict(view)]
    return "\n".join(lines)


def _verdict(view: Preview) -> list[str]:
    if view.refused_by:
        return wrapped(
            f"Your policy would refuse this study here, by its key {view.refused_by}. The server would only "
            f"be told: {view.told}."
        )
    if view.stopped:
        return wrapped(f"The rehearsal on your rows alone stopped: {view.stopped}. With others it may go on.")
    return wrapped("Your policy would allow every one of these messages.")

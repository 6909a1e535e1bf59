"""Everything that an owner approves: the whole study, its silos, earlier studies, and what it would disclose.

The owner's command shows it and asks. It is read from the plan that the digest names, never from the text of
a study, and judged by the rules of the run: a rehearsal under the policy, and what the silo remembers.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedtmle.initial.superlearner import formulas
from fedtmle.initial.syntax import Computed, Formula, numbers_in
from fedtmle.initial.variables import Variable
from fedtmle.layout import Document
from fedtmle.privacy.audit import Attacker
from fedtmle.programs.study import Study
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.policy import lowered_limit
from fedtmle.runtime import ledger
from fedtmle.runtime.ledger import read
from fedtmle.runtime.signing import Decision
from fedtmle.studies.home import Home
from fedtmle.studies.memory import OwnersBudget, source_names
from fedtmle.studies.preview import Preview, preview
from fedtmle.studies.risk import bits_of, planned_risk
from fedtmle.studyfile.file import StudyFile, file_plan

MOST_SHOWN = 40  # items of a list
_SHOWN_ELSEWHERE = ("title", "target", "variables")


@dataclass(frozen=True, kw_only=True)
class ShownMember:
    """A silo of the roster; ``vouched``: whether the owner's file `peers` has its keys, None without one."""

    name: str
    fingerprints: tuple[str, ...]  # fingerprints of its keys for signatures and for masks
    vouched: bool | None


@dataclass(frozen=True, kw_only=True)
class EarlierStudy:
    """An earlier study at this silo, from its ledger; ``shares``: whether it read one of the same columns."""

    plan: str
    time: str
    answers: int
    numbers: int
    shares: bool


@dataclass(frozen=True, kw_only=True)
class Approval:
    """What the owner sees before deciding. Every text may be the study's own, and is not to be trusted.

    ``parts`` are the target, models and settings by name; ``literals`` the formulas' terms with numbers
    inside I(). ``has_own_columns`` states whether the study is masked and a model has columns that one silo
    alone fills. ``risk`` has the audit's finding for each column and attacker; if there is none,
    ``unaudited`` says why.
    ``answered`` has the answers and numbers that already left for this plan.
    ``bits`` is what it would disclose of each column, and ``spent`` what the earlier ones disclosed.
    ``budget`` is that of a study with noise. ``snapshot`` says whose rows are left out, if any.
    ``lowered`` are the limits of the owner's policy that are laxer than the package's own, with the reasons.
    """

    title: str
    question: str
    plan: str
    expires: str
    server: str
    is_masked: bool
    groups: tuple[int, ...]  # sizes of the groups of silos that judge their rows together
    colluders: int
    goes_on: bool
    silo: str
    roster: tuple[ShownMember, ...]
    variables: tuple[tuple[str, str], ...]
    parts: tuple[tuple[str, str], ...]
    literals: tuple[str, ...]
    has_own_columns: bool
    brought: tuple[str, ...]
    answered: tuple[int, int]
    earlier: tuple[EarlierStudy, ...]
    preview: Preview
    risk: tuple[Document, ...]
    unaudited: str
    bits: Mapping[str, float] | None
    spent: Mapping[str, float]
    budget: OwnersBudget | None
    snapshot: str
    lowered: tuple[str, ...]

    def to_dict(self) -> Document:
        return dataclasses.asdict(self)


def review(file: StudyFile, home: Home) -> Approval:
    """Return what the owner of ``home`` approves with the plan of ``file``; nothing is recorded or sent."""
    plan, study = file_plan(file), file.study
    table, memory = home.read(plan)
    audited = planned_risk(plan, home.file, table.n_rows)
    view = preview(plan, home.file, audited)
    earlier = home.earlier()
    sources = {theirs for each in source_names(plan, home.file).values() for theirs in each}
    policy, accounts_here = home.file.policy, _accounts(home)
    return Approval(
        title=study.title or "",
        question=study.target.question,
        plan=plan.digest.hex(),
        expires="" if plan.expires is None else plan.expires.isoformat(),
        server=fingerprint_of(plan.server) if plan.server else "",
        is_masked=plan.is_masked,
        groups=tuple(map(len, plan.look_groups.groups)),
        colluders=plan.colluders,
        goes_on=plan.program.goes_on,
        silo=home.file.name,
        roster=_roster(plan, home),
        variables=tuple((name, _variable(each)) for name, each in study.variables.items()),
        parts=tuple(_parts(study)),
        literals=tuple(literals(study)),
        has_own_columns=plan.is_masked and study.has_silo_columns,
        brought=tuple(
            f"{each}{'' if policy.allows(each) else '; NOT allowed by your policy (allow_targets)'}"
            for each in plan.brought
        ),
        answered=next(
            ((each.answers, each.numbers) for each in accounts_here if each.plan == plan.digest.hex()), (0, 0)
        ),
        earlier=tuple(
            EarlierStudy(
                plan=account.plan,
                time=account.first,
                answers=account.answers,
                numbers=account.numbers,
                shares=account.plan in earlier and not sources.isdisjoint(earlier[account.plan][1].sources),
            )
            for account in accounts_here
            if account.plan != plan.digest.hex() and account.answers
        ),
        preview=view,
        risk=audited.findings,
        unaudited=audited.unaudited,
        bits=audited.bits,
        spent=home.spent(plan),
        budget=OwnersBudget.of(plan, home.institution_wide(), policy),
        snapshot="" if memory is None else memory.snapshot,
        lowered=tuple(map(lowered_limit, policy.lowered)),
    )


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A decision of the owner, whether it is in force, and how many answers had left before it."""

    decision: Decision
    in_force: bool
    answers: int


def decided(home: Home) -> list[Decided]:
    """Return every decision of a silo's owner, oldest first."""
    made, current = home.approvals.decisions(), home.approvals.current()
    lines = ledger.walk(read(home.ledger_path)) if home.has_past else ()
    left = [(line["plan"], line["time"]) for line, answer in lines if answer is not None]
    return [
        Decided(
            decision=each,
            in_force=current[each.plan] == each,
            answers=sum(plan == each.plan and _precedes(time, each) for plan, time in left),
        )
        for each in made
    ]


def _precedes(time: str, decision: Decision) -> bool:
    """Return whether an answer left before a decision. In the same second it did before a rejection."""
    at, made = time[:19], decision.time[:19]
    return at < made or (at == made and not decision.approved)


def fingerprint_of(key: bytes) -> str:
    """Return 24 hexadecimal digits of the SHA-256 of a public key, in groups of four, to be read aloud."""
    digits = hashlib.sha256(key).hexdigest()[:24]
    return " ".join(digits[at : at + 4] for at in range(0, 24, 4))


def literals(study: Study) -> Iterator[str]:
    """Yield each term with a number inside I(), with the role of its model: it may single out a person."""
    for role, model in study.models.items():
        for formula in formulas(model, public=True):
            for variable in dict.fromkeys(each for term in formula.terms for each in term):
                if isinstance(variable, Computed) and any(numbers_in(variable.expression)):
                    yield f"{role.removesuffix('_model')}: {variable}"


def _roster(plan: Plan, home: Home) -> tuple[ShownMember, ...]:
    peers = home.peers
    shown = []
    for member in plan.roster:
        keys = member.key + member.mask_key
        shown.append(
            ShownMember(
                name=member.name,
                fingerprints=tuple(fingerprint_of(key) for key in (member.key, member.mask_key) if key),
                vouched=None if peers is None else any(keys and peer.startswith(keys) for peer in peers),
            )
        )
    return tuple(shown)


def _accounts(home: Home) -> list[ledger.StudyAccount]:
    return ledger.studies(read(home.ledger_path)) if home.has_past else []


def worst_findings(findings: Sequence[Document]) -> list[Document]:
    """Return the worst finding against each attacker who knows something beforehand."""
    by_attacker: dict[str, list[Document]] = {}
    for finding in findings:
        if finding["attacker"] != Attacker.NOTHING.value:
            by_attacker.setdefault(finding["attacker"], []).append(finding)
    return [max(each, key=lambda one: (one["known"], bits_of(one))) for each in by_attacker.values()]


def _parts(study: Study) -> Iterator[tuple[str, str]]:
    """Yield the target, the models and every other setting that is not the default."""
    yield "target", described(study.target)
    for each in dataclasses.fields(study):
        value = getattr(study, each.name)
        if each.name not in _SHOWN_ELSEWHERE and value != each.default:
            yield each.name.replace("_", " "), described(value)


def described(value: object) -> str:
    """Return a value of a study as text: the name of its class, and the fields that are not the default."""
    match value:
        case enum.Enum():
            words = str(value.value)
        case str():
            words = f"'{value}'"
        case float():
            words = f"{value:.12g}"
        case Mapping():
            words = "{" + _listed([f"{key}: {described(item)}" for key, item in value.items()]) + "}"
        case Sequence():
            words = "[" + _listed([described(item) for item in value]) + "]"
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, Formula):
            given = [each for each in dataclasses.fields(value) if each.repr and not _is_default(value, each)]
            fields = (f"{each.name}={described(getattr(value, each.name))}" for each in given)
            words = f"{type(value).__name__}({', '.join(fields)})"
        case _:
            words = str(value)
    return words


def _is_default(value: object, each: dataclasses.Field[object]) -> bool:
    given = getattr(value, each.name)
    return (
        each.default is not dataclasses.MISSING
        and type(given) is type(each.default)
        and bool(given == each.default)
    )


def _listed(items: Sequence[str]) -> str:
    rest = f", ... ({len(items)} in all)" if len(items) > MOST_SHOWN else ""
    return ", ".join(items[:MOST_SHOWN]) + rest


def _variable(variable: Variable) -> str:
    parts: list[str] = [variable.kind]
    if variable.range is not None:
        parts.append("{:g} to {:g}".format(*variable.range))
    if variable.levels:
        parts.append(_listed([f"{code} ({words})" if words else code for code, words in variable.levels]))
    parts += [part for part in (variable.unit, variable.label and f"'{variable.label}'") if part]
    if variable.missing != "refuse":
        parts.append(f"where missing: {variable.missing}")
    return "; ".join(parts)

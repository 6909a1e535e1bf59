"""A silo's memory of earlier studies: a study is compared with them before it answers.

The home has the people of each study (`fedtmle_core.memory`), the ledger its scope
(`runtime.ledger.StudyScope`), the approvals what `risk` found beforehand. The owner sees the conflicts when
approving a plan; the silo refuses by the same rules when the study opens, and again before its first answer.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from fedtmle.data import SiloFile
from fedtmle.model.budget import OWNER_DELTA
from fedtmle.protocol.guard import RefusalError
from fedtmle.protocol.messages import Reason
from fedtmle.protocol.plan import Member, Plan
from fedtmle.protocol.policy import Policy
from fedtmle.runtime.ledger import StudyScope, epsilon_taken
from fedtmle.runtime.records import utc_now
from fedtmle.runtime.signing import Decision
from fedtmle.studyfile.file import study_of
from fedtmle.studyfile.schema import schema_of
from fedtmle_core.home import Home as Institution
from fedtmle_core.home import OpenHome, Standing
from fedtmle_core.memory import Study as Remembered
from fedtmle_core.people import PERSON, Census, Refusal, Snapshot

# Beside the people of a study (`fedtmle_core.people`), its roster is compared with earlier ones. Under masks
# a study discloses totals over its silos. Take the matrix with a row for each study and a column for each
# silo, 1 where the silo took part. The totals of a set of silos follow from the studies if the row space
# holds a vector that is zero elsewhere, which is so if the columns elsewhere have a smaller rank.

NOISE_IN_BITS = "Studies with noise are not counted in bits: state max_epsilon_total in [policy] for them."
NO_IDENTIFIER = (
    "Your silo file names no column of the person (person in [data]), so that a record counts as another "
    "person's when any of its cells changes."
)
_PRIME = (1 << 61) - 1  # no minor of 27 or fewer rows of zeros and ones is a multiple of it


def isolated(rosters: Collection[frozenset[str]], colluders: int) -> tuple[str, ...] | None:
    """Return silos whose totals follow from the totals over these rosters, None if there are too many.

    It seeks one silo, or one with up to ``colluders`` others: these know their own part of the total.
    """
    distinct = list(dict.fromkeys(rosters))
    silos = sorted(frozenset().union(*distinct))
    matrix = [[int(silo in roster) for silo in silos] for roster in distinct]
    rank = _rank(matrix)
    for size in range(1, colluders + 2):
        for chosen in combinations(range(len(silos)), size):
            if _rank([[x for at, x in enumerate(row) if at not in chosen] for row in matrix]) < rank:
                return tuple(silos[at] for at in chosen)
    return None


def _rank(matrix: Sequence[Sequence[int]]) -> int:
    """Return the rank of a matrix of zeros and ones, by elimination modulo a prime."""
    rows, rank = [list(row) for row in matrix], 0
    for column in range(len(rows[0]) if rows else 0):
        pivot = next((row for row in rows[rank:] if row[column]), None)
        if pivot is None:
            continue
        rows.remove(pivot)
        rows.insert(rank, pivot)
        inverse = pow(pivot[column], -1, _PRIME)
        for row in rows[rank + 1 :]:
            if row[column]:
                share = row[column] * inverse % _PRIME
                row[:] = [(x - share * y) % _PRIME for x, y in zip(row, pivot, strict=True)]
        rank += 1
    return rank


Earlier = Mapping[str, tuple[str, StudyScope]]  # by plan: the time of its first answer, and its scope


@dataclass(frozen=True, kw_only=True)
class Conflict:
    """Why a study may not follow the earlier ones: the key of the policy, and words for the owner.

    With ``is_alone`` it would be refused without the earlier ones too.
    """

    key: str
    text: str
    is_alone: bool = False


@dataclass(frozen=True, kw_only=True)
class OwnersBudget:
    """What a study with noise takes of the owner's budget, each number an epsilon at the owner's delta.

    ``before`` is what the earlier studies with noise took, ``total`` that of all together, which is less than
    the sum. ``exact`` is the number of earlier studies without noise, which no budget covers.
    """

    study: float
    before: float
    total: float
    limit: float
    exact: int

    @classmethod
    def of(cls, plan: Plan, earlier: Earlier, policy: Policy) -> OwnersBudget | None:
        """Return the budget of a plan after other studies; None if its sums have no noise."""
        privacy = plan.program.privacy
        if privacy is None:
            return None
        scopes = [each for digest, (_, each) in earlier.items() if digest != plan.digest.hex()]
        privacy_taken = str(privacy.taken)
        return cls(
            study=privacy.owners_epsilon,
            before=epsilon_taken([each.zcdp for each in scopes]),
            total=epsilon_taken([privacy_taken, *(each.zcdp for each in scopes)]),
            limit=policy.max_epsilon_total,
            exact=sum(not each.zcdp for each in scopes),
        )

    def __str__(self) -> str:
        """In words for the owner."""
        limit = "none" if self.limit >= Policy().max_epsilon_total else f"{self.limit:g}"
        words = (
            f"epsilon of this study {self.study:.3g}, of earlier ones with noise {self.before:.3g}, of all "
            f"together {self.total:.3g} (delta {OWNER_DELTA:g}); your limit (max_epsilon_total): {limit}"
        )
        if self.exact:
            words += f". {self.exact} earlier studies without noise are not counted: no budget covers them"
        return words


@dataclass(frozen=True, kw_only=True)
class SiloMemory:
    """What the home of the silo of ``file`` remembers, and whose rows the study of ``plan`` reads.

    ``census`` is of the rows that the study is answered from: those that ``verdict`` keeps. ``earlier``
    returns the scopes of this silo's studies, ``institution_wide`` those of all silos of the institution, and
    ``decisions`` their owner's, with what `risk` found.
    """

    file: SiloFile
    plan: Plan
    census: Census
    institution: Institution
    peers: frozenset[bytes] | None
    earlier: Callable[[], Earlier]
    institution_wide: Callable[[], Earlier]
    decisions: Callable[[], Mapping[str, Decision]]
    verdict: Snapshot | Refusal | None = None
    clock: Callable[[], datetime.datetime] = utc_now

    def judged(self) -> SiloMemory:
        """Return this memory with the verdict on all rows, and the census of those that it keeps."""
        with self.institution.held() as opened:
            verdict = self._judged(opened)
        census = self.census.keep(verdict.kept) if isinstance(verdict, Snapshot) else self.census
        return replace(self, census=census, verdict=verdict)

    def refusal(self, plan: Plan) -> str:
        """Return the key of the policy by which this study may not follow the earlier ones, or nothing.

        A refusal that depends on whose rows there are is charged to the study's author.
        """
        with self.institution.held() as opened:
            key = self._refused(opened)
            others = () if key else self._others(opened, plan, None)
        return key or next((each.key for each in others), "")

    def record_scope(self, plan: Plan) -> StudyScope:
        """Remember whose rows the study is about; return its scope, for the ledger.

        It is judged again: another study may have been remembered since it opened.
        """
        about = _about(plan, self.file)
        with self.institution.held() as opened:
            key = self._refused(opened)
            if not key and self._is_beyond_budget(opened, about.zcdp):
                key = "max_epsilon_total"
            if key:
                raise RefusalError(Reason.POLICY, f"memory: {key}")
            opened.memory.remember(
                Remembered(
                    plan=self._digest,
                    hospital=self.file.name,
                    author=author_of(plan),
                    time=self.clock().isoformat(timespec="seconds"),
                    zcdp=about.zcdp,
                ),
                self.census,
            )
        return about

    def conflicts(self, plan: Plan, bits: Mapping[str, float] | None = None) -> tuple[Conflict, ...]:
        """Return every reason why a study by ``plan`` may not follow the earlier ones.

        ``bits`` is what `risk` found of each column, by default what the approval of the plan has.
        """
        people = [self._about_people(self.verdict)] if isinstance(self.verdict, Refusal) else []
        with self.institution.held() as opened:
            standing = opened.charges.standing(author_of(plan), self._digest, self.clock())
            if standing is not Standing.OPEN:
                people.append(Conflict(key="refusals", text=f"{standing.value}."))
            return (*people, *self._others(opened, plan, bits))

    @property
    def snapshot(self) -> str:
        """In words for the owner: from whose rows the study is answered, if not from all; else nothing."""
        if not isinstance(self.verdict, Snapshot) or not self.verdict.plans:
            return ""
        return (
            f"{self.verdict.left_out:,} of your rows are left out: fewer than {self._least} people came "
            f"since earlier studies ({_plans(self.verdict.plans)}), and the difference would show them "
            "(limit min_cell). The study is answered about the people of those studies."
        )

    @property
    def _digest(self) -> str:
        """The plan as it was approved; a run that goes on without some silos has another."""
        return self.plan.digest.hex()

    @property
    def _least(self) -> int:
        return max(1, int(self.file.policy.min_cell))

    def _judged(self, opened: OpenHome) -> Snapshot | Refusal:
        noisy = self.plan.program.privacy is not None
        return opened.memory.judge(
            self._digest, self.file.name, self.census, least=self._least, is_noisy=noisy
        )

    def _refused(self, opened: OpenHome) -> str:
        """Return the key by which the people forbid the study, or nothing; charge a refusal to its author."""
        author, now = author_of(self.plan), self.clock()
        if opened.charges.standing(author, self._digest, now) is not Standing.OPEN:
            return "refusals"
        verdict = self._judged(opened)
        if isinstance(verdict, Refusal):
            opened.charges.add(author, self._digest, now)
            return "min_cell"
        # Another study was remembered since these rows were read: read again, it will have fewer.
        return "min_cell" if verdict.left_out else ""

    def _about_people(self, refusal: Refusal) -> Conflict:
        one, many = ("person", "people") if refusal.basis == PERSON else ("record", "records")
        count = f"{refusal.people} {one if refusal.people == 1 else many}"
        because = "" if self.census.own[0] == PERSON else f" {NO_IDENTIFIER}"
        reason = refusal.conflict.value
        return Conflict(
            key="min_cell",
            text=f"{reason[0].upper()}{reason[1:]}. Here it is {count}, and your limit is "
            f"{self._least} (min_cell); the earlier studies are {_plans(refusal.plans)}.{because}",
        )

    def _others(self, opened: OpenHome, plan: Plan, bits: Mapping[str, float] | None) -> tuple[Conflict, ...]:
        """Return the conflicts that do not depend on whose rows there are, but for changes of this silo's."""
        earlier = {digest: each for digest, each in self.earlier().items() if digest != self._digest}
        others = {digest: each for digest, each in self.institution_wide().items() if digest != self._digest}
        return (
            *self._rosters(opened, plan, earlier),
            *self._spent(plan, others, bits),
            *self._budget(plan, others),
        )

    def _rosters(self, opened: OpenHome, plan: Plan, earlier: Earlier) -> Sequence[Conflict]:
        """Return a conflict if totals of few silos follow from the rosters of this study and earlier ones."""
        if not plan.is_masked:  # the server reads each silo's own sums anyway
            return ()
        colluders, about = self.file.policy.colluders, _about(plan, self.file)
        sources = set(about.sources)
        masked = {
            digest: scope
            for digest, (_, scope) in earlier.items()
            if scope.is_masked and not sources.isdisjoint(scope.sources)
        }
        before, exact = [], []
        for digest, scope in masked.items():
            has_noise = bool(scope.zcdp or about.zcdp)
            is_changed = not has_noise and opened.memory.differs(digest, self.file.name, self.census)
            totals = self._totals(scope, digest if is_changed else "")
            before += totals
            exact += totals if about.zcdp or not scope.zcdp else []
        silos = isolated([*before, *self._totals(about, "")], colluders)
        # Totals that follow from earlier studies are known already, but not exactly if these had noise.
        if silos is None or (exact and isolated(exact, colluders) == silos):
            return ()
        names = {_identity(member): member.name for member in plan.roster} | {about.own: self.file.name}
        words = " and ".join(f"'{names.get(silo, silo[:16])}'" for silo in silos)
        return (
            Conflict(
                key="colluders",
                text=f"Together with earlier studies of other silos ({_plans(masked)}), the totals of this "
                f"one give the sums of {words} {'together' if len(silos) > 1 else 'alone'}, which masks "
                f"should hide. Rosters must differ by more than {colluders + 1} silos, or not at all.",
            ),
        )

    def _totals(self, scope: StudyScope, rows: str) -> list[frozenset[str]]:
        """Return the silos behind each total of a study, less those whose sums the server knows by itself.

        Silos that the owner does not vouch for may be the server's own. This silo's rows are another unknown
        if they changed since, unless the noise of that study, or of the one at hand, covers the change;
        ``rows`` then names them.
        """
        vouched = {
            silo for silo in scope.roster if self.peers is None or silo in {key.hex() for key in self.peers}
        }
        others, this_silo = vouched - {scope.own}, scope.own + (f" {rows}" if rows else "")
        totals = (
            frozenset(others.intersection(group)) | ({this_silo} if scope.own in group else set())
            for group in scope.groups or (scope.roster,)
        )
        return [total for total in totals if total]

    def _spent(self, plan: Plan, earlier: Earlier, bits: Mapping[str, float] | None) -> Sequence[Conflict]:
        """Return a conflict if all studies together would disclose more of a column than the owner allows."""
        decisions = self.decisions()
        if bits is None:
            bits = decisions[self._digest].bits if self._digest in decisions else None
        return beyond_max_bits(plan, self.file.policy, bits, spent_bits(earlier, decisions))

    def _budget(self, plan: Plan, earlier: Earlier) -> Sequence[Conflict]:
        """Return a conflict if the studies with noise would together take more than the owner allows."""
        budget = OwnersBudget.of(plan, earlier, self.file.policy)
        if budget is None or budget.total <= budget.limit:
            return ()
        is_alone, text = budget.study > budget.limit, f"{budget}: more than you allow."
        return (Conflict(key="max_epsilon_total", text=text, is_alone=is_alone),)

    def _is_beyond_budget(self, opened: OpenHome, zcdp: str) -> bool:
        """Return whether the studies that the home remembers would take more than allowed with this one."""
        taken = [each.zcdp for each in opened.memory.studies if each.plan != self._digest]
        return bool(zcdp) and epsilon_taken([*taken, zcdp]) > self.file.policy.max_epsilon_total


def author_of(plan: Plan) -> str:
    """Return who a study's refusals are charged to: the key with which its server signs, or nobody known."""
    return plan.server.hex()


def source_names(plan: Plan, file: SiloFile) -> dict[str, tuple[str, ...]]:
    """Return the hospital's own columns behind each column that a study reads."""
    names = schema_of(study_of(plan)).names
    return {name: file.columns[name].sources if name in file.columns else (name,) for name in names}


def _plans(plans: Collection[str]) -> str:
    return ", ".join(plan[:16] for plan in plans)


def beyond_max_bits(
    plan: Plan, policy: Policy, bits: Mapping[str, float] | None, spent: Mapping[str, float]
) -> tuple[Conflict, ...]:
    """Return a conflict for each column of which a study, with the earlier ones, discloses more than allowed.

    ``bits`` is what `risk` found of each column, None if it could not audit the study, and ``spent`` what
    the earlier studies disclosed.
    """
    if plan.program.privacy and policy.max_epsilon_total < Policy().max_epsilon_total:
        return ()  # noise is not audited in bits; it has a budget of its own
    if bits is None and policy.max_bits >= Policy().max_bits:
        return ()
    if bits is None:
        text = "Your policy limits what all studies disclose in bits (max_bits), and this one has no audit. "
        text += NOISE_IN_BITS if plan.program.privacy else "`fedtmle risk` says why."
        return (Conflict(key="max_bits", text=text, is_alone=True),)
    return tuple(
        _beyond(column, here, spent.get(column, 0.0), policy.max_bits)
        for column, here in bits.items()
        if spent.get(column, 0.0) + here > policy.max_bits
    )


def _beyond(column: str, here: float, before: float, limit: float) -> Conflict:
    """Return the conflict with the limit: earlier studies disclosed ``before`` bits, this one ``here``."""
    over = f"more than your {limit:g} for all studies (max_bits)."
    if before:
        words = f"Earlier studies disclosed up to {before:.1f} bits of one person's '{column}', and this one "
        text = f"{words}up to {here:.1f}: {over}"
    else:
        text = f"This study alone discloses up to {here:.1f} bits of one person's '{column}': {over}"
    return Conflict(key="max_bits", text=text, is_alone=here > limit)


def spent_bits(earlier: Earlier, decisions: Mapping[str, Decision]) -> dict[str, float]:
    """Return what the earlier studies disclosed of each column: the sum of the most exposed record's bits.

    It counts as if that record were the same person's in every study, and so is at least what any one person
    has disclosed. A study of which `risk` found nothing counts 0.
    """
    spent: dict[str, float] = {}
    for plan in earlier:
        for column, bits in ((decisions[plan].bits or {}) if plan in decisions else {}).items():
            spent[column] = spent.get(column, 0.0) + bits
    return spent


def _about(plan: Plan, file: SiloFile) -> StudyScope:
    (own,) = (member for member in plan.roster if member.name == file.name)
    identities = {member.name: _identity(member) for member in plan.roster}
    return StudyScope(
        sources=tuple(dict.fromkeys(theirs for each in source_names(plan, file).values() for theirs in each)),
        roster=tuple(identities.values()),
        own=_identity(own),
        is_masked=plan.is_masked,
        groups=tuple(tuple(identities[name] for name in group) for group in plan.look_groups.groups),
        zcdp="" if plan.program.privacy is None else str(plan.program.privacy.taken),
    )


def _identity(member: Member) -> str:
    return (member.key + member.mask_key).hex() or member.name

"""The guard: the one place that checks a query and its answer against a silo's policy.

A silo answers in four steps: the `Guard` *admits* the query by limits that do not depend on the rows, it
*examines* the rows behind it, the query computes its answer, and the guard *releases* the answer, after
suppressing the parts that rest on too few people. Limits that do not depend on data each have their own
reason code; all others share one coarse code, so that a refusal discloses as little as it can.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from operator import add, sub
from typing import NamedTuple, Protocol
from weakref import ref

import numpy as np

from fedtmle.model.budget import Privacy
from fedtmle.model.leverage import Look, PersonRows, RowSpace, largest_leverage
from fedtmle.model.submodel import AbstractRowsSubmodel, AbstractSubmodel, StreamedLinear
from fedtmle.model.submodels import Profiled, by_person
from fedtmle.protocol.looks import ALL, LookGroups, Looks, Rule
from fedtmle.protocol.masked import GainsQuery, LookQuery, PooledLevels
from fedtmle.protocol.messages import Reason
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.policy import TARGETS, Policy
from fedtmle.protocol.query import (
    EVERYBODY,
    AbstractQuery,
    Answer,
    CountCell,
    DisclosedColumns,
    Evaluation,
    Local,
    Model,
    Phase,
    Pooled,
    Query,
)
from fedtmle.protocol.subjects import (
    TRUST,
    AbstractSubject,
    ClosingRows,
    Designs,
    FoldRows,
    FreshBatches,
    Hazards,
    Subject,
    Union,
    about_alone,
    about_answer,
    about_combination,
    about_completions,
    about_models,
    about_periods,
    about_rare,
    about_support,
    all_periods,
)
from fedtmle_core.exact import Sums
from fedtmle_core.types import Array, Part

LAXEST = Policy()  # the laxest policy that a silo file can state without a reason
MOST_DECLINED = 4  # answers that a silo may decline in one study; each discloses a bit about its rows
MOST_KEPT = 1 << 22  # numbers of disclosed columns to keep in memory; beyond, they are evaluated again
Judged = Union | Hazards | FoldRows  # rows that silos judge together beside those of each model
NEARLY_ALONE = 1.0 - 1e-6  # a share, by the own rows, with which one person is alone: no look is asked for
SAID_TO_SHOW = (
    "It was said that all silos disclose a part of this answer that your silo leaves out, because few people "
    "are behind it: a silo lies, or the server."
)
MARGIN = 1.5  # factor by which a look should stay below the limit, so that it also holds at nearby points


class RefusalError(Exception):
    """The policy refuses; ``reason`` is all that leaves the silo."""

    def __init__(self, reason: Reason, key: str, advice: str = "") -> None:
        self.reason = reason
        self.key = key  # which key of the policy, for the owner's ledger
        self.advice = advice  # which columns, and what to do, for the owner's ledger
        super().__init__(key)


class _NotHereError(RefusalError):
    """The policy refuses the rows' sums at one point of a model, but may allow them at others."""


class DisclosureMeter(Protocol):
    """Tracks the disclosure of named attributes over one session (`privacy.audit`)."""

    def admit(self, query: Query) -> str | None:
        """Account for the query; return an attribute that its answer would disclose too well, or None."""
        ...


class _Examined(NamedTuple):
    """Where the guard last examined the rows, the result, and the radius in eps for which it holds.

    ``rows`` are those that a view showed, as long as they are kept.
    """

    point: Evaluation
    look: Look
    radius: float
    rows: ref[Local] | None = None

    def covers(self, point: Evaluation) -> bool:
        """Return whether the result holds at another point of the same model."""
        examined = self.point
        here, there = point.eps.tolist(), examined.eps.tolist()
        if examined.law is not point.law:  # move both to the submodel that the laws share, if any
            origins = point.model.displacement(point.law), point.model.displacement(examined.law)
            if origins[0] is None or origins[1] is None:
                return False
            here, there = map(add, here, origins[0].tolist()), map(add, there, origins[1].tolist())
        return self.look.distance(map(sub, here, there)) <= self.radius


def too_few_silos(plan: Plan, policy: Policy) -> str:
    """Return the key of the policy that asks for more silos than the plan has together, "" if none does."""
    if len(plan.roster) < policy.min_silos:
        return "min_silos"
    if not plan.is_masked:
        return ""
    if plan.fewest_together < policy.colluders + 2:
        return "colluders"
    # How many silos have not retired is counted by what they say themselves.
    may_retire = plan.program.fewest_active is not None
    return "trust_looks" if may_retire and policy.colluders and not policy.trust_looks else ""


class Guard:
    """Checks the queries and answers of one session against the policy, and keeps the totals so far."""

    def __init__(
        self,
        policy: Policy,
        meter: DisclosureMeter | None = None,
        *,
        is_masked: bool = False,
        rehearses: Plan | None = None,
        doubted: Collection[str] = (),
    ) -> None:
        self.policy = policy
        self._is_masked = is_masked  # whether the silo sends sums under masks
        self._rehearses_masked = rehearses is not None and rehearses.is_masked  # whether it will, later
        self._doubted = doubted  # silos that the owner does not vouch for, if there is a list of those
        self._rehearsed_rules = None if rehearses is None else self._rules(rehearses.look_groups)
        self._meter = meter
        self.queries = 0
        self.functionals = 0
        self.declined = 0  # answers
        self._travelled: tuple[object, float] = (None, 0.0)  # a law, and the length of its history
        # Keys are the id of the model, which the value keeps alive, and whether the Hessian was examined.
        self._examined: dict[tuple[int, bool], _Examined] = {}
        self._streamed: list[Union] = []  # columns of the models of each response, of streamed tables
        self._summed: list[Union] = []  # those of each response of several periods
        self._summed_models: dict[int, Model] = {}  # models in these, by id
        self._designs = Designs(by_name=is_masked or self._rehearses_masked)
        self._unions: list[Judged] = []  # models judged together with the rows of other silos
        self._supported: dict[int, Model] = {}  # models whose columns have enough people, by id
        self._batch_of: np.ndarray | None = None  # own row -> number of its batch, -1 if in none yet
        self._batch_sizes: list[int] = []
        self._fresh: FreshBatches | None = None  # the batches so far, if they may be drawn anew
        self._left_out: frozenset[int] = frozenset()  # members of the last examined query
        self._shown_by_all: frozenset[int] = frozenset()  # parts of it that all silos are said to disclose
        self._compared: list[AbstractSubject] = []  # whose columns were compared with those of all silos
        self.alone: dict[str, None] = {}  # columns and levels that the silo has alone, as far as it can know
        self.remark = ""  # about the last examined query, for the owner's ledger
        self.is_void = False  # whether the silo may not disclose its part of that query yet

    def open(self, plan: Plan, n_rows: int, smallest_part: int) -> None:
        """Check the plan before anything is answered.

        ``smallest_part`` is the fewest rows in a fold of the study: sums over all folds but one, for each
        one, disclose the sum over that fold.
        """
        key = too_few_silos(plan, self.policy)
        if key:
            raise RefusalError(Reason.TOO_FEW_SILOS, key)
        self._check_privacy(plan.program.privacy)
        if not all(map(self.policy.allows, plan.brought)):
            raise RefusalError(Reason.OTHER_TARGET, TARGETS)
        if n_rows < self.policy.min_rows:
            raise RefusalError(Reason.POLICY, "min_rows")
        if smallest_part < min(self.policy.min_fold, n_rows):
            raise RefusalError(Reason.POLICY, "min_fold")

    def _check_privacy(self, privacy: Privacy | None) -> None:
        """Check that the noise of a study suffices for the owner, whatever other studies there were."""
        policy = self.policy
        for key in ("max_epsilon", "max_epsilon_total"):
            limit = getattr(policy, key)
            if limit < getattr(LAXEST, key) and (privacy is None or privacy.owners_epsilon > limit):
                raise RefusalError(Reason.POLICY, key)
        if privacy is not None and privacy.colluders < policy.colluders:
            raise RefusalError(Reason.TOO_FEW_SILOS, "colluders")

    def admit(self, query: Query, local: Local) -> None:
        """Charge the query, and check the limits that do not depend on the rows' values.

        A silo that restarts admits its earlier queries again, which restores the totals.
        """
        policy = self.policy
        if self._is_masked:
            self.admit_open(query)
        self.queries += 1
        self.functionals += query.functionals
        if self.queries > policy.max_queries:
            raise RefusalError(Reason.TOO_MANY_QUERIES, "max_queries")
        if self.functionals > policy.max_functionals:
            raise RefusalError(Reason.TOO_MANY_FUNCTIONALS, "max_functionals")
        for phase, point in _evaluations(query):
            if point.curvature and not point.is_coarse and not policy.allow_curvature:
                raise RefusalError(Reason.POLICY, "allow_curvature")
            size = math.hypot(*point.eps.tolist())
            if phase is Phase.NUISANCE:
                if not size <= policy.max_coefficient:
                    raise RefusalError(Reason.TOO_FAR, "max_coefficient")
            elif not size <= policy.max_eps:
                raise RefusalError(Reason.TOO_FAR, "max_eps")
            elif not self._length(point) + size <= policy.max_path:
                raise RefusalError(Reason.TOO_FAR, "max_path")
            if point.batch is not None:
                self._follow_batch(local.batch(point.batch), local.n_rows)
        # Judged at a public centre, so that a refusal discloses nothing about the rows.
        attribute = None if self._meter is None else self._meter.admit(query)
        if attribute is not None:
            raise RefusalError(Reason.DISCLOSURE, f"disclosure: {attribute}")
        if query.needs_masks and not self._is_masked:
            raise RefusalError(Reason.UNMASKED, "privacy")

    def admit_open(self, query: Query) -> None:
        """Check that the owner lets the parts of an answer that are not sums leave without a mask."""
        for member in query.members:
            if member.lanes is not None:
                continue
            consent = member.open_consent
            if consent is None or (consent and not getattr(self.policy, consent)):
                raise RefusalError(Reason.UNMASKED, consent or "aggregation")

    def _length(self, point: Evaluation) -> float:
        """Return the length of the path that led to a law: the sum of the accepted |eps^k|."""
        if self._travelled[0] is not point.law:
            self._travelled = (point.law, sum(math.hypot(*eps) for eps in point.model.path(point.law)))
        return self._travelled[1]

    def examine(self, query: Query, local: Local, looks: Looks | None = None) -> None:
        """Check the limits that depend on the rows, before the answer is computed.

        ``looks`` are those of a masked session: what is public about the rows of all silos.
        """
        self.remark = ""
        self.is_void = False
        for member in query.members:
            self._examine_people(member, local)
            if isinstance(member, LookQuery):
                self._examine_alone(member, local)
            if isinstance(member, GainsQuery):
                self._examine_gains(member, local)
        declined: set[int] = set()
        for number, member in enumerate(query.members):
            rows = member.rows_of(local)
            for point in member.evaluations():
                try:
                    self._examine_point(point, rows, looks)
                except RefusalError as refusal:
                    is_declined = isinstance(refusal, _NotHereError)
                    if not is_declined or not self._may_decline(member, len(declined)):
                        refusal.advice = refusal.advice or self._about_point(member, point, rows)
                        raise
                    declined.add(id(member))
            self._examine_own_fits(member, rows)
            if not member.is_optional:
                self._examine_columns(member, number, local, looks)
        self._left_out = left_out(query, local, self.policy) | declined
        self._shown_by_all = frozenset() if looks is None else looks.shown_by_all

    def _examine_columns(self, query: Query, number: int, local: Local, looks: Looks | None) -> None:
        """Check the columns of an answer by the own rows or, if these prove little, by those of all silos.

        Before a look the answer is void instead; ``number`` is that of the query in its round.
        """
        largest = largest_share(query, local, self.policy)
        if not largest or largest <= self._allowed:
            return
        rules = None if looks is None else self._rules(looks.groups)
        if largest <= NEARLY_ALONE and query.closing_blocks:
            if self._rehearsed_rules is not None:
                return  # without the other silos nothing can be said
            if looks is not None and rules is not None and looks.may_be_void:
                self.is_void = True
                return
            if looks is not None and rules is not None and number in looks.closing:
                self._examine_closing(query, number, local, looks, rules)
                return
        raise RefusalError(Reason.POLICY, "min_people", self._about_columns(query, local))

    def _examine_closing(
        self, query: Query, number: int, local: Local, looks: Looks, rules: list[Rule]
    ) -> None:
        """Check the rows behind closing sums against those of all silos, where the own do not suffice."""
        judged = looks.closing[number]
        advice = self._about_columns(query, local)
        if not has_all_columns(query, local, judged):
            raise RefusalError(Reason.POLICY, "min_people", advice)
        for levels in judged:
            block = ClosingRows.of(query, levels.subject.block)
            if largest_leverage(partial(block.rows, local)) <= self._allowed:
                continue
            for rule in rules:
                allowed = self._allowed_by(rule) * levels.rest(local, rule.colluders)
                if not looks.closing_leverage(levels, local, rule.left_out, allowed) <= allowed:
                    raise RefusalError(Reason.POLICY, rule.floor, advice)

    def _about_columns(self, query: Query, local: Local) -> str:
        """Return advice about the columns whose sums an answer consists of."""
        columns = query.disclosed_columns(local)
        column = "" if columns is None else self._standing_out(columns, query.rows_of(local))
        return about_answer(query.explanation, column)

    def _about_point(self, query: Query, point: Evaluation, local: Local) -> str:
        """Return advice about a gradient of a model whose columns have no names."""
        if point.batch is not None:
            return about_answer(query.explanation)
        rows = local.submodel(point.model, point.law).disclosed_rows
        columns = DisclosedColumns(lambda: (piece.rows for piece in rows(point.eps)))
        return about_answer(query.explanation, self._standing_out(columns, local))

    def _standing_out(self, columns: DisclosedColumns, local: Local) -> str:
        """Return the column of a fitted model of which the person with the largest leverage has most.

        The share is that of the squares of the gradient's rows, and the intercept does not count. "" if no
        model was fitted, or its rows are not those of the answer.
        """
        person = _heaviest_person(columns)
        shares: dict[str, float] = {}
        for examined in self._examined.values():
            point = examined.point
            rows = None if examined.rows is None else examined.rows()
            names = point.model.design_names
            if names is None or rows is None:
                continue
            pieces = rows.submodel(point.model, point.law).disclosed_rows(point.eps)
            squares = np.concatenate([_squares(piece) for piece in pieces], axis=1)
            if squares.shape[1] == local.n_rows and person < local.n_rows:
                own = squares[:, person] / np.maximum(squares.sum(axis=1), np.finfo(float).tiny)
                shares.update(zip(names, own.tolist(), strict=True))
        shares.pop("1", None)
        return max(shares, key=shares.__getitem__, default="")

    def _may_decline(self, query: Query, more: int) -> bool:
        """Return whether the silo may answer None instead of refusing the study.

        Under masks it may not, because totals without this silo would be disclosed.
        """
        is_open = not (self._is_masked or self._rehearses_masked)
        return query.is_declinable and is_open and self.declined + more < MOST_DECLINED

    def _examine_point(self, point: Evaluation, local: Local, looks: Looks | None) -> None:
        if not self._examine_together(point, local, looks):
            self._examine_support(point, local)
            self._examine_gradient(point, local)
            self._examine_own_union(point, local, looks)

    def _examine_own_fits(self, query: Query, local: Local) -> None:
        """Check the gradients at fits to the own rows: they are zero, and say what few people add to that."""
        if not self.policy.min_people > 0:
            return
        for point in query.own_evaluations(local):
            submodel = local.submodel(point.model, point.law)
            look = submodel.look(point.eps, Part.GRADIENT, enough=self._allowed)
            self._require_people(look.largest, self._about_point(query, point, local))

    def _examine_people(self, query: Query, local: Local) -> None:
        """Check how many people each part of an answer is about, and whether the silo may send a model."""
        if not self.policy.allow_models and query.ships_model(local.name):
            raise RefusalError(Reason.POLICY, "allow_models")
        rare = query.rare_columns(self.policy.min_support)
        if rare:
            raise RefusalError(Reason.POLICY, "min_support", about_rare(rare))
        crowded = query.crowded_groups(self.policy.min_pooled) if self._is_masked else ()
        if crowded:
            raise RefusalError(Reason.POLICY, "min_pooled", about_completions(crowded))
        floor = _floor(self.policy, *query.floors)
        if floor > 1 and any(0 < people < floor for people in query.people(local)):
            strictest = max(query.floors, key=partial(_floor, self.policy))
            raise RefusalError(Reason.POLICY, strictest)

    def _examine_alone(self, look: LookQuery, local: Local) -> None:
        """Find the columns that no other silo has: totals over all silos are the silo's own sums there."""
        found: dict[str, None] = {}
        for each in (each for each in look.asked if each.subject.has_floor):
            if not any(map(each.subject.has_columns_of, self._compared)):
                self._compared.append(each.subject)
                found |= dict.fromkeys(each.lone_columns(local, look.groups, self.policy.colluders))
        if found and not self.policy.allow_own_columns:
            raise RefusalError(Reason.POLICY, "allow_own_columns", about_alone(tuple(found)))
        if found:
            self.alone |= found
            self.remark = about_alone(tuple(found))

    def _examine_gains(self, query: GainsQuery, local: Local) -> None:
        """Check the rows of all silos before gains are stated, because these are squares of their shares."""
        for gram in query.grams if self.policy.min_pooled > 0 else ():
            own = partial(gram.subject.rows, local)
            space = gram.space(own)
            if not largest_leverage(own, space=space) <= self._allowed_by(ALL):
                about = about_combination(gram.subject.names, own, space)
                raise RefusalError(Reason.POLICY, ALL.floor, about)

    def release(self, query: AbstractQuery[Answer, Pooled], answer: Answer, n_rows: int) -> Answer:
        """Return the answer as it may leave the silo, or refuse it."""
        for member, part in zip(query.members, query.split(answer), strict=True):
            if isinstance(part, Sums):
                self._examine_sums(member, part, n_rows)
        disclosed = suppressed(query, answer, self.policy, self._left_out)
        if not all(is_shown for k, is_shown in enumerate(query.shown(disclosed)) if k in self._shown_by_all):
            raise RefusalError(Reason.POLICY, "min_cell", SAID_TO_SHOW)
        return disclosed

    def _examine_sums(self, query: Query, sums: Sums, n_rows: int) -> None:
        """Check the counts of people in an answer."""
        cells = tuple(query.cells())
        if cells:
            values = sums.values()
            for cell in cells:
                self._examine_cell(cell, values, n_rows)

    def charge(self, query: Query, bits: int, declined: int = 0) -> None:
        """Charge what is known only with the answer: its bits, and the number of parts that were declined."""
        self.declined += declined
        self.functionals += disclosed_numbers(query, bits) - query.functionals

    def _examine_cell(self, cell: CountCell, values: Array, n_rows: int) -> None:
        """Check that a count and its complement are each zero or large enough."""
        count, total = values[cell.at], n_rows if cell.of is None else values[cell.of]
        if count == 0 and total > 0 and cell.is_arm and not self.policy.allow_one_arm:
            raise RefusalError(Reason.POLICY, "allow_one_arm")
        for people, key in ((count, cell.floor), (total - count, cell.rest_floor)):
            if 0 < people < _floor(self.policy, key):
                raise RefusalError(Reason.POLICY, key)

    @property
    def _allowed(self) -> float:
        return _allowed(self.policy)

    def _require_people(self, leverage: float, advice: str = "") -> None:
        if not leverage <= self._allowed:
            raise RefusalError(Reason.POLICY, "min_people", advice)

    def _with_trust(self, advice: str) -> str:
        """Return advice about a model's columns; in a masked study, add what the owners can do together."""
        is_masked = self._is_masked or self._rehearses_masked
        return f"{advice} {TRUST}" if is_masked and advice and self.policy.colluders else advice

    def _examine_support(self, point: Evaluation, local: Local) -> None:
        """Check that each column of a model has enough people or none; the law does not matter."""
        floor, is_batch = self.policy.min_support, point.batch is not None
        if floor <= 1 or (not is_batch and id(point.model) in self._supported):
            return
        people = local.submodel(point.model, point.law, point.batch).column_people(floor)
        is_rare = (people > 0) & (people < floor)
        if is_rare.any():
            advice = about_support(point.model.design_names, is_rare.tolist())
            raise RefusalError(Reason.POLICY, "min_support", self._with_trust(advice))
        if not is_batch:
            self._supported[id(point.model)] = point.model

    def _examine_together(self, point: Evaluation, local: Local, looks: Looks | None) -> bool:
        """Check a point's rows against those of all silos; return False if only the own rows can be judged.

        The result is reused at nearby eps, as far as the declared ranges of the columns prove it.
        """
        if self._rehearsed_rules is not None and point.model.judged_together is not None:
            self._rehearse_alone(point, local)
            return True  # without the other silos nothing can be said
        if looks is None or point.batch is not None:
            return False
        if not all(looks.knows(point, part) for part in point.parts):
            return False
        rules = self._rules(looks.groups)
        if rules is None:
            return False
        for part in point.parts:
            key = id(point.model), part is Part.HESSIAN
            examined = self._examined.get(key)
            if examined is not None and examined.covers(point):
                continue
            found: list[_Examined] = []
            for rule in rules:
                examined = self._examined_by(rule, point, part, local, looks)
                if examined is not None:
                    found.append(examined)
                elif self._may_try_own_rows(rule, looks):
                    return False
                else:
                    space, _ = next(looks.spaces(point, part, local, rule))
                    disclosed = partial(
                        local.submodel(point.model, point.law).disclosed_rows, point.eps, part
                    )
                    advice = about_combination(point.model.design_names, disclosed, space)
                    raise RefusalError(Reason.POLICY, rule.floor, advice)
            if found:
                self._examined[key] = min(found, key=lambda each: each.radius)
        self._examine_union(point, local, looks, rules)
        return True

    def _examined_by(
        self, rule: Rule, point: Evaluation, part: Part, local: Local, looks: Looks
    ) -> _Examined | None:
        """Return the result of a rule at a point; None if a look does not prove that it holds there."""
        submodel = local.submodel(point.model, point.law)
        for space, factor in looks.spaces(point, part, local, rule):
            allowed = self._allowed_by(rule) * factor
            look = submodel.look(point.eps, part, enough=allowed / MARGIN, space=space)
            if look.largest <= allowed:
                look = replace(look, columns=looks.sizes(point))
                return _Examined(point, look, look.radius(allowed), ref(local))
        return None

    def _rehearse_alone(self, point: Evaluation, local: Local) -> None:
        """Find the levels that everyone at the silo has: perhaps nobody elsewhere has them."""
        facts = point.model.judged_together
        if facts is None or point.batch is not None:
            return
        subject = Subject(point, Part.GRADIENT, facts)
        if any(map(subject.has_columns_of, self._compared)):
            return
        self._compared.append(subject)
        people = subject.people(local).tolist()
        levels = zip(subject.labels, people, strict=True)
        self.alone |= dict.fromkeys(
            name for name, count in levels if count and count == max(people) and "[" in name
        )

    def _rules(self, groups: LookGroups) -> list[Rule] | None:
        """Return the rules for judging this silo's rows with those of others; None: by its own rows alone."""
        policy = self.policy
        rules = groups.rules(policy.colluders, self._doubted, trusts=policy.trust_looks)
        return None if rules is None else [rule for rule in rules if getattr(policy, rule.floor) > 0]

    def _may_try_own_rows(self, rule: Rule, looks: Looks) -> bool:
        """Return whether a silo's own rows may show that a rule holds: where few silos know little of others.

        They hide a person from one who subtracts other rows, but `min_pooled` is about the rows of all.
        """
        return looks.groups.discloses_shares and rule.floor != "min_pooled"

    def _allowed_by(self, rule: Rule) -> float:
        return (1.0 + 1e-9) / float(getattr(self.policy, rule.floor))

    def _examine_union(self, point: Evaluation, local: Local, looks: Looks, rules: list[Rule]) -> None:
        """Check the columns of all models of the response against those of all silos, once."""
        for union in looks.unions(point):
            if not any(union is each for each in self._unions):
                self._examine_each(union, local, looks, rules)

    def _examine_each(self, union: Judged, local: Local, looks: Looks, rules: list[Rule]) -> None:
        """Check the rows of a union or a fold against those of all silos."""
        own = partial(union.rows, local)
        for rule in rules:
            spaces, allowed = looks.union_spaces(union, local, rule), self._allowed_by(rule)
            if any(largest_leverage(own, space=space) <= allowed * factor for space, factor in spaces):
                continue
            if self._may_try_own_rows(rule, looks) and largest_leverage(own) <= self._allowed:
                continue
            space, _ = next(looks.union_spaces(union, local, rule), (None, 0.0))
            raise RefusalError(Reason.POLICY, rule.floor, _about_union(union, local, space))
        self._unions.append(union)

    def _examine_own_union(self, point: Evaluation, local: Local, looks: Looks | None) -> None:
        """Check the columns of all models of the response by the own rows, once.

        Sums over periods that were looked at are checked against those of all silos.
        """
        if not self.policy.min_people > 0:
            return
        if looks is None or not looks.has_joined(point.model):
            self._examine_periods(point.model, local)
            return
        rules = self._rules(looks.groups)
        for union in looks.unions(point):
            if any(union is each for each in self._unions):
                continue
            if union.is_summed and rules is not None:
                self._examine_each(union, local, looks, rules)
                continue
            largest = largest_leverage(partial(union.rows, local))
            self._require_people(largest, _about_union(union, local))
            self._unions.append(union)

    def _examine_gradient(self, point: Evaluation, local: Local) -> None:
        """Check that no combination of a gradient's sums, or Hessian's quadratic form, rests on few people.

        The result is reused at nearby eps.
        """
        if not self.policy.min_people > 0:
            return
        is_batch = point.batch is not None
        for part in point.parts:
            key = id(point.model), part is Part.HESSIAN
            examined = None if is_batch else self._examined.get(key)
            if examined is not None and examined.covers(point):
                continue
            submodel = local.submodel(point.model, point.law, point.batch)
            if is_batch and not submodel.n_rows:  # none of the silo's rows is in it
                continue
            look = submodel.look(point.eps, part, enough=self._allowed / MARGIN)
            if not look.largest <= self._allowed:
                disclosed = partial(submodel.disclosed_rows, point.eps, part)
                advice = self._with_trust(about_combination(point.model.design_names, disclosed))
                raise _NotHereError(Reason.POLICY, "min_people", advice)
            if is_batch and self._fresh is not None:
                whole = local.submodel(point.model, point.law)
                if not isinstance(whole, AbstractRowsSubmodel):  # its rows cannot be seen
                    raise RefusalError(Reason.BATCHES, "fresh_batches")
                self._require_people(self._fresh.largest_leverage(whole, point.eps, self._allowed))
            if not self._designs.add(point.model, submodel, self._allowed) <= self._allowed:
                raise RefusalError(Reason.POLICY, "min_people", self._about_designs(point.model))
            if isinstance(submodel, StreamedLinear) or _is_streamed_profile(submodel):
                self._examine_streamed(point.model, local)
            if not is_batch:
                self._examined[key] = _Examined(point, look, look.radius(self._allowed), ref(local))

    def _examine_streamed(self, model: Model, local: Local) -> None:
        """Check the columns of all models of the response together, if the table is read at every query."""
        facts = model.judged_together
        if facts is None or model.shared_residuals is not None:
            return
        places = (k for k, each in enumerate(self._streamed) if each.facts.response == facts.response)
        place = next(places, None)
        if place is None:
            self._streamed.append(Union.of(model, facts))
            return
        union = self._streamed[place].joined(model, facts)
        if union is not self._streamed[place]:
            largest = largest_leverage(lambda: union.rows(local))
            self._require_people(largest, about_models(model.design_names))
            self._streamed[place] = union

    def _examine_periods(self, model: Model, local: Local) -> None:
        """Check the sums over the periods of all hazard models by the own rows, once a model."""
        facts = model.judged_together
        if facts is None or not facts.may_cancel or id(model) in self._summed_models:
            return
        places = (k for k, each in enumerate(self._summed) if each.facts.response == facts.response)
        place = next(places, None)
        if place is None:
            place = len(self._summed)
            self._summed.append(Union.of(model, facts))
        joined = [*self._summed]
        joined[place] = joined[place].joined(model, facts)
        union = all_periods(joined)
        self._require_people(largest_leverage(lambda: union.rows(local)), _about_union(union, local))
        self._summed, self._summed_models[id(model)] = joined, model

    def _about_designs(self, model: Model) -> str:
        shared, imputed = model.shared_residuals is not None, self._designs.has_completions
        return about_models(model.design_names, shared=shared, imputed=imputed)

    def _follow_batch(self, rows: np.ndarray, n_rows: int) -> None:
        """Check that batches are parts of one partition: two that differ in a few rows disclose these rows.

        Batches that may be drawn anew are only recorded here, and judged together when the rows are examined.
        """
        if self.policy.min_batch == 0 or not len(rows):
            return
        if len(rows) < self.policy.min_batch:
            raise RefusalError(Reason.BATCHES, "min_batch")
        if self.policy.fresh_batches:
            if len(np.unique(rows)) < self.policy.min_batch:
                raise RefusalError(Reason.BATCHES, "min_batch")
            self._fresh = self._fresh or FreshBatches(n_rows)
            self._fresh.add(rows)
            return
        if self._batch_of is None:
            self._batch_of = np.full(n_rows, -1)
        owners = self._batch_of[rows]
        first = int(owners[0])
        in_order = (rows[1:] > rows[:-1]).all()  # usually true; sort only if not
        if (owners != first).any() or not (in_order or len(np.unique(rows)) == len(rows)):
            raise RefusalError(Reason.BATCHES, "min_batch")
        if first < 0:
            self._batch_of[rows] = len(self._batch_sizes)
            self._batch_sizes.append(len(rows))
            rest = n_rows - sum(self._batch_sizes)  # all rows less every batch disclose these
            if 0 < rest < self.policy.min_batch:
                raise RefusalError(Reason.BATCHES, "min_batch")
        elif self._batch_sizes[first] != len(rows):
            raise RefusalError(Reason.BATCHES, "min_batch")


def _is_streamed_profile(submodel: AbstractSubmodel) -> bool:
    return isinstance(submodel, Profiled) and submodel.is_streamed


def _largest_of_columns(disclosed: DisclosedColumns, enough: float) -> float:
    """Return the largest leverage in disclosed columns, or an upper bound that is at most ``enough``."""
    pieces = _kept(disclosed)

    def group(number: int) -> Iterator[PersonRows]:
        for piece in pieces():
            size = (len(piece) - disclosed.alone) // disclosed.groups
            yield PersonRows(piece[number * size : (number + 1) * size])

    largest = max(largest_leverage(partial(group, k), enough=enough) for k in range(disclosed.groups))
    if not disclosed.alone:
        return largest
    squares, most = np.zeros(disclosed.alone), np.zeros(disclosed.alone)
    for piece in pieces():
        own = piece[len(piece) - disclosed.alone :] ** 2
        squares, most = squares + own.sum(axis=1), np.maximum(most, own.max(axis=1, initial=0.0))
    shares = np.divide(most, squares, out=np.zeros_like(most), where=squares > 0)
    return max(largest, float(shares.max(initial=0.0)))


def _about_union(union: Judged, local: Local, space: RowSpace | None = None) -> str:
    """Return advice about the columns of a response in which one person's share is largest."""
    about = about_periods if union.is_summed else about_combination
    return about(union.names, lambda: union.rows(local), space)


def _squares(piece: PersonRows) -> Array:
    """Return the sums of squares of each person's rows, shape (p, people)."""
    squares = piece.rows**2
    return squares if piece.counts is None else by_person(squares, piece.counts)


def _heaviest_person(columns: DisclosedColumns) -> int:
    """Return the number of the row with the largest leverage in disclosed columns."""
    rows = np.concatenate(list(columns.pieces()), axis=1)
    size = (len(rows) - columns.alone) // columns.groups
    parts = [rows[k * size : (k + 1) * size] for k in range(columns.groups)]
    parts += [rows[j : j + 1] for j in range(columns.groups * size, len(rows))]
    spaces = ((RowSpace.own(partial(iter, [PersonRows(part)])), PersonRows(part)) for part in parts)
    return int(np.argmax(np.max([space.leverages(part) for space, part in spaces], axis=0)))


def _kept(disclosed: DisclosedColumns) -> Callable[[], Iterable[Array]]:
    """Return the pieces of disclosed columns, evaluated once if they take little memory.

    If all columns are judged together, only one of several identical columns is kept: the others add no
    information.
    """
    kept: list[Array] = []
    size = 0
    for piece in disclosed.pieces():
        kept.append(piece)
        size += piece.size
        if size > MOST_KEPT:
            return disclosed.pieces
    if not kept or disclosed.groups > 1:
        return lambda: kept
    together = range(len(kept[0]) - disclosed.alone)
    same = {k for k in together for j in range(k) if all(_equal(p[j], p[k]) for p in kept)}
    if same:
        others = [k for k in range(len(kept[0])) if k not in same]
        kept = [piece[others] for piece in kept]
    return lambda: kept


def _equal(left: Array, right: Array) -> bool:
    """Return whether two columns are equal; most that are not differ in the first rows."""
    return np.array_equal(left[:64], right[:64]) and np.array_equal(left, right)


def _floor(policy: Policy, *keys: str) -> int:
    """Return the strictest of some floors, by their keys; 0 without any."""
    return max((math.ceil(getattr(policy, key)) for key in keys if key), default=0)


def _allowed(policy: Policy) -> float:
    """Return the largest leverage that a policy allows, with a margin for the rounding of its computation."""
    return (1.0 + 1e-9) / policy.min_people


def largest_share(query: Query, local: Local, policy: Policy) -> float:
    """Return a bound of a person's share in combinations of the columns that a query asks for, by own rows.

    It is 0 if they are not judged, and need not be sharp if the policy allows it.
    """
    if not policy.min_people > 0 or (disclosed := query.disclosed_columns(local)) is None:
        return 0.0
    return _largest_of_columns(disclosed, _allowed(policy))


def _may_disclose(query: Query, local: Local, policy: Policy) -> bool:
    """Return whether every combination of the columns that a query asks for rests on enough own people."""
    share = largest_share(query, local, policy)
    return not share or share <= _allowed(policy)


def has_all_columns(query: Query, local: Local, judged: Iterable[PooledLevels]) -> bool:
    """Return whether the columns that silos judge together are all those behind an answer, at this silo."""
    subjects = [levels.subject for levels in judged]
    count = sum(len(subject.block.columns) for subject in subjects)
    disclosed = query.disclosed_columns(local)
    pieces = () if disclosed is None else disclosed.pieces()
    return all(len(piece) == count for piece in pieces) and all(
        each.loses_nothing(local) for each in subjects
    )


def is_void(query: Query, local: Local, policy: Policy) -> bool:
    """Return whether a silo that answers leaves a round void that may be: its own rows prove too little."""
    return not all(_may_disclose(member, local, policy) for member in query.members if not member.is_optional)


def left_out(query: Query, local: Local, policy: Policy) -> frozenset[int]:
    """Return the identities of the optional members of a query that a silo may not answer."""
    asked = [each for member in query.members for each in (member, *member.asks_about)]
    optional = (member for member in asked if member.is_optional)
    return frozenset(id(member) for member in optional if not _may_disclose(member, local, policy))


def declined(query: AbstractQuery[Answer, Pooled], answer: Answer) -> frozenset[int]:
    """Return the identities of the members of a query that a silo declined, by its answer."""
    parts = zip(query.members, query.split(answer), strict=True)
    return frozenset(id(member) for member, part in parts if member.is_declinable and part is None)


def suppressed(
    query: AbstractQuery[Answer, Pooled], answer: Answer, policy: Policy, left_out: Collection[int]
) -> Answer:
    """Return the answer without the members left out, and without bins of fewer people than allowed."""

    seen: set[int] = set()

    def floor(member: Query) -> int:
        seen.add(id(member))
        return EVERYBODY if id(member) in left_out else _floor(policy, *member.floors)

    disclosed = query.suppress(answer, floor)
    if not seen.issuperset(left_out):
        raise AssertionError("a member that may not be disclosed was not found among those of the query")
    return disclosed


def _evaluations(query: Query) -> Iterator[tuple[Phase, Evaluation]]:
    return ((member.phase, point) for member in query.members for point in member.evaluations())


def disclosed_numbers(query: Query, bits: int) -> int:
    """Return how many numbers an answer has: as declared, or one per 64 bits if a member cannot know."""
    is_declared = all(member.functionals for member in query.members)
    return query.functionals + (0 if is_declared else math.ceil(bits / 64))

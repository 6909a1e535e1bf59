"""A silo's policy: what its owner allows to leave it.

Its keys are floors, caps, permissions and consents. The defaults are the package's own limits. A silo's file
may be stricter in any key. Its owner may also make a floor or a cap laxer, with a written reason that is
signed into the approval of a study and stated in the study's result; a study never can.
`protocol.guard` checks queries and answers against the policy.
"""

from __future__ import annotations

import difflib
import enum
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, TypeVar

from fedtmle.errors import InputError
from fedtmle.lowered import LoweredLimit
from fedtmle.protocol.looks import LookGroups
from fedtmle.protocol.plan import Provenance


class Direction(enum.StrEnum):
    """Which way a key may be changed."""

    FLOOR = "may be raised; lowered only with a reason"
    CAP = "may be lowered; raised only with a reason"
    PERMIT = "may only be taken back"
    CONSENT = "the owner's free choice"


class Limit(NamedTuple):
    """One key of a policy.

    A silo may change its ``default`` in one ``direction``; ``off`` is its value if nothing is guarded.
    """

    name: str
    default: float
    direction: Direction
    meaning: str
    off: float

    def is_laxer(self, value: float) -> bool:
        """Return whether ``value`` allows what the default does not."""
        match self.direction:
            case Direction.FLOOR:
                return value < self.default
            case Direction.CAP:
                return value > self.default
            case Direction.PERMIT:
                return bool(value and not self.default)
            case Direction.CONSENT:
                return False


Number = TypeVar("Number", bound=float)
TARGETS = "allow_targets"  # a list of distributions
REASONS = "reasons"  # a text for each limit that is laxer than the package's own
LONGEST_REASON = 300  # characters


def _key(direction: Direction, default: Number, off: float, meaning: str) -> Number:
    metadata = {"direction": direction, "default": default, "off": off, "meaning": meaning}
    return field(default=default, metadata=metadata)


_FLOOR, _CAP, _PERMIT, _CONSENT = Direction.FLOOR, Direction.CAP, Direction.PERMIT, Direction.CONSENT


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One silo's limits, which the owner sets and no study can change.

    A silo file may raise a floor and lower a cap. The defaults are the least that it keeps unless its owner
    gives a reason.

    Parameters
    ----------
    allow_targets
        Distributions whose targets the silo runs, as "name" or "name==version". None allows any.
    reasons
        The owner's reason for each limit that is laxer than the default, by its key. The results of studies
        state it.

    Raises
    ------
    InputError
        A limit is not a number of at least 0, or a permission is not true or false.

    Examples
    --------
    >>> ft.Policy(min_rows=50).min_rows
    50
    """

    min_rows: int = _key(_FLOOR, 20, 0, "Records that the silo must have.")
    min_arm_rows: int = _key(
        _FLOOR, 10, 0, "Records, and records with an outcome, in each arm and stratum that the silo has."
    )
    min_missing: int = _key(
        _FLOOR,
        1,
        0,
        "Number of missing outcomes in an arm, or of people censored in a period, unless it is 0.",
    )
    min_events: int = _key(
        _FLOOR,
        1,
        0,
        "Number of events in a period (and arm), unless it is 0, where a study cannot do without it: a "
        "smaller one refuses the study.",
    )
    min_truncated: int = _key(
        _FLOOR, 1, 0, "Number of truncated propensity scores in an arm, unless it is 0."
    )
    min_cell: int = _key(
        _FLOOR,
        5,
        1,
        "Smallest count disclosed in preflight tables, and floor of bins and covariates during the study; "
        "the fewest people by whom two studies may differ.",
    )
    min_silos: int = _key(_FLOOR, 2, 0, "Silos that the study must have.")
    colluders: int = _key(
        _CONSENT, 1, 0, "How many other silos may cheat without weakening your protection (masks.md)."
    )
    trust_looks: bool = _key(
        _PERMIT,
        True,
        True,
        "With three to five masked silos, believe what the others say of their records (masks.md).",
    )
    min_batch: int = _key(
        _FLOOR, 20, 0, "Own records in a batch; batches are a fixed partition, unless fresh_batches."
    )
    min_fold: int = _key(_FLOOR, 5, 0, "Own records in a fold of cross-fitting.")
    min_support: int = _key(
        _FLOOR,
        5,
        0,
        "If anyone has a model's covariate (a level, say), at least so many people must: at this silo or, "
        "under masks, at all silos together.",
    )
    min_people: float = _key(
        _FLOOR,
        1.2,
        0.0,
        "The most that one person may be of any number that can be computed from one answer, as one part in "
        "so many: 1.2 allows 83 %.",
    )
    min_pooled: float = _key(
        _FLOOR, 2.0, 0.0, "The same limit for masked studies, counted over all silos' records."
    )
    max_queries: int = _key(_CAP, 5_000, math.inf, "Queries answered in one study.")
    max_functionals: int = _key(_CAP, 500_000, math.inf, "Numbers disclosed in one study.")
    max_eps: float = _key(_CAP, 100.0, math.inf, "How far the server may push the model in one step.")
    max_path: float = _key(
        _CAP, 1_000.0, math.inf, "How far the server may push the model in all steps together."
    )
    max_coefficient: float = _key(
        _CAP, 200.0, math.inf, "How large the coefficients of a nuisance model may be, scaled."
    )
    max_bits: float = _key(
        _CAP,
        1_000.0,
        math.inf,
        "Limit, over all studies, on what can be learned of one person's value (20 bits: practically known).",
    )
    max_epsilon: float = _key(
        _CAP,
        1_000.0,
        math.inf,
        "Epsilon of one study (delta 1e-6); if lowered, sums without noise are refused.",
    )
    max_epsilon_total: float = _key(
        _CAP,
        1_000.0,
        math.inf,
        "The same for all studies together, each counted in full from its first answer.",
    )
    max_refusals: int = _key(
        _CAP, 1_000, math.inf, "After so many unexpected requests the silo leaves the study."
    )
    lifetime_days: float = _key(_CAP, 30.0, math.inf, "Days from a study's first request to its last answer.")
    allow_one_arm: bool = _key(_PERMIT, True, True, "Take part when one of the arms is absent here.")
    allow_curvature: bool = _key(
        _PERMIT, True, True, "Send exact curvatures, combinations of which may be one person alone."
    )
    allow_models: bool = _key(
        _PERMIT, True, True, "Send models fitted to the silo's records alone, if asked to."
    )
    allow_own_columns: bool = _key(
        _PERMIT,
        True,
        True,
        "In a masked study, answer though no other silo has people with a model's covariate (a level, say): "
        "totals are then your silo's own sums.",
    )
    allow_open: bool = _key(
        _CONSENT,
        False,
        True,
        "In a masked study, also send items that masks cannot hide: digests of clusters, fitted models.",
    )
    fresh_batches: bool = _key(
        _CONSENT, False, False, "Answer batches drawn anew, while their sums together keep min_people."
    )
    allow_unsigned: bool = _key(
        _PERMIT, True, True, "Answer deployed studies whose plan has no key of the server for its requests."
    )
    release: bool = _key(_CONSENT, False, False, "Let this silo's own estimate be shown.")
    allow_targets: tuple[str, ...] | None = ()  # distributions, as "name" or "name==version"; None: any
    reasons: Mapping[str, str] = field(default_factory=dict, hash=False)  # by key

    def __post_init__(self) -> None:
        self._read_targets()
        for key in (key for key in fields(self) if key.metadata):
            value = getattr(self, key.name)
            if isinstance(key.default, bool):
                if not isinstance(value, bool):
                    raise InputError(f"{key.name}: expected true or false")
            elif isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise InputError(f"{key.name}: expected a number of at least 0")

    def _read_targets(self) -> None:
        """Check the list of distributions; make it a tuple."""
        given = self.allow_targets
        if given is None:
            return
        if not (isinstance(given, list | tuple) and all(isinstance(each, str) and each for each in given)):
            raise InputError('allow_targets: expected a list of distributions, such as ["fedtmle-late"]')
        object.__setattr__(self, "allow_targets", tuple(given))

    def allows(self, target: Provenance) -> bool:
        """Return whether the owner allows the classes of the distribution that brought this one."""
        if self.allow_targets is None:
            return True
        names = {_normalised(target.source), _normalised(f"{target.source}=={target.version}")}
        return any(_normalised(entry) in names for entry in self.allow_targets)

    def judges_together(self, groups: LookGroups) -> bool:
        """Return whether the owner allows models' sums to be judged together with other silos' rows."""
        return groups.rules(self.colluders, trusts=self.trust_looks) is not None

    @property
    def lowered(self) -> tuple[LoweredLimit, ...]:
        """The limits for which the owner gave a reason to make them laxer than the package's own."""
        return tuple(
            LoweredLimit(key, float(getattr(self, key)), reason) for key, reason in self.reasons.items()
        )

    def lower(self, limits: Iterable[LoweredLimit]) -> Policy:
        """Return this policy with exactly these limits laxer than the package's own.

        Raises
        ------
        InputError
            A key is unknown, a value is not laxer than the package's own limit, or a reason is no text.
        """
        defaults = {limit.name: limit.default for limit in self.limits()}
        reset = replace(self, reasons={}, **{key: defaults[key] for key in self.reasons})  # type: ignore[arg-type]
        checked = {limit.key: limit for limit in map(checked_limit, limits)}
        values = {key: type(defaults[key])(limit.value) for key, limit in checked.items()}
        reasons = {key: limit.reason for key, limit in checked.items()}
        return replace(reset, reasons=reasons, **values)  # type: ignore[arg-type]  # each was checked above

    @classmethod
    def parse(cls, table: Mapping[str, object]) -> tuple[Policy, dict[str, str]]:
        """Return the policy that ``table`` states, and the error of each key that is not accepted."""
        known = {limit.name: limit for limit in cls.limits()}
        keys = (*known, TARGETS, REASONS)
        mistakes: dict[str, str] = {}
        accepted: dict[str, object] = {}
        lowered: list[LoweredLimit] = []
        reasons = table.get(REASONS, {})
        if not isinstance(reasons, Mapping):
            reasons, mistakes[REASONS] = {}, "expected a table: the reason for each limit that is laxer"
        for name, value in table.items():
            if name == REASONS:
                continue
            if name not in keys:
                near = difflib.get_close_matches(name, keys, n=1)
                meant = f"did you mean '{near[0]}'? The" if near else "the"
                mistakes[name] = f"unknown key; {meant} keys are {', '.join(keys)}"
                continue
            try:
                stated = getattr(cls(**{name: value}), name)  # type: ignore[arg-type]  # it checks the type
                limit = known.get(name)
                if limit is None or not limit.is_laxer(stated):
                    accepted[name] = stated
                elif name in reasons:
                    lowered.append(checked_limit(LoweredLimit(name, stated, reasons[name])))
                else:
                    mistakes[name] = (
                        f"{limit.direction}: the package's own limit is {limit.default}; to go beyond it, "
                        f'give your reason under [policy.reasons]: {name} = "..."'
                    )
            except InputError as error:
                mistakes[name] = str(error).partition(": ")[2]
        for name in reasons:
            if name not in mistakes and name not in (limit.key for limit in lowered):
                mistakes[REASONS] = f"'{name}' is no limit that [policy] makes laxer than the package's own"
        policy = cls(**accepted)  # type: ignore[arg-type]  # each was checked above
        return policy.lower(lowered), mistakes

    @classmethod
    def limits(cls) -> list[Limit]:
        """Return every key with a number: its default, which way it may change, and what it limits."""
        return [Limit(name=key.name, **key.metadata) for key in fields(cls) if key.metadata]


# A policy without limits, for rows that nobody guards, such as a user's own arrays.
UNGUARDED = Policy(**{limit.name: limit.off for limit in Policy.limits()}, allow_targets=None)  # type: ignore[arg-type]


def checked_limit(lowered: LoweredLimit) -> LoweredLimit:
    """Return the limit with its reason on one line.

    Raise `InputError` unless it is a floor or a cap, laxer than the package's own, and has a reason.
    """
    key, value, reason = lowered.key, lowered.value, lowered.reason
    limit = next((limit for limit in Policy.limits() if limit.name == key), None)
    if limit is None or limit.direction not in (Direction.FLOOR, Direction.CAP):
        kinds = (Direction.FLOOR, Direction.CAP)
        names = ", ".join(limit.name for limit in Policy.limits() if limit.direction in kinds)
        raise InputError(f"{key}: no limit of a policy has this name; the limits are {names}")
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise InputError(f"{key}: expected a number of at least 0")
    if not limit.is_laxer(value):
        raise InputError(
            f"{key}: {value:g} is not laxer than the package's own limit, {limit.default:g}; write it into "
            "[policy] without a reason"
        )
    if isinstance(limit.default, int) and value != int(value):
        raise InputError(f"{key}: expected a whole number")
    words = " ".join(reason.split()) if isinstance(reason, str) else ""
    if not 0 < len(words) <= LONGEST_REASON or not words.isprintable():
        raise InputError(f"{key}: expected a reason in words, of at most {LONGEST_REASON} characters")
    return LoweredLimit(key, float(value), words)


def lowered_limit(lowered: LoweredLimit) -> str:
    """Return a lowered limit in words."""
    default = next(limit.default for limit in Policy.limits() if limit.name == lowered.key)
    return f"{lowered.key} is {lowered.value:g} instead of {default:g}: {lowered.reason}"


def _normalised(name: str) -> str:
    """Return the name of a distribution in the form in which two of them are compared (PEP 503)."""
    return re.sub(r"[-_.]+", "-", re.sub(r"\s", "", name)).lower()

"""A hospital's policy: ten keys, each a sentence that an officer decides. No plan can change one.

The defaults are the package's own limits. An owner may always be stricter. To be laxer takes a reason in
words, which the hospital signs with its approval and every result of the study states.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from difflib import get_close_matches
from typing import TypeAlias, final

from fedtmle_core.errors import InputError
from fedtmle_core.plan import Plan

Limit: TypeAlias = int | float | bool | tuple[str, ...] | None

LONGEST_REASON = 300  # characters


def _key(default: int | float | bool | tuple[str, ...] | None, sentence: str) -> Limit:
    return field(default=default, metadata={"sentence": sentence})


@final
@dataclass(frozen=True, kw_only=True)
class Policy:
    """What one hospital allows; ``reasons`` has the owner's reason for each key that is laxer."""

    floor: int = _key(  # type: ignore[assignment]  # `_key` returns a field
        5, "No number that leaves the hospitals stands for fewer than this many people, unless for nobody."
    )
    min_hospitals: int = _key(  # type: ignore[assignment]
        3, "At least this many hospitals take part: of two, each reads the other's sums."
    )
    max_numbers: int = _key(  # type: ignore[assignment]
        20_000, "A study asks for at most this many sums."
    )
    lifetime_days: int = _key(  # type: ignore[assignment]
        30, "A study ends at most this many days after its approval."
    )
    max_refusals: int = _key(  # type: ignore[assignment]
        5, "After this many refused studies in a year an author may ask nothing more."
    )
    max_epsilon: float = _key(  # type: ignore[assignment]
        math.inf, "All studies with noise together spend at most this epsilon on the same people."
    )
    authors: tuple[str, ...] | None = _key(  # type: ignore[assignment]
        None, "Only these people may ask; none listed: whomever the owner approves."
    )
    allow_code: tuple[str, ...] = _key(  # type: ignore[assignment]
        (), "Code of these other packages, by name and digest, may read records."
    )
    allow_free: bool = _key(  # type: ignore[assignment]
        False, "Studies may bring formulas of free arithmetic, given coefficients and trained models."
    )
    release: bool = _key(  # type: ignore[assignment]
        False, "This hospital's own estimate may be shown beside the others'."
    )
    reasons: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name, sentence in self.sentences().items():
            value = getattr(self, name)
            if not _has_type(name, value):
                raise InputError(f"{name}: {_EXPECTED[name]} ({sentence})")
            if self._is_laxer(name) and not self.reasons.get(name, "").strip():
                raise InputError(
                    f"{name}: {value!r} is laxer than the package's own {_default(name)!r}; give your reason "
                    f'under [policy.reasons]: {name} = "..."'
                )
        for name, reason in self.reasons.items():
            if name not in self.sentences():
                raise InputError(f"reasons: '{name}' is no key of the policy")
            if not 0 < len(reason.strip()) <= LONGEST_REASON or not reason.isprintable():
                raise InputError(f"reasons: {name} needs up to {LONGEST_REASON} characters on one line")

    @classmethod
    def sentences(cls) -> dict[str, str]:
        """Return each key and what it decides."""
        return {each.name: each.metadata["sentence"] for each in fields(cls) if each.metadata}

    @classmethod
    def read(cls, table: Mapping[str, object]) -> Policy:
        """Return the policy that a file states; `InputError` names the key."""
        keys = [*cls.sentences(), "reasons"]
        for name in table:
            if name not in keys:
                near = get_close_matches(name, keys, n=1)
                raise InputError(
                    f"policy: '{name}' is no key" + (f"; did you mean '{near[0]}'?" if near else "")
                )
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in table.items()}
        reasons = given.get("reasons", {})
        if not isinstance(reasons, Mapping) or not all(isinstance(text, str) for text in reasons.values()):
            raise InputError("reasons: expected a table with one text for each key")
        return cls(**given)  # type: ignore[arg-type]  # each is checked above

    @property
    def laxer(self) -> tuple[tuple[str, str], ...]:
        """The keys that are laxer than the package's own, with the owner's reasons, for the result."""
        return tuple((name, self.reasons[name]) for name in self.sentences() if self._is_laxer(name))

    def refuses(self, plan: Plan) -> str:
        """Return the key that a plan does not keep to, empty if it keeps to all that a plan states."""
        if plan.floor < self.floor:
            return "floor"
        if plan.min_hospitals < self.min_hospitals:
            return "min_hospitals"
        if plan.most_numbers > self.max_numbers:
            return "max_numbers"
        if self.authors is not None and plan.author not in self.authors:
            return "authors"
        return ""

    def _is_laxer(self, name: str) -> bool:
        value, default = getattr(self, name), _default(name)
        match name:
            case "floor" | "min_hospitals":
                return bool(value < default)
            case "max_numbers" | "lifetime_days" | "max_refusals" | "max_epsilon":
                return bool(value > default)
        return False  # consents: the owner's free choice


_WHOLE = "expected a whole number of at least 1"
_EXPECTED = {
    "floor": _WHOLE,
    "min_hospitals": _WHOLE,
    "max_numbers": _WHOLE,
    "lifetime_days": _WHOLE,
    "max_refusals": _WHOLE,
    "max_epsilon": "expected a number above 0",
    "authors": "expected a list of names",
    "allow_code": "expected a list of packages",
    "allow_free": "expected true or false",
    "release": "expected true or false",
}


def _has_type(name: str, value: object) -> bool:
    match _EXPECTED[name]:
        case "expected true or false":
            return isinstance(value, bool)
        case "expected a number above 0":
            return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        case expected if expected == _WHOLE:
            return isinstance(value, int) and not isinstance(value, bool) and value >= 1
    is_list = isinstance(value, tuple) and all(isinstance(each, str) and each for each in value)
    return is_list or (name == "authors" and value is None)


def _default(name: str) -> Limit:
    (found,) = (each.default for each in fields(Policy) if each.name == name)
    if found is MISSING:
        raise AssertionError(f"{name} has a default")
    return found  # type: ignore[no-any-return]  # a field's default is untyped

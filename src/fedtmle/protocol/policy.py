"""The policy of a silo's owner: floors that can only be raised, caps that can only be lowered.

The defaults are the package's own limits. A silo's file may be stricter in any key and laxer in
none, so a study cannot ask a silo to let its guard down.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple, TypeVar

from fedtmle.errors import InputError


class Direction(enum.StrEnum):
    """Which way a key may be changed."""

    FLOOR = "may only be raised"
    CAP = "may only be lowered"
    PERMIT = "may only be taken back"
    CONSENT = "the owner's free choice"


class Limit(NamedTuple):
    """One key of a policy.

    A silo may change its ``default`` in one ``direction``; ``off`` is its value where nothing is guarded.
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


def _key(direction: Direction, default: Number, off: float, meaning: str) -> Number:
    metadata = {"direction": direction, "default": default, "off": off, "meaning": meaning}
    return field(default=default, metadata=metadata)


_FLOOR, _CAP, _PERMIT, _CONSENT = Direction.FLOOR, Direction.CAP, Direction.PERMIT, Direction.CONSENT


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One silo's limits; `limits()` says what each of them means."""

    min_rows: int = _key(_FLOOR, 20, 0, "rows in the silo")
    min_arm_rows: int = _key(
        _FLOOR, 10, 0, "rows, and rows with an outcome, in each arm and stratum that the silo has"
    )
    min_missing: int = _key(_FLOOR, 1, 0, "missing outcomes in an arm, where there are any")
    min_truncated: int = _key(_FLOOR, 1, 0, "rows whose probability of an arm was truncated, if any")
    min_level_rows: int = _key(_FLOOR, 5, 0, "rows with each label of a factor that the silo names")
    min_cell: int = _key(_FLOOR, 5, 1, "people in any cell of a table shown before the study (preflight)")
    min_silos: int = _key(_FLOOR, 2, 0, "silos in the study")
    min_batch: int = _key(_FLOOR, 20, 0, "own rows in a batch; batches are a fixed partition")
    min_fold: int = _key(_FLOOR, 5, 0, "own rows in a fold of cross-fitting")
    min_support: int = _key(_FLOOR, 5, 0, "rows that enter each sum of a gradient")
    min_joint: int = _key(
        _FLOOR, 0, 0, "minimum nonzero cell of any two-way table implied by a disclosed Hessian"
    )
    min_effective: float = _key(_FLOOR, 2.0, 0.0, "effective number of rows behind each sum of a gradient")
    max_share: float = _key(_CAP, 0.65, 1.0, "largest share of one row in a sum of a gradient")
    max_queries: int = _key(_CAP, 5_000, math.inf, "queries answered in one study")
    max_functionals: int = _key(_CAP, 500_000, math.inf, "numbers told in one study")
    max_eps: float = _key(_CAP, 100.0, math.inf, "length of a fluctuation that is evaluated")
    max_path: float = _key(
        _CAP, 1_000.0, math.inf, "length of the accepted fluctuations and of the one evaluated"
    )
    max_coefficient: float = _key(_CAP, 200.0, math.inf, "size of a nuisance model's coefficients, scaled")
    max_refusals: int = _key(_CAP, 1_000, math.inf, "stray requests, after which the silo leaves the study")
    lifetime_days: float = _key(_CAP, 30.0, math.inf, "days from a study's first request to its last answer")
    allow_one_arm: bool = _key(_PERMIT, True, True, "take part when one of the arms is absent here")
    allow_models: bool = _key(_PERMIT, True, True, "send models fitted to the silo's rows alone, if asked to")
    release: bool = _key(_CONSENT, False, False, "let this silo's own estimate be shown")

    def __post_init__(self) -> None:
        for key in fields(self):
            value = getattr(self, key.name)
            if isinstance(key.default, bool):
                if not isinstance(value, bool):
                    raise InputError(f"{key.name}: expected true or false")
            elif isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
                raise InputError(f"{key.name}: expected a number of at least 0")

    @classmethod
    def unguarded(cls) -> Policy:
        """No limit at all: rows that nobody guards, such as arrays in one's own session."""
        return cls(**{limit.name: limit.off for limit in cls.limits()})  # type: ignore[arg-type]  # each of its type

    def floor(self, *keys: str) -> int:
        """Return the strictest of some floors, by their keys; 0 without any."""
        return max((getattr(self, key) for key in keys), default=0)

    @classmethod
    def parse(cls, table: Mapping[str, object]) -> tuple[Policy, dict[str, str]]:
        """Return the policy that ``table`` states, and what is wrong with each key that is not accepted."""
        known = {limit.name: limit for limit in cls.limits()}
        mistakes: dict[str, str] = {}
        accepted: dict[str, float] = {}
        for name, value in table.items():
            if name not in known:
                mistakes[name] = f"unknown key; the keys are {', '.join(known)}"
                continue
            try:
                stated = getattr(cls(**{name: value}), name)  # type: ignore[arg-type]  # it checks the type
            except InputError as error:
                mistakes[name] = str(error).partition(": ")[2]
                continue
            limit = known[name]
            if limit.is_laxer(stated):
                mistakes[name] = f"{limit.direction}: the package's own limit is {limit.default}"
            else:
                accepted[name] = stated
        return cls(**accepted), mistakes  # type: ignore[arg-type]  # each was checked above

    @classmethod
    def limits(cls) -> list[Limit]:
        """Return every key with its default, which way it may change, and what it limits."""
        return [Limit(name=key.name, **key.metadata) for key in fields(cls)]

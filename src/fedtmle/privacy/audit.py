"""The audit of a silo: for each attacked column, what is uncertain before and after its answers.

Three attackers, each with a stated prior:

* ``others`` knows every other record, and of the attacked one all but the attacked column;
* ``design`` knows every column but the attacked one, and that each of its values is in the declared range:
  a ball of joint radius rho sqrt(N_m);
* ``nothing`` knows only how such records are distributed (a sampling prior: the silo's own distribution).

At eta = 0 an answer constrains the attacker by the exact box of its rounding; at a declared noise eta the
bounds are those of thm:disclosure. All of it is computed where the rows are.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.model.types import Array, IntArray
from fedtmle.privacy.answers import Explained, Submodels, explain, single
from fedtmle.privacy.modulus import Compressed, coordinate_moduli, direction_modulus, require_at_least_zero
from fedtmle.protocol.query import AnsweredQuery, Local

ROUNDING = 2.0**-50  # of the largest term: what doubles leave open where the grid is finer than they are
LINEAR = 1e-9  # remainder over slope times rho below which an answer is linear in the column
LARGEST_ENUMERATION = 1 << 12  # values of a discrete column
SAMPLE = 20_000  # rows from which the sampling prior's covariances are taken, evenly spaced


class Attacker(enum.StrEnum):
    """What the attacker knows before the first answer."""

    OTHERS = "others"
    DESIGN = "design"
    NOTHING = "nothing"


@final
@dataclass(frozen=True, kw_only=True)
class Continuous:
    """A numeric column, each value known beforehand within ``radius`` (half the declared range)."""

    name: str
    radius: float
    values: Array  # (N,); NaN where missing: such records are not attacked
    move: Callable[[Any, float], Any]  # rows with the column moved by an amount


@final
@dataclass(frozen=True, kw_only=True)
class Discrete:
    """A column of few values: ``assign(rows, k)`` gives every record its k-th."""

    name: str
    levels: tuple[float, ...]  # phi of each value
    truth: IntArray  # (N,): which value each record has; -1 where missing
    assign: Callable[[Any, int], Any]


AttackedColumn = Continuous | Discrete


@final
@dataclass(frozen=True, kw_only=True)
class ColumnRisk:
    """One column against one attacker. Arrays hold one entry per attacked record.

    ``prior`` and ``after`` are half-widths of the interval that is left (standard deviations for a sampling
    prior). ``noisy`` bounds, from below and above, the best attack's error at the declared noise.
    ``mean`` is the same for the column's mean, where the attacker does not know all of it beforehand.
    """

    column: str
    attacker: Attacker
    discrete: bool
    prior: float
    after: Array
    noisy: tuple[Array, Array] | None
    mean_prior: float | None = None
    mean_after: float | None = None
    mean_noisy: float | None = None


@final
@dataclass(frozen=True, kw_only=True)
class Audit:
    """All findings, and what they rest on."""

    n_rows: int
    answers: int  # queries audited
    numbers: int  # numbers in them
    labels: dict[str, int]  # queries by kind
    uncovered: dict[str, int]  # queries that are no sums over rows, by kind
    noise: float
    findings: tuple[ColumnRisk, ...]


@dataclass
class _Tally:
    """What is gathered of one column over the answers."""

    low: Array
    high: Array
    slope: Array  # sum of squared derivatives: ||a_i||^2
    bend: Array  # sum of squared remainders at +- rho, the larger side
    straight: Array  # sum of squared derivatives of the numbers that are linear in the column
    block: Compressed
    consistent: Array = field(default_factory=lambda: np.zeros((0, 0), dtype=bool))
    apart: Array = field(default_factory=lambda: np.zeros((0, 0, 0)))


def audit(
    answered: Sequence[AnsweredQuery],
    local: Local,
    rows: Any,
    columns: Sequence[AttackedColumn],
    *,
    attackers: Sequence[Attacker] = tuple(Attacker),
    noise: float = 0.0,
    progress: Callable[[int], None] | None = None,
) -> Audit:
    """What ``answered`` lets each attacker know of each column; nothing here leaves the silo."""
    require_at_least_zero(noise=noise)
    N = local.n_rows
    tallies = {column.name: _start(column, N) for column in columns}
    assigned = {column.name: _assigned(column, rows) for column in columns}
    sampled = np.arange(0, N, max(1, math.ceil(N / SAMPLE)))
    spanned = Compressed(len(sampled))
    labels: dict[str, int] = {}
    uncovered: dict[str, int] = {}
    numbers = 0
    submodels = Submodels()
    for done, asked in enumerate(single(answered)):
        explained = explain(asked, local, rows, submodels)
        if explained is None:
            kind = type(asked.query).__name__.removesuffix("Query").lower()
            uncovered[kind] = uncovered.get(kind, 0) + 1
            continue
        labels[explained.label] = labels.get(explained.label, 0) + 1
        numbers += len(explained.box)
        terms = explained.terms(rows)
        if Attacker.NOTHING in attackers:
            own = terms[:, sampled]
            own = own - own.mean(axis=1, keepdims=True)
            size = np.sqrt((own**2).mean(axis=1, keepdims=True))
            spanned.add(
                np.divide(
                    own, size, out=np.zeros_like(own), where=size > 1e-12 * (np.abs(terms).max() + 1e-300)
                )
            )
        for column in columns:
            _book(column, tallies[column.name], assigned[column.name], explained, terms, rows, N, noise)
        if progress is not None:
            progress(done + 1)
    findings = [
        finding
        for column in columns
        for attacker in attackers
        if (finding := _finding(column, attacker, tallies[column.name], spanned, sampled, N, noise))
        is not None
    ]
    return Audit(
        n_rows=N,
        answers=sum(labels.values()),
        numbers=numbers,
        labels=labels,
        uncovered=uncovered,
        noise=noise,
        findings=tuple(findings),
    )


def _start(column: AttackedColumn, N: int) -> _Tally:
    tally = _Tally(
        low=np.full(N, -math.inf),
        high=np.full(N, math.inf),
        slope=np.zeros(N),
        bend=np.zeros(N),
        straight=np.zeros(N),
        block=Compressed(N),
    )
    if isinstance(column, Continuous):
        if not (math.isfinite(column.radius) and column.radius > 0):
            raise InputError(
                f"attribute: '{column.name}' needs a finite range before the answers; give a radius"
            )
        tally.low, tally.high = np.full(N, -column.radius), np.full(N, column.radius)
    else:
        count = len(column.levels)
        if count > LARGEST_ENUMERATION:
            raise InputError(f"attribute: '{column.name}' has more than {LARGEST_ENUMERATION} values")
        tally.consistent = np.ones((count, N), dtype=bool)
        tally.apart = np.zeros((count, count, N))
    return tally


def _assigned(column: AttackedColumn, rows: Any) -> tuple[Any, ...]:
    if isinstance(column, Continuous):
        return (column.move(rows, column.radius), column.move(rows, -column.radius))
    return tuple(column.assign(rows, k) for k in range(len(column.levels)))


def _book(
    column: AttackedColumn,
    tally: _Tally,
    assigned: tuple[Any, ...],
    explained: Explained,
    terms: Array,
    rows: Any,
    N: int,
    noise: float,
) -> None:
    box = np.maximum(explained.box, ROUNDING * np.abs(terms).max(axis=1))[:, None]
    residual = explained.residual[:, None]
    if isinstance(column, Continuous):
        slope = explained.tangents(rows, column.name) / N
        # Each number leaves |residual + slope * delta| <= box.
        with np.errstate(divide="ignore", invalid="ignore"):
            ends = np.stack([(-box - residual) / slope, (box - residual) / slope])
        ends = np.where(slope[None] == 0, np.array([-math.inf, math.inf])[:, None, None], ends)
        tally.low = np.maximum(tally.low, ends.min(axis=0).max(axis=0))
        tally.high = np.minimum(tally.high, ends.max(axis=0).min(axis=0))
        tally.slope += (slope**2).sum(axis=0)
        tally.block.add(slope)
        if noise > 0:
            rest = [
                np.abs((explained.terms(there) - terms) / N - sign * column.radius * slope)
                for there, sign in zip(assigned, (1.0, -1.0), strict=True)
            ]
            tally.bend += np.maximum(*((side**2).sum(axis=0) for side in rest))
            straight = np.maximum(*rest) <= LINEAR * column.radius * np.abs(slope)
            tally.straight += np.where(straight, slope**2, 0.0).sum(axis=0)
        return
    candidates = [explained.terms(there) for there in assigned]
    for k, own in enumerate(candidates):
        change = (own - terms) / N
        tally.consistent[k] &= (np.abs(residual + change) <= box).all(axis=0)
        for other in range(k):
            tally.apart[other, k] += (((own - candidates[other]) / N) ** 2).sum(axis=0)
    if len(candidates) == 2:
        tally.block.add((candidates[1] - candidates[0]) / N)


def _finding(
    column: AttackedColumn,
    attacker: Attacker,
    tally: _Tally,
    spanned: Compressed,
    sampled: IntArray,
    N: int,
    noise: float,
) -> ColumnRisk | None:
    if attacker is Attacker.NOTHING:
        return _sampling(column, spanned, sampled, N)
    if attacker is Attacker.DESIGN:
        return _design(column, tally, noise)
    return _others(column, tally, noise)


def _others(column: AttackedColumn, tally: _Tally, noise: float) -> ColumnRisk:
    if isinstance(column, Continuous):
        there = ~np.isnan(column.values)
        after = 0.5 * np.maximum(0.0, tally.high - tally.low)[there]
        a, b = np.sqrt(tally.slope[there]), np.sqrt(tally.bend[there]) / column.radius**2
        noisy = None
        if noise > 0:
            with np.errstate(divide="ignore", invalid="ignore"):
                # The widest rho' with a rho' + b rho'^2 <= eta: both candidates then give one transcript.
                widest = 2 * noise / (a + np.sqrt(a**2 + 4 * noise * b))
                decoded = np.where(a > 0, (noise + b * column.radius**2) / a, math.inf)
                # An attack may leave out the answers that bend.
                straight = np.where(
                    tally.straight[there] > 0, noise / np.sqrt(tally.straight[there]), math.inf
                )
            noisy = (
                np.minimum(column.radius, np.where(a + b > 0, widest, math.inf)),
                np.minimum(column.radius, np.minimum(decoded, straight)),
            )
        return ColumnRisk(
            column=column.name,
            attacker=Attacker.OTHERS,
            discrete=False,
            prior=column.radius,
            after=after,
            noisy=noisy,
        )
    levels = np.array(column.levels)
    there = column.truth >= 0
    # What is left are the values that would have given the very same numbers; the true one always does.
    spread = np.where(tally.consistent, levels[:, None], np.nan)[:, there]
    after = 0.5 * (np.nanmax(spread, axis=0) - np.nanmin(spread, axis=0))
    noisy = None
    if noise > 0:
        risk = np.zeros(int(there.sum()))
        for k in range(len(levels)):
            for other in range(k):
                hidden = np.sqrt(tally.apart[other, k][there]) <= 2 * noise
                risk = np.maximum(risk, np.where(hidden, abs(levels[k] - levels[other]) / 2, 0.0))
        noisy = (risk, risk)
    return ColumnRisk(
        column=column.name,
        attacker=Attacker.OTHERS,
        discrete=True,
        prior=float(np.ptp(levels)) / 2,
        after=after,
        noisy=noisy,
    )


def _design(column: AttackedColumn, tally: _Tally, noise: float) -> ColumnRisk | None:
    """A ball of joint radius rho sqrt(N_m); two values are the ends of such a range."""
    if isinstance(column, Continuous):
        radius, scale, there = column.radius, 1.0, ~np.isnan(column.values)
    elif len(column.levels) == 2:
        scale = abs(column.levels[1] - column.levels[0])
        radius, there = 0.5, column.truth >= 0
    else:
        return None
    joint = radius * math.sqrt(int(there.sum()))
    share = there / there.sum()

    def left(eta: float) -> Array:
        found = np.minimum(radius, coordinate_moduli(tally.block, radius=joint, noise=eta)[there])
        if isinstance(column, Discrete):  # either value, or one: half a step cannot be told from none
            found = np.where(found >= radius * (1 - 1e-9), radius, 0.0)
        return scale * found

    exact = left(0.0)
    noisy = None
    if noise > 0:
        at = left(noise)
        noisy = (at, at)
    return ColumnRisk(
        column=column.name,
        attacker=Attacker.DESIGN,
        discrete=isinstance(column, Discrete),
        prior=radius * scale,
        after=exact,
        noisy=noisy,
        mean_prior=radius * scale,
        mean_after=scale * direction_modulus(tally.block, share, radius=joint, noise=0.0),
        mean_noisy=scale * direction_modulus(tally.block, share, radius=joint, noise=noise)
        if noise > 0
        else None,
    )


def _sampling(column: AttackedColumn, spanned: Compressed, sampled: IntArray, N: int) -> ColumnRisk:
    """Best linear prediction: of the column's mean R^2 is known, of one record R^2/N_m."""
    if isinstance(column, Continuous):
        phi = column.values[sampled]
    else:
        phi = np.where(column.truth >= 0, np.array(column.levels)[column.truth], np.nan)[sampled]
    phi = np.where(np.isnan(phi), np.nanmean(phi), phi)
    centred = phi - phi.mean()
    total = float(centred @ centred)
    _, right = spanned.basis()
    explained = float(((right @ centred) ** 2).sum()) / total if total > 0 else 0.0
    explained = min(1.0, explained)
    if explained > 1 - 1e-9:  # a column that the answers sum: its mean is what they say
        explained = 1.0
    sd = math.sqrt(total / len(phi))
    return ColumnRisk(
        column=column.name,
        attacker=Attacker.NOTHING,
        discrete=isinstance(column, Discrete),
        prior=sd,
        after=np.array([sd * math.sqrt(1 - explained / N)]),
        noisy=None,
        mean_prior=sd / math.sqrt(N),
        mean_after=sd / math.sqrt(N) * math.sqrt(1 - explained),
    )

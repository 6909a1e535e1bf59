"""The audit of a silo: what stays uncertain of each attacked column after its answers, and a limit on that.

Three attackers, each with a stated prior:

* ``others`` knows every other record, and of the attacked one all but the attacked column;
* ``design`` knows every column but the attacked one, and that each of its values is in the declared range:
  a ball of joint radius rho sqrt(N_m);
* ``nothing`` knows only how such records are distributed (a sampling prior: the silo's own distribution).

At eta = 0 an answer constrains the attacker by the exact box of its rounding; at a declared noise eta the
bounds are those of thm:disclosure. All of it is computed where the rows are.

A limit refuses the query after which a named
attribute would be known too well.
"""

from __future__ import annotations

import enum
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeAlias, TypeVar, final

import numpy as np

from fedtmle.errors import InputError
from fedtmle.privacy.answers import Explained, Submodels, explain, single
from fedtmle.protocol.query import AnsweredQuery, Local, Query
from fedtmle_core.types import Array, Bools, IntArray

# The design modulus omega_A(eta) of many attributes at once, A the Jacobian of the answers (S.2.5).
#
# omega_A(eta) = max c . u over ||u|| <= rho, ||A u|| <= eta. Its spectral form is the root of
#
#     min over lambda of (rho^2 + lambda eta^2) c^T (I + lambda A^T A)^-1 c    eq:proof-modulus-spectrum
#
# and depends on the singular values and right singular vectors of A alone. lambda = infinity where c is in
# the range of A^T and the ball does not bind; eta = 0 and singular A are the limits that the paper takes.
# `Compressed` keeps a block with hundreds of rows and a hundred thousand columns as its few directions.

BISECTIONS = 64  # bisection steps in log lambda: the error is far below double precision
REACH = 100.0  # larger values of log(lambda s^2) count as infinite
BUFFER = 48  # rows collected before each reduction
CLOSE = 1e-6  # a smaller squared distance from the span is computed from the difference vector
NEW_DIRECTION = 1e-9  # relative to a row's norm: a smaller component outside the span is rounding error


def multipliers(singular: Array, inside: Array, outside: Array, *, radius: float, noise: float) -> Array:
    """Return lambda for each attribute: rows of ``inside`` (k, r), kernel parts of norm ``outside`` (k,).

    At the minimum eta^2 ||k||^2 = rho^2 ||A k||^2; the ratio ||A k||^2/||k||^2 falls as lambda grows.
    """
    count = len(inside)
    if noise == 0 or not len(singular):
        return np.full(count, math.inf if noise == 0 else 0.0)
    if radius == 0:
        return np.zeros(count)
    s2, c2, p2 = singular**2, inside**2, outside**2
    ratio = (noise / radius) ** 2
    low = np.full(count, -math.log(s2[0]) - REACH)
    high = np.full(count, -math.log(s2[-1]) + REACH)

    def exceeds(log_lambda: Array) -> Array:
        k2 = c2 / (1 + np.exp(log_lambda)[:, None] * s2) ** 2
        return np.asarray(k2 @ s2 > ratio * (k2.sum(axis=1) + p2))

    binding, endless = exceeds(np.full(count, -np.inf)), exceeds(high)
    for _ in range(BISECTIONS):
        middle = 0.5 * (low + high)
        above = exceeds(middle)
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.where(endless, math.inf, np.where(binding, np.exp(0.5 * (low + high)), 0.0))


def values(
    singular: Array, inside: Array, outside: Array, lam: Array | float, *, radius: float, noise: float
) -> Array:
    """Return [(rho^2 + lambda eta^2) c^T (I + lambda A^T A)^-1 c]^1/2 for each attribute.

    eq:proof-modulus-spectrum.
    """
    lam = np.broadcast_to(np.asarray(lam, dtype=np.float64), (len(inside),))
    finite = np.where(np.isinf(lam), 0.0, lam)
    form = (inside**2 / (1 + finite[:, None] * singular**2)).sum(axis=1) + outside**2
    ordinary = np.sqrt((radius**2 + finite * noise**2) * form)
    limit = radius * outside if noise == 0 else noise * np.sqrt((inside**2 / singular**2).sum(axis=1))
    return np.asarray(np.where(np.isinf(lam), limit, ordinary))


def require_at_least_zero(**arguments: float) -> None:
    """Raise `InputError` unless each argument is a finite number of at least zero."""
    for name, value in arguments.items():
        if not (math.isfinite(value) and value >= 0):
            raise InputError(f"{name}: expected a finite number of at least 0, not {value}")


@final
class Compressed:
    """A = S V with V orthonormal, row by row: omega depends on A^T A = V^T (S^T S) V alone.

    Rows that lie in the span of earlier ones, as repeated queries do, cost two thin products.
    """

    def __init__(self, columns: int) -> None:
        self._V = np.zeros((0, columns))
        self._S = np.zeros((0, 0))
        self._waiting: list[Array] = []
        self._count = 0

    def add(self, rows: Array) -> None:
        """Add rows of A; rows of zeros change nothing."""
        rows = rows[np.abs(rows).max(axis=1, initial=0.0) > 0]
        if len(rows):
            self._waiting.append(rows)
            self._count += len(rows)
        if self._count >= BUFFER:
            self._reduce()

    def basis(self) -> tuple[Array, Array]:
        """Return singular values (r,), falling, and right singular vectors (r, q)."""
        self._reduce()
        _, singular, turn = np.linalg.svd(self._S, full_matrices=False)
        positive = singular > 0
        return singular[positive], turn[positive] @ self._V

    def _reduce(self) -> None:
        if not self._count:
            return
        rows = np.concatenate(self._waiting)
        self._waiting, self._count = [], 0
        sizes = np.linalg.norm(rows, axis=1, keepdims=True)
        rest = rows / sizes
        coefficients = np.zeros((len(rows), len(self._V)))
        for _ in range(2):  # the second pass removes the component along V that rounding left
            along = rest @ self._V.T
            coefficients, rest = coefficients + along, rest - along @ self._V
        # New directions: the first pass finds the large ones, the second the small ones that they hid.
        for _ in range(2):
            if np.linalg.norm(rest) <= NEW_DIRECTION:  # it bounds every singular value: nothing is new
                break
            # QR instead of rest rest^T, whose small directions have large relative errors: omega of a record
            # that is known well depends on its small component outside V.
            basis, lengths = np.linalg.qr(rest.T)
            _, sizes_there, turn = np.linalg.svd(lengths.T)
            new = sizes_there > max(NEW_DIRECTION, 1e-14 * sizes_there[0])
            if not new.any():
                break
            directions = turn[new] @ basis.T
            directions = directions - (directions @ self._V.T) @ self._V
            directions = np.linalg.qr(directions.T)[0].T
            along = rest @ directions.T
            rest = rest - along @ directions
            self._V = np.concatenate([self._V, directions])
            coefficients = np.concatenate([coefficients, along], axis=1)
        before = np.pad(self._S, ((0, 0), (0, len(self._V) - self._S.shape[1])))
        self._S = np.asarray(np.linalg.qr(np.concatenate([before, coefficients * sizes]), mode="r"))


def coordinate_moduli(block: Compressed, *, radius: float, noise: float, chunk: int = 20_000) -> Array:
    """Return omega_A(eta) of every single coordinate at once, shape (q,)."""
    singular, right = block.basis()
    moduli = []
    for start in range(0, right.shape[1], chunk):
        inside = np.ascontiguousarray(right[:, start : start + chunk].T)
        squares = np.maximum(0.0, 1.0 - (inside**2).sum(axis=1))
        for k in np.flatnonzero(squares < CLOSE):  # 1 - |inside|^2 has cancelled
            rest = -(inside[k] @ right)
            rest[start + k] += 1.0
            squares[k] = rest @ rest
        outside = np.sqrt(squares)
        lam = multipliers(singular, inside, outside, radius=radius, noise=noise)
        moduli.append(values(singular, inside, outside, lam, radius=radius, noise=noise))
    return np.concatenate(moduli)


def direction_modulus(block: Compressed, c: Array, *, radius: float, noise: float) -> float:
    """Return omega_A(eta) of one attribute's gradient c, (q,)."""
    singular, right = block.basis()
    inside = right @ c
    outside = np.array([float(np.linalg.norm(c - right.T @ inside))])
    lam = multipliers(singular, inside[None, :], outside, radius=radius, noise=noise)
    return float(values(singular, inside[None, :], outside, lam, radius=radius, noise=noise)[0])


ROUNDING = 2.0**-50  # relative to the largest term: rounding of doubles, where the grid is finer than that
LINEAR = 1e-9  # remainder over slope times rho below which an answer is linear in the column
LARGEST_ENUMERATION = 1 << 12  # values of a discrete column
SAMPLE = 20_000  # rows from which the sampling prior's covariances are taken, evenly spaced

Rows = TypeVar("Rows")


class Attacker(enum.StrEnum):
    """What the attacker knows before the first answer."""

    OTHERS = "others"
    DESIGN = "design"
    NOTHING = "nothing"


@final
@dataclass(frozen=True, kw_only=True)
class Continuous(Generic[Rows]):
    """A numeric column, each value known beforehand within ``radius`` (half the declared range)."""

    name: str
    radius: float
    values: Array  # (N,); NaN where missing: such records are not attacked
    move: Callable[[Rows, float], Rows]  # rows with the column moved by an amount


@final
@dataclass(frozen=True, kw_only=True)
class Discrete(Generic[Rows]):
    """A column of few values; ``assign(rows, k)`` gives every record the k-th value."""

    name: str
    levels: tuple[float, ...]  # phi of each value
    truth: IntArray  # (N,): which value each record has; -1 where missing
    assign: Callable[[Rows, int], Rows]


AttackedColumn: TypeAlias = Continuous[Rows] | Discrete[Rows]


@final
@dataclass(frozen=True, kw_only=True)
class ColumnRisk:
    """The risk of one column against one attacker. Arrays hold one entry per attacked record.

    ``prior`` and ``after`` are half-widths of the interval that the attacker cannot exclude (standard
    deviations for a sampling prior), before and after the answers. ``noisy`` bounds, from below and above,
    the best attack's error at the declared noise. ``mean_prior``, ``mean_after`` and ``mean_noisy`` are the
    same for the column's mean, unless the attacker knows all of it beforehand.
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
    """The risk of every column against every attacker, and the answers that it rests on."""

    n_rows: int
    answers: int  # queries audited
    numbers: int  # numbers in them
    labels: dict[str, int]  # queries by kind
    uncovered: dict[str, int]  # queries that are no sums over rows, by kind
    noise: float
    findings: tuple[ColumnRisk, ...]


def audit(
    answered: Sequence[AnsweredQuery],
    local: Local,
    rows: Rows,
    columns: Sequence[AttackedColumn[Rows]],
    *,
    attackers: Sequence[Attacker] = tuple(Attacker),
    noise: float = 0.0,
    progress: Callable[[int], None] | None = None,
) -> Audit:
    """Return what ``answered`` discloses about each column to each attacker; nothing leaves the silo.

    ``rows`` are the silo's rows, and ``local`` are the same rows as a query sees them; ``noise`` is the
    declared norm of all errors together; ``progress`` is called with the number of answers done.
    """
    require_at_least_zero(noise=noise)
    N = local.n_rows
    tallies = [_tally(column, rows, N) for column in columns]
    sampled = np.arange(0, N, max(1, math.ceil(N / SAMPLE)))
    span = Compressed(len(sampled))  # the span of the answers' terms over the sampled rows
    labels: dict[str, int] = {}
    uncovered: dict[str, int] = {}
    numbers = 0
    submodels = Submodels()
    for done, asked in enumerate(single(answered)):
        explained = explain(asked, local, rows, submodels)
        if explained is None:
            name = type(asked.query).__name__.removesuffix("Query")
            kind = re.sub(r"(?<!^)([A-Z])", r" \1", name).lower()
            uncovered[kind] = uncovered.get(kind, 0) + 1
            continue
        labels[explained.label] = labels.get(explained.label, 0) + 1
        numbers += len(explained.box)
        terms = explained.terms(rows)
        if Attacker.NOTHING in attackers:
            centred = terms[:, sampled]
            centred = centred - centred.mean(axis=1, keepdims=True)
            size = np.sqrt((centred**2).mean(axis=1, keepdims=True))
            varies = size > 1e-12 * (np.abs(terms).max() + 1e-300)
            span.add(np.divide(centred, size, out=np.zeros_like(centred), where=varies))
        for tally in tallies:
            tally.add(explained, terms, rows, noise)
        if progress is not None:
            progress(done + 1)
    findings = []
    for tally in tallies:
        for attacker in attackers:
            if attacker is Attacker.NOTHING:
                findings.append(tally.sampling(span, sampled))
            elif attacker is Attacker.OTHERS:
                findings.append(tally.others(noise))
            elif (finding := tally.design(noise)) is not None:
                findings.append(finding)
    return Audit(
        n_rows=N,
        answers=sum(labels.values()),
        numbers=numbers,
        labels=labels,
        uncovered=uncovered,
        noise=noise,
        findings=tuple(findings),
    )


class _AbstractTally(ABC, Generic[Rows]):
    """The disclosure about one column by the answers so far."""

    is_discrete: ClassVar[bool]

    def __init__(self, name: str, N: int) -> None:
        self.name, self.N = name, N
        self.block = Compressed(N)

    @property
    @abstractmethod
    def phi(self) -> Array:
        """The attacked number of each record, NaN where missing."""

    @abstractmethod
    def add(self, explained: Explained, terms: Array, rows: Rows, noise: float) -> None:
        """Add one answer; ``terms`` are its terms at the true rows."""

    @abstractmethod
    def others(self, noise: float) -> ColumnRisk:
        """Return the risk if the attacker knows every other record."""

    @abstractmethod
    def design(self, noise: float) -> ColumnRisk | None:
        """Return the risk if the attacker knows every other column; None if it is not computed."""

    def sampling(self, span: Compressed, sampled: IntArray) -> ColumnRisk:
        """Return the risk of the best linear prediction.

        It explains R^2 of the variance of the column's mean, and R^2/N_m of that of one record.
        """
        phi = self.phi[sampled]
        phi = np.where(np.isnan(phi), np.nanmean(phi), phi)
        centred = phi - phi.mean()
        total = float(centred @ centred)
        _, right = span.basis()
        explained = float(((right @ centred) ** 2).sum()) / total if total > 0 else 0.0
        explained = min(1.0, explained)
        if explained > 1 - 1e-9:  # the column is in the span: the answers determine its mean
            explained = 1.0
        sd = math.sqrt(total / len(phi))
        return ColumnRisk(
            column=self.name,
            attacker=Attacker.NOTHING,
            discrete=self.is_discrete,
            prior=sd,
            after=np.array([sd * math.sqrt(1 - explained / self.N)]),
            noisy=None,
            mean_prior=sd / math.sqrt(self.N),
            mean_after=sd / math.sqrt(self.N) * math.sqrt(1 - explained),
        )

    def _ball(self, radius: float, scale: float, noise: float) -> ColumnRisk:
        """Return the risk in a ball of joint radius rho sqrt(N_m); ``scale`` turns it into units of phi."""
        present = ~np.isnan(self.phi)
        joint = radius * math.sqrt(int(present.sum()))
        share = present / present.sum()

        def record(eta: float) -> Array:
            omega = np.minimum(radius, coordinate_moduli(self.block, radius=joint, noise=eta)[present])
            if self.is_discrete:  # the attacker excludes one of two values, or neither
                omega = np.where(omega >= radius * (1 - 1e-9), radius, 0.0)
            return scale * omega

        def mean(eta: float) -> float:
            return scale * direction_modulus(self.block, share, radius=joint, noise=eta)

        return ColumnRisk(
            column=self.name,
            attacker=Attacker.DESIGN,
            discrete=self.is_discrete,
            prior=radius * scale,
            after=record(0.0),
            noisy=(record(noise), record(noise)) if noise > 0 else None,
            mean_prior=radius * scale,
            mean_after=mean(0.0),
            mean_noisy=mean(noise) if noise > 0 else None,
        )


@final
class _ContinuousTally(_AbstractTally[Rows]):
    """An interval around each value, and squared derivatives of the answers in it."""

    is_discrete = False

    def __init__(self, column: Continuous[Rows], rows: Rows, N: int) -> None:
        super().__init__(column.name, N)
        radius = column.radius
        if not (math.isfinite(radius) and radius > 0):
            raise InputError(
                f"attribute: '{column.name}' needs a finite range before the answers; give a radius"
            )
        self.column = column
        self.ends = (column.move(rows, radius), column.move(rows, -radius))
        self.low, self.high = np.full(N, -radius), np.full(N, radius)
        self.slope = np.zeros(N)  # sum of squared derivatives: ||a_i||^2
        self.bend = np.zeros(N)  # sum of squared remainders at +rho or -rho, whichever is larger
        self.straight = np.zeros(N)  # `slope` over the numbers that are linear in the column only

    @property
    def phi(self) -> Array:
        return self.column.values

    def add(self, explained: Explained, terms: Array, rows: Rows, noise: float) -> None:
        box, residual = _box(explained, terms), explained.residual[:, None]
        slope = explained.tangents(rows, self.name) / self.N
        # Each number constrains |residual + slope * delta| <= box.
        with np.errstate(divide="ignore", invalid="ignore"):
            ends = np.stack([(-box - residual) / slope, (box - residual) / slope])
        ends = np.where(slope[None] == 0, np.array([-math.inf, math.inf])[:, None, None], ends)
        self.low = np.maximum(self.low, ends.min(axis=0).max(axis=0))
        self.high = np.minimum(self.high, ends.max(axis=0).min(axis=0))
        self.slope += (slope**2).sum(axis=0)
        self.block.add(slope)
        if noise > 0:
            radius = self.column.radius
            rest = [
                np.abs((explained.terms(moved) - terms) / self.N - sign * radius * slope)
                for moved, sign in zip(self.ends, (1.0, -1.0), strict=True)
            ]
            self.bend += np.maximum(*((side**2).sum(axis=0) for side in rest))
            straight = np.maximum(*rest) <= LINEAR * radius * np.abs(slope)
            self.straight += np.where(straight, slope**2, 0.0).sum(axis=0)

    def others(self, noise: float) -> ColumnRisk:
        present, radius = ~np.isnan(self.phi), self.column.radius
        return ColumnRisk(
            column=self.name,
            attacker=Attacker.OTHERS,
            discrete=False,
            prior=radius,
            after=0.5 * np.maximum(0.0, self.high - self.low)[present],
            noisy=self._noisy(present, noise) if noise > 0 else None,
        )

    def _noisy(self, present: Bools, noise: float) -> tuple[Array, Array]:
        radius, straight = self.column.radius, self.straight[present]
        a, b = np.sqrt(self.slope[present]), np.sqrt(self.bend[present]) / radius**2
        with np.errstate(divide="ignore", invalid="ignore"):
            # The widest rho' with a rho' + b rho'^2 <= eta: both candidates then give one transcript.
            widest = 2 * noise / (a + np.sqrt(a**2 + 4 * noise * b))
            decoded = np.where(a > 0, (noise + b * radius**2) / a, math.inf)
            # An attacker may use only the answers that are linear in the column.
            by_straight = np.where(straight > 0, noise / np.sqrt(straight), math.inf)
        return (
            np.minimum(radius, np.where(a + b > 0, widest, math.inf)),
            np.minimum(radius, np.minimum(decoded, by_straight)),
        )

    def design(self, noise: float) -> ColumnRisk:
        return self._ball(self.column.radius, 1.0, noise)


@final
class _DiscreteTally(_AbstractTally[Rows]):
    """Which values would have given the same numbers, and how far apart the values' answers are."""

    is_discrete = True

    def __init__(self, column: Discrete[Rows], rows: Rows, N: int) -> None:
        super().__init__(column.name, N)
        count = len(column.levels)
        if count > LARGEST_ENUMERATION:
            raise InputError(f"attribute: '{column.name}' has more than {LARGEST_ENUMERATION} values")
        self.column = column
        self.assigned = tuple(column.assign(rows, k) for k in range(count))
        self.consistent = np.ones((count, N), dtype=bool)
        self.apart = np.zeros((count, count, N))  # squared distances

    @property
    def phi(self) -> Array:
        levels, truth = np.array(self.column.levels), self.column.truth
        return np.where(truth >= 0, levels[truth], np.nan)

    def add(self, explained: Explained, terms: Array, rows: Rows, noise: float) -> None:  # noqa: ARG002
        box, residual = _box(explained, terms), explained.residual[:, None]
        candidates = [explained.terms(moved) for moved in self.assigned]
        for k, candidate in enumerate(candidates):
            change = (candidate - terms) / self.N
            self.consistent[k] &= (np.abs(residual + change) <= box).all(axis=0)
            for other in range(k):
                self.apart[other, k] += (((candidate - candidates[other]) / self.N) ** 2).sum(axis=0)
        if len(candidates) == 2:
            self.block.add((candidates[1] - candidates[0]) / self.N)

    def others(self, noise: float) -> ColumnRisk:
        levels = np.array(self.column.levels)
        present = self.column.truth >= 0
        # The values that remain would have given the very same numbers; the true one always does.
        remaining = np.where(self.consistent, levels[:, None], np.nan)[:, present]
        noisy = None
        if noise > 0:
            risk = np.zeros(int(present.sum()))
            for k in range(len(levels)):
                for other in range(k):
                    hidden = np.sqrt(self.apart[other, k][present]) <= 2 * noise
                    risk = np.maximum(risk, np.where(hidden, abs(levels[k] - levels[other]) / 2, 0.0))
            noisy = (risk, risk)
        return ColumnRisk(
            column=self.name,
            attacker=Attacker.OTHERS,
            discrete=True,
            prior=float(np.ptp(levels)) / 2,
            after=0.5 * (np.nanmax(remaining, axis=0) - np.nanmin(remaining, axis=0)),
            noisy=noisy,
        )

    def design(self, noise: float) -> ColumnRisk | None:
        """Return the risk of a column of two values, the ends of a range; None for more."""
        if len(self.column.levels) != 2:
            return None
        low, high = self.column.levels
        return self._ball(0.5, abs(high - low), noise)


def _tally(column: AttackedColumn[Rows], rows: Rows, N: int) -> _AbstractTally[Rows]:
    if isinstance(column, Continuous):
        return _ContinuousTally(column, rows, N)
    return _DiscreteTally(column, rows, N)


def _box(explained: Explained, terms: Array) -> Array:
    """Return the rounding error of each number, shape (p, 1), at least that of doubles."""
    return np.asarray(np.maximum(explained.box, ROUNDING * np.abs(terms).max(axis=1))[:, None])


@final
@dataclass(frozen=True, kw_only=True)
class LimitedAttribute:
    """A named attribute by its gradient c at a public centre, and how well an attacker knows the data: rho.

    Without a gradient the attribute is the value of each record, and the record known best counts.
    """

    name: str
    gradient: Array | None  # c, (q,)
    radius: float


@final
@dataclass(frozen=True, kw_only=True)
class DisclosureLimit:
    """A part of a silo's policy: no answer may bring omega of an attribute below ``smallest_omega``.

        jacobian = at_centre(centre, rows, "outcome")
        limit = DisclosureLimit(
            attributes=(...), smallest_omega=0.5, noise=0.01, records=len(rows), jacobian=jacobian
        )
        meter = limit.meter()               # one per session
        name = meter.admit(query)           # before each answer
        if name is not None: refuse         # a refusal ends the run and is charged

    ``jacobian`` gives the response Jacobian of a query, (m, q), at a *public* centre of q ``records``, or
    None if the audit does not cover the answer: a refusal must not depend on the silo's own records.
    ``noise`` is the declared norm of all errors together; at 0 an attribute that any answer determines
    exactly has omega 0.
    """

    attributes: tuple[LimitedAttribute, ...]
    smallest_omega: float
    noise: float
    records: int
    jacobian: Callable[[Query], Array | None]

    def __post_init__(self) -> None:
        require_at_least_zero(smallest_omega=self.smallest_omega, noise=self.noise)
        if not self.attributes:
            raise InputError("attributes: expected at least one")

    def meter(self) -> AttributeMeter:
        """Return the meter of a new session."""
        return AttributeMeter(self)


@final
class AttributeMeter:
    """The disclosure of one session's answers together, from the Jacobians of all admitted queries."""

    def __init__(self, limit: DisclosureLimit) -> None:
        self._limit = limit
        self._block = Compressed(limit.records)

    def admit(self, query: Query) -> str | None:
        """Count ``query`` in; return the first attribute that its answer brings below the limit, or None."""
        jacobian = self._limit.jacobian(query)
        if jacobian is None:
            return None
        self._block.add(jacobian)
        smallest = self._limit.smallest_omega
        return next((name for name, omega in self.omega().items() if omega < smallest), None)

    def omega(self) -> dict[str, float]:
        """Return omega_A(eta) of every attribute after the queries admitted so far."""
        return {attribute.name: self._omega(attribute) for attribute in self._limit.attributes}

    def _omega(self, attribute: LimitedAttribute) -> float:
        c, rho, eta = attribute.gradient, attribute.radius, self._limit.noise
        if c is None:
            return float(coordinate_moduli(self._block, radius=rho, noise=eta).min())
        return direction_modulus(self._block, c, radius=rho, noise=eta)


def at_centre(centre: Local, rows: object, name: str) -> Callable[[Query], Array | None]:
    """Return the Jacobian of a query's answer in coordinate ``name`` of every record, at public ``rows``.

    ``centre`` are the same rows as a query sees them.
    """
    submodels = Submodels()

    def jacobian(query: Query) -> Array | None:
        asked = single([AnsweredQuery(query=query, answer=query.answer(centre))])
        explained = [explain(one, centre, rows, submodels) for one in asked]
        blocks = [one.tangents(rows, name) / centre.n_rows for one in explained if one is not None]
        return np.concatenate(blocks) if blocks else None

    return jacobian

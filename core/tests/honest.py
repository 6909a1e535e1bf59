"""How many honest studies the judgement refuses, at which grid: ``python honest.py [--studies 500]``.

A study has 500 to 5,000 people in six hospitals of unequal size and 11 to 21 columns: an intercept, numbers
of which some are skewed and logged, indicators of which some are rare, a factor, sometimes products and
squares. Treatment and outcome depend on them; outcomes are binary, often rare, or continuous; some are lost.
The judged columns are those of `Judged`: every column times every response of the study.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fedtmle_core.judgement import Name, Outcome, counts, gram, verdict_of_counts, verdict_of_gram
from fedtmle_core.span import COARSE, FINE, Array, Layout, Pooled

SEED = 39
say = sys.stdout.write
HOSPITALS = 6
ENOUGH = 10  # people behind every column of every compared group
PER_COLUMN = 5  # people per column in the smallest group


@dataclass
class Rows:
    """Judged columns of one hospital, as the judgement reads them."""

    names: tuple[Name, ...]
    values: Array
    piece: int = 700

    def pieces(self) -> Iterator[Array]:
        for first in range(0, self.values.shape[1], self.piece):
            yield self.values[:, first : first + self.piece]


class Study(NamedTuple):
    """Columns of everybody, the responses that they are multiplied by, the compared groups, and the
    hospitals."""

    columns: dict[str, Array]
    responses: dict[str, Array]
    groups: dict[str, Array]
    hospital: Array

    def products(self) -> Iterator[tuple[Name, Array]]:
        for group, response in self.responses.items():
            for column, x in self.columns.items():
                if column != "a" or group not in ("", "arm 1"):  # both are the intercept's product with a
                    yield Name(column, group), response * x

    def of_groups(self) -> Iterator[tuple[Name, Array]]:
        for group, inside in self.groups.items():
            for column, x in self.columns.items():
                yield Name(column, group), inside * x

    def split(self, named: Iterator[tuple[Name, Array]]) -> list[Rows]:
        names, values = zip(*named, strict=True)
        whole = np.stack(values)
        return [Rows(names, whole[:, self.hospital == m]) for m in range(HOSPITALS)]

    @property
    def least(self) -> int:
        """People behind the rarest column of any group."""
        found = [int((v != 0).sum()) for _, v in self.of_groups()]
        return min(n for n in found if n)

    @property
    def per_column(self) -> float:
        """People per column in the smallest group."""
        return min(inside.sum() for inside in self.groups.values() if inside.any()) / len(self.columns)


def honest(rng: np.random.Generator) -> Study:
    n, p = int(500 * 10 ** rng.random()), int(rng.integers(11, 22))
    x: dict[str, Array] = {"1": np.ones(n)}
    common = rng.standard_normal(n)
    levels = int(rng.integers(3, 6))
    factor = rng.choice(levels, n, p=rng.dirichlet(np.full(levels, 3.0)))
    x |= {f"level {k}": (factor == k) * 1.0 for k in range(1, levels)}
    while len(x) < p:
        z = 0.4 * common + rng.standard_normal(n)
        name = f"x{len(x)}"
        match int(rng.integers(6)):
            case 0:
                x[name] = np.clip(z / 5, -1, 1)
            case 1:  # a number off the middle of its declared range, such as an age
                x[name] = np.clip((z + rng.uniform(-4, 4)) / 8, -1, 1)
            case 2:  # a skewed number, its declared logarithm
                x[name] = np.clip(z * rng.uniform(0.5, 1.5) / 6, -1, 1)
            case 3 | 4:
                x[name] = (rng.random(n) < rng.choice([0.02, 0.05, 0.1, 0.3, 0.5])) * 1.0
            case _:
                first = str(rng.choice([name for name in x if name != "1"]))
                second = str(rng.choice([name for name in x if name not in ("1", first)]))
                has_product = ":" in first + second
                if not has_product and not (first.startswith("level") and second.startswith("level")):
                    x[f"{first}:{second}"] = x[first] * x[second]
    X = np.stack(list(x.values()))
    hospital = rng.choice(HOSPITALS, n, p=rng.dirichlet(np.full(HOSPITALS, 4.0)))
    a = rng.random(n) < expit(rng.normal(0, 0.5) + rng.normal(0, 0.5, p) @ X)
    eta = rng.choice([-3.0, -2.0, -1.0, 0.0]) + rng.normal(0, 0.4, p) @ X + 0.3 * a
    y: Array = (rng.random(n) < expit(eta)) * 1.0
    is_binary = rng.random() < 0.7
    if not is_binary:
        y = np.clip((eta - eta.mean() + rng.standard_normal(n)) / rng.uniform(5, 12), -1, 1)
    seen = np.ones(n, dtype=bool)
    if rng.random() < 0.5:
        seen = rng.random(n) < expit(rng.uniform(1, 3) + rng.normal(0, 0.3, p) @ X)
    columns = dict(x)
    if rng.random() < 0.5:
        columns["a"] = a * 1.0
    responses = {"": np.ones(n), "arm 1": a * 1.0}
    groups = {"": np.ones(n), "arm 1": a & seen, "arm 0": ~a & seen}
    if not seen.all():
        responses["seen"] = seen * 1.0
        groups["lost"] = ~seen
    responses["events"] = seen * y
    if is_binary:
        groups |= {"events": seen & (y == 1), "others": seen & (y == 0)}
    groups = {name: inside * 1.0 for name, inside in groups.items()}
    return Study(columns, responses, groups, hospital)


def expit(t: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-t))


def exact_share(named: Iterator[tuple[Name, Array]]) -> float:
    """The largest share of anybody, longhand: the squared lengths of the rows of an orthonormal basis."""
    whole = np.stack([v for _, v in named])
    whole = whole[(whole != 0).any(axis=1)]
    whole /= np.sqrt((whole * whole).sum(axis=1))[:, None]
    _, sizes, basis = np.linalg.svd(whole, full_matrices=False)
    basis = basis[sizes > 1e-9 * sizes[0]]
    return float((basis * basis).sum(axis=0).max())


class Found(NamedTuple):
    least: int
    per_column: float
    by_groups: float  # the largest share within a group
    exact: float
    shares: dict[int, float]  # by bits
    outcomes: dict[int, Outcome]
    remedied: bool


def judged(study: Study, grids: tuple[int, ...]) -> Found:
    hospitals = study.split(study.products())
    pooled = [sum(own) for own in zip(*map(counts, hospitals), strict=True)]
    shares, outcomes, remedied = {}, {}, True
    for bits in (*grids, FINE):
        layout = Layout.full(len(pooled))
        own = [gram(h, pooled, bits, layout) for h in hospitals]
        total = [sum(each) for each in zip(*own, strict=True)]
        products = Pooled(numbers=total, bits=bits, hospitals=HOSPITALS, layout=layout)
        found = [verdict_of_gram(h, pooled, products) for h in hospitals]
        shares[bits] = max(v.share for v in found)
        each = {v.outcome for v in found}
        outcomes[bits] = next(o for o in (Outcome.REFUSED, Outcome.UNCLEAR, Outcome.PASSED) if o in each)
        remedied &= all(v.column and v.remedy for v in found if v.outcome is Outcome.REFUSED)
    by_groups = 0.0
    for group, inside in study.groups.items():
        by_groups = max(
            by_groups, exact_share((Name(c, group), inside * x) for c, x in study.columns.items())
        )
    return Found(
        study.least, study.per_column, by_groups, exact_share(study.products()), shares, outcomes, remedied
    )


def counted(study: Study, k: int) -> bool:
    hospitals = study.split(study.of_groups())
    pooled = [sum(own) for own in zip(*map(counts, hospitals), strict=True)]
    return verdict_of_counts(hospitals[0].names, pooled, k).passed


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--studies", type=int, default=500)
    options.add_argument("--grids", type=int, nargs="*", default=[10, 12, 14, 16, COARSE, 20, 24])
    given = options.parse_args()
    grids = tuple(given.grids)
    studies = [honest(np.random.default_rng([SEED, k])) for k in range(given.studies)]
    for k in (5, 10):
        say(f"pass counts with k = {k}: {sum(counted(s, k) for s in studies)} of {len(studies)}\n")
    found = [judged(s, grids) for s in studies]
    kinds = {
        "all": found,
        "5 behind": [f for f in found if f.least >= 5],
        "10 behind": [f for f in found if f.least >= ENOUGH],
        "10 behind, 5 per column": [f for f in found if f.least >= ENOUGH and f.per_column >= PER_COLUMN],
    }
    for name, some in kinds.items():
        say(
            f"{name}: {len(some)} studies, dominated {sum(f.exact > 0.5 for f in some)}, "
            f"by groups {sum(f.by_groups > 0.5 for f in some)}, remedied {all(f.remedied for f in some)}\n"
        )
        for bits in (*grids, FINE):
            tally = Counter(f.outcomes[bits].name for f in some)
            wrong = sum(
                (f.outcomes[bits] is Outcome.PASSED) == (f.exact > 0.5)
                for f in some
                if f.outcomes[bits] is not Outcome.UNCLEAR
            )
            ratio = [f.shares[bits] / f.exact for f in some if f.outcomes[bits] is Outcome.PASSED]
            say(
                f"  {bits} bits: {dict(tally)} wrong {wrong}; certified / exact "
                f"median {np.median(ratio or [0]):.4f}, largest {max(ratio, default=0):.3f}\n"
            )


if __name__ == "__main__":
    main()

"""How many honest studies the judgement refuses, at which grid: ``python honest.py [--studies 500]``.

A study has 500 to 5,000 people in six hospitals of unequal size and 11 to 21 columns: an intercept, numbers
of which some are skewed and logged, indicators of which some are rare, a factor, sometimes products and
squares. Treatment and outcome depend on them; outcomes are binary, often rare, or continuous; some are lost.
The judged columns are every column times every response of the study.

Of 1,000 studies (seed 39), 509 have five people behind every column and level of every compared group, and
327 have ten; of the 325 that have five people per column in the smallest group too, 11 (3.4 %) are refused, 8
of them for a product of two columns. Each of these has somebody with more than half of a combination. Nobody
else is refused: every verdict of all 1,000 is that of the rule with everybody's rows in view. With 22 bits 26
of the 325 need finer products, with 20 bits 59, with 24 bits 7. One of the 316 that pass with ten behind has
a dominated closing, and none if propensity scores are at least 0.1.

`--kinds` asks the same of the kinds of docs/honest.md.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
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
    randomised: bool = False  # the treatment model is a constant

    def products(self) -> Iterator[tuple[Name, Array]]:
        for group, response in self.responses.items():
            for column, x in self.columns.items():
                is_asked = group != "arm 1" or column == "1" or not self.randomised
                is_twice = column == "a" and group in ("", "arm 1")  # the intercept's product with a
                if is_asked and not is_twice:
                    yield Name(column, group), response * x

    def of_groups(self) -> Iterator[tuple[Name, Array]]:
        """All columns in all groups; the reference level of an indicator or a factor is a column here."""
        levels = sum(x for c, x in self.columns.items() if c in ("level 1", "level 2", "level 3", "level 4"))
        rest = {f"not {c}": 1 - x for c, x in self.columns.items() if is_indicator(x) and "level" not in c}
        for group, inside in self.groups.items():
            for column, x in {**self.columns, "level 0": 1 - levels, **rest}.items():
                yield Name(column, group), inside * x

    def closing(self, bound: float | None = None) -> Iterator[tuple[Name, Array]]:
        """What targeting and closing ask: by arm, clever covariate, its product with the residual,
        prediction."""
        X, n = np.stack([x for c, x in self.columns.items() if c != "a"]), len(self.hospital)
        a, y = self.responses["arm 1"], self.responses["events"]
        seen = self.responses.get("seen", np.ones(n))
        low = min(5.0 / (np.sqrt(n) * np.log(n)), 0.5) if bound is None else bound
        is_binary = "events" in self.groups
        unit = y if is_binary else seen * (0.5 + 0.5 * y)
        yield Name("1"), np.ones(n)
        for arm in (1.0, 0.0):
            inside = (a == arm) * seen
            g = np.clip(logistic(X, (a == arm) * 1.0, np.ones(n)) * logistic(X, seen, np.ones(n)), low, 1.0)
            prediction = np.clip(
                logistic(np.vstack([X, a]), unit, seen, at=np.vstack([X, 0 * a + arm])), 5e-4, 1
            )
            clever = inside * low / g  # over its bound 1 / low
            yield Name("clever covariate", f"arm {arm:.0f}"), clever
            yield Name("residual", f"arm {arm:.0f}"), clever * (unit - prediction)
            yield Name("prediction", f"arm {arm:.0f}"), prediction

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


# ---- The kinds of docs/honest.md, on the scale of the core ----------------------------------------------


def trial(
    rng: np.random.Generator, sizes: list[int], covariates: dict[str, Array], y: Array | None = None
) -> Study:
    """A randomised study with a continuous outcome, or a given binary one."""
    n, x = sum(sizes), {"1": np.ones(sum(sizes)), **covariates}
    a = np.concatenate([rng.permutation(np.arange(size) % 2) for size in sizes]) * 1.0
    groups = {"": np.ones(n), "arm 1": a, "arm 0": 1 - a}
    if y is None:
        y = np.clip(rng.normal(a, 1.5) / 5, -1, 1)
    else:
        groups |= {"events": y, "others": 1 - y}
    responses = {"": np.ones(n), "arm 1": a, "events": y}
    return Study({**x, "a": a}, responses, groups, np.repeat(np.arange(len(sizes)), sizes), True)


def normal(rng: np.random.Generator, n: int, columns: int, reach: float = 8.0) -> dict[str, Array]:
    return {f"w{j}": np.clip(rng.standard_normal(n) / reach, -1, 1) for j in range(columns)}


def rare(share: float, silos: int, rng: np.random.Generator) -> Study:
    n = 100 * silos
    return trial(rng, [100] * silos, normal(rng, n, 1) | {"rare": (rng.random(n) < share) * 1.0})


def many(silos: int, rng: np.random.Generator) -> Study:
    return trial(rng, [100] * silos, normal(rng, 100 * silos, 40))


def six_levels(rng: np.random.Generator) -> Study:
    f = rng.integers(0, 6, 500)
    return trial(rng, [100] * 5, {f"level {k}": (f == k) * 1.0 for k in range(1, 6)})


def costs(logged: bool, rng: np.random.Generator) -> Study:
    cost = np.minimum(1e6, rng.lognormal(8, 1.5, 500))
    scaled = (np.log(cost) - 7) / 7 if logged else 2 * cost / 1e6 - 1
    return trial(rng, [100] * 5, {"cost": np.clip(scaled, -1, 1)})


def small(rng: np.random.Generator) -> Study:
    sizes = rng.integers(20, 61, 8).tolist()
    return trial(rng, sizes, normal(rng, sum(sizes), 2))


def rare_outcome(rate: float, rng: np.random.Generator) -> Study:
    w = normal(rng, 1000, 2, 4.0)
    y = rng.random(1000) < rate * np.exp(0.3 * 4 * w["w0"])
    return trial(rng, [200] * 5, w, y * 1.0)._replace(randomised=False)


def over_time(by_period: bool, hazard: float, rng: np.random.Generator) -> Study:
    """Time to an event in eight periods; a judged column is a person's sum over periods."""
    n, periods = 1000, 8
    w = rng.standard_normal(n).clip(-4, 4)
    a = np.concatenate([rng.permutation(np.arange(200) % 2) for _ in range(5)]) * 1.0
    event, left = (rng.geometric(np.clip(rate * np.exp(0.3 * w), 0, 1)) for rate in (hazard, 0.03))
    time = np.minimum(np.minimum(event, left), periods)
    had = (event <= left) & (event <= periods)
    x: dict[str, Array] = {}
    for t in range(1, periods + 1):
        risk, now, gone = time >= t, had & (time == t), ~had & (time == t) & (left <= periods)
        for c, value in {"1": np.ones(n), "w": w / 4, "a": a}.items():
            for what, part in {"risk": risk, "event": now, "left": gone}.items():
                place = t if c == "1" or (c == "w" and by_period) else 0
                if what == "left":
                    place = 0
                key = f"{c} {what} {place}"
                x[key] = x.get(key, np.zeros(n)) + part * value / (periods if place == 0 else 1)
    groups = {"": np.ones(n), "arm 1": a, "arm 0": 1 - a, "events": had * 1.0}
    responses = {"": np.ones(n), "arm 1": a}
    both = {"1": np.ones(n), "a": a, "w": w / 4, **x}
    return Study(both, responses, groups, np.repeat(np.arange(5), 200), True)


KINDS: dict[str, Callable[[np.random.Generator], Study]] = {
    **{
        f"a {s:.0%} covariate, {m} silos of 100": partial(rare, s, m)
        for s in (0.01, 0.02, 0.05)
        for m in (5, 10)
    },
    "a factor of six levels": six_levels,
    "costs, logged": partial(costs, True),
    "costs, raw": partial(costs, False),
    **{f"40 covariates, {m} silos of 100": partial(many, m) for m in (5, 10, 20)},
    "8 silos of 20 to 60": small,
    "an outcome that 2 % have": partial(rare_outcome, 0.02),
    "an outcome that 10 % have": partial(rare_outcome, 0.1),
    **{
        f"8 periods, hazard {h:.1%}{', and w by period' if w else ''}": partial(over_time, w, h)
        for w in (False, True)
        for h in (0.005, 0.03)
    },
}


def by_kind(studies: int) -> None:
    """Say of each kind how many studies pass the counts, and how many of these are dominated."""
    for number, (name, make) in enumerate(KINDS.items()):
        each = [make(np.random.default_rng([SEED, number, k])) for k in range(studies)]
        found = [(s.least, s.per_column, exact_share(s.products())) for s in each]
        five = [share for least, _, share in found if least >= 5]
        ten = [share for least, per, share in found if least >= ENOUGH and per >= PER_COLUMN]
        say(
            f"{name}: of {len(found)}, k = 5 passes {len(five)}, of which {sum(s > 0.5 for s in five)} are "
            f"dominated; 10 behind and 5 per column {len(ten)}, {sum(s > 0.5 for s in ten)} dominated; "
            f"median share {np.median([share for *_, share in found]):.2f}\n"
        )


def is_indicator(x: Array) -> bool:
    return bool(np.isin(x, (0.0, 1.0)).all() and not x.all())


def expit(t: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-t))


def logistic(X: Array, y: Array, w: Array, at: Array | None = None) -> Array:
    """Return fitted probabilities, after a ridge that keeps separated studies finite."""
    beta = np.zeros(len(X))
    for _ in range(25):
        p = expit(np.clip(beta @ X, -30, 30))
        beta -= np.linalg.solve(
            (X * w * p * (1 - p)) @ X.T + 1e-3 * np.eye(len(X)), X @ (w * (p - y)) + 1e-3 * beta
        )
    return expit(np.clip(beta @ (X if at is None else at), -30, 30))


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
    closing: float  # the largest share in the closing terms, by the bound on g of the study
    bounded: float  # and with g at least 0.1


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
        study.least,
        study.per_column,
        by_groups,
        exact_share(study.products()),
        shares,
        outcomes,
        remedied,
        exact_share(study.closing()),
        exact_share(study.closing(0.1)),
    )


def counted(study: Study, k: int) -> bool:
    hospitals = study.split(study.of_groups())
    pooled = [sum(own) for own in zip(*map(counts, hospitals), strict=True)]
    return verdict_of_counts(hospitals[0].names, pooled, k).passed


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--studies", type=int, default=500)
    options.add_argument("--grids", type=int, nargs="*", default=[10, 12, 14, 16, COARSE, 20, 24])
    options.add_argument("--kinds", action="store_true", help="the kinds of docs/honest.md instead")
    given = options.parse_args()
    if given.kinds:
        by_kind(given.studies)
        return
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
        passed = [f for f in some if f.exact <= 0.5]
        say(
            f"  of {len(passed)} that pass, "
            f"{sum(f.closing > 0.5 for f in passed)} are dominated at the closing, "
            f"{sum(f.bounded > 0.5 for f in passed)} with g at least 0.1\n"
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

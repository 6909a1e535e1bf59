"""Bounds of shares: exact sums, the certificate against rounding, and what squares imply."""

from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from honest import honest
from scipy.optimize import linprog

from fedtmle_core.span import (
    BLOCK,
    COARSE,
    FINE,
    INVISIBLE,
    Layout,
    Pooled,
    Span,
    exact_gram,
    fixed,
    rounded_gram,
)

UNIT = Fraction(1, 1 << 60)


def rows(rng, dim=6, n=40):
    """Columns of every kind: ones, indicators, numbers near 0 or near an end, and a near combination."""
    X = [
        np.ones(n),
        (rng.permutation(n) < rng.integers(1, n)) * 1.0,
        rng.uniform(-1, 1, n),
        1e-3 * rng.uniform(-1, 1, n),
    ]
    X += [0.9 + 0.1 * rng.random(n), np.clip(0.5 * X[2] + 0.4 * X[1] + 1e-3 * rng.standard_normal(n), -1, 1)]
    return np.stack(X[:dim])


def read(v):
    return np.concatenate(list(fixed(v)), axis=1)


def people(v):
    return (v != 0).sum(axis=1).tolist()


def numbers(v, bits, counts=None):
    return rounded_gram([v], people(v) if counts is None else counts, bits, Layout.full(len(v)))


def numbers_of(v, study):
    parts = [numbers(v[:, study.hospital == m], FINE, people(v)) for m in range(6)]
    return [sum(x) for x in zip(*parts, strict=True)]


def pooled(entries, bits, hospitals=1):
    dim = int(np.sqrt(2 * len(entries)))
    return Pooled(numbers=entries, bits=bits, hospitals=hospitals, layout=Layout.full(dim))


def leverages(v):
    """Longhand: squared lengths of the rows of an orthonormal basis of the columns."""
    v = v[(v != 0).any(axis=1)]
    _, sizes, basis = np.linalg.svd(v / np.linalg.norm(v, axis=1)[:, None], full_matrices=False)
    return (basis[sizes > 1e-9] ** 2).sum(axis=0)


def test_the_gram_is_exact_however_people_are_divided():
    rng = np.random.default_rng(1)
    v = rows(rng, n=30)
    gram = exact_gram([v], len(v))
    units = [[round(Fraction(float(x)) * 2**30) for x in column] for column in v]
    for j, k, _ in Layout.full(len(v)).entries():
        assert gram[j][k] == gram[k][j] == sum(a * b for a, b in zip(units[j], units[k], strict=True))
    cut = [v[:, a:b] for a, b in pairwise([0, 1, 1, 17, 30])]
    assert exact_gram(cut, len(v)) == gram
    many = np.tile(v, (1, 2 * BLOCK // 30))
    assert exact_gram([many], len(v)) == [[2 * BLOCK // 30 * x for x in row] for row in gram]


def test_rounding_is_to_the_nearest_unit_and_ends_stay_within_reach():
    rng = np.random.default_rng(2)
    v = np.concatenate([rows(rng), np.zeros((1, 40))])
    gram, counts = exact_gram([v], len(v)), people(v)
    for bits in (4, COARSE, FINE):
        entries = numbers(v, bits)
        for j, k, lane in Layout.full(len(v)).entries():
            entry = entries[lane]
            assert abs(entry) <= 1 << bits
            exact = gram[j][k] * float(UNIT) * 2.0**bits / np.sqrt(max(counts[j] * counts[k], 1))
            assert abs(entry - exact) <= 0.5 + 2.0 ** (bits - 51)
    assert numbers(v, COARSE)[-1] == 0


@pytest.mark.parametrize("bad", [1.0 + 2.0**-40, -2.0, np.nan, np.inf])
def test_rows_beyond_their_bounds_are_an_error(bad):
    with pytest.raises(ValueError, match=r"\[-1, 1\]") as error:
        exact_gram([np.array([[0.5, bad]])], 1)
    assert str(bad) not in str(error.value)


def test_bounds_hold_whatever_the_rounding_errors_are():
    """The pooled entries are moved by half a unit of each hospital, by random signs and by the worst ones."""
    rng = np.random.default_rng(3)
    decided = tight = 0
    for _ in range(200):
        v, hospitals = rows(rng, n=int(rng.integers(12, 60))), int(rng.integers(1, 9))
        bits = int(rng.integers(8, 40))
        exact, counts = leverages(v), people(v)
        scaled = np.ldexp(v @ v.T / np.sqrt(np.outer(counts, counts)), bits)
        _, vectors = np.linalg.eigh(scaled)
        worst = np.sign(np.outer(vectors[:, 0], vectors[:, 0]))
        for signs in (worst, -worst, rng.choice([-1, 1], scaled.shape)):
            moved = [
                scaled[j, k] + 0.5 * hospitals * signs[j, k] for j, k, _ in Layout.full(len(v)).entries()
            ]
            span = Span.of(pooled([int(np.rint(x)) for x in moved], bits, hospitals + 1), counts)
            least, most = span.least(read(v)), span.most(read(v))
            assert (least <= exact * (1 + 1e-6) + 1e-9).all()
            if not span.lost.size:
                decided += 1
                assert (exact <= most * (1 + 1e-6)).all()
                tight += most.max() < 1.1 * exact.max()
    assert decided > 150
    assert tight > 60


def shared_by(v, factors):
    """A layout in which entries share a lane if their factors are the same."""
    lanes, known = [], {}
    for j, k, _ in Layout.full(len(v)).entries():
        lanes.append(known.setdefault(tuple(sorted(factors[j] + factors[k])), len(known)))
    return Layout(len(v), tuple(lanes))


@pytest.mark.parametrize("bits", [COARSE, 46])
def test_bounds_hold_where_entries_share_a_lane(bits):
    """Products of numbers differ by their fixed point, and rare columns share lanes with frequent ones."""
    rng = np.random.default_rng(10)
    tight = 0
    for _ in range(40):
        n = 300
        x, z, y = rng.uniform(-1, 1, (3, n))
        z = np.clip(x + 2.0**-9 * z, -1, 1)
        named = {"x": x, "z": z, "yx": y * x, "yz": y * z, "": np.ones(n), "y": y}
        v, layout = np.stack(list(named.values())), shared_by(named, list(named))
        assert layout.numbers < Layout.full(6).numbers
        counts, exact = people(v), leverages(np.ldexp(read(v), -30))
        signs = rng.choice([-1, 1], layout.numbers).tolist()
        sums = rounded_gram([v], counts, bits, layout)
        entries = [number + sign for number, sign in zip(sums, signs, strict=True)]
        span = Span.of(Pooled(numbers=entries, bits=bits, hospitals=4, layout=layout), counts)
        assert (span.least(read(v)) <= exact * (1 + 1e-6)).all()
        if not span.lost.size:
            assert (exact <= span.most(read(v)) * (1 + 1e-6)).all()
            tight += 1
    assert tight > 30 or bits == COARSE


def test_a_lane_of_a_rare_and_a_frequent_column_has_the_finer_scale():
    layout = shared_by(["", "a"], ["a", ""])  # (a, a) and (a, 1) differ, unless a is an indicator
    assert layout.numbers == 3
    layout = Layout(2, (0, 1, 1))  # (1, 1), (1, a), (a, a)
    assert layout.scales([900, 4]) == [900.0, 4.0]
    assert layout.scales([900, 0]) == [900.0, 0.0]
    a = (np.arange(900) < 4) * 1.0
    v = np.stack([np.ones(900), a])
    numbers = rounded_gram([v], [900, 4], 10, layout)
    assert numbers == (1024, 1024)
    matrix = Pooled(numbers=numbers, bits=10, hospitals=1, layout=layout).matrix([900, 4])[1]
    np.testing.assert_allclose(matrix, [[1.0, 1 / 15], [1 / 15, 1.0]])


def test_rounding_by_hospitals_is_within_the_bounds():
    rng = np.random.default_rng(4)
    for _ in range(50):
        v = rows(rng, dim=5, n=60)[[0, 1, 2, 4]]
        counts = people(v)
        parts = [numbers(v[:, m::5], COARSE, counts) for m in range(5)]
        span = Span.of(pooled([sum(x) for x in zip(*parts, strict=True)], COARSE, 5), counts)
        assert not span.lost.size
        assert (span.least(read(v)) <= leverages(v) * (1 + 1e-6)).all()
        assert (leverages(v) <= span.most(read(v)) * (1 + 1e-6)).all()


def test_exact_collinearities_are_lost_and_invisible_and_others_are_not():
    rng = np.random.default_rng(5)
    a, b = rng.random((2, 80)) < 0.4
    x = rng.uniform(-1, 1, 80)
    total = np.stack([np.ones(80), a & b, a & ~b, a, 0.25 * x + 0.5 * (a & b), x]) * 1.0
    span = Span.of(pooled(numbers(total, FINE), FINE), people(total))
    assert span.lost.shape[1] == 2
    assert span.beyond(read(total)).max() < INVISIBLE / 8
    assert np.allclose(span.most(read(total)), leverages(total), rtol=1e-4)
    for column, move, lost in ((3, -1.0, 1), (4, 1e-5, 1), (4, 1e-7, 2)):
        v = total.copy()
        v[column, 7] += move
        span = Span.of(pooled(numbers(v, FINE), FINE), people(v))
        assert span.lost.shape[1] == lost
        if lost == 1:
            assert span.most(read(v))[7] > 1 - 1e-6
        else:
            assert span.beyond(read(v)).argmax() == 7
            assert span.beyond(read(v))[7] == pytest.approx(1e-7, rel=0.5)
            assert span.beyond(read(v))[7] > INVISIBLE


def test_collinear_columns_of_honest_studies_are_invisible():
    """A column again, all levels beside the intercept, and a mean of two numbers, in six hospitals."""
    rng = np.random.default_rng(9)
    found = []
    for _ in range(12):
        study = honest(rng)
        x = [x for c, x in study.columns.items() if c.startswith("x") and ":" not in c]
        levels = sum(x for c, x in study.columns.items() if c.startswith("level") and ":" not in c)
        v = np.stack([x for _, x in study.products()])
        v = np.vstack(
            [v[(v != 0).any(axis=1)], study.responses["arm 1"], 1 - levels, 0.3 * x[0] + 0.6 * x[-1]]
        )
        span = Span.of(pooled(numbers_of(v, study), FINE, 6), people(v))
        assert span.lost.shape[1] >= 2
        found.append(span.beyond(read(v)).max())
    assert max(found) < INVISIBLE / 8


def test_the_remedy_is_the_column_without_which_the_share_is_least():
    rng = np.random.default_rng(6)
    for _ in range(30):
        v = rows(rng)
        span = Span.of(pooled(numbers(v, FINE), FINE), people(v))
        worst = int(span.most(read(v)).argmax())
        column, left = span.remedy(read(v)[:, worst])
        without = [leverages(np.delete(v, j, axis=0))[worst] for j in range(len(v))]
        assert without[column] == pytest.approx(min(without), rel=1e-5)
        assert left == pytest.approx(min(without), rel=1e-5)


def test_half_in_squares_implies_half_in_absolute_values():
    """The largest absolute share over all combinations is a linear program over everybody's rows."""
    rng = np.random.default_rng(7)
    near = 0
    for _ in range(25):
        v = rows(rng, dim=5, n=int(rng.integers(8, 16)))
        for i, squares in enumerate(leverages(v)):
            others = np.delete(v, i, axis=1).T
            # max c.v_i with sum_j t_j <= 1, |c.v_j| <= t_j
            n, p = others.shape
            A = np.block([[others, -np.eye(n)], [-others, -np.eye(n)], [np.zeros((1, p)), np.ones((1, n))]])
            found = linprog(
                np.r_[-v[:, i], np.zeros(n)],
                A,
                np.r_[np.zeros(2 * n), 1.0],
                bounds=[(None, None)] * p + [(0, None)] * n,
            )
            absolute = 1.0 if found.status == 3 else -found.fun / (1.0 - found.fun)
            bound = 1.0 / (1.0 + np.sqrt(max(1.0 - squares, 0.0) / squares))
            assert absolute <= bound + 1e-6
            near += 0.3 < squares < 0.5
    assert near > 20


def test_only_matrices_of_rows_are_possible():
    v = rows(np.random.default_rng(8))
    counts = people(v)
    entries = list(numbers(v, COARSE))
    assert pooled(entries, COARSE).is_possible(counts)
    assert not pooled([-x for x in entries], COARSE).is_possible(counts)
    entries[1] += 1 << COARSE
    assert not pooled(entries, COARSE).is_possible(counts)


def test_a_study_of_nobody_has_no_span():
    span = Span.of(pooled([0, 0, 0], COARSE, 3), [0, 0])
    nobody = np.zeros((2, 0))
    assert not span.live.size
    assert not span.most(nobody).size
    assert not span.beyond(nobody).size
    assert span.most(np.zeros((2, 3))).tolist() == [0.0, 0.0, 0.0]


def test_the_studies_that_are_simulated_differ():
    studies = [honest(np.random.default_rng(k)) for k in range(20)]
    assert len({len(s.hospital) for s in studies}) > 10
    assert {"lost" in s.groups for s in studies} == {True, False}

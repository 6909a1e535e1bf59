"""Random dictionaries, sheets and terms of the language, for the tests of properties."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from fedtmle_core.dictionary import Categorical, Dictionary, Identifier, Numeric
from fedtmle_core.leaves import Between, BSpline, Draw, Fold, Known, Level, Log, Number, Power, Root, Spline
from fedtmle_core.sheet import Sheet
from fedtmle_core.terms import Apply, ByCluster, Constant, Kept, Pick, Softmax, Sum, Term, product

DICTIONARY = Dictionary(
    (
        Numeric(name="x", low=-3.0, high=5.0),
        Numeric(name="age", low=18.0, high=90.0),
        Numeric(name="m", low=0.0, high=10.0),  # with missing values
        Categorical(name="a", levels=("0", "1", "2")),
        Categorical(name="s", levels=("f", "m")),  # with missing values
        Identifier(name="ward", largest=40),
    )
)


def sheet(n: int, seed: int = 0) -> Sheet:
    """Return n people whose values lie anywhere in the dictionary, its ends included."""
    rng = np.random.default_rng(seed)
    x = np.where(rng.random(n) < 0.1, rng.choice([-3.0, 5.0], n), rng.uniform(-3.0, 5.0, n))
    m = np.where(rng.random(n) < 0.2, np.nan, rng.choice([0.0, 10.0, 2.5], n))
    return Sheet.read(
        DICTIONARY,
        {"x": x, "age": rng.choice([18.0, 40.5, 90.0], n), "m": m},
        {"a": rng.integers(0, 3, n).astype(np.int16), "s": rng.integers(-1, 2, n).astype(np.int16)},
        {"ward": rng.integers(0, max(n // 8, 1), n)},
    )


LEAVES = (
    Number("x", 3),
    Number("m", 4),
    Power("x", 3, 3),
    Power("m", 4, 2),
    Log("age"),
    Root("age"),
    Spline("age", 6, (30.0, 50.0, 70.0), 0),
    BSpline("x", (0.0, 2.0), -3.0, 5.0, 3, 2),
    Level("a", 1),
    Level("s", 0),
    Known("m"),
    Known("s", is_level=True),
    Between("x", -1.0, 2.0),
    Between("m", None, 2.5),
    Fold(5, 7, "", 2),
    Fold(3, 7, "ward", 0),
    Draw(3, 1),
    Constant(0.5),
)

_factors = st.floats(-4.0, 4.0).map(lambda x: round(x, 3))


def _operations(inner: st.SearchStrategy[Term]) -> st.SearchStrategy[Term]:
    several = st.lists(inner, min_size=2, max_size=6)
    return st.one_of(
        several.flatmap(
            lambda terms: st.lists(_factors, min_size=len(terms), max_size=len(terms)).map(
                lambda factors: Sum(tuple(terms), tuple(factors))
            )
        ),
        st.tuples(inner, inner).map(lambda pair: product(*pair)),
        inner.map(lambda term: product(term, term)),
        inner.map(lambda term: Apply("expit", term)),
        inner.map(lambda term: Apply("softplus", term)),
        inner.map(lambda term: Apply("exp", Apply("clip", term, -3.0, 3.0))),
        inner.map(lambda term: Apply("logit", Apply("clip", Apply("expit", term), 0.01, 0.99))),
        inner.map(lambda term: Apply("log", Apply("clip", term, 0.25, 8.0))),
        inner.map(lambda term: Apply("inverse", term, 0.05)),
        inner.map(lambda term: Apply("root", term)),
        inner.map(lambda term: Apply("size", term)),
        inner.map(lambda term: Apply("sign", term)),
        inner.map(lambda term: Apply("step", term, 0.3)),
        st.tuples(inner, inner, inner).map(lambda three: Pick("a", three)),
        st.tuples(inner, inner).map(lambda two: Pick("s", two)),
        st.tuples(several, st.integers(0, 1)).map(lambda pair: Softmax(tuple(pair[0]), pair[1])),
        inner.map(lambda term: ByCluster("ward", term)),
        inner.map(Kept),
    )


TERMS: st.SearchStrategy[Term] = st.recursive(st.sampled_from(LEAVES), _operations, max_leaves=8)

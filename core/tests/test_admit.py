"""A core answers sums of judged columns alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from graphs import DICTIONARY
from test_blocks import PLAN

from fedtmle_core.admit import Judged, NotAdmittedError, admit, columns_of
from fedtmle_core.blocks import Block, Cells, Layer, Moments, Score
from fedtmle_core.leaves import Between, BSpline, Fold, Known, Level, Log, Number, Power
from fedtmle_core.plan import Model, Question
from fedtmle_core.terms import ONE, Apply, ByCluster, Kept, Pick, Softmax, Term, product, total
from fedtmle_core.types import Family, Part

X, M, A, S = Number("x", 3), Number("m", 4), Level("a", 1), Number("age", 7)
Y = Level("s", 1)
SEEN = Known("m")
VOCABULARY = (ONE, A, X, M)
MODEL = Model(columns=VOCABULARY, responses=(ONE, A, SEEN, product(SEEN, Y)))
PLAN_OF_FITS = replace(PLAN, models=(MODEL,))
AT = (0.1, 0.2, -0.3, 0.4)
G = Apply("expit", total(VOCABULARY, AT))
H = A * Apply("inverse", G, 0.05)
JUDGED = Judged.of(PLAN_OF_FITS)


def asks(*blocks: Block, judged: Judged = JUDGED) -> bool:
    try:
        admit(Question(blocks=blocks), judged)
    except NotAdmittedError:
        return False
    return True


def fit(
    X: tuple[Term, ...] = VOCABULARY, y: Term | None = A, w: Term | None = None, scale: float = 1.0
) -> Score:
    return Score(
        family=Family.LOGISTIC, layers=(Layer(X=X, y=y, w=w),), at=tuple(scale * e for e in AT[: len(X)])
    )


def test_fits_of_the_plan_are_admitted() -> None:
    assert asks(fit())
    assert asks(fit(y=Y, w=SEEN))
    assert asks(replace(fit(y=Y, w=SEEN), part=Part.HESSIAN))
    assert asks(fit(y=None, w=SEEN))
    assert asks(Moments.of([product(response, x) for response in (ONE, A, SEEN) for x in VOCABULARY]))


def test_gradients_of_other_families_are_sums_of_the_same_columns() -> None:
    residual = Softmax((total(VOCABULARY, AT), ONE), 0) - A
    assert asks(Moments.of([product(residual, x) for x in VOCABULARY]))
    assert asks(Moments.of([product(SEEN, G, x) for x in VOCABULARY]))


def test_an_indicator_is_a_factor_once() -> None:
    assert asks(Moments.of([product(A, A, SEEN * 1.0, ONE)])) == asks(Moments.of([product(A, SEEN)]))
    assert asks(Moments.of([product(SEEN, SEEN, X)]))
    assert not JUDGED.is_exact([product(X, X)])


@pytest.mark.parametrize(
    "column",
    [
        S,  # a variable that the plan has in no column
        Y,  # the outcome of those whose outcome counts as lost
        product(A, SEEN, Y, X, X),
        product(X, X),
        Power("x", 3, 2),
        Between("x", 0.0, 0.1),
        Apply("step", X, 0.25),  # a cut that nobody declared
        Apply("step", G, 0.9),
        Apply("sign", X),
        Apply("size", X),
        Apply("root", X),
        Apply("expit", Power("x", 3, 2)),  # no predictor over the vocabulary
        Apply("exp", Apply("step", X, 0.25)),
        Softmax((Power("x", 3, 2), ONE), 0),
        Pick("a", (ONE, X, ONE)),
        Pick("a", (X, ONE, X)),
        Fold(5, 1, "", 0),
        product(SEEN, Y, M, S),
    ],
    ids=str,
)
def test_what_is_not_judged_is_refused(column: Term) -> None:
    assert not JUDGED.is_exact([column])
    assert not JUDGED.is_exact([Kept(2.0 * column)])
    assert not asks(fit(X=(column,)))
    assert not asks(fit(w=column))
    assert not asks(Cells(of=X, edges=(0.0,), groups=(column,)))


def test_responses_and_sums_of_bins_are_judged_too() -> None:
    for column in (S, Power("x", 3, 2), Apply("step", X, 0.25), Fold(5, 1, "", 0), product(Y, M)):
        assert not asks(fit(y=column, w=A))
        assert not asks(Cells(of=X, edges=(0.0,), groups=(A,), sums=(column,)))


def test_people_of_two_levels_are_nobody() -> None:
    assert asks(Moments.of([product(A, Level("a", 0), S)]))  # it is 0 for everyone
    assert asks(Moments.of([Pick("a", (0.0 * ONE, X, 0.0 * ONE))]))
    assert not JUDGED.is_exact([Pick("a", (ONE, X, 0.0 * ONE))])


def test_a_product_of_two_judged_columns_is_another_column() -> None:
    assert not JUDGED.is_exact([X, M])
    assert JUDGED.is_exact([A, X])  # a response times a column


def closing(q: Term) -> tuple[Block, ...]:
    """Return the closing sums and the targeting's gradient at a law whose prediction is q."""
    u = product(H, SEEN, Y - q) + q
    score = Score(
        family=Family.LOGISTIC,
        layers=(Layer(X=(product(H, SEEN),), offset=Apply("logit", Apply("clip", q, 0.1, 0.9)), y=Y),),
        at=(0.0,),
    )
    return Moments.gram((u, q, ONE)), Moments.of((u, q)), score


def test_terms_are_named_before_targeting() -> None:
    Q = Apply("expit", total(VOCABULARY, (0.3, -0.1, 0.2, 0.1)))
    seen = product(Kept(A), SEEN, Apply("inverse", G, 0.05))
    for block in (*closing(Q), Moments.of((seen,))):
        assert not asks(block)
    named = JUDGED.with_named([seen, product(seen, Y), ONE])
    assert asks(*closing(Q), Moments.of((seen,)), judged=named)
    moved = Apply("expit", Apply("logit", Apply("clip", Q, 0.1, 0.9)) + 0.5 * H)
    assert asks(*closing(Kept(Q * 0.5)), judged=named)
    assert asks(*closing(moved), judged=named)
    other = product(A, SEEN, Apply("inverse", G, 0.01))  # with another bound
    assert not asks(Moments.of((other,)), judged=named)
    assert not asks(*closing(Q), judged=JUDGED.with_named([seen, ONE]))
    assert not asks(*closing(Q), judged=JUDGED.with_named([product(seen, Y), ONE]))


def test_products_of_judged_factors_may_be_read_coarsely() -> None:
    for column in (product(X, X), product(A, X, X), product(X - 0.5, X - 0.5, M)):
        assert asks(Moments.of([column]))
        assert not JUDGED.is_exact([column])
        assert not asks(fit(w=column))


@pytest.mark.parametrize(
    "column",
    [
        S,
        Power("x", 3, 2),
        Between("x", 0.0, 0.1),
        Fold(5, 7, "", 2),
        Known("age"),
        Apply("step", X, 0.25),
        Apply("sign", total([X, M])),
        Apply("size", product(A, X)),
        product(A, Apply("inverse", G, 0.05), Between("x", 0.0, 0.1)),
        Apply("inverse", product(G, Apply("step", X, 0.25)), 0.05),
        ByCluster("ward", Apply("step", X, 0.25)),
    ],
)
def test_named_columns_read_records_by_what_the_plan_has(column: Term) -> None:
    """A named column that differs from one of the plan in one person would pass both judgements."""
    with pytest.raises(NotAdmittedError, match="what the plan does not have"):
        JUDGED.with_named([ONE, column])
    assert Judged.of(replace(PLAN, models=(MODEL, Model(columns=(column,))))).with_named([ONE, column])


@pytest.mark.parametrize(
    "column",
    [
        Level("a", 2),  # counted beside the level that the plan has
        product(A, X, M, M),
        Apply("sign", Kept(product(A, Apply("inverse", G, 0.05), SEEN))),
        Apply("step", G, 0.25),
        Apply("step", ByCluster("ward", ONE), 1.0),
        Pick("a", (ONE, Apply("inverse", G, 0.05), ONE - G)),
    ],
)
def test_parts_of_the_plan_and_predictions_make_named_columns(column: Term) -> None:
    assert asks(Moments.of([column]), judged=JUDGED.with_named([column]))


def test_a_number_is_named_if_a_model_has_its_logarithm() -> None:
    judged = Judged.of(replace(PLAN, models=(Model(columns=(ONE, Log("age"))),)))
    assert judged.with_named([S])
    for column in (Power("age", 7, 2), BSpline("age", (50.0,), 18.0, 90.0, 0, 1), Apply("step", S, 0.5)):
        with pytest.raises(NotAdmittedError):
            judged.with_named([column])


def test_squares_are_of_named_columns_alone() -> None:
    named = JUDGED.with_named([ONE, product(A, X)])
    assert asks(Moments.gram((product(A, X), ONE)), judged=named)
    assert not named.is_exact([product(A, X), M])
    assert not JUDGED.is_exact([product(A, X), product(A, X)])


def test_a_column_of_clusters_is_named_by_itself() -> None:
    Q = Apply("expit", total(VOCABULARY, (0.3, -0.1, 0.2, 0.1)))
    seen = product(A, SEEN)

    def of_clusters(term: Term) -> tuple[Block, ...]:
        column = ByCluster("ward", term)
        return (Moments.gram((column,)), Moments.of((column,)))

    people = JUDGED.with_named([seen, product(seen, Y)])
    assert not people.is_exact([ByCluster("ward", product(seen, Y - Q))])
    named = JUDGED.with_named([ByCluster("ward", seen), ByCluster("ward", product(seen, Y))])
    assert asks(*of_clusters(product(seen, Y - Q)), judged=named)
    assert not named.is_exact([ByCluster("ward", product(seen, X))])
    assert not named.is_exact([product(A, X), product(A, X)])


def test_bins_of_anything_are_of_judged_groups() -> None:
    assert asks(Cells(of=G, edges=(0.2, 0.5), groups=(A, SEEN), sums=(Y,)), judged=JUDGED) == asks(
        Moments.of([product(A, Y), product(SEEN, Y)])
    )
    assert asks(Cells(of=Apply("step", X, 0.25), edges=(0.5,), groups=(A, SEEN)))


def test_limits_of_the_plan_are_kept() -> None:
    assert not asks(fit(scale=1e5))
    with pytest.raises(NotAdmittedError, match="numbers"):
        admit(Question(blocks=(fit(),)), Judged.of(replace(PLAN_OF_FITS, most_numbers=3)))
    with pytest.raises(NotAdmittedError, match="logit"):
        admit(Question(blocks=(Moments.of([Apply("logit", A)]),)), JUDGED)


def test_a_product_of_long_sums_is_no_column() -> None:
    long = total([Number("x", 3), M, A, SEEN, S, Y, Level("a", 0), Level("s", 0), Level("s", 1)])
    assert not asks(Moments.of([product(*[long + float(k) for k in range(6)])]))


def test_each_response_times_each_column_is_judged_once() -> None:
    columns = columns_of(PLAN_OF_FITS)
    assert len(columns) == 15  # 1 times A is A times 1
    assert DICTIONARY.levels("a") == ("0", "1", "2")
    assert all(map(JUDGED.has, columns))

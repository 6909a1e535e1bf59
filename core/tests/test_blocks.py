"""Blocks and questions: integers are longhand sums, within public bounds, in one form as bytes."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import msgspec
import numpy as np
import pytest
from graphs import DICTIONARY, TERMS, sheet
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtmle_core import graph
from fedtmle_core.blocks import Block, Cells, Lattice, Layer, Moments, Score
from fedtmle_core.documents import read_plan, read_question, write_plan, write_question
from fedtmle_core.errors import DataError, DecodeError, InputError
from fedtmle_core.evaluate import Workspace, on_lattice, values_of
from fedtmle_core.exact import Sums
from fedtmle_core.leaves import Known, Level, Number
from fedtmle_core.plan import Member, Model, Plan, Question
from fedtmle_core.sheet import Sheet
from fedtmle_core.terms import ONE, Apply, Kept, Term, total
from fedtmle_core.types import Family, Part

X, M, A = Number("x", 3), Number("m", 4), Level("a", 1)
COLUMNS = (ONE, X, M, Known("m"), A)
AT = (0.1, -0.7, 0.3, 0.2, 1.5)
PLAN = Plan(
    dictionary=DICTIONARY,
    models=(Model(columns=COLUMNS, responses=(ONE, A), groups=(A, 1.0 - A)), Model(columns=(ONE, X))),
    members=(Member(name="north", signing=b"s" * 32, exchange=b"x" * 32),),
    study=b"study",
    author="author",
    people=1 << 16,
)


def question(*blocks: Block) -> Question:
    return Question(blocks=blocks)


def answered(asked: Question, people: Sheet) -> list[np.ndarray]:
    return values_of(asked, Workspace(people).answer(asked, PLAN), PLAN)


def rows(terms: tuple[Term, ...], people: Sheet) -> np.ndarray:
    return np.stack(Workspace(people).columns(terms))


FAMILIES: dict[Family, Any] = {
    Family.LOGISTIC: (lambda eta: 1.0 / (1.0 + np.exp(-eta)), lambda mu: mu * (1.0 - mu)),
    Family.GAUSSIAN: (lambda eta: eta, np.ones_like),
    Family.POISSON: (np.exp, lambda mu: mu),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n", [1, 500])
def test_a_score_is_the_derivative_of_its_loss(family: Family, n: int) -> None:
    people = sheet(n)
    y, w, offset = Level("a", 2), 0.5 + Known("m"), 0.25 * X
    layer = Layer(X=COLUMNS, offset=offset, y=y, w=w)
    parts = [
        Score(family=family, layers=(layer,), at=AT, part=p) for p in (Part.LOSS, Part.GRADIENT, Part.HESSIAN)
    ]
    loss, gradient, hessian = answered(question(*parts), people)
    D, (Y, W, O) = rows(COLUMNS, people), rows((y, w, offset), people)  # noqa: E741 - the offset
    mean, bend = FAMILIES[family]
    eta = O + np.array(AT) @ D
    np.testing.assert_allclose(gradient, D @ (W * (mean(eta) - Y)), atol=1e-9)
    np.testing.assert_allclose(hessian, ((D * W * bend(mean(eta))) @ D.T)[np.triu_indices(5)], atol=1e-9)
    rho: Any = {
        Family.LOGISTIC: lambda e: np.logaddexp(0.0, e) - Y * e,
        Family.GAUSSIAN: lambda e: 0.5 * (e - Y) ** 2,
        Family.POISSON: lambda e: np.exp(e) - Y * e,
    }[family]
    np.testing.assert_allclose(loss, (W * (rho(eta) - rho(O))).sum(), atol=1e-8)


def test_layers_of_a_person_are_added_with_their_factors() -> None:
    people = sheet(300)
    one = Layer(X=COLUMNS, factors=(1.0, 2.0, 1.0, -1.0, 1.0), y=A)
    two = Layer(X=(ONE, ONE, X, A, A), w=Known("m"))
    both, first, second = (
        answered(question(Score(family=Family.LOGISTIC, layers=layers, at=AT)), people)[0]
        for layers in ((one, two), (one,), (two,))
    )
    np.testing.assert_allclose(both, first + second, atol=1e-12)
    D = rows(COLUMNS, people) * np.array([[1.0], [2.0], [1.0], [-1.0], [1.0]])
    mean = FAMILIES[Family.LOGISTIC][0]
    np.testing.assert_allclose(first, D @ (mean(np.array(AT) @ D) - rows((A,), people)[0]), atol=1e-9)


def test_moments_are_sums_of_columns_and_of_products() -> None:
    people = sheet(400)
    D = rows(COLUMNS, people)
    singles, gram = answered(question(Moments.of(COLUMNS), Moments.gram(COLUMNS)), people)
    np.testing.assert_allclose(singles, D.sum(axis=1), rtol=1e-15)
    np.testing.assert_allclose(gram, (D @ D.T)[np.triu_indices(5)], rtol=1e-14)
    (coarse,) = answered(question(Moments.of(COLUMNS, places=2)), people)
    assert (coarse == np.rint(singles * 4.0) / 4.0).all()


def test_cells_count_and_add_up_within_groups() -> None:
    people = sheet(400)
    p = Apply("expit", total(COLUMNS, AT))
    (found,) = answered(
        question(Cells(of=p, edges=(0.55, 0.75), groups=(A, 1.0 - A), sums=(X, p), places=20)), people
    )
    table = found.reshape(2, 3, 3)
    P, a, x = rows((p, A, X), people)
    bins = np.digitize(P, [0.55, 0.75])
    assert len(np.unique(bins)) == 3
    for g, inside in enumerate((a == 1.0, a == 0.0)):
        for b in range(3):
            here = inside & (bins == b)
            np.testing.assert_allclose(table[g, b], [here.sum(), x[here].sum(), P[here].sum()], atol=1e-5)


BLOCKS = (
    Score(family=Family.LOGISTIC, layers=(Layer(X=COLUMNS, y=A),), at=AT),
    Score(family=Family.LOGISTIC, layers=(Layer(X=COLUMNS, y=A),), at=AT, part=Part.HESSIAN),
    Moments.of((X, A)),
    Moments.gram(COLUMNS),
    Cells(of=X, edges=(-0.2, 0.1), groups=(A,), sums=(M,), places=50),
)


def test_neither_the_hospitals_nor_the_order_of_people_change_a_bit() -> None:
    whole = sheet(600)
    asked = question(*BLOCKS)
    expected = Workspace(whole).answer(asked, PLAN)
    order = np.random.default_rng(1).permutation(600)
    for cuts in ([0, 600], [0, 1, 599, 600], [0, 100, 100, 350, 600]):
        total_ = [0] * len(expected)
        for start, stop in itertools.pairwise(cuts):
            places = order[start:stop]
            part = Sheet(
                n=len(places),
                numbers={name: column[places] for name, column in whole.numbers.items()},
                levels={name: column[places] for name, column in whole.levels.items()},
            )
            total_ = [t + u for t, u in zip(total_, Workspace(part).answer(asked, PLAN), strict=True)]
        # Cells' sums are rounded at each hospital; 50 places leave nothing to round here.
        assert tuple(total_) == expected


def test_kept_columns_and_small_blocks_do_not_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    people = sheet(600)
    logit = Apply("logit", Apply("clip", Apply("expit", total(COLUMNS, AT)), 0.01, 0.99))
    asked = [
        question(Score(family=Family.LOGISTIC, layers=(Layer(X=(A, X), offset=term, y=A),), at=(0.1, 0.2)))
        for term in (logit, Kept(logit))
    ]
    without = Sheet(n=600, numbers=people.numbers, levels=people.levels)
    expected = Workspace(without).answer(asked[0], PLAN)
    monkeypatch.setattr("fedtmle_core.evaluate.LEAST_BLOCK", 64)
    monkeypatch.setattr("fedtmle_core.evaluate.BLOCK_NUMBERS", 64)
    work = Workspace(without)
    assert work.answer(asked[0], PLAN) == expected
    assert work.answer(asked[1], PLAN) == expected
    assert list(work.kept) == [Kept(logit)]
    assert work.answer(asked[1], PLAN) == expected  # from the kept column
    monkeypatch.setattr("fedtmle_core.evaluate.KEPT_BYTES", 600 * 8)
    work.answer(question(Moments.of((Kept(X),))), PLAN)
    assert list(work.kept) == [Kept(X)]  # the older column was let go
    monkeypatch.setattr("fedtmle_core.evaluate.KEPT_BYTES", 8)
    assert Workspace(without).answer(asked[1], PLAN) == expected  # nothing can be kept


@given(st.lists(TERMS, min_size=1, max_size=4), st.integers(0, 200), st.sampled_from([None, 0, 12]))
@settings(max_examples=100)
def test_no_number_leaves_its_lane(terms: list[Term], n: int, places: int | None) -> None:
    asked = question(Moments.gram(terms, places=places), Cells(of=terms[0], edges=(0.0,), groups=(ONE, A)))
    try:
        lanes = asked.lanes(PLAN)
    except InputError:
        return
    units = Workspace(sheet(n)).answer(asked, PLAN)
    assert len(units) == len(lanes)
    assert all(abs(unit) <= lane.reach for unit, lane in zip(units, lanes, strict=True))


@given(st.integers(0, 300), st.integers(0, 30))
@settings(max_examples=50)
def test_no_rounded_mean_leaves_its_lane(n: int, places: int) -> None:
    C = ((1.0, -0.25, 3.0, 0.0, 0.5), (0.1, 0.2, 0.3, 0.4, -0.5))
    asked = question(
        Score(
            family=Family.LOGISTIC,
            layers=(Layer(X=COLUMNS, y=A),),
            at=AT,
            lattice=Lattice(places=places, C=C),
        )
    )
    units = Workspace(sheet(n)).answer(asked, PLAN)
    lanes = asked.lanes(PLAN)
    assert len(units) == len(lanes) == 2
    assert all(abs(unit) <= lane.reach for unit, lane in zip(units, lanes, strict=True))


@given(
    st.lists(st.tuples(st.integers(-(10**20), 10**20), st.integers(-20, 60)), min_size=1, max_size=4),
    st.integers(1, 1000),
    st.integers(0, 40),
    st.data(),
)
@settings(max_examples=200)
def test_means_are_rounded_to_the_lattice_half_to_even(
    sums: list[tuple[int, int]], n: int, places: int, data: st.DataObject
) -> None:
    row = tuple(data.draw(st.sampled_from([0.0, 0.5, -1.0, 1.0 / 3.0, 2.0**-30, 1e6])) for _ in sums)
    units, shifts = zip(*sums, strict=True)
    (found,) = on_lattice(Sums(units, shifts), Lattice(places=places, C=(row,)), n)
    exact = sum(
        Fraction(c) * Fraction(unit) / Fraction(2) ** shift
        for c, (unit, shift) in zip(row, sums, strict=True)
    )
    assert found == n * round(exact / n * 2**places)  # Python rounds a fraction half to even


def test_a_hospital_with_nobody_answers_zeros() -> None:
    asked = question(
        *BLOCKS, Score(family=Family.LOGISTIC, layers=(Layer(X=(X,)),), at=(0.0,), lattice=Lattice(places=9))
    )
    assert set(Workspace(sheet(0)).answer(asked, PLAN)) == {0}


WRONG = (
    lambda: Score(family=Family.LOGISTIC, layers=(), at=()),
    lambda: Score(family=Family.LOGISTIC, layers=(Layer(X=(X,)),), at=(0.0, 0.0)),
    lambda: Score(family=Family.LOGISTIC, layers=(Layer(X=(X,), factors=(1.0, 2.0)),), at=(0.0,)),
    lambda: Score(family=Family.LOGISTIC, layers=(Layer(X=(X,)),), at=(0.0,), part=Part.LOSS | Part.GRADIENT),
    lambda: Score(
        family=Family.LOGISTIC, layers=(Layer(X=(X,)),), at=(0.0,), lattice=Lattice(places=1, C=((1.0, 1.0),))
    ),
    lambda: Moments(columns=(X,), products=((1,),)),
    lambda: Moments(columns=(X,), products=((0, 0, 0),)),
    lambda: Cells(of=X, edges=(1.0, 0.0), groups=(ONE,)),
    lambda: Cells(of=X, edges=tuple(map(float, range(254))), groups=(ONE,)),
    lambda: question(Score(family=Family.LOGISTIC, layers=(Layer(X=(X,), w=X),), at=(0.0,))).lanes(PLAN),
)


@pytest.mark.parametrize("make", WRONG)
def test_blocks_that_do_not_hold_together_are_refused(make: Any) -> None:
    with pytest.raises(InputError):
        make()


@given(st.lists(TERMS, min_size=2, max_size=4), st.sampled_from([None, Fraction(7, 3)]))
@settings(max_examples=60)
def test_a_question_is_read_back_from_its_document(terms: list[Term], noise: Fraction | None) -> None:
    layer = Layer(X=(terms[0],), y=terms[1], factors=(0.5,))
    asked = Question(
        blocks=(
            Score(family=Family.POISSON, layers=(layer, Layer(X=(ONE,), w=A)), at=(0.25,)),
            Score(
                family=Family.GAUSSIAN,
                layers=(Layer(X=tuple(terms), offset=X),),
                at=(0.0,) * len(terms),
                part=Part.GRADIENT,
                lattice=Lattice(places=7, C=((1.0,) * len(terms),)),
            ),
            Moments.gram(terms, places=4),
            Cells(of=terms[0], edges=(0.0, 1.0), groups=(A, ONE), sums=tuple(terms), places=3),
        ),
        noise=noise,
    )
    document = write_question(asked)
    assert read_question(document) == asked
    assert read_question(document).digest == asked.digest


def test_a_plan_is_read_back_from_its_document() -> None:
    assert read_plan(write_plan(PLAN)) == PLAN
    assert read_plan(write_plan(PLAN)).digest == PLAN.digest


@given(st.data())
@settings(max_examples=300)
def test_a_changed_document_is_refused_or_has_another_digest(data: st.DataObject) -> None:
    asked = question(*BLOCKS)
    kinds: Any = ((write_question, read_question, asked), (write_plan, read_plan, PLAN))
    for write, read, value in kinds:
        document = bytearray(write(value))
        place = data.draw(st.integers(0, len(document) - 1))
        document[place] ^= data.draw(st.integers(1, 255))
        try:
            found = read(bytes(document))
        except DecodeError:
            continue
        assert found.digest != value.digest
        assert write(found) == bytes(document)


@given(st.binary(max_size=60))
@settings(max_examples=200)
def test_garbage_is_no_document(data: bytes) -> None:
    for read in (read_question, read_plan):
        with pytest.raises(DecodeError):
            read(data)


def test_documents_in_another_form_are_refused() -> None:
    document = write_question(question(Moments.of((X,))))
    plain = msgspec.msgpack.decode(document)
    plain[1] = [1]  # a term that is not there
    with pytest.raises(DecodeError):
        read_question(msgspec.msgpack.encode(plain))
    plain = msgspec.msgpack.decode(document)
    plain[2][0][1] = 2  # more columns than terms
    with pytest.raises(DecodeError):
        read_question(msgspec.msgpack.encode(plain))
    plain = msgspec.msgpack.decode(document)
    plain[3] = ["1", "0"]
    with pytest.raises(DecodeError):
        read_question(msgspec.msgpack.encode(plain))
    with pytest.raises(DecodeError):
        read_question(msgspec.msgpack.encode([*msgspec.msgpack.decode(document), 1]))
    negative = graph.encode([ONE])
    negative[0][0][1][0] = -0.0
    with pytest.raises(DecodeError):
        read_question(msgspec.msgpack.encode([*negative, [["moments", 1, [[0]], None]], None]))


def test_plans_that_do_not_hold_together_are_refused() -> None:
    fields = {name: getattr(PLAN, name) for name in PLAN.__dataclass_fields__}
    for change in (
        {"people": 0},
        {"people": 1 << 41},
        {"floor": 0},
        {"members": PLAN.members * 2},
        {"models": (Model(columns=(Number("nobody", 0),)),)},
    ):
        with pytest.raises(InputError):
            Plan(**{**fields, **change})


def test_a_sheet_holds_what_the_dictionary_declares_and_nothing_else() -> None:
    people = sheet(50)
    numbers, levels, clusters = dict(people.numbers), dict(people.levels), dict(people.clusters)
    with pytest.raises(DataError, match=r"'x'.* 1 record"):
        Sheet.read(DICTIONARY, {**numbers, "x": np.append(numbers["x"][:-1], 5.1)}, levels, clusters)
    with pytest.raises(DataError, match="'x'"):
        Sheet.read(DICTIONARY, {**numbers, "x": np.append(numbers["x"][:-1], np.inf)}, levels, clusters)
    with pytest.raises(DataError, match="'a' has an undeclared level"):
        Sheet.read(DICTIONARY, numbers, {**levels, "a": np.full(50, 3, np.int16)}, clusters)
    with pytest.raises(DataError, match="'ward' has clusters of more than 40"):
        Sheet.read(DICTIONARY, numbers, levels, {"ward": np.zeros(50, np.int64)})
    with pytest.raises(DataError, match="no column 'm'"):
        Sheet.read(DICTIONARY, {name: numbers[name] for name in ("x", "age")}, levels, clusters)
    with pytest.raises(DataError, match="different lengths"):
        Sheet.read(DICTIONARY, {**numbers, "x": numbers["x"][:-1]}, levels, clusters)


def test_the_digest_of_a_sheet_covers_every_value() -> None:
    one, other = sheet(50), sheet(50)
    assert one.digest == other.digest
    changed = {**one.numbers, "x": one.numbers["x"] + np.eye(1, 50)[0] * 1e-9}
    assert Sheet(n=50, numbers=changed, levels=one.levels, clusters=one.clusters).digest != one.digest
    assert sheet(50, seed=1).digest != one.digest

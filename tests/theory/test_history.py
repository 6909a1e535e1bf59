"""The history code: it decodes to the identical law, its length is H_K, and it is a prefix code."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedtmle as ft
from fedtmle.errors import DecodeError, NumericalError
from fedtmle.protocol.codes import BitReader, gamma_length, zigzag
from fedtmle.protocol.lattice import Lattice, build_lattice, identity
from fedtmle.theory import statistical as s
from fedtmle_paper import lemmas as lem
from fedtmle_paper.history import (
    InitialState,
    decode_history,
    decode_law,
    encode_history,
    encode_initial,
    history_integers,
)
from tests.cases import TARGETS, targets
from tests.damage import damaged_bits
from tests.premise import Premise
from tests.theory.runs import coded_run


@pytest.mark.parametrize("coordinates", ["raw", "whitened"])
@pytest.mark.parametrize("name", TARGETS)
def test_the_code_decodes_to_the_identical_law(name: str, coordinates: Any) -> None:
    case = targets()[name]
    run = coded_run(case, case.split(4), ft.Coded(tolerance=case.tolerance, coordinates=coordinates))
    code = encode_history(history_integers(run.lattice, run.result.trajectory.accepted))
    assert code.length == run.result.certificate.history_bits
    law = decode_law(code, case.problem, case.law, run.lattice)
    rows = case.pooled()
    assert case.problem.losses(law, rows).tobytes() == case.problem.losses(run.result.law, rows).tobytes()
    psi = case.problem.finish(law, case.problem.moments(law, rows), case.n).psi
    assert psi.tobytes() == run.result.psi.tobytes()


def test_an_accepted_vector_off_the_lattice_is_refused() -> None:
    lattice = build_lattice(delta=Fraction(1), beta=Fraction(2), C=identity(2))
    on = tuple(lattice.eps((3, -5)))
    assert history_integers(lattice, [on]) == ((3, -5),)
    with pytest.raises(NumericalError, match="lattice"):
        history_integers(lattice, [(on[0], np.nextafter(on[1], 1.0))])


@given(st.lists(st.tuples(*[st.integers(-(2**70), 2**70)] * 3), max_size=6))
def test_code_and_back(history: list[tuple[int, ...]]) -> None:
    code = encode_history(history)
    assert code.length == s.history_bits(history)
    assert decode_history(code, 3) == tuple(history)


decodes = Premise("the bits are a history", at_least=0.04)


@decodes
@given(st.lists(st.tuples(*[st.integers(-999, 999)] * 2), max_size=3), st.data())
def test_garbage_is_a_decode_error_or_a_canonical_code(
    history: list[tuple[int, ...]], data: st.DataObject
) -> None:
    bits = data.draw(damaged_bits(encode_history(history)))
    try:
        found = decode_history(bits, 2)
    except DecodeError:
        decodes.holds(False)
        return
    decodes.holds(True)
    assert encode_history(found) == bits


def test_kraft_sums_are_exact() -> None:
    by_hand = sum(Fraction(1, 2 ** gamma_length(a)) for a in range(-600, 600) if zigzag(a) < 2**10)
    assert lem.integer_kraft(10) == by_hand == 1 - Fraction(1, 2**10)
    # Every history of at most two updates in d = 1 with iota < 4, one by one.
    small = [a for a in range(-8, 8) if zigzag(a) < 4]
    codes = [
        encode_history([(a,) for a in chosen])
        for K in range(3)
        for chosen in itertools.product(small, repeat=K)
    ]
    assert lem.history_kraft(2, 3, 1) == sum(Fraction(1, 2**code.length) for code in codes) <= 1
    nearly_all = lem.history_kraft(30, 255, 1)  # the code is complete: only K >= 255 is left out
    assert 1 - Fraction(1, 255) < nearly_all < 1


def test_histories_are_prefix_free() -> None:
    rng = np.random.default_rng(3)
    seen = set()
    for _ in range(300):
        history = [tuple(int(v) for v in rng.integers(-6, 7, size=2)) for _ in range(rng.integers(0, 4))]
        code = encode_history(history)
        text = bin(int.from_bytes(code.data, "big") | 1 << (8 * len(code.data)))[3 : 3 + code.length]
        seen.add(text)
    for a, b in itertools.permutations(seen, 2):
        assert not b.startswith(a)


def test_what_the_initial_code_holds() -> None:
    """An independent start costs nothing; coefficients, lattice and shares are what is of this sample."""
    assert encode_initial(InitialState()).length == 0
    lattice = build_lattice(delta=Fraction(1, 100), beta=Fraction(5, 4), C=identity(2))
    state = InitialState(coefficients=(0.5, -2.0), lattice=lattice, codes_coordinates=True, sizes=(30, 12))
    code = encode_initial(state)
    reader = BitReader(code)
    assert reader.uint(3) == 0b011  # gamma code of 3: two coefficients
    reader.uint(128)
    reader.uint(64)
    assert Lattice.read(reader, dim=2, delta=lattice.delta, C=None) == lattice
    assert (reader.uint(9), reader.uint(7)) == (30, 12)
    reader.finish()
    without_C = encode_initial(InitialState(lattice=lattice, sizes=(30, 12)))
    assert without_C.length < code.length - 2 * 64

"""A silo's own estimate is sent to 2^-16 of its standard error, in one form."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtmle.errors import DecodeError
from fedtmle.protocol.codes import Bits, BitWriter, decode, encode
from fedtmle.protocol.query import Local
from fedtmle.protocol.sites import (
    OWN_PLACES,
    AbstractDepartures,
    DeparturesQuery,
    OwnCode,
    OwnEstimate,
    OwnStatus,
)
from fedtmle.runtime.rows import LocalRows


def drawn(dim: int, seed: int, scale: float = 1.0) -> OwnEstimate:
    rng = np.random.default_rng(seed)
    root = scale * rng.normal(size=(dim, dim))
    psi = scale * rng.normal(size=dim) * 10.0 ** rng.integers(-3, 4)
    return OwnEstimate(status=OwnStatus.SENT, psi=psi, covariance=root @ root.T)


def decoded(dim: int, bits: Bits) -> OwnEstimate:
    own = decode(OwnCode(dim), bits)
    assert isinstance(own, OwnEstimate)
    return own


@given(
    dim=st.integers(1, 4), seed=st.integers(0, 2**32), scale=st.sampled_from([1e-6, 1.0, 1e5, 2.0**-16, 3.0])
)
def test_rounding_is_small_beside_the_standard_errors(dim: int, seed: int, scale: float) -> None:
    own = drawn(dim, seed, scale)
    sent = own.rounded()
    errors, rounded = (np.sqrt(np.diag(each.covariance)) for each in (own, sent))
    assert (np.abs(sent.psi - own.psi) <= 2.0 ** -(OWN_PLACES + 1) * rounded).all()
    assert (np.abs(rounded - errors) <= 2.0 ** -(OWN_PLACES + 1) * errors).all()
    shares = [each.covariance / np.outer(e, e) for each, e in ((own, errors), (sent, rounded))]
    assert np.abs(shares[1] - shares[0]).max() <= 2.0 ** -(OWN_PLACES + 1) + 1e-12


@given(dim=st.integers(1, 4), seed=st.integers(0, 2**32))
def test_the_code_is_exact_for_rounded_estimates(dim: int, seed: int) -> None:
    own = drawn(dim, seed).rounded()
    again = decoded(dim, encode(OwnCode(dim), own))
    assert again.status is own.status
    assert np.array_equal(again.psi, own.psi)
    assert np.array_equal(again.covariance, own.covariance)
    once_more = own.rounded()
    assert np.array_equal(once_more.psi, own.psi)
    assert np.array_equal(once_more.covariance, own.covariance)


def test_an_estimate_without_an_error_is_sent() -> None:
    own = OwnEstimate(status=OwnStatus.SENT, psi=np.array([0.25, 1.0]), covariance=np.diag([0.0, 4.0]))
    again = decoded(2, encode(OwnCode(2), own.rounded()))
    assert again.psi.tolist() == [0.25, 1.0]
    assert np.array_equal(again.covariance, own.covariance)


def test_another_form_is_refused() -> None:
    out = BitWriter()
    out.uint(OwnStatus.SENT, 4)
    out.golomb([3])
    out.uint((1 << OWN_PLACES) - 1, OWN_PLACES + 1)  # a standard error whose first digit is zero
    out.golomb([5])
    with pytest.raises(DecodeError, match="one form"):
        decode(OwnCode(1), out.finish())


@given(data=st.binary(max_size=40), dim=st.integers(1, 3))
def test_garbage_is_a_decode_error_or_has_one_form(data: bytes, dim: int) -> None:
    bits = Bits(8 * len(data), data)
    try:
        own = decode(OwnCode(dim), bits)
    except DecodeError:
        return
    assert encode(OwnCode(dim), own) == bits


class _Residuals(AbstractDepartures):
    """The sums of given residuals."""

    def __init__(self, *residuals: float) -> None:
        self._residuals = residuals

    @property
    def names(self) -> tuple[str, ...]:
        return ("outcome model",)

    def of(self, local: Local) -> tuple[tuple[float, float], ...]:  # noqa: ARG002 - the same for all
        return ((sum(self._residuals), sum(r * r for r in self._residuals)),)


@pytest.mark.parametrize("residual", [1e-6, 0.3, -12.5])
def test_a_departure_says_nothing_of_a_person_who_is_all_of_it(residual: float) -> None:
    local = LocalRows("a", np.zeros(20), 20, None)
    alone, several = (
        DeparturesQuery(departures=_Residuals(*residuals), n=20).answer(local).values()[0]
        for residuals in ((residual, *[0.0] * 19), (residual, 1.0, 0.5))
    )
    assert alone == 1.0
    assert several != 1.0

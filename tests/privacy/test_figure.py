"""The figure's message on a small scale, from a transcript: records stay open while their mean is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedtmle_paper.privacy.collision import segment_smoothness


@pytest.mark.parametrize("s", [1, 2, 3, 5])
@pytest.mark.parametrize("radius", [0.3, 2.0])
def test_smoothness_of_a_known_function(s: int, radius: float) -> None:
    """(cos u, sin u) has every derivative of norm one; e^u has sup e^rho."""
    assert segment_smoothness(lambda u: np.stack([np.cos(u), np.sin(u)]), s, radius) == pytest.approx(
        1.0, rel=1e-5
    )
    assert segment_smoothness(lambda u: np.exp(u)[None], s, radius) == pytest.approx(
        math.exp(radius), rel=1e-5
    )


def test_records_stay_open_while_their_mean_is_known() -> None:
    pytest.importorskip("matplotlib")
    from fedtmle_paper.reproduce.disclosure import RADIUS, S, measure, scene

    view = scene()
    # The scene is what the transcript holds: the run's own positions explain its answers.
    np.testing.assert_allclose(view.response(view.truth), view.answers, atol=1e-10)
    points = measure(view, (1e-10, 1e-4))
    for point in points:
        assert point.record_attack >= point.record_bound * 0.999  # no attack beats the theorem
        assert point.mean_lower <= point.mean_upper
        assert point.decoder_worst <= point.mean_upper
        assert point.mean_attack >= 0.99 * point.mean_lower
    first, last = points
    # eta falls by a factor 1e6: the mean's error with it, the records' only by its cube root.
    assert first.mean_attack <= 1e-5 * last.mean_attack
    assert first.record_bound == pytest.approx(last.record_bound * 1e-6 ** (1 / S), rel=1e-3)
    assert first.record_attack >= 1e4 * first.mean_attack
    assert last.record_attack <= RADIUS * 2

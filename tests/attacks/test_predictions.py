"""Sums of predictions at the overlap: a silo omits them where a combination with other sums is one person."""

from __future__ import annotations

import pytest

from fedtmle.protocol.policy import Policy
from fedtmle.runtime.records import Keeper
from fedtmle.targets.effects.statistics import PredictionMoments
from tests.attacks.combinations import ChosenPrediction


class BesideTheArm(ChosenPrediction):
    """Adds half of the arm to the predictions, so that they alone are about many people."""

    of_arm = 0.5

    def omits(self, keeper: Keeper) -> bool:
        """Whether a silo omits the sums; if not, they give the person's covariate."""
        server, tally = self.server(self.victim(keeper))
        told = self.at_overlap(tally, server.tell(tally))
        assert told is None or self.works(told)
        return told is None


class Alone(BesideTheArm):
    of_arm = 0.0


@pytest.mark.parametrize("attack", [Alone(), BesideTheArm()], ids=["alone", "beside the arm"])
def test_a_silo_omits_predictions_that_tell_of_one_person(attack: BesideTheArm) -> None:
    assert attack.omits(attack.keeper(Policy()))
    assert not attack.omits(attack.keeper(attack.without("min_people")))


def test_they_are_judged_together_with_the_clever_covariates(monkeypatch: pytest.MonkeyPatch) -> None:
    """By themselves half of the arm would hide the person, although the sums of H tell the arm."""
    monkeypatch.setattr(
        PredictionMoments, "roots", lambda columns, piece: columns.disclosed(piece, columns.judged)
    )
    attack = BesideTheArm()
    assert not attack.omits(attack.keeper(Policy()))

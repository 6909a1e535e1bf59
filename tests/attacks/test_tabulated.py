"""Clusters count by weight, leavers are judged, a void round brings a look; honest studies are answered."""

from __future__ import annotations

import numpy as np
import pytest

from fedtmle.model.leverage import PersonRows, largest_leverage
from fedtmle.protocol.subjects import ClosingRows
from fedtmle.targets.effects.moments import MomentColumns, judged_columns
from tests.attacks.combinations import PERSON
from tests.attacks.invented import ROW, closing
from tests.attacks.settings import RefusedBySiloError, Setting
from tests.attacks.small import Columns
from tests.attacks.tabulated import CountedLeaver, LoneAmongSpanning, PaddedCluster, PaddedStratum, VoidRound


class Clusters:
    """Eight people in clusters of one, two and five."""

    cluster = np.array([0, 1, 1, 2, 2, 2, 2, 2])
    spanned = None


def of_clusters(t: np.ndarray, *, counts: bool = False) -> np.ndarray:
    """The columns of the clusters' sums of u and t, of one mean of eight people."""
    u = np.random.default_rng(1).normal(size=8) * (t > 0)
    return judged_columns(Clusters(), MomentColumns(np.stack([u, t, u])[:, None], counts=counts))[2:4]


def test_people_of_equal_weight_count_as_without_weights() -> None:
    ones = np.ones(8)
    assert of_clusters(2 * ones)[0] == pytest.approx(of_clusters(ones, counts=True)[0], abs=1e-12)
    assert of_clusters(2 * ones)[1] == pytest.approx(2 * of_clusters(ones, counts=True)[1], abs=1e-12)


@pytest.mark.parametrize("weight", [0.0, 1e-9])
def test_who_has_no_weight_hides_nobody(weight: float) -> None:
    t = np.where(ROW[:8] < 4, 1.0, weight)  # one person of the third cluster has a weight
    rows = of_clusters(t)
    gram = rows @ rows.T
    sums = np.stack([np.bincount(Clusters.cluster, weights=t), np.zeros(3)])
    assert gram[1, 1] == pytest.approx(sums[0] @ sums[0])  # that of the clusters' sums
    alone = rows[:, 3]
    assert alone[1] ** 2 == pytest.approx(sums[0, 2] ** 2, rel=1e-7)


def test_a_cluster_without_any_weight_adds_nothing() -> None:
    rows = of_clusters(np.where(ROW[:8] < 3, 1.0, 0.0))
    assert not rows[:, 3:].any()
    assert largest_leverage(lambda: iter([PersonRows(rows)])) == pytest.approx(1.0)


class Weighted(PaddedCluster):
    """Many clusters, in which people have various weights, some of them none."""

    def columns(self) -> Columns:
        weight = np.where(ROW % 5 == 0, 0.0, 1.0 + ROW % 3)
        return {**super().columns(), "family": (ROW // 4).astype(str), "weight": weight}


class Spanning(LoneAmongSpanning):
    """Five clusters of six people are in other silos too, ten of three are not."""

    def family(self) -> np.ndarray:
        return np.where(ROW < 30, ROW % 5, 10 + ROW % 10).astype(str)

    claimed = tuple("01234")


class Stratified(PaddedStratum):
    """Many clusters, half of which are in both strata."""

    def columns(self) -> Columns:
        return {**super().columns(), "family": (ROW % 20).astype(str)}


class ManyLeave(CountedLeaver):
    """Six people of each silo are censored in the first period."""

    def common(self) -> Columns:
        columns = super().common()
        leave = ROW % 10 == 1
        columns["c1"][leave] = 1.0
        for name in ("l2", "a2", "c2", "y"):
            columns[name][leave] = np.nan
        return columns


class ManyHigh(VoidRound):
    """Every other silo has several people in each arm with a high outcome."""

    def common(self) -> Columns:
        columns = super().common()
        columns["y"][PERSON : PERSON + 8] = 0.75
        return columns

    def columns(self) -> Columns:
        return VoidRound().columns()


@pytest.mark.parametrize("setting", Setting)
@pytest.mark.parametrize("kind", [Weighted, Stratified, ManyLeave])
def test_honest_studies_are_answered(kind: type, setting: Setting) -> None:
    attack = kind()
    attack.setting = setting
    attack.run(attack.victim(attack.keeper(attack.guarded())))


def test_an_honest_study_of_clusters_that_span_silos_is_answered() -> None:
    attack = Spanning()
    attack.run(attack.victim(attack.keeper(attack.guarded())))


@pytest.mark.parametrize(
    ("kind", "setting", "ends"),
    [
        (VoidRound, Setting.MASKED, "refused"),
        (VoidRound, Setting.COLLUDING, "refused"),
        (ManyHigh, Setting.MASKED, "answered"),  # a liar may make it refused
    ],
)
def test_a_void_round_is_followed_by_a_look(kind: type, setting: Setting, ends: str) -> None:
    """The sums follow if the look proves that others have high outcomes too."""
    attack = kind()
    attack.setting = setting
    server, answer = attack.server(attack.victim(attack.keeper(attack.guarded())))
    try:
        told = closing(server, answer)
    except RefusedBySiloError:
        told = None
    assert any(isinstance(gram.subject, ClosingRows) for look in server.looks for gram in look)
    assert ("refused" if told is None else "answered") == ends

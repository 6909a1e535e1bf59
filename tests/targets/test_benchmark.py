"""The benchmark's data: the two distributions, client sizes and partitions of S.3."""

from decimal import Decimal, getcontext

import numpy as np
import pytest

from fedtmle.errors import InputError
from fedtmle_paper import benchmark


def test_dgp_1_has_the_papers_moments():
    rows = benchmark.gaussian_mixture(400_000, np.random.default_rng(0))
    probabilities, means = np.array([0.5, 0.3, 0.2]), np.array([[-2.0, 0.0], [1.5, 1.5], [1.5, -1.5]])
    covariances = np.array([[[0.8, 0.5], [0.5, 1.2]], [[1, -0.35], [-0.35, 0.4]], [[0.35, 0], [0, 0.8]]])
    mean = probabilities @ means
    second = np.einsum("c,cij->ij", probabilities, covariances + means[:, :, None] * means[:, None, :])
    np.testing.assert_allclose(rows.mean(axis=0), mean, atol=0.015)
    np.testing.assert_allclose(np.cov(rows.T), second - np.outer(mean, mean), atol=0.03)
    # Third moments tell the components apart: E[O_1^2 O_2] is mu_1^2 mu_2 + s_11 mu_2 + 2 s_12 mu_1 in each.
    third = sum(
        p * (m[0] ** 2 * m[1] + s[0, 0] * m[1] + 2 * s[0, 1] * m[0])
        for p, m, s in zip(probabilities, means, covariances, strict=True)
    )
    assert (rows[:, 0] ** 2 * rows[:, 1]).mean() == pytest.approx(third, abs=0.06)


def test_dgp_2_is_the_papers_curve():
    u, second = benchmark.curved_mixture(400_000, np.random.default_rng(0)).T
    assert u.mean() == pytest.approx(0.3, abs=0.015)
    assert (u**2).mean() == pytest.approx(0.4 * (2.25 + 0.36) + 0.6 * (2.25 + 0.81), abs=0.03)
    third = 0.4 * (-3.375 - 3 * 1.5 * 0.36) + 0.6 * (3.375 + 3 * 1.5 * 0.81)
    assert (u**3).mean() == pytest.approx(third, abs=0.12)
    z = (second - 0.5 * u**2 - 0.3 * np.sin(2 * u)) / (0.35 + 0.15 * u**2)
    moments = [z.mean(), z.var(), (z**4).mean(), (z * u).mean(), (z**2 * u).mean() - u.mean()]
    np.testing.assert_allclose(moments, [0, 1, 3, 0, 0], atol=0.05)


@pytest.mark.parametrize(
    ("n", "clients"), [(10_000, 5), (10_000, 10), (10_000, 20), (10_000, 40), (101, 7), (9, 1)]
)
def test_client_sizes_are_largest_remainders(n, clients):
    getcontext().prec = 60
    weights = [Decimal(5) ** (Decimal(m) / max(clients - 1, 1)) for m in range(clients)]
    quotas = [n * weight / sum(weights) for weight in weights]
    expected = [int(quota) for quota in quotas]
    order = sorted(range(clients), key=lambda m: (-(quotas[m] - int(quotas[m])), m))
    for m in order[: n - sum(expected)]:
        expected[m] += 1
    assert benchmark.client_sizes(n, clients) == tuple(expected)
    assert sum(expected) == n
    if n == 10_000:
        assert expected[-1] / expected[0] == pytest.approx(5, abs=0.1)


@pytest.mark.parametrize(("n", "clients"), [(10, 0), (3, 5), (0, 1)])
def test_impossible_client_sizes(n, clients):
    with pytest.raises(InputError, match=r"^clients: "):
        benchmark.client_sizes(n, clients)


@pytest.mark.parametrize("clients", [5, 40])
def test_partitions_keep_counts_and_every_row_once(clients):
    rows = benchmark.gaussian_mixture(10_000, np.random.default_rng(3))
    sizes = benchmark.client_sizes(10_000, clients)
    score = rows[:, 0] + 0.5 * rows[:, 1]
    score = (score - score.mean()) / score.std()
    slopes = []
    for partition in (
        benchmark.random_partition(sizes, np.random.default_rng(4)),
        benchmark.spatial_partition(rows, sizes, np.random.default_rng(4)),
    ):
        assert tuple(map(len, partition)) == sizes
        assert (np.sort(np.concatenate(partition)) == np.arange(10_000)).all()
        slopes.append(score[partition[-1]].mean() - score[partition[0]].mean())
    # A fifth of each client follows a score whose correlation with O_1 + O_2/2 is 1/sqrt(2): the ends of the
    # sorted fifth differ by up to about 3 SDs, so the client means by some 0.2 to 0.7.
    assert abs(slopes[0]) < 0.2
    assert 0.2 < slopes[1] < 0.8


def test_a_spatial_partition_sorts_its_reserved_fifth():
    rows = np.random.default_rng(0).standard_normal((5000, 2)) * 1e-3
    rows[:, 0] += np.repeat([0.0, 1.0], 2500)
    sizes = (1000, 1500, 2500)
    first, middle, last = benchmark.spatial_partition(rows, sizes, np.random.default_rng(1))
    shares = [rows[part[: len(part) // 5], 0].mean() for part in (first, middle, last)]
    rest = [rows[part[len(part) // 5 :], 0].mean() for part in (first, middle, last)]
    # Noise of one SD against two groups two SDs apart: mostly group 0 first, group 1 last.
    assert shares[0] < 0.1
    assert 0.1 < shares[1] < 0.7
    assert shares[2] > 0.7
    assert max(abs(share - 0.5) for share in rest) < 0.08


def test_a_partition_of_other_rows_is_refused():
    with pytest.raises(InputError, match=r"^rows: "):
        benchmark.spatial_partition(np.zeros((9, 2)), (5, 5), np.random.default_rng(0))

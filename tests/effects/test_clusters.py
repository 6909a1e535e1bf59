"""Clusters and silos: shared identifiers are compared, spanning ones refused or added across silos."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.data import ColumnMap, DataErrors, read_silo_file
from fedtmle.errors import DecodeError, InputError, RefusedError
from fedtmle.initial.crossfit import Folds
from fedtmle.model.table import Factor, Table
from fedtmle.protocol.clusters import Clusters, ClustersQuery, keyed
from fedtmle.protocol.codes import decode, encode
from fedtmle.protocol.query import Phase
from fedtmle.studyfile.schema import schema_of
from fedtmle.targets.effects.prepare import cluster_digest
from tests.effects.studies import CENTRAL, Columns, change, cut, population
from tests.effects.test_pooled import TARGETS, oracle, study_of
from tests.narrow import load


def clinics(n: int, count: int, seed: int) -> Columns:
    """People of some clinics, whose outcome has a part in common."""
    data = population(n, seed)
    rng = np.random.default_rng(seed + 1)
    clinic = rng.integers(0, count, size=n)
    shift = rng.normal(scale=1.5, size=count)
    return {**data, "family": clinic, "y": np.clip(data["y"] + shift[clinic], 0, 10)}


def silos_of(data: Columns, silos: int, seed: int = 0) -> dict[str, Columns]:
    """Rows dealt at random, but for clinics 0 and 1, which stay in the first silo."""
    where = np.random.default_rng(seed).integers(0, silos, size=len(data["w"]))
    where = np.where(data["family"] < 2, 0, where)
    return cut(data, [np.flatnonzero(where == m) for m in range(silos)])


def numbers(result: ft.StudyResult) -> np.ndarray:
    return result.table()[["estimate", "std_error", "conf_low", "conf_high"]].to_numpy(dtype=float)


@pytest.mark.parametrize("name", ["ATE", "ATT", "RR", "strata"])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_variance_of_clusters_that_span_silos_is_the_pooled_one(name: str, weighted: bool) -> None:
    options = {"weights": "weight"} if weighted else {}
    study = study_of(TARGETS[name], cluster="family", cluster_scope="spanning", **options)
    data = clinics(900, 12, seed=3)
    pooled = ft.run(study, {"all": data})
    found = ft.run(study, silos_of(data, 3))
    np.testing.assert_allclose(numbers(found), numbers(pooled), rtol=1e-12)
    np.testing.assert_allclose(
        found.run.covariance, oracle(study, data).covariance * 100 ** (name != "RR"), rtol=1e-7
    )
    central = ft.run(change(study, algorithm=CENTRAL), silos_of(data, 3))
    np.testing.assert_allclose(numbers(central), numbers(pooled), rtol=1e-12)
    # To take the parts for clusters of their own, as "silo" does, is another and here a smaller error.
    apart = ft.run(change(study, cluster_scope="silo"), silos_of(data, 3))
    assert apart.run.std_error[0] < 0.95 * found.run.std_error[0]


def test_with_coded_messages_too_and_without_a_closing_round() -> None:
    study = study_of(TARGETS["ATE"], cluster="family", cluster_scope="spanning")
    data = clinics(900, 12, seed=4)
    exact = ft.run(study, silos_of(data, 3))
    coded = ft.run(change(study, algorithm=ft.Coded()), silos_of(data, 3))
    np.testing.assert_allclose(coded.run.std_error, exact.run.std_error, rtol=1e-5)
    assert coded.run.account.rounds[Phase.CLOSING] == 0  # they ride along with the last check
    assert coded.run.account.bits(Phase.CLOSING) > 0


def test_a_cluster_that_spans_silos_is_refused_unless_declared() -> None:
    study = study_of(TARGETS["ATE"], cluster="family")
    silos = silos_of(clinics(300, 12, seed=1), 2)
    with pytest.raises(
        InputError,
        match=r"10 cluster\(s\) of 'family' are in more than one silo, 10 of them in "
        r"'silo 0' and 'silo 1'.*cluster_scope = \"silo\".*\"spanning\"",
    ):
        ft.run(study, silos)
    with pytest.raises(InputError, match="10 cluster"):
        ft.run(change(study, algorithm=CENTRAL), silos)
    assert ft.run(change(study, cluster_scope="silo"), silos).document["converged"]
    with pytest.raises(InputError, match="cluster_scope"):
        change(study, cluster_scope="global")


def test_the_sum_of_a_few_rows_does_not_leave_a_silo() -> None:
    study = study_of(TARGETS["ATE"], cluster="family", cluster_scope="spanning")
    data = population(200, 2)  # families of two
    silos = cut(data, [np.arange(0, 200, 2), np.arange(1, 200, 2)])
    with pytest.raises(RefusedError, match="silo 'silo 0' refused: the silo's policy"):
        ft.run(study, silos)
    whole = cut(data, [np.arange(100), np.arange(100, 200)])
    assert ft.run(study, whole).document["converged"]


def test_identifiers_do_not_leave_the_silo() -> None:
    study = study_of(TARGETS["ATE"], cluster="family")
    data = population(120, 6)
    data["family"] = np.array([f"SECRET-{k}" for k in data["family"]])
    result = ft.run(study, cut(data, [np.arange(60), np.arange(60, 120)]))
    sent = b"".join(bytes(r) for e in result.run.transcript.exchanges for r in e.replies.values())
    assert b"SECRET" not in sent
    up = result.run.account.bits_up[Phase.NUISANCE, "silo 0"]
    none = ft.run(change(study, cluster_scope="silo"), cut(data, [np.arange(60), np.arange(60, 120)]))
    more = up - none.run.account.bits_up[Phase.NUISANCE, "silo 0"]
    assert more == 30 * 128 + 32 + 11  # one digest per family, the fingerprint, the count


def test_folds_keep_clusters_that_span_silos_together() -> None:
    data = clinics(400, 12, seed=8)
    parts = silos_of(data, 3).values()
    folds = Folds(count=4, seed=3, cluster="family", spanning=True)
    found: dict[str, set[int]] = {}
    for part in parts:
        levels, codes = np.unique(part["family"], return_inverse=True)
        table = Table(
            n_rows=len(codes), numeric={}, factors={"family": Factor(codes, tuple(map(str, levels)))}
        )
        for label, fold in zip(part["family"], folds.of(table), strict=True):
            found.setdefault(str(label), set()).add(int(fold))
    assert all(len(each) == 1 for each in found.values())
    assert set.union(*found.values()) == {0, 1, 2, 3}
    study = study_of(TARGETS["ATE"], cluster="family", cluster_scope="spanning", folds=3)
    data = clinics(900, 12, seed=3)
    np.testing.assert_allclose(
        numbers(ft.run(study, silos_of(data, 3))), numbers(ft.run(study, {"all": data})), rtol=1e-10
    )


def test_a_secret_keys_the_identifiers_where_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "data.csv").write_text(
        "FAM,y,a,w,z,site\n"
        + "\n".join(f"{k // 2},{k % 10},{k % 2},{k / 7},{-k % 2},north" for k in range(40)),
        encoding="utf-8",
    )
    (tmp_path / "silo.toml").write_text(
        '[silo]\nname = "one"\n[data]\npath = "data.csv"\n[columns]\n'
        'family = {column = "FAM", secret = "four hospitals share this"}\n',
        encoding="utf-8",
    )
    study = study_of(TARGETS["ATE"], cluster="family")
    table = load(tmp_path / "silo.toml", schema_of(study), silo="one")
    levels = table.factors["family"].levels
    assert set(levels) == {keyed(str(k), "four hospitals share this") for k in range(20)}
    assert "four hospitals" not in repr(read_silo_file(tmp_path / "silo.toml"))
    plain = population(60, 1)
    with pytest.raises(InputError, match="'one' and 'two' keyed column 'family' with different secrets"):
        ft.run(study, {"one": tmp_path / "silo.toml", "two": plain})


def test_a_secret_is_long_and_for_identifiers() -> None:
    with pytest.raises(InputError, match="at least 16 characters"):
        ColumnMap(column="x", secret="x" * 15)
    study = study_of(TARGETS["ATE"])
    with pytest.raises(DataErrors, match="column 'a': has a secret, yet the study reads its levels"):
        load(
            population(30, 1),
            schema_of(study),
            silo="one",
            mapping={"a": ColumnMap(column="a", secret="x" * 16)},
        )


def test_messages_of_clusters_round_trip_and_garbage_is_refused() -> None:
    query = ClustersQuery(column="family", spanning=True)
    own = Clusters(fingerprint=b"abcd", digests=tuple(sorted(map(cluster_digest, "xyz"))))
    assert decode(query.answer_code, encode(query.answer_code, own)) == own
    assert decode(query.pooled_code, encode(query.pooled_code, own.digests[1:])) == own.digests[1:]
    for wrong in (own.digests[::-1], own.digests[:1] * 2):
        with pytest.raises(DecodeError):
            decode(query.pooled_code, encode(query.pooled_code, wrong))
    none = ClustersQuery(column="family", spanning=False)
    with pytest.raises(DecodeError):  # no cluster may be named where none may span
        decode(none.pooled_code, encode(query.pooled_code, own.digests))

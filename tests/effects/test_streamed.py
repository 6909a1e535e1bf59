"""A table streamed in small batches gives the bytes of the same table in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import fedtmle as ft
from fedtmle.data import DataErrors, load
from fedtmle.errors import DataError, InputError
from fedtmle.model.submodel import StreamedLinear
from fedtmle.model.table import StreamedTable, Table
from fedtmle.protocol.query import Phase
from fedtmle.studies.validate import validate
from fedtmle.studyfile.schema import schema_of
from fedtmle_core.parallel import set_threads
from tests.data_layer.asking import as_csv, as_parquet, make_database
from tests.declare import declare
from tests.effects.studies import VARIABLES, change, finish, population
from tests.effects.test_pooled import TARGETS, numbers, study_of
from tests.narrow import targeted

ROWS = 4_500  # in batches of 2,048, DuckDB's smallest, and blocks of 700
CODED = ft.Coded(tolerance=1e-4)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtmle.data.files._VECTORS_PER_BATCH", 1)
    monkeypatch.setattr("fedtmle_core.parallel.BLOCK", 700)


def silo_file(folder: Path, where: str, *, stream: bool) -> Path:
    path = folder / f"{'streamed' if stream else 'held'}.toml"
    path.write_text(f'[silo]\nname = "s"\n[data]\n{where}\nstream = {str(stream).lower()}\n')
    return path


def csv(frame: pd.DataFrame, folder: Path) -> str:
    return f'path = "{Path(str(as_csv(frame, folder))).name}"'


def parquet(frame: pd.DataFrame, folder: Path) -> str:
    return f'path = "{Path(str(as_parquet(frame, folder))).name}"'


def database(frame: pd.DataFrame, folder: Path) -> str:
    return f'database = "{make_database(frame, folder).name}"\ntable = "patients"'


def query(frame: pd.DataFrame, folder: Path) -> str:
    return f'database = "{make_database(frame, folder).name}"\nquery = "SELECT * FROM patients"'  # noqa: S608 - a constant


def both(study: ft.Study, where: str, folder: Path) -> list[ft.StudyResult]:
    return [
        ft.run(study, {"s": silo_file(folder, where, stream=stream), "t": held(folder)})
        for stream in (False, True)
    ]


def held(folder: Path) -> Path:
    return folder / "other.csv"


def same_bytes(study: ft.Study, where: str, folder: Path) -> ft.StudyResult:
    """Every message of the two runs is the same, and so is the result."""
    in_memory, streamed = both(study, where, folder)
    assert in_memory.run.transcript.exchanges == streamed.run.transcript.exchanges
    assert numbers(in_memory).tobytes() == numbers(streamed).tobytes()
    return streamed


def rows(study: ft.Study, folder: Path, n: int = ROWS) -> pd.DataFrame:
    missing = study.missingness_model is not None
    arms = max(2, len(study.target.arms))
    pd.DataFrame(population(300, 1, arms=arms, missing=missing)).to_csv(folder / "other.csv", index=False)
    return pd.DataFrame(population(n, 5, arms=arms, missing=missing))


@pytest.mark.parametrize("name", TARGETS)
def test_every_target(name: str, tmp_path: Path) -> None:
    study = study_of(TARGETS[name], weights="weight")
    same_bytes(change(study, algorithm=CODED), parquet(rows(study, tmp_path), tmp_path), tmp_path)


@pytest.mark.parametrize("write", [csv, parquet, database, query])
def test_every_source(write: Callable[[pd.DataFrame, Path], str], tmp_path: Path) -> None:
    study = study_of(TARGETS["ATE"], missingness_model=ft.GLM("C(a) + w"))
    result = same_bytes(study, write(rows(study, tmp_path), tmp_path), tmp_path)
    assert result.run.sizes["s"] == ROWS


@pytest.mark.parametrize(
    "options", [{"clever": "weight"}, {"submodel": "contrast"}, {"link": "linear"}, {"algorithm": CODED}]
)
def test_every_fluctuation(options: dict[str, Any], tmp_path: Path) -> None:
    study = change(study_of(TARGETS["ATE"]), **options)
    same_bytes(study, parquet(rows(study, tmp_path), tmp_path), tmp_path)


def test_supplied_predictions(tmp_path: Path) -> None:
    study = ft.Study(
        target=TARGETS["ATE"],
        outcome_model=ft.Supplied("q0", "q1"),
        treatment_model=ft.Supplied("g"),
        algorithm=CODED,
        variables=VARIABLES,
    )
    frame = rows(study, tmp_path).assign(q0=4.0, q1=5.0, g=0.5)
    pd.read_csv(held(tmp_path)).assign(q0=4.0, q1=5.0, g=0.5).to_csv(held(tmp_path), index=False)
    result = same_bytes(study, parquet(frame, tmp_path), tmp_path)
    assert result.run.account.rounds[Phase.NUISANCE] <= 2  # nothing was fitted


def test_threads_change_no_bit(tmp_path: Path) -> None:
    study = study_of(TARGETS["ATT"])
    source = silo_file(tmp_path, parquet(rows(study, tmp_path), tmp_path), stream=True)
    results = []
    for threads in (1, 2, 3):
        set_threads(threads)
        try:
            results.append(ft.run(study, {"s": source, "t": held(tmp_path)}).run.transcript.exchanges)
        finally:
            set_threads(None)
    assert results[0] == results[1] == results[2]


def test_leverages_are_those_of_all_rows(tmp_path: Path) -> None:
    """What a policy looks at; plain sums, so equal to rounding."""
    study = study_of(TARGETS["ATE"])
    where = parquet(rows(study, tmp_path), tmp_path)
    problem = targeted(finish(study, {"s": silo_file(tmp_path, where, stream=False)})[0]).problem
    eps = np.array([0.01, -0.02])
    found = []
    for stream in (False, True):
        table = load(silo_file(tmp_path, where, stream=stream), schema_of(study), silo="s")
        submodel = problem.submodel(problem.start(), table)
        assert isinstance(submodel, StreamedLinear) is stream
        assert submodel.n_rows == ROWS
        look = submodel.look(eps)
        closing = np.concatenate(list(problem.disclosed_columns(problem.start(), table)), axis=1)
        found.append((look.largest, look.columns, submodel.column_people(), closing.sum(axis=1)))
    for here, there in zip(*found, strict=True):
        np.testing.assert_allclose(here, there, rtol=1e-9)


def test_the_tables_are_the_same(tmp_path: Path) -> None:
    sites = ["it's north", *VARIABLES["site"].codes]
    study = study_of(TARGETS["strata"], variables=declare(VARIABLES, site=sites))
    frame = rows(study, tmp_path)
    frame.loc[:2_100, "site"] = "it's north"  # a level that later batches lack, with a quote in it
    where = parquet(frame, tmp_path)
    whole = load(silo_file(tmp_path, where, stream=False), schema_of(study), silo="s")
    parts = load(silo_file(tmp_path, where, stream=True), schema_of(study), silo="s")
    assert isinstance(whole, Table)
    assert isinstance(parts, StreamedTable)
    batches = list(parts.read())
    assert len(batches) == 3
    for name, column in whole.numeric.items():
        np.testing.assert_array_equal(np.concatenate([b.numeric[name] for b in batches]), column)
    for name, factor in whole.factors.items():
        assert parts.levels(name) == factor.levels
        assert parts.counts(name) == factor.counts == tuple(np.bincount(factor.codes).tolist())
        np.testing.assert_array_equal(np.concatenate([b.factors[name].codes for b in batches]), factor.codes)


def test_problems_are_counted_over_all_batches(tmp_path: Path) -> None:
    study = study_of(TARGETS["ATE"])
    frame = rows(study, tmp_path)
    frame.loc[[5, 2_500, 4_400], "y"] = 11.0
    frame.loc[[7, 3_000], "w"] = np.nan
    where = parquet(frame, tmp_path)
    told = []
    for stream in (False, True):
        with pytest.raises(DataErrors) as caught:
            load(silo_file(tmp_path, where, stream=stream), schema_of(study), silo="s")
        told.append({str(defect) for defect in caught.value.defects})
    assert told[0] == told[1]


def test_a_file_that_changes_is_noticed(tmp_path: Path) -> None:
    study = study_of(TARGETS["ATE"])
    frame = rows(study, tmp_path)
    table = load(silo_file(tmp_path, parquet(frame, tmp_path), stream=True), schema_of(study), silo="s")
    assert isinstance(table, StreamedTable)
    parquet(frame.iloc[:-1], tmp_path)
    with pytest.raises(DataError, match="changed while the study ran"):
        next(table.read())


def test_the_digest_sees_every_cell_and_no_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = study_of(TARGETS["ATE"])
    frame = rows(study, tmp_path)

    def digest(frame: pd.DataFrame) -> bytes:
        source = silo_file(tmp_path, parquet(frame, tmp_path), stream=True)
        table = load(source, schema_of(study), silo="s")
        assert isinstance(table, StreamedTable)
        return table.digest

    first = digest(frame)
    monkeypatch.setattr("fedtmle.data.files._VECTORS_PER_BATCH", 2)
    assert digest(frame) == first
    for column, value in (("w", 0.125), ("site", "south" if frame["site"][4_000] != "south" else "north")):
        changed = frame.copy()
        changed.loc[4_000, column] = value
        assert digest(changed) != first


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"cluster": "family"}, "cluster"),
        ({"folds": 2}, "folds"),
        ({"outcome_model": ft.SuperLearner(learners=(ft.GLM("w"), ft.GLM("z")))}, "outcome model"),
        ({"algorithm": ft.Central()}, "algorithm Central"),
    ],
)
def test_what_needs_all_rows_says_so(options: dict[str, Any], named: str, tmp_path: Path) -> None:
    study = change(study_of(TARGETS["ATE"]), **options)
    source = silo_file(tmp_path, parquet(rows(study, tmp_path, 300), tmp_path), stream=True)
    with pytest.raises(InputError, match=named) as caught:
        ft.run(study, {"s": source})
    assert "silo 's'" in str(caught.value)


def test_stream_is_true_or_false(tmp_path: Path) -> None:
    path = silo_file(tmp_path, 'path = "x.csv"', stream=True)
    path.write_text(path.read_text().replace("true", '"yes"'))
    with pytest.raises(DataErrors, match=r"\[data\] stream: this is neither true nor false"):
        load(path, schema_of(study_of(TARGETS["ATE"])), silo="s")


def test_validate_reads_a_streamed_table(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from fedtmle.cli import app

    assert CliRunner().invoke(app, ["init", str(tmp_path / "e")]).exit_code == 0
    (silo, *_) = sorted((tmp_path / "e").rglob("*silo*.toml")) or sorted((tmp_path / "e").rglob("*.toml"))
    text = silo.read_text()
    silo.write_text(text.replace("[data]\n", "[data]\nstream = true\n"))
    study = next(path for path in (tmp_path / "e").rglob("study.toml"))
    checked = validate(study)
    assert not checked.defects
    assert any(isinstance(table, StreamedTable) for table in checked.tables.values())

"""The paper's target from a study file, by the entry point of the paper's package, and across hospitals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.errors import InputError
from fedtmle.studyfile.file import read_study
from fedtmle.targets.residuals import installed_target
from fedtmle_paper.benchmark import gaussian_mixture
from fedtmle_paper.optimal_transport import OptimalTransport
from fedtmle_paper.target import TransportOffsets
from tests.command import invoke

pytestmark = pytest.mark.skipif(
    installed_target("TransportOffsets") is None, reason="fedtmle-paper was installed before: run `make`"
)


def mixture(n: int, seed: int) -> np.ndarray:
    return np.round(gaussian_mixture(n, np.random.default_rng(seed)), 6)


def write(folder: Path, *, allow: str = '["fedtmle-paper"]') -> Path:
    folder.mkdir(exist_ok=True)
    rows = mixture(600, 2)
    for k, name in enumerate(("a", "b", "c")):
        part = rows[200 * k : 200 * (k + 1)]
        np.savetxt(folder / f"{name}.csv", part, delimiter=",", header="u,v", comments="", fmt="%.6f")
        (folder / f"{name}.toml").write_text(
            f'[silo]\nname = "{name}"\n\n[data]\npath = "{name}.csv"\n\n[policy]\nallow_targets = {allow}\n'
        )
    pilot = ", ".join(f"[{u}, {v}]" for u, v in mixture(60, 1))
    (folder / "study.toml").write_text(
        f"""
[target]
kind = "TransportOffsets"
columns = ["u", "v"]
pilot = [{pilot}]

[variables]
u = {{kind = "number", range = [-12, 12]}}
v = {{kind = "number", range = [-12, 12]}}

[algorithm]
tolerance = 1e-3

[silos]
a = "a.toml"
b = "b.toml"
c = "c.toml"
"""
    )
    return folder / "study.toml"


def test_a_study_file_gives_the_offsets_of_the_problem_solved_directly(tmp_path: Path) -> None:
    path, saved = write(tmp_path), tmp_path / "result.json"
    done = invoke("run", path, "--out", saved, "--report", tmp_path / "page.html", "--quiet")
    assert done.exit_code == 0, done.output
    document = json.loads(saved.read_text())
    rows, problem = mixture(600, 2), OptimalTransport()
    direct = ft.solve(
        problem,
        problem.start(mixture(60, 1)),
        {name: rows[200 * k : 200 * (k + 1)] for k, name in enumerate("abc")},
        ft.Coded(tolerance=1e-3),
    )
    assert [row["estimate"] for row in document["estimates"]] == direct.psi.tolist()
    errors = np.sqrt(np.diag(direct.covariance))
    np.testing.assert_allclose([row["std_error"] for row in document["estimates"]], errors, rtol=1e-14)
    assert np.abs(direct.psi - problem.direct(rows)).max() < 0.01
    assert document["study"]["target"]["brought"]["distribution"] == "fedtmle-paper"


def test_the_owner_can_audit_preview_and_refuse_it(tmp_path: Path) -> None:
    path = write(tmp_path)
    shown = invoke("silo", "preview", path, "--silo", tmp_path / "a.toml")
    assert shown.exit_code == 0, shown.output
    assert "TransportOffsets of fedtmle-paper" in " ".join(shown.output.split())
    audited = invoke("risk", path, "--silo", "a", "--attribute", "u", "--attribute", "v", "--json")
    assert audited.exit_code == 0, audited.output
    assert {finding["column"] for finding in json.loads(audited.output)["findings"]} == {"u", "v"}
    write(tmp_path, allow="[]")
    assert invoke("run", path, "--quiet").exit_code == 4


def test_arguments_are_checked() -> None:
    pilot = tuple(map(tuple, mixture(20, 1)))
    with pytest.raises(InputError, match="pilot: expected points of 2 number"):
        TransportOffsets(columns=("u", "v"), pilot=((1.0,),))
    with pytest.raises(InputError, match="columns: expected at least one, each once"):
        TransportOffsets(columns=("u", "u"), pilot=pilot)
    with pytest.raises(InputError, match="fluctuation"):
        TransportOffsets(columns=("u", "v"), pilot=pilot, fluctuation="none")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="pilot: "):
        TransportOffsets(columns=("u", "v"), pilot=((0.0, 0.0),) * 5)


@pytest.mark.slow
def test_deployed_it_has_the_bytes_of_the_embedded_run(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    from fedtmle.deploy.demo import approve_everywhere, local_deployment

    path, saved = write(tmp_path / "study"), tmp_path / "result.json"
    file = read_study(path)
    with local_deployment(tmp_path / "consortium", file):
        approve_everywhere(file)
        done = invoke("run", path, "--on", tmp_path / "consortium", "--out", saved, "--quiet")
        assert done.exit_code == 0, done.output
    assert json.loads(saved.read_text()) == json.loads(ft.run(file.study, dict(file.silos)).to_json())

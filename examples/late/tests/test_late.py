"""The local average treatment effect: against ratios written longhand, from a study file, and deployed."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from dataclasses import replace
from functools import partial
from importlib.metadata import Distribution
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.errors import InputError, NumericalError
from fedtmle.model.check import FiniteLaw
from fedtmle.model.table import Factor, Table
from fedtmle.programs.nuisance import effect_columns
from fedtmle.protocol.plan import files_digest, provenance
from fedtmle.studies.home import check_target
from fedtmle.studyfile.file import file_plan, read_study

late = pytest.importorskip("fedtmle_late", reason="install examples/late: `make` does")

ROOT = Path(__file__).parents[3]
VARIABLES = {
    "y": {"kind": "number", "range": (-12, 12)},
    "a": {"kind": "binary"},
    "z": {"kind": "binary"},
    "w": {"kind": "category", "levels": ["0", "1", "2"]},
    "x": {"kind": "number", "range": (-5, 5)},
}
EFFECT = 0.8  # of the treatment on the outcome, the same for all


def people(n: int, seed: int) -> dict[str, np.ndarray]:
    """People with an unmeasured confounder u of treatment and outcome; z is random given w and x."""
    rng = np.random.default_rng(seed)
    w, x, u = rng.integers(3, size=n), rng.normal(size=n).clip(-4, 4), rng.normal(size=n)
    z = rng.binomial(1, 1 / (1 + np.exp(-(0.3 * w - 0.3 + 0.4 * x))))
    a = rng.binomial(1, 1 / (1 + np.exp(-(-1.2 + 2.2 * z + 0.4 * x + u))))
    y = (EFFECT * a + 0.5 * w + 0.6 * x + u + rng.normal(size=n)).clip(-12, 12)
    return {"w": w, "x": x, "z": z, "a": a, "y": y}


def study(outcome: str, treatment: str, instrument: str, **more) -> ft.Study:
    return ft.Study(
        target=late.LATE(outcome="y", treatment="a", instrument="z", instrument_model=ft.GLM(instrument)),
        outcome_model=ft.GLM(outcome),
        treatment_model=ft.GLM(treatment),
        variables=ft.Variables(VARIABLES),
        **more,
    )


def split(data: dict[str, np.ndarray], parts: int = 3) -> dict[str, dict[str, np.ndarray]]:
    n = len(data["y"])
    return {
        f"silo{k}": {name: v[k * n // parts : (k + 1) * n // parts] for name, v in data.items()}
        for k in range(parts)
    }


FINE = {"algorithm": ft.Gradient(optimizer=ft.Newton(stop=1e-12)), "sums": "exact"}


def test_without_covariates_it_is_the_two_stage_estimate() -> None:
    """The ratio of differences of means, and two-stage least squares with its robust standard error."""
    data = people(900, 1)
    table = ft.run(study("C(z)", "C(z)", "1", **FINE), split(data)).table()
    y, a, z = data["y"], data["a"], data["z"]
    wald = (y[z == 1].mean() - y[z == 0].mean()) / (a[z == 1].mean() - a[z == 0].mean())
    Z, X = np.column_stack([np.ones(900), z]), np.column_stack([np.ones(900), a])
    fitted = Z @ np.linalg.lstsq(Z, X, rcond=None)[0]
    beta = np.linalg.lstsq(fitted, y, rcond=None)[0]
    assert abs(wald - beta[1]) < 1e-12
    assert abs(table["estimate"][0] - beta[1]) < 1e-8
    bread = np.linalg.inv(fitted.T @ fitted)
    meat = (fitted * (y - X @ beta)[:, None] ** 2).T @ fitted
    robust = np.sqrt((bread @ meat @ bread)[1, 1] * 900 / 899)
    np.testing.assert_allclose(table["std_error"][0], robust, rtol=1e-7)
    np.testing.assert_allclose(table["estimate"][1], a[z == 1].mean() - a[z == 0].mean(), atol=1e-8)


def test_with_saturated_models_it_is_the_ratio_of_standardised_differences() -> None:
    data = people(1500, 2)
    formula = "C(z) * C(w)"
    table = ft.run(study(formula, formula, "C(w)", **FINE), split(data)).table()
    means = {}
    for name in ("y", "a"):
        cells = [[data[name][(data["z"] == z) & (data["w"] == w)].mean() for w in range(3)] for z in (0, 1)]
        shares = np.bincount(data["w"]) / 1500
        means[name] = np.array(cells) @ shares
    ratio = np.diff(means["y"])[0] / np.diff(means["a"])[0]
    assert abs(table["estimate"][0] - ratio) < 1e-8


def test_coded_targeting_agrees_and_the_partition_does_not_matter() -> None:
    data, models = people(900, 3), ("C(z) + x + C(w)", "C(z) + x + C(w)", "x + C(w)")
    exact = ft.run(study(*models, **FINE), split(data)).table()
    again = ft.run(study(*models, **FINE), split(data, 2)).table()
    np.testing.assert_array_equal(exact["estimate"], again["estimate"])
    coded = ft.run(study(*models), split(data)).table()
    np.testing.assert_allclose(coded["estimate"], exact["estimate"], atol=1e-4 * exact["std_error"].min())


@pytest.mark.parametrize(
    ("models", "is_consistent"),
    [
        (("C(z)", "C(z)", "C(w)"), True),  # the instrument's model is right
        (("C(z) * C(w)", "C(z) * C(w)", "1"), True),  # those of outcome and treatment are
        (("C(z)", "C(z)", "1"), False),  # none is
    ],
)
def test_the_estimate_is_doubly_robust(models: tuple[str, str, str], is_consistent: bool) -> None:
    rng = np.random.default_rng(11)
    n = 20_000
    w, u = rng.integers(3, size=n), rng.normal(size=n)
    z = rng.binomial(1, np.array([0.2, 0.5, 0.8])[w])
    a = rng.binomial(1, 1 / (1 + np.exp(1.2 - 2.2 * z - u)))
    y = (EFFECT * a + w + u + rng.normal(size=n)).clip(-12, 12)
    data = {"w": w, "x": np.zeros(n), "z": z, "a": a, "y": y}
    row = ft.run(study(*models, **FINE, diagnostics=False), split(data)).document["estimates"][0]
    distance = abs(row["estimate"] - EFFECT) / row["std_error"]
    assert distance < 3 if is_consistent else distance > 10


def test_the_influence_function_is_the_derivative_of_the_ratio() -> None:
    """On a law with finitely many atoms, with W in the law, by differences of the ratio written longhand."""
    atoms = [(z, w, a, y) for z in (0, 1) for w in (0, 1) for a in (0, 1) for y in (-1.0, 2.0)]
    rng = np.random.default_rng(5)
    weights = rng.uniform(0.5, 1.5, (2, 2, 4))
    weights[1, :, 2:] *= 3
    masses = (weights / weights.sum()).ravel()
    z, w, a, y = np.array(atoms).T
    support = Table(
        n_rows=16,
        numeric={"y": y},
        factors={name: Factor(v.astype(np.int64), ("0", "1")) for name, v in (("z", z), ("w", w), ("a", a))},
    )

    def means(p: np.ndarray) -> np.ndarray:
        of_w = np.array([p[w == k].sum() for k in (0, 1)]) / p.sum()
        rows = [
            [(p * v)[(z == s) & (w == k)].sum() / p[(z == s) & (w == k)].sum() for k in (0, 1)]
            for v in (y, a)
            for s in (0, 1)
        ]
        return np.array(rows) @ of_w

    class Cell:
        """A regression that is its own table of means by z and w, on the unit scale."""

        def __init__(self, values: np.ndarray) -> None:
            self.values = values

        def predict(self, table: Table) -> np.ndarray:
            return self.values[table.factors["z"].codes, table.factors["w"].codes]

    def cells(v: np.ndarray) -> np.ndarray:
        return np.array(
            [
                [(masses * v)[(z == s) & (w == k)].sum() / masses[(z == s) & (w == k)].sum() for k in (0, 1)]
                for s in (0, 1)
            ]
        )

    p_z = np.array([masses[(z == 1) & (w == k)].sum() / masses[w == k].sum() for k in (0, 1)])
    columns = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("1"),
        treatment_model=ft.GLM("1"),
        variables=ft.Variables({"y": {"kind": "number", "range": (-3, 5)}, "a": {"kind": "binary"}}),
    )
    taken = effect_columns(columns)
    fits = {
        "outcome": Cell((cells(y) + 3) / 8),
        "treatment": Cell(cells(a)),
        "instrument": Cell(np.stack([p_z, p_z])),
    }
    problem = late.ResidualProblem(
        components=(("y0", "y1"), ("a0", "a1")),
        bounds=((-3.0, 5.0), (0.0, 1.0)),
        ceiling=10.0,
        prepare=partial(
            late.residuals,
            fits=fits,
            taken=taken,
            assigned=replace(taken, treatment="z", arms=("0", "1")),
            floor=0.1,
        ),
    )
    finite = FiniteLaw(support=support, masses=masses, law=problem.start(), psi=means)
    ft.check_problem(problem, problem.start(), support, finite=finite).raise_if_failed()
    target = late.LATE(outcome="y", treatment="a", instrument="z")
    psi = means(masses)
    ratio = target.summarise(psi, "")[0]
    eif = problem.eif(problem.start(), support, psi) @ ratio.gradient
    assert abs(masses @ eif) < 1e-12

    def late_at(p: np.ndarray) -> float:
        m = means(p)
        return (m[1] - m[0]) / (m[3] - m[2])

    assert abs(ratio.value - late_at(masses)) < 1e-14
    for _ in range(5):
        score = rng.uniform(-1, 1, 16)
        score -= masses @ score
        h = 1e-3
        steps = [
            (late_at(masses * (1 + k * h * score)) - late_at(masses * (1 - k * h * score))) / (2 * k * h)
            for k in (1, 2, 4)
        ]
        once = [(4 * steps[0] - steps[1]) / 3, (4 * steps[1] - steps[2]) / 3]
        slope = (16 * once[0] - once[1]) / 15
        np.testing.assert_allclose((masses * score) @ eif, slope, atol=1e-10)


def test_it_passes_the_checks_of_a_silo() -> None:
    check_target(study("C(z) + x + C(w)", "C(z) + x", "x"))


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (("C(a) + x", "C(z)", "1"), "outcome_model: it uses 'a', which is the study's treatment"),
        (("C(z)", "y + C(z)", "1"), "treatment_model: it uses 'y', which is the study's outcome"),
        (("C(z)", "C(z)", "C(z)"), "instrument_model: it uses 'z', which is the study's instrument"),
        (("C(z)", "C(z)", "C(a)"), "instrument_model: it uses 'a', which is the study's treatment"),
    ],
)
def test_models_that_use_a_response_are_refused(models: tuple[str, str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        study(*models)


def test_arguments_that_make_no_sense_are_refused() -> None:
    with pytest.raises(InputError, match="instrument: 'a' is the outcome or the treatment"):
        late.LATE(outcome="y", treatment="a", instrument="a")
    with pytest.raises(InputError, match="supplied"):
        replace(study("C(z)", "C(z)", "1"), outcome_model=ft.Supplied("x", "x"))
    with pytest.raises(InputError, match="g_bounds"):
        ft.run(study("C(z)", "C(z)", "1", g_bounds=None), split(people(300, 1)))
    with pytest.raises(NumericalError, match="does not change the treatment"):
        late.LATE(outcome="y", treatment="a", instrument="z").summarise(np.array([0.1, 0.2, 0.5, 0.5]), "")


def write_study(folder: Path, *, allow: str = '["fedtmle-late"]') -> Path:
    """Write the study of the documentation with three hospitals."""
    folder.mkdir(exist_ok=True)
    for name, columns in split(people(900, 7)).items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(columns)
            writer.writerows(zip(*columns.values(), strict=True))
        policy = f"\n[policy]\nallow_targets = {allow}\n" if allow else ""
        (folder / f"{name}.toml").write_text(
            f'[silo]\nname = "{name}"\n\n[data]\npath = "{name}.csv"\n{policy}'
        )
    (folder / "study.toml").write_text(STUDY)
    return folder / "study.toml"


STUDY = """
[target]
kind = "LATE"
outcome = "y"
treatment = "a"
instrument = "z"

[variables]
y = {kind = "number", range = [-12, 12], label = "Score after a year"}
a = {kind = "binary", label = "Treatment"}
z = {kind = "binary", label = "Encouragement"}
w = {kind = "category", levels = ["0", "1", "2"]}
x = {kind = "number", range = [-5, 5], label = "Score before"}

[models.outcome]
formula = "C(z) + C(w) + x"

[models.treatment]
formula = "C(z) + C(w) + x"

[models.instrument]
formula = "C(w) + x"

[silos]
silo0 = "silo0.toml"
silo1 = "silo1.toml"
silo2 = "silo2.toml"
"""


def command(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_study_file_gives_the_estimate_of_python(tmp_path: Path) -> None:
    path, saved = write_study(tmp_path), tmp_path / "result.json"
    done = command("run", path, "--out", saved, "--report", tmp_path / "report.html", "--quiet")
    assert done.exit_code == 0, done.output
    document = json.loads(saved.read_text())
    models = ("C(z) + C(w) + x", "C(z) + C(w) + x", "C(w) + x")
    data = {name: path.with_name(f"{name}.csv") for name in ("silo0", "silo1", "silo2")}
    there = ft.run(study(*models), data).document
    assert document["estimates"] == json.loads(json.dumps(there["estimates"]))
    page = (tmp_path / "report.html").read_text()
    assert "The instrument model was" in page
    assert "Quantities behind the estimates" in page
    assert "monotonicity" in page


def test_the_page_of_the_documentation_works_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/late.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    exec(compile(example, "late.md", "exec"), {})  # noqa: S102 - the documentation's own text
    assert "LATE: " in capsys.readouterr().out
    (written,) = (
        text for text in re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL) if "[target]" in text
    )
    assert tomllib.loads(written) == tomllib.loads(STUDY)


def test_an_owner_who_does_not_allow_it_refuses(tmp_path: Path) -> None:
    done = command("run", write_study(tmp_path, allow=""), "--quiet")
    assert done.exit_code == 4
    assert "does not allow the distribution that brings the plan's target" in done.output


def test_a_defect_of_the_instrument_model_is_named_with_its_section(tmp_path: Path) -> None:
    path = write_study(tmp_path)
    path.write_text(STUDY.replace('formula = "C(w) + x"', 'formula = "C(w) + nobody"'))
    done = command("validate", path)
    assert done.exit_code == 1
    assert "nobody" in done.output


def test_the_files_have_one_digest_developed_and_installed(tmp_path: Path) -> None:
    """What an owner approves does not depend on how the distribution was installed."""
    wheel = build(ROOT / "examples/late", tmp_path / "wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (info,) = (tmp_path / "site").glob("*.dist-info")
    installed = files_digest(Distribution.at(info), "fedtmle_late")
    assert provenance(late.LATE).digest == hashlib.sha256(installed).hexdigest()


def build(project: Path, out: Path) -> Path:
    words = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    done = subprocess.run(words, cwd=project, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.mark.slow
@pytest.mark.timeout(3600)  # the compiled kernels are made anew
def test_a_clean_environment_runs_the_study(tmp_path: Path) -> None:
    """The wheels in an environment of their own; the dependencies are this environment's."""
    path = write_study(tmp_path / "study")
    place = tmp_path / "clean"
    venv.create(place, with_pip=False)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = place / "lib" / version / "site-packages"
    for project in (ROOT / "core", ROOT, ROOT / "examples/late"):
        with zipfile.ZipFile(build(project, tmp_path / f"wheel-{project.name}")) as archive:
            archive.extractall(site)
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "PYTHONPATH": f"{site}{os.pathsep}{sysconfig.get_path('purelib')}",
    }

    def fedtmle(*words: object) -> subprocess.CompletedProcess[str]:
        line = [str(place / "bin/python"), "-m", "fedtmle", *map(str, words)]
        return subprocess.run(
            line, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
        )

    where = subprocess.run(
        [
            str(place / "bin/python"),
            "-c",
            "import fedtmle, fedtmle_late; print(fedtmle.__file__, fedtmle_late.__file__)",
        ],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        check=True,
    ).stdout.split()
    assert all(str(site) in file for file in where)
    saved = tmp_path / "clean.json"
    done = fedtmle("run", path, "--out", saved, "--quiet")
    assert done.returncode == 0, done.stdout + done.stderr
    here = tmp_path / "here.json"
    assert command("run", path, "--out", here, "--quiet").exit_code == 0
    clean, ours = json.loads(saved.read_text()), json.loads(here.read_text())
    assert clean["estimates"] == ours["estimates"]
    assert clean["plan"] == ours["plan"]
    write_study(tmp_path / "study", allow="")
    assert fedtmle("run", path, "--quiet").returncode == 4


@pytest.mark.slow
def test_a_deployed_study_has_the_bytes_of_the_embedded_one(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    from fedtmle.deploy.demo import local_deployment

    path = write_study(tmp_path / "study")
    file, saved = read_study(path), tmp_path / "result.json"
    with local_deployment(tmp_path / "consortium", file):
        for silo in file.silos.values():
            done = command("silo", "approve", path, "--silo", silo, "--yes")
            assert done.exit_code == 0, done.output
            assert "LATE of fedtmle-late 0.1.0" in done.output
        done = command("run", path, "--on", tmp_path / "consortium", "--out", saved, "--quiet")
        assert done.exit_code == 0, done.output
    there = json.loads(saved.read_text())
    here = json.loads(ft.run(file.study, dict(file.silos)).to_json())
    assert there["plan"] == here["plan"] == file_plan(file).digest.hex()
    assert there["transcript"] == here["transcript"]
    assert there == here


@pytest.mark.slow
def test_a_deployed_silo_that_does_not_allow_it_refuses(tmp_path: Path) -> None:
    pytest.importorskip("nvflare")
    from fedtmle.deploy.demo import approve_everywhere, local_deployment

    path = write_study(tmp_path / "study")
    silo = tmp_path / "study" / "silo1.toml"
    silo.write_text(silo.read_text().partition("[policy]")[0])
    file = read_study(path)
    with local_deployment(tmp_path / "consortium", file):
        approve_everywhere(file)
        done = command("run", path, "--on", tmp_path / "consortium", "--quiet")
    assert done.exit_code == 4, done.output
    assert "does not allow the distribution that brings the plan's target" in " ".join(done.output.split())


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_intervals_cover_the_effect() -> None:
    """Over 2,000 samples of 800 people; all models are right but for the distribution of the residuals."""
    models = ("C(z) + x + C(w)", "C(z) + x + C(w)", "x + C(w)")
    asked = study(*models, algorithm=ft.Gradient(optimizer=ft.Newton()), diagnostics=False)
    rows = [ft.run(asked, split(people(800, 10_000 + k), 2)).document["estimates"][0] for k in range(2000)]
    estimates = np.array([row["estimate"] for row in rows])
    covered = np.mean([row["conf_low"] <= EFFECT <= row["conf_high"] for row in rows])
    errors = np.array([row["std_error"] for row in rows])
    assert 0.93 <= covered <= 0.97
    assert 0.9 < errors.mean() / estimates.std() < 1.1
    assert abs(estimates.mean() - EFFECT) < 0.1 * estimates.std()

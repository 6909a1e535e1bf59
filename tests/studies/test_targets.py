"""Targets of other distributions: from an installed file to a study, a refusal, an audit and a report."""

from __future__ import annotations

import base64
import hashlib
import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedtmle as ft
from fedtmle.errors import InputError, RefusedError
from fedtmle.protocol import plan as module
from fedtmle.protocol.plan import Provenance, provenance
from fedtmle.protocol.policy import UNGUARDED, Policy
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle.studies.home import _passed, check_target, examine_target, open_party, synthetic_rows
from fedtmle.studyfile.file import StudyFileErrors, file_plan, read_study
from fedtmle.studyfile.schema import schema_of
from fedtmle.targets.residuals import installed_target
from tests.command import invoke
from tests.homes import home_at

SOURCE = '''
"""The mean of a bounded outcome, as a target of its own."""

from dataclasses import dataclass

import fedtmle as ft
from fedtmle.programs.target import AbstractTarget, StartedTarget
from fedtmle.targets.residuals import OnColumns


@dataclass(frozen=True, kw_only=True)
class PlainMean(AbstractTarget):
    """E[Y]."""

    description = "a plain mean"
    fixed_options = ("weights", "cluster", "clever", "submodel", "link", "folds", "g_bounds")
    guess: float = 0.5

    def question_stem(self):
        return f"What is the mean of {self.outcome}"

    def start(self, begun):
        low, high = begun.columns.outcome_bounds
        problem = OnColumns(problem=MEAN(bounds=(low, high)), columns=(self.outcome,))
        return StartedTarget(problem=problem, law=problem.problem.start(low + self.guess * (high - low)))
        yield

    def summarise(self, psi, label):
        return [
            ft.Summary(name="mean", value=float(psi[0]), gradient=psi * 0 + 1, scale=ft.Scale.VALUE)
        ]
'''
STUDY = """
[target]
kind = "PlainMean"
outcome = "y"
{key}
[variables]
y = {{kind = "number", range = [0, 10]}}

[silos]
north = "north.toml"
south = "south.toml"
"""


def install(folder: Path, source: str = SOURCE.replace("MEAN", "ft.Mean"), name: str = "plain-mean") -> Path:
    """Write a distribution as pip installs one: its module, its entry point and its RECORD."""
    top = name.replace("-", "_")
    file = folder / top / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text(source, encoding="utf-8")
    info = folder / f"{top}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[fedtmle.targets]\nPlainMean = {top}:PlainMean\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(
        f"{top}/__init__.py,sha256={digest},{file.stat().st_size}\n{info.name}/RECORD,,\n"
    )
    return file


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of installed distributions, which is forgotten at the end."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    importlib.invalidate_caches()
    yield folder
    for name in [name for name in sys.modules if name.partition(".")[0] in ("plain_mean", "other_mean")]:
        del sys.modules[name]
    provenance.cache_clear()
    module._distribution.cache_clear()
    _passed.clear()


def study_file(folder: Path, *, allow: str = '["plain-mean"]', key: str = "") -> Path:
    rng = np.random.default_rng(3)
    for name in ("north", "south"):
        values = "\n".join(f"{v:.3f}" for v in rng.uniform(1, 9, 60))
        (folder / f"{name}.csv").write_text(f"y\n{values}\n")
        policy = f"[policy]\nallow_targets = {allow}\n" if allow else ""
        (folder / f"{name}.toml").write_text(
            f'[silo]\nname = "{name}"\n\n[data]\npath = "{name}.csv"\n\n{policy}'
        )
    path = folder / "study.toml"
    path.write_text(STUDY.format(key=key), encoding="utf-8")
    return path


def pooled(folder: Path) -> np.ndarray:
    return np.concatenate([np.loadtxt(folder / f"{n}.csv", skiprows=1) for n in ("north", "south")])


def test_a_study_file_names_a_target_of_another_distribution(site: Path, tmp_path: Path) -> None:
    install(site)
    assert installed_target("PlainMean") is not None
    path = study_file(tmp_path, key="guess = 0.25")
    saved, page = tmp_path / "result.json", tmp_path / "page.html"
    done = invoke("run", path, "--out", saved, "--report", page, "--quiet")
    assert done.exit_code == 0, done.output
    document = json.loads(saved.read_text())
    y = pooled(tmp_path)
    (row,) = document["estimates"]
    assert abs(row["estimate"] - y.mean()) < 1e-6
    np.testing.assert_allclose(row["std_error"], y.std(ddof=1) / np.sqrt(len(y)), rtol=1e-9)
    brought = document["study"]["target"]["brought"]
    assert (brought["distribution"], brought["version"], len(brought["digest"])) == ("plain-mean", "1.2", 64)
    assert document["study"]["target"]["guess"] == 0.25
    assert "comes from the package plain-mean 1.2" in page.read_text(encoding="utf-8")
    shown = invoke("show", saved) if "show" in invoke("--help").output else invoke("run", path)
    assert "PlainMean of plain-mean 1.2" in shown.output


def test_every_command_of_a_study_knows_it(site: Path, tmp_path: Path) -> None:
    install(site)
    path = study_file(tmp_path)
    checked = invoke("validate", path)
    assert checked.exit_code == 0, checked.output
    assert "What is the mean of y?" in checked.output
    assert invoke("preflight", path).exit_code == 0
    home_at(tmp_path / "north.toml")
    for command in ("preview", "approve"):
        shown = invoke(
            "silo", command, path, "--silo", tmp_path / "north.toml", *["--yes"][: command == "approve"]
        )
        assert shown.exit_code == 0, shown.output
        words = " ".join(shown.output.split())
        assert "It runs code of another distribution here: PlainMean of plain-mean 1.2, files" in words
    audited = invoke("risk", path, "--silo", "north", "--json")
    assert audited.exit_code == 0, audited.output
    found = json.loads(audited.output)
    assert found["findings"][0]["column"] == "y"
    assert found["not_covered"] in ({}, {"own estimate": 1})


@pytest.mark.parametrize(
    ("allow", "is_allowed"),
    [
        ("", False),
        ("[]", False),
        ('["fedtmle"]', False),
        ('["Plain.Mean"]', True),
        ('["plain_mean == 1.2"]', True),
        ('["plain-mean==1.3"]', False),
    ],
)
def test_a_silo_allows_targets_by_distribution(
    site: Path, tmp_path: Path, allow: str, is_allowed: bool
) -> None:
    install(site)
    path = study_file(tmp_path, allow=allow)
    done = invoke("run", path, "--quiet")
    if is_allowed:
        assert done.exit_code == 0, done.output
        return
    assert done.exit_code == 4, done.output
    assert "does not allow the distribution that brings the plan's target" in done.output
    checked = invoke("validate", path)
    assert checked.exit_code == 1
    assert 'write allow_targets = ["plain-mean"] in [policy]' in " ".join(checked.output.split())
    shown = invoke("silo", "preview", path, "--silo", tmp_path / "north.toml")
    assert "by its key allow_targets" in " ".join(shown.output.split())


def test_an_owner_s_list_is_checked() -> None:
    for wrong in ("plain-mean", [1], [""], {"a": 1}):
        policy, mistakes = Policy.parse({"allow_targets": wrong})
        assert "expected a list of distributions" in mistakes["allow_targets"]
        assert policy.allow_targets == ()
    assert Policy.parse({"allow_targets": ["a"]}) == (Policy(allow_targets=("a",)), {})
    there = Provenance("m", "T", None, None, None)  # not installed: by its module
    assert Policy(allow_targets=("m",)).allows(there)
    assert not Policy().allows(there)
    assert UNGUARDED.allows(there)


BROKEN = {
    "score": "    def eif(self, law, rows, psi):\n        return (psi[0] - rows)[:, None]\n",
    "bound": "    def row_bound(self, law):\n"
    "        from fedtmle_core.types import RowBound\n        return RowBound(gradient=-9, curvature=0)\n",
    "path": "    def path(self, law):\n        return ()\n",
}


@pytest.mark.parametrize("lie", BROKEN)
def test_a_target_that_lies_is_refused_before_the_first_answer(
    site: Path, tmp_path: Path, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The silo runs `check_problem` on rows drawn from the dictionary; its own rows are not read for it."""
    install(site, f"{SOURCE.replace('MEAN', 'Lying')}\n\nclass Lying(ft.Mean):\n{BROKEN[lie]}")
    path = study_file(tmp_path)
    done = invoke("run", path, "--quiet")
    assert done.exit_code == 3, done.output
    assert "FAILED" in done.output or "could not be run on synthetic rows" in done.output
    answered: list[object] = []
    monkeypatch.setattr(Silo, "_answer", lambda *_: answered.append(None))
    plan = file_plan(read_study(path)).alone("north")
    silo = open_party(plan, "north", tmp_path / "north.toml", keeper=Keeper(examines=examine_target))
    with pytest.raises(RefusedError, match="failed the silo's checks of it on synthetic rows"):
        Session(plan, InProcess([silo])).run()
    assert silo.refused_by == "check_problem"
    assert not answered


def test_synthetic_rows_are_within_the_dictionary() -> None:
    study = ft.Study(
        target=ft.ATE(outcome="y", treatment="a"),
        outcome_model=ft.GLM("C(a) + x + C(s) + k"),
        treatment_model=ft.GLM("x"),
        cluster="who",
        variables=ft.Variables(
            {
                "y": {"kind": "binary"},
                "a": {"kind": "category", "levels": ["lo", "hi"]},
                "x": {"kind": "number", "range": (-2, 5)},
                "k": {"kind": "count", "range": (2, 7)},
                "s": {"kind": "category", "levels": ["p", "q", "r"]},
                "who": {"kind": "identifier"},
            }
        ),
    )
    table = synthetic_rows(schema_of(study))
    assert set(np.unique(table.numeric["y"])) == {0.0, 1.0}
    assert -2 <= table.numeric["x"].min() < -1
    assert 4 < table.numeric["x"].max() <= 5
    assert set(np.unique(table.numeric["k"])) == {2.0, 3.0, 4.0, 5.0, 6.0, 7.0}
    assert table.factors["s"].levels == ("p", "q", "r")
    check_target(replace(study, cluster=None))  # an effect of ours passes the same check


def test_the_plan_holds_the_digest_of_the_installed_files(site: Path, tmp_path: Path) -> None:
    file = install(site)
    path = study_file(tmp_path)
    plan = file_plan(read_study(path))
    (brought,) = plan.brought
    line = b"plain_mean/__init__.py\0" + hashlib.sha256(file.read_bytes()).digest()
    expected = hashlib.sha256(hashlib.sha256(line).digest()).hexdigest()
    assert brought == Provenance("plain_mean", "PlainMean", "plain-mean", "1.2", expected)
    assert expected.encode() in plan.document


def test_an_installed_file_that_was_changed_stops_the_study(site: Path, tmp_path: Path) -> None:
    file = install(site)
    file.write_text(file.read_text() + "\n# changed\n")
    done = invoke("run", study_file(tmp_path), "--quiet")
    assert done.exit_code == 1
    words = " ".join(done.output.split())
    assert "plain-mean 1.2: the file plain_mean/__init__.py is not the one that was installed" in words


def test_two_distributions_with_one_name_stop_the_study(site: Path, tmp_path: Path) -> None:
    install(site)
    install(site, name="other-mean")
    with pytest.raises(StudyFileErrors, match="other-mean and plain-mean both bring a target 'PlainMean'"):
        read_study(study_file(tmp_path))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_this_name", "cannot be imported (ModuleNotFoundError"),
        ("PlainMean = 3", "is no target of that name"),
        ("class PlainMean: pass", "is no target of that name"),
        ("from fedtmle import ATE as PlainMean", "is no target of that name"),
        ("", "cannot be imported (AttributeError"),
    ],
)
def test_an_entry_point_that_brings_no_target(site: Path, source: str, message: str) -> None:
    install(site, source)
    with pytest.raises(InputError) as caught:
        installed_target("PlainMean")
    assert message in str(caught.value)


def test_a_kind_that_nobody_brings_is_a_defect(tmp_path: Path) -> None:
    path = study_file(tmp_path)
    with pytest.raises(StudyFileErrors, match="kind: is not known"):
        read_study(path)


@pytest.mark.parametrize("option", ['weights = "y"', "folds = 2", "g_bounds = 0.1", 'link = "linear"'])
def test_options_that_the_target_has_not_are_refused(site: Path, tmp_path: Path, option: str) -> None:
    install(site)
    path = study_file(tmp_path)
    path.write_text(path.read_text() + f"\n[options]\n{option}\n")
    with pytest.raises(StudyFileErrors, match=r"PlainMean has .* only; leave it out"):
        read_study(path)


def test_in_python_a_target_needs_no_distribution(site: Path, tmp_path: Path) -> None:
    """In one's own session a class of a module beside the study runs too; a silo file asks for its module."""
    install(site)
    target = installed_target("PlainMean")
    y = np.random.default_rng(1).uniform(0, 10, 80)
    study = ft.Study(
        target=target(outcome="y"), variables=ft.Variables({"y": {"kind": "number", "range": (0, 10)}})
    )
    result = ft.run(study, {"a": {"y": y[:30]}, "b": {"y": y[30:]}})
    assert abs(result.table()["estimate"][0] - y.mean()) < 1e-6
    study_file(tmp_path, allow="")
    with pytest.raises(RefusedError, match="does not allow the distribution"):
        ft.run(study, {n: tmp_path / f"{n}.toml" for n in ("north", "south")})

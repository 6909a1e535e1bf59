"""An estimand carries its words, scale and keys: one class and one line of registration serve everything."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import unescape
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
from tools.document import api
from tools.document.__main__ import with_part

import fedtmle as ft
from fedtmle.errors import InputError
from fedtmle.report import series
from fedtmle.report.page import render as page
from fedtmle.studyfile.file import StudyFileErrors, read_study
from fedtmle.studyfile.keys import target_kinds
from fedtmle.studyfile.template import study_text, write_template
from fedtmle.targets.effects import estimands
from fedtmle.targets.effects.components import AbstractPopulation, InArm
from fedtmle.text.result import render
from tests.command import called
from tests.effects.studies import NEWTON, VARIABLES, Columns, cut, population
from tests.estimands import example, names


@final
@dataclass(frozen=True, kw_only=True)
class Excess(ft.AbstractEffect):
    """E[Y(1)] - E[Y(0)] - margin, beside both means: an effect that only this test knows."""

    margin: float = 0.0

    def question_stem(self) -> str:
        return f"Does {self.comparison} raise the mean of {self.outcome} by more than {self.margin:g}"

    def assumptions(self) -> tuple[str, ...]:
        return ("The margin was chosen before the data were seen.",)

    def summarise(self, psi: np.ndarray, label: str) -> list[ft.Summary]:
        means = [
            ft.Summary(
                name=f"mean {arm} {label}".strip(),
                value=float(psi[j]),
                gradient=np.eye(2)[j],
                scale=ft.Scale.VALUE,
            )
            for j, arm in enumerate(self.arms)
        ]
        value, gradient = float(psi[1] - psi[0]) - self.margin, np.array([-1.0, 1.0])
        return [*means, ft.Summary(name=f"excess {label}".strip(), value=value, gradient=gradient)]


@final
@dataclass(frozen=True, kw_only=True)
class RTT(ft.AbstractEffect):
    """E[Y(1) | A = 1] / E[Y(0) | A = 1]: a ratio of means among the treated."""

    description = "a ratio of means among the treated"
    has_strata = False

    power: float = 1.0
    note: str | None = None

    def question_stem(self) -> str:
        return f"By what factor does {self.comparison} change the mean of {self.outcome} among the treated"

    def populations(self, strata: Sequence[str]) -> tuple[AbstractPopulation, ...]:  # noqa: ARG002
        return (InArm(1, self.arms[1]),)

    def summarise(self, psi: np.ndarray, label: str) -> list[ft.Summary]:  # noqa: ARG002 - one population
        ratio = float(psi[1] / psi[0]) ** self.power
        gradient = self.power * ratio * np.array([-1 / psi[0], 1 / psi[1]])
        return [ft.Summary(name="RTT", value=ratio, gradient=gradient, scale=ft.Scale.RATIO)]


def silos() -> dict[str, Columns]:
    data = population(240, seed=8)
    return cut(data, [np.arange(0, 240, 2), np.arange(1, 240, 2)])


def run(target: ft.AbstractEffect, **options: Any) -> ft.StudyResult:
    study = ft.Study(
        target=target,
        outcome_model=ft.GLM("C(a) + w + z"),
        treatment_model=ft.GLM("w"),
        algorithm=NEWTON,
        variables=VARIABLES,
        **options,
    )
    return ft.run(study, silos(), release=["silo 0"])


def words(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)))


def test_a_custom_effect_reaches_the_result_its_texts_and_its_report(tmp_path: Path) -> None:
    columns: dict[str, Any] = {"outcome": "y", "treatment": "a", "strata": "old"}
    result, usual = run(Excess(margin=0.25, **columns)), run(ft.ATE(**columns))
    means = run(ft.TSM(**columns))
    table = result.table().set_index("estimand")
    assert list(table.index[:3]) == ["mean 0", "mean 1", "excess"]
    ate = usual.table().set_index("estimand")
    for label in ("", " in 0", " in 1"):
        excess, difference = table.loc[f"excess{label}"], ate.loc[f"ATE{label}"]
        assert excess.estimate == difference.estimate - 0.25
        assert excess.std_error == pytest.approx(difference.std_error, rel=1e-14)
    rows = list(means.table().estimate)
    assert [table.loc[f"mean {arm}"].estimate for arm in "01"] == rows[:2]
    assert table.p_value.isna().tolist() == [True, True, False] * 3

    question = "Does a (1 against 0) raise the mean of y by more than 0.25, overall and by old?"
    result.save(tmp_path / "result.json")
    saved = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert saved["question"] == question
    assert saved["study"]["target"]["kind"] == "Excess"
    assert saved["study"]["target"]["margin"] == 0.25
    assert [row["scale"] for row in saved["estimates"]] == ["value", "value", "difference"] * 3
    text = render(saved)
    assert question in " ".join(text.split())
    assert "excess in 1" in text
    assert question in repr(result)
    shown = words(page(saved))
    assert question in shown
    assert "The margin was chosen before the data were seen." in shown
    assert "no unmeasured confounding" not in shown
    assert [forest.null for forest in series.forests(saved)] == [None, None, 0.0] * 3


def test_the_documented_estimand_reaches_its_document_text_and_report() -> None:
    path = Path(__file__).parents[2] / "docs" / "target.md"
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict[str, Any] = {"__name__": "documented", "ft": ft, "np": np, "dataclass": dataclass}
    exec(compile(blocks[-1], "target.md", "exec"), names)  # noqa: S102 - our own page
    rng = np.random.default_rng(1)
    data = {"north": names["hospital"](200, rng), "south": names["hospital"](150, rng)}
    study, arms = names["study"], ft.TSM(outcome="y", treatment="a")
    assert isinstance(study.target, ft.AbstractEffect)
    document = ft.run(study, data).to_dict()
    means = ft.run(replace(study, target=arms), data).to_dict()["estimates"]
    question = "By what share does a (1 against 0) lower the mean of y?"
    (estimate,) = document["estimates"]
    assert document["study"]["target"]["kind"] == estimate["estimand"] == "RiskReduction"
    assert estimate["estimate"] == 1 - means[1]["estimate"] / means[0]["estimate"]
    assert document["question"] == question
    assert question in " ".join(render(document).split())
    assert question in words(page(document))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> type[ft.AbstractEffect]:
    """The one line that registers a new estimand."""
    monkeypatch.setattr(estimands, "ESTIMANDS", (*estimands.ESTIMANDS, RTT))
    return RTT


STUDY = """\
[target]
kind = "RTT"
outcome = "y"
treatment = "a"
power = 1

[variables]
y = {kind = "number", range = [0, 10]}
a = {kind = "binary"}
w = {kind = "number", range = [-8, 8]}
z = {kind = "number", range = [-1, 1]}

[models.outcome]
formula = "C(a) + w + z"

[models.treatment]
formula = "w"

[silos]
one = "one.csv"
two = "two.csv"
"""


def write(folder: Path, text: str = STUDY) -> Path:
    for name, columns in zip(("one", "two"), silos().values(), strict=True):
        rows = zip(*(columns[key] for key in ("y", "a", "w", "z")), strict=True)
        lines = [",".join(map(repr, map(float, row[:1]))) + "," + ",".join(map(str, row[1:])) for row in rows]
        (folder / f"{name}.csv").write_text("\n".join(["y,a,w,z", *lines]) + "\n", encoding="utf-8")
    (folder / "study.toml").write_text(text, encoding="utf-8")
    return folder / "study.toml"


def test_one_line_registers_an_estimand_everywhere(
    tmp_path: Path, registered: type[ft.AbstractEffect]
) -> None:
    study = write(tmp_path)
    question = "By what factor does a (1 against 0) change the mean of y among the treated?"
    assert read_study(study).study.target == registered(outcome="y", treatment="a", arms=("0", "1"))
    assert question in called("validate", study)
    out, html = tmp_path / "result.json", tmp_path / "report.html"
    called("run", study, "--out", out)
    (row,) = ft.load(out).document["estimates"]
    att = run(ft.ATT(outcome="y", treatment="a"))
    psi = att.run.psi  # the same means among the treated
    assert row["estimate"] == pytest.approx(psi[1] / psi[0], rel=1e-5)
    assert row["conf_low"] * row["conf_high"] == pytest.approx(row["estimate"] ** 2)  # on the log scale
    text = called("show", out)
    assert question in " ".join(text.split())
    assert "RTT of a" in text
    called("report", out, "--out", html)
    shown = words(html.read_text(encoding="utf-8"))
    assert question in shown
    assert "no unmeasured confounding" in shown
    (forest,) = series.forests(ft.load(out).document)
    assert (forest.null, forest.ratio) == (1.0, True)
    assert ft.RTT is registered
    assert "RTT" in ft.__all__
    assert "RTT" in dir(ft)
    assert "a ratio of means among the treated" in study_text()
    assert "   fedtmle.RTT\n" in api.page().split("## Rules")[0]  # among the estimands
    assert "\n* `RTT`: a ratio of means among the treated\n" in with_part("README.md")
    assert "| a ratio of means among the treated | `RTT` |" in with_part("docs/statistician.md")
    described = json.loads(called("preflight", study, "--json"))
    assert [count["count"] for count in described["arm_counts"]] == ft.load(out).document["arm_counts"]
    assert question in called("risk", study, "--silo", "one", "--attribute", "y")
    called("init", tmp_path / "new", "--all-keys")
    assert "RTT" in (tmp_path / "new" / "study.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('strata = "w"', "6: [target] strata: unknown key of RTT"),
        ('powr = "w"', "6: [target] powr: unknown key of RTT; did you mean 'power'?"),
        ("note = 3", "6: [target] note: expected text in quotes"),
        ("arms = [0]", "6: [target] arms: expected at least two different levels"),
    ],
)
def test_mistakes_about_a_registered_estimand_have_their_line(
    tmp_path: Path, registered: type[ft.AbstractEffect], line: str, expected: str
) -> None:
    assert registered.__name__ in target_kinds()
    path = write(tmp_path, STUDY.replace("power = 1\n", f"power = 1\n{line}\n"))
    with pytest.raises(StudyFileErrors) as caught:
        read_study(path)
    assert expected in str(caught.value)


def test_an_unknown_kind_is_told_the_registered_names(tmp_path: Path) -> None:
    path = write(tmp_path)
    with pytest.raises(StudyFileErrors, match="kind: is not known"):
        read_study(path)
    path = write(tmp_path, STUDY.replace("RTT", "everything"))
    with pytest.raises(StudyFileErrors) as caught:
        read_study(path)
    assert f"expected one of {', '.join(names())}" in str(caught.value)


def test_an_argument_that_no_file_can_hold_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Odd(ft.AbstractArmEffect):
        shift: complex = 0j

    monkeypatch.setattr(estimands, "ESTIMANDS", (Odd,))
    with pytest.raises(TypeError, match=r"Odd\.shift: a study file cannot hold values of type .*complex"):
        target_kinds()


def test_every_estimand_of_the_module_is_registered_and_public() -> None:
    defined = {
        name: value
        for name, value in vars(estimands).items()
        if inspect.isclass(value) and value.__module__ == estimands.__name__
    }
    concrete = {
        value
        for value in defined.values()
        if issubclass(value, ft.AbstractEffect) and not inspect.isabstract(value)
    }
    assert concrete == set(estimands.ESTIMANDS)
    assert len(set(names())) == len(names())
    # What type checkers see by `import *` is what there is at run time.
    assert {name for name in defined if not name.startswith("_")} | {"ESTIMANDS"} <= set(ft.__all__)
    assert all(getattr(ft, name) is value for name, value in defined.items())


@pytest.mark.parametrize("kind", estimands.ESTIMANDS, ids=names())
def test_every_estimand_has_words_keys_and_a_scale(kind: type[ft.AbstractEffect]) -> None:
    target = example(kind)
    assert target.question.endswith("?")
    assert re.search(r"\by\b", target.question)
    assert kind.description
    assert kind.description in study_text()
    assert bool(target.assumptions()) == kind.has_treatment
    keys = target_kinds()[kind.__name__].keys
    assert ("treatment" in keys) == ("arms" in keys) == kind.has_treatment
    assert ("strata" in keys) == kind.has_strata
    assert keys["outcome"].required
    psi = np.linspace(0.2, 0.6, len(target.regimes()))
    for summary in target.summarise(psi, "in army"):
        assert isinstance(summary.scale, ft.Scale)
        assert summary.gradient.shape == psi.shape
    step = 1e-6
    for r in range(len(psi)):  # gradients are those of the values
        up, down = (target.summarise(psi + sign * step * np.eye(len(psi))[r], "") for sign in (1, -1))
        for summary, high, low in zip(target.summarise(psi, ""), up, down, strict=True):
            assert summary.gradient[r] == pytest.approx((high.value - low.value) / (2 * step), abs=1e-7)
    if kind.has_strata:
        assert example(kind, strata="s").question.endswith(", overall and by s?")
    else:
        with pytest.raises(InputError, match=f"strata: {kind.__name__} has no estimates by stratum"):
            example(kind, strata="s")


QUESTIONS = {
    "ATE": "How much does a (1 against 0) change the mean of y?",
    "TSM": "What would the mean of y be in each arm of a (0, 1)?",
    "RR": "By what factor does a (1 against 0) change the mean of y?",
    "OR": "By what factor does a (1 against 0) change the odds of y?",
    "ATT": "How much does a (1 against 0) change the mean of y among those in arm 1?",
    "ATC": "How much does a (1 against 0) change the mean of y among those in arm 0?",
    "ATO": "How much does a (1 against 0) change the mean of y among people for whom every arm was likely "
    "(overlap weights)?",
    "OutcomeMean": "What is the mean of y, its missing values accounted for?",
    "PolicyMeans": "What would the mean of y be under each rule for a?",
}


@pytest.mark.parametrize("kind", ft.ESTIMANDS, ids=lambda kind: kind.__name__)
def test_questions(kind: type[ft.AbstractEffect]) -> None:
    question = example(kind).question
    assert re.fullmatch(r"[A-Z].* y\b.*\?", question)
    assert question == QUESTIONS.get(kind.__name__, question)


def test_abstract_effects_cannot_be_made() -> None:
    abstract: list[Any] = [ft.AbstractEffect, ft.AbstractArmEffect]
    for kind in abstract:
        with pytest.raises(TypeError, match="abstract"):
            kind(outcome="y", treatment="a")


def test_a_class_without_words_cannot_be_made() -> None:
    class Silent(ft.AbstractEffect):
        def summarise(self, psi: np.ndarray, label: str) -> list[ft.Summary]:
            return [ft.Summary(name=label, value=float(psi[0]), gradient=np.ones(1))]

    with pytest.raises(TypeError, match="question_stem"):
        Silent(outcome="y", treatment="a")  # type: ignore[abstract]  # on purpose


@pytest.mark.parametrize("columns", [(("a", "b"),), (["a"],), (1, 2), ("a", None)])
def test_supplied_columns_are_names(columns: tuple[Any, ...]) -> None:
    with pytest.raises(
        InputError, match=r"Supplied: expected names of columns, as in Supplied\(\"p\", \"q\"\)"
    ):
        ft.Supplied(*columns)


def test_the_template_offers_every_estimand(tmp_path: Path) -> None:
    write_template(tmp_path, force=False)
    text = (tmp_path / "study.toml").read_text(encoding="utf-8")
    for kind in estimands.ESTIMANDS:
        assert re.search(rf"#   {kind.__name__} +{re.escape(kind.description)}$", text, flags=re.MULTILINE)

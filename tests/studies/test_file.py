"""Study files: every key is read, and every defect is reported at once with its line."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import fedtmle as ft
from fedtmle.defects import Lines
from fedtmle.studyfile import keys
from fedtmle.studyfile.file import StudyFile, StudyFileErrors, read_study
from fedtmle.studyfile.keys import model_kinds
from fedtmle.studyfile.template import study_text, write_template
from fedtmle.studyfile.toml import SectionKind
from tests.declare import declare

Document = dict[str, dict[str, Any]]
STUDY = study_text()


def toml(value: object) -> str:
    """A value in TOML; a dict inline."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key} = {toml(item)}' for key, item in value.items())}}}"
    return repr(value)


def write(folder: Path, document: Document | str) -> Path:
    path = folder / "study.toml"
    if isinstance(document, dict):
        sections = (
            "\n".join([f"[{name}]", *(f"{key} = {toml(value)}" for key, value in section.items())])
            for name, section in document.items()
        )
        document = "\n\n".join(sections)
    path.write_text(document, encoding="utf-8")
    return path


def base() -> Document:
    return {
        "target": {"kind": "ATE", "outcome": "y", "treatment": "a"},
        "variables": {
            **{name: {"kind": "binary"} for name in ("y", "z", "a", "b", "s")},
            **{name: {"kind": "number", "range": [0, 9]} for name in ("x", "w")},
            "family": {"kind": "identifier"},
        },
        "models.outcome": {"formula": "a + x"},
        "models.treatment": {"formula": "x"},
        "algorithm": {"kind": "Coded"},
        "options": {},
        "silos": {"one": "one.csv", "two": "sub/two.toml"},
    }


def read(folder: Path, document: Document | str) -> StudyFile:
    return read_study(write(folder, document))


def defects(folder: Path, document: Document | str) -> list[str]:
    with pytest.raises(StudyFileErrors) as caught:
        read(folder, document)
    prefix = f"{folder / 'study.toml'}:"
    assert all(str(defect).startswith(prefix) for defect in caught.value.defects)
    assert pickle.loads(pickle.dumps(caught.value)).defects == caught.value.defects  # noqa: S301 - our own
    return [str(defect).removeprefix(prefix) for defect in caught.value.defects]


def test_a_small_file_is_the_study_one_would_write_in_python(tmp_path: Path) -> None:
    assert read(tmp_path, base()) == StudyFile(
        path=tmp_path / "study.toml",
        study=ft.Study(
            target=ft.ATE(outcome="y", treatment="a"),
            outcome_model=ft.GLM("a + x"),
            treatment_model=ft.GLM("x"),
            variables=declare(
                **dict.fromkeys(("y", "z", "a", "b", "s"), "binary"), x=(0, 9), w=(0, 9), family="identifier"
            ),
        ),
        silos={"one": tmp_path / "one.csv", "two": tmp_path / "sub" / "two.toml"},
    )


# Another value for every key of every kind; what is missing here fails the tests below.
TARGET = {
    "outcome": "z",
    "treatment": "b",
    "arms": [1, "0"],
    "strata": "s",
    "time": "week",
    "entry": "begun",
    "periods": 7,
    "period_length": 2.5,
    "grid": [1.0, 2.5, 7.0],
    "horizons": [2, 3],
    "causes": ["2"],
    "censored": "3",
    "beyond": "truncate",
    "subperiods": 2,
    "compare_subperiods": 3,
    "censoring": "left",
    "over_time": {"a": ["a_7"], "gone": ["gone_7"]},
}
TIMED: dict[str, dict[str, Any]] = {
    **{name: {"kind": "number", "range": [0, 9]} for name in ("time", "week", "begun")},
    **{name: {"kind": "category", "levels": ["0", "1"]} for name in ("y", "z", "s", "a", "b")},
    "x": {"kind": "number", "range": [0, 9]},
}
ALGORITHM: dict[str, Any] = {
    "cost": 2.0,
    "gap": 1e-3,
    "solver": "lbfgs",
    "tolerance": "negligible",
    "coordinates": "raw",
    "inner": "adaptive",
    "smoothness": "certified",
    "max_rounds": 7,
    "fixed_width": 9,
    "optimizer": "newton",
    "max_updates": 3,
    "weights": "uniform",
    "radius": 2.0,
    "exhaustive": True,
    "progress_tolerance": 1e-3,
    "lattice": 0.5,
    "min_active": 3,
    "noise": 0.25,
}
OPTIONS = {
    "aggregation": "masked",
    "g_bounds": "none",
    "clever": "weight",
    "submodel": "contrast",
    "link": "linear",
    "weights": "w",
    "weight_ceiling": 5,
    "cluster": "family",
    "cluster_scope": "silo",
    "largest_cluster": 6,
    "folds": 4,
    "seed": 11,
    "confidence": 0.9,
    "diagnostics": False,
    "imputations": 7,
    "imputation_sweeps": 3,
    "sums": "exact",
    "fit_accuracy": 1e-4,
    "on_refusal": "go on",
}
RULES: dict[str, dict[str, Any]] = {
    "Static": {"arm": "0"},
    "Threshold": {"column": "x", "cut": 1.5, "arm": "1", "otherwise": "0"},
    "Stochastic": {"shares": [0.25, 0.75]},
    "Planned": {"plan": ["0", "1"]},
    "Onset": {"column": "x", "cut": 1.5, "arm": "1", "otherwise": "0", "below": False},
    "Shift": {"by": 1.0, "factor": 1.5, "least": 0.0, "most": 8.0},
}
OTHER_RULES: dict[str, dict[str, Any]] = {
    "Static": {"arm": "1"},
    "Threshold": {"column": "z", "cut": 2, "arm": 0, "otherwise": "1"},
    "Stochastic": {"shares": [0.5, 0.5]},
    "Planned": {"plan": ["1", "1"]},
    "Onset": {"column": "u", "cut": 2, "arm": 0, "otherwise": "1", "below": True},
    "Shift": {"by": -1.0, "factor": 2, "least": 1.0, "most": 9.0},
}
OVER_TIME: dict[str, Any] = {
    **{name: {"kind": "category", "levels": ["0", "1"]} for name in ("a", "b", "s")},
    **{name: {"kind": "binary"} for name in ("y", "z", "gone", "left", "a1", "a2", "death")},
    **{name: {"kind": "number", "range": [0, 9]} for name in ("x", "u")},
}


def of_kind(kind: str) -> Document:
    document = base()
    document["target"] = {"kind": kind, "outcome": "y"}
    known = keys.target_kinds()[kind].keys
    if "treatment" in known:
        document["target"]["treatment"] = "a"
    else:
        del document["models.treatment"]
        document["models.outcome"]["formula"] = "x"
    if "time" in known:
        del document["models.outcome"]
        document["target"] |= {"time": "time", "periods": 4}
        document["variables"] = dict(TIMED)
    if "rules" in known:
        document["target"]["rules"] = [{"kind": "Stochastic", "shares": [0.5, 0.5]}]
    if "over_time" in known:
        names = ("a", "b", "x", "u", "gone", "left", "death")
        columns = {name: [f"{name}_1", f"{name}_2", f"{name}_3"] for name in names}
        document["target"] |= {"over_time": columns, "censoring": "gone"}
        document["target"]["rules"].append({"kind": "Static", "arm": "1"})
        document["models.censoring"] = {"formula": "x"}
        document["models.outcome"] = {"formula": "x"}
        document["variables"] = dict(OVER_TIME)
    return document


@pytest.mark.parametrize(
    ("kind", "key"),
    [(kind, key) for kind, made in keys.target_kinds().items() for key in made.keys if key != "rules"],
)
def test_every_key_of_a_target_is_read(tmp_path: Path, kind: str, key: str) -> None:
    document = of_kind(kind)
    before = read(tmp_path, document).study
    document["target"][key] = TARGET[key]
    if kind.startswith("Regime") and key == "horizons":  # of an event over time
        document["target"]["outcome"] = "death"
    if key == "over_time":
        document["target"]["rules"] = document["target"]["rules"][:2]
    if key in ("causes", "censored"):  # which the dictionary declares as well
        levels = {"causes": ["0", "2"], "censored": ["3", "1"]}[key]
        document["variables"]["y"] = {"kind": "category", "levels": levels}
    if key == "grid":  # instead of periods
        del document["target"]["periods"]
    after = read(tmp_path, document).study
    assert type(after.target).__name__ == kind
    assert before.target != after.target
    expected = ("1", "0") if key == "arms" else TARGET[key]
    if isinstance(expected, dict):
        expected = {name: tuple(listed) for name, listed in expected.items()}
    read_value = getattr(after.target, key)
    assert (list(read_value) if isinstance(expected, list) else read_value) == expected


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, made in keys.RULES_OVER_TIME.items() for key in made.keys]
)
def test_every_key_of_a_rule_is_read(tmp_path: Path, kind: str, key: str) -> None:
    document = of_kind("PolicyMeans" if kind in keys.RULES else "RegimeMean")
    if kind == "Planned":
        document["target"]["over_time"] = {name: [f"{name}_1", f"{name}_2"] for name in ("a", "gone", "x")}
    if kind == "Shift":
        document["target"]["treatment"] = "x"
        document["variables"]["a"] = document["variables"]["x"]
    document["target"]["rules"] = [{"kind": kind, **RULES[kind]}]
    before = read(tmp_path, document).study.target.regimes()
    document["target"]["rules"] = [{"kind": kind, **RULES[kind], key: OTHER_RULES[kind][key]}]
    after = read(tmp_path, document).study.target.regimes()
    assert type(after[0]).__name__ == kind
    assert before != after


@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind, made in keys.ALGORITHMS.items() for key in made.keys]
)
def test_every_key_of_an_algorithm_is_read(tmp_path: Path, kind: str, key: str) -> None:
    document = base()
    document["algorithm"] = {"kind": kind}
    before = read(tmp_path, document).study.algorithm
    document["algorithm"][key] = ALGORITHM[key]
    after = read(tmp_path, document).study.algorithm
    assert type(after).__name__ == kind
    assert getattr(before, key) != getattr(after, key)


@pytest.mark.parametrize("key", keys.OPTIONS)
def test_every_option_is_read(tmp_path: Path, key: str) -> None:
    document = base()
    before = read(tmp_path, document).study
    document["options"][key] = OPTIONS[key]
    after = read(tmp_path, document).study
    assert getattr(before, key) != getattr(after, key)
    assert getattr(after, key) == (None if OPTIONS[key] == "none" else OPTIONS[key])


def test_values_that_name_an_object(tmp_path: Path) -> None:
    document = base()
    smoothness: dict[str, Any] = {
        "certified": ft.Certified(),
        "estimated": ft.Estimated(),
        "pooled": ft.Estimated(over="pooled"),
    }
    for word, value in smoothness.items():
        document["algorithm"] = {"kind": "Coded", "smoothness": word, "tolerance": 1e-4}
        assert read(tmp_path, document).study.algorithm == ft.Coded(smoothness=value, tolerance=1e-4)
    optimizers: dict[str, Any] = {
        "exact": ft.Exact(),
        "newton": ft.Newton(),
        "descent": ft.GradientDescent(),
    }
    for word, optimizer in optimizers.items():
        document["algorithm"] = {"kind": "Central", "optimizer": word}
        assert read(tmp_path, document).study.algorithm == ft.Central(optimizer=optimizer)


WRONG = """\
[target]
kind = "ATT"
outcom = "y"
treatment = "t"
strata = 5
clever = "weight"

[models.outcome]
formula = "a + __import__('os')"
familly = "binomial"

[models.missingness]
ridge = "x"

[algorithm]
kind = "Codded"
tolerance = "practcal"

[options]
g_bounds = 0.9
confidence = 2.0
submodel = "contrats"
folds = 1

[silos]
north = 3

[optoins]
folds = 2
"""


def test_all_mistakes_come_at_once_with_lines_and_suggestions(tmp_path: Path) -> None:
    found = defects(tmp_path, WRONG)
    assert found == [
        " [variables]: declare every variable that the study uses; draft the dictionary from a table with "
        "`fedtmle init --from table.csv` or `ft.draft(table)`, and edit the draft",
        "1: [target] outcome: is missing; expected text in quotes",
        "3: [target] outcom: unknown key of ATT; did you mean 'outcome'?",
        "5: [target] strata: unknown key of ATT; known: kind, outcome, treatment, arms",
        "6: [target] clever: unknown key of ATT; it belongs in [options]",
        "9: [models.outcome] formula: there is no function '__import__'; there are C, I, log, sqrt, poly, "
        "spline, bs\n    a + __import__('os')\n        ^",
        "10: [models.outcome] familly: unknown key of GLM; did you mean 'family'?",
        "12: [models.missingness] formula: is missing; expected text in quotes",
        "13: [models.missingness] ridge: expected a number",
        "16: [algorithm] kind: is not known; did you mean 'Coded'?",
        '17: [algorithm] tolerance: expected "practical" or "negligible" or a number; '
        "did you mean 'practical'?",
        "20: [options] g_bounds: expected 'auto', None or a number in (0, 0.5), not 0.9",
        "21: [options] confidence: expected a number between 0.5 and 1, not 2.0",
        '22: [options] submodel: expected "per arm" or "contrast"; did you mean \'contrast\'?',
        "23: [options] folds: expected at least 2, or None, not 1",
        "26: [silos] north: expected the path of a silo or data file, in quotes",
        "28: optoins: unknown section; did you mean 'options'?",
    ]


RULES_WRONG = """\
silos = {one = "one.csv"}
[target]
kind = "PolicyMeans"
outcome = "y"
treatment = "t"
arms = ["low", "high"]
[[target.rules]]
kind = "Static"
arm = "hihg"
[[target.rules]]
kind = "Stochastic"
shares = [0.5, 0.25, 0.25]
[[target.rules]]
kind = "Treshold"
cut = "x"
[models]
outcome = {supplied = ["q"]}
treatment.supplied = ["g", "h"]
"""


def test_mistakes_in_rules_and_inline_tables_have_lines(tmp_path: Path) -> None:
    missing, *found = defects(tmp_path, RULES_WRONG)
    assert missing.startswith(" [variables]: declare every variable")
    assert found == [
        "9: [target.rules] arm: 'hihg' is none of the arms; did you mean 'high'?",
        "12: [target.rules] shares: expected one share per arm, 2",
        "14: [target.rules] kind: is not known; did you mean 'Threshold'?",
        "15: [target.rules] cut: expected a number",
        "17: [models.outcome] supplied: expected 2 column(s), one per prediction",
        "18: [models.treatment] supplied: expected 1 column(s), one per prediction",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "",
            ["[models.outcome]: the section is missing", "[silos]: list the silos", "[target]: the section"],
        ),
        ("[target]\nkind = 'ATE\n", ["2: not TOML: "]),
        ("title = Smoking cessation\n", ['1: not TOML: text needs quotes, as in "Smoking cessation"']),
        ("\n[target]\nkind = ATE  # the effect\n", ['3: not TOML: text needs quotes, as in "ATE"']),
        (
            "[variables]\na = {kind = category, levels = [no, yes]}\n",
            ['2: not TOML: text needs quotes, as in "category"'],
        ),
        ("[options]\ndiagnostics = True\n", ["2: not TOML: write true in small letters"]),
        ("[options]\ndiagnostics = \n", ["2: not TOML: Invalid value"]),
        ("target = 3\n[silos]\none = 'x.csv'\n[models.outcome]\nfamily='auto'", ["1: [target]: this is not"]),
        ("[target]\nkind = ['ATE']\n", ["2: [target] kind: is not known"]),
        ("[target.rules]\n[silos]\n", ["2: [silos]: list the silos", "[target] kind: is missing"]),
        ("[models]\noutcome = 3\n", ["2: [models.outcome]: this is not a section"]),
        (
            "[target]\nkind='ATE'\noutcome='y'\noutcome_bounds=[2,1]\ntreatment='a'\n",
            ["4: [target] outcome_bounds: unknown key of ATE"],
        ),
        (
            "[target]\nkind='ATE'\noutcome='y'\ntreatment='a'\n",
            ["[models.treatment]: give one if and only if"],
        ),
        ("[target]\nkind='PolicyMeans'\nrules=3\n", ["3: [target] rules: expected [[target.rules]] tables"]),
        (
            "[target]\nkind='PolicyMeans'\nrules=[3]\n",
            ["3: [target] rules: expected [[target.rules]] tables"],
        ),
    ],
)
def test_bad_documents(tmp_path: Path, text: str, expected: list[str]) -> None:
    found = defects(tmp_path, text)
    for start in expected:
        assert any(start in defect for defect in found), found


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("options", "weight_ceiling", "0"),
        ("options", "weight_ceiling", "inf"),
        ("options", "seed", "-1"),
        ("options", "folds", "2.5"),
        ("options", "confidence", "nan"),
        ("options", "weights", '" "'),
        ("options", "cluster", "true"),
        ("models.outcome", "ridge", "inf"),
        ("models.treatment", "family", '"poisson"'),
        ("algorithm", "tolerance", "true"),
        ("algorithm", "max_rounds", "-3"),
        ("target", "arms", "[0]"),
        ("target", "arms", "[0, 2]"),
        ("target", "arms", '["1", "1"]'),
    ],
)
def test_values_out_of_range_or_of_another_type(tmp_path: Path, section: str, key: str, value: str) -> None:
    text = write(tmp_path, base()).read_text(encoding="utf-8")
    text = text.replace(f"[{section}]", f"[{section}]\n{key} = {value}")
    (only,) = defects(tmp_path, text)
    line, place = only.split(": ")[:2]
    assert text.splitlines()[int(line) - 1] == f"{key} = {value}"
    assert place == f"[{section}] {key}"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StudyFileErrors, match="there is no such file"):
        read_study(tmp_path / "nothing.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(StudyFileErrors, match="UTF-8"):
        read_study(tmp_path / "bytes.toml")
    with pytest.raises(StudyFileErrors, match=r"this is a folder; give the file itself$"):
        read_study(tmp_path)
    study = write(tmp_path, base())
    with pytest.raises(StudyFileErrors, match=re.escape(f"this is a folder; give the file itself: {study}")):
        read_study(tmp_path)


def test_lines_know_headers_dotted_quoted_and_repeated_keys() -> None:
    lines = Lines('a = 1\n[x."y z"]\nb.c = """\nd = 2\n"""\n[[x.r]]\nk = 1\n[[x.r]]\n"k" = {m = 1}\n')
    assert lines.of(("a",)) == 1
    assert lines.of(("x", "y z")) == 2
    assert lines.of(("x", "y z", "b", "c")) == 3
    assert lines.of(("x", "y z", "d")) == 2  # inside a text: not a key
    assert [lines.of(("x", "r", 0, "k")), lines.of(("x", "r", 1, "k"))] == [7, 9]
    assert lines.of(("x", "r", 1, "k", "m")) == 9
    assert lines.of(("nowhere",)) is None


def every_key(kinds: Mapping[str, SectionKind[object]]) -> Iterator[str]:
    for kind in kinds.values():
        for name, key in kind.keys.items():
            yield name
            yield from every_key(key.kinds or {})


def test_the_template_mentions_every_key() -> None:
    written = set(re.findall(r"(?:^#? ?|[{,] ?)(\w+) =", STUDY, flags=re.MULTILINE))
    documented = {
        *every_key(keys.target_kinds()),
        *every_key(keys.ALGORITHMS),
        *every_key(model_kinds("outcome", no_sample)),
        *keys.OPTIONS,
    } - {"rules", "learners"}
    assert documented <= written
    assert "[[target.rules]]" in STUDY
    assert "[[models.outcome.learners]]" in STUDY


def no_sample(*_: object) -> ft.Pilot:
    raise AssertionError("nothing is fitted here")


def alternatives(section: str) -> list[str]:
    """The commented sections of the template that may replace one that is there."""
    blocks = re.findall(rf"^# \[{re.escape(section)}\]\n(?:# .*\n)+", STUDY, flags=re.MULTILINE)
    return [re.sub(r"^# ", "", block, flags=re.MULTILINE) for block in blocks]


@pytest.mark.parametrize(
    ("section", "text"),
    [(section, text) for section in ("models.outcome", "algorithm") for text in alternatives(section)],
    ids=lambda text: re.sub(r"\s+", " ", text)[:40],
)
def test_every_alternative_of_the_template_is_valid(tmp_path: Path, section: str, text: str) -> None:
    write_template(tmp_path, force=False)
    there = re.search(rf"^\[{re.escape(section)}\].*\n(?:[^\n\[]+\n)+", STUDY, flags=re.MULTILINE)
    assert there is not None
    study = read_study(write(tmp_path, STUDY.replace(there[0], text))).study
    assert study != read_study(write(tmp_path, STUDY)).study


def test_the_template_has_the_alternatives() -> None:
    assert len(alternatives("models.outcome")) == 5
    assert len(alternatives("algorithm")) == 6


def test_the_commented_settings_of_the_template_are_valid(tmp_path: Path) -> None:
    """Each commented setting that goes with the kinds in the template is uncommented, one at a time."""
    alternative = r"^# \[(?:models\.outcome|algorithm)\]\n(?:# .*\n)+"
    lines = re.sub(alternative, "", STUDY, flags=re.MULTILINE).splitlines()
    tried = 0
    for index, line in enumerate(lines):
        key = re.match(r"# (\w+) = ", line)
        if key and key[1] in {*keys.OPTIONS, *keys.ALGORITHMS["Coded"].keys, "family", "ridge", "strata"}:
            text = "\n".join([*lines[:index], line[2:], *lines[index + 1 :]])
            read(tmp_path, re.sub(r"# (sampling_weight|family) = {", r"\1 = {", text))
            tried += 1
    assert tried >= 12


@pytest.mark.parametrize(
    ("role", "formula", "used"),
    [
        ("treatment", "x + y", "y"),
        ("treatment", "a", "a"),
        ("outcome", "a + y", "y"),
        ("missingness", "y", "y"),
    ],
)
def test_a_model_that_uses_its_response_is_a_mistake_of_its_line(
    tmp_path: Path, role: str, formula: str, used: str
) -> None:
    document = base()
    document[f"models.{role}"] = {"formula": formula}
    written = write(tmp_path, document).read_text().splitlines()
    line = written.index(f"[models.{role}]") + 2
    (only,) = defects(tmp_path, document)
    assert only.startswith(f"{line}: [models.{role}] formula: it uses '{used}', which is the study's")


def test_a_broken_target_does_not_make_covariates_mistakes(tmp_path: Path) -> None:
    document = base()
    document["target"] = {"kind": "ATE", "outcome": "out", "treatment": "arm", "strata": 5}
    document["models.treatment"] = {"formula": "y + a"}
    (only,) = defects(tmp_path, document)
    assert "strata" in only

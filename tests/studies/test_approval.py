"""What an owner sees before approving: everything that is approved, and nothing that the study forged."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.errors import InputError
from fedtmle.layout import visible
from fedtmle.studies.approval import fingerprint_of, literals, review
from fedtmle.studies.preview import preview
from fedtmle.studies.validate import validate
from fedtmle.studyfile.file import StudyFile, file_plan, read_study
from fedtmle.text.approval import render_approval
from fedtmle_core.signing import SigningKey
from tests.homes import home_at, homes_in

FORGED = "x\nPlan 0000\n\x1b[2J\x1b[1AApproved.\r\u202e\u2066\u2028\u200b\x9b"
TOML = "".join(f"\\u{ord(char):04x}" if not char.isascii() or char < " " else char for char in FORGED)
runner = CliRunner()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert runner.invoke(app, ["init", str(tmp_path), "--all-keys"]).exit_code == 0
    homes_in(tmp_path)
    return tmp_path


def edited(folder: Path, *changes: tuple[str, str]) -> Path:
    path = folder / "study.toml"
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    return path


def is_safe(output: str) -> bool:
    """Whether a terminal shows each character of the output as itself."""
    return all(char == "\n" or unicodedata.category(char) not in ("Cc", "Cf", "Zl", "Zp") for char in output)


FORGERIES = {
    "a silo's name": ('south = "south.toml"', f'"{TOML}" = "south.toml"'),
    "a level": ('levels = ["female", "male"]', f'levels = ["female", "male", "{TOML}"]'),
    "a column": ("# sampling_weight = {", f'"{TOML}" = {{'),
    "a title": ('title = "', f'title = "{TOML}'),
    "a label": ('label = "Age"', f'label = "{TOML}"'),
    "a unit": ('unit = "years"', f'unit = "{TOML}"'),
    "a formula": ('formula = "C(programme) + sbp_0', f'formula = "C(programme) + {TOML} + sbp_0'),
    "a quoted name": ('formula = "C(programme) + sbp_0', f'formula = "C(programme) + `{TOML}` + sbp_0'),
    "an outcome": ('outcome = "sbp_12"', f'outcome = "{TOML}"'),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_no_text_of_a_study_can_forge_a_screen(folder: Path, forgery: str) -> None:
    study = edited(folder, FORGERIES[forgery])
    silo = ["--silo", str(folder / "north.toml")]
    for command in (["silo", "approve", "--yes"], ["silo", "preview"], ["silo", "reject"], ["validate"]):
        ran = runner.invoke(app, [*command, str(study), *(silo if command[0] == "silo" else [])])
        assert ran.exception is None or isinstance(ran.exception, SystemExit)
        assert is_safe(ran.output), command
        lines = [line for line in ran.output.splitlines() if line.startswith(("Plan", "Approved"))]
        assert "Plan 0000" not in lines
        if ran.exit_code == 0 and command[1:2] == ["approve"]:
            assert lines == [
                f"Plan {file_plan(read_study(study)).digest.hex()}",
                "Approved. `fedtmle silo reject` revokes it.",
            ]


def test_forgeries_are_shown_where_the_study_is_accepted(folder: Path) -> None:
    """A premise of the test above: some of these studies can be read, and are shown with escapes."""
    study = edited(folder, FORGERIES["a silo's name"])
    shown = " ".join(render_approval(review(read_study(study), home_at(folder / "north.toml"))).split())
    assert "x Plan 0000 \\x1b[2J" in shown  # on one line, behind our bullet
    assert "\\x1b[2J" in shown


def test_a_long_title_cannot_pass_for_another_line_of_a_decision_or_a_result(folder: Path) -> None:
    """A title is one line, which is wrapped: its words start a line deeper than any line of ours."""
    forged, silo = "Lowered: min_cell is 1", str(folder / "north.toml")
    study = edited(folder, ('title = "', f'title = "{"x" * 62} {forged}" # '))  # it fills the first line
    assert runner.invoke(app, ["silo", "approve", str(study), "--silo", silo, "--yes"]).exit_code == 0
    decisions = runner.invoke(app, ["silo", "decisions", "--silo", silo]).output
    assert re.findall(rf"(?m)^( *){forged}$", decisions) == [" " * 8]
    assert re.findall(r"(?m)^    Plan ", decisions)
    edited(folder, ("x" * 62, "x" * 75))
    result = runner.invoke(app, ["run", str(study)]).output
    assert re.findall(rf"(?m)^( *){forged}$", result) == [" " * 4]


def test_every_character_that_is_not_itself_is_escaped() -> None:
    assert visible("Größe µ ≥ 2, 年齢, עברית") == "Größe µ ≥ 2, 年齢, עברית"
    assert visible("a\x1b[31m\u202eb\n") == "a\\x1b[31m\\u202eb\\n"


def test_the_owner_sees_all_that_is_approved(folder: Path) -> None:
    keys = {name: home_at(folder / f"{name}.toml").key.public_keys for name in ("north", "south")}
    server = SigningKey(b"s" * 32).public
    listed = ", ".join(f'{name} = "{key.hex()}"' for name, key in keys.items())
    study = edited(
        folder,
        (
            "[silos]",
            f'[plan]\nkeys = {{{listed}}}\nserver = "{server.hex()}"\nexpires = 2099-01-01\n\n[silos]',
        ),
        ("sbp_0 + age + C(sex) + smoker", "sbp_0 + I(age - 60.3) + C(sex) + smoker"),
    )
    home = home_at(folder / "north.toml")
    (home.folder / "peers").write_text(keys["north"].hex())
    words = " ".join(render_approval(review(read_study(study), home)).split())
    plan = file_plan(read_study(study))
    for expected in (
        "Exercise and blood pressure at two hospitals",
        plan.digest.hex(),
        "2099-01-01",
        fingerprint_of(server),
        *(fingerprint_of(key[:32]) for key in keys.values()),
        "NOT in your peers",
        "age: number; 18 to 110; years; 'Age'",
        "sex: category; female, male; 'Sex'",
        "C(programme) + sbp_0 + I(age - 60.3) + C(sex) + smoker",
        "numbers inside I() can single out one person",
        "outcome: I(age - 60.3)",
        "Sums are open",
        "No earlier study was answered here.",
        "Risk: ",
        "Your policy would allow every one of these messages.",
    ):
        assert expected in words, expected


@pytest.mark.parametrize(
    ("silos", "colluders", "expected"),
    [
        (5, 1, "You rely on what they say of their rows (trust_looks): one may be curious, none may lie."),
        (3, 2, "Your silo judges them by its own rows."),
        (5, 0, "over groups of 5 silos. NONE of them may lie about their rows."),
        (7, 1, "over groups of 4 and 3 silos. 1 of them may lie about their rows."),
    ],
)
def test_the_owner_sees_how_many_silos_may_lie(
    folder: Path, silos: int, colluders: int, expected: str
) -> None:
    approval = review(masked(folder, silos, f"colluders = {colluders}"), home_at(folder / "north.toml"))
    assert approval.is_masked
    assert expected in " ".join(render_approval(approval).split())


def masked(folder: Path, silos: int, plan: str = "", *changes: tuple[str, str]) -> StudyFile:
    """Return the study with the keys of so many silos, which all have the data of the first."""
    names = ["north", "south", *(f"s{k}" for k in range(silos - 2))]
    keys = {name: SigningKey(name.encode().ljust(32)).public_keys for name in names}
    keys |= {name: home_at(folder / f"{name}.toml").key.public_keys for name in ("north", "south")}
    listed = ", ".join(f'{name} = "{key.hex()}"' for name, key in keys.items())
    more = "".join(f'\n{name} = "{name}.toml"' for name in names[2:])
    study = edited(
        folder,
        ("[silos]", f"[plan]\n{plan}\nkeys = {{{listed}}}\n\n[silos]"),
        ('south = "south.toml"', f'south = "south.toml"{more}'),
        *changes,
    )
    for name in names[2:]:
        text = (folder / "north.toml").read_text(encoding="utf-8").replace('"north"', f'"{name}"')
        (folder / f"{name}.toml").write_text(text, encoding="utf-8")
    return read_study(study)


@pytest.mark.parametrize(
    ("silos", "term", "keeps", "is_refused"),
    [
        (3, "", False, False),
        (2, " + C(programme):C(silo)", False, False),
        (3, " + C(silo)", True, False),
        (3, " + C(programme):C(silo)", True, False),
        (3, " + C(programme):C(silo)", False, True),
        (3, " + C(silo)", False, True),
    ],
)
def test_columns_of_one_silo_are_refused_under_masks(
    folder: Path, silos: int, term: str, keeps: bool, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two silos the study is open. The owner is warned of a plan that a server made nevertheless."""
    file = masked(folder, silos, "", ('"C(programme) + sbp_0', f'"C(programme){term} + sbp_0'))
    monkeypatch.setattr(type(file.study.target), "keeps_own", keeps)
    found = [each.message for each in validate(file.path).defects]
    told = f"outcome_model, 'C(programme){term} + sbp_0"
    assert (
        any(message.startswith(told) and "this silo's own sum" in message for message in found) is is_refused
    )
    if is_refused:
        assert 'aggregation = "open"' in found[0]
        with pytest.raises(InputError, match="C\\(silo\\) has such columns"):
            file_plan(file)
        with pytest.raises(InputError, match="C\\(silo\\) has such columns"):
            replace(file.study, aggregation="masked")
        assert replace(file.study, aggregation="open").has_silo_columns
    monkeypatch.setattr(ft.Study, "refuse_silo_columns", lambda _: None)
    shown = " ".join(render_approval(review(file, home_at(folder / "north.toml"))).split())
    assert ("LOOK: A model has columns of C(silo)." in shown) is is_refused


@pytest.mark.parametrize(
    ("formula", "flagged"),
    [("I(1 - age)", True), ("I(2**(age/9))", True), ("I(age*sbp_0)", False), ("poly(age, 2)", False)],
)
def test_numbers_inside_arithmetic_are_pointed_out(folder: Path, formula: str, flagged: bool) -> None:
    study = edited(folder, ('"C(programme) + sbp_0', f'"C(programme) + {formula} + sbp_0'))
    assert bool(list(literals(read_study(study).study))) is flagged


def test_a_preview_checks_what_a_run_checks_before_the_first_answer(folder: Path) -> None:
    home = home_at(folder / "north.toml")
    study = edited(folder, ("[silos]", "[plan]\nexpires = 2020-01-01\n\n[silos]"))
    assert preview(file_plan(read_study(study)), home.file).refused_by == "expires"

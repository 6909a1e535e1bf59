"""The commands that work on a study, on real files: what they print, save, and return to a script."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import fedtmle as ft
import fedtmle.studies.run
from fedtmle.cli import app
from fedtmle.cli.base import CODES, Exit
from fedtmle.errors import InputError, NumericalError, RefusedError
from fedtmle.layout import histogram_table, phase_name
from fedtmle.protocol.query import Phase
from fedtmle.runtime.session import RoundReport
from fedtmle.studies.progress import live_progress
from fedtmle.studyfile.file import file_plan, read_study
from tests.studies.test_approval import masked

runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})


def call(*arguments: object) -> Result:
    result = runner.invoke(app, list(map(str, arguments)))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert all(len(line) <= 80 for line in result.stdout.splitlines()) or "--json" in arguments
    assert "\x1b" not in result.output  # no colour where there is no terminal
    return result


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)  # so that printed paths are short
    assert call("init", "toy", "--all-keys").exit_code == Exit.FINE
    return Path("toy") / "study.toml"


def edit(path: Path, **changes: str) -> None:
    """Replaces settings; the key is what the line starts with, commented or not."""
    text = path.read_text(encoding="utf-8")
    for key, value in changes.items():
        text, found = re.subn(rf"^(# )?{key} = .*$", f"{key} = {value}", text, count=1, flags=re.MULTILINE)
        assert found, key
    path.write_text(text, encoding="utf-8")


def shown(bits: int) -> str:
    return f"{bits / 1000:.1f} kbit" if bits >= 1000 else f"{bits} bit"


def test_init_refuses_to_overwrite(study: Path) -> None:
    edit(study, kind='"TSM"')
    before = study.read_text(encoding="utf-8")
    refused = call("init", study.parent)
    assert refused.exit_code == Exit.DEFECTS
    assert "study.toml" in refused.stderr
    assert study.read_text(encoding="utf-8") == before
    assert call("init", study.parent, "--force").exit_code == Exit.FINE
    assert study.read_text(encoding="utf-8") != before
    document = json.loads(call("init", study.parent / "new", "--json").stdout)
    assert [Path(name).name for name in document["written"]][:3] == ["study.toml", "north.toml", "south.toml"]


def test_init_writes_a_short_study_that_says_the_same(study: Path) -> None:
    from fedtmle.studyfile.file import read_study

    assert call("init", "short").exit_code == Exit.FINE
    short = Path("short") / "study.toml"
    assert len(short.read_text(encoding="utf-8").splitlines()) < 50
    assert read_study(short).study == read_study(study).study
    assert not any(line.startswith("# ") and " = " in line for line in short.read_text().splitlines())


def test_validate_a_good_study(study: Path) -> None:
    text = call("validate", study)
    assert text.exit_code == Exit.FINE, text.output
    assert "How much does programme (exercise against usual) change" in text.stdout
    assert re.search(r"north +240\nsouth +160\n", text.stdout)
    document = json.loads(call("validate", study, "--json").stdout)
    assert document["silos"] == {"north": 240, "south": 160}
    assert document["columns"]["sbp_12"] == "numeric, may be missing"
    assert document["defects"] == []


def test_validate_reports_study_silo_files_and_data_at_once(study: Path) -> None:
    folder = study.parent
    north = folder / "north.toml"
    north.write_text(
        north.read_text(encoding="utf-8").replace('"AGE_YEARS"', '"AGE_YAERS"'), encoding="utf-8"
    )
    south = (folder / "south.csv").read_text(encoding="utf-8").splitlines()
    cells = south[1].split(",")
    (folder / "south.csv").write_text(
        "\n".join([south[0], ",".join([cells[0], "999", *cells[2:4], "maybe", "boxing"]), *south[2:]]),
        encoding="utf-8",
    )
    data = call("validate", study)
    assert data.exit_code == Exit.DEFECTS
    lines = data.stderr.splitlines()
    assert len(lines) == 4
    assert any("north.csv" in line and "AGE_YEARS" in line for line in lines)
    assert any("is outside the declared range" in line and "in 1 row;" in line for line in lines)
    assert any("column 'smoker'" in line and "1 row;" in line for line in lines)
    assert any("column 'programme'" in line for line in lines)
    assert "999" not in data.output.replace(str(folder), "")  # no record's value is quoted
    assert "boxing" not in data.output

    (folder / "south.toml").write_text(
        '[silo]\nname = "south"\n[data]\npth = "south.csv"\n', encoding="utf-8"
    )
    edit(study, kind='"ATTE"', confidence="3")
    both = json.loads(call("validate", study, "--json").stdout)["defects"]
    places = [(Path(defect["file"]).name, defect["line"]) for defect in both]
    text = study.read_text(encoding="utf-8").splitlines()
    assert text[dict(places[:1])["study.toml"] - 1].startswith("kind = ")
    assert ("south.toml", 4) in places
    assert [name for name, _ in places].count("study.toml") == 2


def test_validate_an_arm_that_nobody_took(study: Path) -> None:
    text = study.read_text(encoding="utf-8")
    study.write_text(text.replace('["usual", "exercise"]', '["usual", "exercise", "drug"]'), encoding="utf-8")
    found = call("validate", study)
    assert found.exit_code == Exit.DEFECTS
    assert "no silo has an observed outcome in arm 'drug'" in found.stderr


def test_run_prints_saves_and_shows(study: Path) -> None:
    out = study.parent / "result.json"
    printed = call("run", study, "--out", out)
    assert printed.exit_code == Exit.FINE, printed.output
    saved = ft.load(out).document
    (row,) = saved["estimates"]
    table = re.search(r"ATE +(-?[\d.]+) +([\d.]+) +(-?[\d.]+) to (-?[\d.]+) +<0.001\n", printed.stdout)
    assert table
    expected = (row["estimate"], row["std_error"], row["conf_low"], row["conf_high"])
    assert [float(cell) for cell in table.groups()] == pytest.approx(expected, abs=6e-4)
    for part in (
        "400 records in 2 silos",
        "usual         237     225 (95%)",
        "C(programme) + sbp_0 + age + C(sex) + smoker (gaussian)",
        "95% interval",
        "Certificate: The pooled estimating equation holds to within",
        "targeting",
    ):
        assert part in printed.stdout
    assert "simultaneous" not in printed.stdout
    account = saved["account"]
    phases = [phase for phase, rounds in account["rounds"].items() if rounds]
    assert {"nuisance", "targeting"} <= set(phases)  # others may share their rounds
    for phase in phases:
        ways = [sum(by.get(phase, 0) for by in account[way].values()) for way in ("bits_up", "bits_down")]
        assert re.search(
            rf"^{phase_name(phase)} +{account['rounds'][phase]} +{shown(ways[0])} +{shown(ways[1])}$",
            printed.stdout,
            flags=re.MULTILINE,
        )
    assert call("show", out).stdout == printed.stdout
    assert json.loads(call("show", out, "--json").stdout) == saved
    assert json.loads(call("run", study, "--json", "--threads", "2").stdout) == saved


def test_a_mistake_in_the_study_hides_none_in_the_data(study: Path) -> None:
    text = study.read_text(encoding="utf-8").replace("sbp_0 + age", "sbp_00 + age")
    study.write_text(text.replace("[70, 260]", "[70, 130]"), encoding="utf-8")
    edit(study, confidence="95")
    for command in ("validate", "run"):
        result = call(command, study)
        assert result.exit_code == Exit.DEFECTS
        lines = result.stderr.splitlines()
        assert any("confidence: expected a number between" in line for line in lines)
        assert any("'north', column 'sbp_12': is outside the declared range" in line for line in lines)
        nobody = [line for line in lines if "does not declare 'sbp_00'; did you mean 'sbp_0'?" in line]
        assert len(nobody) == 2  # two models use it
        for line in nobody:
            number = int(line.split(":")[1])
            assert "sbp_00" in study.read_text(encoding="utf-8").splitlines()[number - 1]


def test_the_printed_result_has_its_diagnostics(study: Path) -> None:
    printed = call("run", study).stdout
    assert re.search(r"^P\(exercise\) +in usual +in exercise$", printed, flags=re.MULTILINE)
    assert re.search(r"^0\.40 to 0\.50 +\d+\+? +\d+\+?$", printed, flags=re.MULTILINE)
    assert re.search(r"Outcome model: R2 0\.\d+ before targeting, 0\.\d+ after\.", printed)
    assert "Mean of the EIF:" in printed
    assert "outcome by its prediction" in printed


def test_run_agrees_with_python(study: Path) -> None:
    file = read_study(study)
    document = json.loads(call("run", study, "--json").stdout)
    assert document["estimates"] == ft.run(file.study, file.silos).document["estimates"]
    assert document["study"]["options"]["confidence"] == 0.95


def test_a_result_saved_from_python_can_be_shown(study: Path) -> None:
    file = read_study(study)
    ft.run(file.study, file.silos).save("python.json")
    printed = call("show", "python.json")
    assert printed.exit_code == Exit.FINE
    assert printed.stdout == call("run", study).stdout


def test_several_estimands_and_released_silos(study: Path) -> None:
    edit(study, kind='"TSM"', strata='"sex"', confidence="0.9")
    hidden = call("run", study).stdout
    assert "released by silos" not in hidden
    edit(study.parent / "north.toml", release="true")
    south = study.parent / "south.toml"
    south.write_text(south.read_text(encoding="utf-8") + "[policy]\nrelease = true\n", encoding="utf-8")
    printed = call("run", study).stdout
    assert "random effects" in printed
    assert "overall and by sex?" in " ".join(printed.split())
    assert "simultaneous 90% interval" in printed
    assert len(re.findall(r"^  north ", printed, flags=re.MULTILINE)) == 6
    assert (
        len(re.findall(r"^E\[Y\(usual\)\] in male .*%$", printed, flags=re.MULTILINE)) == 1
    )  # heterogeneity


def test_a_run_that_did_not_converge(study: Path) -> None:
    edit(study, max_rounds="2")
    result = call("run", study)
    assert result.exit_code == Exit.NOT_CONVERGED
    assert "Warning: the budget of rounds was used up" in " ".join(result.stdout.split())


def test_personalised_runs_have_no_pooled_estimate(study: Path) -> None:
    text = study.read_text(encoding="utf-8").replace('kind = "Coded"', 'kind = "Personalized"\nnoise = 0.5')
    study.write_text(text.replace('tolerance = "practical"', ""), encoding="utf-8")
    result = call("run", study)
    assert "Each silo keeps its own estimate" in result.stdout
    assert "released by silos" not in result.stdout
    assert re.search(r"north +240", result.stdout)


@pytest.mark.parametrize("rule", ["", "noise = 0.1"])
def test_a_personalised_run_that_no_silo_leaves_says_which_key_to_set(study: Path, rule: str) -> None:
    text = study.read_text(encoding="utf-8").replace(
        'kind = "Coded"', 'kind = "Personalized"\nmax_updates = 5'
    )
    study.write_text(text.replace('tolerance = "practical"', rule), encoding="utf-8")
    result = call("run", study)
    assert result.exit_code == Exit.NOT_CONVERGED
    said = " ".join(result.stdout.split())
    assert "Warning: unfinished: north, south." in said
    assert "Set noise, e.g. noise = 0.5" in said
    assert "lattice" in said
    assert f"(now: {', '.join(filter(None, [rule, 'lattice = 9.09495e-13']))})" in said  # 2^-40
    assert re.search(r"^north +240 +unfinished$", result.stdout, flags=re.MULTILINE)
    warnings = json.loads(call("run", study, "--json").stdout)["warnings"]
    assert any("unfinished: north, south" in warning for warning in warnings)


def test_a_personalised_study_with_keys_runs_under_masks(study: Path) -> None:
    """The text says how many silos still fit, not which."""
    algorithm = ('kind = "Coded"', 'kind = "Personalized"\nnoise = 0.5')
    file = masked(study.parent, 4, "", algorithm, ('tolerance = "practical"', ""))
    assert file_plan(file).is_masked
    result = call("run", file.path)
    assert result.exit_code in (Exit.FINE, Exit.NOT_CONVERGED), result.stdout
    assert re.search(r"^update +silos still fitting +their records\n0 +\d", result.stdout, flags=re.MULTILINE)
    assert "retired at update" not in result.stdout
    assert json.loads(call("run", file.path, "--json").stdout)["personalized"] == {}
    previewed = call("silo", "preview", file.path, "--silo", file.silos["north"])
    assert "the fluctuation that fits the silo's own rows best" in " ".join(previewed.stdout.split())


def test_a_personalised_silo_that_shows_its_estimate_is_not_said_to_have_none(study: Path) -> None:
    file = read_study(study)
    personal = dataclasses.replace(file.study, algorithm=ft.Personalized(noise=0.5))
    edit(file.silos["north"], release="true")
    with file.silos["south"].open("a", encoding="utf-8") as south:
        south.write("[policy]\nrelease = true\n")
    result = ft.run(personal, file.silos, release=("north", "south"))
    assert result.document["personalized"]["north"]["estimates"]
    assert result.warnings == ()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RefusedError("north", "too few rows"), Exit.REFUSED),
        (NumericalError("the law left the model"), Exit.NOT_CONVERGED),
        (InputError("models: wrong"), Exit.DEFECTS),
    ],
)
def test_exit_codes(study: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: Exit) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(fedtmle.studies.run, "run", fails)
    result = call("run", study)
    assert result.exit_code == code
    assert str(error).removeprefix("silo 'north' ") in result.stderr
    assert call("run", study, "--json").exit_code == code


@pytest.mark.parametrize("command", ["run", "validate", "preflight", "show"])
def test_a_file_that_is_not_there(command: str, tmp_path: Path) -> None:
    result = call(command, tmp_path / "nothing")
    assert result.exit_code == Exit.DEFECTS
    assert "nothing" in result.stderr
    defects = json.loads(call(command, tmp_path / "nothing", "--json").stdout)["defects"]
    assert len(defects) == 1


def test_usage(study: Path) -> None:
    assert call("run").exit_code == Exit.USAGE
    assert call("run", study, "--out", study.parent / "no" / "r.json").exit_code == Exit.USAGE
    assert call("run", study, "--threads", 0).exit_code == Exit.USAGE


@pytest.mark.parametrize("option", ["--out", "--report", "--transcript", "--events"])
def test_a_folder_is_no_file_to_write_and_that_is_said_before_the_run(study: Path, option: str) -> None:
    result = call("run", study, option, ".")
    assert result.exit_code == Exit.USAGE
    assert ". is a folder; name a file" in result.stderr


@pytest.mark.parametrize(
    "command",
    [
        "init",
        "validate",
        "preflight",
        "run",
        "show",
        "demo",
        "watch",
        "bounds",
        "budget",
        "reproduce",
        "report",
    ],
)
def test_help_documents_the_exit_codes(command: str) -> None:
    assert " ".join(CODES.split()) in " ".join(call(command, "--help").stdout.split())


def test_progress_is_shown_on_terminals_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = RoundReport(round=7, phase=Phase.TARGETING, silos=3, bits=12_345)
    with live_progress("study", quiet=False) as progress:
        assert progress is None
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes standard error for a terminal
    monkeypatch.delenv("NO_COLOR", raising=False)
    with live_progress("study", quiet=True) as progress:
        assert progress is None
    with live_progress("study", quiet=False) as progress:
        assert progress is not None
        progress(report)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "round 7, targeting, 3 silos, 12.3 kbit so far" in captured.err


@pytest.mark.parametrize("kind", ["Gradient", "Central"])
def test_a_certificate_above_the_tolerance_is_a_warning(study: Path, kind: str) -> None:
    text = study.read_text(encoding="utf-8").replace('kind = "Coded"', f'kind = "{kind}"')
    text = text.replace('tolerance = "practical"', "tolerance = 1e-6")
    study.write_text(text, encoding="utf-8")
    edit(study, sbp_12='{kind = "number", range = [-1e8, 1e8]}')
    result = call("run", study, "--out", "r.json")
    assert result.exit_code == Exit.FINE
    document = json.loads(Path("r.json").read_text(encoding="utf-8"))
    stated = document["certificate"]
    assert stated["residual_bound"] > stated["tolerance"] >= document["residual"]
    assert document["converged"]
    (warning,) = document["warnings"]
    assert f"certify only {stated['residual_bound']:.2g}" in warning
    assert "range, [-1e+08, 1e+08]" in warning
    assert "Warning: the computed residual is within the tolerance" in result.stdout


def test_a_refusal_in_ones_own_session_says_where_to_learn_the_key(study: Path) -> None:
    with (study.parent / "south.toml").open("a", encoding="utf-8") as south:
        south.write("[policy]\nmin_rows = 5000\n")
    result = call("run", study)
    assert result.exit_code == Exit.REFUSED
    hint = re.search(r"`fedtmle (.*)` shows which key", result.stderr)
    assert hint, result.stderr
    assert "min_rows" in call(*hint[1].split()).stdout
    (defect,) = json.loads(call("run", study, "--json").stdout)["defects"]
    assert "fedtmle silo preview" in defect["message"]
    assert defect["silo"] == "south"


def test_a_run_that_ends_early_says_how_far_it_got(study: Path) -> None:
    with (study.parent / "south.toml").open("a", encoding="utf-8") as south:
        south.write("[policy]\nmax_queries = 2\n")
    result = call("run", study, "--events", "events.jsonl")
    assert result.exit_code == Exit.REFUSED
    said = "After round 2 (nuisance) no estimate was pooled: targeting had not begun."
    assert result.stderr.splitlines()[-1] == said
    *_, last = Path("events.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(last)["event"] == "failed"
    reached = json.loads(call("run", study, "--json").stdout)["reached"]
    assert (reached["rounds"], reached["estimate"]) == (2, None)


def test_validate_a_silo_file_of_another_name(study: Path) -> None:
    north = study.parent / "north.toml"
    edit(north, name='"other"')
    result = call("validate", study)
    assert result.exit_code == Exit.DEFECTS
    lines = north.read_text(encoding="utf-8").splitlines()
    line = next(k for k, text in enumerate(lines, start=1) if text.startswith("name"))
    assert f"{north}:{line}: the silo is called 'other' here and 'north' in the study" in result.stderr


def test_validate_warns_of_data_that_two_silos_list(study: Path) -> None:
    assert call("validate", study).stderr == ""
    other = study.parent / "other.toml"
    text = (study.parent / "north.toml").read_text(encoding="utf-8")
    other.write_text(text.replace('name = "north"', 'name = "other"'), encoding="utf-8")
    with study.open("a", encoding="utf-8") as file:
        file.write('\nother = "other.toml"\n')
    result = call("validate", study)
    assert result.exit_code == Exit.FINE
    line = len(study.read_text(encoding="utf-8").splitlines())
    assert f"Warning: {study}:{line}: silos 'north' and 'other' read the same data" in result.stderr
    (warning,) = json.loads(call("validate", study, "--json").stdout)["warnings"]
    assert warning["line"] == line


def test_one_table_alone_runs_here_with_a_warning_and_a_silo_file_refuses(study: Path) -> None:
    drafted = study.parent / "drafted"
    table = study.parent / "table.csv"
    public = (study.parent / "public.csv").read_text(encoding="utf-8").splitlines()
    complete = [line.split(",", 1)[1] for line in public if not line.startswith(",")]  # without sbp_12
    table.write_text("\n".join(complete), encoding="utf-8")
    assert (
        call("init", drafted, "--from", table, "--outcome", "sbp_0", "--treatment", "smoker").exit_code == 0
    )
    alone = drafted / "study.toml"
    line = len(alone.read_text(encoding="utf-8").splitlines())
    for command in ("validate", "run"):
        result = call(command, alone)
        assert result.exit_code == Exit.FINE, result.stderr
        assert f"Warning: {alone}:{line}: only one silo is listed." in result.stderr
        assert "fewer than 2 silos (min_silos)" in result.stderr
    study.write_text(study.read_text(encoding="utf-8").replace('south = "south.toml"', ""), encoding="utf-8")
    assert "asks for 2 silos (min_silos), and the study has 1" in call("validate", study).stderr
    refused = call("run", study)
    assert refused.exit_code == Exit.REFUSED
    assert "only one silo" not in refused.stderr


def test_a_formula_s_error_points_at_its_place_on_a_line_of_its_own(study: Path) -> None:
    text = study.read_text(encoding="utf-8")
    study.write_text(
        text.replace('formula = "C(programme) + ', 'formula = "C(programme) + + ', 1), encoding="utf-8"
    )
    shown = call("validate", study)
    assert "\\n" not in shown.stderr
    assert any(line.strip() == "^" for line in shown.stderr.splitlines())


def test_a_joined_bin_is_not_shown_as_empty() -> None:
    arms = [{"arm": "a", "counts": [30, 9]}, {"arm": "b", "counts": [0, 12]}]
    histograms = [
        {"probability_of": "b", "edges": [0.0, 0.5, 1.0], "hidden_in": [0, 0], **arm} for arm in arms
    ]
    lines = histogram_table(histograms)
    assert lines[1].split() == ["0.00", "to", "0.50", "30", "joined"]
    assert "may thus have records" in " ".join(lines)

"""A silo's own side from the command line: preview, approval, rejection, ledger."""

from __future__ import annotations

import datetime
import json
import re
import shutil
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.cli.base import Exit
from fedtmle.engine.frames import Declined
from fedtmle.errors import JournalError, RefusedError
from fedtmle.protocol import messages
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import InProcess, Session
from fedtmle.studies.home import open_party
from fedtmle.studies.preview import preview
from fedtmle.studies.risk import risk as audit
from fedtmle.studyfile.file import file_plan, read_study
from fedtmle.text.approval import sentence
from tests.homes import home_at, homes_in

runner = CliRunner()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert runner.invoke(app, ["init", str(tmp_path), "--all-keys"]).exit_code == 0
    homes_in(tmp_path)
    return tmp_path


def command(*words: object) -> str:
    found = runner.invoke(app, [str(word) for word in words])
    assert found.exit_code == 0, found.output
    return found.output


def test_an_approval_is_of_one_plan_and_can_be_taken_back(folder: Path) -> None:
    study, silo = folder / "study.toml", folder / "north.toml"
    plan, home = file_plan(read_study(study)), home_at(silo)
    assert not home.approvals.approves(plan.digest)
    assert plan.digest.hex() in command("silo", "approve", study, "--silo", silo, "--yes")
    assert home.approvals.approves(plan.digest)
    text = study.read_text()
    study.write_text(text.replace('unit = "years"', 'unit = "months"', 1))
    assert file_plan(read_study(study)).digest != plan.digest  # any change is another plan
    study.write_text(text)
    command("silo", "reject", study, "--silo", silo, "--note", "we left")
    assert not home.approvals.approves(plan.digest)
    listed = json.loads(command("silo", "decisions", "--silo", silo, "--json"))
    shown = [(d["approved"], d["in_force"], d["answers"]) for d in listed["decisions"]]
    assert shown == [(True, False, 0), (False, True, 0)]
    words = command("silo", "decisions", "--silo", silo)
    assert words.count("Title: Exercise and blood pressure at two hospitals") == 2
    assert words.index("approved (replaced below)") < words.index("rejected") < words.index("Note: we left")
    assert listed["key"] == home.key.public_keys.hex()


def test_an_approval_that_the_key_did_not_sign_counts_for_nothing(folder: Path) -> None:
    home = home_at(folder / "north.toml")
    plan = file_plan(read_study(folder / "study.toml"))
    home.approvals.decide(plan.digest, approved=False)
    path = home.approvals.path
    path.write_text(path.read_text().replace("false", "true"))
    assert not home.approvals.approves(plan.digest)
    with pytest.raises(JournalError, match="signed head"):
        home.approvals.decide(plan.digest, approved=True)


def test_only_its_owner_can_read_a_silos_folder(folder: Path) -> None:
    home = home_at(folder / "north.toml")
    assert home.key.public
    assert home.folder.stat().st_mode & 0o077 == 0
    assert home.file.home.stat().st_mode & 0o077 == 0
    assert (home.file.home / "key").stat().st_mode & 0o077 == 0


def test_a_guarded_study_gives_the_embedded_result_and_leaves_a_ledger(folder: Path) -> None:
    file = read_study(folder / "study.toml")
    plan = file_plan(file)
    homes = {name: home_at(path) for name, path in file.silos.items()}
    with ExitStack() as stack:
        keepers = {name: stack.enter_context(closing(home.keeper(plan))) for name, home in homes.items()}
        parties = [open_party(plan, name, homes[name].file, keeper=keepers[name]) for name in homes]
        with pytest.raises(RefusedError, match="not approved"):
            Session(plan, InProcess(parties)).run()
        for home in homes.values():  # nothing was told, so the same session may begin once all have agreed
            home.approvals.decide(plan.digest, approved=True)
        finished = Session(plan, InProcess(parties)).run()
    embedded = ft.run(file.study, file.silos)
    assert embedded.run is not None
    assert finished.transcript == embedded.run.transcript
    ledger = homes["north"].ledger_path
    assert "unbroken" in command("ledger", "verify", ledger)
    shown = command("ledger", "show", ledger)
    assert "not_approved" in shown or "approval" in shown
    assert "RoundedGradientQuery" in shown
    assert max(map(len, shown.splitlines())) <= 80
    out = folder / "told"
    command("ledger", "export", ledger, "--out", out)
    told = ft.Transcript.load(out)
    assert [e.replies["self"] for e in told.exchanges] == [
        e.replies["north"] for e in finished.transcript.exchanges
    ]


def test_a_changed_ledger_is_named_with_its_line(folder: Path) -> None:
    test_a_guarded_study_gives_the_embedded_result_and_leaves_a_ledger(folder)
    ledger = home_at(folder / "north.toml").ledger_path
    lines = ledger.read_text().splitlines(keepends=True)
    lines[4] = lines[4].replace('"round":', '"round": ', 1).replace('"bits":', '"bits":1', 1)
    ledger.write_text("".join(lines))
    found = runner.invoke(app, ["ledger", "verify", str(ledger)])
    assert found.exit_code == Exit.DEFECTS
    assert "line 5" in found.output
    ledger.write_text("".join(lines[:4]))  # cut short at a line's end: the signed head tells
    cut = runner.invoke(app, ["ledger", "verify", str(ledger)])
    assert cut.exit_code == Exit.DEFECTS
    assert "it has 4 lines" in cut.output
    assert "lines were cut off" in cut.output


def test_the_preview_shows_every_kind_of_message_that_leaves(folder: Path) -> None:
    file = read_study(folder / "study.toml")
    plan = file_plan(file)
    home = home_at(folder / "north.toml")
    shown = command("silo", "preview", folder / "study.toml", "--silo", folder / "north.toml")
    assert max(map(len, shown.splitlines())) <= 80
    assert "would allow" in shown
    assert "(models)" in shown
    assert not re.search(r"\b[0-9a-f]{2}( [0-9a-f]{2}){3}", shown)  # no bytes of a message
    assert "(nuisance)" not in shown  # one word for it, as in `run`
    view = preview(plan, home.file)
    # Queries share rounds; which of them do may differ, as a fit may take a step more on one silo alone.
    rehearsed = {part for kind in view.kinds for part in kind.explanation.split("; ")}
    told: set[str] = set()
    keeper = Keeper(witness=lambda query, _: told.update(part.explanation for part in query.members))
    parties = [open_party(plan, name, path, keeper=keeper) for name, path in file.silos.items()]
    Session(plan, InProcess(parties)).run()
    assert told == rehearsed


def test_the_preview_says_which_limit_would_refuse(folder: Path) -> None:
    silo = folder / "north.toml"
    silo.write_text(silo.read_text() + "\nmin_rows = 100_000\n")
    found = runner.invoke(app, ["silo", "preview", str(folder / "study.toml"), "--silo", str(silo)])
    assert found.exit_code == 4
    assert "min_rows" in found.output
    assert "NOT MET" in found.output


def refusing(folder: Path, policy: str) -> tuple[Path, Path]:
    silo = folder / "north.toml"
    silo.write_text(silo.read_text() + f"\n{policy}\n")
    return folder / "study.toml", silo


@pytest.mark.parametrize(
    ("policy", "before"),
    [
        ("allow_unsigned = false", "by its key allow_unsigned. Nothing would leave."),
        ("max_functionals = 60", "by its key max_functionals. Before the refusal: 49 numbers."),
    ],
)
def test_the_owner_sees_what_left_before_a_refusal(folder: Path, policy: str, before: str) -> None:
    study, silo = refusing(folder, policy)
    found = runner.invoke(app, ["silo", "preview", str(study), "--silo", str(silo)])
    assert found.exit_code == int(Exit.REFUSED)
    assert before in " ".join(found.output.split())
    approved = " ".join(command("silo", "approve", study, "--silo", silo, "--yes").split())
    assert "Approved, but your silo will refuse the study as it is." in approved
    assert approved.endswith(before)


def test_the_server_hears_what_the_preview_says_of_unsigned_requests(folder: Path) -> None:
    study, silo = refusing(folder, "allow_unsigned = false")
    reason = preview(file_plan(read_study(study)), home_at(silo).file).reason
    assert reason == Declined.NO_SERVER_KEY.value


def test_answering_no_records_nothing(folder: Path) -> None:
    words = ["silo", "approve", str(folder / "study.toml"), "--silo", str(folder / "north.toml")]
    found = runner.invoke(app, words, input="n\n")
    assert found.exit_code == 1
    assert found.output.endswith("Not approved; nothing was recorded.\n")
    assert home_at(folder / "north.toml").approvals.decisions() == []


def test_a_ledger_that_is_not_there_yet_has_no_study(folder: Path) -> None:
    assert command("ledger", "studies", folder / "ledger.jsonl") == "No study has been answered yet.\n"


def test_a_missing_table_is_traced_to_the_silo_file(folder: Path) -> None:
    (folder / "north.csv").unlink()
    silo = folder / "north.toml"
    found = runner.invoke(app, ["silo", "preview", str(folder / "study.toml"), "--silo", str(silo)])
    assert f"correct its path in [data] of {silo}; it is relative to the folder" in found.output


def test_a_misspelled_key_of_the_policy_is_guessed(folder: Path) -> None:
    study, silo = refusing(folder, "min_row = 50")
    found = runner.invoke(app, ["silo", "preview", str(study), "--silo", str(silo)])
    assert "did you mean 'min_rows'?" in found.output


def keyed(folder: Path, extra: str = "") -> Path:
    """The example with a [plan]: both silos sign."""
    study = folder / "study.toml"
    keys = {name: home_at(folder / f"{name}.toml").key.public.hex() for name in ("north", "south")}
    written = ", ".join(f'{name} = "{key}"' for name, key in keys.items())
    plan = f"\n[plan]\n{extra}keys = {{{written}}}\n\n[silos]"
    study.write_text(study.read_text().replace("\n[silos]", plan, 1))
    return study


def test_silos_whose_keys_are_in_the_plan_sign_what_they_heard(folder: Path) -> None:
    unsigned = file_plan(read_study(folder / "study.toml"))
    file = read_study(keyed(folder))
    plan = file_plan(file)
    assert plan.digest != unsigned.digest
    homes = {name: home_at(path) for name, path in file.silos.items()}
    with ExitStack() as stack:
        parties = []
        for name, home in homes.items():
            home.approvals.decide(plan.digest, approved=True)
            keeper = stack.enter_context(closing(home.keeper(plan)))
            parties.append(open_party(plan, name, home.file, keeper=keeper))
        finished = Session(plan, InProcess(parties)).run()
    replies = [messages.decode_reply(data) for data in finished.transcript.exchanges[-2].replies.values()]
    assert all(isinstance(reply, messages.Closed) and len(reply.signature) == 64 for reply in replies)
    assert not any(silo.disagreement for silo in parties)


def test_a_plan_that_has_expired_is_refused(folder: Path) -> None:
    file = read_study(keyed(folder, "expires = 2020-01-01\n"))
    plan, home = file_plan(file), home_at(folder / "north.toml")
    home.approvals.decide(plan.digest, approved=True)
    with closing(home.keeper(plan)) as keeper:
        silo = open_party(plan, "north", home.file, keeper=keeper)
        opening = messages.encode(messages.Open(messages.WIRE_FORMAT, b"s", plan.digest))
        assert messages.decode_reply(silo.step(opening)) == messages.Refused(messages.Reason.EXPIRED)


@pytest.mark.parametrize(
    ("written", "what"),
    [
        ('keys = {nroth = "' + "00" * 32 + '"}', "no silo is called 'nroth'; did you mean 'north'?"),
        ('keys = {north = "00"}', "128 hexadecimal digits"),
        ('expires = "tomorrow"', "expected a date"),
        ("expires = 2027-01-01T10:00:00", "expected a date"),
    ],
)
def test_mistakes_in_a_plan_are_named(folder: Path, written: str, what: str) -> None:
    study = folder / "study.toml"
    study.write_text(study.read_text().replace("\n[silos]", f"\n[plan]\n{written}\n\n[silos]", 1))
    found = runner.invoke(app, ["validate", str(study)])
    assert found.exit_code == 1
    assert what in found.output


def test_an_impact_summary_says_what_the_plan_and_the_policy_say(folder: Path) -> None:
    study, silo, out = folder / "study.toml", folder / "north.toml", folder / "summary.md"
    text = command("silo", "assess", study, "--silo", silo)
    plan = file_plan(read_study(study))
    assert plan.digest.hex() in text
    assert "240 records" in text
    for name in ("sbp_12", "programme", "age", "sbp_0", "smoker", "sex"):
        assert f"| {name} |" in text
    assert "Sums are open: the server reads this silo's own" in text
    assert "| min_cell | 10 |" in text
    assert "| release | no |" in text
    assert "would refuse" not in text
    assert f"Written on {datetime.datetime.now(datetime.UTC).date()}" in text
    summary = text.partition("## Summary")[2].partition("## Purpose")[0]
    for term in ("controller", "processor", "categories of data", "recipients", "retention", "residual risk"):
        assert f"| {term}" in summary, term
    assert "the server: this silo's own sums" in summary
    assert "an attacker who knows every other record can work out" in summary
    assert len(summary.splitlines()) < 20
    risk = text.partition("## Residual risk")[2]
    for finding in audit(read_study(study), silo).to_dict()["findings"]:
        assert f"* {sentence(finding, is_masked=False)}" in risk
    for expected in (
        "Not audited: age, sbp_0, smoker, sex.",
        "No earlier study of these people was answered here.",
        "whatever the key `release` says",
        "the other silo can subtract its own sums",
    ):
        assert expected in risk, expected
    for expected in (
        "averages of sbp_12, programme, age, sbp_0, smoker, sex, and of their products; no row.",
        "requests are not signed",
        "`north.home/people/`: keyed digests of 8 bytes of each person and record",
        "the digests together with their key",
    ):
        assert expected in text, expected
    assert "no decision about a person" not in text
    assert "record of processing" not in text
    assert "inside I()" not in text
    words = study.read_text()
    study.write_text(words.replace('"C(programme) + sbp_0', '"C(programme) + I(age - 60.3) + sbp_0', 1))
    assert "can single out one person.** Ask why they are there: `outcome: I(age - 60.3)`" in command(
        "silo", "assess", study, "--silo", silo
    )
    study.write_text(words)
    silo.write_text(silo.read_text().replace("[policy]", "[policy]\nmin_rows = 5000", 1))
    study.write_text(study.read_text().replace('title = "Exercise', 'title = "a | b <script> Exercise', 1))
    assert command("silo", "assess", study, "--silo", silo, "--out", out) == f"Written: {out}\n"
    text = out.read_text()
    assert "**Your policy would refuse this study here, by its key min_rows. Nothing would leave.**" in text
    assert "| residual risk | Your policy would refuse this study here, by its key min_rows." in text
    assert "a \\| b &lt;script> Exercise" in text  # control characters are refused with the study


MEAN = {"prior": 1.0, "after": 0.0}


@pytest.mark.parametrize(
    ("finding", "open_words", "masked_words"),
    [
        (
            {"known": 0, "worst": 1.0, "mean": MEAN},
            "y: an attacker who knows the other columns cannot work out any single record from the answers "
            "alone, but knows this silo's mean.",
            "y: without masks, an attacker who knows the other columns could not work out any single record "
            "from the answers alone, but would know this silo's mean.",
        ),
        (
            {"known": 0, "worst": 0.1, "mean": None},
            "y: an attacker who knows the other columns can narrow some records to 10% of the range, and can "
            "work out none.",
            "y: without masks, an attacker who knows the other columns could narrow some records to 10% of "
            "the range, and could work out none.",
        ),
        (
            {"attacker": "nothing", "known": 0, "mean": {"prior": 1.0, "after": 0.8}},
            "y: someone who knows no record learns 36% of the variance of this silo's mean, and next to "
            "nothing about a single record.",
            "y: without masks, someone who knows no record would learn 36% of the variance of this silo's "
            "mean, and next to nothing about a single record.",
        ),
    ],
)
def test_a_verdict_is_a_fact_or_what_would_hold_without_masks(
    finding: dict[str, object], open_words: str, masked_words: str
) -> None:
    finding = {"column": "y", "attacker": "design", "records": 9, "prior": 1.0, **finding}
    assert sentence(finding, is_masked=False) == open_words
    assert sentence(finding, is_masked=True) == masked_words


def says_masks_are_left_out_of_the_figures(text: str) -> None:
    """Whether nothing that masks hide is stated as a fact."""
    words = " ".join(text.split())
    assert (
        words.index("Masked: the server and the other silos learn totals over several silos.")
        < words.index("would hold if the masks failed, or all other silos worked together.")
        < words.index("without masks, an attacker who knows every other record could work out the value of")
    )
    for fact in ("learns this silo's mean", "can work out", "knows this silo's mean", "worst case one"):
        assert fact not in words


def test_an_impact_summary_of_a_masked_study(folder: Path) -> None:
    study, silo = folder / "study.toml", folder / "north.toml"
    shutil.copy(folder / "south.csv", folder / "east.csv")
    south = (folder / "south.toml").read_text()
    (folder / "east.toml").write_text(south.replace("south", "east"))
    keys = {
        name: home_at(folder / f"{name}.toml").key.public_keys.hex() for name in ("north", "south", "east")
    }
    lines = "\n".join(f'{name} = "{key}"' for name, key in keys.items())
    text = study.read_text().replace('south = "south.toml"', 'south = "south.toml"\neast = "east.toml"', 1)
    study.write_text(f"{text}\n[plan.keys]\n{lines}\n")
    text = command("silo", "assess", study, "--silo", silo)
    assert "Answers are masked" in text
    assert "the server: totals over all silos" in text.partition("## Purpose")[0]
    limits = command("silo", "preview", study, "--silo", silo).partition("Your limits:\n")[2].splitlines()
    labels = [line.split()[0] for line in limits[: limits.index("")]]
    assert labels == ["rows", "silos", "sums", "queries", "numbers"]
    assert not [line for line in limits if ".. " in line or len(line) > 80]  # no label is cut
    says_masks_are_left_out_of_the_figures(text)
    says_masks_are_left_out_of_the_figures(command("silo", "approve", study, "--silo", silo, "--yes"))
    says_masks_are_left_out_of_the_figures(command("risk", study, "--silo", silo))
    assert json.loads(command("risk", study, "--silo", silo, "--json"))["masked"] is True
    assert f"| east | {keys['east'][:16]} |" in text

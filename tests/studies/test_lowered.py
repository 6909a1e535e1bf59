"""An owner may make a limit laxer than the package's own, with a reason that all see; no study can."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.cli.base import Exit
from fedtmle.data import DataErrors
from fedtmle.errors import ProtocolError
from fedtmle.lowered import LoweredLimit
from fedtmle.protocol import messages
from fedtmle.protocol.messages import Open, Opened, Refused
from fedtmle.protocol.plan import Plan
from fedtmle.protocol.policy import UNGUARDED
from fedtmle.report.page import render
from fedtmle.runtime.records import Keeper
from fedtmle.runtime.session import InProcess, Session
from fedtmle.runtime.silo import Silo
from fedtmle.studies.home import Home, open_party
from fedtmle.studyfile.file import StudyFileErrors, file_plan, read_study
from fedtmle_core.signing import is_signed
from tests.homes import home_at, homes_in
from tests.runtime.faults import CASES, key_of

REASON = "rare disease <b>; decision 12/2026"
LIMIT = LoweredLimit("min_arm_rows", 5.0, REASON)
WORDS = f"min_arm_rows is 5 instead of 10: {REASON}"
runner = CliRunner()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert runner.invoke(app, ["init", str(tmp_path), "--all-keys"]).exit_code == 0
    homes_in(tmp_path)
    return tmp_path


def lower(silo: Path, key: str = LIMIT.key, value: float = LIMIT.value, reason: str = REASON) -> None:
    text = silo.read_text(encoding="utf-8").replace("[policy]", f"[policy]\n{key} = {value:g}\n")
    silo.write_text(f'{text}\n[policy.reasons]\n{key} = "{reason}"\n', encoding="utf-8")


def shorten(table: Path, rows: int) -> None:
    table.write_text("".join(table.read_text().splitlines(keepends=True)[: rows + 1]))


def flowed(output: str) -> str:
    return " ".join(output.split())


def opened(plan: Plan, home: Home) -> messages.Reply:
    """Return a silo's reply to the opening of a plan, as in a deployed run."""
    approved = home.as_approved(plan)
    with closing(approved.keeper(plan)) as keeper:
        silo = open_party(
            plan, home.file.name, approved.file, keeper=replace(keeper, key=None), home=approved
        )
        request = messages.encode(Open(messages.WIRE_FORMAT, plan.digest[:16], plan.digest))
        return messages.decode_reply(silo.step(request))


def test_the_result_and_its_report_state_the_limit_and_the_reason(folder: Path) -> None:
    file = read_study(folder / "study.toml")
    before = ft.run(file.study, file.silos)
    lower(folder / "north.toml")
    found = ft.run(file.study, file.silos)
    assert "lowered" not in before.document
    assert found.document["lowered"] == {"north": [{"key": LIMIT.key, "value": 5.0, "reason": REASON}]}
    note = f"silo 'north' lowered a limit of its policy: {WORDS}"
    assert note in found.notes
    assert note in str(found)
    page = render(found.document)
    assert "decision 12/2026" in page
    assert "<b>;" not in page  # the words are an owner's, and are escaped
    # Nothing else that leaves a silo differs.
    assert before.run is not None
    assert found.run is not None
    first, *rest = found.run.transcript.exchanges
    assert rest == before.run.transcript.exchanges[1:]
    reply = messages.decode_reply(first.replies["north"])
    assert isinstance(reply, Opened)
    assert reply.lowered == (LIMIT,)
    assert first.replies["south"] == before.run.transcript.exchanges[0].replies["south"]


def test_a_masked_silo_states_it_too() -> None:
    plan, rows = CASES["two arms, relayed"]()
    first = plan.silos[0]
    silos = [
        Silo(
            name,
            plan,
            rows[name],
            keeper=Keeper(
                policy=UNGUARDED.lower([LIMIT] if name == first else []),
                key=key_of(name),
                mask_key=key_of(name).mask_key,
            ),
        )
        for name in plan.silos
    ]
    assert Session(plan, InProcess(silos)).run().lowered == {first: [LIMIT]}


def test_a_file_must_give_the_reason(folder: Path) -> None:
    silo = folder / "north.toml"
    text = silo.read_text(encoding="utf-8")
    silo.write_text(text.replace("[policy]", "[policy]\nmin_arm_rows = 5"), encoding="utf-8")
    with pytest.raises(DataErrors, match=r"min_arm_rows: may be raised; lowered only with a reason"):
        home_at(silo)


def test_a_study_cannot_lower_a_limit(folder: Path) -> None:
    study = folder / "study.toml"
    study.write_text(study.read_text(encoding="utf-8") + "\n[policy]\nmin_arm_rows = 5\n", encoding="utf-8")
    with pytest.raises(StudyFileErrors, match="policy: unknown section"):
        read_study(study)


def test_the_owner_sees_it_approves_it_and_finds_it_in_the_log(folder: Path) -> None:
    study, silo = folder / "study.toml", folder / "north.toml"
    shorten(folder / "north.csv", 60)
    lower(silo)
    for words in (("preview",), ("approve", "--yes"), ("assess",)):
        shown = runner.invoke(app, ["silo", words[0], str(study), "--silo", str(silo), *words[1:]])
        assert shown.exit_code == 0, shown.output
        assert "instead of 10: rare disease" in flowed(shown.output)
    listed = runner.invoke(app, ["silo", "decisions", "--silo", str(silo)])
    assert f"Lowered: {WORDS}" in flowed(listed.output)
    home, plan = home_at(silo), file_plan(read_study(study))
    (decision,) = home.approvals.decisions()
    assert decision.lowered == (LIMIT,)
    signature = bytes.fromhex(decision.signature)
    for changed in ((), (msgspec.structs.replace(LIMIT, reason="another"),)):
        forged = msgspec.structs.replace(decision, lowered=changed)
        assert not is_signed(forged.signed, signature, home.key.public)
    assert opened(plan, home) == Opened(60, (LIMIT,))
    lines = [json.loads(line) for line in home.ledger_path.read_text().splitlines()]
    assert [line["explanation"] for line in lines if line["request"] == "open"] == [WORDS]


def test_one_plan_is_approved_with_a_lowered_limit(folder: Path) -> None:
    study, silo = folder / "study.toml", folder / "north.toml"
    shorten(folder / "north.csv", 18)
    plan = file_plan(read_study(study))
    approve = ["silo", "approve", str(study), "--silo", str(silo), "--yes"]
    assert runner.invoke(app, approve).exit_code == 0
    assert isinstance(opened(plan, home_at(silo)), Refused)  # min_rows is 20
    found = runner.invoke(app, [*approve, "--lower", "min_rows=15", "--reason", REASON])
    assert found.exit_code == 0, found.output
    assert f"min_rows is 15 instead of 20: {REASON}" in flowed(found.output)
    assert opened(plan, home_at(silo)) == Opened(18, (LoweredLimit("min_rows", 15.0, REASON),))
    assert home_at(silo).file.policy.min_rows == 20


def test_no_limit_is_lowered_after_the_opening_that_states_them(folder: Path) -> None:
    """A run that is resumed repeats its recorded opening, so a limit lowered since would be in no result."""
    study, silo = folder / "study.toml", folder / "north.toml"
    plan, home = file_plan(read_study(study)), home_at(silo)
    approve = ["silo", "approve", str(study), "--silo", str(silo), "--yes"]
    assert runner.invoke(app, [*approve, "--lower", "min_rows=15", "--reason", REASON]).exit_code == 0
    assert isinstance(opened(plan, home), Opened)
    found = runner.invoke(app, [*approve, "--lower", "min_rows=14", "--reason", REASON])
    assert found.exit_code == Exit.DEFECTS
    assert "this plan was opened here with other limits" in flowed(found.output)
    assert "min_rows" in flowed(found.output)
    assert len(home.approvals.decisions()) == 1
    assert runner.invoke(app, [*approve, "--lower", "min_rows=15", "--reason", "in short"]).exit_code == 0
    home.reject(plan)
    assert runner.invoke(app, approve).exit_code == 0  # stricter than at the opening
    assert runner.invoke(app, [*approve, "--lower", "min_rows=15", "--reason", REASON]).exit_code != 0
    assert home.as_approved(plan).file.policy.min_rows == 20


def test_a_limit_that_the_approval_does_not_sign_is_not_in_force(folder: Path) -> None:
    study, silo = folder / "study.toml", folder / "north.toml"
    plan, approved = file_plan(read_study(study)), home_at(silo)
    approved.approve(plan)
    lower(silo)
    later = home_at(silo)
    assert later.file.policy.min_arm_rows == 5
    assert later.as_approved(plan).file.policy == approved.file.policy
    later.approve(plan)
    assert later.as_approved(plan).file.policy.min_arm_rows == 5
    assert approved.as_approved(plan).file.policy.lowered == (LIMIT,)  # whatever the file says now
    later.reject(plan)
    assert later.as_approved(plan).file.policy == approved.file.policy
    decision = later.approvals.decide(plan.digest, approved=False, lowered=(LIMIT,))
    assert decision.lowered == (LIMIT,)
    assert later.as_approved(plan).file.policy == approved.file.policy  # a rejection lowers nothing


def test_a_limit_of_the_file_is_not_in_force_for_a_plan_without_a_decision(folder: Path) -> None:
    study, silo = folder / "study.toml", folder / "north.toml"
    lower(silo)
    home, plan = home_at(silo), file_plan(read_study(study))
    assert home.file.policy.min_arm_rows == 5
    assert home.approvals.decisions() == []
    assert home.as_approved(plan).file.policy.lowered == ()
    assert home.as_approved(plan).file.policy.min_arm_rows == 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lower", "min_rows=15"], "expected a reason in words"),
        (["--lower", "min_rows", "--reason", "x"], "expected KEY=NUMBER"),
        (["--lower", "min_row=15", "--reason", "x"], "no limit of a policy has this name"),
        (["--lower", "min_rows=25", "--reason", "x"], "is not laxer than the package's own limit"),
        (["--lower", "min_rows=1.5", "--reason", "x"], "expected a whole number"),
        (["--lower", "max_queries=inf", "--reason", "x"], "expected a number of at least 0"),
        (["--reason", "x"], "this is for --lower"),
    ],
)
def test_wrong_words_approve_nothing(folder: Path, words: list[str], message: str) -> None:
    study, silo = folder / "study.toml", folder / "north.toml"
    found = runner.invoke(app, ["silo", "approve", str(study), "--silo", str(silo), "--yes", *words])
    assert found.exit_code == Exit.DEFECTS
    assert message in flowed(found.output)
    assert home_at(silo).approvals.decisions() == []


def test_a_server_believes_no_limit_that_there_is_not() -> None:
    """The words of a silo are shown to people, so that they are checked first."""
    plan, rows = CASES["mean, gradient"]()

    class Lying(InProcess):
        def exchange(self, requests: Mapping[str, bytes], /) -> Mapping[str, bytes]:
            false = Opened(50, (LoweredLimit("min_rows", 1.0, "\x1b[2J"),))
            return {**super().exchange(requests), plan.silos[0]: messages.encode(false)}

    silos = [Silo(name, plan, rows[name]) for name in plan.silos]
    with pytest.raises(ProtocolError, match="states a limit that is none of its policy's"):
        Session(plan, Lying(silos)).run()

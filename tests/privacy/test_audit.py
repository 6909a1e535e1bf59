"""The audit against the protocol itself: what it says is left is what the very same answers allow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.cli.base import Exit
from fedtmle.errors import InputError
from fedtmle.privacy.audit import Attacker, Audit, ColumnRisk, Continuous, Discrete, audit
from fedtmle.protocol.coded import RoundedGradientQuery
from fedtmle.protocol.plan import roster
from fedtmle.protocol.query import AnsweredQuery
from fedtmle.runtime.certificate import Replayed, rehearse, replay
from fedtmle.runtime.ledger import Exchange, Transcript
from fedtmle.runtime.rows import LocalRows
from fedtmle.studyfile.file import study_plan
from fedtmle_core.types import Array, Part
from fedtmle_paper.two_arm import TwoArm, TwoArmRows
from tests.privacy.studies import study_with_everything, table_of
from tests.privacy.test_attacks import plan_of, two_arm_rows

N = 30
BOUNDS = (-10.0, 10.0)


def rounded_run(tolerance: float) -> tuple[TwoArm, dict[str, Array], list[AnsweredQuery], LocalRows]:
    """One silo's rounded gradients in a coarse run; closing sums are left out, since they are exact."""
    problem = TwoArm(outcome_bounds=BOUNDS, weight_ceiling=16.0)
    raw, other = two_arm_rows(5, N), two_arm_rows(6, 50)
    algorithm = ft.Coded(tolerance=tolerance)
    silos = {"a": raw, "b": other}
    result = ft.solve(problem, problem.start(), silos, algorithm)
    heard = replay(plan_of(problem, algorithm, silos), problem.read(raw), result.transcript, "a")
    return problem, raw, [a for a in heard.answered if isinstance(a.query, RoundedGradientQuery)], heard.local


def outcome(problem: TwoArm, raw: dict[str, Array]) -> Continuous:
    def move(rows: TwoArmRows, by: float) -> TwoArmRows:
        return replace(rows, y=rows.y + by / problem.width)

    return Continuous(name="outcome", radius=10.0, values=raw["outcome"], move=move)


def same_answers(problem: TwoArm, raw: dict[str, Array], answered: list[AnsweredQuery]) -> bool:
    rows = problem.read(raw)
    local = LocalRows("a", rows, N, None)
    return all(asked.query.answer(local) == asked.answer for asked in answered)


def finding(made: Audit, attacker: Attacker) -> ColumnRisk:
    return next(f for f in made.findings if f.attacker is attacker)


def test_what_is_left_is_what_answers_allow() -> None:
    """Within the interval that the audit leaves, every answer stays the same integer; beyond, one changes."""
    problem, raw, answered, local = rounded_run(tolerance=0.05)
    made = audit(answered, local, problem.read(raw), [outcome(problem, raw)], attackers=[Attacker.OTHERS])
    left = finding(made, Attacker.OTHERS).after
    assert len(answered) >= 2
    moved = 0
    for i in range(0, N, 3):
        assert 0 < left[i] < 10.0
        # Some shift by up to twice the half-width leaves the interval on each side; scan for its two ends.
        same = []
        for by in np.linspace(-2.2, 2.2, 89) * left[i]:
            changed = raw["outcome"].copy()
            changed[i] += by
            if abs(changed[i]) <= 10.0:
                same.append((by, same_answers(problem, {**raw, "outcome": changed}, answered)))
        allowed = [by for by, fine in same if fine]
        width = max(allowed) - min(allowed)
        assert width == pytest.approx(2 * left[i], abs=0.11 * left[i])
        moved += any(not fine for _, fine in same)
    assert moved == 10


def test_discrete_candidates_are_those_that_give_the_same_answers() -> None:
    problem, raw, answered, local = rounded_run(tolerance=6.0)
    rows = problem.read(raw)
    arm = Discrete(
        name="treatment",
        levels=(0.0, 1.0),
        truth=raw["treatment"].astype(np.int64),
        assign=lambda _, k: problem.read({**raw, "treatment": np.full(N, float(k))}),
    )
    made = audit(answered, local, rows, [arm], attackers=[Attacker.OTHERS], noise=0.05)
    found = finding(made, Attacker.OTHERS)
    for i in range(N):
        flipped = raw["treatment"].copy()
        flipped[i] = 1 - flipped[i]
        assert same_answers(problem, {**raw, "treatment": flipped}, answered) == (found.after[i] == 0.5)
    assert found.noisy is not None
    # At a declared noise, longhand for the first record: 1/2 iff the two transcripts are within twice eta.
    gap = 0.0
    for asked in answered:
        local_terms = []
        for k in (0.0, 1.0):
            t = raw["treatment"].copy()
            t[0] = k
            changed = problem.read({**raw, "treatment": t})
            query: Any = asked.query
            sums = problem.submodel(query.law, changed).sums(query.eps, Part.GRADIENT)
            C = np.array([[float(x) for x in row] for row in query.lattice.C])
            local_terms.append(C @ sums.values(N))
        gap += float(((local_terms[0] - local_terms[1]) ** 2).sum())
    assert (found.noisy[0][0] == 0.5) == (np.sqrt(gap) <= 0.1)


def test_more_answers_leave_less_and_noise_leaves_more() -> None:
    problem, raw, answered, local = rounded_run(tolerance=0.05)
    rows, column = problem.read(raw), outcome(problem, raw)
    few = finding(audit(answered[:1], local, rows, [column], attackers=[Attacker.OTHERS]), Attacker.OTHERS)
    many = audit(answered, local, rows, [column], noise=0.01)
    others, design, nothing = (finding(many, a) for a in Attacker)
    assert (others.after <= few.after + 1e-15).all()
    assert others.noisy is not None
    low, high = others.noisy
    assert (low <= high * (1 + 1e-9)).all()
    # Linear answers: both are eta over the norm of the record's own derivatives, capped by the prior.
    assert low == pytest.approx(high, rel=1e-6)
    assert (design.after >= others.after).all()
    assert design.mean_after is not None
    assert design.mean_prior is not None
    assert 0 < design.mean_after < design.mean_prior
    assert nothing.mean_after is not None
    assert nothing.after[0] <= nothing.prior


def test_a_whole_study_is_covered_and_its_replay_checked() -> None:
    study = study_with_everything("everything")
    table = table_of(study, 120)
    replayed = rehearse(study_plan(study, roster(["s"])), table, "s")
    assert isinstance(replayed, Replayed)
    column = Continuous(
        name="y",
        radius=30.0,
        values=table.numeric["y"],
        move=lambda rows, by: rows.with_numeric("y", rows.numeric["y"] + by),
    )
    made = audit(replayed.answered, replayed.local, table, [column], noise=1e-3)
    assert set(made.uncovered) == {"bins", "departures", "own estimate"}  # each is named as not covered
    assert made.labels["tally"] >= 2
    found = finding(made, Attacker.OTHERS)
    assert len(found.after) == np.count_nonzero(~np.isnan(table.numeric["y"]))
    assert found.after.max() <= 1e-6  # exact sums tell it to who knows all others
    with pytest.raises(InputError, match="finite range"):
        audit(
            [],
            replayed.local,
            table,
            [Continuous(name="y", radius=0.0, values=column.values, move=column.move)],
        )


# The command.

runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    assert runner.invoke(app, ["init", "toy", "--all-keys"]).exit_code == 0
    return Path("toy")


@pytest.mark.usefixtures("toy")
def test_the_command_before_and_after_a_run() -> None:
    before = runner.invoke(app, ["risk", "toy/study.toml", "--silo", "toy/north.toml"])
    assert before.exit_code == Exit.FINE, before.output
    assert all(len(line) <= 80 for line in before.stdout.splitlines())
    assert "Planned" in before.stdout
    assert "can work out the value of every one" in " ".join(before.stdout.split())
    ran = runner.invoke(app, ["run", "toy/study.toml", "--quiet", "--transcript", "t.bin"])
    assert ran.exit_code == Exit.FINE
    command = [
        "risk",
        "toy/study.toml",
        "--silo",
        "south",
        "--transcript",
        "t.bin",
        "--json",
        "--noise",
        "0.01",
    ]
    after = runner.invoke(
        app, [*command, "--attribute", "sbp_12", "--attacker", "others", "--figure", "f.png"]
    )
    assert after.exit_code == Exit.FINE, after.output
    document = json.loads(after.stdout)
    assert document["queries"] == "answered"
    assert document["silo"] == "south"
    (one,) = document["findings"]
    assert one["known"] == one["records"] == sum(one["histogram"]["counts"]) == 154
    assert 0 < one["noisy"]["worst"] <= one["noisy"]["achieved_worst"] < 95
    assert Path("f.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--silo", "west"], Exit.DEFECTS, "none of the study's silos north, south"),
        (["--silo", "north", "--attribute", "colour"], Exit.DEFECTS, "no column 'colour'"),
        (["--silo", "north", "--attacker", "spy"], Exit.USAGE, "others, design, nothing"),
        (["--silo", "north", "--figure", "f.doc"], Exit.USAGE, ".png"),
        (["--silo", "north", "--transcript", "toy/study.toml"], Exit.DEFECTS, "not a transcript"),
    ],
)
def test_mistakes_are_named(toy: Path, arguments: list[str], code: Exit, says: str) -> None:
    result = runner.invoke(app, ["risk", str(toy / "study.toml"), *arguments])
    assert result.exit_code == code, result.output
    assert says in " ".join(result.output.split())


def test_other_rows_and_other_studies_are_refused(toy: Path) -> None:
    assert runner.invoke(app, ["run", "toy/study.toml", "--quiet", "--transcript", "t.bin"]).exit_code == 0
    csv = toy / "north.csv"
    lines = csv.read_text().splitlines()
    csv.write_text("\n".join([lines[0], *reversed(lines[2:]), lines[2]]) + "\n")
    command = ["risk", "toy/study.toml", "--silo", "north", "--transcript", "t.bin"]
    changed = runner.invoke(app, command)
    assert changed.exit_code == Exit.DEFECTS
    assert "its rows do not give the recorded answers" in changed.output
    csv.write_text("\n".join(lines) + "\n")
    assert runner.invoke(app, command).exit_code == Exit.FINE
    told = Transcript.load("t.bin")  # as a silo's own ledger has it: under no name but its own
    own = [Exchange({"self": e.requests["north"]}, {"self": e.replies["north"]}) for e in told.exchanges]
    Transcript(told.session, own).save("own.bin")
    assert runner.invoke(app, [*command[:-1], "own.bin"]).exit_code == Exit.FINE
    study = toy / "study.toml"
    study.write_text(study.read_text().replace("sbp_0 + age + C(sex) + smoker", "sbp_0 + age"))
    other = runner.invoke(app, command)
    assert other.exit_code == Exit.DEFECTS
    assert "transcript: it does not follow from this study" in " ".join(other.output.split())

"""A backup of a silo that runs is whole; after a restoration no plan can be answered twice."""

from __future__ import annotations

import io
import json
import shutil
import stat
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedtmle.cli import app
from fedtmle.deploy.backup import back_up, restore
from fedtmle.deploy.kits import Deployment, Kit, Role, read_deployment, read_kit
from fedtmle.deploy.launch import RunsHere
from fedtmle.deploy.provision import provision
from fedtmle.engine import frames
from fedtmle.engine.frames import Declined, Ready, Waiting
from fedtmle.engine.post import Desk, Notice, Standing, approvals_of
from fedtmle.engine.runs import sites
from fedtmle.engine.site import open_endpoint
from fedtmle.errors import InputError, JournalError
from fedtmle.protocol.plan import Plan
from fedtmle.runtime import ledger
from fedtmle.runtime.session import InProcess
from fedtmle.studies.home import Home, open_party
from fedtmle.studies.over import run_over
from fedtmle.studyfile.file import StudyFile, file_plan, read_study
from fedtmle_core.journal import scan, write_document
from tests.engine.lines import approve, opened, study_of
from tests.homes import home_at

runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})
SILO = "hospital 1"


@dataclass(frozen=True)
class Place:
    """A silo with two approved plans, of which the first was answered before the backup."""

    kit: Kit
    first: StudyFile
    second: StudyFile

    @property
    def home(self) -> Home:
        return Home.of(self.first.silos[SILO])

    def answer(self, study: StudyFile, *, remembers: bool = False) -> None:
        """Run a study in this process, with the records of a deployed silo at hospital 1."""
        plan, silos, keepers = file_plan(study), [], []
        for name, path in study.silos.items():
            home = home_at(path)
            recorded = name == SILO
            keeper = home.keeper(plan) if recorded else home.unrecorded_keeper(plan)
            keepers += [keeper] if recorded else []
            held = home if recorded and remembers else None
            silos.append(open_party(plan, name, home.file, keeper=keeper, home=held))
        run_over(plan, InProcess(silos))
        for keeper in keepers:
            keeper.close()

    def hello(self, study: StudyFile) -> frames.Answer:
        """What the silo says when the server starts this study."""
        site = sites(study.silos)[SILO]
        end = opened(open_endpoint(self.kit.home, site, study.path.read_bytes(), file_plan(study).digest))
        try:
            while True:
                answer = frames.read_answer(end.step(frames.HELLO))
                if answer is not Waiting.DATA:
                    return answer
        finally:
            end.close()


def seeded(study: StudyFile, seed: int) -> StudyFile:
    path = study.path.with_name(f"study-{seed}.toml")
    text = study.path.with_name("study.toml").read_text()
    path.write_text(f"[options]\nseed = {seed}\n\n{text}")
    return read_study(path)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backup")
    study = study_of(folder, hospitals=2)
    made = provision(folder / "consortium", silos=list(study.silos), host="localhost", port=1)
    kit = read_kit(made.kit(SILO), Role.SILO)
    write_document(kit.home / "silo.json", {"silo_file": str(study.silos[SILO])})
    first, second = seeded(study, 1), seeded(study, 2)
    approve(first, SILO)
    approve(second, SILO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        Place(kit, first, second).answer(first)
    return folder


@pytest.fixture
def place(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    monkeypatch.setattr("os.fsync", lambda _: None)
    for name in ("consortium", "hospitals"):
        shutil.copytree(original / name, tmp_path / name)
    kit = read_kit(read_deployment(tmp_path / "consortium").kit(SILO))
    studies = [read_study(tmp_path / "hospitals" / f"study-{seed}.toml") for seed in (1, 2)]
    write_document(kit.home / "silo.json", {"silo_file": str(studies[0].silos[SILO])})
    return Place(kit, *studies)


def digest(study: StudyFile | Plan) -> str:
    return (study if isinstance(study, Plan) else file_plan(study)).digest.hex()


def test_everything_lost_then_restored_answers_no_plan_that_was_approved(
    place: Place, tmp_path: Path
) -> None:
    """Both plans may have been answered since: the one with a journal and the one without."""
    count = back_up(place.kit, tmp_path / "b.tar.gz")
    assert count > 10
    place.answer(place.second)  # after the backup: nobody who has only the backup can know
    lines = len(list(ledger.read(place.home.ledger_path)))
    shutil.rmtree(place.home.file.home)
    shutil.rmtree(place.kit.path)
    done = restore(tmp_path / "b.tar.gz", place.kit.path)
    assert set(done.closed) == {digest(place.first), digest(place.second)}
    assert done.unknown
    assert len(list(ledger.read(place.home.ledger_path))) < lines  # older, and unbroken
    for study in (place.first, place.second):
        assert place.hello(study) is Declined.REJECTED
        approve(study, SILO)  # around the command, which refuses
        assert place.hello(study) is Declined.REJECTED
        refused = runner.invoke(
            app, ["silo", "approve", str(study.path), "--silo", str(study.silos[SILO]), "--yes"]
        )
        assert refused.exit_code == 1
        assert "with another seed" in refused.stderr
    third = seeded(place.first, 3)
    assert place.hello(third) is Waiting.APPROVAL  # a new plan is as ever
    approve(third, SILO)
    assert place.hello(third) == Ready(release=False)


def test_without_a_restoration_the_second_plan_would_be_answered(place: Place) -> None:
    """The test above can fail."""
    assert place.hello(place.second) == Ready(release=False)


def test_plans_that_came_after_the_backup_are_closed_when_the_server_is_heard(
    place: Place, tmp_path: Path
) -> None:
    back_up(place.kit, tmp_path / "b.tar.gz")
    later = seeded(place.first, 4)
    approve(later, SILO)
    place.answer(later)
    shutil.rmtree(place.home.file.home)
    restore(tmp_path / "b.tar.gz", place.kit.path)
    assert place.hello(later) is Waiting.APPROVAL  # it has never heard of it ...
    desk = Desk(place.kit.home, version="1")
    desk.take(
        Notice(time=0.0, version="1", open=[digest(later)], texts={digest(later): later.path.read_bytes()})
    )
    assert place.hello(later) is Declined.REJECTED  # ... and learns of it from the server
    assert desk.report().standings[digest(later)] is Standing.REJECTED
    new = seeded(place.first, 5)  # posted afterwards
    desk.take(Notice(time=0.0, version="1", open=[digest(later), digest(new)]))
    assert digest(new) not in place.home.closed


def test_a_doctor_between_loss_and_restoration_makes_no_key(place: Place, tmp_path: Path) -> None:
    """A new key would stay in place, and sign none of the restored records."""
    back_up(place.kit, tmp_path / "b.tar.gz")
    before = place.home.key.public_keys
    lost = tmp_path / "lost"
    place.home.file.home.rename(lost)
    said = runner.invoke(app, ["deploy", "doctor", str(place.kit.path)]).output
    assert "restore it from your backup; only if" in " ".join(said.split())
    for command in ("decisions", "home"):
        done = runner.invoke(app, ["silo", command, "--silo", str(place.first.silos[SILO])])
        assert done.exit_code == 1
    assert place.hello(place.second) is Declined.CONFIGURATION
    assert not place.home.file.home.exists()
    restore(tmp_path / "b.tar.gz", place.kit.path)
    assert place.home.key.public_keys == before
    assert place.home.approvals.decisions()


def test_a_memory_that_is_older_than_the_ledger_is_said_to_be(place: Place, tmp_path: Path) -> None:
    back_up(place.kit, tmp_path / "b.tar.gz")
    place.answer(place.second, remembers=True)
    third = seeded(place.first, 3)
    assert place.home.read(file_plan(third))
    shutil.rmtree(place.home.file.home / "people")
    with pytest.raises(JournalError, match="the memory lacks studies that were answered"):
        place.home.read(file_plan(third))
    done = runner.invoke(app, ["deploy", "restore", str(tmp_path / "b.tar.gz"), str(place.kit.path)])
    assert done.exit_code == 0, done.output
    assert f"Answered, but newer than the backup of the home's memory: plan {digest(place.second)[:16]}" in (
        " ".join(done.output.split())
    )
    assert place.home.read(file_plan(third))
    shown = runner.invoke(app, ["silo", "home", "--silo", str(place.first.silos[SILO])]).output
    assert "the people of 1 answered studies are not known" in " ".join(shown.split())


def test_a_home_that_was_made_anew_is_not_mixed_with_a_backup(place: Place, tmp_path: Path) -> None:
    back_up(place.kit, tmp_path / "b.tar.gz")
    shutil.rmtree(place.home.file.home)
    Home.create(place.first.silos[SILO])
    with pytest.raises(InputError, match="a home with another key is here; move it away"):
        restore(tmp_path / "b.tar.gz", place.kit.path)


def test_files_that_are_intact_and_newer_stay(place: Place, tmp_path: Path) -> None:
    back_up(place.kit, tmp_path / "b.tar.gz")
    place.answer(place.second)
    before = {path: path.read_bytes() for path in place.home.folder.rglob("*") if path.is_file()}
    done = restore(tmp_path / "b.tar.gz", place.kit.path)
    assert done.put_back == []
    assert done.closed == []
    assert not done.unknown
    assert "hospitals/hospital 1/ledger.jsonl" in done.kept
    assert {path: path.read_bytes() for path in before} == before


def test_a_damaged_journal_is_replaced_and_its_plan_alone_closed(place: Place, tmp_path: Path) -> None:
    back_up(place.kit, tmp_path / "b.tar.gz")
    journal = place.home.journal_path(file_plan(place.first))
    data = bytearray(journal.read_bytes())
    data[len(data) // 2] ^= 1
    journal.write_bytes(data)
    done = restore(tmp_path / "b.tar.gz", place.kit.path)
    assert done.put_back == [f"hospitals/hospital 1/{journal.name}"]
    assert done.closed == [digest(place.first)]
    assert not done.unknown  # the ledger in place shows that the second plan has not begun
    assert list(scan(journal.read_bytes(), journal))
    (aside,) = place.home.file.home.glob("replaced-*")
    assert (aside / "hospitals" / "hospital 1" / journal.name).read_bytes() == bytes(data)
    assert place.hello(place.second) == Ready(release=False)


def test_a_ledger_that_was_cut_short_is_put_back_with_its_head(place: Place, tmp_path: Path) -> None:
    back_up(place.kit, tmp_path / "b.tar.gz")
    path = place.home.ledger_path
    whole = path.read_bytes()
    path.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))
    with pytest.raises(JournalError, match="cut off"):
        ledger.verify(path, place.home.key.public)
    restore(tmp_path / "b.tar.gz", place.kit.path)
    assert path.read_bytes() == whole
    ledger.verify(path, place.home.key.public)


def test_a_backup_while_lines_are_written_can_be_verified(place: Place, tmp_path: Path) -> None:
    """The moment between a line and its head, and the middle of a line."""
    path = place.home.ledger_path
    torn = path.read_bytes().splitlines(keepends=True)[0][:20]
    with path.open("ab") as file:
        file.write(torn)
    back_up(place.kit, tmp_path / "b.tar.gz")
    shutil.rmtree(place.home.file.home)
    restore(tmp_path / "b.tar.gz", place.kit.path)
    count, _ = ledger.verify(place.home.ledger_path, place.home.key.public)
    assert count > 5
    assert approvals_of(place.kit.home).decisions()


def test_a_backup_is_for_its_owner_alone_and_overwrites_nothing(place: Place, tmp_path: Path) -> None:
    target = tmp_path / "b.tar.gz"
    done = runner.invoke(app, ["deploy", "backup", str(place.kit.path), "--out", str(target)])
    assert done.exit_code == 0, done.output
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with tarfile.open(target) as archive:
        names = archive.getnames()
    assert "home/hospitals/hospital 1/ledger.jsonl" in names
    assert "home/key" in names
    assert "kit/startup/client.key" in names
    assert not any("infants" in name for name in names)  # no records of people
    again = runner.invoke(app, ["deploy", "backup", str(place.kit.path), "--out", str(target)])
    assert again.exit_code == 1
    assert "the file exists" in again.stderr


def test_backups_that_do_not_fit_or_are_damaged_change_nothing(place: Place, tmp_path: Path) -> None:
    target = tmp_path / "b.tar.gz"
    back_up(place.kit, target)
    other = read_deployment(place.kit.path.parent.parent).kit("hospital 2")
    with pytest.raises(InputError, match="a backup of 'hospital-1', not of 'hospital-2'"):
        restore(target, other)
    full = tmp_path / "full"
    full.mkdir()
    (full / "x").write_text("x")
    with pytest.raises(InputError, match="neither empty nor a kit"):
        restore(target, full)
    half = tmp_path / "half.tar.gz"
    half.write_bytes(target.read_bytes()[: target.stat().st_size // 2])
    for wrong in (half, tmp_path / "none.tar.gz", place.first.path):
        with pytest.raises(InputError, match="damaged"):
            restore(wrong, tmp_path / "new")
    hostile = tmp_path / "hostile.tar.gz"
    with tarfile.open(hostile, "w:gz") as archive:
        entry = tarfile.TarInfo("../../owned")
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    with pytest.raises(InputError, match="not a backup"):
        restore(hostile, tmp_path / "new")
    changed = tmp_path / "changed.tar.gz"
    with tarfile.open(target) as read, tarfile.open(changed, "w:gz") as written:
        for entry in read:
            data = read.extractfile(entry).read()
            data = data.replace(b"hospital", b"hospitaI") if entry.name == "silo.toml" else data
            written.addfile(entry, io.BytesIO(data))
    with pytest.raises(InputError, match="the backup is damaged"):
        restore(changed, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_servers_runs_are_put_back(place: Place, tmp_path: Path) -> None:
    made: Deployment = read_deployment(tmp_path / "consortium")
    run = RunsHere(made).new(place.first, deadline=1.0, patience=1.0)
    back_up(read_kit(made.server), tmp_path / "s.tar.gz")
    before = run.status()
    shutil.rmtree(made.server)
    done = runner.invoke(app, ["deploy", "restore", str(tmp_path / "s.tar.gz"), str(made.server)])
    assert done.exit_code == 0, done.output
    assert run.status() == before
    assert run.study().silos.keys() == place.first.silos.keys()
    assert json.loads((made.server / "fedtmle" / "sites.json").read_text()) == dict(made.sites)
    assert (made.server / "fedtmle" / "dispatcher.key").is_file()

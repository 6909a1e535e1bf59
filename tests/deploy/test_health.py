"""The numbers of a party for monitoring, from its files: they add up, and name no study and no record."""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.request

import pytest
from typer.testing import CliRunner

from fedtmle.cli import app
from fedtmle.cli.base import Exit
from fedtmle.deploy.demo import free_port
from fedtmle.deploy.doctor import HELP, exposition, is_well, samples, serve, set_port
from fedtmle.deploy.kits import Kit, Role, read_kit
from fedtmle.deploy.provision import provision
from fedtmle.engine.coordinate import Coordination
from fedtmle.engine.post import Desk, Notice, studies_folder
from fedtmle.engine.runs import Move, RunFolder, RunStatus, Terms, sites
from fedtmle.runtime import ledger
from fedtmle.studyfile.file import StudyFile, file_plan
from fedtmle_core.journal import write_document
from tests.engine.lines import approve, line, study_of
from tests.homes import home_at

runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyFile:
    """A study that three silos and a server have run, without an engine."""
    folder = tmp_path_factory.mktemp("health")
    made = study_of(folder)
    approve(made)
    terms = Terms(plan=file_plan(made).digest.hex(), sites=sites(made.silos), deadline=5.0, patience=60.0)
    run = RunFolder.new(folder / "runs", made, terms)
    run.move(Move.START)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.fsync", lambda _: None)
        ends = line(folder, made)
        Coordination(folder / "runs", run.name).carry_out(lambda *_: ends)
    for end in ends.endpoints.values():
        end.close()
    return made


@pytest.fixture(scope="module")
def kit(study: StudyFile, tmp_path_factory: pytest.TempPathFactory) -> Kit:
    made = provision(tmp_path_factory.mktemp("kits") / "c", silos=list(study.silos), host="localhost", port=1)
    found = read_kit(made.kit("hospital 1"), Role.SILO)
    write_document(found.home / "silo.json", {"silo_file": str(study.silos["hospital 1"])})
    return found


def numbers(kit: Kit) -> dict[str, float]:
    """What Prometheus would read."""
    found = {}
    for text in exposition(samples(kit)).splitlines():
        if not text.startswith("#"):
            name, value = text.rsplit(" ", 1)
            found[name.removeprefix("fedtmle_")] = float(value)
    return found


def test_a_silos_numbers_are_those_of_its_ledger(study: StudyFile, kit: Kit) -> None:
    home = home_at(study.silos["hospital 1"])
    (account,) = ledger.studies(ledger.read(home.ledger_path))
    decided = [entry["decision"] for entry in ledger.read(home.ledger_path)]
    found = numbers(kit)
    assert found["answered_bits_total"] == account.bits > 0
    assert found['requests_total{decision="answered"}'] == decided.count("answered") > 5
    assert found['requests_total{decision="refused"}'] == decided.count("refused")
    assert found["ledger_intact"] == 1
    assert found['record_bytes{kind="ledger"}'] == home.ledger_path.stat().st_size
    assert found['record_bytes{kind="journals"}'] == home.journal_path(file_plan(study)).stat().st_size
    assert found['studies{decision="approved"}'] == 1
    assert found['studies{decision="waiting"}'] == 0
    assert found["disk_free_bytes"] > 0
    assert found["connected"] == 0


def test_the_server_is_heard_and_a_study_waits(study: StudyFile, kit: Kit) -> None:
    path = studies_folder(home_at(study.silos["hospital 1"]).folder) / f"{'cd' * 32}.toml"
    path.write_text("x = 1")
    try:
        Desk(kit.home, version="1").take(Notice(time=0.0, version="1", open=[]))
        found = numbers(kit)
    finally:
        path.unlink()
    assert found["connected"] == 1
    assert found['studies{decision="waiting"}'] == 1


def test_a_servers_numbers_are_those_of_its_runs(study: StudyFile, kit: Kit) -> None:
    server = read_kit(kit.path.parent.parent / "server", Role.SERVER)
    os.symlink(study.path.parent.parent / "runs", server.path / "runs")
    (run,) = RunFolder.every(server.path / "runs")
    found = numbers(server)
    assert found['runs{state="done"}'] == 1
    assert found['runs{state="waiting"}'] == 0
    assert found["rounds_total"] == run.status().round > 3
    assert found["bits_total"] == run.status().bits > 0
    assert found['record_bytes{kind="journals"}'] == run.journal.stat().st_size
    assert found["connected_silos"] == 0
    assert run.status() != RunStatus()


def test_a_broken_ledger_is_one_number_and_no_exception(study: StudyFile, kit: Kit) -> None:
    path = home_at(study.silos["hospital 1"]).ledger_path
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"round":3', b'"round":4', 1) + b"\n")
    try:
        assert numbers(kit)["ledger_intact"] == 0
    finally:
        path.write_bytes(whole)
    assert numbers(kit)["ledger_intact"] == 1


def test_the_end_of_certificates_is_a_number(kit: Kit) -> None:
    from cryptography import x509

    end = x509.load_pem_x509_certificate(kit.certificate.read_bytes()).not_valid_after_utc.timestamp()
    found = numbers(kit)
    assert found['certificate_expiry_seconds{of="party"}'] == end
    assert found['certificate_expiry_seconds{of="authority"}'] > end


def test_no_number_names_a_study_or_a_column(study: StudyFile, kit: Kit) -> None:
    text = exposition(samples(kit))
    plan = file_plan(study).digest.hex()
    for word in (plan, plan[:16], "treat", "iqsb", "infants", "study.toml"):
        assert word not in text
    for name in re.findall(r"^fedtmle_(\w+)", text, flags=re.MULTILINE):
        assert name in HELP
    assert len(re.findall("^# TYPE", text, flags=re.MULTILINE)) == len(
        set(re.findall(r"^fedtmle_(\w+)", text, re.M))
    )


def test_the_port_is_on_loopback_and_says_503_while_nothing_runs(kit: Kit) -> None:
    assert serve(kit) is None  # nobody asked for it
    port = free_port()
    set_port(kit, port)
    server = serve(kit)
    assert server is not None
    try:
        assert server.server_address[0] == "127.0.0.1"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert b'fedtmle_up{role="silo",party="hospital-1"} 0' in answer.read()
        with pytest.raises(urllib.error.HTTPError) as down:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
        assert down.value.code == 503
        assert json.loads(down.value.read()) == {"well": False}
        with pytest.raises(urllib.error.HTTPError) as absent:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/other")
        assert absent.value.code == 404
        down.value.close()
        absent.value.close()
    finally:
        server.shutdown()
        server.server_close()
    set_port(kit, 0)
    assert serve(kit) is None


def test_the_command_for_a_containers_health_check(kit: Kit) -> None:
    done = runner.invoke(app, ["deploy", "health", str(kit.path)])
    assert done.exit_code == Exit.NOT_CONVERGED
    assert done.output == "not running\n"
    done = runner.invoke(app, ["deploy", "health", str(kit.path), "--metrics"])
    assert "# TYPE fedtmle_up gauge" in done.output
    assert not is_well(samples(kit))

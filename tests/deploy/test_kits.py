"""Kits, the engine's policy in them, the doctor and the commands: without starting an engine."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
import tomllib
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from typer.testing import CliRunner, Result

import fedtmle as ft
from fedtmle.cli import app
from fedtmle.cli.base import Exit
from fedtmle.demo import IHDP
from fedtmle.deploy.demo import RARE, Comparison, write_example
from fedtmle.deploy.doctor import examine
from fedtmle.deploy.kits import Deployment, Kit, Role, place_storage, read_deployment, read_kit
from fedtmle.deploy.launch import RunsHere
from fedtmle.deploy.processes import engine_environment
from fedtmle.deploy.provision import provision
from fedtmle.engine.runs import RunFolder, RunState, RunStatus
from fedtmle.errors import InputError
from fedtmle.studyfile.file import read_study
from fedtmle_core.journal import write_document
from tests.homes import home_at

runner = CliRunner(env={"COLUMNS": "80", "NO_COLOR": "1"})


def call(*words: object) -> Result:
    return runner.invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    folder = tmp_path_factory.mktemp("kits") / "consortium"
    return provision(folder, silos=["hospital 1", "hospital 2"], host="localhost", port=1)


@pytest.fixture
def made(original: Deployment, tmp_path: Path) -> Deployment:
    shutil.copytree(original.path, tmp_path / "consortium")
    return read_deployment(tmp_path / "consortium")


@pytest.fixture
def kit(made: Deployment, tmp_path: Path) -> Kit:
    """Hospital 1's kit, told of its silo file."""
    study = read_study(write_example(tmp_path / "hospitals", 2))
    found = read_kit(made.kit("hospital 1"), Role.SILO)
    (found.home / "silo.json").write_text(json.dumps({"silo_file": str(study.silos["hospital 1"])}))
    return found


def test_the_command_makes_kits_and_says_what_comes_next(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    done = call("deploy", "init", folder, "--silo", "North", "--silo", "South Bay", "--host", "h.example.org")
    assert done.exit_code == Exit.FINE, done.output
    assert "fedtmle server start" in done.output
    made = read_deployment(folder)
    assert made.sites == {"North": "north", "South Bay": "south-bay"}
    assert (made.kit("South Bay") / "startup" / "client.key").is_file()
    again = call("deploy", "init", folder, "--silo", "North", "--host", "h.example.org", "--json")
    assert again.exit_code == Exit.DEFECTS
    assert "not empty" in json.loads(again.stdout)["defects"][0]["message"]


@pytest.mark.parametrize(
    ("silos", "host", "port", "match"),
    [
        ([], "h", 1, "at least one"),
        (["a", "a"], "h", 1, "a name of its own"),
        (["a b", "a-b"], "h", 1, "is taken"),
        (["a"], "no host", 1, "not a host name"),
        (["a"], "h", 70000, "1 to 65535"),
    ],
)
def test_what_cannot_be_deployed(tmp_path: Path, silos: list[str], host: str, port: int, match: str) -> None:
    with pytest.raises(InputError, match=match):
        provision(tmp_path / "c", silos=silos, host=host, port=port)


def test_a_silos_kit_forbids_code_logs_and_shells(made: Deployment) -> None:
    local = made.kit("hospital 1") / "local"
    resources = json.loads((local / "resources.json").read_text())
    assert resources["class_allow_list"] == [
        "nvflare.collab.runtime.executor.CollabExecutor",
        "fedtmle.engine.flare_silo.SiloEnd",
    ]
    assert resources["class_list_enforcement_mode"] == "enforce"
    assert resources["allow_log_streaming"] is False
    default = json.loads((local / "resources.json.default").read_text())
    assert any(part["id"] == "site_log_streamer" for part in default["components"])  # it is FLARE's habit
    assert all(part["id"] != "site_log_streamer" for part in resources["components"])
    rights = json.loads((local / "authorization.json").read_text())["permissions"]
    assert list(rights) == ["lead"]  # no other role may do anything
    assert {rights["lead"][right] for right in ("byoc", "shell_commands", "operate", "download_job")} == {
        "none"
    }


def test_connections_are_pinged_and_names_are_found_as_the_machine_finds_them(made: Deployment) -> None:
    from nvflare.fuel.utils.config_factory import ConfigFactory

    for party in (made.server, made.kit("hospital 1")):
        read = ConfigFactory.load_config("comm_config.json", [str(party)])  # as the engine does
        options = dict(read.to_dict()["grpc"]["options"])
        assert options["grpc.keepalive_time_ms"] == 20_000
        assert options["grpc.keepalive_timeout_ms"] == 10_000
        # A server closes the connection of a client that pings more often than it allows.
        assert options["grpc.http2.min_recv_ping_interval_without_data_ms"] <= 20_000
        assert options["grpc.max_receive_message_length"] > 1 << 30
    assert engine_environment()["GRPC_DNS_RESOLVER"] == "native"


def test_a_kit_is_private_and_tells_no_path(made: Deployment, kit: Kit) -> None:
    assert made.server.stat().st_mode & 0o077 == 0
    assert kit.path.stat().st_mode & 0o077 == 0
    # FLARE tells the server every other top-level key of a silo's resources.
    resources = json.loads((kit.path / "local" / "resources.json").read_text())
    told = {"format_version", "class_list_enforcement_mode", "class_allow_list", "allow_log_streaming"}
    assert set(resources) == {*told, "client", "components"}


def test_the_server_keeps_its_storage_to_itself(made: Deployment) -> None:
    place_storage(read_kit(made.server, Role.SERVER))
    text = (made.server / "local" / "resources.json").read_text()
    assert "/tmp/nvflare" not in text  # noqa: S108 - FLARE's default
    assert text.count(str(made.server / "storage")) == 2


def test_the_server_listens_on_loopback_alone_where_it_is_asked_to(made: Deployment) -> None:
    (server,) = json.loads((made.server / "startup" / "fed_server.json").read_text())["servers"]
    assert server["service"]["target"] == "localhost:1"


def test_a_folder_that_is_no_kit(tmp_path: Path, made: Deployment) -> None:
    with pytest.raises(InputError, match="not a start-up kit"):
        read_kit(tmp_path)
    with pytest.raises(InputError, match="not a deployment"):
        read_deployment(tmp_path)
    with pytest.raises(InputError, match="kit of a server, not of a silo"):
        read_kit(made.server, Role.SILO)


# The doctor.


def found(kit: Kit, what: str) -> tuple[bool, str]:
    (finding,) = [finding for finding in examine(kit) if finding.item == what]
    return finding.ok, f"{finding.detail} {finding.fix}"


def test_the_doctor_finds_a_healthy_kit_whose_server_is_down(kit: Kit) -> None:
    wrong = [finding.item for finding in examine(kit) if not finding.ok]
    assert wrong == ["engine", "server"]
    assert f"fedtmle silo start {kit.path}" in found(kit, "engine")[1]
    assert "TCP port 1" in found(kit, "server")[1]
    done = call("deploy", "doctor", kit.path)
    assert done.exit_code == Exit.DEFECTS
    assert "NO  server" in done.output


def _expire(kit: Kit, days: int) -> None:
    """The same certificate, signed again by a new authority, with other dates."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    for path in (kit.authority, kit.certificate):
        old = x509.load_pem_x509_certificate(path.read_bytes())
        builder = x509.CertificateBuilder(
            issuer_name=old.issuer,
            subject_name=old.subject,
            public_key=key.public_key() if path == kit.authority else old.public_key(),
            serial_number=old.serial_number,
            not_valid_before=now + timedelta(days=min(days - 400, 0) if days < 400 else 1),
            not_valid_after=now + timedelta(days=days),
        )
        signed = builder.sign(key, hashes.SHA256())
        path.write_bytes(signed.public_bytes(serialization.Encoding.PEM))


def _remove(name: str) -> Callable[[Kit], None]:
    return lambda kit: (kit.path / name).unlink()


def _change(name: str, old: str, new: str) -> Callable[[Kit], None]:
    def change(kit: Kit) -> None:
        path = kit.path / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return change


def _silo_file(kit: Kit) -> Path:
    return Path(json.loads((kit.home / "silo.json").read_text())["silo_file"])


def _rename(kit: Kit) -> None:
    path = _silo_file(kit)
    path.write_text(path.read_text().replace("hospital 1", "hospital 7"))


def _lose_data(kit: Kit) -> None:
    (_silo_file(kit).parent / "infants.csv").unlink()


def _damage(name: str) -> Callable[[Kit], None]:
    def damage(kit: Kit) -> None:
        (home_at(_silo_file(kit)).folder / name).write_text("no record of ours\n")

    return damage


def _mix(kit: Kit) -> None:
    shutil.copy(kit.path.parent / "hospital-2" / "startup" / "client.crt", kit.authority)


@pytest.mark.parametrize(
    ("harm", "what", "says"),
    [
        (_remove("startup/client.key"), "private key", "ask the coordinator"),
        (_remove("startup/client.crt"), "certificate", "ask the coordinator"),
        (_mix, "certificate", "not signed by the kit's authority"),
        (lambda kit: _expire(kit, -1), "certificate", "expired"),
        (lambda kit: _expire(kit, 500), "certificate", "set this machine's clock"),
        (_remove("local/resources.json"), "engine's policy", "other classes"),
        (_change("local/resources.json", '"enforce"', '"warn"'), "engine's policy", "not enforced"),
        (
            _change("local/resources.json", '"allow_log_streaming": false', '"allow_log_streaming": true'),
            "engine's policy",
            "logs may be streamed",
        ),
        (_change("local/authorization.json", '"byoc": "none"', '"byoc": "any"'), "engine's policy", "rights"),
        (_remove("fedtmle/silo.json"), "silo file", "--silo-file"),
        (_rename, "silo file", "hospital 7"),
        (_lose_data, "data source", "infants.csv"),
        (_remove("local/comm_config.json"), "engine's policy", "may be open to others"),
        (_change("local/resources.json", "SiloPost", "Other"), "engine's policy", "the post is missing"),
        (_damage("ledger.jsonl"), "ledger", "restore the file"),
        (_damage("approvals.jsonl"), "approvals", "no plan is approved until then"),
        (_damage("0123456789abcdef.journal"), "journal", "this is not a journal"),
        (
            lambda kit: (kit.home / "server.json").write_text('{"ahead": -90}'),
            "clock",
            "90 s behind the server's",
        ),
    ],
)
def test_the_doctor_says_what_is_wrong(kit: Kit, harm: Callable[[Kit], None], what: str, says: str) -> None:
    harm(kit)
    fine, told = found(kit, what)
    assert not fine
    assert says in told


def test_the_doctor_warns_before_a_certificate_ends(kit: Kit) -> None:
    _expire(kit, 10)
    fine, told = found(kit, "certificate")
    assert fine
    assert "days left" in told


def test_the_doctor_looks_at_the_disk_of_the_journals(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not be the kit's: here it is full, and the kit's is not."""
    own = home_at(_silo_file(kit)).folder
    statvfs = os.statvfs

    def full(path: Path) -> object:
        disk = statvfs(path)
        return SimpleNamespace(f_bavail=0 if path == own else disk.f_bavail, f_frsize=disk.f_frsize)

    monkeypatch.setattr("fedtmle.deploy.doctor.os.statvfs", full)
    assert found(kit, "disk")[0]
    fine, told = found(kit, "disk of journals and ledger")
    assert not fine
    assert "make room" in told
    assert str(own) in told


def test_the_doctor_says_since_when_the_engine_is_connected(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedtmle.deploy.doctor.running", lambda _: psutil.Process())
    monkeypatch.setattr("fedtmle.deploy.doctor.CONNECTING", 0.0)
    assert "the server has not been heard yet" in found(kit, "engine")[1]
    contact = {"heard": time.time(), "since": 1e9, "version": metadata.version("fedtmle"), "open": []}
    (kit.home / "server.json").write_text(json.dumps(contact))
    fine, told = found(kit, "engine")
    assert fine
    assert "connected since 2001-09-09 01:46 UTC" in told
    (kit.home / "server.json").write_text(json.dumps({**contact, "version": "0.0.1"}))
    fine, told = found(kit, "engine")
    assert not fine
    assert "the server has 0.0.1" in told
    (kit.home / "server.json").write_text(json.dumps({**contact, "heard": time.time() - 100}))
    assert not found(kit, "engine")[0]


def test_the_doctor_waits_for_a_silo_that_was_started_just_now(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`silo start` and `deploy doctor` follow each other in the documentation."""
    contact = {"heard": time.time(), "since": 1e9, "version": metadata.version("fedtmle"), "open": []}
    started = time.time() - 1.0
    young = SimpleNamespace(create_time=lambda: started)
    monkeypatch.setattr("fedtmle.deploy.doctor.running", lambda _: young)
    (kit.home / "server.json").write_text(json.dumps({**contact, "heard": 1.0}))  # of an earlier start
    heard = threading.Timer(0.3, lambda: write_document(kit.home / "server.json", contact))
    heard.start()
    assert found(kit, "engine")[0]
    heard.join()


def test_the_doctor_notices_a_slow_name(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedtmle.deploy.doctor.SLOW_NAME", -1.0)
    fine, told = found(kit, "name resolution")
    assert not fine
    assert "/etc/hosts" in told


def test_the_doctor_notices_an_open_kit(kit: Kit) -> None:
    kit.path.chmod(0o755)
    kit.key.chmod(0o644)
    assert not found(kit, "private key")[0]


# Parties and runs that cannot start.


def test_a_silo_starts_only_with_its_own_file(made: Deployment, kit: Kit) -> None:
    other = made.kit("hospital 2")
    first = call("silo", "start", other)
    assert first.exit_code == Exit.DEFECTS
    assert "--silo-file" in first.stderr
    wrong = call("silo", "start", other, "--silo-file", _silo_file(kit))
    assert wrong.exit_code == Exit.DEFECTS
    assert "kit is that of 'hospital 2'" in wrong.stderr


def test_what_is_not_running_can_be_stopped_and_looked_at(made: Deployment, kit: Kit) -> None:
    assert call("silo", "stop", kit.path).output == "It was not running.\n"
    status = call("silo", "status", kit.path)
    assert status.output == "silo 'hospital 1': not running\n"
    assert status.exit_code == Exit.NOT_CONVERGED
    assert not json.loads(call("server", "status", made.server, "--json").output)["running"]


def test_a_run_without_a_server_says_so(made: Deployment, kit: Kit) -> None:
    study = _silo_file(kit).parent.parent / "study.toml"
    done = call("run", study, "--on", made.path, "--quiet")
    assert done.exit_code == Exit.NOT_CONVERGED
    assert "fedtmle server start" in done.stderr


def test_a_defect_of_a_study_for_a_deployment_is_reported_without_the_silos_files(
    made: Deployment, tmp_path: Path
) -> None:
    """They are at the hospitals."""
    study = tmp_path / "study.toml"
    study.write_text('nonsense = 1\n\n[silos]\n"hospital 1" = "gone.toml"\n')
    done = call("run", study, "--on", made.path)
    assert done.exit_code == 1
    assert "nonsense" in done.output
    assert "gone.toml" not in done.output


def test_a_study_with_a_silo_that_has_no_kit(made: Deployment, tmp_path: Path) -> None:
    study = read_study(write_example(tmp_path / "three", 3))
    with pytest.raises(InputError, match="has no silo 'hospital 3'"):
        RunsHere(made).new(study, deadline=1.0, patience=1.0)


def test_a_plan_is_run_once(made: Deployment, tmp_path: Path) -> None:
    study = read_study(write_example(tmp_path / "two", 2))
    run = RunsHere(made).new(study, deadline=1.0, patience=1.0)
    with pytest.raises(InputError, match="fedtmle resume"):
        RunsHere(made).new(study, deadline=1.0, patience=1.0)
    run.write(RunStatus(state=RunState.DONE))
    with pytest.raises(InputError, match="run already"):
        RunsHere(made).new(study, deadline=1.0, patience=1.0)
    assert "this run is done" in call("resume", run.path).stderr


def test_a_cancelled_run_is_told_to_scripts_and_not_cancelled_twice(made: Deployment, tmp_path: Path) -> None:
    run = RunsHere(made).new(read_study(write_example(tmp_path / "two", 2)), deadline=1.0, patience=1.0)
    done = call("cancel", run.path, "--json")
    assert json.loads(done.output) == {"run": str(run.path), "state": "cancelled"}
    assert run.status().state is RunState.CANCELLED
    again = call("cancel", run.path)
    assert again.exit_code == Exit.DEFECTS
    assert "this run is cancelled already" in again.output


def test_a_study_that_pools_rows_cannot_be_deployed(made: Deployment, tmp_path: Path) -> None:
    study = read_study(write_example(tmp_path / "two", 2, algorithm='kind = "Central"'))
    with pytest.raises(InputError, match="pools the rows"):
        RunsHere(made).new(study, deadline=1.0, patience=1.0)


def test_a_status_is_read_whole_or_not_at_all(made: Deployment, tmp_path: Path) -> None:
    study = read_study(write_example(tmp_path / "two", 2))
    run = RunsHere(made).new(study, deadline=1.0, patience=1.0)
    status = RunStatus(
        state=RunState.STOPPED, why="x", silos={"hospital 1": "ready"}, round=3, seconds=(0.5,)
    )
    run.write(status)
    assert RunFolder(run.path).status() == status
    assert [path.name for path in run.path.glob("*.new")] == []
    assert os.path.basename(run.path).startswith("study-")


def test_resume_of_what_is_no_run_names_what_was_given(original: Deployment) -> None:
    found = call("resume", "nope")
    assert found.exit_code == Exit.DEFECTS
    assert found.output.startswith("nope: not a run's folder; expected")
    absent = call("resume", original.runs / "nope")
    assert f"there is no run 'nope' in {original.runs}" in absent.output


@pytest.mark.parametrize(("hospitals", "left_out"), [(8, set()), (3, set(RARE))])
def test_the_demonstration_says_what_its_study_leaves_out(
    hospitals: int, left_out: set[str], tmp_path: Path
) -> None:
    """Under masks all eight hospitals have the study of `fedtmle demo`; fewer leave out rare covariates."""
    written = tomllib.loads(write_example(tmp_path / "written", hospitals, keys=True).read_text())["models"]
    for role, model in (("outcome", IHDP.outcome_model), ("missingness", IHDP.missingness_model)):
        assert isinstance(model, ft.GLM)
        more = set(model.formula.split(" + ")) - set(written[role]["formula"].split(" + "))
        assert more == left_out
    compared = Comparison(
        estimates=[{"estimate": 9.7, "conf_low": 7.0, "conf_high": 12.0}],
        n=8,
        silos=hospitals,
        same_result=True,
        same_transcript=True,
        transcript_bytes=8,
        rounds=8,
        median_round_ms=8.0,
        study_seconds=8.0,
        start_up_seconds=1.0,
        stop_seconds=1.0,
    )
    said = str(compared)
    assert max(map(len, said.splitlines())) <= 80
    assert (f"the models leave out {', '.join(RARE)}" in " ".join(said.split())) == bool(left_out)


def test_the_doctor_of_a_server_that_is_down_says_how_to_start_it(made: Deployment) -> None:
    fine, says = found(read_kit(made.server), "server")
    assert not fine
    assert f"fedtmle server start {made.server}" in says


def test_the_doctor_given_a_whole_deployment_says_which_folder_to_give(made: Deployment) -> None:
    result = call("deploy", "doctor", made.path)
    assert result.exit_code == Exit.DEFECTS
    assert f"give one party's start-up kit in it, {made.server} or" in result.output

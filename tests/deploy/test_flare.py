"""A real provisioned server and three silos on loopback, with mutual TLS.

The server here is a rogue: its own policy lets anything pass, so that what is refused is refused by
the silos.
"""

from __future__ import annotations

import base64
import csv
import json
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

import fedtmle as ft
from fedtmle.deploy import kits
from fedtmle.deploy.demo import local_deployment, silo_kit, write_example
from fedtmle.deploy.doctor import examine
from fedtmle.deploy.kits import Deployment, Kit, read_kit
from fedtmle.deploy.launch import RunsHere, follow
from fedtmle.deploy.processes import descendants, running
from fedtmle.deploy.provision import provision
from fedtmle.engine import flare_server
from fedtmle.engine.runs import RunFolder, RunState, RunStatus
from fedtmle.runtime import ledger
from fedtmle.studyfile.file import StudyFile, read_study
from fedtmle_core.journal import Document
from tests.deploy.session import engine_session
from tests.deploy.tap import forms, sent, write_hook
from tests.engine.lines import approve
from tests.homes import home_at

CANARY = 27.319757  # an age at hospital 1, and nobody else's
WORD = "Qzx7Canary"  # a path at hospital 1


@dataclass(frozen=True)
class Rig:
    made: Deployment
    study: StudyFile
    tap: Path


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("flare")
    study = read_study(_with_canary(write_example(folder / "hospitals", 3)))
    ft.run(study.study, study.silos)  # compiles the kernels, for the silos too
    tap = folder / "tap"
    tap.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDTMLE_TAP", str(tap))
        patch.setenv("PYTHONPATH", str(write_hook(folder / "hook")), prepend=os.pathsep)
        patch.setattr("fedtmle.deploy.provision.write_policy", _rogue)
        with local_deployment(folder / "consortium", study, spare=("stranger",)) as made:
            yield Rig(made, study, tap)
    assert _left_behind(folder) == []


def _with_canary(study: Path) -> Path:
    """Hospital 1 keeps its records under a telling path, and one mother has a telling age."""
    own = study.parent / "hospital-1"
    with (own / "infants.csv").open() as file:
        rows = list(csv.reader(file))
    rows[1][rows[0].index("momage")] = repr(CANARY)
    (own / WORD).mkdir()
    with (own / WORD / "infants.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    (own / "infants.csv").unlink()
    silo = own / "silo.toml"
    silo.write_text(silo.read_text().replace("infants.csv", f"{WORD}/infants.csv"))
    return study


def _rogue(kit: Kit) -> None:
    kits.write_policy(kit)
    if kit.site == "server":
        local = kit.path / "local"
        rights = {"format_version": "1.0", "permissions": {kits.ADMIN_ROLE: "any"}}
        (local / "authorization.json").write_text(json.dumps(rights))
        resources = json.loads((local / "resources.json").read_text())
        (local / "resources.json").write_text(json.dumps({**resources, "class_allow_list": ["*"]}))


def _left_behind(folder: Path) -> list[int]:
    """Processes that still have the folder in their command line."""
    found = []
    for process in psutil.process_iter(["pid", "cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or ()):
            found.append(process.info["pid"])
    return found


def finish(rig: Rig, run: RunFolder) -> RunStatus:
    last = None
    until = time.monotonic() + 90
    for last in follow(RunsHere(rig.made), run):
        assert time.monotonic() < until, last
    assert last is not None
    return last


def job_of(rig: Rig, folder: Path, run: str) -> Path:
    """A job like ours, to be tampered with."""
    study = base64.b64encode(rig.study.path.read_bytes()).decode()
    job = folder / run
    (job / "silo" / "config").mkdir(parents=True)
    (job / "coordinator" / "config").mkdir(parents=True)
    sites = list(rig.made.sites.values())[:3]
    meta = {"name": run, "resource_spec": {}, "min_clients": 3, "mandatory_clients": sites}
    meta |= {"deploy_map": {"coordinator": ["server"], "silo": sites}}
    (job / "meta.json").write_text(json.dumps(meta))
    server, silo = flare_server.server_config(run), flare_server.silo_config({"study": study, "plan": "00"})
    (job / "coordinator" / "config" / "config_fed_server.json").write_text(json.dumps(server))
    (job / "silo" / "config" / "config_fed_client.json").write_text(json.dumps(silo))
    return job


def submitted(rig: Rig, job: Path) -> Document:
    """What the engine says of a job, once it has ended and what each site answered is written.

    The engine writes that a job failed to run first, and the sites' answers a moment later.
    """
    meta: Document = {}
    with engine_session(rig.made) as session:
        name = session.submit_job(str(job))
        until = time.monotonic() + 60
        while time.monotonic() < until:
            meta = dict(session.get_job_meta(name))
            if str(meta.get("status")).startswith("FINISHED") and "job_deploy_detail" in meta:
                return meta
            time.sleep(0.3)
    raise AssertionError(f"the job did not end: {meta}")


def test_a_run_waits_for_approvals_and_gives_the_bytes_of_one_process(rig: Rig, tmp_path: Path) -> None:
    approve(rig.study, "hospital 1", "hospital 2")
    run = RunsHere(rig.made).new(rig.study, deadline=60.0, patience=60.0)
    seen: list[dict[str, str]] = []

    def late() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            seen.append(dict(run.status().silos))
            if "waiting for its owner's approval" in seen[-1].values():
                approve(rig.study, "hospital 3")
                return
            time.sleep(0.1)

    owner = threading.Thread(target=late)
    owner.start()
    last = finish(rig, run)
    owner.join()
    assert last.state is RunState.DONE, last.why
    assert seen[-1]["hospital 3"] == "waiting for its owner's approval"
    here = ft.run(rig.study.study, rig.study.silos)
    assert here.run is not None
    here.run.transcript.save(tmp_path / "transcript")
    assert run.result.read_text() == here.to_json() + "\n"
    assert run.transcript.read_bytes() == (tmp_path / "transcript").read_bytes()
    told = [line["replied"] for line in ledger.read(home_at(rig.study.silos["hospital 1"]).ledger_path)]
    replies = [exchange.replies["hospital 1"] for exchange in here.run.transcript.exchanges]
    assert told == [ledger.text(reply) for reply in replies]  # the owner's own record of it


def test_data_that_do_not_fit_are_told_at_home_alone(rig: Rig) -> None:
    """The silo's own logs, FLARE's among them, say which file; the server hears that there is a reason."""
    other = rig.study.path.with_name("misfit.toml")
    other.write_text(rig.study.path.read_text().replace("momage", "grandmother"))
    study = read_study(other)
    approve(study)
    last = finish(rig, RunsHere(rig.made).new(study, deadline=60.0, patience=60.0))
    assert last.state is RunState.STOPPED
    assert "its data cannot be used for this study; its own log has the details" in last.why
    first = re.search(r"silo '(.+?)'", last.why)  # the run ends with the first that says so
    assert first
    kit = silo_kit(rig.made, first[1])
    assert "infants.csv" in (kit.home / "silo.log").read_text()
    assert any("infants.csv" in log.read_text() for log in kit.path.glob("*/error_log.txt"))


def test_no_record_path_or_log_leaves_a_silo(rig: Rig) -> None:
    """After the runs above: over all that every process of the deployment sent."""
    everything = sent(rig.tap)
    assert len(everything) >= 4  # the server, the silos and their jobs
    assert any(b"collab" in data for data in everything.values())  # the tap does hear the run
    for data in everything.values():
        for form in [*forms(CANARY), WORD.encode(), b"infants.csv", b"silo.toml"]:
            assert form not in data
    logs = [path for path in rig.made.server.rglob("*") if path.is_file() and "hospital" in path.name]
    assert logs == []  # FLARE's default would put the silos' error logs there


def test_code_that_a_job_brings_is_refused_by_the_silos(rig: Rig, tmp_path: Path) -> None:
    job = job_of(rig, tmp_path, "custom")
    mark = tmp_path / "was-here"
    (job / "silo" / "custom").mkdir()
    (job / "silo" / "custom" / "evil.py").write_text(f"open({str(mark)!r}, 'w').close()\nclass Silo: pass\n")
    config = job / "silo" / "config" / "config_fed_client.json"
    config.write_text(config.read_text().replace("fedtmle.engine.flare_silo.SiloEnd", "evil.Silo"))
    told = submitted(rig, job)
    refusals = [detail for detail in told["job_deploy_detail"] if "BYOC not permitted" in detail]
    assert len(refusals) == 3, told  # by each silo; the rogue server let it pass
    assert not mark.exists()


def test_a_class_that_is_not_on_the_list_is_not_built(rig: Rig, tmp_path: Path) -> None:
    job = job_of(rig, tmp_path, "unlisted")
    config = job / "silo" / "config" / "config_fed_client.json"
    document = json.loads(config.read_text())
    document["components"].append(
        {"id": "x", "path": "nvflare.app_common.np.np_trainer.NPTrainer", "args": {}}
    )
    config.write_text(json.dumps(document))
    assert submitted(rig, job)["status"] != "FINISHED:COMPLETED"
    for silo in rig.study.silos:
        logs = silo_kit(rig.made, silo).path.glob("*/error_log.txt")  # the silo's own
        assert any("ComponentNotAuthorized" in log.read_text() for log in logs)


def test_a_client_needs_a_certificate_of_the_consortium(rig: Rig, tmp_path: Path) -> None:
    other = provision(tmp_path / "other", silos=["hospital 1"], host="localhost", port=rig.made.port)
    own, foreign = silo_kit(rig.made, "hospital 1"), read_kit(other.kit("hospital 1"))
    assert _greeted(rig.made.port, own)
    assert not _greeted(rig.made.port, None)
    assert not _greeted(rig.made.port, foreign)
    findings = {finding.item: finding for finding in examine(foreign)}
    assert not findings["server"].ok
    assert all(finding.ok for finding in examine(own)), examine(own)


def test_no_other_account_of_the_machine_can_join_a_partys_own_connections(rig: Rig) -> None:
    """A party listens on loopback for its jobs; who has no certificate of the consortium is turned away."""
    for kit in (read_kit(rig.made.server), silo_kit(rig.made, "hospital 1")):
        supervisor = running(kit)
        assert supervisor is not None
        ports = [
            connection.laddr.port
            for process in descendants(supervisor)
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port != rig.made.port
        ]
        assert ports
        for port in ports:
            assert not _spoken_to(port, None)
            assert _spoken_to(port, kit)


def _spoken_to(port: int, kit: Kit | None) -> bool:
    """Whether the connection still stands after a handshake with the kit's certificate, or without one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if kit is not None:
        context.load_cert_chain(kit.certificate, kit.key)
    try:
        with (
            socket.create_connection(("localhost", port), timeout=2) as plain,
            context.wrap_socket(plain) as secure,
        ):
            return bool(secure.recv(1))
    except TimeoutError:
        return True  # the other side waits for a message
    except (OSError, ssl.SSLError):
        return False


def test_a_silo_with_a_kit_that_the_plan_does_not_name_gets_no_request(rig: Rig) -> None:
    study = read_study(rig.study.path)
    terms = new_run_terms(rig, study)
    assert "stranger" in rig.made.sites
    assert "stranger" not in terms["sites"]


def new_run_terms(rig: Rig, study: StudyFile) -> dict[str, Any]:
    (path,) = rig.made.runs.glob(f"{study.path.stem}-*/terms.json")
    document: dict[str, Any] = json.loads(path.read_text())
    return document


def _greeted(port: int, kit: Kit | None) -> bool:
    """Whether the server speaks to whoever holds the kit's certificate (or none)."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    if kit is not None:
        context.load_cert_chain(kit.certificate, kit.key)
    try:
        with (
            socket.create_connection(("localhost", port), timeout=5) as plain,
            context.wrap_socket(plain) as secure,
        ):
            secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
            return bool(secure.recv(1))
    except (OSError, ssl.SSLError):
        return False

"""Certificates and members change while a federation runs: nobody else has to do anything."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from fedtmle.deploy import processes
from fedtmle.deploy.demo import await_silos, silo_kit
from fedtmle.deploy.doctor import examine
from fedtmle.deploy.kits import Kit, read_deployment, read_kit
from fedtmle.deploy.launch import RunsHere, presence
from fedtmle.deploy.parties import start_server, start_silo
from fedtmle.deploy.provision import add_silo, authority_of, install, remove_silo, renew_server, request, sign
from fedtmle.engine.runs import RunState
from fedtmle.errors import ProtocolError
from fedtmle.studyfile.file import file_plan, read_study
from tests.deploy.rig import Rig, same
from tests.engine.lines import approve
from tests.homes import home_at

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
H2 = "hospital 2"


def is_connected(rig: Rig, site: str) -> bool:
    seen = presence(rig.made.server)
    return seen is not None and site in seen.sites


def expire(rig: Rig, kit: Kit) -> None:
    """Replace a silo's certificate by one that ends now."""
    from cryptography import x509

    old = x509.load_pem_x509_certificate(kit.certificate.read_bytes())
    kit.certificate.write_bytes(authority_of(rig.made).reissue(kit.site, old, old.public_key(), 0))
    time.sleep(2)


def renew(rig: Rig, kit: Kit) -> None:
    """Give a silo a new key and certificate, and start it again."""
    _, certificate = sign(rig.made, request(kit), days=100)
    install(kit, certificate)
    processes.stop(kit)
    start_silo(kit, None)


def test_a_certificate_is_renewed_under_a_run(rig: Rig, tmp_path: Path) -> None:
    """The silo is started again with its new key in the middle of a run, which goes on by itself."""
    study = rig.plan(1)
    kit = silo_kit(rig.made, H2)
    run = rig.start(study, deadline=60.0)
    rig.at_round(run, "hospital-1", seconds=3.0)
    before = kit.key.read_bytes()
    renew(rig, kit)
    assert kit.key.read_bytes() != before
    took = rig.finish(run, within=120)
    same(study, run, tmp_path)
    rig.note("a silo's key and certificate renewed, and the silo restarted, in a run", run, took)


def test_the_servers_certificate_is_renewed_under_a_run(rig: Rig, tmp_path: Path) -> None:
    study = rig.plan(2)
    run = rig.start(study, deadline=60.0)
    rig.at_round(run, "hospital-1", seconds=3.0)
    renew_server(rig.made, days=200)
    kit = read_kit(rig.made.server)
    processes.stop(kit)
    start_server(kit)
    took = rig.finish(run, within=120)
    same(study, run, tmp_path)
    rig.note("the server's certificate renewed, and the server restarted, in a run", run, took)


def test_an_expired_certificate_is_told_and_a_renewed_one_connects(rig: Rig, tmp_path: Path) -> None:
    kit = silo_kit(rig.made, H2)
    processes.stop(kit)
    expire(rig, kit)
    start_silo(kit, None)
    study = rig.plan(3)
    run = rig.start(study)
    time.sleep(30)
    assert not is_connected(rig, kit.site)
    assert run.status().silos[H2] == "not connected"
    findings = [finding for finding in examine(kit) if not finding.ok]
    assert any("certificate" in finding.item and "renew" in finding.fix for finding in findings), findings
    renew(rig, kit)
    took = rig.finish(run, within=120)
    same(study, run, tmp_path)
    rig.note("a silo's certificate expired, then renewed", run, took)


def test_a_silo_is_added_and_removed_under_a_run(rig: Rig, tmp_path: Path) -> None:
    """The fourth connects while a run of three goes on; removed, it is refused at once and for good."""
    study = rig.plan(4)
    run = rig.start(study, deadline=60.0)
    rig.at_round(run, "hospital-1", seconds=3.0)
    made = add_silo(read_deployment(rig.made.path), "east")
    own = tmp_path / "silo.toml"
    table = study.silos[H2].with_name("infants.csv")
    own.write_text(f'[silo]\nname = "east"\n\n[data]\npath = "{table}"\n')
    kit = silo_kit(made, "east")
    start_silo(kit, own)
    try:
        await_silos(made, ["east"], seconds=120)
        rig.finish(run, within=120)
        same(study, run, tmp_path)
        text = study.path.read_text().replace("seed = 4", "seed = 5")
        needs = study.path.with_name("study-east.toml")
        needs.write_text(text.replace("[silos]\n", f'[silos]\neast = "{own}"\n'))
        later = read_study(needs)
        approve(later, *(silo for silo in later.silos if silo != "east"))
        waits = RunsHere(made).new(later, deadline=20.0, patience=600.0)
        rig.watch(waits)
        assert processes.wait_until(lambda: "approval" in str(waits.status().silos.get("east")), 60)
        began = time.monotonic()
        remove_silo(made, "east")
        assert processes.wait_until(lambda: not is_connected(rig, "east"), 10)
        refused = time.monotonic() - began
        assert processes.wait_until(lambda: waits.status().state is RunState.STOPPED, 10)
        assert "silo 'east' was removed from the deployment" in waits.status().why
        home_at(own).approvals.decide(file_plan(later).digest, approved=True)
        processes.stop(kit)
        start_silo(kit, None)  # nor does it get in again
        with pytest.raises(ProtocolError, match="not connected"):
            await_silos(replace(made, sites={"east": "east"}), ["east"], seconds=40)
        rig.note("a silo removed", waits, refused)
    finally:
        processes.stop(kit)
    study = rig.plan(6)
    run = rig.start(study)
    rig.finish(run, within=120)  # the others are as before
    same(study, run, tmp_path)

"""A party whose clock is wrong: `deploy doctor` says so, and the run goes on once the clock is right."""

from __future__ import annotations

import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509

from fedtmle.deploy import processes, provision
from fedtmle.deploy.demo import await_silos, silo_kit
from fedtmle.deploy.doctor import examine
from fedtmle.deploy.kits import Kit, read_kit
from fedtmle.deploy.launch import presence
from fedtmle.deploy.parties import start_server, start_silo
from tests.deploy import faults
from tests.deploy.clock import DAY, WrongClock, needs_compiler
from tests.deploy.rig import Rig, same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
H2 = "hospital 2"
WITHIN = 60.0  # seconds from the moment at which clocks and certificates agree to the connection
EITHER = pytest.mark.parametrize("ahead", [-3 * DAY, 4000 * DAY], ids=["too early", "too late"])


def restart(kit: Kit) -> None:
    processes.stop(kit)
    start_silo(kit, None)


@pytest.fixture
def clock(tmp_path: Path) -> WrongClock:
    return WrongClock(tmp_path)


def is_connected(rig: Rig, kit: Kit) -> bool:
    seen = presence(rig.made.server)
    return seen is not None and kit.site in seen.sites


def connects(rig: Rig, kit: Kit) -> float:
    """Wait for a silo to connect without a command; return the seconds that it took."""
    began = time.monotonic()
    assert not is_connected(rig, kit)
    assert processes.wait_until(lambda: is_connected(rig, kit), WITHIN), log_of(kit)
    return time.monotonic() - began


def log_of(kit: Kit) -> str:
    return (kit.home / "engine.log").read_text()


def valid_later(rig: Rig, kit: Kit, seconds: float, patch: pytest.MonkeyPatch) -> None:
    """Replace a silo's certificate by one that begins in so many seconds."""
    old = x509.load_pem_x509_certificate(kit.certificate.read_bytes())
    with patch.context() as inner:
        inner.setattr(provision, "BACKDATED", -timedelta(seconds=seconds))
        new = provision.authority_of(rig.made).reissue(kit.site, old, old.public_key(), 100)
    kit.certificate.write_bytes(new)


@needs_compiler
@EITHER
def test_a_silo_that_starts_with_a_wrong_clock_connects_once_it_is_right(
    rig: Rig, tmp_path: Path, clock: WrongClock, ahead: int
) -> None:
    """Before its certificate begins, or after it ended; nobody gives a command."""
    study = rig.plan(3 if ahead < 0 else 4)
    kit = silo_kit(rig.made, H2)
    with clock.given(ahead):
        restart(kit)
    run = rig.start(study)
    time.sleep(30)
    assert not is_connected(rig, kit)
    clock.set(0)
    took = connects(rig, kit) + rig.finish(run, within=WITHIN)
    same(study, run, tmp_path)
    assert "than this machine's clock says; the engine is started" in log_of(kit)
    words = "before its certificate begins" if ahead < 0 else "after its certificate ended"
    rig.note(f"a silo's clock {words}, then set", run, took)
    restart(kit)
    await_silos(rig.made, list(study.silos))


def test_a_silo_that_starts_before_its_certificate_is_valid_connects_when_it_is(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = silo_kit(rig.made, H2)
    processes.stop(kit)
    valid_later(rig, kit, 30, monkeypatch)
    began = time.monotonic()
    start_silo(kit, None)
    time.sleep(max(0.0, began + 30 - time.monotonic()))
    connects(rig, kit)


@needs_compiler
def test_a_silo_whose_certificate_is_not_valid_at_the_server_yet_connects_when_it_is(
    rig: Rig, clock: WrongClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The silo's clock is ahead, so that only the server refuses the certificate."""
    kit = silo_kit(rig.made, H2)
    processes.stop(kit)
    valid_later(rig, kit, 60, monkeypatch)
    began = time.monotonic()
    with clock.given(3600):
        start_silo(kit, None)
    time.sleep(max(0.0, began + 60 - time.monotonic()))
    connects(rig, kit)
    restart(kit)
    await_silos(rig.made, [H2])


@needs_compiler
@EITHER
def test_a_server_that_starts_with_a_wrong_clock_is_reached_once_it_is_right(
    rig: Rig, tmp_path: Path, clock: WrongClock, ahead: int
) -> None:
    study = rig.plan(5 if ahead < 0 else 6)
    server, kit = read_kit(rig.made.server), silo_kit(rig.made, H2)
    processes.stop(server)
    with clock.given(ahead):
        start_server(server)
    time.sleep(30)
    clock.set(0)
    connects(rig, kit)
    await_silos(rig.made, list(study.silos))
    processes.stop(server)
    start_server(server)
    await_silos(rig.made, list(study.silos))
    run = rig.start(study)
    rig.finish(run, within=120)
    same(study, run, tmp_path)


@needs_compiler
@pytest.mark.parametrize(
    ("ahead", "own"),
    [(4000 * DAY, "certificate: expired on"), (-3 * DAY, "certificate: valid from")],
)
def test_the_doctor_shows_the_clock_beside_the_certificates_dates(
    rig: Rig, clock: WrongClock, ahead: int, own: str
) -> None:
    kit = silo_kit(rig.made, H2)
    command = [sys.executable, "-m", "fedtmle", "deploy", "doctor", str(kit.path)]
    clock.set(ahead)
    done = subprocess.run(command, capture_output=True, text=True, env=clock.environment(), check=False)  # noqa: S603
    assert done.returncode == 1
    for words in (own, "this machine's clock says", "set th", "server: ", "its certificate is not valid at"):
        assert words in done.stdout, done.stdout


def test_a_clock_within_the_certificates_dates_changes_nothing(rig: Rig, tmp_path: Path) -> None:
    study = rig.plan(2)
    kit = silo_kit(rig.made, H2)
    faults.order(rig.faults, "hospital-2-clock", at=0, what="clock", seconds=7200.0)
    restart(kit)
    await_silos(rig.made, list(study.silos))
    run = rig.start(study)
    rig.finish(run, within=120)
    same(study, run, tmp_path)
    (finding,) = (finding for finding in examine(kit) if finding.item == "clock")
    assert not finding.ok
    assert "ahead of the server's" in finding.detail
    (rig.faults / "hospital-2-clock.json").unlink()
    restart(kit)
    await_silos(rig.made, list(study.silos))

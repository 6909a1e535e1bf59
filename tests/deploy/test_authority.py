"""Certificates: how long they are valid, who has which key, renewal, and silos that come and go."""

from __future__ import annotations

import json
import shutil
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from typer.testing import CliRunner, Result

from fedtmle.cli import app
from fedtmle.deploy.kits import Deployment, Kit, Role, read_deployment, read_kit
from fedtmle.deploy.provision import add_silo, authority_of, install, provision, remove_silo, request, sign
from fedtmle.deploy.validity import invalidity, invalidity_now
from fedtmle.engine.runs import revoked
from fedtmle.errors import InputError

DAYS = 900


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Deployment:
    folder = tmp_path_factory.mktemp("authority") / "consortium"
    return provision(folder, silos=["north", "south"], host="localhost", port=1, days=DAYS)


@pytest.fixture
def made(original: Deployment, tmp_path: Path) -> Deployment:
    shutil.copytree(original.path, tmp_path / "consortium")
    return read_deployment(tmp_path / "consortium")


@pytest.fixture
def kit(made: Deployment) -> Kit:
    return read_kit(made.kit("north"), Role.SILO)


def call(*words: object) -> Result:
    return CliRunner(env={"COLUMNS": "80"}).invoke(app, [str(word) for word in words])


def days_left(path: Path) -> int:
    end = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
    return (end - datetime.now(UTC)).days


def trusts(server: Kit, client: Kit) -> bool:
    """Whether the two can shake hands with mutual TLS, as the engine's parties do."""
    sides = []
    for purpose, party in ((ssl.PROTOCOL_TLS_SERVER, server), (ssl.PROTOCOL_TLS_CLIENT, client)):
        context = ssl.SSLContext(purpose)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(party.authority)
        context.load_cert_chain(party.certificate, party.key)
        sides.append(context)
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        sides[0].wrap_bio(up, down, server_side=True),
        sides[1].wrap_bio(down, up, server_side=False),
    ]
    done = [False, False]
    for _ in range(10):
        for k, end in enumerate(ends):
            try:
                end.do_handshake()
                done[k] = True
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return all(done)


def test_days_are_those_that_were_asked_for(made: Deployment) -> None:
    for path in (made.server, made.admin, made.kit("north")):
        kit = read_kit(path)
        assert days_left(kit.certificate) in (DAYS - 1, DAYS)
        assert days_left(kit.authority) > 3600
    assert days_left(made.server / "fedtmle" / "dispatcher.crt") in (DAYS - 1, DAYS)


def test_every_certificate_begins_before_it_is_made(made: Deployment) -> None:
    """A machine whose clock is some minutes behind can use it at once, and the authority's as well."""
    made_at = datetime.fromtimestamp((made.path / "deployment.json").stat().st_mtime, UTC)
    for path in (made.server, made.admin, made.kit("north")):
        for file in (read_kit(path).certificate, read_kit(path).authority):
            begin = x509.load_pem_x509_certificate(file.read_bytes()).not_valid_before_utc
            assert begin < made_at - timedelta(minutes=9), file


def test_invalid_certificates_are_told_apart_by_the_clock(kit: Kit) -> None:
    assert invalidity(kit, datetime.now(UTC)) == ""
    assert invalidity(kit, datetime.now(UTC) - timedelta(days=1)).startswith("the certificate begins on ")
    assert invalidity(kit, datetime.now(UTC) + timedelta(days=DAYS)).startswith("the certificate ended on ")
    kit.certificate.unlink()
    assert invalidity_now(kit) == f"{kit.certificate}: the certificate is missing or damaged"


def test_a_silo_is_added_under_an_authority_of_any_length(tmp_path: Path) -> None:
    made = provision(tmp_path / "long", silos=["north"], host="localhost", port=1, days=5000)
    assert days_left(read_kit(add_silo(made, "east", days=10).kit("east")).authority) in (4999, 5000)


def test_the_authority_keeps_no_private_key_but_its_own(made: Deployment) -> None:
    authority = made.path / "authority"
    texts = [path.read_text() for path in authority.rglob("*") if path.is_file()]
    assert sum(text.count("PRIVATE KEY-----\\n") for text in texts) == 2  # begin and end of one key
    (state,) = authority.glob("*/state/cert.json")
    assert set(json.loads(state.read_text())) == {"root_cert", "root_pri_key"}
    assert state.stat().st_mode & 0o077 == 0
    for path in authority.rglob("*.key"):
        raise AssertionError(path)


def test_a_silo_renews_with_a_key_that_nobody_else_has(made: Deployment, kit: Kit, tmp_path: Path) -> None:
    old = kit.key.read_bytes()
    asked, answer = tmp_path / "request.pem", tmp_path / "certificate.pem"
    assert call("deploy", "renew", kit.path, "--out", asked).exit_code == 0
    assert b"PRIVATE" not in asked.read_bytes()
    assert kit.key.read_bytes() == old  # the silo goes on with the old one meanwhile
    signed = call("deploy", "sign", made.path, asked, "--out", answer, "--days", "30")
    assert signed.exit_code == 0, signed.output
    done = call("deploy", "renew", kit.path, "--certificate", answer)
    assert done.exit_code == 0, done.output
    assert days_left(kit.certificate) in (29, 30)
    assert kit.key.read_bytes() != old
    assert kit.key.stat().st_mode & 0o077 == 0
    assert trusts(read_kit(made.server), kit)
    subject = x509.load_pem_x509_certificate(kit.certificate.read_bytes()).subject
    assert subject.rfc4514_string() == "O=north,CN=north"
    key = serialization.load_pem_private_key(kit.key.read_bytes(), password=None)
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    elsewhere = [path for path in made.path.rglob("*") if path.is_file() and path != kit.key]
    assert not any(secret in path.read_bytes() for path in elsewhere)


def test_requests_and_answers_that_do_not_fit(made: Deployment, kit: Kit, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not a request"):
        sign(made, b"nonsense", days=1)
    with pytest.raises(InputError, match="make a request first"):
        install(kit, kit.certificate.read_bytes())
    asked = request(kit)
    with pytest.raises(InputError, match="not for the last request"):
        install(kit, kit.certificate.read_bytes())
    with pytest.raises(InputError, match="not a certificate"):
        install(kit, b"nonsense")
    other = provision(tmp_path / "other", silos=["north"], host="localhost", port=1)
    with pytest.raises(InputError, match="another authority"):
        install(kit, sign(other, asked, days=1)[1])
    gone = remove_silo(made, "north")
    with pytest.raises(InputError, match="has no silo 'north'"):
        sign(gone, asked, days=1)
    shutil.rmtree(made.path / "authority")
    with pytest.raises(InputError, match="the authority's folder is not here"):
        authority_of(made)


def test_a_silo_is_added_without_touching_the_others(made: Deployment) -> None:
    before = {path: path.read_bytes() for path in made.path.rglob("startup/*") if path.is_file()}
    more = add_silo(made, "East Bay", days=50)
    kit = read_kit(more.kit("East Bay"), Role.SILO)
    assert read_deployment(made.path).sites == {"north": "north", "south": "south", "East Bay": "east-bay"}
    assert days_left(kit.certificate) in (49, 50)
    assert kit.authority.read_bytes() == (made.server / "startup" / "rootCA.pem").read_bytes()
    assert trusts(read_kit(made.server), kit)
    assert all(path.read_bytes() == data for path, data in before.items())
    assert (kit.path / "local" / "comm_config.json").is_file()
    assert kit.path.stat().st_mode & 0o077 == 0
    with pytest.raises(InputError, match="already"):
        add_silo(more, "north")
    assert set(json.loads(authority_of(made).state_text())) == {"root_cert", "root_pri_key"}


def test_a_silo_that_was_removed_does_not_come_back_under_its_name(made: Deployment) -> None:
    assert revoked(made.server) == frozenset()
    done = call("deploy", "remove", made.path, "--silo", "south")
    assert done.exit_code == 0, done.output
    assert revoked(made.server) == {"south"}
    left = read_deployment(made.path)
    assert list(left.sites) == ["north"]
    with pytest.raises(InputError, match="was removed"):
        add_silo(left, "south")
    with pytest.raises(InputError, match="has no silo"):
        remove_silo(left, "south")


def test_the_handshake_of_the_test_can_fail(made: Deployment, tmp_path: Path) -> None:
    other = provision(tmp_path / "other", silos=["north"], host="localhost", port=1)
    assert not trusts(read_kit(made.server), read_kit(other.kit("north")))

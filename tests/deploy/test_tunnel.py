"""A silo behind an outbound proxy: the engine and the doctor reach the server through it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fedtmle.deploy import processes
from fedtmle.deploy.demo import (
    approve_everywhere,
    await_silos,
    free_port,
    local_deployment,
    silo_kit,
    write_example,
)
from fedtmle.deploy.doctor import EXCEPTIONS, VARIABLES, Finding, ProxyError, connected, examine, proxy_for
from fedtmle.deploy.kits import Kit, read_kit
from fedtmle.deploy.launch import RunsHere
from fedtmle.deploy.parties import start_silo
from fedtmle.deploy.provision import provision
from fedtmle.engine.runs import RunState
from fedtmle.studyfile.file import read_study
from tests.deploy.proxy import TunnelProxy
from tests.deploy.rig import same

H2 = "hospital 2"


@pytest.fixture(autouse=True)
def no_proxy_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *EXCEPTIONS):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("given", "proxy"),
    [
        ({}, None),
        ({"https_proxy": "http://proxy.test:3128"}, ("proxy.test", 3128)),
        ({"https_proxy": "http://proxy.test"}, ("proxy.test", 80)),
        ({"http_proxy": "http://a.test:1", "https_proxy": "http://b.test:2"}, ("b.test", 2)),
        ({"grpc_proxy": "http://c.test:3", "https_proxy": "http://b.test:2"}, ("c.test", 3)),
        ({"https_proxy": "http://b.test:2", "no_proxy": "a.org,server.test"}, None),
        ({"https_proxy": "http://b.test:2", "no_proxy": "a.org"}, ("b.test", 2)),
        ({"https_proxy": "http://b.test:port"}, None),
    ],
)
def test_the_proxy_is_the_one_that_grpc_takes(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], proxy: tuple[str, int] | None
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert proxy_for("server.test") == proxy


@pytest.fixture
def tunnel() -> Iterator[TunnelProxy]:
    made = TunnelProxy(free_port(), "server.test:8002")
    yield made
    made.close()


def test_a_proxy_that_refuses_or_is_silent_is_named(
    monkeypatch: pytest.MonkeyPatch, tunnel: TunnelProxy
) -> None:
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ProxyError, match="does not answer"):
        connected("server.test", 8002, timeout=2)
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{tunnel.port}")
    with pytest.raises(ProxyError, match=r"opens no tunnel to other\.test:8002 \(it says 403\)"):
        connected("other.test", 8002, timeout=2)


def server_finding(kit: Kit) -> Finding:
    return [finding for finding in examine(kit) if finding.item == "server"][-1]


def test_the_doctor_says_what_is_wrong_with_the_proxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tunnel: TunnelProxy
) -> None:
    made = provision(tmp_path / "consortium", silos=["north"], host="other.test", port=8002)
    kit = read_kit(made.kit("north"))
    assert "host name other.test is unknown" in server_finding(kit).detail
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{tunnel.port}")
    finding = server_finding(kit)  # the proxy finds the name, not this machine
    assert "opens no tunnel to other.test:8002" in finding.detail
    assert "must allow CONNECT to TCP port 8002" in finding.fix


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_silo_behind_a_proxy_takes_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody listens at the address that the silo knows: only the proxy leads from there to the server."""
    study = read_study(write_example(tmp_path / "hospitals", 3))
    with local_deployment(tmp_path / "consortium", study, within=180.0) as made:
        kit, closed = silo_kit(made, H2), free_port()
        processes.stop(kit)
        config = kit.path / "startup" / "fed_client.json"
        config.write_text(config.read_text().replace(f"localhost:{made.port}", f"localhost:{closed}"))
        proxy = TunnelProxy(made.port, f"localhost:{closed}")
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.port}")
        start_silo(kit, None)
        elsewhere = replace(kit, port=closed)
        assert processes.wait_until(lambda: bool(proxy.asked), 60)
        finding = server_finding(elsewhere)
        monkeypatch.delenv("https_proxy")
        await_silos(made, list(study.silos), seconds=120)
        approve_everywhere(study)
        run = RunsHere(made).new(study, deadline=60.0, patience=120.0)
        assert processes.wait_until(lambda: run.status().state.is_over, 180), run.status()
        assert run.status().state is RunState.DONE, run.status().why
        same(study, run, tmp_path)
        proxy.close()
    assert set(proxy.asked) == {f"CONNECT localhost:{closed}"}
    assert finding.ok
    assert f"through the proxy 127.0.0.1:{proxy.port}, answers with a valid certificate" in finding.detail
    shutil.rmtree(tmp_path / "consortium")

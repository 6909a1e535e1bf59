"""A server that moves to another address is found, by its name, without a command."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.proxy import Proxy
from tests.deploy.rig import Rig, deployed, same

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
NAME = "moving.fedtmle.test"
OLD, NEW = "127.0.0.2", "127.0.0.3"
CLONE_NEWNS = 0x00020000


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Path]:
    """A hosts file that this process and those it starts alone see, in a mount namespace of their own."""
    path = tmp_path / "hosts"
    path.write_text(f"127.0.0.1 localhost\n{OLD} {NAME}\n")
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
        pytest.skip("this account may not make a mount namespace")
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)  # noqa: S607
    subprocess.run(["mount", "--bind", str(path), "/etc/hosts"], check=True)  # noqa: S603, S607
    yield path
    subprocess.run(["umount", "--lazy", "/etc/hosts"], check=True)  # noqa: S607


@pytest.fixture
def moving(tmp_path: Path, hosts: Path) -> Iterator[Rig]:
    assert hosts.exists()
    with deployed(tmp_path, host=NAME, at=OLD) as made:
        yield made


def test_a_server_that_moves_to_another_address_is_found(moving: Rig, hosts: Path, tmp_path: Path) -> None:
    """The old address says nothing more, and closes no connection."""
    study = moving.plan(1)
    new = Proxy(moving.made.port, host=NEW, listen=moving.proxy.port)
    run = moving.start(study, deadline=300.0)
    moving.at_round(run, "hospital-3")
    text = hosts.read_text().replace(OLD, NEW)
    with hosts.open("r+") as file:  # the same file, of the same length: it is mounted
        file.write(text)
    moving.proxy.hold()
    took = moving.finish(run, within=60)
    same(study, run, tmp_path)
    moving.note("the server's address changed", run, took)
    new.close()

"""The components of FLARE's long-lived processes, without FLARE's processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext

from fedtmle.engine.flare_post import SiloPost, keep_json
from fedtmle.engine.flare_server import ServerDesk
from fedtmle.engine.process import write_log


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A deployed job that would have the silo read what a URL names."""
    folder = tmp_path / "a-job"
    config = folder / "app_silo" / "config"
    config.mkdir(parents=True)
    (config / "config_fed_client.conf").write_text('include url("http://127.0.0.1:1/x")')
    (config / "config_fed_client.yml").write_text("a: 1")
    (config / "other.json").write_text("{}")
    (folder / "meta.json").write_text("{}")
    (config / ".__nvfl_submitter.crt").write_text("a certificate")
    return folder


def names(job: Path) -> set[str]:
    return {path.name for path in job.rglob("*") if path.is_file()}


def test_only_json_is_left_of_a_job_before_it_is_launched(job: Path, tmp_path: Path) -> None:
    context = FLContext()
    context.set_prop(FLContextKey.WORKSPACE_ROOT, str(tmp_path), private=True)
    context.set_prop(FLContextKey.JOB_META, {"job_id": job.name}, private=True)
    SiloPost().handle_event(EventType.BEFORE_JOB_LAUNCH, context)
    assert names(job) == {"other.json", "meta.json", ".__nvfl_submitter.crt"}


def test_a_job_of_json_is_left_as_it_is(job: Path) -> None:
    assert len(keep_json(job)) == 2
    assert keep_json(job) == []


def test_a_silos_engine_loads_no_statistics() -> None:
    """It waits for months beside a hospital's other work; the process for a run loads them."""
    names = ("scipy", "numba", "fedtmle.protocol", "fedtmle.model")
    text = f"import fedtmle.engine.flare_post, sys; print([m for m in {names} if m in sys.modules])"
    told = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)  # noqa: S603
    assert told.stdout == "[]\n"


def test_a_log_is_rotated(tmp_path: Path) -> None:
    import logging

    logger = logging.getLogger("fedtmle")
    before = list(logger.handlers)
    write_log(tmp_path / "x.log")
    (added,) = set(logger.handlers) - set(before)
    try:
        for _ in range(30):
            logging.getLogger("fedtmle.test").error("x" * 100_000)
    finally:
        logger.removeHandler(added)
        added.close()
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert len(sizes) > 1
    assert max(sizes) <= 1 << 20


@pytest.mark.parametrize(("kept", "after"), [("NA", None), ("a signature", "a signature"), (None, None)])
def test_a_missing_signature_is_made_again(
    kept: str | None, after: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE signs once its own signature is None, and would keep "NA" for good."""
    monkeypatch.setattr("fedtmle.engine.flare_server.write_log", lambda _: None)
    server = SimpleNamespace(my_own_token_signature=kept)
    cell = SimpleNamespace(register_request_cb=lambda **_: None)
    engine = SimpleNamespace(server=server, get_cell=lambda: cell, disable_clients=lambda _: None)
    for name in ("fedtmle", "runs"):
        (tmp_path / name).mkdir()
    desk = ServerDesk(engine, tmp_path, channel="fedtmle", post="post", office="office")
    desk.turn()
    assert server.my_own_token_signature == after

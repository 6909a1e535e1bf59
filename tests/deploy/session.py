"""The administrator's session with FLARE: for tests of what an administrator may not do."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Protocol

from fedtmle.deploy.kits import Deployment
from fedtmle.engine.office import COORDINATOR
from fedtmle.errors import ProtocolError

LOGIN_TIMEOUT = 15.0  # seconds to reach the server


class Client(Protocol):
    """A connected silo, as FLARE lists it."""

    @property
    def name(self) -> str: ...


class EngineSession(Protocol):
    """The part of FLARE's administrator session that we use."""

    def submit_job(self, job_definition_path: str) -> str: ...

    def abort_job(self, job_id: str) -> object: ...

    def get_job_meta(self, job_id: str) -> Mapping[str, object]: ...

    def get_connected_client_list(self) -> Sequence[Client]: ...

    def close(self) -> None: ...


@contextmanager
def engine_session(deployment: Deployment, *, timeout: float = LOGIN_TIMEOUT) -> Iterator[EngineSession]:
    """Open the administrator's session with the server; `ProtocolError` if it cannot be reached."""
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    logging.getLogger("nvflare").addHandler(logging.NullHandler())  # errors are reported below
    try:
        with redirect_stdout(io.StringIO()):  # FLARE prints that it is connecting
            session: EngineSession = new_secure_session(COORDINATOR, str(deployment.admin), timeout=timeout)
    except Exception as error:
        where = f"{deployment.host}:{deployment.port}"
        raise ProtocolError(
            f"the server at {where} cannot be reached ({type(error).__name__}); check it with "
            "`fedtmle server status`"
        ) from None
    try:
        yield session
    finally:
        session.close()

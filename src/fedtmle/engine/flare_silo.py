"""NVIDIA FLARE, the silo's side: one published method, ``step(bytes) -> bytes``."""

from __future__ import annotations

import base64
import logging
import logging.handlers
from pathlib import Path

from nvflare.collab import collab

from fedtmle.engine import frames
from fedtmle.engine.endpoint import Endpoint
from fedtmle.engine.frames import Declined
from fedtmle.engine.site import open_endpoint


class SiloEnd:
    """The job's object at a silo. The job brings the study as text and its plan's digest, nothing else."""

    def __init__(self, study: str, plan: str) -> None:
        self.study, self.plan = study, plan  # FLARE reads arguments back from attributes of the same name
        self._endpoint: Endpoint | None = None

    @collab.init  # type: ignore[untyped-decorator]
    def start(self) -> None:
        """Once per job: which silo this is and what its owner says; the data are read when approved."""
        home = Path(collab.workspace.get_root_dir()) / "fedtmle"
        own = logging.handlers.RotatingFileHandler(home / "silo.log", maxBytes=1 << 20, backupCount=4)
        own.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger("fedtmle").addHandler(own)
        study = base64.b64decode(self.study)
        self._endpoint = open_endpoint(home, collab.site_name, study, bytes.fromhex(self.plan))

    @collab.final  # type: ignore[untyped-decorator]
    def stop(self) -> None:
        """The job is over."""
        if self._endpoint is not None:
            self._endpoint.close()

    @collab.publish  # type: ignore[untyped-decorator]
    def step(self, frame: bytes) -> bytes:
        """The only door."""
        if self._endpoint is None:
            raise AssertionError("the engine calls start first")
        if collab.caller != "server":  # the engine would let another silo of the job call, too
            return frames.answer(Declined.FAULT)
        return self._endpoint.step(frame)

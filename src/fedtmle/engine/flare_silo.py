"""NVIDIA FLARE at a silo: one published method, ``step(bytes) -> bytes``."""

from __future__ import annotations

import base64
from pathlib import Path

from nvflare.collab import collab

from fedtmle.engine import frames
from fedtmle.engine.frames import Declined
from fedtmle.engine.process import keep_loaded, write_log
from fedtmle.engine.site import Endpoint, open_endpoint


class SiloEnd:
    """The job's object at a silo; a job brings the text of the study and its plan's digest, nothing else."""

    def __init__(self, study: str, plan: str) -> None:
        self.study, self.plan = study, plan  # FLARE reads arguments back from attributes of the same name
        self._endpoint: Endpoint | None = None

    @collab.init  # type: ignore[untyped-decorator]
    def start(self) -> None:
        """Find out, once per job, which silo this is; its data are read when the owner has approved."""
        home = Path(collab.workspace.get_root_dir()) / "fedtmle"
        write_log(home / "silo.log")
        study = base64.b64decode(self.study)
        self._endpoint = open_endpoint(
            home, collab.site_name, study, bytes.fromhex(self.plan), opened=keep_loaded
        )

    @collab.final  # type: ignore[untyped-decorator]
    def stop(self) -> None:
        """Close the endpoint at the end of the job."""
        if self._endpoint is not None:
            self._endpoint.close()

    @collab.publish  # type: ignore[untyped-decorator]
    def step(self, frame: bytes) -> bytes:
        """Return the answer to one frame of the server."""
        if self._endpoint is None:
            raise AssertionError("the engine calls start first")
        if collab.caller != "server":  # the engine would let another silo of the job call, too
            return frames.answer(Declined.FAULT)
        return self._endpoint.step(frame)

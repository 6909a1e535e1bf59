"""NVIDIA FLARE at a silo: the job's object, which answers the frames of the job's server."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

from nvflare.apis.fl_context import FLContext
from nvflare.collab import collab
from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.message import Message

from fedtmle.engine import frames
from fedtmle.engine.process import keep_loaded, write_log
from fedtmle.engine.site import Endpoint, open_endpoint


def answer_server(fl_ctx: FLContext, step: Callable[[bytes], bytes]) -> None:
    """Answer the frames of the job's server by ``step``, and no other cell: not those of other silos."""
    server = FQCN.join([FQCN.ROOT_SERVER, fl_ctx.get_job_id()])

    def reply(request: Message) -> Message:
        if request.get_header(MessageHeaderKey.ORIGIN) != server:
            return Message({MessageHeaderKey.RETURN_CODE: ReturnCode.UNAUTHENTICATED}, None)
        return Message(
            {MessageHeaderKey.RETURN_CODE: ReturnCode.OK}, step(frames.byte_string(request.payload))
        )

    fl_ctx.get_engine().get_cell().core_cell.register_request_cb(frames.CHANNEL, frames.STEP, reply)


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
        answer_server(collab.fl_ctx, self._endpoint.step)

    @collab.final  # type: ignore[untyped-decorator]
    def stop(self) -> None:
        """Close the endpoint at the end of the job."""
        if self._endpoint is not None:
            self._endpoint.close()

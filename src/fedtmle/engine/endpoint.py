"""A silo's endpoint in one run: frames in, frames out, and never an exception.

An exception that an engine catches may travel to the server with its text. Here each becomes a reason without
data, and the details go to the silo's own log.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from fedtmle.engine import frames
from fedtmle.engine.frames import Answer, Declined, Ready, Reply, Waiting
from fedtmle.errors import ChangedDataError, DecodeError, FedTMLEError, InputError
from fedtmle.runtime.rows import LocalOutcome
from fedtmle.runtime.silo import Silo

_log = logging.getLogger("fedtmle.silo")

BUSY_AFTER = 5.0  # seconds that a repeated request waits for the answer to the first

Permission = Callable[[], Declined | Waiting | None]  # None: the owner has approved the plan


class Endpoint:
    """Wait for the owner's approval, read the data once, then answer requests.

    ``permission`` is called until it returns None; from then on the silo checks its owner's approvals itself.
    ``open_silo`` reads the data and opens the journal, in a thread of its own: no engine waits for it.
    ``keep`` is called with the silo's own outcome of a personalised run; ``close`` at the end. ``unseal``
    returns the frame that the server signed, or raises `DecodeError`; such a frame changes nothing, and is
    logged once. ``release``: whether the silo's own estimate may be shown.
    """

    def __init__(
        self,
        permission: Permission,
        open_silo: Callable[[], Silo],
        *,
        keep: Callable[[LocalOutcome], None] = lambda _: None,
        close: Callable[[], None] = lambda: None,
        unseal: Callable[[bytes], object] = lambda frame: frame,
        release: bool = False,
    ) -> None:
        self._ready = Ready(release=release)
        self._permission, self._open, self._keep = permission, open_silo, keep
        self._lock = threading.Lock()  # an engine may repeat a call while the first is being answered
        self._loading: threading.Thread | None = None
        self._silo: Silo | None = None
        self._declined: Declined | None = None
        self._is_closed = False
        self._kept = False
        self._close, self._unseal = close, unseal
        self._is_warned = False  # whether a request from another sender was logged

    def close(self) -> None:
        """Close the journal; nothing is answered from then on.

        The engine may end a job, because another silo's process was lost, while a request is on its way. The
        run goes on in another job, so the silo does not decline.
        """
        if self._loading is not None:
            self._loading.join()
        with self._lock:
            self._silo, self._is_closed = None, True
            self._close()

    def step(self, frame: bytes) -> bytes:
        """Return the answer to one frame."""
        try:
            return frames.answer(self._answer(frame))
        except Exception:
            _log.exception("unexpected fault")
            return frames.answer(Declined.FAULT)

    def _answer(self, frame: bytes) -> Answer:
        try:
            opened = self._unseal(frame)
        except DecodeError as error:
            if not self._is_warned:
                _log.warning("%s; this and all such frames are declined", error)
            self._is_warned = True
            return Declined.UNSIGNED
        try:
            request = frames.read_request(opened)
        except DecodeError:
            return Declined.FAULT
        if not self._lock.acquire(timeout=BUSY_AFTER):
            return Waiting.ANSWER  # the server asks again, and then gets the finished answer
        try:
            state = self._state()
            if request is None or self._silo is None:
                return state
            return Reply(self._reply(self._silo, request))
        finally:
            self._lock.release()

    def _reply(self, silo: Silo, request: bytes) -> bytes:
        reply = silo.step(request)
        if silo.error is not None:
            _log.error("this silo could not answer: %s", silo.error)
        if silo.local is not None and not self._kept:
            self._kept = True
            self._keep(silo.local)
        return reply

    def _state(self) -> Ready | Waiting | Declined:
        if self._silo is not None:
            return self._ready
        if self._is_closed:
            return Waiting.END
        state = self._declined or self._permission()
        if state is not None:
            return state
        if self._loading is None:
            self._loading = threading.Thread(target=self._load, name="fedtmle-data", daemon=True)
            self._loading.start()
        self._loading.join(timeout=0.2)  # small data are read at once
        return self._declined or (Waiting.DATA if self._silo is None else self._ready)

    def _load(self) -> None:
        try:
            self._silo = self._open()
        except InputError as error:
            _log.error("%s", error)
            is_change = isinstance(error, ChangedDataError)
            self._declined = Declined.CHANGED if is_change else Declined.DATA
        except (FedTMLEError, OSError):
            _log.exception("the journal or the ledger cannot be used")
            self._declined = Declined.JOURNAL
        except Exception:
            _log.exception("unexpected fault")
            self._declined = Declined.FAULT

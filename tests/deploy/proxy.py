"""A piece of network that can be cut: forwards TCP connections, or drops and refuses them."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress


class Proxy:
    """Listens on ``host`` and a port of its own, or ``listen``, and forwards to ``port``, until `cut`."""

    def __init__(self, port: int, *, host: str = "127.0.0.1", listen: int = 0) -> None:
        self._to = port
        self._open = True
        self._passes = threading.Event()
        self._passes.set()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._listener = socket.create_server((host, listen))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._open = False
        while self._pairs:
            for end in self._pairs.pop():
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def hold(self) -> None:
        """Pass nothing, and keep every connection open: as a link that is dead and does not say so."""
        self._passes.clear()

    def mend(self) -> None:
        self._open = True
        self._passes.set()

    def close(self) -> None:
        self.cut()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._to), timeout=5) if self._open else None
            except OSError:
                far = None
            if far is None:
                near.close()
                continue
            far.settimeout(None)
            self._pairs.append((near, far))
            for a, b in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._passes.wait()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.close()

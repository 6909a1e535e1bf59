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
            if not self._greet(near):
                near.close()
                continue
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

    def _greet(self, near: socket.socket) -> bool:
        """Return whether a new connection may be forwarded."""
        return near.fileno() >= 0

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self._passes.wait()
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.close()


class TunnelProxy(Proxy):
    """A hospital's outbound proxy: opens tunnels (HTTP CONNECT), and only to the address that is allowed."""

    def __init__(self, port: int, allowed: str) -> None:
        self._allowed = allowed
        self.asked: list[str] = []
        super().__init__(port)

    def _greet(self, near: socket.socket) -> bool:
        asked = b""
        near.settimeout(10)
        try:
            while b"\r\n\r\n" not in asked:
                more = near.recv(1)
                if not more:
                    return False
                asked += more
        except OSError:
            return False
        near.settimeout(None)
        words = asked.decode("ascii").split()
        self.asked.append(" ".join(words[:2]))
        is_allowed = words[:2] == ["CONNECT", self._allowed]
        near.sendall(b"HTTP/1.1 200 OK\r\n\r\n" if is_allowed else b"HTTP/1.1 403 Forbidden\r\n\r\n")
        return is_allowed

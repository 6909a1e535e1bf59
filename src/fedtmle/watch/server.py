"""A small HTTP server for one page and its data, on this machine by default."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from urllib.parse import parse_qs, urlsplit

from fedtmle.runtime.documents import Document

Look = Callable[[], Document]
LOOPBACK = ("127.0.0.1", "localhost", "::1")
POLICY = (
    "default-src 'none'; connect-src 'self'; img-src data:; style-src 'unsafe-inline'; "
    "script-src 'nonce-{}'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class WatchServer(ThreadingHTTPServer):
    """Serve the data that ``look`` returns; refuse requests for another host name (DNS rebinding)."""

    daemon_threads = True

    def __init__(self, host: str, port: int, look: Look, *, silence: float = 30.0) -> None:
        self._look = look
        self._silence = silence  # seconds without an event after which the page warns
        self._lock = threading.Lock()
        self.page = files("fedtmle.watch").joinpath("page.html").read_text(encoding="utf-8")
        super().__init__((host, port), _Handler)
        self.allowed = {*LOOPBACK, host} if host in LOOPBACK else {*LOOPBACK, host, ""}

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.server_address[1]}/"

    def state(self) -> Document:
        """Return the data that the page shows, with this machine's time."""
        with self._lock:  # one reader at a time, because `look` updates the view
            return {**self._look(), "now": round(time.time(), 3), "silence": self._silence}


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer

    def do_GET(self) -> None:
        host = urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""
        if "" not in self.server.allowed and host not in self.server.allowed:
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"this page is served to this machine only")
            return
        address = urlsplit(self.path)
        if address.path == "/":
            nonce = secrets.token_urlsafe(16)
            page = self.server.page.replace("NONCE", nonce).encode()
            self._send(HTTPStatus.OK, "text/html; charset=utf-8", page, nonce=nonce)
        elif address.path == "/state":
            state = self.server.state()
            last = parse_qs(address.query).get("seen", [""])[0]
            if last == str(state["seen"]):
                self._send(HTTPStatus.NO_CONTENT, "application/json", b"")
            else:
                self._send(HTTPStatus.OK, "application/json", json.dumps(state, allow_nan=False).encode())
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is only one page here")

    def _send(self, status: HTTPStatus, kind: str, body: bytes, *, nonce: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", POLICY.format(nonce))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing for a request: the terminal belongs to the user."""

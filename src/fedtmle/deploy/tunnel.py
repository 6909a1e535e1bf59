"""The way from a party's machine to the server: direct, or through the institution's outbound proxy.

The engine's gRPC reads the address of a proxy from the environment, and asks it for a tunnel (HTTP CONNECT).
The connection inside the tunnel is the same, with certificates of the consortium on both sides.
"""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

VARIABLES = ("grpc_proxy", "https_proxy", "http_proxy")  # as gRPC reads them; the first that is set counts
EXCEPTIONS = ("no_grpc_proxy", "no_proxy")
LONGEST_REPLY = 8192  # bytes before the end of a proxy's reply


class ProxyError(OSError):
    """The proxy cannot be used; the message says why."""


def proxy_for(host: str) -> tuple[str, int] | None:
    """Return the host and port of the proxy through which the engine reaches ``host``; None if directly."""
    named = next((os.environ[name] for name in VARIABLES if os.environ.get(name)), "")
    exceptions = next((os.environ[name] for name in EXCEPTIONS if os.environ.get(name)), "")
    if not named or proxy_bypass(host, {"no": exceptions}):
        return None
    try:
        address = urlsplit(named)
        return (address.hostname, address.port or 80) if address.hostname else None
    except ValueError:
        return None


def connected(host: str, port: int, *, timeout: float) -> socket.socket:
    """Return a connection to the server, through the proxy if there is one; raise `OSError` if none."""
    proxy = proxy_for(host)
    if proxy is None:
        return socket.create_connection((host, port), timeout=timeout)
    where = f"the proxy {proxy[0]}:{proxy[1]}"
    try:
        link = socket.create_connection(proxy, timeout=timeout)
    except OSError:
        raise ProxyError(f"{where} does not answer") from None
    try:
        link.sendall(f"CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode("ascii"))
        reply = b""
        while b"\r\n\r\n" not in reply and len(reply) < LONGEST_REPLY:
            more = link.recv(1)  # not a byte of what follows the reply
            if not more:
                break
            reply += more
    except OSError:
        link.close()
        raise ProxyError(f"{where} does not answer") from None
    words = reply.split(None, 2)
    if len(words) < 2 or words[1] != b"200":
        link.close()
        code = words[1].decode("ascii", "replace") if len(words) > 1 else "nothing"
        raise ProxyError(f"{where} opens no tunnel to {host}:{port} (it says {code})")
    return link

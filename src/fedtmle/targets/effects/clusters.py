"""What stands for a cluster's identifier wherever clusters of several silos are compared."""

from __future__ import annotations

import hashlib

DIGEST = 16  # bytes: none collide by chance


def cluster_digest(label: str) -> bytes:
    """128 bits of SHA-256."""
    return hashlib.sha256(b"fedtmle cluster:" + label.encode()).digest()[:DIGEST]

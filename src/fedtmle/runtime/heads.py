"""The signed head of a file that only grows: how many lines it had, and the digest of the last state.

Without it nobody could tell that lines were cut off at a file's end, or that the whole chain was computed
anew. The head is written after the line: after a crash the file may be ahead of its head, never behind it.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from fedtmle.errors import JournalError
from fedtmle.runtime.signing import SigningKey, is_signed


class Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The head of a file: after ``count`` lines its digest was ``digest``."""

    count: int
    digest: str
    signature: str = ""


def head_path(path: Path) -> Path:
    """Return the file beside ``path`` that holds its head."""
    return path.with_suffix(".head")


def write_head(path: Path, count: int, digest: str, key: SigningKey) -> None:
    """Sign the head of the file at ``path`` and replace it, in one step."""
    signature = key.sign(_statement(path, count, digest)).hex()
    head, scratch = head_path(path), path.with_suffix(".head.new")
    scratch.write_bytes(msgspec.json.encode(Head(count=count, digest=digest, signature=signature)))
    scratch.chmod(0o600)
    scratch.replace(head)


def read_head(path: Path, public: bytes) -> Head | None:
    """Return the head of the file at ``path``, None if it has none; raise if another key signed it."""
    try:
        head = msgspec.json.decode(head_path(path).read_bytes(), type=Head)
        signature = bytes.fromhex(head.signature)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, msgspec.MsgspecError):
        raise JournalError(f"{head_path(path)}: this is not the head of {path.name}") from None
    if not is_signed(_statement(path, head.count, head.digest), signature, public):
        raise JournalError(f"{head_path(path)}: the silo's key did not sign this")
    return head


def check_head(path: Path, head: Head, count: int, digest_at_head: str) -> None:
    """Raise unless a file of ``count`` lines goes on from its head, after whose lines it has this digest."""
    if count < head.count:
        raise JournalError(
            f"{path}: it has {count} lines, and its signed head says {head.count}: lines were cut off"
        )
    if digest_at_head != head.digest:
        raise JournalError(f"{path}: it differs from its signed head: it was written anew")


def _statement(path: Path, count: int, digest: str) -> bytes:
    return msgspec.msgpack.encode(("fedtmle head", path.name, count, digest))

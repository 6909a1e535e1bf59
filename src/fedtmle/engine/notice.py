"""Tell a silo's owner that a study waits: run a command of the owner's, with JSON on its standard input.

The command is run without a shell, and nothing of the study is among its arguments.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from fedtmle.errors import InputError
from fedtmle.runtime.documents import Document, read_document, write_document

_log = logging.getLogger("fedtmle.silo")
LIMIT = 30.0  # seconds for the command
TRIES = 3
PAUSE = 60.0  # seconds between two tries


def set_command(kit: Path, command: Sequence[str]) -> None:
    """Write the owner's command into the kit; an empty one turns notices off."""
    if command and not (Path(command[0]).is_absolute() and os.access(command[0], os.X_OK)):
        raise InputError(f"command: expected the whole path of a program, got '{command[0]}'")
    write_document(kit / "notice.json", {"command": list(command)})


def command_of(kit: Path) -> list[str]:
    """Return the owner's command, [] if there is none."""
    try:
        return [str(word) for word in read_document(kit / "notice.json")["command"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def notice_of(silo: str, study: Path) -> Document:
    """Return what the command reads: which silo, which plan, where its text is, and when it came."""
    return {
        "event": "study waits",
        "silo": silo,
        "plan": study.stem,
        "study": str(study),
        "time": time.time(),
    }


def tell(command: Sequence[str], notice: Document) -> str:
    """Run the command once; return what went wrong, an empty string if it ended with 0."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    try:
        done = subprocess.run(  # noqa: S603 - the owner's own command
            list(command),
            input=json.dumps(notice).encode(),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {LIMIT:g} s"
    except OSError as error:
        return f"it could not be started ({error.strerror})"
    return "" if done.returncode == 0 else f"it ended with {done.returncode}"


def tell_later(
    command: Sequence[str], notices: Sequence[Document], *, pause: float = PAUSE
) -> threading.Thread:
    """Notify the owner in a separate thread, and try again if that fails: the post must not wait."""

    def work() -> None:
        for notice in notices:
            for attempt in range(TRIES):
                trouble = tell(command, notice)
                if not trouble:
                    break
                _log.error("%s: the owner was not notified of a study: %s", command[0], trouble)
                if attempt + 1 < TRIES:
                    time.sleep(pause)

    thread = threading.Thread(target=work, name="fedtmle-notice", daemon=True)
    thread.start()
    return thread

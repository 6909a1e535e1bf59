"""Whether a party's certificates are valid by this machine's clock.

FLARE's engine looks at them once, when it starts. If they are not valid then, it neither ends nor connects
later. So a supervisor starts it when they are. It runs this module in a process of its own for that, because
reading certificates would take a third of the supervisor's memory for as long as the party runs:

python -m fedtmle.deploy.validity <kit>
"""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from fedtmle.deploy.kits import Kit, read_kit


def invalidity(kit: Kit, now: datetime) -> str:
    """Return why a kit's certificates are not valid at ``now``, an empty string if they are."""
    from cryptography import x509

    for item, path in (("certificate", kit.certificate), ("authority's certificate", kit.authority)):
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError):
            return f"{path}: the {item} is missing or damaged"
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if now < begin:
            return f"the {item} begins on {begin:%Y-%m-%d %H:%M:%S} UTC, later than this machine's clock says"
        if now > end:
            return f"the {item} ended on {end:%Y-%m-%d %H:%M:%S} UTC, earlier than this machine's clock says"
    return ""


def invalidity_now(kit: Kit) -> str:
    """Return `invalidity` as of now, computed in a process of its own."""
    command = [sys.executable, "-m", "fedtmle.deploy.validity", str(kit.path)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)  # noqa: S603 - our own module
    return done.stdout.strip()  # nothing if it failed: the engine itself then says what is wrong


if __name__ == "__main__":
    print(invalidity(read_kit(Path(sys.argv[1])), datetime.now(UTC)))  # noqa: T201 - the supervisor reads it

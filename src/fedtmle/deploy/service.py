"""A systemd unit for a party: it starts at boot, is restarted, and can write its own folders only."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fedtmle.deploy.kits import Kit, Role
from fedtmle.engine.post import silo_folder
from fedtmle.errors import InputError

UNIT = """\
[Unit]
Description=fedtmle {role} {name}
Wants=network-online.target
After=network-online.target

[Service]
User={user}
ExecStart={python} -m fedtmle {role} run {kit}
Restart=always
RestartSec=5
KillMode=mixed
TimeoutStopSec=30
UMask=0077
Environment=NUMBA_CACHE_DIR={kit}/fedtmle/cache
ReadWritePaths={writable}
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=true
PrivateDevices=true
NoNewPrivileges=true
CapabilityBoundingSet=
AmbientCapabilities=
ProtectClock=true
ProtectControlGroups=true
ProtectHostname=true
ProtectKernelLogs=true
ProtectKernelModules=true
ProtectKernelTunables=true
ProtectProc=invisible
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
RestrictNamespaces=true
RestrictRealtime=true
RestrictSUIDSGID=true
RemoveIPC=true
LockPersonality=true
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged

[Install]
WantedBy=multi-user.target
"""


def unit(kit: Kit, *, user: str) -> str:
    """Return the unit of a party that the account ``user`` runs.

    A silo can write its kit and its `silo.fedtmle/` folder, a server its kit. Compiled code needs memory that
    is writable and executable, so that `MemoryDenyWriteExecute` is not set.
    """
    if kit.role is Role.ADMIN:
        raise InputError(f"{kit.path}: an administrator's kit runs nothing; give a server's or a silo's kit")
    if not re.fullmatch(r"[a-z_][a-z0-9_-]{0,31}", user) or user == "root":
        raise InputError(f"--user: expected the name of an account other than root, got '{user}'")
    writable = [kit.path]
    if kit.role is Role.SILO:
        try:
            writable.append(silo_folder(kit.home))
        except (OSError, ValueError, KeyError, TypeError):
            raise InputError(
                f"{kit.path}: the silo file is not known yet; run `fedtmle silo start {kit.path} --silo-file "
                "silo.toml` once"
            ) from None
    (kit.home / "cache").mkdir(exist_ok=True)
    return UNIT.format(
        role=kit.role,
        name=kit.silo or kit.project,
        user=user,
        python=_quoted(Path(sys.executable)),
        kit=_quoted(kit.path),
        writable=" ".join(map(_quoted, writable)),
    )


def _quoted(path: Path) -> str:
    """Return a path as a unit file has it: percent signs doubled, blanks escaped."""
    text = str(path)
    if "\n" in text or '"' in text:
        raise InputError(f"{path}: a unit file cannot name this path; move the folder")
    return re.sub(r"[ \t\\\\]", lambda found: f"\\x{ord(found[0]):02x}", text.replace("%", "%%"))

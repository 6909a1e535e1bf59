"""Start-up kits: what each party is handed, and what it finds in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from fedtmle.errors import InputError


class Role(StrEnum):
    SERVER = "server"
    SILO = "silo"
    ADMIN = "admin"


@dataclass(frozen=True, kw_only=True)
class Kit:
    """One party's kit; ``home`` is our own part of it, beside FLARE's ``startup`` and ``local``."""

    path: Path
    role: Role
    site: str  # the party's name on the network, as in its certificate
    silo: str  # a silo's name in studies; empty for others
    project: str
    host: str
    port: int

    @property
    def home(self) -> Path:
        return self.path / "fedtmle"

    @property
    def certificate(self) -> Path:
        return self.path / "startup" / ("server.crt" if self.role is Role.SERVER else "client.crt")

    @property
    def key(self) -> Path:
        return self.certificate.with_suffix(".key")

    @property
    def authority(self) -> Path:
        return self.path / "startup" / "rootCA.pem"

    def write(self) -> None:
        self.home.mkdir(exist_ok=True)
        document = {name: value for name, value in asdict(self).items() if name != "path"}
        (self.home / "kit.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_kit(path: Path, role: Role | None = None) -> Kit:
    """The kit at ``path``; ``role`` is what it should be."""
    path = path.absolute()
    try:
        document = json.loads((path / "fedtmle" / "kit.json").read_text(encoding="utf-8"))
        kit = Kit(path=path, **{**document, "role": Role(document["role"])})
    except (OSError, ValueError, KeyError, TypeError):
        if (path / "deployment.json").is_file():
            kits = (read_deployment(path).server, path / "silos" / "NAME")
            raise InputError(
                f"{path}: the whole deployment; give one party's start-up kit in it, {kits[0]} or {kits[1]}"
            ) from None
        raise InputError(
            f"{path}: not a start-up kit; give a folder that `fedtmle deploy init` made"
        ) from None
    if role is not None and kit.role is not role:
        raise InputError(f"{path}: this is the kit of a {kit.role}, not of a {role}")
    return kit


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The coordinator's folder: the server's and the administrator's kits, and those to hand out."""

    path: Path
    project: str
    host: str
    port: int
    sites: Mapping[str, str]  # engine's name by silo

    @property
    def server(self) -> Path:
        return self.path / "server"

    @property
    def admin(self) -> Path:
        return self.path / "admin"

    @property
    def runs(self) -> Path:
        return self.server / "runs"

    def kit(self, silo: str) -> Path:
        return self.path / "silos" / self.sites[silo]

    def write(self) -> None:
        document = {name: value for name, value in asdict(self).items() if name != "path"}
        (self.path / "deployment.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_deployment(path: Path) -> Deployment:
    """The deployment at ``path``."""
    path = path.absolute()
    try:
        document = json.loads((path / "deployment.json").read_text(encoding="utf-8"))
        return Deployment(path=path, **document)
    except (OSError, ValueError, TypeError):
        raise InputError(f"{path}: not a deployment; `fedtmle deploy init` makes one") from None

"""Start-up kits, one for each party, and the coordinator's deployment that holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from fedtmle.errors import InputError
from fedtmle.runtime.documents import Document, read_document, write_document


class Role(StrEnum):
    """Whose kit it is."""

    SERVER = "server"
    SILO = "silo"
    ADMIN = "admin"


@dataclass(frozen=True, kw_only=True)
class Kit:
    """One party's kit; ``home`` is our folder in it, beside FLARE's ``startup`` and ``local``."""

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
        """Write the kit's description into it."""
        self.home.mkdir(exist_ok=True)
        write_document(self.home / "kit.json", _without_path(self))


def read_kit(path: Path, role: Role | None = None) -> Kit:
    """Return the kit at ``path``; raise if it is not of the given ``role``."""
    path = path.absolute()
    try:
        document = read_document(path / "fedtmle" / "kit.json")
        kit = Kit(path=path, **{**document, "role": Role(document["role"])})
    except (OSError, ValueError, KeyError, TypeError):
        if (path / "deployment.json").is_file():
            server, silo = read_deployment(path).server, path / "silos" / "NAME"
            raise InputError(
                f"{path}: the whole deployment; give one party's start-up kit in it, {server} or {silo}"
            ) from None
        raise InputError(
            f"{path}: not a start-up kit; expected a party's folder as `fedtmle deploy init` makes it"
        ) from None
    if role is not None and kit.role is not role:
        raise InputError(f"{path}: this is the kit of a {kit.role}, not of a {role}; give the {role}'s kit")
    return kit


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """The coordinator's folder: the kits of the server and the administrator, and those for the silos."""

    path: Path
    project: str
    host: str
    port: int
    sites: Mapping[str, str]  # engine's name by silo
    statisticians: Sequence[str] = ()

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
        """Return the folder of a silo's kit."""
        return self.path / "silos" / self.sites[silo]

    def statistician(self, name: str) -> Path:
        """Return the folder of a statistician's kit."""
        return self.path / "statisticians" / name

    def write(self) -> None:
        """Write the deployment's description into its folder, and tell the server which silos there are."""
        write_document(self.path / "deployment.json", _without_path(self))
        if (self.server / "fedtmle").is_dir():  # else the server's kit is on its own machine
            write_document(self.server / "fedtmle" / "sites.json", dict(self.sites))


def read_deployment(path: Path) -> Deployment:
    """Return the deployment at ``path``."""
    path = path.absolute()
    try:
        return Deployment(path=path, **read_document(path / "deployment.json"))
    except (OSError, ValueError, TypeError):
        raise InputError(f"{path}: not a deployment; `fedtmle deploy init` makes one") from None


def _without_path(described: Kit | Deployment) -> Document:
    """Return the fields to write down: a folder may be moved, so its path is not one of them."""
    return {name: value for name, value in asdict(described).items() if name != "path"}

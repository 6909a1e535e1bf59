"""Start-up kits, one for each party, the deployment that holds them, and the permissions of the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from fedtmle.errors import InputError
from fedtmle_core.journal import Document, read_document, write_document


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


# The permissions of a party's engine: FLARE's configuration of each site, which denies all but a few rights.
#
# A silo builds two classes and no other, runs no code that a job brings, streams no log, and opens no shell
# to an administrator.

ADMIN_ROLE = "lead"
CLASSES = {
    Role.SILO: [
        "nvflare.collab.runtime.executor.CollabExecutor",
        "fedtmle.engine.flare_silo.SiloEnd",
    ],
    Role.SERVER: [
        "nvflare.collab.runtime.controller.CollabController",
        "fedtmle.engine.flare.Coordinator",
    ],
}
POSTS = {Role.SILO: "fedtmle.engine.flare_post.SiloPost", Role.SERVER: "fedtmle.engine.flare_post.ServerPost"}
MAX_JOBS = 32  # runs at the same time; one that waits is no job
UNWANTED = ("site_log_streamer", "log_receiver")

# "n:submitter" is the submitter of the job. A right that is not named is denied.
RIGHTS = {
    "submit_job": "any",
    "manage_job": "n:submitter",
    "view": "any",
    "clone_job": "none",
    "download_job": "none",
    "operate": "none",
    "shell_commands": "none",
    "byoc": "none",
    "server-predeployed-flwr": "none",
}
# Without a ping a connection whose other end is gone looks alive for a quarter of an hour.
MAX_FRAME = (2 << 30) - (2 << 20)  # bytes; FLARE's own limit, which our options would replace
COMMUNICATION = {
    # To a party's own jobs: FLARE's default is clear TCP, which any account of the machine can join.
    "internal": {"scheme": "tcp", "resources": {"host": "localhost", "connection_security": "mtls"}},
    "grpc": {
        "options": [
            ["grpc.max_send_message_length", MAX_FRAME],
            ["grpc.max_receive_message_length", MAX_FRAME],
            ["grpc.keepalive_time_ms", 20_000],
            ["grpc.keepalive_timeout_ms", 10_000],
            # Otherwise a keepalive waits up to 60 s for the answer to gRPC's own bandwidth ping.
            ["grpc.http2.ping_timeout_ms", 10_000],
            ["grpc.keepalive_permit_without_calls", 1],
            ["grpc.http2.max_pings_without_data", 0],
            ["grpc.http2.min_ping_interval_without_data_ms", 10_000],
            ["grpc.http2.min_recv_ping_interval_without_data_ms", 10_000],
        ]
    },
}
AUTHORIZATION = {"format_version": "1.0", "permissions": {ADMIN_ROLE: RIGHTS}}


def write_policy(kit: Kit) -> None:
    """Write our configuration into the kit's ``local`` folder, where it takes precedence over FLARE's."""
    local = kit.path / "local"
    write_document(local / "authorization.json", AUTHORIZATION)
    write_document(local / "comm_config.json", COMMUNICATION)
    write_document(local / "log_config.json", logging_of(read_document(local / "log_config.json.default")))
    write_document(
        local / "resources.json", resources(read_document(local / "resources.json.default"), kit.role)
    )


def resources(default: Document, role: Role) -> Document:
    """Return FLARE's resources with our class list and our post, and without its log streams."""
    parts = [part for part in default["components"] if part["id"] not in UNWANTED]
    for part in parts:
        if part["id"] == "job_scheduler":
            part["args"]["max_jobs"] = MAX_JOBS
    document = {
        **default,
        "class_list_enforcement_mode": "enforce",
        "class_allow_list": CLASSES[role],
        "components": [*parts, {"id": "fedtmle_post", "path": POSTS[role], "args": {}}],
    }
    if role is Role.SILO:
        document["allow_log_streaming"] = False
    return document


def place_storage(kit: Kit) -> None:
    """Let the server keep jobs and snapshots in its own folder; FLARE's default is a shared one."""
    path = kit.path / "local" / "resources.json"
    document = read_document(path)
    storage = document["snapshot_persistor"]["args"]["storage"]["args"]
    storage["root_dir"] = str(kit.path / "storage" / "snapshots")
    for part in document["components"]:
        if part["id"] == "job_manager":
            part["args"]["uri_root"] = str(kit.path / "storage" / "jobs")
    write_document(path, document)


def logging_of(default: Document) -> Document:
    """Return a logging configuration with warnings and errors only, to the party's own files.

    FLARE's default logs a line for each message, which takes a tenth of a round.
    """
    handlers = {name: default["handlers"][name] for name in ("logFileHandler", "errorFileHandler")}
    root = {"level": "WARNING", "handlers": list(handlers)}
    return {**default, "handlers": handlers, "loggers": {"root": root}}

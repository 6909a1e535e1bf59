"""The plan: all that a silo approves, as one canonical document with a digest; and the follower of a plan.

The server, every silo, a replay and an audit each hold a `Follower` of the same plan. Given the same
broadcasts they hold the same query at every round, so no query is ever sent.

The document names each class by its provenance (module, qualified name, distribution, version and, for
classes of other distributions, the digest of their files), not by a bare name. That look-up reads what is
installed, as an import does, and nothing else: no data, no clock.
"""

from __future__ import annotations

import base64
import csv
import dataclasses
import datetime
import enum
import hashlib
import inspect
import linecache
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from threading import Lock
from types import FunctionType
from typing import Any, Generic, NamedTuple, Self, TypeVar
from urllib.parse import unquote, urlsplit

import msgspec
import numpy as np

from fedtmle.errors import DecodeError, InputError
from fedtmle.model.budget import Privacy
from fedtmle.protocol.codes import Bits, decode, encode
from fedtmle.protocol.looks import LookGroups, Looks
from fedtmle.protocol.masked import MaskedForm
from fedtmle.protocol.masks import MOST_ROWS
from fedtmle.protocol.messages import WIRE_FORMAT
from fedtmle.protocol.outcome import Outcome
from fedtmle.protocol.query import VOID, Flow, Local, Query
from fedtmle.version import __version__
from fedtmle_core.version import __version__ as core_version

OWN = {"fedtmle": __version__, "fedtmle_core": core_version}  # this project's packages and their versions
FEWEST_MASKED = 3
NOTHING = Bits(0, b"")  # the broadcast of a round that is void
MOST_RELAYED = 50  # silos; with more, sending all answers to all silos takes too many bytes

Rows = TypeVar("Rows")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Member:
    """A silo of the roster, and its public keys of 32 bytes each.

    ``key`` (Ed25519) is for its signatures, empty where nothing is signed. ``mask_key`` (X25519) is for the
    masks that it shares with the others, empty where sums are open.
    """

    name: str
    key: bytes = b""
    mask_key: bytes = b""


class AbstractProgram(ABC, Generic[Rows]):
    """The program that every party runs: a frozen dataclass, all of whose fields are part of the plan."""

    @abstractmethod
    def flow(self, n: int) -> Flow[Outcome]:
        """Return the generator of queries over n pooled rows."""

    @abstractmethod
    def count(self, rows: Rows) -> int:
        """Return N_m."""

    @abstractmethod
    def smallest_part(self, rows: Rows) -> int:
        """Return the fewest rows that the program sets apart from the others, as in a fold."""

    def at(self, silo: str, rows: Rows) -> Rows:
        """Return the rows as the program reads them at ``silo``, with columns that follow from the plan."""
        return rows

    def alone(self, silo: str) -> Self:
        """Return the program of a run whose only party is ``silo``, as for a rehearsal."""
        return self.among((silo,))

    @property
    def goes_on(self) -> bool:
        """Whether a run goes on without the silos that refuse or are absent when it opens."""
        return False

    def among(self, silos: tuple[str, ...]) -> Self:
        """Return the program of a run over these silos of the roster."""
        return self

    @property
    def fewest_active(self) -> int | None:
        """The fewest silos whose fits are averaged, if silos may retire; None if none may."""
        return None

    def with_fewest_active(self, fewest: int) -> Self:
        """Return the program that averages the fits of no fewer silos than this, if silos may retire."""
        return self

    @property
    def privacy(self) -> Privacy | None:
        """The budget of differential privacy that the answers take; None if their sums have no noise."""
        return None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is run, on which silos, until when.

    ``program`` holds everything that decides what is asked: the problem or study, the algorithm, caps,
    bounds, seeds and the rules by which calibration sets grid, smoothness and tolerance. ``expires`` is
    the last day on which it may run. ``server`` is the public key (Ed25519) with which the server of a
    deployed run signs its requests; if it is empty, they are not signed. ``colluders`` is how many silos may
    lie about their rows, or share what they know, while the others' limits hold (`protocol.looks`).
    """

    program: AbstractProgram[Any]
    roster: tuple[Member, ...]
    expires: datetime.date | None = None
    server: bytes = b""
    colluders: int = 1

    def __post_init__(self) -> None:
        if not self.roster:
            raise InputError("silos: a study needs at least one")
        if len(set(self.silos)) < len(self.roster):
            raise InputError("silos: two of them have the same name")
        masked = [bool(member.mask_key) for member in self.roster]
        if any(masked) and not all(masked):
            missing = ", ".join(member.name for member in self.roster if not member.mask_key)
            raise InputError(f"keys: masked sums need a key for masks of every silo; {missing} has none")
        if any(masked) and len(self.roster) < FEWEST_MASKED:
            raise InputError(
                f"aggregation: masked sums need at least {FEWEST_MASKED} silos, not {len(self.roster)}"
            )
        if len({member.mask_key for member in self.roster}) < len(self.roster) and any(masked):
            raise InputError("keys: two silos have the same key for masks")
        if any(masked) and self.program.fewest_active is not None and len(self.roster) > MOST_RELAYED:
            raise InputError(
                f"aggregation: if silos may retire, each adds up the masked answers of all itself, which at "
                f"most {MOST_RELAYED} silos can, not {len(self.roster)}; ask for aggregation = 'open'"
            )

    @cached_property
    def silos(self) -> tuple[str, ...]:
        """The roster's names, in its order."""
        return tuple(member.name for member in self.roster)

    @property
    def is_masked(self) -> bool:
        """Whether silos send sums under masks."""
        return bool(self.roster[0].mask_key)

    @property
    def look_groups(self) -> LookGroups:
        """The groups of silos that judge their rows together under masks; none if each judges by its own."""
        return LookGroups.of(self.silos, self.colluders) if self.is_masked else LookGroups()

    @property
    def fewest_together(self) -> int:
        """The fewest silos whose total anybody learns under masks."""
        together = min(map(len, self.look_groups.groups), default=len(self.roster))
        active = self.fewest_active
        return together if active is None else min(together, active)

    @property
    def fewest_active(self) -> int | None:
        """The fewest silos whose fits are averaged, if silos may retire; None if none may.

        Under masks they are at least two more than may collude, so that what is left after the colluders
        subtract theirs is a total of two silos or more.
        """
        stated = self.program.fewest_active
        return stated if stated is None or not self.is_masked else max(stated, self.colluders + 2)

    def flow(self, n: int) -> Flow[Outcome]:
        """Return the generator of queries that the parties follow, over n pooled rows."""
        fewest = self.fewest_active
        return (self.program if fewest is None else self.program.with_fewest_active(fewest)).flow(n)

    def first_row(self, silo: str, stated: int) -> int:
        """Return where the rows of a silo start in the pooled order.

        Under masks nobody knows it, so that each silo has a range of numbers of its own.
        """
        return self.silos.index(silo) * MOST_ROWS if self.is_masked else stated

    @property
    def relays(self) -> bool:
        """Whether every silo receives all masked answers, signed, and adds them up itself."""
        return (
            self.is_masked and all(member.key for member in self.roster) and len(self.roster) <= MOST_RELAYED
        )

    def alone(self, silo: str) -> Plan:
        """Return the plan of a rehearsal: ``silo`` is the only party, and signs nothing."""
        program = self.program.alone(silo).with_fewest_active(1)
        return replace(self, program=program, roster=roster([silo]))

    def may_lack(self, absent: Sequence[str]) -> bool:
        """Return whether a run may go on without these silos; they are in the roster's order."""
        if not absent:
            return True
        named = [silo for silo in self.silos if silo in absent]
        return self.program.goes_on and list(absent) == named and len(named) < len(self.roster)

    def without(self, absent: Sequence[str]) -> Plan:
        """Return the plan of a run that goes on without these silos; its digest is another."""
        if not absent:
            return self
        rest = tuple(member for member in self.roster if member.name not in absent)
        program = self.program.among(tuple(member.name for member in rest))
        return replace(self, program=program, roster=rest)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical document; any change shows, the package's version included."""
        return hashlib.sha256(self.document).digest()

    @cached_property
    def brought(self) -> tuple[Provenance, ...]:
        """The classes in the plan that come from other packages than this one."""
        return brought(self.program)

    @cached_property
    def document(self) -> bytes:
        """The canonical document."""
        content = {
            "format": WIRE_FORMAT,
            "version": __version__,
            "program": canonical(self.program),
            "roster": canonical(self.roster),
            "expires": None if self.expires is None else self.expires.isoformat(),
            **({"server": self.server} if self.server else {}),
            **({"colluders": self.colluders} if self.colluders != 1 else {}),
        }
        return msgspec.msgpack.encode(content, order="deterministic")


def roster(names: Sequence[str]) -> tuple[Member, ...]:
    """Return the members of an embedded run, which sign nothing, from the silos' names."""
    return tuple(Member(name=str(name)) for name in names)


class _Path:
    """A plan's flow over n pooled rows, and the last round that it went through."""

    def __init__(self, plan: Plan, n: int) -> None:
        groups = plan.look_groups
        self.plan, self.n = plan, n
        self.looks = Looks(n, groups) if groups.groups else None
        flow = plan.flow(n)
        self._flow = flow if self.looks is None else self.looks.before(flow)
        self.query: Query | None = next(self._flow)
        self.may_be_void = self.looks is not None and self.looks.may_be_void
        self.outcome: Outcome | None = None
        self.round = 1
        self.heard: Bits | None = None  # the last broadcast
        self.pooled: object = None  # the last broadcast, decoded
        self.lock = Lock()

    def went_on(self, number: int, broadcast: Bits) -> bool:
        """Return whether round ``number`` is the last one that ended, and ended with this broadcast."""
        return self.round == number + 1 and self.heard == broadcast

    def go_on(self, query: Query, broadcast: Bits) -> None:
        """Read what was pooled for this round's query, and go to the next round."""
        is_void = self.may_be_void and not broadcast.length
        pooled = VOID if is_void else decode(query.pooled_code, broadcast)
        self.round, self.heard = self.round + 1, None  # if the flow raises, it does so for everyone
        try:
            self.query = self._flow.send(pooled)
        except StopIteration as stop:
            self.query, self.outcome = None, stop.value
        self.heard, self.pooled = broadcast, pooled
        self.may_be_void = self.looks is not None and self.looks.may_be_void


class Paths:
    """The flows that several parties of one process follow: each round is derived once for all of them.

    A query depends on the plan and on broadcasts alone, so that parties that heard the same have the same.
    """

    def __init__(self) -> None:
        self._paths: list[_Path] = []
        self._lock = Lock()

    def follow(self, plan: Plan, n: int) -> Follower:
        """Return a follower that shares its rounds with the others of the same plan object."""
        with self._lock:
            for path in self._paths:
                if path.plan is plan and path.n == n and path.round == 1:
                    return Follower(plan, n, path)
            self._paths.append(_Path(plan, n))
            return Follower(plan, n, self._paths[-1])


class Follower:
    """A plan's flow over n pooled rows, at the round that it has reached."""

    def __init__(self, plan: Plan, n: int, path: _Path | None = None) -> None:
        self._path = path or _Path(plan, n)
        self._query, self._outcome = self._path.query, self._path.outcome
        self._may_be_void = self._path.may_be_void
        self._form: MaskedForm | None = None
        self._broadcasts: list[Bits] = []  # the broadcasts that this party received
        self.round = 1

    @property
    def looks(self) -> Looks | None:
        """What is public about the rows of all silos of a masked session, in this round."""
        if self._path.looks is not None and self._path.round != self.round:
            self._leave()
        return self._path.looks

    @property
    def query(self) -> Query:
        """The query of this round."""
        if self._query is None:
            raise DecodeError("the run has ended, yet an answer is expected")
        return self._query

    @property
    def outcome(self) -> Outcome | None:
        """How the run ended; None while it goes on."""
        return self._outcome

    def pool(self, answers: Mapping[str, object], sizes: Mapping[str, int]) -> Bits:
        """Return this round's broadcast; the server does this."""
        return encode(self.query.pooled_code, self.query.pool(answers, sizes))

    @property
    def masked_form(self) -> MaskedForm:
        """How the answers of this round are written under masks."""
        form = self._form
        if form is None or form.query is not self.query or form.may_be_void is not self._may_be_void:
            form = self._form = MaskedForm(self.query, self._may_be_void)
        return form

    def pool_masked(self, payloads: Mapping[str, Bits]) -> Bits:
        """Return this round's broadcast from masked answers; any party that has them all can do this."""
        pooled = self.masked_form.pool(payloads)
        return NOTHING if pooled is VOID else encode(self.query.pooled_code, pooled)

    def hear(self, broadcast: Bits) -> object:
        """Go on to the next round; return what was pooled in this one.

        The server too goes on from what it sent, decoded as the silos decode it.
        """
        query = self.query
        with self._path.lock:
            if self._path.round != self.round and not self._path.went_on(self.round, broadcast):
                self._leave()
            path = self._path
            try:
                if path.round == self.round:
                    path.go_on(query, broadcast)
            finally:
                self.round = path.round
            self._query, self._outcome = path.query, path.outcome
            self._may_be_void = path.may_be_void
            pooled = path.pooled
        self._broadcasts.append(broadcast)
        return pooled

    def _leave(self) -> None:
        """Follow the flow alone from here on."""
        alone = Follower(self._path.plan, self._path.n)
        for broadcast in self._broadcasts:
            alone.hear(broadcast)
        self._path = alone._path


def follow_alone(flow: Flow[Result], local: Local) -> Result:
    """Return the result of a flow whose only party is one silo: nothing is sent."""
    pooled: object = None
    while True:
        try:
            query = flow.send(pooled)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]  # mypy does not follow a generator's result
        pooled = query.pool({local.name: query.answer(local)}, {local.name: local.n_rows})


def canonical(value: object) -> object:
    """Return ``value`` as plain data.

    A dataclass is the provenance of its class and its compared fields; an array is its type, shape and bytes;
    a sequence other than a list or a tuple is the provenance of its class and its items.
    """
    cls: type = type(value)
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, np.generic):  # before float: a numpy float is one
        return value.item()
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, np.ndarray):
        return [value.dtype.str, list(value.shape), np.ascontiguousarray(value).tobytes()]
    if dataclasses.is_dataclass(value):
        fields = {f.name: canonical(getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare}
        return [provenance(cls), fields]
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, Sequence):
        items = [canonical(item) for item in value]
        return items if cls in (list, tuple) else [provenance(cls), items]
    raise TypeError(f"a {cls.__name__} cannot be part of a plan")


class Provenance(NamedTuple):
    """Where a class comes from; ``digest`` is None for a class of this project, which its version names."""

    module: str
    name: str
    distribution: str | None
    version: str | None
    digest: str | None

    @property
    def source(self) -> str:
        """The distribution that brought the class or, if none did, its module."""
        return self.distribution or self.module

    def __str__(self) -> str:
        version = f" {self.version}" if self.version else " (not installed)"
        return f"{self.name} of {self.source}{version}, files {(self.digest or 'not readable')[:16]}"


@cache
def provenance(cls: type) -> Provenance:
    """Return module, qualified name, distribution, version and digest of ``cls``.

    For a class of this package or of its core, distribution and version identify the code and the digest is
    None.
    For a class of another distribution the digest is the SHA-256 of all files that the distribution
    installed, each of which must be the one that its RECORD lists; in development mode, of all
    files of the package's folder, which is the same if the wheel has the same files. For a class that was
    not installed (``__main__``, a module beside the study file) distribution and version are None,
    and the digest is that of the text of the file that defines it; in a notebook the file is the
    cell. Base classes outside these packages and the standard library count too. Two parties
    therefore agree only if they hold the same files. A silo cannot import a class of ``__main__``, so
    move such a class to a module before a run over several machines; in one process ``__main__``
    works as it is.

    The digest is None if no text can be read (a class typed at the interactive prompt): then only the
    names distinguish two classes. It does not cover other distributions that the class imports.
    """
    package = _top_level(cls)
    if package in OWN:
        return Provenance(cls.__module__, cls.__qualname__, package.replace("_", "-"), OWN[package], None)
    installed = _distribution(cls.__module__)
    name, version = (None, None) if installed is None else (installed.name, installed.version)
    return Provenance(cls.__module__, cls.__qualname__, name, version, _digest(cls))


def brought(value: object) -> tuple[Provenance, ...]:
    """Return the provenance of every class in ``value`` that is not of this project, as `canonical` walks."""
    found: dict[Provenance, None] = {}

    def walk(part: object) -> None:
        kind: type = type(part)
        if isinstance(part, Mapping):
            items: Iterable[object] = part.values()
        elif dataclasses.is_dataclass(part):
            items = [getattr(part, f.name) for f in dataclasses.fields(part) if f.compare]
        elif isinstance(part, Sequence) and not isinstance(part, str | bytes):
            items = part
        else:
            return
        if _top_level(kind) not in (*OWN, *sys.stdlib_module_names):
            found[provenance(kind)] = None
        for item in items:
            walk(item)

    walk(value)
    return tuple(found)


def _top_level(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def _digest(cls: type) -> str | None:
    """Return a digest of the code behind a class that another distribution brings, base classes included."""
    known = {*OWN, *sys.stdlib_module_names}
    parts: dict[bytes, None] = {}
    for base in (base for base in cls.__mro__ if _top_level(base) not in known):
        installed = _distribution(base.__module__)
        if installed is not None:
            parts[files_digest(installed, base.__module__)] = None
        elif _text(base):
            parts[hashlib.sha256(_text(base).encode()).digest()] = None
        elif base is cls:
            return None
    return hashlib.sha256(b"".join(parts)).hexdigest()


def files_digest(installed: metadata.Distribution, module_name: str) -> bytes:
    """Return one SHA-256 over a distribution's files: their names and contents, in order of name.

    Files that an installer adds (of the folder .dist-info, scripts, byte code) do not count. An installed
    file that is not the one its RECORD lists is an `InputError`.
    """
    listed = _developed(module_name) if _is_editable(installed) else _verified(installed)
    lines = (path.encode() + b"\0" + digest for path, digest in sorted(listed.items()))
    return hashlib.sha256(b"".join(lines)).digest()


def _verified(installed: metadata.Distribution) -> dict[str, bytes]:
    """Return the digests of the files that a distribution installed, after a comparison with its RECORD."""
    root, listed = Path(str(installed.locate_file(""))), {}
    for path, stated in _record(installed).items():
        if path.startswith("..") or path.endswith(".pyc") or ".dist-info/" in path or not stated:
            continue
        actual = hashlib.sha256((root / path).read_bytes()).digest()
        if f"sha256={base64.urlsafe_b64encode(actual).rstrip(b'=').decode()}" != stated:
            raise InputError(
                f"{installed.name} {installed.version}: the file {path} is not the one that was installed "
                "(RECORD lists another digest); install the distribution again"
            )
        listed[path] = actual
    return listed


def _record(installed: metadata.Distribution) -> dict[str, str]:
    """Return the files that a distribution's RECORD lists, each with its stated digest."""
    lines = csv.reader((installed.read_text("RECORD") or "").splitlines())
    return {line[0]: line[1] for line in lines if len(line) == 3}


def _developed(module_name: str) -> dict[str, bytes]:
    """Return the digests of all files of the package that a module belongs to, or of the module alone."""
    top = Path(str(sys.modules[module_name.partition(".")[0]].__file__))
    files = [top] if top.name != "__init__.py" else [f for f in top.parent.rglob("*") if f.is_file()]
    root = top.parent if top.name != "__init__.py" else top.parent.parent
    return {
        file.relative_to(root).as_posix(): hashlib.sha256(file.read_bytes()).digest()
        for file in files
        if file.suffix != ".pyc"
    }


def _text(cls: type) -> str:
    """Return the text of the file or notebook cell that defines ``cls``, empty if there is none.

    The code of its functions names the file, also for a notebook and for a module that was loaded
    again since. A class without functions has the file of its module.
    """
    files = {function.__code__.co_filename for function in _functions(cls)}
    text = "".join(line for file in sorted(files) for line in linecache.getlines(file))
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return text or "".join(linecache.getlines(file) if file else ())


def _functions(cls: type) -> Iterator[FunctionType]:
    """Yield the functions in the body of ``cls``, those of properties and class methods included."""
    for member in vars(cls).values():
        function = member
        for name in ("__func__", "fget", "func"):
            function = getattr(function, name, function)
        if isinstance(function, FunctionType) and function.__module__ == cls.__module__:
            yield inspect.unwrap(function)


@cache
def _distribution(module_name: str) -> metadata.Distribution | None:
    """Return the distribution that installed a module, None if none did.

    A distribution installed a file that its RECORD lists. One in development mode lists none: it
    is recognised if it has the name of the top-level package and its directory contains the file.
    `importlib.metadata.packages_distributions` would parse the list of every distribution.
    """
    file = getattr(sys.modules.get(module_name), "__file__", None)
    if module_name == "__main__" or file is None:
        return None
    path = Path(file)
    for candidate in metadata.distributions(name=module_name.partition(".")[0]):
        if _lists(candidate, path) or _is_developed_at(candidate, path):
            return candidate
    for candidate in metadata.distributions():
        if _lists(candidate, path):
            return candidate
    return None


def _lists(distribution: metadata.Distribution, path: Path) -> bool:
    root = Path(str(distribution.locate_file("")))
    if not path.is_relative_to(root):
        return False
    return f"\n{path.relative_to(root).as_posix()}," in "\n" + (distribution.read_text("RECORD") or "")


class _DirectoryInfo(msgspec.Struct, frozen=True):
    editable: bool = False


class _Origin(msgspec.Struct, frozen=True):
    """Where a distribution was installed from: `direct_url.json`, PEP 610."""

    url: str = ""
    dir_info: _DirectoryInfo = _DirectoryInfo()


def _is_editable(distribution: metadata.Distribution) -> bool:
    return _origin(distribution).dir_info.editable


def _is_developed_at(distribution: metadata.Distribution, path: Path) -> bool:
    origin = _origin(distribution)
    return origin.dir_info.editable and path.is_relative_to(unquote(urlsplit(origin.url).path))


def _origin(distribution: metadata.Distribution) -> _Origin:
    return msgspec.json.decode(distribution.read_text("direct_url.json") or "{}", type=_Origin)

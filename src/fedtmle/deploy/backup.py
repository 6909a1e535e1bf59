"""Back up what a party must not lose, while it runs; restore it without ever answering a plan twice.

A backup is always older than the last answer that left the silo, as far as anybody can tell. So a silo that
was restored closes every plan that it may have answered since: whatever is not shown, by an intact ledger or
journal in place, to be as it was. The study is run again with another seed, which is another plan. Files in
place that are intact and newer are kept, and files that are replaced are put aside, never deleted.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath

from fedtmle.deploy.kits import Kit, Role, read_kit
from fedtmle.deploy.processes import running
from fedtmle.engine.post import approvals_of, close_plans, located_by, silo_folder
from fedtmle.errors import FedTMLEError, InputError
from fedtmle.runtime.ledger import read, scopes
from fedtmle_core.home import Home, records_folder
from fedtmle_core.journal import Document, read_document, scan, write_document

FORMAT = 1
LONGEST = 8 << 30  # bytes of one file in a backup
MANIFEST = "manifest.json"
KIT_FOLDERS = ("startup", "local")
OWN_FILES = (
    "kit.json",
    "key",
    "silo.json",
    "notice.json",
    "health.json",
    "sites.json",
    "revoked.json",
    "dispatcher.crt",
    "dispatcher.key",
)


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The outcome of a restoration."""

    put_back: list[str]
    kept: list[str]  # intact and at least as new as in the backup
    closed: list[str]  # plans that the silo no longer answers
    unknown: bool  # whether the silo may have answered plans of which it has no record
    forgotten: list[str]  # plans that were answered, and whose people the home no longer knows


def back_up(kit: Kit, target: Path) -> int:
    """Write a party's backup to a new file, for its owner alone; return the number of files in it.

    The party may run meanwhile. Files that only grow are read after their signed heads, the ledger before the
    journals. If a file that is read later has lines that an earlier one lacks, a restart repairs that as it
    does after a crash.
    """
    if kit.role is Role.ADMIN:
        raise InputError(f"{kit.path}: a statistician's kit has no records; give a server's or a silo's kit")
    files = dict(_contents(kit))
    manifest = {
        "format": FORMAT,
        "role": str(kit.role),
        "site": kit.site,
        "time": time.time(),
        "version": version("fedtmle"),
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    try:
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise InputError(f"{target}: the file exists; choose another name") from None
    with os.fdopen(handle, "wb") as out, tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, data in {MANIFEST: json.dumps(manifest).encode(), **files}.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode, entry.mtime = len(data), 0o600, int(time.time())
            archive.addfile(entry, io.BytesIO(data))
    return len(files)


def _contents(kit: Kit) -> Iterator[tuple[str, bytes]]:
    for path in sorted(path for folder in KIT_FOLDERS for path in (kit.path / folder).rglob("*")):
        if path.is_file():
            yield f"kit/{path.relative_to(kit.path).as_posix()}", path.read_bytes()
    for name in OWN_FILES:
        with suppress(FileNotFoundError):
            yield f"kit/fedtmle/{name}", (kit.home / name).read_bytes()
    if kit.role is Role.SERVER:
        for path in sorted((kit.path / "runs").glob("*/*")):
            if path.is_file() and path.suffix != ".new" and path.name != "lock":
                with suppress(FileNotFoundError):
                    yield f"kit/runs/{path.parent.name}/{path.name}", path.read_bytes()
        return
    silo_file = _silo_file(kit)
    yield "silo.toml", silo_file.read_bytes()
    folder, home = silo_folder(kit.home), located_by(kit.home).home
    shared = (path for path in home.rglob("*") if home / "hospitals" not in path.parents)
    for path in sorted([*shared, *folder.rglob("*")], key=_reading_order):
        if path.is_file() and path.suffix not in (".new", ".lock", ".parquet") and path.name != "lock":
            with suppress(FileNotFoundError):
                yield f"home/{path.relative_to(home).as_posix()}", _whole(path)


def _reading_order(path: Path) -> tuple[int, str]:
    """Sort heads before their files, ledgers before the journals, and the memory's sets to the end.

    A study is remembered before its first answer, so that a memory that is read after the ledger has all
    studies of the ledger.
    """
    order = {".head": 0, ".jsonl": 1, ".journal": 2}
    return (order.get(path.suffix, 3), str(path))


def _whole(path: Path) -> bytes:
    """Return a file of records, without a line that is being written."""
    data = path.read_bytes()
    return data[: data.rfind(b"\n") + 1] if path.suffix == ".jsonl" else data


def _silo_file(kit: Kit) -> Path:
    try:
        return Path(read_document(kit.home / "silo.json")["silo_file"])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(f"{kit.path}: the silo file is not known yet; there is nothing to back up") from None


def restore(archive: Path, target: Path, silo_file: Path | None = None) -> Restored:
    """Put a backup back: the kit at ``target``, which may be there or not, and the records of its party.

    ``silo_file`` is where a silo's file is or shall be; by default, where it was.
    """
    manifest, files = _read(archive)
    if (target / "fedtmle" / "kit.json").is_file():
        kit = read_kit(target)
        if (str(kit.role), kit.site) != (manifest["role"], manifest["site"]):
            raise InputError(f"{archive}: this is a backup of '{manifest['site']}', not of '{kit.site}'")
        if running(kit) is not None:
            raise InputError(f"{target}: it is running; stop it with `fedtmle {kit.role} stop {target}`")
    elif target.exists() and any(target.iterdir()):
        raise InputError(f"{target}: the folder is neither empty nor a kit; choose another")
    aside = f"replaced-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}"
    target.mkdir(parents=True, exist_ok=True, mode=0o700)
    of_kit = {name.removeprefix("kit/"): data for name, data in files.items() if name.startswith("kit/")}
    put_back, kept = _merge(of_kit, target.absolute(), target / "fedtmle" / aside)
    kit = read_kit(target)
    if kit.role is Role.SERVER:
        return Restored(put_back=put_back, kept=kept, closed=[], unknown=False, forgotten=[])
    if silo_file is not None:
        write_document(kit.home / "silo.json", {"silo_file": str(silo_file.absolute())})
    place = _silo_file(kit)
    if not place.is_file():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(files["silo.toml"])
        put_back.append(place.name)
    records = {n.removeprefix("home/"): d for n, d in files.items() if n.startswith("home/")}
    home = located_by(kit.home).home
    if (home / "key").exists() and (home / "key").read_bytes() != records.get("key"):
        raise InputError(
            f"{home}: a home with another key is here; move it away, or state another home in the silo file"
        )
    return _restore_records(kit, home, records, aside, put_back, kept, when=float(manifest["time"]))


def _restore_records(
    kit: Kit,
    home: Path,
    records: Mapping[str, bytes],
    aside: str,
    put_back: list[str],
    kept: list[str],
    *,
    when: float,
) -> Restored:
    folder = records_folder(home, kit.silo)
    ledger_in_place = _lines(folder / "ledger.jsonl")  # before anything is replaced; None: not intact
    journals_in_place = {path.stem for path in folder.glob("*.journal") if _is_intact_journal(path)}
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    restored, left = _merge(records, home, home / aside)
    own = {name.removeprefix(f"hospitals/{folder.name}/") for name in restored}
    ledger_stays = ledger_in_place is not None and "ledger.jsonl" not in own
    closed: list[str] = []
    if restored:
        begun = {line["plan"] for line in read(folder / "ledger.jsonl")} if ledger_stays else None
        approved = [plan for plan, each in approvals_of(kit.home).current().items() if each.approved]
        closed = [
            plan for plan in approved if plan not in journals_in_place and (begun is None or plan in begun)
        ]
        stamp = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(when))
        close_plans(kit.home, closed, note=f"restored from a backup of {stamp}")
    unknown = bool(restored) and not ledger_stays
    if unknown:
        # Plans that came after the backup are known to the server alone: its next notice lists them.
        write_document(kit.home / "restored.json", {"time": time.time(), "backup": when})
    return Restored(
        put_back=put_back + restored,
        kept=kept + left,
        closed=closed,
        unknown=unknown,
        forgotten=_forgotten(home, folder),
    )


def _forgotten(home: Path, folder: Path) -> list[str]:
    """Note and return the plans that the ledger in place has, and a memory from the backup lacks."""
    try:
        answered = scopes(read(folder / "ledger.jsonl"))
    except FileNotFoundError:
        answered = {}
    with Home.open(home).held() as opened:
        lacking = answered.keys() - {plan for plan, _ in opened.memory.plans}
    if lacking:
        with open(folder / "forgotten", "a", encoding="ascii") as file:
            file.write("".join(f"{plan}\n" for plan in sorted(lacking)))
    return sorted(lacking)


def _read(archive: Path) -> tuple[Document, dict[str, bytes]]:
    """Return the manifest and the files of a backup, each checked against its digest."""
    files: dict[str, bytes] = {}
    try:
        with tarfile.open(archive, mode="r:gz") as stored:
            for entry in stored:
                path = PurePosixPath(entry.name)
                if not entry.isfile() or path.is_absolute() or ".." in path.parts or entry.size > LONGEST:
                    raise InputError(f"{archive}: this is not a backup that `fedtmle deploy backup` made")
                opened = stored.extractfile(entry)
                files[entry.name] = b"" if opened is None else opened.read()
        manifest = json.loads(files.pop(MANIFEST))
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        if manifest["format"] != FORMAT or manifest["files"] != digests:
            raise InputError(f"{archive}: the backup is damaged; take another")
        return manifest, files
    except (tarfile.TarError, OSError, EOFError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{archive}: missing or damaged; expected a backup of fedtmle") from None


def _merge(files: Mapping[str, bytes], folder: Path, aside: Path) -> tuple[list[str], list[str]]:
    """Restore files that are missing, damaged or older than the backup; return those, and the ones kept."""
    history = _grown(files, folder)
    put_back, kept = [], []
    for name, data in files.items():
        path = folder / name
        if path.exists() and path.read_bytes() == data:
            continue
        if path.exists() and (_follows(name) in history or _is_newer(path, data)):
            kept.append(name)
            continue
        if path.exists():
            (aside / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.replace(aside / name)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        put_back.append(name)
    return put_back, kept


def _grown(files: Mapping[str, bytes], folder: Path) -> set[str]:
    """Return the files in place whose companions (head, status, result) must stay with them."""
    return {
        name for name, data in files.items() if (folder / name).exists() and _is_newer(folder / name, data)
    }


def _follows(name: str) -> str:
    """Return the growing file that this file belongs to, or the file itself."""
    path = PurePosixPath(name)
    if path.suffix == ".head":
        return str(path.with_suffix(".journal" if path.parts[0] == "people" else ".jsonl"))
    return str(path.parent / "journal") if path.parts[0] == "runs" else name


def _is_newer(path: Path, data: bytes) -> bool:
    """Return whether an intact file in place has all that the backup has, and more."""
    check: Callable[[Path], bool] | None = None
    if path.suffix == ".jsonl":
        check = _is_intact_text
    elif path.suffix == ".journal" or path.name == "journal":
        check = _is_intact_journal
    if check is None:
        return path.suffix not in (".head",)  # settings, keys: those in place are in use
    with suppress(OSError):
        here = path.read_bytes()
        return len(here) >= len(data) and here.startswith(_stable(path, data)) and check(path)
    return False


def _stable(path: Path, data: bytes) -> bytes:
    """Return the whole records of a journal, the whole lines of another file."""
    if path.suffix == ".jsonl":
        return data[: data.rfind(b"\n") + 1]
    ends = [end for _, _, end in scan(data, path)]
    return data[: ends[-1]] if ends else b""


def _is_intact_journal(path: Path) -> bool:
    try:
        for _ in scan(path.read_bytes(), path):
            pass
    except (FedTMLEError, OSError):
        return False
    return True


def _is_intact_text(path: Path) -> bool:
    return path.name != "ledger.jsonl" or _lines(path) is not None


def _lines(path: Path) -> int | None:
    """Return the number of lines of a ledger, None if it is missing or broken."""
    try:
        return sum(1 for _ in read(path))
    except (FedTMLEError, OSError):
        return None

"""Private folders for a run's copies of its state on this machine, in memory and on a disk."""

import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from megalith import disk
from megalith.fleet.secure import private
from megalith.fleet.secure.private import NotPrivate
from megalith.spec.fleet import FleetSpec

SHARED_MEMORY = Path("/dev/shm")
OWNER = "owner"  # the file that says which run has copies in a folder of shared memory, or of a disk


def memory_root(run_dir: Path, identity: str) -> Path:
    """Return the folder for a run's copies in memory, which depends on the run and `identity` only. A run folder that was removed
    and made again belongs to another run. If another user owns the folder, another name is used and reported."""
    return _root(copies_place(), run_dir, identity)


def disk_root(run_dir: Path, identity: str, fleet: FleetSpec) -> Path | None:
    """Return the folder for a run's copies on each node's disk; None if the run keeps no copies on disk."""
    return _root(_disk(fleet), run_dir, identity) if fleet.disk_every else None


def _root(place: Path, run_dir: Path, identity: str) -> Path:
    usual = place / f"{_family(run_dir)}-{_short(_name(run_dir) + identity)}"
    refused: NotPrivate | None = None
    try:
        for folder in (usual, *sorted(place.glob(f"{usual.name}-*"))):
            try:
                with private.opened(folder):
                    return folder
            except FileNotFoundError:
                continue
            except NotPrivate as error:
                refused = refused or error
        if refused is None:
            return usual
        return elsewhere(usual, refused)
    except OSError:  # away: the next write there reports it
        return usual


def elsewhere(root: Path, why: NotPrivate) -> Path:
    """Make and report a folder with an unpredictable name, because `root` belongs to another user or run. Raises OSError."""
    own = root.with_name(f"{root.name}-{secrets.token_hex(4)}")
    private.make(own)
    text = f"{why.filename}: {why.strerror}. Copies of the state are written to {own} instead of {root}"
    print(text, file=sys.stderr, flush=True)
    return own


def taken(root: Path) -> NotPrivate | None:
    """Return the reason why a folder is not private to this user; None if it is private, missing or unreadable."""
    try:
        with private.opened(root):
            return None
    except NotPrivate as error:
        return error
    except OSError:
        return None


def _disk(fleet: FleetSpec) -> Path:
    return Path(fleet.disk).resolve()


def copies_place() -> Path:
    """Return the folder in which runs on this machine keep their copies in memory."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def _name(run_dir: Path) -> str:
    path = run_dir.resolve() / "ranks" / "name"
    path.parent.mkdir(parents=True, exist_ok=True)
    disk.make_new(path, secrets.token_hex(8))
    return path.read_text()


def _family(run_dir: Path) -> str:
    return f"megalith-{_short(str(run_dir.resolve()))}"


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def clear_memory(run_dir: Path, *, keep: Path | None = None) -> None:
    """Remove copies in memory that earlier runs of this run folder left, and copies from which no run can resume."""
    _clear(copies_place(), run_dir, keep=keep)
    clear_abandoned(copies_place())


def clear_disk(run_dir: Path, fleet: FleetSpec, *, keep: Path | None = None) -> None:
    """Remove copies on this machine's disk that earlier runs of this run folder left. Copies of other run folders are kept,
    because those folders may not be mounted yet."""
    _clear(_disk(fleet), run_dir, keep=keep)


def _clear(place: Path, run_dir: Path, *, keep: Path | None) -> None:
    for old in place.glob(f"{_family(run_dir)}-*"):
        if old != keep and private.is_usable(old) and not _is_used(old):
            shutil.rmtree(old, ignore_errors=True)


def _is_used(memory: Path) -> bool:
    """True if a process has locked a folder of copies: a run may go on whose run folder was moved or removed."""
    try:
        with claimed(memory) as free:
            return free is None
    except OSError:  # nobody has claimed it
        return False


def clear_abandoned(place: Path) -> None:
    """Remove the copies in `place`, a folder in memory, from which no run can resume."""
    for old in place.glob("megalith-*"):
        if _is_abandoned(old):
            shutil.rmtree(old, ignore_errors=True)


def claim(memory: Path, owner: str) -> IO[str]:
    """Record the owner of a folder of copies, and lock the folder. The lock, which ends with this process, shows that the copies
    are in use, even to processes that cannot access the run folder."""
    private.make(memory)  # others have no business with a run's weights
    with private.opened(memory) as folder:
        file = os.fdopen(private.open_file(folder, memory / OWNER, os.O_RDWR | os.O_CREAT | os.O_APPEND), "a+", encoding="utf-8")
    fcntl.flock(file, fcntl.LOCK_EX)
    file.truncate(0)
    file.write(owner)
    file.flush()
    return file


@contextlib.contextmanager
def opened(memory: Path) -> Iterator[IO[str]]:
    """Open the file `owner` in a folder of copies. Raises OSError."""
    with private.opened(memory) as folder:
        descriptor = private.open_file(folder, memory / OWNER, os.O_RDONLY)
    with os.fdopen(descriptor, encoding="utf-8") as file:
        yield file


@contextlib.contextmanager
def claimed(memory: Path) -> Iterator[IO[str] | None]:
    """Lock a folder of copies while the block runs; yield its file `owner`, or None if a process of its run holds the lock. Raises
    OSError if it is not a folder of copies."""
    with opened(memory) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield file


def owner_text(run_dir: Path) -> str:
    """Return the text for the file `owner` in this run's folders of copies."""
    run = run_dir.resolve()
    return json.dumps({"run": str(run), "name": _name(run_dir), "mount": str(disk.mount_of(run) or "")})


def is_gone(owner: Mapping[str, str]) -> bool:
    """True if the run folder that `owner`, the content of such a file, names is gone or holds another run. A folder whose file system
    is not mounted is only away. Raises OSError if the folder cannot be read."""
    try:
        return (Path(owner["run"]) / "ranks" / "name").read_text(encoding="utf-8") != owner["name"]
    except (FileNotFoundError, NotADirectoryError):
        mount = owner.get("mount")  # earlier versions recorded none
        return not mount or os.path.ismount(mount)


def _is_abandoned(memory: Path) -> bool:
    try:
        with claimed(memory) as file:
            if file is None:
                return False
            owner = json.load(file)
        return is_gone(owner)
    except (OSError, ValueError, KeyError):  # just being made, away, or another user's
        return False

"""Functions for files on disks that may be full and file servers that may be unavailable, because a run must not fail if it
cannot write its logs."""

import contextlib
import errno
import io
import json
import os
import secrets
import stat
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

UNAVAILABLE = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EIO,
        errno.ESTALE,
        errno.ETIMEDOUT,
        errno.ENOTCONN,
        errno.ENODEV,
        errno.EHOSTDOWN,
    }
)
"""Error numbers of storage: a full disk or quota, a failing file system, or a file server that does not answer."""

AWAY = UNAVAILABLE | {errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM}
"""Error numbers that may be temporary for a path that was used before: "not found" or "permission denied" then does not mean that
the path is wrong."""


def is_unavailable(error: BaseException) -> bool:
    """True if the error is due to storage that is full or unavailable, perhaps temporarily, and not to the program."""
    return isinstance(error, OSError) and error.errno in UNAVAILABLE


def is_away(error: BaseException) -> bool:
    """True if an error on a path that was used before may mean that the path is only temporarily unavailable."""
    return isinstance(error, OSError) and error.errno in AWAY


def look(path: Path) -> os.stat_result | None:
    """Return the status of a path; None if nothing is there. Raises OSError if this cannot be told now: from Python 3.14 on,
    `Path.exists` and `Path.is_dir` then return False, and a run would take its store for empty."""
    try:
        return path.stat()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise


def is_there(path: Path) -> bool:
    """True if something is at a path. Raises OSError if this cannot be told now."""
    return look(path) is not None


def is_folder(path: Path) -> bool:
    """True if a path is a folder. Raises OSError if this cannot be told now."""
    found = look(path)
    return found is not None and stat.S_ISDIR(found.st_mode)


def is_file(path: Path) -> bool:
    """True if a path is a regular file. Raises OSError if this cannot be told now."""
    found = look(path)
    return found is not None and stat.S_ISREG(found.st_mode)


def leads_to(path: Path, inode: int) -> bool:
    """True if `path` is still the file with this inode, or if this cannot be determined."""
    try:
        return path.stat().st_ino == inode
    except OSError as error:
        return not isinstance(error, FileNotFoundError)


REPLACED = "the folder that was here was moved or removed, and another folder is here now"
"""Why `Place.away` refuses a folder that another one has replaced."""


def mount_of(path: Path) -> Path | None:
    """Return the mount point of the file system that holds an absolute path; None if none is found."""
    return next((above for above in (path, *path.parents) if os.path.ismount(above)), None)


class Place:
    """A folder that may become unavailable ("away"). A folder is away if it existed before and does not exist now, or if its file
    system is no longer mounted, because files must not be written to the empty mount point. It is away, too, while another folder is at
    its path, because the files there are another run's. `existed`: the folder existed before."""

    def __init__(self, folder: Path, *, existed: bool = False) -> None:
        self.folder = folder.resolve()
        self._seen = existed
        self._known: tuple[int, int] | None = None  # device and inode of the folder, since it was first seen or mounted
        self._mount = mount_of(self.folder)
        self.away()

    def away(self) -> str:
        """The reason why the folder cannot be used now; empty if it can."""
        if self._mount is not None and not os.path.ismount(self._mount):
            return f"nothing is mounted at {self._mount}"
        try:
            with os.scandir(self.folder):
                self._seen = True
            found = self.folder.stat()
        except OSError as error:
            if self._seen or not isinstance(error, FileNotFoundError | NotADirectoryError):
                return error.strerror or str(error)
            return ""
        now = found.st_dev, found.st_ino
        if self._known is None or now[0] != self._known[0]:  # a file system that is mounted again may number its files anew
            self._known = now
        return "" if now == self._known else REPLACED

    def make(self, folder: Path) -> None:
        """Make a folder inside this folder, which is also made if it never existed before. Raises OSError."""
        folder.mkdir(parents=not self._seen, exist_ok=True)


def make_within(root: Path, folder: Path) -> None:
    """Make a folder and its missing parents below `root`. Raises FileNotFoundError if `root` does not exist, because `root` may
    be temporarily unavailable, and a new folder would hide it."""
    for part in reversed(folder.relative_to(root).parents[:-1]):
        with contextlib.suppress(FileExistsError):
            (root / part).mkdir()
    folder.mkdir(exist_ok=True)


def bare_mount(path: Path, *, table: Path = Path("/etc/fstab")) -> Path | None:
    """Return the mount point in `table` that contains a path and is not mounted now; None if there is none."""
    try:
        fields = [line.split() for line in table.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return None
    points = {Path(row[1].replace("\\040", " ")) for row in fields if len(row) > 1 and not row[0].startswith("#")}
    absolute = path.absolute()
    return next((above for above in (absolute, *absolute.parents) if above in points and not os.path.ismount(above)), None)


def make_folder(folder: Path, *, asked: Path | None = None) -> None:
    """Make a folder and its parents if they are missing. Raises OSError with the name of the folder that the user asked for, and
    with what to do. `asked`: the folder to name in the error (default: `folder`).
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        advice = f"this folder cannot be made ({error.strerror}): choose another folder that you may write to"
        raise type(error)(error.errno, advice, str(asked or folder)) from error


def check_mounted(path: Path) -> None:
    """Raise OSError if a path lies at or under an unmounted mount point. Without the file system, the run would not find the
    checkpoints in it; mounted later, the file system would hide the files that the run wrote to the path."""
    if (mount := bare_mount(path)) is not None:
        why = f"no file system is mounted here, although /etc/fstab lists one, and {path} would be inside it"
        advice = f"{why}: mount this file system, or choose another folder"
        raise OSError(errno.ENODEV, advice, str(mount))


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file atomically: neither readers nor other writers ever see a partial file. If `path` is an empty folder, it is
    replaced. Raises IsADirectoryError if `path` is a folder that is not empty."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        remove_empty_folder(path)
        part.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise OSError(error.errno, error.strerror, str(path)) from error  # the user knows this name, not that of the part


NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""Error numbers of file systems that have no hard links: vfat, exfat, some of FUSE."""


def make_new(path: Path, text: str, *, mode: int | None = None) -> bool:
    """Make a file atomically with this text and mode. Return False, and change nothing, if something is at the path, even if another
    process makes it at the same time. On a file system without hard links, readers may find the file empty for a moment. Raises OSError."""
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        _create(part, text, mode)
        os.link(part, path)
    except FileExistsError:
        return part.stat().st_nlink == 2  # an answer that was lost, and asked for again, says so of our own
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        try:
            _create(path, text, mode)
        except FileExistsError:
            return False
        except OSError:  # a file that is cut off would look like another process's
            path.unlink(missing_ok=True)
            raise
    finally:
        part.unlink(missing_ok=True)
    return True


def _create(path: Path, text: str, mode: int | None) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666 if mode is None else mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        if mode is not None:
            with contextlib.suppress(PermissionError):  # a file system without modes
                os.fchmod(file.fileno(), mode)
        file.write(text)


def remove_empty_folder(path: Path) -> None:
    """Remove `path` if it is an empty folder, so that a file can be written there."""
    if path.is_dir():
        with contextlib.suppress(OSError):
            path.rmdir()


def appending(path: Path) -> io.FileIO:
    """Open a file for appending. An empty folder at `path` is replaced by the file."""
    remove_empty_folder(path)
    return path.open("ab", buffering=0)


def append(descriptor: int, line: bytes) -> None:
    """Append a line to a file that is open for reading and appending. If an earlier writer died within a line, its incomplete
    line is ended, and readers skip it. If `line` cannot be written completely, the written part is removed and OSError is
    raised."""
    size = os.fstat(descriptor).st_size
    whole = b"\n" * (size > 0 and os.pread(descriptor, 1, size - 1) != b"\n") + line
    written = os.write(descriptor, whole)
    if written < len(whole):
        if os.fstat(descriptor).st_size == size + written:  # nobody else has appended since
            os.ftruncate(descriptor, size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Journal:
    """Appends lines to a file whose disk may be full or unavailable, or which may be deleted. Lines that cannot be written wait
    in memory, where only the newest `most` lines are kept. No method raises an OSError.

    `renewed` returns the first lines for a new file after the old one was deleted, replaced or truncated. The argument of
    `renewed` is True if this journal made the new file, or found it empty. `existed`: the file's folder existed before.
    """

    def __init__(
        self, path: Path, *, most: int, renewed: Callable[[bool], Iterable[bytes]] = lambda made: (), existed: bool = False
    ) -> None:
        self._path, self._renewed = path, renewed
        self._place = Place(path.parent, existed=existed)
        self._waiting: deque[bytes] = deque(maxlen=most)
        self._file: int | None = None
        self._inode, self._size = 0, 0  # of the file that was written to last
        self._stopped: float | None = None  # since when nothing can be written, in monotonic seconds
        self._flush()

    def write(self, line: bytes) -> None:
        """Append a line, which must end in a line break. A line that cannot be written now is written before later lines."""
        self._waiting.append(line)
        self._flush()

    def _flush(self) -> None:
        waited = len(self._waiting)
        try:
            file = self._open()
            while self._waiting:
                append(file, self._waiting[0])
                self._waiting.popleft()
            self._size = os.fstat(file).st_size
        except OSError as error:
            if error.errno == errno.ESTALE:
                self._close()
            if self._stopped is None:
                self._stopped = time.monotonic()
                print(f"{self._path} cannot be written ({error.strerror}): new lines wait in memory", file=sys.stderr, flush=True)
            return
        if self._stopped is not None:
            seconds, self._stopped = time.monotonic() - self._stopped, None
            words = f"{self._path} can be written again after {seconds:.0f} s"
            print(f"{words}, with {waited} line{'s' * (waited != 1)} that had waited", file=sys.stderr, flush=True)

    def _open(self) -> int:
        if self._file is not None and not self._is_replaced(self._file):
            return self._file
        if why := self._place.away():
            raise OSError(errno.ENOENT, why, str(self._path))
        made = True
        remove_empty_folder(self._path)
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_EXCL, 0o644)
        except FileExistsError:
            made = False
            file = os.open(self._path, os.O_RDWR | os.O_APPEND)
        self._close()
        self._file, found = file, os.fstat(file)
        if self._inode and (found.st_ino != self._inode or found.st_size < self._size):
            self._waiting.extendleft(reversed(list(self._renewed(made or not found.st_size))))
        self._inode, self._size = found.st_ino, found.st_size
        return file

    def _is_replaced(self, file: int) -> bool:
        """True if the open file was deleted, replaced or truncated; False while its folder is away."""
        mine = os.fstat(file)
        try:
            there = self._path.stat()
        except FileNotFoundError:
            return not self._place.away()
        except OSError:
            return False
        return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino) or mine.st_size < self._size

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    def close(self) -> None:
        """Write the waiting lines, and print the number of lines that could not be written."""
        self._flush()
        if self._waiting:
            print(f"the last {len(self._waiting)} lines of {self._path} could not be written", file=sys.stderr, flush=True)
        self._close()


def lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file with their line breaks; an incomplete last line has none. If the file does not exist, there
    are no lines."""
    if not is_there(path):
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        yield from file


def parse(line: str) -> dict[str, Any] | None:
    """Return the JSON object in a line; None if the line is incomplete or has other content."""
    if not line.endswith("\n"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@contextlib.contextmanager
def if_available(path: Path | None = None) -> Iterator[None]:
    """End the block without an exception on an OSError that may mean that a path is temporarily unavailable. The first such error of `path`
    is reported; later ones are not, until a block with `path` has ended without such an error. Raises any other OSError."""
    try:
        yield
        _UNAVAILABLE.discard(path)
    except OSError as error:
        if not is_away(error):
            raise
        if path is not None and path not in _UNAVAILABLE:
            _UNAVAILABLE.add(path)
            print(f"{path} cannot be written ({error.strerror}): continuing without it", file=sys.stderr, flush=True)


_UNAVAILABLE: set[Path | None] = set()


class Output(io.FileIO):
    """Output of a process to a pipe that may be closed, or to a disk that may be full or unavailable. Output that cannot be
    written is dropped, and the process continues. `lost`: number of dropped bytes. `why`: the first reason."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.lost, self.why = 0, ""

    def write(self, data: object) -> int:
        """Write bytes; return the number of bytes that were written or dropped."""
        size = memoryview(data).nbytes  # type: ignore[arg-type]
        try:
            return super().write(data) or 0  # type: ignore[arg-type]
        except OSError as error:
            self.lost, self.why = self.lost + size, self.why or error.strerror or str(error)
            return size


def text_output(output: Output, *, encoding: str = "utf-8", errors: str = "backslashreplace") -> io.TextIOWrapper:
    """Return a line-buffered text stream over an `Output`."""
    return io.TextIOWrapper(io.BufferedWriter(output), encoding=encoding, errors=errors, line_buffering=True)

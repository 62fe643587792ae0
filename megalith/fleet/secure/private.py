"""Folders and files that only this user can access, in places open to all users: /dev/shm, a scratch disk. In such places,
another user may first create a folder or link of the expected name. Therefore links are never followed, owner and mode are
checked on the opened folder, and files are opened relative to that folder.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO is opened at once, and then refused


class NotPrivate(PermissionError):  # noqa: N818  # it says what was found
    """A folder or file is a link, or another user owns it or may write to it. `path` names it."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(errno.EACCES, f"{why}: megalith does not read or write this path", str(path))
        self.path = path


def make(folder: Path) -> None:
    """Make a private folder if it does not exist, and its parents with the usual mode. Raises NotPrivate, OSError."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
        folder.chmod(0o700)  # whatever the umask took away
    with opened(folder):
        pass


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[int]:
    """Yield a descriptor of a private folder. Raises FileNotFoundError if the folder does not exist, and NotPrivate if it is a
    link, or if another user owns it or may write to it, because its content may come from this user. If other users may only
    read the folder, their access is removed.
    """
    descriptor = _open_folder(folder, None)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def opened_below(folder: Path, *, create: bool = False) -> Iterator[int]:
    """Yield a descriptor of a private folder whose parent is private too. The folder and its parent are checked, and are made if
    `create`."""
    if create:
        make(folder.parent)
    with opened(folder.parent) as root:
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder.name, 0o700, dir_fd=root)
                os.chmod(folder.name, 0o700, dir_fd=root)
        descriptor = _open_folder(folder, root)
        try:
            yield descriptor
        finally:
            os.close(descriptor)


def open_file(folder: int, path: Path, flags: int) -> int:
    """Open the file with the name of `path` in an opened folder. A new file is accessible to this user alone. Raises NotPrivate,
    OSError."""
    try:
        descriptor = os.open(path.name, flags | _FILE, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPrivate(path, "it is a link") from error
        raise type(error)(error.errno, error.strerror, str(path)) from error
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise NotPrivate(path, "it is not a regular file")
        _check_owner(path, found)
        if stat.S_IMODE(found.st_mode) != 0o600:
            os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_usable(folder: Path) -> bool:
    """True if a folder exists and is private. Raises any OSError that is not NotPrivate or FileNotFoundError."""
    try:
        with opened(folder):
            return True
    except (FileNotFoundError, NotPrivate):
        return False


def _open_folder(folder: Path, parent: int | None) -> int:
    try:
        descriptor = os.open(folder if parent is None else folder.name, _FOLDER, dir_fd=parent)
    except PermissionError as error:
        raise NotPrivate(folder, f"it belongs to user {_owner(folder)}, and user {os.geteuid()} may not open it") from error
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise NotPrivate(folder, "it is a link, or not a folder") from error
        raise
    try:
        found = os.fstat(descriptor)
        _check_owner(folder, found)
        mode = stat.S_IMODE(found.st_mode)
        if parent is None and mode & 0o022:
            raise NotPrivate(folder, f"other users may write to it (mode {mode:04o})")
        if mode != 0o700:
            os.fchmod(descriptor, 0o700)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check_owner(path: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid():
        raise NotPrivate(path, f"it belongs to user {found.st_uid}, not to user {os.geteuid()}")


def _owner(folder: Path) -> str:
    with contextlib.suppress(OSError):
        return str(folder.lstat().st_uid)
    return "unknown"

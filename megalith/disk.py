"""What is done without where a disk has no room, or a store is away: a run's notes about itself must not end it."""

import contextlib
import errno
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UNAVAILABLE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN})
"""No room, on the disk or within what its owner may use; a file system that fails, or whose server does not answer."""


def is_unavailable(error: BaseException) -> bool:
    """Whether storage is to blame, and not the program: it has no room, or is away. Either may pass."""
    return isinstance(error, OSError) and error.errno in UNAVAILABLE


def make_folder(folder: Path) -> None:
    """Make a folder that was asked for, and those above it, where they are not there yet. Raises OSError naming it, with the way out."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        advice = f"this folder cannot be made ({error.strerror}): choose another, or one you may write to"
        raise type(error)(error.errno, advice, str(folder)) from error


def append(descriptor: int, line: bytes) -> bool:
    """Append a line to a file that is open for reading and appending; False if not all of it could be written. What a writer before left
    of a line, when it died or could not write either, is a line of its own then: who reads the file leaves it out."""
    with if_available():
        size = os.fstat(descriptor).st_size
        whole = b"\n" * (size > 0 and os.pread(descriptor, 1, size - 1) != b"\n") + line
        return os.write(descriptor, whole) == len(whole)
    return False


def lines(path: Path) -> Iterator[str]:
    """Yield the lines of a text file, each with its line break; a torn last line has none. Yield nothing if there is no file."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace", newline="\n") as file:
        yield from file


def parse(line: str) -> dict[str, Any] | None:
    """Return the JSON object in a whole line; None for a torn line, or one that holds anything else."""
    if not line.endswith("\n"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@contextlib.contextmanager
def if_available(path: Path | None = None) -> Iterator[None]:
    """Leave the block when storage is unavailable, and go on without `path`, if one is given and so named. Raises any other OSError."""
    try:
        yield
    except OSError as error:
        if not is_unavailable(error):
            raise
        if path is not None:
            print(f"{path} cannot be written ({error.strerror}): going on without it", file=sys.stderr, flush=True)


class Output(io.FileIO):
    """A process's output to a disk that may be full, or away: what cannot be written is lost, and not the process."""

    def write(self, data: object) -> int:
        """Bytes taken."""
        with if_available():
            return super().write(data) or 0  # type: ignore[arg-type]
        return memoryview(data).nbytes  # type: ignore[arg-type]


def text_output(descriptor: int) -> io.TextIOWrapper:
    """Such an output as text, written line by line."""
    raw = io.BufferedWriter(Output(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)

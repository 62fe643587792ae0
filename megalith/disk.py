"""What is done without where a disk has no room: a run's notes about itself must not end it."""

import contextlib
import errno
import io
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def is_full(error: OSError) -> bool:
    """Whether there was no room, on the disk or within what its owner may use."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def append(descriptor: int, line: bytes) -> bool:
    """Append a line to a file that is open for reading and appending; False if there was no room for all of it. What a writer before left
    of a line, when it died or had no room either, is a line of its own then: who reads the file leaves it out."""
    size = os.fstat(descriptor).st_size
    whole = b"\n" * (size > 0 and os.pread(descriptor, 1, size - 1) != b"\n") + line
    try:
        return os.write(descriptor, whole) == len(whole)
    except OSError as error:
        if not is_full(error):
            raise
        return False


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The JSON objects of a file that is written so, one a line; none where there is no file. Torn lines are left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if line.endswith("\n"):
                with contextlib.suppress(json.JSONDecodeError):
                    yield json.loads(line)


@contextlib.contextmanager
def unless_full(path: Path) -> Iterator[None]:
    """Write to `path`, or say that there is no room for it and go on. Raises any other OSError."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        print(f"no room for {path}: going on without it", file=sys.stderr, flush=True)


class Output(io.FileIO):
    """A process's output to a disk that may be full: what there is no room for is lost, and not the process."""

    def write(self, data: object) -> int:
        """Bytes taken."""
        try:
            return super().write(data) or 0  # type: ignore[arg-type]
        except OSError as error:
            if not is_full(error):
                raise
            return memoryview(data).nbytes  # type: ignore[arg-type]


def text_output(descriptor: int) -> io.TextIOWrapper:
    """Such an output as text, written line by line."""
    raw = io.BufferedWriter(Output(descriptor, "wb", closefd=False))
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", line_buffering=True)

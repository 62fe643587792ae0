"""Another process that owns a run folder, and the content of a folder."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megalith.control.owner import hold


@contextmanager
def another_process(folder: Path) -> Iterator[int]:
    """A process that owns a folder while the block runs."""
    ready, said = os.pipe()
    done, go = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            with hold(folder):
                os.write(said, b"!")
                os.close(go)
                os.read(done, 1)
        finally:
            os._exit(0)
    os.read(ready, 1)
    try:
        yield process
    finally:
        for descriptor in (go, done, ready, said):
            os.close(descriptor)
        os.waitpid(process, 0)


def content(folder: Path) -> dict[str, bytes | None]:
    """Return every file of a folder with its content."""
    return {str(path): path.read_bytes() if path.is_file() else None for path in sorted(folder.rglob("*"))}

"""Files that must not change while a command runs: their digests at its start, and a check for changes."""

import contextlib
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path


class AlteredError(ValueError):
    """A sealed file has changed since the command began."""


def digest(content: bytes) -> str:
    """Return the digest that seals a file with this content."""
    return hashlib.sha256(content).hexdigest()


def seal(paths: Iterable[Path]) -> dict[str, str]:
    """Return the digest of each file, by absolute path. Raises OSError for a file that cannot be read."""
    return {str(path.resolve()): digest(path.read_bytes()) for path in paths}


def read(path: Path, sealed: Mapping[str, str]) -> bytes:
    """Return the content of a file. Raises AlteredError if the file is sealed and has changed, OSError if it cannot be read."""
    content = path.read_bytes()
    before, now = sealed.get(str(path.resolve())), digest(content)
    if before not in (None, now):
        raise AlteredError(
            f"{path} was changed while this run was in progress: its sha256 was {before[:12]}... when the command began, and is now "
            f"{now[:12]}... No rank is started with the new content. Restore the file or leave it as it is now, and start the command again"
        )
    return content


@contextlib.contextmanager
def unchanged(sealed: Mapping[str, str]) -> Iterator[None]:
    """Check sealed files before and after the block, so that the block reads unchanged files. Raises as `check` does."""
    check(sealed)
    yield
    check(sealed)


def check(sealed: Mapping[str, str]) -> None:
    """Raise AlteredError for the first sealed file that has changed, OSError for one that cannot be read."""
    for path in sealed:
        read(Path(path), sealed)

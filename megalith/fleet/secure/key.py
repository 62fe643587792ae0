"""The key of a run: a secret that only the run's own processes know.

The key comes from the environment, from a file that the launcher names, or from the run folder. The key is never an argument, and
never written to a log, a report, `spec.json` or a job file.
"""

import hmac
import os
import secrets
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megalith import disk

VARIABLE, FILE_VARIABLE = "MEGALITH_KEY", "MEGALITH_KEY_FILE"
MIN_CHARACTERS = 32
MAC_BYTES = 32
_MAX_BYTES = 4096  # of a key file that is read


class NoKey(RuntimeError):  # noqa: N818  # it says what is missing
    """The run's key is missing, or other users can read it."""


@dataclass(frozen=True)
class Key:
    """A run's key. `text` is the shared secret, which `repr` does not show."""

    text: str = field(repr=False)

    def mac(self, purpose: str, *parts: bytes) -> bytes:
        """Return the HMAC-SHA256 of `parts`, 32 bytes. The MAC also depends on `purpose` and on the division of the bytes into
        parts."""
        message = b"".join(len(part).to_bytes(8, "big") + part for part in (purpose.encode(), *parts))
        return hmac.digest(self.text.encode(), message, "sha256")

    def proves(self, mac: bytes, purpose: str, *parts: bytes) -> bool:
        """Check a MAC over `parts`, in constant time."""
        return hmac.compare_digest(mac, self.mac(purpose, *parts))

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that pass the key to child processes."""
        return {VARIABLE: self.text}


def new() -> Key:
    """Generate a random key of 256 bits, as 64 hexadecimal digits."""
    return Key(secrets.token_hex(32))


def path_in(run_dir: Path) -> Path:
    """Return the path of the key file in a run folder."""
    return run_dir.resolve() / "ranks" / "key"


def given(environment: Mapping[str, str] = os.environ) -> Key | None:
    """Return the key that the launcher set, in MEGALITH_KEY or in the file that MEGALITH_KEY_FILE names; None if neither is set.
    Raises NoKey for a key that is too short, or a file that is missing or that other users may read.
    """
    if text := environment.get(VARIABLE, "").strip():
        return _checked(text, VARIABLE)
    if name := environment.get(FILE_VARIABLE):
        try:
            return _checked(_read(Path(name)), name)
        except FileNotFoundError:
            raise NoKey(
                f"{FILE_VARIABLE} names {name}, which does not exist. Make a key in the run folder with: megalith key RUN_DIR, and name "
                f"its file, or set {VARIABLE}"
            ) from None
    return None


def of_run(run_dir: Path, environment: Mapping[str, str] = os.environ) -> Key:
    """Return the key of a run whose processes are all on this machine: the launcher's key, or the key file in the run folder,
    which is made if it is missing or damaged. If other users can read the file, only a warning is printed, because some file
    systems have no file modes, and this key protects no port. Raises NoKey if the file belongs to another user, and OSError.
    """
    if (key := given(environment)) is not None:
        return key
    path = path_in(run_dir)
    make(run_dir)
    try:
        return _checked(_read(path, warn_only=True), str(path))
    except _Damaged as error:
        print(
            f"{error}. A new key is made, so copies of the state that were written with the old key cannot be used",
            file=sys.stderr,
            flush=True,
        )
        path.unlink(missing_ok=True)
        make(run_dir)
        return _checked(_read(path, warn_only=True), str(path))


def shared(run_dir: Path, environment: Mapping[str, str] = os.environ) -> Key:
    """Return the key of a run on several machines: the launcher's key, or the key file in the run folder. Raises NoKey; if there
    is no key, the message has the command that makes one."""
    if (key := given(environment)) is not None:
        return key
    path = path_in(run_dir)
    try:
        return _checked(_read(path), str(path))
    except FileNotFoundError:
        raise NoKey(
            f"this run's machines need a key to authenticate each other: {VARIABLE} and {FILE_VARIABLE} are not set, and "
            f"{path} does not exist. Make the key once, with: megalith key {run_dir}"
        ) from None


def make(run_dir: Path) -> bool:
    """Write a new key into a run folder, readable by this user alone where the file system has modes. Return False, and
    change nothing, if a key exists. Raises OSError."""
    path = path_in(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True)
    return disk.make_new(path, new().text + "\n", mode=0o600)


class _Damaged(NoKey):
    """The key file does not contain a key."""


def _checked(text: str, source: str) -> Key:
    if len(text) < MIN_CHARACTERS or not text.isascii() or not text.isprintable():
        raise _Damaged(
            f"{source} holds no key: it has {len(text)} characters, but a key has at least {MIN_CHARACTERS}, all of them printable ASCII"
        )
    return Key(text)


def _read(path: Path, *, warn_only: bool = False) -> str:
    """Return the text of a key file. Raises NoKey if another user owns the file or (unless `warn_only`) can read it, and OSError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except PermissionError as error:
        raise NoKey(
            f"{path} cannot be read by user {os.geteuid()} ({error.strerror}). Set {VARIABLE}, or start as the file's owner"
        ) from None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise NoKey(f"{path} is not a regular file, so it holds no key. Remove {path}, or set {VARIABLE}")
        if found.st_uid not in (os.geteuid(), 0):
            raise NoKey(
                f"{path} belongs to user {found.st_uid}, not to {os.geteuid()}: it is not a secret. Remove the file, or set "
                f"{VARIABLE}"
            )
        if open_to := stat.S_IMODE(found.st_mode) & 0o077:
            why = f"other users can access {path} (mode {stat.S_IMODE(found.st_mode):04o}, where bits {open_to:04o} must be off)"
            if not warn_only:
                raise NoKey(
                    f"{why}: it is not a secret. Remove the file, and make another key in the run folder with: megalith key RUN_DIR; "
                    f"or set {VARIABLE}"
                )
            print(f"warning: {why}: chmod 600 it", file=sys.stderr, flush=True)
        return file.read(_MAX_BYTES).decode("ascii", errors="replace").strip()

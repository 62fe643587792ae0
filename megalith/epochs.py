"""File names for each owner of a run folder, so that nothing that an earlier owner may still write is ever read.

An owner that was suspended until another took its place may wake up and finish a write. So owners that may overlap have
different epochs. Files of epoch 0 have the plain names, `events.jsonl` and `checkpoints/`; epoch 2 writes `events-2.jsonl` and
`checkpoints-2/`. Readers use the file with the highest number. A new epoch starts from the previous one's content: files are
copied, and folders are renamed atomically, so that no path of an earlier owner leads into them.
"""

import errno
import re
import secrets
import shutil
from pathlib import Path

VARIABLE = "MEGALITH_EPOCH"
"""Environment variable with the owner's epoch; absent: 0."""

COPIED = ("events.jsonl", "nodes.jsonl", "ranks/fleet.json")
MOVED = ("checkpoints",)


def name(file: str, epoch: int) -> str:
    """Return the name that an epoch has for a file or folder, such as "events-2.jsonl"."""
    stem, dot, ending = file.partition(".")
    return f"{stem}-{epoch}{dot}{ending}" if epoch else file


def newest(run_dir: Path, file: str) -> Path:
    """Return the path of a file or folder under the name of the newest epoch that has it; epoch 0's if none has."""
    return run_dir / name(file, max(_there(run_dir, file), default=0))


def last(run_dir: Path) -> int:
    """Return the newest epoch of a run folder, as its files say."""
    return max((number for file in (*COPIED, *MOVED) for number in _there(run_dir, file)), default=0)


def begin(run_dir: Path, epoch: int) -> None:
    """Give an epoch the content of the previous one. If this process is killed meanwhile, its successor completes the work.

    Raises OSError, naming the folder and a way out, where a folder cannot be renamed.
    """
    for file in COPIED:
        _copy(run_dir, file, epoch)
    for folder in MOVED:
        _move(run_dir, folder, epoch)


def _there(run_dir: Path, file: str, *, below: int | None = None) -> list[int]:
    """Return the epochs (only those less than `below`) that have a file or folder."""
    path = run_dir / file
    stem, dot, ending = path.name.partition(".")
    pattern = re.compile(rf"{re.escape(stem)}(?:-([1-9]\d*))?{re.escape(dot + ending)}")
    try:
        found = [int(match[1] or 0) for entry in path.parent.iterdir() if (match := pattern.fullmatch(entry.name))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [number for number in found if below is None or number < below]


def _copy(run_dir: Path, file: str, epoch: int) -> None:
    before = _there(run_dir, file, below=epoch)
    own = run_dir / name(file, epoch)
    if not before or own.exists():
        return
    part = own.with_name(f"{own.name}.{secrets.token_hex(4)}.tmp")
    shutil.copyfile(run_dir / name(file, max(before)), part)
    part.replace(own)


def _move(run_dir: Path, folder: str, epoch: int) -> None:
    own = run_dir / name(folder, epoch)
    while not own.is_dir():
        before = _there(run_dir, folder, below=epoch)
        if not before:
            own.mkdir()
            return
        old = run_dir / name(folder, max(before))
        try:
            old.rename(own)
        except FileNotFoundError:
            continue  # an earlier claimant has just moved it
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.EXDEV):
                raise
            reason = (
                f"{error.strerror}: it must be renamed to {own.name}, so that its last owner no longer writes there. "
                f"Replace it by a link to the folder"
            )
            raise OSError(error.errno, reason, str(old)) from error

"""Separate file names for each owner of a run folder, so that late writes of an earlier owner are never read.

A suspended owner may resume after another process has become the owner, and finish a write. Owners that may overlap in time therefore have
different numbers, called epochs. Files of epoch 0 have the plain names, `events.jsonl` and `checkpoints/`; epoch 2 writes `events-2.jsonl`
and `checkpoints-2/`. Readers use the file of the highest epoch, which is that of the newest owner. The first owner of an epoch starts with
the content of the previous epoch: it copies files, and renames folders atomically, so that paths held by an earlier owner become invalid.
"""

import errno
import re
import secrets
import shutil
from pathlib import Path

VARIABLE = "MEGALITH_EPOCH"
"""Environment variable with the owner's epoch; if it is not set, the epoch is 0."""

COPIED = ("events.jsonl", "nodes.jsonl", "ranks/fleet.json")
MOVED = ("checkpoints",)


def name(file: str, epoch: int) -> str:
    """Return the name of a file or folder in an epoch, such as "events-2.jsonl"."""
    stem, dot, ending = file.partition(".")
    return f"{stem}-{epoch}{dot}{ending}" if epoch else file


def newest(run_dir: Path, file: str) -> Path:
    """Return the path of a file or folder in the newest epoch that has it. If no epoch has it, return the path in epoch 0."""
    return run_dir / name(file, max(_there(run_dir, file), default=0))


def last(run_dir: Path) -> int:
    """Return the highest epoch (number of an owner) in the file names of a run folder; 0 if no name has a number."""
    return max((number for file in (*COPIED, *MOVED) for number in _there(run_dir, file)), default=0)


def begin(run_dir: Path, epoch: int) -> None:
    """Copy the files and move the folders of the previous epoch to their names in the new epoch. If this process is killed meanwhile,
    its successor completes the work.

    Raises OSError, with the folder and a way out, if a folder cannot be renamed.
    """
    for file in COPIED:
        _copy(run_dir, file, epoch)
    for folder in MOVED:
        _move(run_dir, folder, epoch)


def _there(run_dir: Path, file: str, *, below: int | None = None) -> list[int]:
    """Return the epochs in which a file or folder exists; only those less than `below`, if it is given."""
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
    if not before or epoch in _there(run_dir, file):
        return
    part = own.with_name(f"{own.name}.{secrets.token_hex(4)}.tmp")
    shutil.copyfile(run_dir / name(file, max(before)), part)
    part.replace(own)


def _move(run_dir: Path, folder: str, epoch: int) -> None:
    own = run_dir / name(folder, epoch)
    while epoch not in _there(run_dir, folder):
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
                f"{error.strerror}: this folder must be renamed to {own.name}, so that the run's previous owner no longer writes "
                f"into it. "
                f"Mount or move this folder elsewhere, and put a symbolic link in its place"
            )
            raise OSError(error.errno, reason, str(old)) from error

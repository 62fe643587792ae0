"""Separate file names for each owner of a run folder, so that late writes of an earlier owner are never read.

A suspended owner may resume after another process has become the owner, and finish a write. Owners that may overlap in time therefore have
different numbers, called epochs. Files of epoch 0 have the plain names, `events.jsonl` and `checkpoints/`; epoch 2 writes `events-2.jsonl`
and `checkpoints-2/`. Readers use the file of the highest epoch, which is that of the newest owner. The first owner of an epoch starts with
the content of the previous epoch: it copies files, and renames folders atomically, so that paths held by an earlier owner become invalid.

A late write of an earlier owner may still replace the file with the plain name, which is a copy for people from epoch 1 on.
"""

import contextlib
import errno
import filecmp
import os
import re
import secrets
import shutil
from pathlib import Path

VARIABLE = "MEGALITH_EPOCH"
"""Environment variable with the owner's epoch; if it is not set, the epoch is 0."""

COPIES = ("tokenizer.json", "tokenizer_config.json")
"""Files that the first rank copies again, so an epoch begins without one that cannot be copied."""

DESCRIPTION = ("run.toml", "spec.json", "provenance.json", *COPIES)
"""Files that describe a run. A user may have a file such as `run-2.toml` too, so the number counts only if epoch 2 has begun."""

LOGS = ("events.jsonl", "nodes.jsonl", "ranks/fleet.json")
COPIED = (*DESCRIPTION, *LOGS)
"""In this order: an epoch has begun once it has a log."""

ANEW = ("ranks/steps",)
"""Folders that begin empty: the index of steps is made from the log again, because it must have no event that the log lacks."""

MOVED = ("checkpoints",)
SHOWN = ("ranks/times",)
"""Folders that are moved too, but are only shown, so a run goes on without their earlier content if they cannot be moved."""


def name(file: str, epoch: int) -> str:
    """Return the name of a file or folder in an epoch, such as "events-2.jsonl"."""
    stem, dot, ending = file.partition(".")
    return f"{stem}-{epoch}{dot}{ending}" if epoch else file


def mine() -> int:
    """Return the epoch of the owner that started this rank; 0 if the owner told none (as to all ranks but the first under torchrun)."""
    return int(os.environ.get(VARIABLE, "0"))


def newest(run_dir: Path, file: str) -> Path:
    """Return the path of a file or folder in the newest epoch that has it. If no epoch has it, return the path in epoch 0."""
    return run_dir / name(file, max(_there(run_dir, file), default=0))


def newest_or_plain(folder: Path, file: str) -> Path:
    """Like `newest`, but return the path in epoch 0 in a folder that one may enter but not list."""
    try:
        return newest(folder, file)
    except PermissionError:
        return folder / file


def own(run_dir: Path, file: str) -> Path:
    """Return the path of a file as the owner that started this rank wrote it; `newest` if the owner told no epoch."""
    return run_dir / name(file, mine()) if VARIABLE in os.environ else newest(run_dir, file)


def is_named(path: str | Path, file: str) -> bool:
    """True if the last part of a path is the name of `file` in some epoch."""
    return _pattern(file).fullmatch(Path(path).name) is not None


def without_numbers(text: str, file: str) -> str:
    """Return a text with the plain name of `file` in place of its names in epochs."""
    return _pattern(file).sub(file, text)


def names(run_dir: Path, file: str, epoch: int) -> list[Path]:
    """Return the paths of a file that people read too: its name in an epoch, which readers take, and its plain name, which people know."""
    return [run_dir / each for each in dict.fromkeys((name(file, epoch), file))]


def of_ranks(run_dir: Path, epoch: int) -> Path:
    """Return the folder of the ranks' logs and assignments in an epoch."""
    return run_dir / "ranks" / f"epoch-{epoch}" if epoch else run_dir / "ranks"


def last(run_dir: Path) -> int:
    """Return the highest epoch (number of an owner) in the file names of a run folder; 0 if no name has a number."""
    return max((number for file in (*LOGS, *ANEW, *MOVED, *SHOWN) for number in _there(run_dir, file)), default=0)


def begin(run_dir: Path, epoch: int) -> None:
    """Copy the files and move the folders of the previous epoch to their names in the new epoch. If this process is killed meanwhile,
    its successor completes the work.

    Raises OSError, with the folder and a way out, if a folder cannot be renamed.
    """
    for file in DESCRIPTION:
        with contextlib.suppress(*([OSError] if file in COPIES else [])):
            _copy(run_dir, file, epoch)
    for folder in ANEW:
        with contextlib.suppress(OSError):
            (run_dir / name(folder, epoch)).mkdir(exist_ok=True)
    for file in LOGS:
        _copy(run_dir, file, epoch)
    for folder in MOVED:
        _move(run_dir, folder, epoch)
    for folder in SHOWN:
        with contextlib.suppress(OSError):
            _move(run_dir, folder, epoch)
    _remove_old(run_dir, epoch)


def _remove_old(run_dir: Path, epoch: int) -> None:
    """Remove the files of older epochs that this epoch has too, so that a run with many owners does not fill the disk. Files with the plain
    names stay, and those of the previous epoch, which programs that watch the run may still read."""
    begun = {number for file in LOGS for number in _there(run_dir, file, below=epoch - 1)} - {0}
    for file in (
        *DESCRIPTION,
        *ANEW,
        *SHOWN,
        *LOGS,
    ):  # logs last: they tell that an epoch had begun, so the others are not a user's files
        if epoch in _there(run_dir, file):
            for number in begun:
                old = run_dir / name(file, number)
                if file in COPIED:
                    with contextlib.suppress(OSError):  # the next epoch tries again
                        old.unlink()
                else:
                    shutil.rmtree(old, ignore_errors=True)


def _there(run_dir: Path, file: str, *, below: int | None = None) -> list[int]:
    """Return the epochs in which a file or folder exists; only those less than `below`, if it is given."""
    path, pattern = run_dir / file, _pattern(file)
    try:
        found = [int(match[1] or 0) for entry in path.parent.iterdir() if (match := pattern.fullmatch(entry.name))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    if file in DESCRIPTION and any(found):
        begun = last(run_dir)
        found = [number for number in found if number <= begun]
    return [number for number in found if below is None or number < below]


def _pattern(file: str) -> re.Pattern[str]:
    stem, dot, ending = Path(file).name.partition(".")
    return re.compile(rf"{re.escape(stem)}(?:-([1-9]\d*))?{re.escape(dot + ending)}")


def _copy(run_dir: Path, file: str, epoch: int) -> None:
    before = _there(run_dir, file, below=epoch)
    own = run_dir / name(file, epoch)
    if not before or epoch in _there(run_dir, file):
        return
    old = run_dir / name(file, max(before))
    if not old.is_file():  # somebody's folder with that name, or a link that leads nowhere
        return
    if file in DESCRIPTION and own.is_file() and not filecmp.cmp(old, own, shallow=False):
        own.replace(own.with_name(f"{own.name}.user"))  # a user's own file, such as a `run-1.toml`
    part = own.with_name(f"{own.name}.{secrets.token_hex(4)}.tmp")
    try:
        shutil.copyfile(old, part)
        part.replace(own)
    finally:
        part.unlink(missing_ok=True)  # there only after an error, such as a full disk


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

"""A checkpoint on disk: names, manifest, digests, commit, pruning. Tools can use this module without torch.

    checkpoints/step-00000120/
        manifest.json             meta, and the size and sha256 of every other file; carries its own sha256
        index.json                every tensor's shape and dtype, and which file holds which part of it
        rank-00003.safetensors    the parts that rank 3 wrote
        rank-00003.state-0.safetensors   a link to the file that kept rank 3's state on disk, if it had one

A folder with such a name is complete: it is written as `step-00000120.tmp-<random>`, and renamed once all files are on the disk.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megalith import disk, epochs
from megalith.checkpoint.digests import FileDigest
from megalith.fleet.exit_codes import ExitCode

FOLDER = "checkpoints"
MANIFEST = "manifest.json"
INDEX = "index.json"
FORMAT = "megalith-checkpoint-1"
LINKED = "megalith-checkpoint-2"
"""Format of a checkpoint with linked files, which earlier versions cannot read."""

_COMMITTED = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"step-\d{8,}\.tmp-.+")


class DamagedCheckpointError(ValueError):
    """No requested checkpoint is intact; the text names every damaged file."""


class AwayError(OSError):
    """A checkpoint is temporarily unreadable. An unreadable checkpoint may still be intact, so the run must neither use an
    earlier one nor start over."""

    exit_code = ExitCode.LOST


class Piece(NamedTuple):
    """A byte tensor in a linked file, and how many of its bytes hold values."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor: its offset, its sizes, and the file that holds it. In an ordinary file the box is one tensor under the
    tensor's own name; in a linked file it is divided into pieces."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    pieces: tuple[Piece, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A whole tensor: its shape, its dtype in safetensors' notation (F32, BF16, I64 ...), and the chunks of which it consists."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[Chunk, ...]


Index = dict[str, Entry]


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint. `order` counts commits. A run resumes from the last commit: after a rewind, from a checkpoint
    saved since the rewind, even if an older checkpoint is of a later step."""

    step: int
    order: int
    meta: dict[str, Any]
    files: dict[str, FileDigest]

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


@dataclass(frozen=True)
class Description:
    """Result of `describe`: shape and dtype of every tensor, the saved meta, and the problems found."""

    path: Path
    step: int
    bytes: int
    meta: dict[str, Any]
    tensors: dict[str, tuple[tuple[int, ...], str]]
    problems: tuple[str, ...]


def name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the step of the checkpoint in a folder with a committed name."""
    return int(path.name.removeprefix(name(0).rstrip("0")))


def temporary(step: int) -> str:
    """Return a new temporary name for a step's checkpoint until it is committed."""
    return f"{name(step)}.tmp-{secrets.token_hex(4)}"


# --- reading ----------------------------------------------------------------------------------------------------------------


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of the checkpoint `path`. Raises DamagedCheckpointError if the manifest is missing, altered or of an unknown
    format."""
    here = f"{path.name}/{MANIFEST}"
    try:
        fields = json.loads((path / MANIFEST).read_bytes())
        digest = fields.pop("sha256")
        if digest != _digest(_canonical(fields)):
            raise DamagedCheckpointError(f"{here} is altered: its content does not match the sha256 that it contains")
        if fields["format"] not in (FORMAT, LINKED):
            raise DamagedCheckpointError(f"{here} has format {fields['format']!r}, this version reads {FORMAT!r} and {LINKED!r}")
        files = {file: FileDigest(**digest) for file, digest in fields["files"].items()}
        if wrong := [file for file in files if Path(file).name != file]:
            raise DamagedCheckpointError(f"{here} names files outside its folder: {wrong}")
        return Manifest(step=fields["step"], order=fields["order"], meta=fields["meta"], files=files)
    except FileNotFoundError as error:
        raise DamagedCheckpointError(f"{here} is missing") from error
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(f"{here} cannot be read (truncated or altered): {error}") from error


def read_index(path: Path, manifest: Manifest) -> Index:
    """Return the shape, dtype and chunks of every tensor of the checkpoint. Raises DamagedCheckpointError if the index has
    another digest than the manifest states."""
    if problem := check_file(path, INDEX, manifest.files.get(INDEX)):
        raise DamagedCheckpointError(problem)
    tensors = json.loads((path / INDEX).read_bytes())["tensors"]
    index = {
        key: Entry(
            shape=tuple(entry["shape"]),
            dtype=entry["dtype"],
            chunks=tuple(
                Chunk(tuple(c["offset"]), tuple(c["sizes"]), c["file"], tuple(Piece(*piece) for piece in c.get("pieces", ())))
                for c in entry["chunks"]
            ),
        )
        for key, entry in tensors.items()
    }
    unknown = {chunk.file for entry in index.values() for chunk in entry.chunks} - set(manifest.files)
    if unknown:
        raise DamagedCheckpointError(f"{path.name}/{INDEX} names files that {MANIFEST} does not name: {sorted(unknown)}")
    return index


def check_file(path: Path, file: str, expected: FileDigest | None) -> str | None:
    """Return the problem of one file of the checkpoint `path`; None if it is unchanged since it was written. Reads the file once, in
    small pieces. Raises OSError if the file exists but cannot be read.
    """
    here = f"{path.name}/{file}"
    if expected is None:
        return f"{here} is not in {MANIFEST}"
    try:
        with (path / file).open("rb", buffering=0) as content:
            size = os.fstat(content.fileno()).st_size
            if size != expected.bytes:
                return f"{here} has {size} bytes instead of {expected.bytes}"
            problem = expected.problem(content)
    except FileNotFoundError:
        return f"{here} is missing"
    return f"{here} is altered: {problem}" if problem else None


def verify(path: Path) -> list[str]:
    """Return all problems of the checkpoint `path`, with the files' names; empty if the checkpoint is intact. An unreadable file counts
    as damaged."""
    try:
        manifest = read_manifest(path)
        problems = [check_file(path, file, digest) for file, digest in manifest.files.items()]
    except (DamagedCheckpointError, OSError) as error:
        return [str(error)]
    return [problem for problem in problems if problem]


def describe(path: Path, *, check: bool = True) -> Description:
    """Describe the checkpoint `path` (or the newest one under it); `check` verifies the digests too. Raises FileNotFoundError if there
    is no checkpoint, DamagedCheckpointError if manifest or index cannot be read.
    """
    path = locate(path)[0]
    manifest = read_manifest(path)
    index = read_index(path, manifest)
    return Description(
        path=path,
        step=manifest.step,
        bytes=manifest.bytes,
        meta=manifest.meta,
        tensors={key: (entry.shape, entry.dtype) for key, entry in index.items()},
        problems=tuple(verify(path)) if check else (),
    )


# --- finding ----------------------------------------------------------------------------------------------------------------


def of_run(run_dir: Path) -> Path:
    """Return the folder of a run's checkpoints: of the folders of all owners, the one with the highest epoch (`megalith.epochs`)."""
    return epochs.newest(run_dir, FOLDER)


def committed(folder: Path) -> list[Path]:
    """Return the complete checkpoints in `folder`: first those without a readable manifest, then the others, newest
    commit first. Raises OSError if `folder` is a link that leads nowhere now: a run must not start over while its checkpoints are away."""
    if not disk.is_folder(folder):
        if folder.is_symlink():
            why = "this link leads to no folder now: mount its file system, or remove the link"
            raise OSError(errno.ENODEV, why, str(folder))
        return []
    found = [path for path in folder.iterdir() if _COMMITTED.fullmatch(path.name) and disk.is_folder(path)]
    return sorted(found, key=_order, reverse=True)


def unreadable(folder: Path) -> list[tuple[Path, str]]:
    """Return the complete checkpoints in `folder` whose manifest cannot be used, each with the reason."""
    found = []
    for path in committed(folder):
        try:
            read_manifest(path)
        except DamagedCheckpointError as error:
            found.append((path, str(error)))
    return found


def _order(path: Path) -> tuple[float, str]:
    try:
        return read_manifest(path).order, path.name
    except DamagedCheckpointError:
        return float("inf"), path.name


def latest(folder: Path) -> Path | None:
    """Return the last committed checkpoint in `folder` with a readable manifest, or None. The checkpoint's files are not
    verified."""
    return next((path for path in committed(folder) if _order(path)[0] != float("inf")), None)


def locate(path: Path) -> list[Path]:
    """Return the checkpoints that `path` refers to, in the order of `committed`: itself, those in it, or those in its
    `checkpoints/` (a run folder). Raises FileNotFoundError if there are none.
    """
    if disk.is_there(path / MANIFEST) or _COMMITTED.fullmatch(path.name):
        if not disk.is_folder(path):
            raise FileNotFoundError(
                f"{path}: no such checkpoint; the folder has {[p.name for p in committed(path.parent)] or 'none'}"
            )
        return [path]
    found = committed(path) or committed(of_run(path))
    if not found:
        raise FileNotFoundError(nothing_text(path))
    return found


def find(path: Path, *, warn: Callable[[str], None] = lambda message: None) -> Path:
    """Return the newest intact checkpoint that `path` refers to (see `locate`); `warn` is called for each newer, damaged one. Raises
    FileNotFoundError if there is no checkpoint, DamagedCheckpointError if none is intact.
    """
    damaged: list[str] = []
    for candidate in locate(path):
        problems = verify(candidate)
        if not problems:
            return candidate
        damaged += problems
        warn(damaged_text(candidate, problems))
    raise DamagedCheckpointError(none_intact_text(path, damaged))


def find_complete(path: Path) -> tuple[Path, Manifest]:
    """Return the newest checkpoint at `path` (see `locate`) whose files all have the right lengths, and its manifest. The files'
    content is not read. Raises FileNotFoundError if there is no checkpoint, DamagedCheckpointError if none is complete.
    """
    damaged: list[str] = []
    for candidate in locate(path):
        try:
            manifest = read_manifest(candidate)
        except DamagedCheckpointError as error:
            damaged.append(str(error))
            continue
        found = {file: disk.look(candidate / file) for file in manifest.files}
        lengths = {file: None if each is None else each.st_size for file, each in found.items()}
        short = [f"{candidate.name}/{file}" for file, length in lengths.items() if length != manifest.files[file].bytes]
        if not short:
            return candidate, manifest
        damaged.append(f"files that are missing, or whose length differs from the manifest: {', '.join(short)}")
    raise DamagedCheckpointError(none_intact_text(path, damaged))


def nothing_text(path: Path) -> str:
    """Return the message that there is no checkpoint."""
    absent = f" does not exist, so there is no checkpoint here (relative paths start at {Path.cwd()})"
    if (path / "config.json").is_file():
        return f"{path}: not a checkpoint, but a model in transformers' format. Convert this model: megalith import {path} --out FOLDER"
    reason = ": no checkpoint here" if disk.is_there(path) else absent
    return f"{path}{reason}. Give a checkpoint (step-...), the folder it is in, or a run folder."


def damaged_text(path: Path, problems: list[str]) -> str:
    """Return the message about a damaged checkpoint."""
    return f"checkpoint {path} is damaged and is not used: {'; '.join(problems)}"


def away_text(path: Path, why: str) -> str:
    """Return the message about a checkpoint that is temporarily unreadable."""
    return (
        f"checkpoint {path} cannot be read: {why}. This checkpoint may be intact: start again once its file system answers, or move it "
        "away to resume from the previous checkpoint"
    )


def none_intact_text(path: Path, problems: list[str]) -> str:
    """Return the message that all checkpoints are damaged."""
    lines = "\n  ".join(problems)
    return f"no checkpoint in {path} is intact:\n  {lines}\nRestore one from a copy, or start over in another run folder."


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Lock the checkpoint `path` while it is read, so that another process (a run that keeps its last N checkpoints) does not prune
    it."""
    with (path / MANIFEST).open("rb") as manifest:
        with contextlib.suppress(OSError):  # file systems without locks: pruning cannot be held off there
            fcntl.flock(manifest, fcntl.LOCK_SH)
        yield


# --- writing ----------------------------------------------------------------------------------------------------------------


def write_index(path: Path, index: Mapping[str, Entry]) -> FileDigest:
    """Write `index.json` into the folder `path`, and sync it to disk."""
    return _write(path / INDEX, json.dumps({"tensors": {key: asdict(entry) for key, entry in sorted(index.items())}}).encode())


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into the folder `path`, and sync it to disk. Raises ValueError or TypeError if meta is not JSON."""
    form = LINKED if any(digest.words for digest in manifest.files.values()) else FORMAT
    fields = json.loads(json.dumps({"format": form} | asdict(manifest), allow_nan=False))  # as it will be read back
    for digest in fields["files"].values():
        digest.pop("sha256" if digest["words"] else "words")
    text = json.dumps(fields | {"sha256": _digest(_canonical(fields))}, indent=1, allow_nan=False)
    _write(path / MANIFEST, text.encode())


def commit(written: Path, step: int) -> Path:
    """Rename the fully written folder `written` to its final name, which commits it. An existing checkpoint of the same step is
    replaced."""
    final = written.parent / name(step)
    _sync(written)
    aside = written.parent / temporary(step)
    if disk.is_there(final):
        final.rename(aside)
    written.rename(final)
    _sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)
    return final


def clean(folder: Path) -> None:
    """Remove the temporary folders of interrupted saves in `folder`."""
    for path in folder.iterdir():
        if _TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def next_order(folder: Path) -> int:
    """Return the commit number for the next checkpoint in `folder`."""
    orders = (_order(path)[0] for path in committed(folder))
    return 1 + int(max((order for order in orders if order != float("inf")), default=0))


def prune(folder: Path, *, keep: int) -> list[str]:
    """Remove all checkpoints except the `keep` last committed ones and those being read; return a message for each one that could not
    be removed. Checkpoints without a readable manifest cannot be loaded, so they do not count towards `keep`, and are removed.
    """
    found = committed(folder)
    readable = [path for path in found if _order(path)[0] != float("inf")]
    kept = set(readable[: max(keep, 1)])
    problems = []
    for path in found:
        if path not in kept:
            try:
                _remove(path)
            except OSError as error:
                problems.append(f"old checkpoint {path} was not removed: {error}")
    return problems


def _remove(path: Path) -> None:
    """Remove a checkpoint unless another process reads it. The checkpoint is first renamed, so that a partly removed one does not
    look complete."""
    manifest = path / MANIFEST
    with contextlib.ExitStack() as stack:
        if disk.is_there(manifest):
            lock = stack.enter_context(manifest.open("rb"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            except OSError:
                pass  # file systems without locks
        aside = path.with_name(f"{path.name}.tmp-{secrets.token_hex(4)}")
        path.rename(aside)
        shutil.rmtree(aside)


def _write(path: Path, content: bytes) -> FileDigest:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return FileDigest(len(content), _digest(content))


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _canonical(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

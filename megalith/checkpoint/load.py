"""Load a checkpoint into state sharded under any plan: verify files, compare shapes, then read each rank's boxes directly into its
tensors."""

import contextlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from megalith.checkpoint import folder as files
from megalith.checkpoint.shares import OffDeviceShare, Share, shares
from megalith.checkpoint.storage import FolderReader, describe_error, read_shares
from megalith.exchange import ObjectCollectives

Warn = Callable[[str], None]
Accept = Callable[[Path, Mapping[str, Any]], None]
State = Mapping[str, Tensor | OffDeviceShare]
Wanted = State | Callable[[Mapping[str, Any]], State]
"""The tensors to fill, or a function that makes them from a checkpoint's meta."""


_FAILURE: TypeAdapter[tuple[bool, str] | None] = TypeAdapter(tuple[bool, str] | None)


class MismatchError(ValueError):
    """The checkpoint does not hold the requested state; the message lists every difference."""


@dataclass(frozen=True)
class LoadResult:
    """Result of a load: its source, its step, the saved meta, and the names of all tensors in the checkpoint."""

    path: Path
    step: int
    meta: dict[str, Any]
    keys: frozenset[str] = frozenset()


def silent(message: str) -> None:
    """Warn nobody."""


def whatever(path: Path, meta: Mapping[str, Any]) -> None:
    """Accept any checkpoint."""


def load(
    path: Path,
    state: Wanted,
    *,
    group: dist.ProcessGroup | None = None,
    partial: bool = False,
    cast: bool = False,
    rows: Collection[str] = (),
    accept: Accept = whatever,
    warn: Warn = silent,
) -> LoadResult:
    """Fill the tensors of `state` in place from the newest intact checkpoint that `path` refers to (see `folder.locate`).

    Every rank of `group` (gloo; None: this process alone) must call this function with its own shares, in any layout. Digests are
    verified first, each file by one rank. `partial`: the checkpoint may hold more than the requested state. `cast`: convert
    values to the dtype of their destination. `rows`: tensors whose number of rows may differ between checkpoint and state; the
    rows that exist in both are read. `accept` is called on every rank before a checkpoint is read, with the checkpoint's path and
    meta; an exception from `accept` ends the load. `warn` is called on the first rank with a message for each damaged checkpoint.

    Raises FileNotFoundError (no checkpoint), DamagedCheckpointError (none intact), AwayError (the newest undamaged one is temporarily
    unreadable), or MismatchError; every rank raises the same error.
    """
    ranks = ObjectCollectives(group)
    candidates, away = ranks.broadcast(_candidates(path) if ranks.is_leader else ([], ""), tuple[list[Path], str])
    if away:
        raise files.AwayError(files.away_text(path, away))
    if not candidates:
        raise FileNotFoundError(files.nothing_text(path))
    damaged: list[str] = []
    for candidate in candidates:
        loaded, problems = _load(candidate, state, ranks, partial=partial, cast=cast, rows=rows, accept=accept)
        if loaded:
            return loaded
        damaged += problems
        if ranks.is_leader:
            warn(files.damaged_text(candidate, problems))
    raise files.DamagedCheckpointError(files.none_intact_text(path, damaged))


def _candidates(path: Path) -> tuple[list[Path], str]:
    try:
        return files.locate(path), ""
    except FileNotFoundError:
        return [], ""
    except OSError as error:
        return [], str(error)


def _load(
    path: Path,
    state: Wanted,
    ranks: ObjectCollectives,
    *,
    partial: bool,
    cast: bool,
    rows: Collection[str],
    accept: Accept,
) -> tuple[LoadResult | None, list[str]]:
    """Load one checkpoint, or return its problems. The leading rank protects the checkpoint from pruning until all ranks have
    read it."""
    opened = _Opened(path) if ranks.is_leader else None
    try:
        said = (opened.manifest, opened.index, opened.problems, opened.away) if opened else (None, {}, [], "")
        manifest, index, problems, away = ranks.broadcast(said, tuple[files.Manifest | None, files.Index, list[str], str])
        if away:
            raise files.AwayError(files.away_text(path, away))
        if manifest is None or problems:
            return None, problems
        problems = _verify(path, manifest, ranks)
        if problems:
            return None, problems
        accept(path, manifest.meta)
        wanted = state(manifest.meta) if callable(state) else state
        mine, refused = _shares(wanted)
        _compare(path, index, mine, set(wanted), refused, ranks, partial=partial, cast=cast, rows=rows)
        _read(FolderReader(path, index), mine, ranks)
        return LoadResult(path, manifest.step, manifest.meta, frozenset(index)), []
    finally:
        if opened:
            opened.close()


class _Opened:
    """An open checkpoint with its manifest and index, protected from pruning until it is closed. A checkpoint that could not be
    opened has only its problems, or the reason why it is unreadable now."""

    def __init__(self, path: Path) -> None:
        self.manifest: files.Manifest | None = None
        self.index: files.Index = {}
        self.problems: list[str] = []
        self.away = ""
        self._held = contextlib.ExitStack()
        try:
            self._held.enter_context(files.reading(path))
            self.manifest = files.read_manifest(path)
            self.index = files.read_index(path, self.manifest)
        except FileNotFoundError:
            self.problems.append(f"{path.name}/{files.MANIFEST} is missing")
        except files.DamagedCheckpointError as error:
            self.problems.append(str(error))
        except OSError as error:
            self.away = str(error)

    def close(self) -> None:
        self._held.close()


def _verify(path: Path, manifest: files.Manifest, ranks: ObjectCollectives) -> list[str]:
    """Return the problems of the checkpoint's files, the same list on all ranks. Each file is read by one rank, and the bytes are
    divided evenly.

    Raises AwayError on every rank if any rank cannot read its files.
    """
    load = [0] * ranks.size
    mine: list[str] = []
    for file, digest in sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0])):
        rank = load.index(min(load))
        load[rank] += digest.bytes
        if rank == ranks.rank:
            mine.append(file)
    found, away = list[str | None](), ""
    try:
        found = [files.check_file(path, file, manifest.files[file]) for file in mine]
    except OSError as error:
        away = str(error)
    answers = ranks.all_gather((found, away), tuple[list[str | None], str])
    if why := next((away for _, away in answers if away), ""):
        raise files.AwayError(files.away_text(path, why))
    return [problem for problems, _ in answers for problem in problems if problem]


def _shares(state: State) -> tuple[dict[str, Share], list[str]]:
    try:
        return shares(state), []
    except ValueError as error:
        return {}, [str(error)]


def _compare(
    path: Path,
    index: files.Index,
    mine: Mapping[str, Share],
    keys: set[str],
    refused: list[str],
    ranks: ObjectCollectives,
    *,
    partial: bool,
    cast: bool,
    rows: Collection[str],
) -> None:
    """Raise MismatchError, with every difference on any rank, unless `index` has the tensors that all ranks request."""
    problems = refused + [f"{key} is not in the checkpoint" for key in sorted(keys - set(index))]
    for key, share in mine.items():
        entry = index.get(key)
        if entry and entry.shape != share.held.shape and not (key in rows and entry.shape[1:] == share.held.shape[1:]):
            problems.append(f"{key} has shape {entry.shape} in the checkpoint, but {share.held.shape} here")
        if entry and entry.dtype != share.held.dtype and not cast:
            problems.append(f"{key} is {entry.dtype} in the checkpoint, but {share.held.dtype} here")
    answers = ranks.all_gather((problems, keys), tuple[list[str], set[str]])
    found = sorted({problem for problems, _ in answers for problem in problems})
    if not partial:
        extra = set(index).difference(*(keys for _, keys in answers))
        found += [f"{key} is in the checkpoint, but was not requested" for key in sorted(extra)]
    if found:
        raise MismatchError(f"checkpoint {path} does not hold this state:\n  " + "\n  ".join(found))


def _read(reader: FolderReader, mine: dict[str, Share], ranks: ObjectCollectives) -> None:
    """Fill this rank's shares. Raises AwayError, on every rank, if the files could not be read for now, and OSError for other failures."""
    failure: tuple[bool, str] | None = None
    try:
        read_shares(mine, reader)
    except Exception as error:  # the other ranks are on their way to the exchange below: meet them there
        if ranks.group is None and not isinstance(error, OSError):
            raise
        failure = isinstance(error, OSError), describe_error(error)
    answers = ranks.all_gather(failure, _FAILURE)
    failures = {rank: answer for rank, answer in enumerate(answers) if answer is not None}
    if not failures:
        return
    text = "; ".join(f"rank {rank}: {why}" for rank, (_, why) in failures.items())
    if all(away for away, _ in failures.values()):
        raise files.AwayError(files.away_text(reader.path, text))
    raise OSError(f"checkpoint {reader.path} could not be read: {text}")

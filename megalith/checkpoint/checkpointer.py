"""A run's checkpoints: saves in parallel with training, keeps the last few, and loads the newest intact one."""

import json
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from megalith import disk
from megalith.checkpoint import folder as files
from megalith.checkpoint.load import Accept, LoadResult, Wanted, Warn, load, silent, whatever
from megalith.checkpoint.shares import HeldShare, OffDeviceShare, Place, Share, can_be_written_later, owners, shares, snapshot
from megalith.checkpoint.staging import Staging
from megalith.checkpoint.storage import FolderWriter, WrittenFile, describe_error, save_alone, save_together
from megalith.exchange import ObjectCollectives

_ANSWER: TypeAdapter[tuple[str | None, tuple[HeldShare, ...]]] = TypeAdapter(tuple[str | None, tuple[HeldShare, ...]])
_ASSIGNED: TypeAdapter[tuple[set[Place], list[str]]] = TypeAdapter(tuple[set[Place], list[str]])
ALIVE_SECONDS = 0.2  # between two signs of life of a rank that waits for a save


@dataclass(frozen=True)
class SaveResult:
    """A committed checkpoint. `bytes`: the total that all ranks wrote; `wait_seconds`: how long the save blocked the caller."""

    step: int
    path: Path
    bytes: int
    seconds: float
    wait_seconds: float


@dataclass(frozen=True)
class SaveFailure:
    """A save that did not become a checkpoint, and the reason. Older checkpoints are untouched; the next save may well succeed."""

    step: int
    error: str
    seconds: float
    wait_seconds: float
    peer_lost: bool = False
    """See `storage.WrittenFile.peer_lost`."""


Outcome = SaveResult | SaveFailure


@dataclass
class _Job:
    """One save under way."""

    step: int
    began: float
    wait_seconds: float = 0.0
    ended: float = 0.0
    written: WrittenFile | None = None
    thread: threading.Thread | None = None


class Checkpointer:
    """Saves to and loads from `folder`. All ranks make a Checkpointer together and call its methods in the same order. `group`: a
    gloo group for its messages that no other code uses, because an asynchronous save communicates in parallel with training.
    `group=None`: a new group of all ranks if torch.distributed is initialised, else this process alone. `warn`: called on the
    first rank with warnings for the user (a damaged checkpoint, an old one that cannot be removed). `existed`: the parent of
    `folder` has existed before. If that parent is missing now, checkpoints count as temporarily unavailable. `alive`: called again and
    again while a save is waited for, at most for `patience` seconds: a slow file system is no hang.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int = 2,
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        warn: Warn = silent,
        existed: bool = False,
        alive: Callable[[], None] = lambda: None,
        patience: float = math.inf,
    ) -> None:
        if group is None and dist.is_initialized():
            group = dist.new_group(list(range(dist.get_world_size(dist.group.WORLD))), timeout, "gloo")  # type: ignore[assignment]
        self.folder, self.keep = folder, keep
        self._place = disk.Place(folder.parent, existed=existed)  # a save must not create it again while its file system is away
        self._ranks, self._warn, self._alive, self._patience = ObjectCollectives(group), warn, alive, patience
        self._job: _Job | None = None
        self._outcomes: list[Outcome] = []
        self._planned: tuple[HeldShare, ...] | None = None
        self._mine: set[Place] = set()
        self._staging = Staging()

    def reserve(self, state: Mapping[str, Tensor | OffDeviceShare]) -> None:
        """Optionally, agree now which rank writes which tensors, and allocate the memory for copies, so that the first save takes no
        longer than later ones. Raises ValueError on every rank if the state cannot be saved.
        """
        self._join()
        self._staging.reserve(self._claim(state))

    def save(
        self,
        step: int,
        state: Mapping[str, Tensor | OffDeviceShare],
        meta: Mapping[str, Any],
        *,
        asynchronous: bool = True,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Save this rank's part of the state, and `meta` (JSON, the same on all ranks), as the checkpoint of `step`.

        A failed save raises no error; `poll` or `wait` return its outcome. Returns when the tensors may change again: once they
        are copied if `asynchronous`, else when the checkpoint is committed. First waits for a save in progress. Shares on disk
        are not copied to memory: the checkpoint links or copies their files, and later updates write to new files. If the disk
        has no room for new files, the save is not asynchronous. `check` is called once the state is copied (if not
        `asynchronous`: before the state is read). An exception from `check` means that the state must not be saved: a checkpoint
        needs the files of all ranks, so this step gets no checkpoint.
        """
        job = _Job(step, began=time.monotonic())
        self._join()
        try:
            mine = {key: snapshot(share) for key, share in self._claim(state).items()}
            asynchronous = asynchronous and all(can_be_written_later(share.data) for share in mine.values())
            work = self._prepare(job, mine, meta, copy=asynchronous)
        except Exception as error:  # a save must not end the run, whatever went wrong in it
            job.written = self._failed(error)
            job.ended = time.monotonic()
        else:
            check()
            if asynchronous:
                job.thread = threading.Thread(target=work, name=f"checkpoint-{step}", daemon=True)
                job.thread.start()
            else:
                work()
        self._job = job
        job.wait_seconds = time.monotonic() - job.began

    def poll(self) -> list[Outcome]:
        """Return the outcomes of saves that ended since the last call. This method does not wait, and ranks may learn of the same
        save's end at different steps."""
        if self._job and (self._job.thread is None or not self._job.thread.is_alive()):
            self._join()
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def wait(self) -> list[Outcome]:
        """Wait for the save in progress, if any; then return as `poll` does."""
        if self._job and self._job.thread:
            began = time.monotonic()
            self._await(self._job.thread)
            self._job.wait_seconds += time.monotonic() - began
        return self.poll()

    def holds(self, step: int) -> bool:
        """True if there is a committed checkpoint of `step`, even a damaged one."""
        name = files.name(step)
        return self._ranks.broadcast(
            self._ranks.is_leader and any(path.name == name for path in files.committed(self.folder)), bool
        )

    def steps(self) -> set[int]:
        """Return the steps whose committed checkpoints, intact or damaged, this rank can see; empty if the folder cannot be read."""
        try:
            return {files.step_of(path) for path in files.committed(self.folder)}
        except OSError:
            return set()

    def load(
        self,
        state: Wanted,
        *,
        step: int | None = None,
        partial: bool = False,
        cast: bool = False,
        accept: Accept = whatever,
    ) -> LoadResult | None:
        """Fill the tensors of `state` in place from the newest intact checkpoint, or only from that of `step`. Return None if
        `step` is None and the folder has no checkpoint. See `megalith.checkpoint.load.load` for `accept` and for the errors
        raised.
        """
        self._join()
        path = self.folder if step is None else self.folder / files.name(step)
        if step is None and not self._ranks.broadcast(self._ranks.is_leader and self._may_hold_any(), bool):
            return None
        try:
            return load(path, state, group=self._ranks.group, partial=partial, cast=cast, accept=accept, warn=self._warn)
        except (FileNotFoundError, files.DamagedCheckpointError) as error:  # on all ranks alike
            if away := self._ranks.broadcast(self._place.away() if self._ranks.is_leader else "", str):
                raise files.AwayError(files.away_text(path, away)) from error
            raise

    def _may_hold_any(self) -> bool:
        """True if there may be a committed checkpoint. An unreadable folder may hold a checkpoint, so the result is True, and
        loading then reports the error on all ranks."""
        try:
            return bool(files.committed(self.folder))
        except OSError:
            return True

    # --- one save -----------------------------------------------------------------------------------------------------------

    def _claim(self, state: Mapping[str, Tensor | OffDeviceShare]) -> dict[str, Share]:
        """Return the shares that this rank must write. Of several replicas only one is written; the ranks choose the writers when
        they first see a layout."""
        refused, found = None, {}
        try:
            found = shares(state)
        except Exception as error:  # the other ranks are on their way to the exchange below: meet them there
            refused = describe_error(error)
        held = tuple(share.held for share in found.values())
        if self._ranks.any(refused is not None or held != self._planned):
            self._planned = None
            answers = self._ranks.gather((refused, held), _ANSWER)
            self._mine, problems = self._ranks.scatter(_assign(answers) if answers is not None else None, _ASSIGNED)
            if problems:
                raise ValueError("; ".join(problems))
            self._planned = held
        return {key: share for key, share in found.items() if share.held.place in self._mine}

    def _prepare(self, job: _Job, mine: dict[str, Share], meta: Mapping[str, Any], *, copy: bool) -> Callable[[], None]:
        """Return the rest of a save, which may run in a thread. The returned function contains collectives, so a rank with an
        error must call it too, and reports the error in these collectives."""
        error = None
        try:
            meta = json.loads(json.dumps(dict(meta), allow_nan=False))
            mine = self._staging.copy(mine) if copy else mine
        except Exception as failure:  # no memory for the copy, or a meta that is not JSON
            error = describe_error(failure)
        rank, place = self._ranks.rank, self._place
        writer = FolderWriter(self.folder, step=job.step, meta=meta, keep=self.keep, rank=rank, error=error, place=place)

        def work() -> None:
            try:
                job.written = self._write(mine, writer)
            except Exception as failure:
                job.written = self._failed(failure)
            job.ended = time.monotonic()

        return work

    def _failed(self, error: BaseException) -> WrittenFile:
        """Return an error as the result of a save. RuntimeError means that communication failed; every other error is already
        known to all ranks."""
        return WrittenFile(
            error=describe_error(error), peer_lost=self._ranks.group is not None and isinstance(error, RuntimeError)
        )

    def _write(self, mine: dict[str, Share], writer: FolderWriter) -> WrittenFile:
        return save_alone(mine, writer) if self._ranks.group is None else save_together(mine, writer, self._ranks)

    def _await(self, thread: threading.Thread) -> None:
        began = time.monotonic()
        while thread.is_alive():
            thread.join(ALIVE_SECONDS)
            if time.monotonic() - began < self._patience:
                self._alive()

    def _join(self) -> None:
        """Wait for the save in progress, and store its outcome for `poll`."""
        job, self._job = self._job, None
        if job is None:
            return
        if job.thread:
            self._await(job.thread)
        written = job.written or WrittenFile(error="the writing thread died")
        if self._ranks.is_leader:
            for warning in written.warnings:
                self._warn(warning)
        seconds = job.ended - job.began
        if written.error or written.path is None:
            error = written.error or "nothing was written"
            self._outcomes.append(SaveFailure(job.step, error, seconds, job.wait_seconds, written.peer_lost))
        else:
            self._outcomes.append(SaveResult(job.step, written.path, written.bytes, seconds, job.wait_seconds))


def _assign(answers: list[tuple[str | None, tuple[HeldShare, ...]]]) -> list[tuple[set[Place], list[str]]]:
    refused = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(answers) if text]
    if refused:
        return [(set(), refused)] * len(answers)
    mine, problems = owners([held for _, held in answers])
    return [(places, problems) for places in mine]

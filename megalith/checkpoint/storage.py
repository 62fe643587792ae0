"""Use of torch.distributed.checkpoint with Megalith's own files: torch plans which rank reads and writes which box, and no pickle
is written. Megalith uses only torch's public extension points: its planners describe shares as torch's items, and its storage
writer and reader read and write the files.
"""

import contextlib
import errno
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from megalith.checkpoint import folder as files
from megalith.checkpoint import tensors
from megalith.checkpoint.linked import ShareLocation, link
from megalith.checkpoint.shares import HeldShare, Share
from megalith.checkpoint.tensors import DTYPES, TORCH_DTYPES, box
from megalith.disk import Place
from megalith.exchange import ObjectCollectives


class SharesToWrite(DefaultSavePlanner):
    """Plans the writing of shares. The planner's "state dict" maps names to `Share`."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_write_item(share.held) for share in self.state_dict.values()])
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self.state_dict[write_item.index.fqn]


def _write_item(held: HeldShare) -> WriteItem:
    return WriteItem(
        index=MetadataIndex(held.key, held.offset),
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(held.offset), torch.Size(held.sizes)),
            properties=TensorProperties(dtype=TORCH_DTYPES[held.dtype]),
            size=torch.Size(held.shape),
        ),
    )


@dataclass(frozen=True)
class WrittenFile:
    """Result of a write by one rank or by all, passed between ranks as a value, because not every exception can be sent."""

    path: Path | None = None
    bytes: int = 0
    error: str | None = None
    peer_lost: bool = False
    """True if the ranks could not communicate because one of them is gone; the folder may be intact."""
    warnings: tuple[str, ...] = ()


class FolderWriter(StorageWriter):
    """Writes one checkpoint into `folder`, under a temporary name that the first rank chooses for all and commits at the end.

    `error`: why this rank has no shares to write. A rank with an error still takes part in the collectives, and makes all ranks
    abort the save. `place`, the folder above `folder`, must exist; `folder` itself is created.
    """

    def __init__(
        self,
        folder: Path,
        *,
        step: int,
        meta: Mapping[str, Any],
        keep: int,
        rank: int,
        error: str | None = None,
        place: Place | None = None,
    ) -> None:
        self.folder, self.step, self.meta, self.keep, self.rank, self.error = folder, step, meta, keep, rank, error
        self.place = place

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """No-op, because a writer writes only one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """No-op, because the temporary name is known only with the global plan."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the first rank, remove the files of interrupted saves, and choose the name under which all ranks write."""
        temporary = files.temporary(self.step)
        try:
            if self.place is not None and (why := self.place.away()):
                raise OSError(errno.ENOENT, why, str(self.place.folder))
            if self.place is not None:
                self.place.make(self.folder)
            else:
                self.folder.mkdir(parents=True, exist_ok=True)
            files.clean(self.folder)
            (self.folder / temporary).mkdir()
        except OSError as error:
            self.error = self.error or describe_error(error)
        return [replace(plan, storage_data=temporary) for plan in plans]

    def write_data(self, plan: SavePlan, planner: Any) -> Future[list[WriteResult]]:
        """Write this rank's file. Never raises an error: a failure is returned as a result."""
        results: list[Any] = []
        try:
            if self.error is None and plan.items:
                results = self._write(plan, planner)
        except Exception as error:  # whatever the error, the run goes on and the save is reported as failed
            self.error = describe_error(error)
        if self.error is not None:
            results = [WrittenFile(error=f"rank {self.rank}: {self.error}")]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(self, plan: SavePlan, planner: Any) -> list[WriteResult]:
        folder = self.folder / plan.storage_data
        shares = {item.index.fqn: planner.resolve_data(item).data for item in plan.items}
        where = link(folder, self.rank, shares)
        if rest := {key: data for key, data in shares.items() if key not in where}:
            file = f"rank-{self.rank:05d}.safetensors"
            where |= dict.fromkeys(rest, ShareLocation(file, tensors.write(folder / file, rest)))
        return [WriteResult(item.index, 0, (plan.storage_data, where[item.index.fqn])) for item in plan.items]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the first rank, write index and manifest, commit, and prune. All ranks receive the outcome of the save as
        `metadata.storage_data`."""
        errors = [item.error for items in results for item in items if isinstance(item, WrittenFile) and item.error]
        try:
            metadata.storage_data = WrittenFile(error="; ".join(errors)) if errors else self._commit(metadata, results)
        except (OSError, ValueError, TypeError) as error:
            metadata.storage_data = WrittenFile(error=f"rank {self.rank}: {describe_error(error)}")
        if metadata.storage_data.error:
            with contextlib.suppress(OSError):  # the next save cleans, if the folder is away now
                files.clean(self.folder)

    def _commit(self, metadata: Metadata, results: list[list[WriteResult]]) -> WrittenFile:
        written = [item for items in results for item in items]
        if not written:
            raise ValueError("the state is empty on every rank")
        index = _index(metadata, written)
        temporary = self.folder / written[0].storage_data[0]
        digests = {files.INDEX: files.write_index(temporary, index)}
        digests |= {place.file: place.digest for _, place in (item.storage_data for item in written)}
        manifest = files.Manifest(self.step, files.next_order(self.folder), dict(self.meta), dict(sorted(digests.items())))
        files.write_manifest(temporary, manifest)
        final = files.commit(temporary, self.step)
        return WrittenFile(path=final, bytes=manifest.bytes, warnings=tuple(files.prune(self.folder, keep=self.keep)))


def describe_error(error: BaseException) -> str:
    """Return an exception as one line of text."""
    return f"{type(error).__name__}: {error}"


def _index(metadata: Metadata, written: Sequence[WriteResult]) -> files.Index:
    where = {(item.index.fqn, tuple(item.index.offset or ())): item.storage_data[1] for item in written}
    index: files.Index = {}
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), (key, entry)
        chunks = tuple(
            files.Chunk(tuple(chunk.offsets), tuple(chunk.sizes), place.file, place.pieces)
            for chunk in entry.chunks
            for place in (where[key, tuple(chunk.offsets)],)
        )
        index[key] = files.Entry(tuple(entry.size), DTYPES[entry.properties.dtype], chunks)
    return index


class SharesToRead(LoadPlanner):
    """Plans the reading of exactly the boxes that this rank holds. The planner's "state dict" maps names to `Share`."""

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        assert metadata is not None
        self.shares: dict[str, Share] = state_dict
        self.metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for key, share in self.shares.items():
            entry = self.metadata.state_dict_metadata[key]
            assert isinstance(entry, TensorStorageMetadata), (key, entry)
            box = ChunkStorageMetadata(torch.Size(share.held.offset), torch.Size(share.held.sizes))
            items += create_read_items_for_chunk_list(key, entry, [box])
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise AssertionError(f"a checkpoint holds tensors only, not bytes: {read_item}")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        data = self.shares[read_item.dest_index.fqn].data
        if isinstance(data, Tensor):
            return box(data, read_item.dest_offsets, read_item.lengths)
        return torch.empty(tuple(read_item.lengths), dtype=data.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Write `tensor` to its share if it is a buffer rather than a view of the share."""
        data = self.shares[read_item.dest_index.fqn].data
        if not isinstance(data, Tensor):
            data.fill(tuple(read_item.dest_offsets), tensor)


class FolderReader(StorageReader):
    """Reads the boxes that a plan requests from the checkpoint `path`, directly into their destinations."""

    def __init__(self, path: Path, index: files.Index) -> None:
        self.path, self.index = path, index
        self._chunks = {(key, chunk.offset): chunk for key, entry in index.items() for chunk in entry.chunks}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """No-op, because a reader reads only one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata that torch.distributed.checkpoint needs, built from `index.json`, never from a pickle."""
        return Metadata(
            {
                key: TensorStorageMetadata(
                    TensorProperties(dtype=TORCH_DTYPES[entry.dtype]),
                    torch.Size(entry.shape),
                    [ChunkStorageMetadata(torch.Size(chunk.offset), torch.Size(chunk.sizes)) for chunk in entry.chunks],
                )
                for key, entry in self.index.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """No-op, because files are opened when they are read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy every item to its destination. Each file is opened once, and only the requested parts are read."""
        wanted: dict[str, list[tuple[ReadItem, files.Chunk]]] = {}
        for item in plan.items:
            chunk = self._chunks[item.storage_index.fqn, tuple(item.storage_index.offset or ())]
            wanted.setdefault(chunk.file, []).append((item, chunk))
        for file, items in sorted(wanted.items()):
            with safe_open(self.path / file, framework="pt") as content:
                for item, chunk in items:
                    key = item.storage_index.fqn
                    target = planner.resolve_tensor(item)
                    tensors.read(content, key, chunk, self.index[key].dtype, into=target, offset=item.storage_offsets)
                    planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


class _Written(NamedTuple):
    """A share that a rank has written, and its location."""

    key: str
    offset: tuple[int, ...]
    location: ShareLocation


def save_alone(shares: dict[str, Share], writer: FolderWriter) -> WrittenFile:
    """Do what `torch.distributed.checkpoint.save` does, in one process. torch's own function warns if there are no process
    groups."""
    planner = SharesToWrite()
    planner.set_up_planner(shares, is_coordinator=True)  # type: ignore[arg-type]
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
    writer.finish(metadata, [writer.write_data(plan, planner).value()])
    return metadata.storage_data


def save_together(shares: dict[str, Share], writer: FolderWriter, ranks: ObjectCollectives) -> WrittenFile:
    """Do what `torch.distributed.checkpoint.save` does among all ranks, but without pickles. No two ranks may have the same share."""
    planner, metadata = SharesToWrite(), Metadata({})
    planner.set_up_planner(shares, is_coordinator=ranks.is_leader)  # type: ignore[arg-type]
    plan, temporary, refused = planner.create_local_plan(), "", ""
    tables = ranks.gather(tuple(share.held for share in shares.values()), tuple[HeldShare, ...])
    if tables is not None:
        try:
            plans, metadata = planner.create_global_plan([SavePlan([*map(_write_item, table)]) for table in tables])
            temporary = writer.prepare_global_plan(plans)[0].storage_data
        except Exception as error:  # the other ranks wait for the name
            refused = describe_error(error)
    temporary, refused = ranks.broadcast((temporary, refused), tuple[str, str])
    if refused:
        return WrittenFile(error=refused)
    results = writer.write_data(replace(plan, storage_data=temporary), planner).value()
    answers = ranks.gather(_as_values(results), tuple[str, list[_Written]])
    if answers is not None:
        try:
            writer.finish(metadata, [_as_results(*answer, temporary) for answer in answers])
        except Exception as error:  # the other ranks wait for the outcome
            metadata.storage_data = WrittenFile(error=describe_error(error))
    return ranks.broadcast(metadata.storage_data if answers is not None else WrittenFile(), WrittenFile)


def _as_values(results: Sequence[Any]) -> tuple[str, list[_Written]]:
    errors = [one.error for one in results if isinstance(one, WrittenFile) and one.error]
    written = [one for one in results if isinstance(one, WriteResult)]
    return "; ".join(errors), [_Written(one.index.fqn, tuple(one.index.offset or ()), one.storage_data[1]) for one in written]


def _as_results(error: str, written: Sequence[_Written], temporary: str) -> list[Any]:
    if error:
        return [WrittenFile(error=error)]
    return [WriteResult(MetadataIndex(one.key, one.offset), 0, (temporary, one.location)) for one in written]


def read_shares(shares: dict[str, Share], reader: FolderReader) -> None:
    """Do what `torch.distributed.checkpoint.load` does on one rank. Ranks do not plan together, because each reads what it holds."""
    planner = SharesToRead()
    planner.set_up_planner(shares, reader.read_metadata(), is_coordinator=True)
    reader.read_data(planner.create_local_plan(), planner)

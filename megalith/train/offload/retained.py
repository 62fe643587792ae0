"""Tiers that hold the saved activations of blocks until their backward (`plan.retain`): the host's memory, or a file on the host's disk."""

import errno
import os
import tempfile
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megalith.checkpoint.digests import words_of
from megalith.parallel.retain import OffloadedCopy, PendingFetch
from megalith.spec.plan import RetainSpec
from megalith.spec.state import Place
from megalith.train.offload.slot_file import StateFileError, move_all

BEHIND = 2
"""The number of blocks whose activations may be in transfer to a tier at once. If so many are in transfer, the next block waits for the
oldest transfer, which limits the device memory that they use."""


class TierUsage:
    """The current and the peak number of bytes in a tier."""

    def __init__(self) -> None:
        self.held = self.most = 0
        self.observe: Callable[[Tensor], None] = lambda tensor: None
        """A function that is called with each offloaded tensor in the host's memory."""

    def hold(self, owner: object, size: int) -> None:
        """Count `size` bytes as long as `owner` lives."""
        self.held += size
        self.most = max(self.most, self.held)
        weakref.finalize(owner, self._release, size)

    def _release(self, size: int) -> None:
        self.held -= size


class CompletedFetch:
    """A finished transfer of retained memory to the device."""

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory

    def wait(self) -> Tensor:
        return self._memory


class HostCopy:
    """A copy of retained memory on the host, in a run on the CPU."""

    def __init__(self, memory: Tensor, counted: TierUsage) -> None:
        self._content = memory.clone()
        counted.observe(self._content)
        counted.hold(self, memory.nbytes)

    def fetch(self) -> PendingFetch:
        return CompletedFetch(self._content.clone())


class HostMemory:
    """The host's memory as a tier, for runs on the CPU. The tier makes real copies, so the order of operations and the byte counts
    are the same as on a GPU."""

    def __init__(self) -> None:
        self.counted = TierUsage()

    def put(self, memories: Sequence[Tensor]) -> Sequence[OffloadedCopy]:
        return [HostCopy(memory, self.counted) for memory in memories]


class HostMemoryError(MemoryError):
    """The host refuses pinned memory for retained activations. The same run would fail again."""


def pinned(like: Tensor, *, held: int) -> Tensor:
    """Allocate pinned host memory for a copy of a tensor. `held`: the bytes that the tier holds already. Raises HostMemoryError."""
    try:
        return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)
    except RuntimeError as error:
        words = (
            f"plan.retain: the host refuses {like.nbytes:,} bytes of pinned memory; {held:,} bytes hold activations of this rank"
        )
        way_out = 'Use plan.retain.blocks = "disk" or a smaller plan.retain.share, or allow more host memory for pinning'
        raise HostMemoryError(f"{words} ({str(error).partition(chr(10))[0]}). {way_out}") from error


class PinnedFetch:
    """A transfer of retained memory back to the GPU, in a separate CUDA stream."""

    def __init__(self, memory: Tensor, event: Any) -> None:
        self._memory, self._event = memory, event

    def wait(self) -> Tensor:
        # the host waits as well: it would run ahead otherwise, and the memory of many blocks would come back at once
        self._event.synchronize()
        self._memory.record_stream(torch.cuda.current_stream(self._memory.device))
        return self._memory


class PinnedCopy:
    """A copy of retained memory in pinned host memory, which torch's allocator reuses."""

    def __init__(self, memory: Tensor, tier: "PinnedMemory") -> None:
        self._tier, self._device = tier, memory.device
        self._content = pinned(memory, held=tier.counted.held)
        self._content.copy_(memory, non_blocking=True)
        memory.record_stream(tier.leaving)  # it is freed once it has left
        self._left = tier.leaving.record_event()
        tier.counted.hold(self, memory.nbytes)

    def fetch(self) -> PendingFetch:
        coming = self._tier.coming
        coming.wait_stream(torch.cuda.current_stream(self._device))  # not before the computation has come this far
        coming.wait_event(self._left)
        with torch.cuda.stream(coming):
            memory = torch.empty(self._content.shape, dtype=self._content.dtype, device=self._device)
            memory.copy_(self._content, non_blocking=True)
            return PinnedFetch(memory, coming.record_event())


class PinnedMemory:
    """The host's memory as a tier, for runs on a GPU. One CUDA stream copies to the host and another one copies back; both overlap with the
    computation."""

    def __init__(self, device: torch.device) -> None:
        self.counted = TierUsage()
        self.leaving, self.coming = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._under_way: deque[Any] = deque()

    def put(self, memories: Sequence[Tensor]) -> Sequence[OffloadedCopy]:
        while len(self._under_way) >= BEHIND:
            self._under_way.popleft().synchronize()
        self.leaving.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.leaving):
            copies = [PinnedCopy(memory, self) for memory in memories]
        self._under_way.append(self.leaving.record_event())
        return copies


class DiskFetch:
    """A transfer of retained memory back from the disk, by a thread."""

    def __init__(self, read: "Future[Tensor]", device: torch.device) -> None:
        self._read, self._device = read, device

    def wait(self) -> Tensor:
        return self._read.result().to(self._device)


class DiskCopy:
    """A copy of retained memory in a tier's file."""

    def __init__(self, memory: Tensor, tier: "DiskFile") -> None:
        self._tier, self._device, self._like = tier, memory.device, torch.empty_like(memory, device="meta")
        content = memory.to("cpu", copy=True)
        tier.counted.observe(content)
        self._start = tier.reserve(self, memory.nbytes)
        self.written = tier.writer.submit(tier.write, self._start, content)
        tier.counted.hold(self, memory.nbytes)

    def fetch(self) -> PendingFetch:
        content = torch.empty(self._like.shape, dtype=self._like.dtype)
        return DiskFetch(self._tier.reader.submit(self._read, content), self._device)

    def _read(self, content: Tensor) -> Tensor:
        self._tier.read(self._start, content, self.written.result())
        return content


class DiskFile:
    """An unnamed file as a tier. One thread writes the file and another one reads it; both overlap with the computation. Raises
    StateFileError."""

    def __init__(self, folder: Path) -> None:
        self.counted = TierUsage()
        self.folder = folder
        self.writer, self.reader = (ThreadPoolExecutor(1, f"plan.retain {name}") for name in ("writes", "reads"))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)
        except OSError as error:
            words = f"plan.retain: no file can be created in {folder} ({error.strerror})"
            raise StateFileError(error.errno, f"{words}. Set plan.retain.folder to another folder") from error
        weakref.finalize(self, self._file.close)
        self._end = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # by size: steps are alike, so each place is used again
        self._under_way: deque[list[Future[int]]] = deque()

    def put(self, memories: Sequence[Tensor]) -> Sequence[OffloadedCopy]:
        while len(self._under_way) >= BEHIND:
            for written in self._under_way.popleft():
                written.result()
        copies = [DiskCopy(memory, self) for memory in memories]
        self._under_way.append([copy.written for copy in copies])
        return copies

    def reserve(self, owner: object, size: int) -> int:
        """Reserve `size` bytes of the file for `owner`, as long as that object lives; return the first byte. Bytes may be reserved again
        while the write of their old content is still pending, because one thread makes all writes in the order of the calls."""
        if free := self._free[size]:
            start = free.pop()
        else:
            start, self._end = self._end, self._end + size
        weakref.finalize(owner, self._free[size].append, start)
        return start

    def write(self, start: int, content: Tensor) -> int:
        """Write a tensor, and return its checksum: the sum of its words."""
        octets = content.view(torch.uint8).numpy()
        try:
            if move_all(os.pwritev, self._file.fileno(), octets, start) < len(octets):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            words = f"plan.retain: {len(octets):,} bytes cannot be written in {self.folder} ({error.strerror})"
            way_out = "Make room on the folder's disk, or set plan.retain.folder to a folder on another disk"
            raise StateFileError(error.errno, f"{words}. {way_out}") from error
        return words_of(octets)

    def read(self, start: int, content: Tensor, known: int) -> None:
        """Read a tensor's content, which begins at byte `start`. `known`: the checksum of the written content."""
        octets, failed = content.view(torch.uint8).numpy(), f"plan.retain: {content.nbytes:,} bytes"
        way_out = (
            "The run resumes from its newest checkpoint. If this error recurs, set plan.retain.folder to a folder on another disk"
        )
        try:
            moved = move_all(os.preadv, self._file.fileno(), octets, start)
        except OSError as error:
            raise StateFileError(
                error.errno, f"{failed} in {self.folder} cannot be read back ({error.strerror}). {way_out}"
            ) from error
        if moved < len(octets) or words_of(octets) != known:
            words = f"plan.retain: {content.nbytes:,} bytes in {self.folder} differ from what was written: the disk altered them"
            raise StateFileError(errno.EIO, f"{words}. {way_out}")


AnyTier = HostMemory | PinnedMemory | DiskFile


def tiers_of(retain: RetainSpec, device: torch.device, folder: Path | None) -> dict[Place, AnyTier]:
    """Return the tier of each place for retained activations of a run. `folder`: the folder for the file if the run names none; None: the
    folder for temporary files. A dry run only counts bytes, and creates no file. Raises StateFileError."""
    return {place: _tier(place, retain, device, folder) for place in retain.places}


def _tier(place: Place, retain: RetainSpec, device: torch.device, folder: Path | None) -> AnyTier:
    if place == "disk" and not isinstance(torch.empty(0), FakeTensor):
        return DiskFile(Path(retain.folder or folder or tempfile.gettempdir()))
    return PinnedMemory(device) if device.type == "cuda" else HostMemory()

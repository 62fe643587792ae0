"""Streams chunks on disk through a few buffers in memory: while one chunk is updated, the next chunks are read and updated chunks are
written."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from torch import Tensor

from megalith.train.offload.slot_file import memory_of
from megalith.train.offload.slots import Slots

BUFFERS = 3
"""Number of buffers: one for the chunk that is read, one for the chunk that is updated, one for the chunk that is written."""


class _Moving(NamedTuple):
    chunk: int
    buffer: Tensor
    done: "Future[None]"


class Stream:
    """Moves chunks from disk through memory and back in a given order."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        rooms = slots.layout.rooms
        size = max(rooms, default=0)
        self.buffers = [memory_of(size) for _ in range(min(BUFFERS, len(rooms)))]
        self._reader, self._writer = (ThreadPoolExecutor(1, thread_name_prefix=f"state-{what}") for what in ("read", "write"))

    def over(self, chunks: Sequence[int], *, counts: bool | None = False) -> Iterator[tuple[int, Tensor]]:
        """Yield each chunk with its content, and write the content back when the caller requests the next chunk. `counts`: see
        `Slots.write`; None: no chunk is written back. Raises StateFileError."""
        if self.slots.dry:
            yield from ((chunk, self.buffers[0]) for chunk in chunks)
            return
        free, reading, writing = list(self.buffers), deque[_Moving](), deque[_Moving]()
        left = deque(chunks)
        try:
            while left or reading:
                while left and (free or (writing and (writing[0].done.done() or not reading))):
                    if not free:
                        free.append(_finished(writing.popleft()))
                    chunk, buffer = left.popleft(), free.pop()
                    reading.append(_Moving(chunk, buffer, self._reader.submit(self.slots.read, chunk, self._room(chunk, buffer))))
                chunk, buffer = reading[0].chunk, _finished(reading.popleft())
                yield chunk, buffer
                if counts is None:
                    free.append(buffer)
                else:
                    done = self._writer.submit(self.slots.write, chunk, self._room(chunk, buffer), counts=counts)
                    writing.append(_Moving(chunk, buffer, done))
            while writing:
                _finished(writing.popleft())
        finally:
            for each in (*reading, *writing):  # after an error, wait: the buffers must not be reused before
                each.done.exception()

    def _room(self, chunk: int, buffer: Tensor) -> Tensor:
        return buffer[: self.slots.layout.rooms[chunk]]

    def close(self) -> None:
        """End the threads and close the files."""
        self._reader.shutdown()
        self._writer.shutdown()
        self.slots.close()


def _finished(moving: _Moving) -> Tensor:
    moving.done.result()
    return moving.buffer

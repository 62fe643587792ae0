"""The buffers for copies of one rank's state: files in its node's memory, with their content as torch tensors. Each new copy goes
to the next free buffer."""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalith.checkpoint.tensors import TORCH_DTYPES
from megalith.fleet.secure.key import Key
from megalith.fleet.tiers.copies import GOOD, PAGE, Buffer, Entry, Label, Layout, Whose, file_name


@dataclass
class Buffers:
    """Buffers for copies of one rank's state, one file each. `views`: the tensors in each buffer by name."""

    files: list[Buffer]
    views: list[dict[str, Tensor]]
    bodies: list[Tensor]
    layout_bytes: int
    entries: Sequence[Entry]

    @classmethod
    def create(cls, folder: Path, whose: Whose, rank: int, *, key: Key, count: int, layout: bytes) -> "Buffers":
        """`layout`: the encoded layout of the copies; the caller writes it into each file."""
        read = Layout.load(layout)
        size = len(layout) + read.payload
        files = [Buffer.create(folder / file_name(whose, rank, number), size, key=key) for number in range(count)]
        bodies = [_body(file) for file in files]
        return cls(files, [views(body[len(layout) :], read.entries) for body in bodies], bodies, len(layout), read.entries)

    def make_anew(self) -> int:
        """Recreate each removed file with its content, and return the number of such files. If there is no room for a file, it
        stays removed until the next call tries again."""
        made = 0
        for number, old in enumerate(self.files):
            if not old.is_removed():
                continue
            with contextlib.suppress(OSError):
                file = Buffer.create(old.path, len(old.memory) - PAGE, key=old.key)
                file.strike_out()
                body = _body(file)
                body.copy_(self.bodies[number])
                file.memory[:PAGE] = old.memory[:PAGE]  # last: until then there is no copy
                self.files[number], self.bodies[number] = file, body
                self.views[number] = views(body[self.layout_bytes :], self.entries)
                made += 1
        return made

    def find(self, step: int) -> int | None:
        """Return the number of the buffer with the copy of `step`, or None."""
        return next((i for i, file in enumerate(self.files) if (label := file.label) and label.step == step), None)

    def next(self, *, busy: Iterable[int] = ()) -> int:
        """Return the number of the buffer for the next copy, and mark this buffer as empty: a buffer without a copy, else the
        unpinned one with the oldest copy. `busy`: buffers that are still being read, which are not chosen."""
        free = [i for i, file in enumerate(self.files) if i not in busy and not file.pinned]
        steps = {i: label.step if (label := self.files[i].label) else -1 for i in free}
        chosen = min(free, key=lambda i: (steps[i], i))
        self.files[chosen].strike_out()
        return chosen

    def commit(self, number: int, label: Label) -> None:
        """Mark the copy in a buffer as complete, and invalidate any other copy of the same step."""
        self.files[number].commit(label)
        for other, file in enumerate(self.files):
            if other != number and (old := file.label) and old.step == label.step:
                self.files[number].pin(True, mark=file.marks)
                file.strike_out()

    def keep(self, number: int, *, most: int) -> None:
        """Pin a copy as GOOD. If more than `most` copies are pinned as GOOD, unpin the oldest of them."""
        self.files[number].pin(True, mark=GOOD)
        good = sorted((label.step, i) for i, file in enumerate(self.files) if file.marks & GOOD and (label := file.label))
        for _, other in good[:-most]:
            self.files[other].pin(False, mark=GOOD)

    def forget(self, *, after: int, before: int | None = None) -> None:
        """Delete the copies of steps later than `after` and, if `before` is given, earlier than `before`."""
        for file in self.files:
            if (label := file.label) and label.step > after and (before is None or label.step < before):
                file.strike_out()


def views(payload: Tensor, entries: Sequence[Entry]) -> dict[str, Tensor]:
    """Return the tensors of `payload` (uint8) by name. They share its memory."""
    return {e.name: payload[e.offset : e.offset + e.size].view(TORCH_DTYPES[e.dtype]).view(e.shape) for e in entries if e.size}


def _body(file: Buffer) -> Tensor:
    return torch.frombuffer(file.memory, dtype=torch.uint8)[PAGE:]


def write_layout(file: Buffer, text: bytes) -> None:
    """Write the layout into a file unless the file already has it: all copies in one file have the same layout."""
    if file.memory[PAGE : PAGE + len(text)] != text:
        file.strike_out()
        file.memory[PAGE : PAGE + len(text)] = text

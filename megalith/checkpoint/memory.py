"""One rank's copies in its node's memory: written every few steps, sent to a buddy on another node, restored bit for bit.

Ranks do not coordinate: each writes its own shares in the format described in `megalith.fleet.tiers.copies`. Before the ranks start again
after a fault, the process that starts them finds the steps of which all ranks have a copy. A copy is written only to a buffer whose old
copy is no longer needed, so a rank may be killed at any moment. The fleet chooses the distance between a node and its buddy. Copies are
sent to buddies while the next step is computed. In-memory copies at a peer are from GEMINI, Wang et al., SOSP 2023."""

import contextlib
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.checkpoint.buffers import Buffers, views, write_layout
from megalith.checkpoint.tensors import DTYPES
from megalith.fleet.rank_info import RankInfo, node_folder, ranks_of
from megalith.fleet.secure import private
from megalith.fleet.tiers import Source, Tier
from megalith.fleet.tiers.copies import LABEL_BYTES, PAGE, VERIFIED, Buffer, Label, Layout, file_name, parse_name

WORDS = 1 << 64
ON_DISK = 3  # copies of each rank: while ranks write their newest copy, or still the one before, the third is complete on all
RNG, TEXT = "rng.cpu", "told"


def checksum_words(tensors: Iterable[Tensor]) -> Tensor:
    """Return the sum of the tensors' 64-bit words modulo 2^64 (int64, on the first tensor's device); an incomplete last word is padded
    with zeros. Reads the memory once, without synchronizing with the device."""
    sums: list[Tensor] = []
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        whole = flat.numel() // 8 * 8
        if whole:
            sums.append(_words(flat[:whole]).sum())
        if whole < flat.numel():
            rest = flat.new_zeros(8)
            rest[: flat.numel() - whole] = flat[whole:]
            sums.append(rest.view(torch.int64)[0])
    return torch.stack([each.to(sums[0].device) for each in sums]).sum() if sums else torch.zeros((), dtype=torch.int64)


def checksum(tensors: Iterable[Tensor]) -> int:
    """Return `checksum_words` as a Python number, from which a copy's digest is computed."""
    return int(checksum_words(tensors)) % WORDS


def _words(octets: Tensor) -> Tensor:
    return (octets if _aligned(octets) else octets.clone()).view(torch.int64)


def _aligned(octets: Tensor) -> bool:
    return bool(octets.storage_offset() % 8 == 0 and octets.data_ptr() % 8 == 0)


class ChecksumInPlace:
    """Computes `checksum` of the same tensors again and again. The tensors' views as 64-bit words are made only once."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = list(tensors)
        self._places: list[int] | None = None

    def __call__(self) -> int:
        places = [tensor.data_ptr() for tensor in self._tensors]
        if places != self._places:
            self._look_up()
            self._places = places
        sums = [view.sum() for view in self._views]
        sums += [checksum_words(self._others)] if self._others else []  # an empty list would give a tensor on the CPU
        return int(torch.stack([each.to(sums[0].device) for each in sums]).sum()) % WORDS if sums else 0

    def _look_up(self) -> None:
        self._views, self._others = list[Tensor](), list[Tensor]()
        for tensor in self._tensors:
            octets = tensor.detach().view(-1).view(torch.uint8) if tensor.is_contiguous() and tensor.numel() else None
            if octets is None or octets.numel() % 8 or not _aligned(octets):
                self._others.append(tensor)
            else:
                self._views.append(octets.view(torch.int64))


def layout_of(state: Mapping[str, Tensor], *, text_bytes: int = 0) -> Layout:
    """Return the layout of a payload: the tensors of a state, the state of the CPU's random generator, and `text_bytes` bytes of text."""
    tensors = {**state, RNG: torch.get_rng_state(), TEXT: torch.empty(text_bytes, dtype=torch.uint8)}
    return Layout.of((n, DTYPES[t.dtype], tuple(t.shape), t.numel() * t.element_size()) for n, t in tensors.items())


class CopyError(RuntimeError):  # the message says which of these it is
    """A copy to restore is missing, belongs to another plan, or does not match its digest."""

    def __init__(self, tier: Tier, step: int, slot: int, why: str) -> None:
        super().__init__(f"the copy of step {step} in {tier.value}, slot {slot}: {why}")
        self.tier, self.step, self.slot, self.why = tier, step, slot, why


class Memory:
    """The copies in memory of one rank's state. `state`: the rank's tensors by name, the same in every call. `pinned`: keep one
    more copy, the one that `pin` chose last. `good`: keep this many more copies, the newest ones that are marked as good.
    `text_bytes`: bytes of text that each copy may hold besides the state. `disk`: the folder under which each node keeps copies
    on its own disk; None: no copies on disk. `warn` is called with a message when another process has removed files. Raises
    OSError if there is no room, or the folder belongs to another user or is writable for other users. Copies without a valid MAC
    by the run's key are ignored."""

    def __init__(
        self,
        state: Mapping[str, Tensor],
        *,
        rank_info: RankInfo,
        keep: int = 2,
        pinned: bool = False,
        good: int = 0,
        text_bytes: int = 0,
        disk: Path | None = None,
        generation: str = "",
        warn: Callable[[str], None] = lambda message: None,
    ) -> None:
        assert rank_info.folder is not None and rank_info.key is not None, (
            "this rank has no folder for copies in memory, or no run key"
        )
        self.state, self.rank_info, self.folder, self._key = dict(state), rank_info, rank_info.folder, rank_info.key
        self.disk = disk and node_folder(disk, rank_info.node)
        self.layout = layout_of(self.state, text_bytes=text_bytes)
        self.text = ""  # the text in the copy that was restored last
        self.room, self._most_good = text_bytes, good
        text = self.layout.dump()
        # one more than are kept, so that no copy is overwritten while it is written to disk
        self._count = max(keep, 2 if disk else 1) + 1 + pinned + good
        self._clear_away()
        self.own = Buffers.create(self.folder, "own", rank_info.rank, key=self._key, count=self._count, layout=text)
        for file in self.own.files:
            write_layout(file, text)
        self._live = [tensor for tensor in self.state.values() if tensor.numel()]
        self._names = [name for name, tensor in self.state.items() if tensor.numel()]
        self._label = Label(-1, 0, rank_info.rank, rank_info.world, 0, len(text), self.layout.payload, generation)
        self.kept: Buffers | None = None
        self.kept_layout = self.layout  # of the copies that this rank keeps for another rank; before `join`, of its own
        self.group: dist.ProcessGroup | None = None
        self._apart = 0
        self._in_transit: _Travelling | None = None
        self._writing: tuple[threading.Thread, int] | None = None
        self.disk_error: str | None = None
        self._warn = warn

    def _clear_away(self) -> None:
        """Remove this rank's surplus files. The node's first rank also removes the copies of ranks that no longer run on this node."""
        slots = len(self.rank_info.placement)
        mine = ranks_of(self.rank_info.slot, world=self.rank_info.world, slots=slots)
        for path in (*self.folder.glob("own-*"), *self.folder.glob("buddy-*")):
            whose, rank, number = parse_name(path.name)
            moved = whose == "own" and rank not in mine and self.rank_info.rank == mine[0]
            if moved or (rank == self.rank_info.rank and number >= self._count):
                path.unlink(missing_ok=True)
        for path in self._on_disk():
            if self.rank_info.rank == mine[0] and parse_name(path.name)[1] not in mine:
                path.unlink(missing_ok=True)

    def join(self, distance: int, *, group: dist.ProcessGroup) -> None:
        """Pair the nodes: the node `distance` slots after this one will keep copies of this node's state, and this node will keep
        copies for the node `distance` slots before it. All ranks call this method together. `group`: a gloo group of all ranks,
        in rank order, that no other code uses. Raises OSError on every rank if one has no room for the copies of the rank for
        which it keeps copies."""
        self.group, self._apart = group, distance * self.rank_info.world // len(self.rank_info.placement)
        text, failed = self.layout.dump(), None
        size = torch.tensor([len(text)])
        sizes = torch.zeros(self.rank_info.world, dtype=torch.int64)
        dist.all_gather_into_tensor(sizes, size, group=group)
        theirs = torch.empty(int(sizes[self.keeps_for]), dtype=torch.uint8)
        sent = dist.isend(torch.frombuffer(bytearray(text), dtype=torch.uint8), group=group, group_dst=self.buddy)
        dist.recv(theirs, group=group, group_src=self.keeps_for)
        assert sent is not None
        sent.wait()
        try:
            layout = bytes(theirs.numpy())
            self.kept_layout = Layout.load(layout)
            buddy = self.keeps_for
            self.kept = Buffers.create(self.folder, "buddy", buddy, key=self._key, count=self._count, layout=layout)
        except OSError as error:
            failed = error
        size.fill_(int(failed is not None))
        dist.all_reduce(size, group=group)
        if int(size):
            self.kept = None
            raise failed or OSError("another node cannot create the file for the copies that it keeps for another rank")

    @property
    def buddy(self) -> int:
        """The rank that keeps a copy of this rank's state."""
        return (self.rank_info.rank + self._apart) % self.rank_info.world

    @property
    def keeps_for(self) -> int:
        """The rank whose state this rank keeps a copy of."""
        return (self.rank_info.rank - self._apart) % self.rank_info.world

    # --- copying ---

    def copy(
        self,
        step: int,
        samples: int,
        *,
        updates: int = -1,
        known: int | None = None,
        to_disk: bool = False,
        text: str = "",
        good: bool = False,
    ) -> None:
        """Copy the state after `step` steps and `samples` samples. `updates`: see `Label`. `known`: the digest of `state`, if
        already computed. `text`: stored with the copy. `good`: keep this copy, so that the run can rewind to it. Training waits
        for the messages of the previous copy, for the copying itself, and, with `to_disk`, until the previous copy is on disk."""
        self.finish()
        self._make_anew()
        number = self.own.next(busy=[self._writing[1]] if self._writing and self._writing[0].is_alive() else [])
        into = self.own.views[number]
        rng = torch.get_rng_state()
        torch._foreach_copy_([into[name] for name in self._names], self._live)
        into[RNG].copy_(rng)
        encoded = self._encode_text(text)
        if self.room:
            into[TEXT].copy_(encoded)
        total = ((checksum(self._live) if known is None else known) + checksum([rng, encoded])) % WORDS
        label = replace(self._label, step=step, samples=samples, updates=updates if updates >= 0 else step, digest=total)
        self.own.commit(number, label)
        good = good and self._most_good > 0
        if good:
            self.own.keep(number, most=self._most_good)
        if self.kept is not None:
            self._in_transit = self._send(label, self.own.bodies[number], good=good)
        if to_disk and self.disk:
            self._write_to_disk(number, step)

    def _encode_text(self, text: str) -> Tensor:
        """Return the text as bytes, padded to the size that every copy reserves for text. Raises ValueError if the text is longer."""
        encoded = text.encode()
        if len(encoded) > self.room:
            raise ValueError(f"a copy has room for {self.room} bytes of text, but this text has {len(encoded)}")
        return torch.frombuffer(bytearray(encoded.ljust(self.room)), dtype=torch.uint8) if self.room else torch.empty(0).byte()

    def _make_anew(self) -> None:
        """Create files again that another process has removed, such as a cleaner of temporary files; this process still has their content
        mapped."""
        made = sum(buffers.make_anew() for buffers in (self.own, self.kept) if buffers is not None)
        if made:
            self._warn(f"{made} files of copies in {self.folder} were removed by another process, and are written again in full")

    def _send(self, label: Label, body: Tensor, *, good: bool) -> "_Travelling":
        assert self.kept is not None
        number = self.kept.next()
        mine = torch.frombuffer(bytearray(label.pack(self._key)), dtype=torch.uint8)
        theirs = torch.empty(LABEL_BYTES, dtype=torch.uint8)
        works = [
            dist.isend(mine, group=self.group, group_dst=self.buddy, tag=1),
            dist.isend(body, group=self.group, group_dst=self.buddy, tag=2),
            dist.irecv(theirs, group=self.group, group_src=self.keeps_for, tag=1),
            dist.irecv(self.kept.bodies[number], group=self.group, group_src=self.keeps_for, tag=2),
        ]
        return _Travelling(works, mine, theirs, number, good)

    def finish(self) -> None:
        """Wait for the copies in flight, then mark the copy received from rank `keeps_for` as complete."""
        if self._in_transit is None:
            return
        in_transit, self._in_transit = self._in_transit, None
        for work in in_transit.works:
            work.wait()
        label = Label.unpack(bytes(in_transit.arrived.numpy()), self._key)
        assert self.kept is not None and label is not None and label.rank == self.keeps_for, label
        self.kept.commit(in_transit.number, label)
        if in_transit.good:
            self.kept.keep(in_transit.number, most=self._most_good)

    def pin(self) -> None:
        """Pin the newest copy: it is kept until the next call of `pin`."""
        self.finish()
        for buffers in (self.own, self.kept):
            if buffers is None:
                continue
            labels = [(label.step, i) for i, file in enumerate(buffers.files) if (label := file.label)]
            newest = max(labels)[1] if labels else None
            for number, file in enumerate(buffers.files):
                file.pin(number == newest)

    def pinned_step(self) -> int | None:
        """The step of the copy that `pin` chose last; None if there is none."""
        return next((label.step for file in self.own.files if file.marks & VERIFIED and (label := file.label)), None)

    def _write_to_disk(self, number: int, step: int) -> None:
        """Write a copy to disk in a thread, atomically. First wait until the previous copy is on disk: if ranks skipped copies instead,
        there could soon be no step of which all ranks have a copy."""
        if self._writing:
            self._writing[0].join()
        thread = threading.Thread(target=self._to_disk, args=(number, step), name="copy-to-disk", daemon=True)
        self._writing = thread, number
        thread.start()

    def _to_disk(self, number: int, step: int) -> None:
        assert self.disk is not None
        rank = self.rank_info.rank
        part = self.disk / f"part-{rank}"
        try:
            with private.opened_below(self.disk, create=True) as folder:
                os.close(private.open_file(folder, part, os.O_WRONLY | os.O_CREAT))  # for this user alone, and no link
            others = [(old, path) for path, old in self._on_disk(rank).items() if old != step]
            for _, path in sorted(others, reverse=True)[ON_DISK - 1 :]:
                path.unlink()
            shutil.copyfile(self.own.files[number].path, part)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.rename(self.disk / file_name("own", rank, step))
            self.disk_error = None
        except OSError as error:  # training continues with one copy less, and the user is notified
            self.disk_error = str(error)
            with contextlib.suppress(OSError):
                part.unlink()

    def settle(self) -> None:
        """Wait for messages and writes in progress."""
        self.finish()
        if self._writing:
            self._writing[0].join()

    # --- restoring ---

    def restore(self, source: Source) -> Label | None:
        """Fill the state from `source`, whose tier says where the copy of this rank's state is. Return the label in the copy's header;
        None if the copy is a checkpoint, which this method does not read. All ranks must call this method together.

        Copies of later steps are invalidated, because the run computes those steps again. Raises CopyError on the rank whose copy is
        damaged."""
        tier = source.tier_of(self.rank_info.slot)
        self.forget_after(source.step)
        self._exchange(source)
        if tier is None or tier is Tier.STORE:
            return None
        if tier is Tier.DISK:
            return self._load_file(self._open_on_disk(source.step), tier)
        return self._load_file(self._own(source.step, tier), tier)

    def _own(self, step: int, tier: Tier) -> Buffer:
        if (number := self.own.find(step)) is None:
            raise CopyError(tier, step, self.rank_info.slot, "there is none")
        return self.own.files[number]

    def steps(self) -> set[int]:
        """Return the steps to which this rank can go back with its own copies in memory."""
        return {label.step for file in self.own.files if (label := file.label)}

    def go_back(self, step: int, *, now: int) -> Label:
        """Fill the state from this rank's own copy of `step`. `now` is the current step; copies of steps after `step` and before `now` are
        dropped. Raises CopyError."""
        self.settle()
        label = self._load_file(self._own(step, Tier.MEMORY), Tier.MEMORY)
        self.forget(after=step, before=now)
        return label

    def forget_after(self, step: int) -> None:
        """Invalidate copies of steps after `step`."""
        self.forget(after=step)

    def forget(self, *, after: int, before: int | None = None) -> None:
        """Invalidate copies of steps later than `after` and, if given, earlier than `before`."""
        for buffers in (self.own, self.kept):
            if buffers is not None:
                buffers.forget(after=after, before=before)
        for path, step in self._on_disk(self.rank_info.rank).items():
            if step > after and (before is None or step < before):
                path.unlink(missing_ok=True)

    def _exchange(self, source: Source) -> None:
        """Send each copy that a buddy keeps to the rank that needs it. Every rank derives the senders and receivers from `source` alone."""
        if self.kept is None:
            return
        works, arriving = [], None
        if source.tier_of(self.rank_info.slot_of(self.keeps_for)) is Tier.BUDDY:
            number = self.kept.find(source.step)
            if number is None:
                raise CopyError(Tier.BUDDY, source.step, self.rank_info.slot_of(self.keeps_for), "there is none")
            label = self.kept.files[number].label
            assert label is not None
            mine = torch.frombuffer(bytearray(label.pack(self._key)), dtype=torch.uint8)
            works += [
                (dist.isend(tensor, group=self.group, group_dst=self.keeps_for), tensor)
                for tensor in (mine, self.kept.bodies[number])
            ]
        if source.tier_of(slot := self.rank_info.slot) is Tier.BUDDY:
            arriving = self.own.find(source.step)
            arriving = self.own.next() if arriving is None else arriving
            file = self.own.files[arriving]
            file.strike_out()
            theirs = torch.empty(LABEL_BYTES, dtype=torch.uint8)
            for tensor in (theirs, self.own.bodies[arriving]):
                dist.recv(tensor, group=self.group, group_src=self.buddy)
            label = Label.unpack(bytes(theirs.numpy()), self._key)
            if label is None or label.layout != self._label.layout:
                raise CopyError(Tier.BUDDY, source.step, slot, "the data received is not a copy of this rank's state")
            file.commit(label)
        for work, _ in works:
            work.wait()

    def _on_disk(self, rank: int | None = None) -> dict[Path, int]:
        """Return the path and step of each copy on the node's disk: copies of all its ranks or, with `rank`, of one rank."""
        paths = self.disk.glob("own-*") if self.disk is not None and self.disk.is_dir() else ()
        found = {path: parse_name(path.name) for path in paths}
        return {path: step for path, (_, whose, step) in found.items() if rank is None or whose == rank}

    def _open_on_disk(self, step: int) -> Buffer:
        assert self.disk is not None, "this rank has no folder for copies on disk"
        try:
            file = Buffer.open(self.disk / file_name("own", self.rank_info.rank, step), key=self._key)
        except (OSError, ValueError) as error:
            raise CopyError(Tier.DISK, step, self.rank_info.slot, str(error)) from error
        label = file.label
        if label is None or label.step != step:
            raise CopyError(Tier.DISK, step, self.rank_info.slot, "there is none")
        return file

    def _load_file(self, file: Buffer, tier: Tier) -> Label:
        label = file.label
        assert label is not None
        if (file.layout(label), label.world, label.rank) != (self.layout, self.rank_info.world, self.rank_info.rank):
            raise CopyError(tier, label.step, self.rank_info.slot, "the copy belongs to another plan")
        body = torch.frombuffer(file.memory, dtype=torch.uint8)[PAGE + label.layout :]
        found = views(body, self.layout.entries)
        torch._foreach_copy_(self._live, [found[name] for name in self._names])
        rng = found[RNG].clone()
        encoded = found[TEXT].clone() if self.room else torch.empty(0, dtype=torch.uint8)
        total = (checksum(self._live) + checksum([rng, encoded])) % WORDS  # of the loaded state, to detect errors of loading
        if total != label.digest:
            why = f"the digest of the loaded state is {total:016x} instead of {label.digest:016x}"
            raise CopyError(tier, label.step, self.rank_info.slot, why)
        torch.set_rng_state(rng)
        self.text = bytes(encoded.numpy()).decode().rstrip()
        return label


@dataclass
class _Travelling:
    """The messages in flight between this rank and its buddies, with a copy in each direction."""

    works: list[Any]
    label: Tensor  # must live until it is sent
    arrived: Tensor
    number: int
    good: bool  # kept for rewinds

"""Converts between whole tensors and the shares of a site's ranks, so that messages between sites do not depend on a site's plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.checkpoint.shares import HeldShare, OffDeviceShare, owners, shares
from megalith.exchange import ObjectCollectives
from megalith.spec.sites import Fragment

DIGESTED = 1 << 22
"""How many words of a tensor a digest adds up at once: torch copies them to 64 bits first."""


@dataclass(frozen=True)
class _Box:
    held: HeldShare
    rank: int

    @property
    def where(self) -> tuple[slice, ...]:
        return tuple(slice(start, start + size) for start, size in zip(self.held.offset, self.held.sizes, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.held.sizes)


class WholeTensors:
    """Knows which box of each tensor each rank of a site holds. All ranks of the site build this object together."""

    def __init__(self, tensors: Mapping[str, Tensor | OffDeviceShare], group: dist.ProcessGroup) -> None:
        """`tensors`: this rank's sharded tensors, by name. `group`: the gloo group of the site's ranks. Raises ValueError if the ranks'
        boxes do not make up each tensor exactly once."""
        ranks = ObjectCollectives(group)
        self.group, self.rank, self.size = group, ranks.rank, ranks.size
        mine = {key: replace(share.held, key=key) for key, share in shares(tensors).items()}
        table = ranks.all_gather(tuple(mine.values()), tuple[HeldShare, ...])
        owned, problems = owners(table)
        if problems:
            raise ValueError("; ".join(problems))
        self.mine = {name: _Box(held, self.rank) for name, held in mine.items()}
        """This rank's box of each tensor of which it holds a part."""
        self.shapes = {held.key: held.shape for held in (held for each in table for held in each)}
        """The whole shape of each tensor of the model."""
        boxes = [_Box(held, rank) for rank, each in enumerate(table) for held in each if held.place in owned[rank]]
        self._boxes = sorted(boxes, key=lambda box: (box.rank, box.held.place))
        self.owned = {box.held.key for box in self._boxes if box.rank == self.rank}
        """The names of the tensors whose boxes this rank sends. If several ranks hold the same box, only one of them sends it."""

    def gather(self, fragment: Fragment, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather a fragment's whole tensors on the site's first rank, fp32 on the CPU; return an empty mapping on other ranks. `values`:
        this rank's boxes."""
        names = {piece.name for piece in fragment.pieces}
        wanted = [box for box in self._boxes if box.held.key in names]
        own = [values[box.held.key].reshape(-1).float().cpu() for box in wanted if box.rank == self.rank]
        if self.rank:
            if own:
                dist.send(torch.cat(own), group_dst=0, group=self.group)
            return {}
        whole = {piece.name: torch.empty(piece.shape) for piece in fragment.pieces}
        for rank in range(self.size):
            theirs = [box for box in wanted if box.rank == rank]
            if not theirs:
                continue
            flat = torch.cat(own) if rank == 0 else torch.empty(sum(box.numel for box in theirs))
            if rank:
                dist.recv(flat, group_src=rank, group=self.group)
            for box, part in zip(theirs, flat.split([box.numel for box in theirs]), strict=True):
                whole[box.held.key][box.where] = part.view(box.held.sizes)
        return whole

    def digest(self, fragment: Fragment, values: Callable[[str], Tensor]) -> int:
        """Return a digest of a fragment's whole tensors, from 1 to 2^64 - 1: the sum of their 32-bit words, which does not depend on the
        plan. All ranks of the site call this together. `values`: returns this rank's box of a tensor."""
        total = torch.zeros((), dtype=torch.int64)
        for name in (piece.name for piece in fragment.pieces if piece.name in self.owned):
            words = values(name).float().contiguous().view(torch.int32).view(-1)
            for part in words.split(DIGESTED):  # torch copies what it adds up to 64 bits
                total += part.sum(dtype=torch.int64).cpu()
        if self.size > 1:
            dist.all_reduce(total, group=self.group)
        return int(total) % (2**64 - 1) + 1

    def share(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's box of a whole tensor."""
        return whole[self.mine[name].where]

    def broadcast(self, message: Tensor) -> Tensor:
        """Broadcast `message` from the site's first rank to all its ranks; on the other ranks, `message` is a buffer of the same size."""
        if self.size > 1:
            dist.broadcast(message, group=self.group, group_src=0)
        return message

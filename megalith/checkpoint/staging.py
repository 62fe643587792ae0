"""Memory into which an asynchronous save copies the state, so that training may change the state while the copy is written."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megalith.checkpoint.shares import Share, is_quick_to_copy

ALIGNMENT = 64  # bytes: a cache line, and more than any element


class Staging:
    """One block of CPU memory, which all saves use: to get new pages from the system for each save would take four times as long
    as the copy itself. Large pages are not used, because they are faster only on an idle machine. During training the disk cache
    fills the memory, and the system needs ten times as long to make room for large pages.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def reserve(self, shares: Mapping[str, Share]) -> None:
        """Allocate the memory that `copy` of these shares will need."""
        self._grow(shares).zero_()

    def copy(self, shares: Mapping[str, Share]) -> dict[str, Share]:
        """Return shares with copies of the values, valid until the next call. Shares that are not in memory are not copied.
        Raises RuntimeError if memory cannot be allocated."""
        memory = self._grow(shares)
        copied: dict[str, Share] = {}
        start = 0
        for key, share in shares.items():
            if not is_quick_to_copy(share.data):
                copied[key] = share
                continue
            place = memory[start : start + share.held.bytes].view(share.data.dtype).view(share.data.shape)
            if isinstance(share.data, Tensor):
                place.copy_(share.data, non_blocking=True)
            else:
                for first, piece in share.data.pieces():
                    place.view(-1)[first : first + len(piece)].copy_(piece)
            copied[key] = Share(share.held, place)
            start += _aligned(share.held.bytes)
        for device in _devices(shares):
            torch.cuda.synchronize(device)
        return copied

    def _grow(self, shares: Mapping[str, Share]) -> Tensor:
        size = sum(_aligned(share.held.bytes) for share in shares.values() if is_quick_to_copy(share.data))
        pinned = bool(_devices(shares))  # an accelerator copies into pinned memory several times as fast
        if len(self._memory) < size or (pinned and not self._memory.is_pinned()):
            self._memory = torch.empty(0, dtype=torch.uint8)  # let go of the old block before asking for a larger one
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        return self._memory


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _devices(shares: Mapping[str, Share]) -> set[torch.device]:
    return {share.data.device for share in shares.values() if isinstance(share.data, Tensor) and share.data.is_cuda}

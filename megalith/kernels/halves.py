"""Master weights in two halves: the bf16 compute weight, and the remaining bits of the fp32 weight.

The upper half is the master weight rounded to bf16 with ties away from zero: half a unit in the last place is added to the bits,
and the lower 16 are cut off. The difference between the master weight and its upper half fits 16 bits exactly. If ties were
rounded to even, the difference would not fit: an even upper half would stand for both neighbouring ties, so for 65,537 master
weights. If 8 bits of the difference are kept, a weight has 24 bits (FlashOptim, arXiv:2602.23349).
"""

import torch
from torch import Tensor


def split(master: Tensor, bits: int, drawn: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split master weights (fp32) into bf16 and a lower half of 16 or 8 `bits` (int16 or int8), of the same shape.

    With 16 bits `join` restores exactly the same weights. With 8 bits the weights are first rounded to 24 bits: to the nearest
    number, or stochastically by the random words (int32) `drawn` (Gupta et al. 2015, arXiv:1502.02551, section 3). A number that
    24 bits represent is never changed.
    """
    words = master.contiguous().view(torch.int32)
    if bits == 8:
        words = (words + (0x80 if drawn is None else drawn & 0xFF)).bitwise_and_(-0x100)
    upper = (words + 0x8000) >> 16
    lower = words - (upper << 16)
    narrow = torch.int16 if bits == 16 else torch.int8
    return upper.to(torch.int16).view(torch.bfloat16), (lower if bits == 16 else lower >> 8).to(narrow)


def join(upper: Tensor, lower: Tensor) -> Tensor:
    """Invert `split`: bf16, and int16 or int8 of the same shape -> fp32."""
    low = lower.to(torch.int32)
    words = (upper.contiguous().view(torch.int16).to(torch.int32) << 16).add_(low if lower.dtype == torch.int16 else low << 8)
    return words.view(torch.float32)

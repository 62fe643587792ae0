"""The core of attention, between the projections; context parallelism and key-value caches replace this module."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from megalith.kernels.attention import attention, flash, flash_packed, flash_takes, kernel_for
from megalith.kernels.blocked import blocked_attention, pays
from megalith.kernels.mask import mask_rows
from megalith.models.batch import Batch, SegmentLengths

WHOLE = 128  # rows of so many tokens, or a multiple, fill the blocks of any kernel on CUDA, so torch may choose the fastest


class CausalCore(nn.Module):
    """softmax(scale q kᵀ) v over past tokens, computed without a seq x seq matrix or a dense mask. The default `scale` is 1 / sqrt(channels
    of q).

    With `window`, a token sees itself and the `window - 1` tokens before it, and the cost is proportional to the window (Mistral 7B, Jiang
    et al. 2023, arXiv:2310.06825, section 2). With `softcap`, scores s become softcap tanh(s / softcap) (Gemma 2, Grok-1). With
    `batch.segments`, tokens attend only to tokens of their own document. v may have a different number of channels than q and k (multi-head
    latent attention).
    """

    def __init__(self, *, scale: float | None = None, window: int | None = None, softcap: float | None = None) -> None:
        super().__init__()
        self.scale = scale
        self.window = window
        self.softcap = softcap

    def forward(
        self,
        q: Float[Tensor, "batch seq heads channels"],
        k: Float[Tensor, "batch seq kv_heads channels"],
        v: Float[Tensor, "batch seq kv_heads v_channels"],
        batch: Batch,
    ) -> Float[Tensor, "batch seq heads v_channels"]:
        seq = q.shape[1]
        scale = self.scale_of(q)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.softcap is not None or (self.window is not None and self.window < seq):
            out = self._attend_pairs(q, k, v, batch.segments, scale)  # pyright: ignore[reportCallIssue]
        elif batch.segments is None:
            out = attend(q, k, v, scale)
        else:
            out = attend_segments(q, k, v, batch.segments, scale)  # pyright: ignore[reportCallIssue]
        return out.transpose(1, 2)

    @torch.compiler.disable  # which pairs there are differs from batch to batch
    def _attend_pairs(self, q: Tensor, k: Tensor, v: Tensor, segments: SegmentLengths | None, scale: float) -> Tensor:
        if self.softcap is None and self.window is not None and segments is not None and self.window >= max(map(max, segments)):
            return attend_segments(q, k, v, segments, scale)  # pyright: ignore[reportCallIssue]
        here = ((0, q.shape[2]),)
        rows = mask_rows(here, here, batch=q.shape[0], segments=segments, window=self.window)
        return attention(q, k, v, rows=rows, kernel=kernel_for(q, v, self.softcap), scale=scale)

    def scale_of(self, q: Tensor) -> float:
        """Return the factor that multiplies the scores of q [..., channels]."""
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Compute causal attention of tensors [batch, heads, seq, channels] with the fastest kernel. k and v may have fewer heads than q:
    consecutive heads of q share one. v may have another number of channels than q and k."""
    channels, of_v = q.shape[-1], v.shape[-1]
    scale = float(channels**-0.5) if scale is None else scale
    if pays(q):
        return blocked_attention(q, k, v, True, scale)[0]
    if q.device.type == "cpu" and q.dtype == torch.float16 and not torch.compiler.is_compiling():
        here = ((0, q.shape[2]),)
        rows = mask_rows(here, here, batch=q.shape[0], segments=None, window=None)
        return attention(q, k, v, rows=rows, kernel=kernel_for(q, v), scale=scale)
    if q.shape[2] % WHOLE and flash_takes(q, v):
        return flash(q, k, v, scale)
    if channels != of_v and q.device.type == "cpu":  # its fused kernel wants them equal, and zeros change no score
        width = max(channels, of_v)
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out if out.shape[-1] == of_v else out[..., :of_v]


@torch.compiler.disable  # the lengths differ in every batch: compiled code would be compiled again for each
def attend_segments(q: Tensor, k: Tensor, v: Tensor, segments: SegmentLengths, scale: float | None = None) -> Tensor:
    """Causal attention inside each segment of each row. A kernel that supports segments computes all rows in one call; otherwise, rows with
    the same segments share calls."""
    assert len(segments) == q.shape[0] and all(sum(row) == q.shape[2] for row in segments), (segments, q.shape)
    if flash_takes(q, v):
        return flash_packed(q, k, v, segments, q.shape[-1] ** -0.5 if scale is None else scale)
    if len(set(segments)) == 1:
        return _attend_alike(q, k, v, segments[0], scale)
    alike: dict[tuple[int, ...], list[int]] = {}
    for row, lengths in enumerate(segments):
        alike.setdefault(lengths, []).append(row)
    order = [row for rows in alike.values() for row in rows]
    parts = [_attend_alike(q[rows], k[rows], v[rows], lengths, scale) for lengths, rows in alike.items()]
    back = torch.tensor(order, device=q.device).argsort()
    return torch.cat(parts)[back]


def _attend_alike(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float | None) -> Tensor:
    if len(lengths) == 1:
        return attend(q, k, v, scale)
    split = [x.split(lengths, dim=2) for x in (q, k, v)]
    return torch.cat([attend(some_q, some_k, some_v, scale) for some_q, some_k, some_v in zip(*split, strict=True)], dim=2)

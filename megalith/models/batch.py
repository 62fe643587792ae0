"""Data about the tokens of the current microbatch that every part of a model may read."""

from dataclasses import dataclass

from torch import Tensor

from megalith.kernels.draws import Tokens

SegmentLengths = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Batch:
    """One microbatch. Tensors are [batch, seq] unless noted. A part of the model that needs none of these tensors ignores the batch.

    Under context parallelism the tensors cover this rank's part of each sequence, but `segments` describes whole sequences.
    """

    tokens: Tensor
    targets: Tensor | None = None  # next tokens, -100 where there is none; None: the head gives logits, not a loss
    positions: Tensor | None = None  # None: 0, 1, 2, ... in every row
    segments: SegmentLengths | None = (
        None  # lengths of each row's documents, summing to the whole seq; None: every row is one document
    )
    ahead: Tensor | None = None  # [depth, batch, seq]: the 1st, 2nd, ... token after each, for multi-token prediction
    ahead_targets: Tensor | None = None  # [depth, batch, seq]: the 2nd, 3rd, ... token after each, -100 where there is none
    loss_scale: float = 1.0  # 1 / valid targets of the *global* batch, so that losses and gradients simply add up
    z_loss: float = 0.0
    gradient_scale: float = 1.0  # the power of two that every loss's gradient is multiplied by: the loss scale of fp16
    sequences: int = 1  # of the global batch: means over sequences or tokens that are known to be there divide by it
    work: Tokens | None = None  # the samples and positions of these tokens, for products that need them; None: not given
    rotary: tuple[tuple[Tensor, Tensor], ...] = ()  # cos and sin tables of the stage's distinct rotary embeddings

"""The last part: final norm, projection onto the vocabulary, and the loss."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from megalith.kernels.cross_entropy import Loss, cross_entropy
from megalith.models.batch import Batch
from megalith.models.norm import RMSNorm
from megalith.spec.model import HeadSpec


class CrossEntropy(nn.Module):
    """Mean next-token loss over the run's valid targets. A seam: vocabulary parallelism swaps it."""

    def forward(self, x: Float[Tensor, "batch seq dim"], weight: Float[Tensor, "vocab dim"], batch: Batch) -> Loss:
        assert batch.targets is not None
        return cross_entropy(x.flatten(0, 1), weight, batch.targets.flatten(), scale=batch.loss_scale, z_loss=batch.z_loss)


class Output(nn.Module):
    """Logits [batch, seq, vocab], or the loss when the batch has targets."""

    def __init__(self, dim: int, vocab: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab, dim))
        self.loss = CrossEntropy()

    def forward(self, x: Float[Tensor, "batch seq dim"], batch: Batch) -> Tensor | Loss:
        if batch.targets is not None:
            return self.loss(x, self.weight, batch)
        return x @ self.weight.T


class Head(nn.Module):
    """Final norm and output."""

    def __init__(self, dim: int, spec: HeadSpec) -> None:
        super().__init__()
        self.norm = RMSNorm(dim, spec.norm_eps)
        self.output = Output(dim, spec.vocab)

    def forward(self, x: Float[Tensor, "batch seq dim"], batch: Batch) -> Tensor | Loss:
        return self.output(self.norm(x), batch)

"""The last part: final norm, projection onto the vocabulary, the loss, and multi-token prediction (MTP)."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from megalith.kernels.cross_entropy import Loss, Terms, TokenLoss, cross_entropy, finish
from megalith.kernels.multiply import Multiply
from megalith.kernels.tiled import ResidentTable, Table, tiled_cross_entropy
from megalith.models.batch import Batch
from megalith.models.block import Block
from megalith.models.embedding import Embedding
from megalith.models.linear import Linear
from megalith.models.norm import norm
from megalith.spec.model import EmbeddingSpec, HeadSpec, MtpSpec


class CrossEntropy(nn.Module):
    """Next-token cross-entropy, summed over this microbatch's valid targets and multiplied by `batch.loss_scale`. Vocabulary parallelism
    replaces this module.

    `multiply` computes the products with the weight; `logit_scale` and `softcap` are passed to `kernels.cross_entropy.finish`. `of_token`
    is the user's own loss function for a token, if the run has one. With a `table`, the loss is computed in its tiles.
    """

    of_token: TokenLoss | None = None

    def forward(
        self,
        x: Float[Tensor, "batch seq dim"],
        weight: Float[Tensor, "vocab dim"],
        batch: Batch,
        *,
        multiply: Multiply,
        table: Table | None = None,
        **finishing: float,
    ) -> Loss:
        assert batch.targets is not None
        how: dict[str, Any] = {"multiply": multiply, **finishing}
        how |= {"scale": batch.loss_scale, "z_loss": batch.z_loss, "gradient_scale": batch.gradient_scale}
        tokens, targets = x.flatten(0, 1), batch.targets.flatten()
        if table is not None:
            return tiled_cross_entropy(tokens, weight, table, targets, Terms(**how))
        return cross_entropy(tokens, weight, targets, of_token=self.of_token, **how)


class Output(nn.Module):
    """Logits [batch, seq, vocab], or the loss when the batch has targets."""

    def __init__(self, dim: int, spec: HeadSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(spec.vocab, dim))
        self.multiply = Multiply()
        self.loss = CrossEntropy()
        self.tile = 0  # rows of the vocabulary for which the loss is computed at once; 0: all
        self.table: Table | None = None  # reads the weight in tiles, if it is not in memory
        self.finishing: dict[str, float] = {}  # the operations between the products with the weight and the logits
        if spec.scale != 1.0:
            self.finishing["logit_scale"] = spec.scale
        if spec.softcap is not None:
            self.finishing["softcap"] = spec.softcap

    def forward(self, x: Float[Tensor, "batch seq dim"], batch: Batch) -> Tensor | Loss:
        if batch.targets is not None:
            table = ResidentTable(self.weight, self.tile) if self.table is None and self.tile else self.table
            return self.loss(x, self.weight, batch, multiply=self.multiply, table=table, **self.finishing)
        if self.table is not None:
            products = torch.cat([self.multiply.fprop(x, tile) for tile in self.table.read()], dim=-1)
            return finish(products, **self.finishing)
        return finish(self.multiply(x, self.weight), **self.finishing)


class MtpModule(nn.Module):
    """One depth of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): the previous depth's output for each token and the
    embedding of a later token pass through one more block. All depths share the model's embedding table."""

    def __init__(self, dim: int, spec: MtpSpec, embedding: EmbeddingSpec, rope_slot: int) -> None:
        super().__init__()
        # What precedes knows its position, and was normalised.
        self.embedding = Embedding(dim, embedding.model_copy(update={"positions": None, "norm": None}))
        self.norm_embedding = norm(dim, spec.block.norm)
        self.norm_hidden = norm(dim, spec.block.norm)
        self.project = Linear(2 * dim, dim)
        self.block = Block(dim, spec.block, rope_slot)
        self.norm = norm(dim, spec.block.norm)

    def forward(self, hidden: Float[Tensor, "batch seq dim"], tokens: Tensor, batch: Batch) -> Float[Tensor, "batch seq dim"]:
        """`hidden` and the result are normalised, as the output projection needs its input. `tokens` [batch, seq]: the later token of each
        position."""
        embedded = self.norm_embedding(self.embedding(tokens, batch))
        x = torch.cat((embedded, self.norm_hidden(hidden)), dim=-1)  # in the order of the released weights
        return self.norm(self.block(self.project(x), batch))


class Head(nn.Module):
    """Final norm and output; with `spec.ahead`, the losses of multi-token prediction are added to the objective, but not to the nll."""

    def __init__(self, dim: int, spec: HeadSpec, embedding: EmbeddingSpec, rope_slot: int = 0) -> None:
        """`rope_slot`: the index in `batch.rotary` of the rotary tables that the blocks of multi-token prediction (`spec.ahead`) use."""
        super().__init__()
        self.norm = norm(dim, spec.norm)
        self.output = Output(dim, spec)
        depth = spec.ahead.depth if spec.ahead else 0
        self.ahead_weight = spec.ahead.weight if spec.ahead else 0.0
        self.ahead = nn.ModuleList(MtpModule(dim, spec.ahead, embedding, rope_slot) for _ in range(depth) if spec.ahead)

    def forward(self, x: Float[Tensor, "batch seq dim"], batch: Batch) -> Tensor | Loss:
        x = self.norm(x)
        out = self.output(x, batch)
        if isinstance(out, Tensor) or batch.ahead is None or not self.ahead:
            return out
        return Loss(out.objective + self.ahead_weight / len(self.ahead) * self._ahead(x, batch), out.nll)

    def _ahead(self, x: Tensor, batch: Batch) -> Tensor:
        """The sum of the losses of multi-token prediction. Each depth takes the previous depth's output, and tokens shifted by one more
        position."""
        assert batch.ahead is not None and batch.ahead_targets is not None
        assert len(batch.ahead) == len(batch.ahead_targets) == len(self.ahead), (batch.ahead.shape, len(self.ahead))
        total = torch.zeros((), device=x.device)
        for ahead, tokens, targets in zip(self.ahead, batch.ahead, batch.ahead_targets, strict=True):
            x = ahead(x, tokens, batch)
            loss = self.output(x, replace(batch, targets=targets))
            assert isinstance(loss, Loss)
            total = total + loss.objective
        return total

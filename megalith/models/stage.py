"""A run of a model's parts. The whole model is the one-stage case; a pipeline stage is a slice of it."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from megalith.kernels.cross_entropy import Loss
from megalith.models.batch import Batch
from megalith.models.block import Block
from megalith.models.embedding import Embedding
from megalith.models.head import Head
from megalith.models.rope import tables
from megalith.spec.model import ModelSpec

TIED = {"head.output.weight": "embedding.weight"}


class Stage(nn.Module):
    """Parts `first` to `last - 1` of a model (part 0 is the embedding, the last the head).

    Parameters carry the names they have in the whole model, whichever stage holds them.
    """

    def __init__(self, spec: ModelSpec, first: int = 0, last: int | None = None) -> None:
        super().__init__()
        self.spec = spec
        names = spec.part_names[first:last]
        ropes = {block.attention.rope: block.attention.head_dim for block in spec.blocks}
        self._ropes = tuple(ropes.items())
        slots = {rope: slot for slot, rope in enumerate(ropes)}
        self.part_names = names
        self.blocks = nn.ModuleDict()
        for name in names:
            if name == "embedding":
                self.embedding = Embedding(spec.dim, spec.embedding.vocab)
            elif name == "head":
                self.head = Head(spec.dim, spec.head)
            else:
                number = name.removeprefix("blocks.")
                block = spec.blocks[int(number)]
                self.blocks[number] = Block(spec.dim, block, slots[block.attention.rope])
        if spec.head.tied and {"embedding", "head"} <= set(names):
            self.head.output.weight = self.embedding.weight

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """The parts in order, by name."""
        return ((name, self.get_submodule(name)) for name in self.part_names)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Each parameter once, under its name in the whole model (a tied output is the embedding, even on a stage of its own)."""
        tied = TIED if self.spec.head.tied else {}
        return {tied.get(name, name): parameter for name, parameter in self.named_parameters()}

    def forward(self, x: Tensor, batch: Batch) -> Tensor | Loss:
        """x: tokens [batch, seq] for the first stage, else the previous stage's output [batch, seq, dim]."""
        batch = replace(batch, rotary=self._rotary(batch))
        for _, part in self.parts():
            x = part(x, batch)
        return x

    def _rotary(self, batch: Batch) -> tuple[tuple[Tensor, Tensor], ...]:
        """One table for all layers that rotate alike."""
        positions = batch.positions
        if positions is None:
            positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        return tuple(tables(rope, head_dim, positions) for rope, head_dim in self._ropes)

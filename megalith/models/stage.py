"""Consecutive parts of a model: a pipeline stage, or with a single stage the whole model."""

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
from megalith.spec.model import AttentionSpec, LatentAttentionSpec, ModelSpec, RopeSpec
from megalith.spec.sizes import tied_names

Rotation = tuple[RopeSpec, int]  # how, and how many channels


def rotation(attention: AttentionSpec | LatentAttentionSpec) -> Rotation | None:
    """Return the rotary embedding of an attention layer and its number of channels; None if the layer does not rotate."""
    if isinstance(attention, LatentAttentionSpec):
        return attention.rope, attention.rope_dim
    return None if attention.rope is None else (attention.rope, attention.rope_dim or attention.head_dim)


class Stage(nn.Module):
    """Parts `first` to `last - 1` of a model. Part 0 is the embedding; the last part is the head.

    A parameter has the same name as in the whole model, whichever stage holds it.
    """

    def __init__(self, spec: ModelSpec, first: int = 0, last: int | None = None) -> None:
        super().__init__()
        self.spec = spec
        names = spec.part_names[first:last]
        attentions = [_attention(spec, name) for name in names]
        wanted = (rotation(attention) for attention in attentions if attention)
        self._rotations = tuple(dict.fromkeys(each for each in wanted if each))
        self.part_names = names
        self.blocks = nn.ModuleDict()
        for name, attention in zip(names, attentions, strict=True):
            turn = rotation(attention) if attention else None
            slot = self._rotations.index(turn) if turn else 0  # of a layer that does not rotate: not read
            if name == "embedding":
                self.embedding = Embedding(spec.dim, spec.embedding)
            elif name == "head":
                self.head = Head(spec.dim, spec.head, spec.embedding, slot)
            else:
                number = name.removeprefix("blocks.")
                self.blocks[number] = Block(spec.dim, spec.blocks[int(number)], slot)
        self.tie()

    def tie(self) -> None:
        """Use one parameter for all names that are tied to it, even if this stage lacks the part that owns it. Call `tie` again
        after `to_empty`, which allocates separate memory for each name."""
        tied, owners = tied_names(self.spec), dict[str, nn.Parameter]()
        for name, parameter in list(self.named_parameters()):
            owner = owners.setdefault(tied.get(name, name), parameter)
            if owner is not parameter:
                path, _, child = name.rpartition(".")
                self.get_submodule(path).register_parameter(child, owner)

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """The parts in order, by name."""
        return ((name, self.get_submodule(name)) for name in self.part_names)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Each parameter once, under its name in the whole model (a tied output has the embedding's name, even if the embedding is on
        another stage)."""
        tied = tied_names(self.spec)
        return {tied.get(name, name): parameter for name, parameter in self.named_parameters()}

    def lasting_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that training changes and that checkpoints contain: loads and biases of routers, and the maxima from which
        delayed scaling computes its scales."""
        return {name: t for name, t in self.state_dict(keep_vars=True).items() if not isinstance(t, nn.Parameter)}

    def forward(self, x: Tensor, batch: Batch) -> Tensor | Loss:
        """Run all parts in order. x: tokens [batch, seq] for the first stage, else the previous stage's output [batch, seq, dim]."""
        batch = self.prepare(batch)
        for _, part in self.parts():
            x = part(x, batch)
        return x

    def prepare(self, batch: Batch) -> Batch:
        """The batch with the rotary tables, which all parts of the stage share."""
        return replace(batch, rotary=self._rotary(batch))

    def _rotary(self, batch: Batch) -> tuple[tuple[Tensor, Tensor], ...]:
        positions = batch.positions
        if positions is None:
            positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        return tuple(tables(rope, channels, positions) for rope, channels in self._rotations)


def _attention(spec: ModelSpec, part: str) -> AttentionSpec | LatentAttentionSpec | None:
    if part == "head":
        return spec.head.ahead.block.attention if spec.head.ahead else None
    return spec.blocks[int(part.removeprefix("blocks."))].attention if part != "embedding" else None

"""The samples that a rank computes in a step, and how they are split into microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from megalith.data.stream import NO_TARGET
from megalith.data.stream import Batch as Samples
from megalith.kernels.draws import Tokens
from megalith.models.batch import Batch
from megalith.parallel.context import parts
from megalith.parallel.groups import Groups
from megalith.spec.run import RunSpec

if TYPE_CHECKING:
    from megalith.train.assemble import Trainer


def indices(spec: RunSpec, *, first: int, data_rank: int) -> list[range]:
    """Return the sample numbers of each microbatch of a data rank, for the step whose global batch starts at sample `first`.

    The i-th microbatches of all data ranks together hold consecutive samples, and the step's samples are the same for every plan.
    """
    size, ranks = spec.plan.microbatch, spec.plan.data
    starts = (first + (i * ranks + data_rank) * size for i in range(spec.microbatches))
    return [range(start, start + size) for start in starts]


def without_targets(samples: Samples, rows: Sequence[bool]) -> Samples:
    """Return the samples, with no targets in the rows for which `rows` is true: such rows only give every rank tensors of one shape."""
    return replace(samples, targets=np.where(np.array(rows)[:, None], NO_TARGET, samples.targets))


@dataclass(frozen=True)
class Cut:
    """A rank's part of each sample, whether documents are masked from each other, and the depth of multi-token prediction."""

    masked: bool = False  # tokens see their own document only; otherwise rows are single documents
    ahead: int = 0  # depth of the model's multi-token prediction
    context: int = 0  # this rank's part of each sequence, of `contexts`
    contexts: int = 1

    @classmethod
    def of(cls, trainer: "Trainer") -> "Cut":
        head, groups = trainer.model.head, trainer.groups
        depth = head.ahead.depth if head.ahead else 0
        return cls(trainer.spec.data.document_mask, depth, groups.coordinates["context"], groups.mesh.context)


def to_batch(
    samples: Samples,
    cut: Cut,
    *,
    device: torch.device,
    loss_scale: float,
    z_loss: float = 0.0,
    sequences: int = 1,
    gradient_scale: float = 1.0,
    wide: bool = False,
    raised: frozenset[str] = frozenset(),
) -> Batch:
    """Return a microbatch on the device. `sequences`: the number of sequences in the whole global batch. `wide`: all matrix products use
    high precision; `raised`: the parts of the model whose products use high precision."""
    several = cut.masked and any(len(row) > 1 for row in samples.segments)
    length = samples.tokens.shape[1]
    positions = samples.positions if cut.masked else np.broadcast_to(np.arange(length), samples.tokens.shape)
    arrays = {"tokens": samples.tokens, "targets": samples.targets, "positions": positions}
    if cut.ahead:
        arrays |= _ahead(samples, cut)
    places = np.arange(length)
    if cut.contexts > 1:
        mine = places = np.concatenate([np.arange(*run) for run in parts(length, cut.contexts)[cut.context]])
        arrays = {name: array[..., mine] for name, array in arrays.items()}
    elif not cut.masked:
        del arrays["positions"]
    tensors = {name: _tensor(np.ascontiguousarray(array), device) for name, array in arrays.items()}
    return Batch(
        **tensors,  # pyright: ignore[reportArgumentType]  # tokens, targets and other tensors, by field
        segments=samples.segments if several else None,
        loss_scale=loss_scale,
        z_loss=z_loss,
        sequences=sequences,
        gradient_scale=gradient_scale,
        work=Tokens(_tensor(np.array(samples.numbers), device), _tensor(places, device), wide, raised),
    )


def _ahead(samples: Samples, cut: Cut) -> dict[str, np.ndarray]:
    """For each depth k, return the kth token after each token, and the target of that later token. If the kth token lies beyond the end of
    the document (or row), there is no target."""
    rows, length = samples.tokens.shape
    lengths = samples.segments if cut.masked else ((length,),) * rows
    left = np.stack(
        [np.concatenate([np.arange(n, 0, -1) for n in row]) for row in lengths]
    )  # tokens to the end, this one included
    tokens, targets = [], []
    for k in range(1, cut.ahead + 1):
        inside = left > k
        tokens.append(np.where(inside, np.roll(samples.tokens, -k, axis=1), 0))
        targets.append(np.where(inside, np.roll(samples.targets, -k, axis=1), NO_TARGET))
    return {"ahead": np.stack(tokens), "ahead_targets": np.stack(targets)}


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def count_valid(microbatches: Sequence[Samples], *, groups: Groups) -> int:
    """Count the valid targets of the whole global batch. Because this number is known before the first backward, each loss can be divided
    by it, and losses and gradients of all ranks only have to be summed."""
    mine = sum(int((samples.targets >= 0).sum()) for samples in microbatches)
    count = torch.tensor(mine if groups.coordinates["context"] == 0 else 0)  # ranks of a context read the same samples
    dist.all_reduce(count, group=groups.data)
    return max(1, int(count))

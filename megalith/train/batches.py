"""Which samples a rank computes in a step, and how they become microbatches."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from megalith.data.stream import Batch as Samples
from megalith.models.batch import Batch
from megalith.spec.run import RunSpec


def indices(spec: RunSpec, *, first: int, data_rank: int) -> list[range]:
    """Sample numbers of each of a data rank's microbatches, in the step whose global batch starts at sample `first`.

    Microbatch i of all data ranks together is a run of samples, and the step's samples are the same for every plan.
    """
    size, ranks = spec.plan.microbatch, spec.plan.data
    starts = (first + (i * ranks + data_rank) * size for i in range(spec.microbatches))
    return [range(start, start + size) for start in starts]


def to_batch(samples: Samples, *, masked: bool, device: torch.device, loss_scale: float, z_loss: float = 0.0) -> Batch:
    """A microbatch on the device. `masked`: tokens see their own document only; otherwise rows are single documents."""
    cut = masked and any(len(row) > 1 for row in samples.pieces)
    return Batch(
        tokens=_tensor(samples.tokens, device),
        targets=_tensor(samples.targets, device),
        positions=_tensor(samples.positions, device) if masked else None,
        pieces=samples.pieces if cut else None,
        loss_scale=loss_scale,
        z_loss=z_loss,
    )


def _tensor(array: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).to(device, non_blocking=True)


def count_valid(microbatches: Sequence[Samples], *, group: dist.ProcessGroup) -> int:
    """Targets of the whole global batch that count: known before the first backward, so losses and gradients simply add up."""
    count = torch.tensor(sum(int((samples.targets >= 0).sum()) for samples in microbatches))
    dist.all_reduce(count, group=group)
    return max(1, int(count))

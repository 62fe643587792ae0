"""Trainers for the ranks of a test."""

import torch
import torch.distributed as dist

from megalith.data.stream import Batch as Samples
from megalith.prove.parity import RandomText
from megalith.spec.run import RunSpec
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.batches import indices

CPU = torch.device("cpu")


def trainer_of(spec: RunSpec) -> Trainer:
    """Return a trainer with this rank's part of the run, on the CPU."""
    trainer = assemble(spec, groups=mesh_groups(spec, CPU), device=CPU)
    dist.barrier()  # a rank that ended now would break another rank's connection to it
    return trainer


def microbatches(trainer: Trainer, step: int = 0) -> list[Samples]:
    """Return this rank's random samples of one step."""
    spec, text = trainer.spec, RandomText(trainer.spec)
    first = step * spec.train.global_batch
    return [text.batch(part) for part in indices(spec, first=first, data_rank=trainer.groups.coordinates["data"])]

"""Counts a rank's step without the machine: the trainer's own `assemble` and `train_step` run on fake tensors and fake groups.

Because the real code runs, its counts cannot deviate from a real step, as the counts of a separate model could. CPU kernels are
traced: the internal allocations of GPU kernels, and fragmentation of the caching allocator, are not included.
"""

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from megalith.data.stream import Batch as Samples
from megalith.machine.resident import most_resident_bytes
from megalith.prove import fake
from megalith.prove.meter import Memory, Meter, Traffic, Work
from megalith.spec import cluster
from megalith.spec.run import RunSpec
from megalith.spec.sites import fragments
from megalith.spec.state import Place
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.measure.precision import PrecisionWatch
from megalith.train.sites.state import OuterState
from megalith.train.step import train_step

CPU = torch.device("cpu")


@dataclass(frozen=True)
class RankCounts:
    """The counts from the time in which one rank built its trainer and computed its first step."""

    coordinates: dict[str, int]
    parts: list[str]
    parameters: int
    state: dict[str, int]
    """Bytes of the rank's share between steps: weights, gradients (once all are computed), optimizer. For the tiers host and
    disk, the bytes also include the peak of what blocks keep there for backward."""
    memory: Memory
    memory_timeline: list[dict[str, int]]  # bytes by category along the step
    traffic: list[Traffic]
    work: Work
    actions: list[str]  # of the pipeline, in the order in which they ran


@dataclass(frozen=True)
class DryRun:
    """Dry run of one rank of a world, with the time and memory that the dry run itself took."""

    world: int
    rank: int
    counted: RankCounts
    seconds: float
    resident: int  # bytes of this process, at most


def dryrun(spec: RunSpec, *, rank: int) -> DryRun:
    """Make a dry run of rank `rank` of the run's plan. Raises RuntimeError if this process is already a rank of a process group."""
    began = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(fake.groups_of(spec.plan.ranks, rank=rank))
        if spec.plan.compile:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        found = count(spec, [single_documents(spec)] * spec.microbatches, fake_tensors=True)
    return DryRun(spec.plan.ranks, rank, found, time.perf_counter() - began, most_resident_bytes())


def count(spec: RunSpec, microbatches: Sequence[Samples], *, fake_tensors: bool) -> RankCounts:
    """Count this rank's first step on `microbatches`, with CPU tensors or fake ones. All ranks must call this function together.

    Routers distribute tokens evenly, because fake scores have no values, and real scores would differ from step to step.
    """
    if spec.plan.state.release:  # most steps are not clipped, and have one pass
        spec = spec.model_copy(update={"optimizer": spec.optimizer.model_copy(update={"clip": 0.0})})
    groups = mesh_groups(spec, CPU)
    meter = Meter()
    with ExitStack() as stack:
        if fake_tensors:
            stack.enter_context(fake.Fakes())
        stack.enter_context(meter)
        trainer = assemble(spec, groups=groups, device=CPU, target=_target(spec))
        trainer.extremes.every = 0  # most steps have no look
        for moe in trainer.routers().values():
            moe.router.spec = moe.router.spec.model_copy(update={"balanced": True})
        meter.follow(trainer)
        outer, place = _outer(trainer)
        for tensor in outer:
            if place == "device":
                meter.label(tensor, "optimizer")
            else:
                meter.pass_over(tensor)
        meter.begin_step()
        done = train_step(trainer, microbatches, step=0)
        trainer.state.complete()
        traffic, work = meter.traffic(), meter.work()
        watch = PrecisionWatch.of(trainer, lambda step: microbatches)
        if watch is not None:  # a step without a comparison sends and computes less, and a rank needs room for both
            watch.gradients(1)
    state = trainer.state.bytes()
    where = "optimizer" if place == "device" else place
    state[where] = state.get(where, 0) + sum(tensor.numel() * tensor.element_size() for tensor in outer)
    for tier, retained in trainer.tiers.items():
        state[tier] = state.get(tier, 0) + retained.counted.most
    return RankCounts(
        coordinates=groups.coordinates,
        parts=[name for stage in trainer.stages.values() for name in stage.part_names],
        parameters=sum(p.numel() for p in trainer.parameters.values()),
        state=state,
        memory=meter.memory(),
        memory_timeline=meter.memory_timeline(),
        traffic=traffic,
        work=work,
        actions=[name for name, _, _ in done.spans if name not in ("WAIT", "UPDATE", "UPDATE_WAIT")],
    )


def _target(spec: RunSpec) -> str:
    return CPU.type if spec.cluster == "local" else cluster.load(spec.cluster).accelerator.kind


def _outer(trainer: Trainer) -> tuple[list[torch.Tensor], Place]:
    """Make the tensors that merges with other sites keep for this rank's weights, and return them with their place; none in a run
    without sites."""
    if (sites := trainer.run.sites) is None:
        return [], "device"
    shapes = {name: tuple(trainer.state.master(name).shape) for name in trainer.state.masters}
    return OuterState(trainer.state, fragments(shapes, sites), sites, leads=False).kept, sites.place


def single_documents(spec: RunSpec) -> Samples:
    """Return a microbatch in which every sequence is one document, the case in which attention has the most pairs, and a rank the
    most bytes."""
    rows, length = spec.plan.microbatch, spec.train.seq_len
    tokens = np.zeros((rows, length), dtype=np.int64)
    positions = np.tile(np.arange(length), (rows, 1))
    return Samples(tokens, tokens, positions, ((length,),) * rows, ("none",) * rows, tuple(range(rows)))

"""Helpers for computations between steps that must not change the state of training."""

from collections.abc import Iterator
from contextlib import contextmanager

from megalith.parallel.data import Bucket
from megalith.parallel.execute import Executor
from megalith.schedule.lower import lower
from megalith.schedule.table import build, schedule_problem_texts
from megalith.train.assemble import Trainer


def smallest(trainer: Trainer) -> Executor:
    """Return an executor for the plan's schedule with the fewest microbatches that the schedule allows. Collective, because the executor
    creates communicators for its messages."""
    spec, executor = trainer.spec, trainer.executor
    plan = spec.plan
    sizes = {"ranks": plan.pipeline, "chunks": plan.chunks}
    counts = (
        n
        for n in range(1, spec.microbatches)
        if not schedule_problem_texts(plan.schedule, microbatches=n, zero=plan.zero, **sizes)
    )
    count = next(counts, spec.microbatches)
    program = lower(build(plan.schedule, microbatches=count, **sizes), plan.zero)
    parts = {"reducer": executor.reducer, "groups": trainer.groups, "hidden": executor.hidden}
    return Executor(program, trainer.runners, **parts)


def buckets_of(trainer: Trainer) -> list[Bucket]:
    """Return each bucket of this rank once."""
    return list(dict.fromkeys(bucket for runner in trainer.runners.values() for used in runner.buckets for bucket in used))


@contextmanager
def uncounted(trainer: Trainer) -> Iterator[None]:
    """Restore the step's counters at the end of the `with` block: the tokens of each expert, and the largest magnitudes for delayed
    scales."""
    counts = trainer.counted()
    before = [count.clone() for count in counts]
    try:
        yield
    finally:
        for count, old in zip(counts, before, strict=True):
            count.copy_(old)


@contextmanager
def unobserved(trainer: Trainer) -> Iterator[None]:
    """Inside the `with` block, no hook observes gradients before their reduction."""
    buckets = buckets_of(trainer)
    before = [(bucket.probe, bucket.observe) for bucket in buckets]
    for bucket in buckets:
        bucket.probe = bucket.observe = None
    try:
        yield
    finally:
        for bucket, (probe, observe) in zip(buckets, before, strict=True):
            bucket.probe, bucket.observe = probe, observe

"""Prediction of a plan over all phases of a run: whether it fits in each phase, and the total time.

The search finds the plan that is best in the phase with the most tokens. The plan that is found must fit, and be valid, in all
phases.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megalith.cost.estimate import Estimate
from megalith.cost.software import assumed
from megalith.cost.workload import Workload
from megalith.planner.linked import outer
from megalith.planner.request import ResolvedRequest
from megalith.planner.search import Candidate, Scorer
from megalith.planner.training import Training, training
from megalith.spec.phases import Phase, Phases
from megalith.spec.plan import Plan
from megalith.spec.run import TrainSpec
from megalith.spec.treatment import copied_each_step, table_kinds


@dataclass(frozen=True)
class InPhase:
    """Prediction of a plan in one phase of a run, and the number of the run's steps in this phase."""

    phase: Phase
    steps: int
    estimate: Estimate

    def to_json(self) -> dict[str, Any]:
        names = ("first", "step", "seq_len", "global_batch")
        time, memory = self.estimate.time.step, self.estimate.memory.total
        return {name: getattr(self.phase, name) for name in names} | {
            "steps": self.steps, "seconds": time * self.steps, "step_seconds": time, "memory": memory, "fits": self.estimate.fits,
        }  # fmt: skip


def workload_in(request: ResolvedRequest, plan: Plan, phase: Phase | TrainSpec) -> Workload:
    """Return the workload of a step of a phase, or of the run's own length and batch, under a plan."""
    optimizer, (format, narrow) = request.run.optimizer, request.computes
    return Workload(
        request.model,
        plan,
        request.cluster,
        phase.seq_len,
        phase.global_batch,
        format,
        assumed(plan, request.software),
        optimizer.kind,
        optimizer.small,
        optimizer.master,
        request.run.train.gradients,
        narrow=narrow,
        outer=outer(request.sites),
        vocab_tile=request.run.train.vocab_tile,
        tables=table_kinds(optimizer),
        copied=copied_each_step(request.run),
    )


def fits_all(request: ResolvedRequest, plan: Plan, scorer: Scorer) -> bool:
    """Return True if the plan fits in every phase. The search itself checks only one phase."""
    if request.whole is None:
        return True
    workloads = (workload_in(request, plan, phase) for phase in Phases.of(request.whole).shapes)
    return all(scorer.fits(each, scorer.memory(each)) for each in workloads)


def in_phases(request: ResolvedRequest, plan: Plan, scorer: Scorer) -> tuple[InPhase, ...]:
    """Return the prediction in each phase that the run enters; empty for a run of one phase."""
    if request.whole is None:
        return ()
    spans = Phases.of(request.whole).spans(request.whole.train.steps)
    return tuple(InPhase(phase, steps, scorer.estimate(workload_in(request, plan, phase))) for phase, steps in spans)


def whole_training(choice: Candidate, request: ResolvedRequest, scorer: Scorer) -> Training:
    """Return time and cost of the whole training, summed over its phases. Raises AssertionError if no length is known."""
    assert request.tokens is not None
    found = list(_trainings(choice, request, scorer))
    if not found:
        return training(choice, request.cluster, tokens=request.tokens)
    sums = {name: [getattr(one, name) for one in found] for name in vars(found[0])}
    return replace(found[0], **{name: None if None in each else sum(each) for name, each in sums.items()})


def _trainings(choice: Candidate, request: ResolvedRequest, scorer: Scorer) -> Iterator[Training]:
    for one in in_phases(request, choice.plan, scorer):
        tokens = one.steps * one.phase.global_batch * one.phase.seq_len
        yield training(Candidate(choice.plan, one.estimate), request.cluster, tokens=tokens)

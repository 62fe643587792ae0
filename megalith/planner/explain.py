"""Explanation of a plan: the cost of each neighbouring choice. Imports torch only to trace parts."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megalith.cost.software import hiding
from megalith.cost.workload import Workload
from megalith.planner.candidates import even_layers, offloaded, retained, searched, suited
from megalith.planner.search import Candidate, Scorer
from megalith.schedule import schedule_problems
from megalith.schedule.table import SCHEDULES, interleaving
from megalith.spec.plan import Plan, RetainSpec
from megalith.spec.sizes import own_tensors


@dataclass(frozen=True)
class Neighbour:
    """One change of the plan, and its effect."""

    change: str
    """The change as text, such as "tensor 8 -> 4"."""
    plan: Plan
    seconds: float
    """Seconds of the changed plan's step minus seconds of the plan's step; above 0 is slower."""
    memory: float
    """Bytes of the worst rank under the changed plan minus bytes of the worst rank under the plan."""
    fits: bool
    grows: str
    """The term of step time that grows most, or shrinks least."""

    @property
    def offload(self) -> float:
        """The share of the optimizer's state that is not on the device."""
        return self.plan.state.away

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "plan": self.plan.model_dump(), "offload": self.offload}


def explain(workload: Workload, scorer: Scorer) -> tuple[Neighbour, ...]:
    """Return every valid neighbour of a workload's plan, the fastest first."""
    own, base = scorer.estimate(workload), replace(workload.software_profile, overlap_expert=False)
    here = Candidate(workload.plan, own)
    plans = [(change, replace(workload, plan=plan, software_profile=hiding(plan, base))) for change, plan in neighbours(workload)]
    found = []
    for change, changed in (*plans, *_offloads(workload)):
        other = scorer.estimate(changed)
        terms = {name: value - getattr(here.estimate.time, name) for name, value in vars(other.time).items() if name != "step"}
        found.append(
            Neighbour(
                change=change, plan=changed.plan, seconds=other.time.step - own.time.step, memory=other.memory.total - own.memory.total,
                fits=other.fits, grows=max(terms, key=lambda name: terms[name]),
            )
        )  # fmt: skip
    return tuple(sorted(found, key=lambda neighbour: neighbour.seconds))


def _offloads(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Yield the plan with none and with all of the optimizer's state in host memory, unless the plan has this share already. Then yield the
    plan with gradients that stay until the update, if it releases them; and without offloaded activations if it has some, else with all
    activations in host memory."""
    plan, here = workload.plan, workload.plan.state.away
    for share in (0.0, 1.0):
        if share != here:
            change = f"offload {_moved(here)} -> {_moved(share)}"
            yield change, replace(workload, plan=offloaded(plan, share))
    if plan.state.release:
        stays = plan.state.model_copy(update={"release": False})
        yield "gradients stay", replace(workload, plan=plan.model_copy(update={"state": stays}))
    if plan.retain.away:
        yield "activations stay", replace(workload, plan=plan.model_copy(update={"retain": RetainSpec()}))
    else:
        host = next(iter(retained(plan, len(workload.model.blocks), (1.0,))))
        yield "activations -> host", replace(workload, plan=host)


def _moved(share: float) -> str:
    return {0.0: "none", 1.0: "optimizer"}.get(share, f"{share:.0%} optimizer")


def neighbours(workload: Workload) -> list[tuple[str, Plan]]:
    """Return plans that differ in one choice; the data axis changes to keep the number of ranks."""
    plan, ranks, found = workload.plan, workload.plan.ranks, list[tuple[str, Plan]]()
    for axis in ("tensor", "context", "pipeline", "microbatch", "chunks", "expert"):
        size = getattr(plan, axis)
        for other in {size * 2, size // 2} - {0}:
            if (changed := _with(workload, ranks, **{axis: other})) is not None:
                found.append((f"{axis} {size} -> {other}", changed))
    found += _schedules(workload)
    for policy in {"none", "full"} - {plan.recompute}:
        found.append((f"recompute {plan.recompute} -> {policy}", plan.model_copy(update={"recompute": policy})))
    for zero in {0, 1, 3} - {plan.zero}:
        if zero < 2 or plan.pipeline == 1:
            found.append((f"zero {plan.zero} -> {zero}", plan.model_copy(update={"zero": zero})))
    return found


def _schedules(workload: Workload) -> Iterator[tuple[str, Plan]]:
    """Yield the plan under other schedules, each with a number of chunks that the schedule supports."""
    plan = workload.plan
    for name in ("1f1b", "interleaved", *suited(searched(), workload.model)):
        known = SCHEDULES[name].chunks
        chunks = known.nearest(max(known.usual, plan.chunks))
        if name == plan.schedule or plan.pipeline == 1:
            continue
        if (changed := _with(workload, plan.ranks, schedule=name, chunks=chunks)) is not None:
            yield f"{plan.schedule} -> {name}", changed


def _with(workload: Workload, ranks: int, **change: Any) -> Plan | None:
    """Return the plan with some fields changed; None if the result is not valid."""
    plan = workload.plan.model_copy(update=change)
    split = plan.tensor * plan.context * plan.pipeline
    blocks = len(workload.model.blocks)
    if ranks % split or plan.stages > blocks or plan.context % plan.ulysses:
        return None
    data = ranks // split
    if workload.global_batch % (data * plan.microbatch) or workload.seq_len % (2 * plan.context * plan.tensor):
        return None
    own = [own_tensors(block, workload.model.dim) for block in set(workload.model.blocks)]
    heads = [each.units for halves in own for tensors in halves.values() for each in tensors]
    heads += [block.attention.heads for block in set(workload.model.blocks) if block.attention]
    heads += [block.mamba.groups for block in set(workload.model.blocks) if block.mamba]
    if any(count % plan.tensor for count in heads) or (data * plan.context * plan.tensor) % (plan.expert * plan.expert_tensor):
        return None
    if "schedule" not in change and "chunks" in change:  # a number of chunks that the schedule cannot have asks for one that can
        plan = plan.model_copy(update={"schedule": interleaving(plan.chunks)})
    if plan.pipeline == 1:
        if plan.chunks > workload.plan.chunks:
            return None
        plan = plan.model_copy(update={"schedule": "1f1b", "chunks": 1})
    if schedule_problems(
        plan.schedule, ranks=plan.pipeline, microbatches=workload.global_batch // (data * plan.microbatch), chunks=plan.chunks
    ):
        return None
    return plan.model_copy(update={"data": data, "layers": even_layers(blocks, plan.stages)})

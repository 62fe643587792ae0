"""The size of recomputed segments with which a run's worst rank needs the least memory (`plan.recompute = "segments:auto"`)."""

from dataclasses import replace

from megalith.cost.constants import calibration
from megalith.cost.memory import memory
from megalith.cost.parts import parts
from megalith.cost.workload import Workload
from megalith.spec.plan import AUTO


def decided(workload: Workload) -> Workload:
    """Return the workload with `segments:auto` replaced by the size that needs the least memory. Workloads without
    `segments:auto` are returned unchanged.

    A segment of K blocks keeps one input for K blocks, and the activations of all K blocks while it is recomputed (Chen et al. 2016,
    section 4.3). The best K therefore depends on the traced bytes of an input and of a block, and on the schedule's microbatches in
    flight. Of equally good sizes, the smallest is chosen.
    """
    plan = workload.plan
    if plan.recompute != AUTO:
        return workload
    overheads, blocks = calibration().overheads[workload.software_profile.overheads], len(workload.model.blocks)

    def of(size: int) -> Workload:
        return replace(workload, plan=plan.model_copy(update={"recompute": f"segments:{size}"}))

    def needed(asked: Workload) -> float:
        return memory(asked, parts(asked), overheads).total

    return min(map(of, range(1, plan.longest_stage(blocks) + 1)), key=needed)

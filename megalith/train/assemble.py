"""From a RunSpec to the parts that train: groups, stages, program, executor, optimizer, state."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megalith.mesh import Mesh
from megalith.models.stage import Stage
from megalith.parallel.apply import build_stage
from megalith.parallel.data import COMPUTE_DTYPE
from megalith.parallel.execute import Executor, Hidden
from megalith.parallel.gradients import Shared, local, shared
from megalith.parallel.groups import Groups
from megalith.schedule.lower import lower
from megalith.schedule.table import build
from megalith.schedule.verify import problems
from megalith.spec.model import ModelSpec
from megalith.spec.run import RunSpec
from megalith.train.optimizer import AdamW


@dataclass(frozen=True)
class Trainer:
    """All that one rank trains with."""

    spec: RunSpec
    model: ModelSpec
    groups: Groups
    device: torch.device
    stages: dict[int, Stage]
    parameters: dict[str, nn.Parameter]  # what this rank holds, by its name in the whole model
    shared: Shared
    executor: Executor
    optimizer: AdamW

    def weights(self) -> dict[str, Tensor]:
        """The weights under `weights.NAME`, as a checkpoint holds them."""
        return {f"weights.{name}": parameter.detach() for name, parameter in self.parameters.items()}

    def state(self) -> dict[str, Tensor]:
        """All tensors that training continues from."""
        return self.weights() | self.optimizer.state()

    def bytes(self) -> dict[str, int]:
        """Bytes of this rank's share between steps, by category. Gradients are counted as large as they are when all are there."""
        shares = [local(p.detach()) for p in self.parameters.values()]
        weights = sum(share.numel() * share.element_size() for share in shares)
        moments = sum(m.numel() * m.element_size() for ms in (self.optimizer.first, self.optimizer.second) for m in ms.values())
        return {"weights": weights, "gradients": weights, "optimizer": moments}


def assemble(spec: RunSpec, *, groups: Groups, device: torch.device, load: bool = False) -> Trainer:
    """Build this rank's part of the run. `load`: weights will be loaded, so first values are not drawn.

    Raises RuntimeError if the schedule's program has a fault (found before anything is sent).
    """
    model, plan = spec.model.build(), spec.plan
    schedule = build(plan.schedule, ranks=plan.pipeline, microbatches=spec.microbatches, chunks=plan.chunks)
    program = lower(schedule, plan.zero)
    if groups.rank == 0 and (faults := problems(program)):  # the same on every rank, and seconds of work for a large program
        raise RuntimeError("the pipeline program is wrong:\n" + "\n".join(faults))
    bounds = plan.bounds(len(model.blocks))
    stages = {
        stage: build_stage(
            model,
            *bounds[stage],
            plan=plan,
            groups=groups,
            precision=spec.train.precision,
            device=device,
            seed=None if load else spec.train.seed,
        )
        for stage in schedule.stages_of(groups.coordinates["pipeline"])
    }
    parameters = {name: p for stage in stages.values() for name, p in stage.parameters_by_name().items()}
    split = plan.tensor if plan.sequence else 1
    hidden = Hidden((plan.microbatch, spec.train.seq_len // split, model.dim), COMPUTE_DTYPE[spec.train.precision], device)
    return Trainer(
        spec=spec,
        model=model,
        groups=groups,
        device=device,
        stages=stages,
        parameters=parameters,
        shared=shared(parameters, tied=model.head.tied, sequence=plan.sequence, groups=groups),
        executor=Executor(program, stages, groups=groups, hidden=hidden),
        optimizer=AdamW(parameters, spec.optimizer),
    )


def mesh_groups(spec: RunSpec, device: torch.device) -> Groups:
    """The process groups of the run's plan."""
    return Groups.build(Mesh.of(spec.plan), device=device.type)

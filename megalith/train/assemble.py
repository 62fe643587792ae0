"""From a RunSpec to the parts that train: groups, stages, program, executor, optimizer, state."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.mesh import Mesh
from megalith.models.moe import Moe
from megalith.models.stage import Stage
from megalith.parallel.apply import Builder
from megalith.parallel.data import COMPUTE_DTYPE
from megalith.parallel.execute import Executor, Hidden
from megalith.parallel.gradients import Shared, local, shared
from megalith.parallel.groups import Groups
from megalith.parallel.passes import Runner
from megalith.schedule.lower import lower
from megalith.schedule.table import build
from megalith.schedule.verify import problems
from megalith.spec.model import ModelSpec
from megalith.spec.run import RunSpec
from megalith.spec.sizes import tied_names
from megalith.train.optimizer import AdamW, like


@dataclass(frozen=True)
class Trainer:
    """All that one rank trains with."""

    spec: RunSpec
    model: ModelSpec
    groups: Groups
    device: torch.device
    runners: dict[int, Runner]  # the stages of this rank
    parameters: dict[str, nn.Parameter]  # what this rank holds, by its name in the whole model
    shared: Shared
    executor: Executor
    optimizer: AdamW

    @property
    def stages(self) -> dict[int, Stage]:
        """The modules of this rank, by stage."""
        return {number: runner.stage for number, runner in self.runners.items()}

    def weights(self) -> dict[str, Tensor]:
        """The weights under `weights.NAME`, as a checkpoint holds them; routers' loads and biases among them."""
        return {f"weights.{name}": like(local(tensor), tensor) for name, tensor in (self.parameters | self.buffers()).items()}

    def buffers(self) -> dict[str, Tensor]:
        """What training changes besides parameters, by name."""
        return {name: tensor for stage in self.stages.values() for name, tensor in stage.lasting_buffers().items()}

    def routers(self) -> dict[str, Moe]:
        """The layers of experts on this rank, by name."""
        stages = self.stages.values()
        return {name: module for stage in stages for name, module in stage.named_modules() if isinstance(module, Moe)}

    def take_in_loads(self) -> None:
        """Tell the routers, after a step, how much all ranks sent to each of their experts."""
        routers = list(self.routers().values())
        if not routers:
            return
        counts = [moe.router.counts for moe in routers]
        total = torch.cat(counts)
        dist.all_reduce(total, group=self.groups.place)
        for moe, count in zip(routers, total.split([len(count) for count in counts]), strict=True):
            moe.end_of_step(count)

    def state(self) -> dict[str, Tensor]:
        """All tensors that training continues from."""
        return self.weights() | self.optimizer.state()

    def shares(self) -> dict[str, Tensor]:
        """The same as plain tensors: this rank's shares, in the memory that training changes, whatever it is of the whole."""
        weights = {f"weights.{name}": local(tensor) for name, tensor in (self.parameters | self.buffers()).items()}
        moments = {"first": self.optimizer.first, "second": self.optimizer.second}
        return weights | {f"moments.{kind}.{name}": m for kind, all_ in moments.items() for name, m in all_.items()}

    def bytes(self) -> dict[str, int]:
        """Bytes of this rank's share between steps, by category. Gradients are counted as large as they are when all are there."""
        shares = [local(p) for p in self.parameters.values()]
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
    seed = None if load else spec.train.seed
    builder = Builder(model, plan=plan, groups=groups, precision=spec.train.precision, device=device, seed=seed)
    runners = {stage: builder.build(*bounds[stage]) for stage in schedule.stages_of(groups.coordinates["pipeline"])}
    parameters = {name: weight.kept for name, weight in builder.by_name.items()}
    split = plan.context * (plan.tensor if plan.sequence else 1)
    hidden = Hidden((plan.microbatch, spec.train.seq_len // split, model.dim), COMPUTE_DTYPE[spec.train.precision], device)
    both_ends = {schedule.rank_of(stage, 0) for stage in (0, schedule.stages - 1)} if schedule.mirrored is None else {0}
    tied = set(tied_names(model).values()) if len(both_ends) > 1 else ()
    return Trainer(
        spec=spec,
        model=model,
        groups=groups,
        device=device,
        runners=runners,
        parameters=parameters,
        shared=shared(builder.by_name, tied=tied, groups=groups),
        executor=Executor(program, runners, reducer=builder.reducer, groups=groups, hidden=hidden),
        optimizer=AdamW(parameters, spec.optimizer),
    )


def mesh_groups(spec: RunSpec, device: torch.device) -> Groups:
    """The process groups of the run's plan."""
    return Groups.build(Mesh.of(spec.plan), device=device.type)

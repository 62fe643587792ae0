"""Builds the objects that train a run from its RunSpec: process groups, stages, pipeline program, executor, optimizer and state."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.kernels.chunks import tile_rows
from megalith.kernels.narrow import Narrow
from megalith.kernels.numbers import Dtypes
from megalith.kernels.product import sum_in_fp32
from megalith.mesh import Mesh
from megalith.models.moe import Moe
from megalith.models.stage import Stage
from megalith.parallel import gradients
from megalith.parallel.apply import Builder
from megalith.parallel.data import local
from megalith.parallel.execute import Executor, Hidden
from megalith.parallel.gradients import SharedParameters, shared
from megalith.parallel.groups import Groups
from megalith.parallel.passes import Runner
from megalith.parallel.tables import StreamedTable, cut_tables, use_tiles
from megalith.schedule.action import parts
from megalith.schedule.lower import Program, lower
from megalith.schedule.table import build
from megalith.schedule.verify import problems
from megalith.spec.model import ModelSpec
from megalith.spec.numbers import PRECISIONS
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.phases import Phase, Phases, during
from megalith.spec.run import RunSpec
from megalith.spec.sites import computed_size, within
from megalith.spec.sizes import model_parameters, tied_names
from megalith.spec.state import LOWER, MASTER, Place, gradient
from megalith.spec.treatment import can_undo_on_disk, kinds, treatments, why_not_ahead
from megalith.train.measure.noise import NoiseMeter
from megalith.train.offload.ahead import UpdatesAhead
from megalith.train.offload.aside import aside_of
from megalith.train.offload.home import home_of, lots_of
from megalith.train.offload.release import Release, UpdateRequest
from megalith.train.offload.retained import AnyTier, tiers_of
from megalith.train.optimizers.global_tensors import GlobalTensors
from megalith.train.optimizers.rates import decays, learning_rate
from megalith.train.optimizers.rule import Optimizer
from megalith.train.own.callbacks import Callbacks
from megalith.train.own.loss import use_loss
from megalith.train.stability.adaptive_clip import UNKNOWN, AdaptiveClip
from megalith.train.stability.attention import HeadClip
from megalith.train.stability.extremes import Extremes
from megalith.train.stability.loss_scale import Scale
from megalith.train.state import State


@dataclass
class Trainer:
    """All training objects of one rank. Once built, only `enter` and an assignment to `schedule` replace its fields."""

    run: RunSpec
    spec: RunSpec  # the run as this rank's site sees it during the phase that is trained
    model: ModelSpec
    groups: Groups
    device: torch.device
    runners: dict[int, Runner]  # the stages of this rank
    parameters: dict[str, nn.Parameter]  # what this rank holds, by its name in the whole model
    shared: SharedParameters
    executor: Executor
    state: State
    rule: Optimizer
    noise: NoiseMeter
    extremes: Extremes
    callbacks: Callbacks = field(default_factory=Callbacks)
    adaptive: AdaptiveClip | None = None
    heads: HeadClip | None = None
    release: Release | None = None
    ahead: UpdatesAhead | None = (
        None  # if the run updates state off the device while the next forward computes: on all ranks or none
    )
    tiers: Mapping[Place, AnyTier] = field(default_factory=dict[Place, AnyTier])
    tables: Mapping[str, StreamedTable] = field(default_factory=dict[str, StreamedTable])  # those that are read in tiles
    schedule: int | None = None  # steps of the schedule of learning rates that are done; None: as many as the state has updates
    filled: int = 0  # sequences without targets with which the samples of a step are filled up to `spec.train.global_batch`

    def enter(self, phase: Phase, size: int | None = None) -> None:
        """Switch to a phase of the run. All ranks call this together, between two steps, when all earlier steps are verified. Modules,
        state and process groups stay the same, so torch.compile recompiles only functions whose tensor shapes change. `size`: this site's
        number of samples in a step; None: the site's part of the phase's batch."""
        here = during(self.run, phase)
        spec = within(here, None if size is None else computed_size(here, size))
        if spec.microbatches != self.spec.microbatches or spec.train.seq_len != self.spec.train.seq_len:
            self.executor.adopt(program_of(spec, self.groups), hidden_of(spec, self.device))
        self.spec, self.filled = spec, 0 if size is None else spec.train.global_batch - size

    @property
    def samples(self) -> int:
        """The number of samples that this rank's site reads in a step."""
        return self.spec.train.global_batch - self.filled

    @property
    def reader(self) -> int:
        """This rank's index on the data axis, whose ranks read different samples."""
        return self.groups.coordinates["data"]

    @property
    def stages(self) -> dict[int, Stage]:
        """The modules of this rank, by stage."""
        return {number: runner.stage for number, runner in self.runners.items()}

    def routers(self) -> dict[str, Moe]:
        """The mixture-of-experts layers on this rank, by name."""
        stages = self.stages.values()
        return {name: module for stage in stages for name, module in stage.named_modules() if isinstance(module, Moe)}

    def narrow(self) -> list[Narrow]:
        """The recipes for low-precision products on this rank."""
        modules = (module for stage in self.stages.values() for module in stage.modules())
        return [module for module in modules if isinstance(module, Narrow)]

    def delayed(self) -> list[Narrow]:
        """The recipes on this rank that take their scales from earlier steps."""
        return [recipe for recipe in self.narrow() if recipe.history is not None]

    def counted(self) -> list[Tensor]:
        """Return the counters of the current step on this rank: the number of tokens of each expert, and the largest magnitudes for delayed
        scales."""
        largest = [recipe.latest for recipe in self.delayed() if recipe.latest is not None]
        return [moe.router.counts for moe in self.routers().values()] + largest

    def update_router_biases(self) -> None:
        """After a step, pass each router the loads of its experts, summed over the ranks with the same stages, and each recipe with delayed
        scales the largest magnitude on these ranks."""
        self._take_in_maxima()
        routers = list(self.routers().values())
        if not routers:
            return
        counts = [moe.router.counts for moe in routers]
        total = torch.cat(counts)
        dist.all_reduce(total, group=self.groups.place)
        for moe, count in zip(routers, total.split([len(count) for count in counts]), strict=True):
            moe.end_of_step(count)

    def _take_in_maxima(self) -> None:
        recipes = self.delayed()
        if recipes:
            largest = torch.stack([recipe.latest for recipe in recipes if recipe.latest is not None])
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.groups.place)
            for recipe, each in zip(recipes, largest, strict=True):
                recipe.take_in(each)

    def forget(self) -> None:
        """Set the counters of the step (`counted`) to zero."""
        for tensor in self.counted():
            tensor.zero_()

    def discard(self) -> None:
        """Discard the layer maxima of this step's forwards (extremes and attention logits), because the forwards will run again."""
        self.extremes.clear()
        if self.heads is not None:
            self.heads.clear()

    def drop(self) -> None:
        """Drop the gradients and counts of a step."""
        self.state.drop_gradients()
        self.forget()

    @property
    def lr(self) -> float:
        """The learning rate of the next update: the schedule's, or a lower one after a spike."""
        return self.state.history.rate(self.scheduled_lr, updates=self.state.updates, spec=self.spec.stability)

    @property
    def scheduled_lr(self) -> float:
        """The schedule's learning rate for the next update."""
        spec = self.spec
        return learning_rate(self.scheduled, spec=spec.optimizer, steps=spec.train.steps, branch=spec.branch)

    @property
    def scheduled(self) -> int:
        """The number of the schedule's updates that are done: with sites or ramps the samples say it, not the updates of this site."""
        return self.state.updates if self.schedule is None else self.schedule

    def clip(self, factor: float, *, number: int) -> None:
        """Multiply all gradients by `factor`, for update `number` of the run. With adaptive clipping, also limit each parameter's gradient
        to a multiple of its usual norm. All ranks call this together."""
        gradients.scale([p.grad for p in self.parameters.values() if p.grad is not None], factor)
        if self.adaptive is not None:
            self.adaptive.clip(number=number)

    @torch.no_grad()
    def advance(self, *, number: int, lr: float) -> None:
        """Make update `number` of the run from the clipped gradients, and keep these gradients."""
        parts = self.state.parts()
        self.rule.update(parts, number=number, lr=lr)
        if self.heads is not None:
            # ~number: words that no update draws, as weights that are rounded twice by the same ones would be biased
            self.heads.apply(self.rule.prepared(parts, number=~number), self.rule.whole.cuts)
        if self.adaptive is not None:
            self.adaptive.commit()
        self.state.settle()

    def update(self) -> None:
        """Update all weights from their gradients, and keep the gradients."""
        self.advance(number=self.state.updates, lr=self.lr)
        self._count_update()

    def update_ahead(self) -> None:
        """Update state on the device, and begin to update the rest; each gradient is freed once it is used."""
        assert self.ahead is not None
        self.ahead.begin(number=self.state.updates, lr=self.lr)
        if self.adaptive is not None:
            self.adaptive.commit()
        self._count_update()

    def asked(self, factor: float | None) -> UpdateRequest:
        """Return the request to make the next update inside the backward, with gradients multiplied by `factor`; None: only measure the
        gradients."""
        return UpdateRequest(factor, self.state.updates, self.lr)

    def keep_update(self) -> None:
        """Count the update that was made inside the backward."""
        self.state.settle()
        self._count_update()

    def _count_update(self) -> None:
        self.state.updates += 1
        if self.state.scale is not None:
            self.state.scale = self.state.scale.updated(self.spec.loss_scale)

    @property
    def wide(self) -> bool:
        """True if the next update uses no low-precision products, because `precision.wide_decay` is set and the learning rate is in its
        final decay."""
        return self.is_wide(self.scheduled)

    def is_wide(self, update: int) -> bool:
        """True if update number `update` of the run is `wide`."""
        spec = self.spec
        if not spec.precision.wide_decay:
            return False
        return decays(update, spec=spec.optimizer, steps=spec.train.steps, branch=spec.branch)

    @property
    def raised(self) -> frozenset[str]:
        """The parts of the model that `precision.auto` has switched to high precision."""
        return frozenset(f"blocks.{block}" for block, _ in self.state.history.raised)

    @property
    def gradient_scale(self) -> float:
        """The loss scale, by which gradients are multiplied until they are summed."""
        return 1.0 if self.state.scale is None else self.state.scale.value


def assemble(
    spec: RunSpec,
    *,
    groups: Groups,
    device: torch.device,
    load: bool = False,
    folder: Path | None = None,
    callbacks: Callbacks | None = None,
    target: str | None = None,
) -> Trainer:
    """Build this rank's part of the run, or of its site. `load`: weights will be loaded from a checkpoint, so no initial weights are drawn.
    `folder`: the folder for state on disk if the plan names none; None: the folder of temporary files. `callbacks`: the user's own.
    `target`: the kind of device that a dry run simulates; None: the kind of `device`.

    Raises RuntimeError if the pipeline program is wrong, before any message is sent, and StateFileError if a disk has no room.
    """
    if device.type == "cuda":
        sum_in_fp32()
    whole, spec = spec, within(during(spec, Phases.of(spec).all[0]))
    model, plan = spec.model.build(), spec.plan
    program = program_of(spec, groups)
    schedule = program.schedule
    bounds = plan.bounds(len(model.blocks))
    seed = None if load else spec.train.seed
    tiers = tiers_of(plan.retain, device, folder)
    builder = Builder(
        model,
        plan=plan,
        groups=groups,
        precision=spec.train.precision,
        device=device,
        seed=seed,
        choices=spec.precision,
        gradients=spec.train.gradients,
        aside=aside_of(plan.state, folder),
        tiers=tiers,
    )
    runners = {stage: builder.build(*bounds[stage]) for stage in schedule.stages_of(groups.coordinates["pipeline"])}
    parameters = {name: weight.master for name, weight in builder.by_name.items()}
    buffers = {name: tensor for runner in runners.values() for name, tensor in runner.stage.lasting_buffers().items()}
    if spec.train.loss is not None:
        use_loss((runner.stage for runner in runners.values()), spec.train.loss)
    both_ends = {schedule.rank_of(stage, 0) for stage in (0, schedule.stages - 1)} if schedule.mirrored is None else {0}
    tied = set(tied_names(model).values()) if len(both_ends) > 1 else ()
    partly = shared(builder.by_name, tied=tied, groups=groups)
    buckets = dict.fromkeys(bucket for runner in runners.values() for used in runner.buckets for bucket in used)
    treated = treatments(model, spec.optimizer)
    units = {name: OPTIMIZERS[each.kind].unit for name, each in treated.items()}
    slots = {name: each.slots for name, each in treated.items()}
    halved = {
        name: weight for name, weight in builder.by_name.items() if treated[name].master in LOWER and local(weight.master).numel()
    }
    lots = lots_of(plan.state, builder.by_name, slots, whole={name: unit != "element" for name, unit in units.items()})
    tile = tile_rows(spec.train.vocab_tile, model.dim)
    use_tiles((runner.stage for runner in runners.values()), tile)
    streamed = [name for name, lot in lots.items() if MASTER in lot.slots and not lot.whole] if tile and plan.cuts_tables else []
    tables = cut_tables(runners.values(), builder.by_name, tile, names=streamed)
    lots |= {name: lots[name]._replace(tile=tile * model.dim) for name in tables}
    for name, weight in builder.by_name.items():
        if name not in lots:
            weight.bring_back()
    scale = Scale.first(spec.loss_scale) if PRECISIONS[spec.train.precision].scaled else None
    described, optimizer, adaptive = model_parameters(model), spec.optimizer, None
    usual = torch.full((len(described),), UNKNOWN, device=device) if optimizer.adaptive_clip else None
    if usual is not None:
        adaptive = AdaptiveClip(optimizer, usual, [*described], parameters=parameters, shared=partly, groups=groups)
    stages = {number: runner.stage for number, runner in runners.items()}
    heads = HeadClip(optimizer.qk_clip, model, stages.values(), groups=groups, device=device) if optimizer.qk_clip else None
    looks = spec.stability.extremes_every if spec.stability.watch else 0
    executor = Executor(program, runners, reducer=builder.reducer, groups=groups, hidden=hidden_of(spec, device))
    home = home_of(lots, plan.state, folder=folder, rank=groups.rank)
    order = dict.fromkeys(action.stage for entry in program.rows[executor.rank] for action in parts(entry) if action.kind == "F")
    state = State(parameters, buffers, slots, scale, home, usual, halved, gradient(spec.train.gradients))
    rule = Optimizer(spec.optimizer, treated, GlobalTensors.of(parameters, described, partly, groups), target=target)
    used = [[bucket for part in runners[stage].buckets for bucket in part] for stage in order]
    updating = {"state": state, "rule": rule, "clock": executor.clock}
    # not asked of `home`: ranks of a plan whose state is off the device in part may have none, but ranks exchange digests together
    ahead = plan.state.away > 0 and not why_not_ahead(plan, kinds(spec.optimizer), qk_clip=optimizer.qk_clip)
    return Trainer(
        run=whole,
        spec=spec,
        model=model,
        groups=groups,
        device=device,
        runners=runners,
        parameters=parameters,
        shared=partly,
        executor=executor,
        state=state,
        rule=rule,
        noise=NoiseMeter(builder.by_name, buckets, partly, groups, spec),
        extremes=Extremes(model, stages, every=looks, groups=groups, device=device, compiled=plan.compile),
        callbacks=callbacks or Callbacks(),
        adaptive=adaptive,
        heads=heads,
        release=Release(
            builder.by_name,
            used,
            partly,
            parameters=parameters,
            tables=tables,
            undone=can_undo_on_disk(plan.state, spec.train.precision, optimizer.master),
            **updating,
        )
        if plan.state.release
        else None,
        ahead=UpdatesAhead(builder.by_name, chain(*used), **updating) if ahead else None,
        tiers=tiers,
        tables=tables,
    )


def program_of(spec: RunSpec, groups: Groups) -> Program:
    """Return the pipeline program of a step. On rank 0, raises RuntimeError if the program is wrong."""
    plan = spec.plan
    schedule = build(plan.schedule, ranks=plan.pipeline, microbatches=spec.microbatches, chunks=plan.chunks)
    program = lower(schedule, plan.zero, retained=plan.retained(len(spec.model.build().blocks)))
    if groups.rank == 0 and (faults := problems(program)):  # the same on every rank, and seconds of work for a large program
        raise RuntimeError("the pipeline program is wrong:\n" + "\n".join(faults))
    return program


def hidden_of(spec: RunSpec, device: torch.device) -> Hidden:
    """Return the shape, dtype and device of a stage's output."""
    plan = spec.plan
    split = plan.context * (plan.tensor if plan.sequence else 1)
    shape = plan.microbatch, spec.train.seq_len // split, spec.model.build().dim
    return Hidden(shape, Dtypes.of(spec.train.precision).compute, device)


def mesh_groups(spec: RunSpec, device: torch.device, world: dist.ProcessGroup | None = None) -> Groups:
    """Return the process groups of the run's plan among the ranks of `world` (None: the default group)."""
    return Groups.build(Mesh.of(spec.plan), device=device.type, world=world)

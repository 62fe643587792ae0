"""The proof that a plan changes where work happens but not its result: a small run under the plan is compared with plain PyTorch on one
process.

The reference is `prove.one_process`.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from math import lcm
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from megalith import disk, epochs
from megalith.checkpoint.shares import OffDeviceShare, as_tensor, shares
from megalith.data.stream import Batch as Samples
from megalith.exchange import ObjectCollectives, gather_tensors
from megalith.fleet import environment
from megalith.fleet.heartbeat import Heartbeat
from megalith.kernels.narrow import TrackedMaxima, maxima
from megalith.models.router import RoutingRecord, recording
from megalith.prove.compare import Recording, StepRouting
from megalith.prove.large import norm_of_large_tensor
from megalith.prove.one_process import RandomText, gradient_of, reference
from megalith.prove.verdict import judge
from megalith.schedule.table import FILE
from megalith.spec.families import Model
from megalith.spec.numbers import PRECISIONS, PrecisionSpec, Rounded, formats_of, is_narrow, packs
from megalith.spec.phases import Phase, Phases
from megalith.spec.run import LossScaleSpec, RampSpec, RunSpec
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.batches import indices
from megalith.train.own.admit import admit
from megalith.train.post_validation import Unchecked
from megalith.train.run import choose_device, join
from megalith.train.step import accumulate, conclude, train_step, update
from megalith.train.step_hooks import Attendants, StepHook
from megalith.train.tally import StepGradients, StepTotals

OPTIMIZER = {"warmup": 0, "adaptive_clip_after": 1, "lr": 1e-4, "schedule": "constant", "eps": 1e-5, "iteration": "fp32"}
"""Optimizer settings of a compared run, chosen so that rounding is not amplified. With the usual eps of 1e-8, Adam would turn the
rounding error of a gradient near 0 into a whole step. Muon's iteration in bf16 would turn a change of 1e-7 in a gradient into a
hundredth of a step."""

LOSS_SCALE = 1024
"""Loss scale of a compared run in fp16: with this scale, gradients of small models with random weights neither overflow nor
underflow."""


SMALL_MOMENTS = {"moment_block": 4, "moment_least": 0}
"""Settings of low-bit moments in a compared run: blocks so small that even the run's small shares of tensors contain whole blocks."""

SMALL_TILE = 4
"""How many numbers share a scale in a compared run: so few that even the run's small shares of tensors contain whole tiles."""


def small_choices(precision: str, layers: int, choices: PrecisionSpec | None = None) -> dict[str, int]:
    """Return the settings of a narrow precision for a compared run with this many layers. In 8 bits, all blocks but the first are
    narrow. In 4 bits only the last two blocks are narrow: a number that rounds differently changes others by a tenth, and after more blocks
    this difference would be as large as a fault's. `choices`: the formats of the run's products."""
    formats = formats_of(choices or PrecisionSpec(), precision)
    narrow = 2 if any(PRECISIONS[each].factors.bits == 4 for each in formats) else layers
    return {"tile": SMALL_TILE, "wide_first": max(1, layers - narrow), "wide_last": 0}


def shrink(spec: RunSpec, *, steps: int) -> RunSpec:
    """Return the same plan and precision on a model, sequence and batch just large enough for every split to have several
    non-empty pieces. The run has no warm-up, so that every step changes the weights by more than rounding does."""
    plan, model = spec.plan, spec.model
    layers = min(model.layers, plan.stages * (1 if plan.stages > 4 else 2))
    layers = sum(plan.layers) if plan.layers else max(layers, plan.stages) + (model.layers % plan.stages > 0)
    read = plan.schedule.startswith(FILE)  # from a file, for as many microbatches as the run has
    microbatches = spec.microbatches if read else min(spec.microbatches, 2 * plan.pipeline)
    microbatch = min(plan.microbatch, 2)
    batch = plan.data * microbatch * microbatches
    unit = plan.tensor * plan.dp_shard  # a weight is split by tensor ranks and then by data ranks
    precision, tile = spec.precision, 1
    if is_narrow(spec.train.precision) or packs(spec.precision, spec.train.precision):
        precision, tile = precision.model_copy(update=small_choices(spec.train.precision, layers, precision)), SMALL_TILE
        unit = lcm(unit, tile * plan.tensor, tile * plan.expert_tensor)
        if precision.gather != "wide":
            unit = lcm(unit, tile * plan.tensor * plan.dp_shard)
    elif plan.rounding:
        precision, unit = precision.model_copy(update={"tile": SMALL_TILE}), lcm(unit, SMALL_TILE * plan.tensor)
        unit = lcm(unit, SMALL_TILE * plan.expert_tensor)
    optimizer = spec.optimizer.model_copy(update=OPTIMIZER)
    if optimizer.moments != "fp32":
        optimizer = optimizer.model_copy(update=SMALL_MOMENTS)
        block = SMALL_MOMENTS["moment_block"]
        unit = lcm(unit, block * plan.tensor, block * plan.expert_tensor, block * plan.dp_shard)
    return spec.model_copy(
        update={
            "model": clearly_routed(
                model.small(layers=layers, unit=unit, heads_unit=plan.tensor * plan.ulysses), spec.train.precision
            ),
            "plan": plan.model_copy(update={"microbatch": microbatch}),
            "precision": precision,
            "sites": None,
            "train": spec.train.model_copy(
                update={
                    "steps": steps,
                    "seq_len": _multiple(24, tile * plan.tensor * plan.context * (2 if plan.context > 1 else 1)),
                    "global_batch": batch,
                    "init_from": None,
                    "batch_ramp": _ramp(spec, batch),
                }
            ),
            "data": spec.data.model_copy(update={"phases": ()}),
            "optimizer": optimizer,
            "branch": None,
            "loss_scale": LossScaleSpec(initial=LOSS_SCALE),
        }
    )


def _ramp(spec: RunSpec, batch: int) -> tuple[RampSpec, ...]:
    """Return a ramp that doubles the batch after one step, if the batch of the original run changes too."""
    changes = len({phase.global_batch for phase in Phases.of(spec).all}) > 1
    return (RampSpec(begin=batch, global_batch=2 * batch),) if changes else ()


def clearly_routed(model: Model, precision: str) -> Model:
    """Return the model, with balanced routing if the precision is rounded: otherwise rounding would send some tokens to other
    experts, and this could hide faults of a plan."""
    dealt = isinstance(PRECISIONS[precision].parity, Rounded) and hasattr(model, "balanced")
    return model.model_copy(update={"balanced": True} if dealt else {})


def _multiple(least: int, of: int) -> int:
    return -(-least // of) * of


def record(trainer: Trainer) -> Recording:
    """Train the run under its plan, with all ranks together, and record it. The first rank returns the whole model's recording,
    the other ranks their parts."""
    recorder, phases, first = Recorder(trainer), Phases.of(trainer.run), 0
    for _ in range(trainer.run.train.steps):
        if phases.at(first).first == first > 0:
            recorder.enter(phases.at(first))
        recorder.step(first)
        first += trainer.spec.train.global_batch
    return recorder.finish()


class Recorder:
    """Trains on random text, and records each step."""

    def __init__(self, trainer: Trainer, *, hooks: Sequence[StepHook] = ()) -> None:
        """`hooks`: step hooks that are called once a step's gradients are complete, before they are recorded."""
        self._trainer, self._kept, self._hooks = trainer, Recording(), hooks
        self._totals: list[StepTotals] = []
        self._late: Unchecked | None = None

    def enter(self, phase: Phase, size: int | None = None) -> None:
        """Begin a phase. `size`: as in `Trainer.enter`."""
        self._totals += _settled(self._late)
        self._late = None
        self._trainer.enter(phase, size)

    def step(self, first: int) -> None:
        """Train a step on the samples from number `first` on."""
        trainer, kept, step = self._trainer, self._kept, len(self._kept.gradients)
        text = RandomText(trainer.spec)
        numbers = indices(trainer.spec, first=first, data_rank=trainer.groups.coordinates["data"])
        samples = [text.batch(part) for part in numbers]
        with ExitStack() as stack:
            routings = [stack.enter_context(recording(stage)) for stage in trainer.stages.values()]
            seen = stack.enter_context(maxima())
            accumulated = accumulate(trainer, samples, check=self._late)
        Attendants(self._hooks).notify("after_reduction", trainer, step, accumulated.executed.nll)
        self._totals += [self._late.totals] if self._late else []
        kept.gradients.append(_together({name: gradient_of(p) for name, p in trainer.parameters.items()}, trainer))
        kept.routing.append(_all_routed(trainer, accumulated, routings))
        kept.maxima = kept.maxima if step else _noted(seen, trainer)
        if trainer.release is not None:
            self._totals.append(_released(trainer, samples, step))
        elif trainer.run.plan.post_validation:
            self._late = Unchecked(trainer, accumulated, step=step)
        else:
            computed = conclude(trainer, accumulated, step=step)
            self._totals.append(computed.totals)
            update(trainer, computed, step=step)
        if step == 0:
            followed = {name: one for recipe in trainer.delayed() for name, one in recipe.followed().items()}
            kept.maxima |= _noted(followed, trainer)

    def weights(self) -> dict[str, Tensor]:
        """Return unsharded weights on the first rank."""
        weights = self._trainer.state.laid("weights")
        return _together({key.removeprefix("weights."): each for key, each in weights.items()}, self._trainer)

    def finish(self) -> Recording:
        """Return the recording, with the weights from the end of the run."""
        totals = self._totals + _settled(self._late)
        self._kept.losses, self._kept.norms = [each.loss for each in totals], [each.norm for each in totals]
        self._kept.weights = self.weights()
        return self._kept


def _released(trainer: Trainer, samples: list[Samples], step: int) -> StepTotals:
    """Train a step that frees its gradients in the backward. An earlier pass has kept this step's gradients for the recording. Return the
    step's totals."""
    trainer.drop()
    trainer.noise.take(trainer.device)
    done = train_step(trainer, samples, step=step)
    return StepTotals(squares=done.grad_norm**2, loss=done.loss, stop=False, resident=0)


def _noted(seen: dict[str, TrackedMaxima], trainer: Trainer) -> dict[str, TrackedMaxima]:
    everyone = ObjectCollectives(trainer.groups.world).gather(seen, dict[str, TrackedMaxima])
    found: dict[str, TrackedMaxima] = {}
    for name, one in ((name, one) for each in everyone or () for name, one in each.items()):
        found[name] = one.joined(found.get(name))
    return found


def _settled(late: Unchecked | None) -> list[StepTotals]:
    if late is None:
        return []
    late.settle()
    return [late.totals]


def _all_routed(
    trainer: Trainer, accumulated: StepGradients, routings: list[dict[str, list[RoutingRecord]]]
) -> dict[str, StepRouting]:
    moes, here = trainer.routers(), trainer.groups.coordinates["data"]
    spec, order = trainer.spec, [id(batch.tokens) for batch in accumulated.batches]
    rows = indices(spec, first=0, data_rank=here)
    mine: list[tuple[str, list[int], list[int]]] = []  # name, numbers of the samples, positions
    values: list[Tensor] = []  # choices and margins of each
    for name, records in ((name, records) for found in routings for name, records in found.items()):
        spans = moes[name.removesuffix(".router")].sets.spans
        for r in records:
            mine.append((name, [*rows[order.index(id(r.batch.tokens))]], [p for s in spans(r.choices.shape[1]) for p in s]))
            values += [r.choices.cpu(), r.margins.cpu()]
    whole: dict[str, StepRouting] = {}
    for (name, numbers, positions), (choices, margins) in _gathered(mine, values, trainer):
        if name not in whole:
            shape = (spec.train.global_batch, spec.train.seq_len)
            whole[name] = StepRouting(torch.full((*shape, choices.shape[-1]), -1), torch.full(shape, torch.inf))
        for row, number in enumerate(numbers):
            whole[name].choices[number, positions] = choices[row]
            whole[name].margins[number, positions] = margins[row]
    return whole


def _gathered(
    mine: list[tuple[str, list[int], list[int]]], values: list[Tensor], trainer: Trainer
) -> list[tuple[tuple[str, list[int], list[int]], list[Tensor]]]:
    """Return on the first rank all ranks' items of `mine`, each with its share of the consecutive `values`; nothing on other ranks."""
    world = trainer.groups.world
    items = ObjectCollectives(world).gather(mine, list[tuple[str, list[int], list[int]]])
    tensors = gather_tensors(values, world)
    found: list[tuple[tuple[str, list[int], list[int]], list[Tensor]]] = []
    for some, theirs in zip(items or (), tensors or (), strict=True):
        each = len(theirs) // max(1, len(some))
        found += [(one, theirs[each * n : each * (n + 1)]) for n, one in enumerate(some)]
    return found


def _together(tensors: Mapping[str, Tensor | OffDeviceShare], trainer: Trainer) -> dict[str, Tensor]:
    """Return unsharded tensors of the whole model on the first rank. Shares whose values differ between ranks become NaN."""
    held = shares(tensors)
    mine = [(name, list(share.held.shape), list(share.held.offset)) for name, share in held.items()]
    found = _gathered(mine, [as_tensor(share).cpu() for share in held.values()], trainer)
    return joined((name, tuple(shape), tuple(offset), part) for (name, shape, offset), (part,) in found)


def joined(shares: Iterable[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]) -> dict[str, Tensor]:
    """Return whole tensors by name. Each share has a tensor's name, the whole tensor's shape, and the offset of its values. A share whose
    values are not the same in all its copies becomes NaN, and so do values without a share."""
    whole: dict[str, Tensor] = {}
    known: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for name, shape, offset, data in shares:
        same = torch.equal(known.get((name, offset), data), data)  # NaN equals nothing, so a share that differed once stays NaN
        known[name, offset] = data if same else torch.full_like(data, torch.nan)
        where = tuple(slice(start, start + size) for start, size in zip(offset, data.shape, strict=True))
        whole.setdefault(name, torch.full(shape, torch.nan))[where] = known[name, offset]
    return whole


RESULT = "parity.json"


def main(run_dir: str, steps: int) -> None:
    """Run as a rank of `megalith parity`: shrink the run in `run_dir/spec.json` and record it. The first rank compares it with
    one process and writes `run_dir/parity.json`."""
    folder, heartbeat = Path(run_dir), Heartbeat.find()
    spec = shrink(RunSpec.model_validate_json(epochs.own(folder, "spec.json").read_text()), steps=steps)
    admit(spec)
    place = environment.find()
    assert place is not None, "the environment gives this process no rank. Start the ranks with `megalith parity`"
    device = choose_device(spec.train.device, place.local_rank, place.local_world)
    world = join(place, launch=spec.launch, device=device)
    heartbeat.beat("building")
    trainer = assemble(spec, groups=mesh_groups(spec, device, world), device=device)
    heartbeat.beat("ready")
    found = record(trainer)
    if place.rank == 0:
        rows = *judge(found, spec=spec, alone=partial(reference, device=device)).rows, norm_of_large_tensor(device)
        report = {
            "equal": all(row.equal for row in rows),
            "precision": spec.train.precision,
            "rows": [asdict(row) | {"equal": row.equal} for row in rows],
            "model": spec.model.model_dump(),
            "steps": steps,
        }
        for path in epochs.names(folder, RESULT, epochs.mine()):
            disk.write_whole(path, json.dumps(report, indent=1) + "\n")
    dist.barrier(group=world)
    dist.destroy_process_group()

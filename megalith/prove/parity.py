"""The proof that a plan changes where the work happens, never the result: a small run under the plan beside plain PyTorch on one process.

The reference shares the model's modules with the plan's run and nothing else: no process group, no pipeline, torch's own AdamW.
"""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.checkpoint.shares import OffDeviceShare, as_tensor, shares
from megalith.data.stream import Batch as Samples
from megalith.fleet import environment
from megalith.fleet.heartbeat import Heartbeat
from megalith.kernels.draws import working_on
from megalith.kernels.narrow import Narrow, TrackedMaxima, maxima
from megalith.kernels.numbers import Dtypes
from megalith.models.init import initialise, seed_of
from megalith.models.moe import Moe
from megalith.models.router import RoutingRecord, recording
from megalith.models.stage import Stage
from megalith.parallel.precision import apply_precision
from megalith.prove.clipping import Clipping
from megalith.prove.compare import Recording, StepRouting
from megalith.prove.updates import update_of
from megalith.prove.verdict import judge
from megalith.schedule.table import FILE
from megalith.spec.families import Model
from megalith.spec.numbers import PRECISIONS, Rounded, is_narrow, packs, recipe_of, settled
from megalith.spec.phases import Phases, during
from megalith.spec.run import LossScaleSpec, RampSpec, RunSpec
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.batches import Cut, indices, to_batch
from megalith.train.optimizers.rates import learning_rate
from megalith.train.own.admit import admit
from megalith.train.own.loss import use_loss
from megalith.train.post_validation import Unchecked
from megalith.train.run import choose_device, join
from megalith.train.step import accumulate, conclude, train_step, update
from megalith.train.tally import StepGradients, StepTotals

OPTIMIZER = {"warmup": 0, "adaptive_clip_after": 1, "lr": 1e-4, "schedule": "constant", "eps": 1e-5, "iteration": "fp32"}
"""Optimizer of a compared run. With the usual eps of 1e-8, Adam turns the rounding of a gradient near 0 into a step, which
changes later gradients; Muon's iteration in bf16 turns a change of 1e-7 in a gradient into a hundredth of a step."""

LOSS_SCALE = 1024
"""Loss scale of a compared run, if it has one: gradients of small models with random weights neither overflow nor underflow."""


SMALL_MOMENTS = {"moment_block": 4, "moment_least": 0}
"""Moments in few bits in a compared run: blocks small enough for its small shares."""

SMALL_TILE = 4
"""Numbers that share a scale in a compared run, few enough that its small shares hold whole tiles."""


def small_choices(precision: str, layers: int) -> dict[str, int]:
    """Return the choices of a narrow precision in a compared run with this many layers. In 8 bits all blocks but the first
    multiply in them, in 4 bits the last two: there one number that is rounded the other way moves others by a tenth, and through
    more blocks that would grow to the size of a fault."""
    narrow = 2 if PRECISIONS[precision].factors.bits == 4 else layers
    return {"tile": SMALL_TILE, "wide_first": max(1, layers - narrow), "wide_last": 0}


class RandomText:
    """Random tokens in documents of random lengths, as a pure function of (seed, sample): a run needs no data to be checked."""

    def __init__(self, spec: RunSpec) -> None:
        self.vocab, self.seq_len, self.seed = spec.model.vocab, spec.train.seq_len, spec.train.seed
        self.masked = spec.data.document_mask

    def batch(self, numbers: range) -> Samples:
        """Samples `numbers`; about one target in eight is missing, so that a mean taken over the wrong set shows."""
        rows = [self._row(number) for number in numbers]
        tokens, targets, positions = (np.stack([row[i] for row in rows]) for i in range(3))
        return Samples(tokens, targets, positions, tuple(row[3] for row in rows), ("random",) * len(rows), tuple(numbers))

    def _row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...]]:
        random = np.random.default_rng(seed_of(self.seed, f"sample {number}"))
        ids = random.integers(0, self.vocab, self.seq_len + 1)
        targets = np.where(random.random(self.seq_len) < number % 3 / 8, -100, ids[1:])
        cuts = np.unique(random.integers(1, self.seq_len, random.integers(0, 4))) if self.masked else np.array([], int)
        lengths = np.diff(np.concatenate(([0], cuts, [self.seq_len])))
        positions = np.concatenate([np.arange(length) for length in lengths])
        return ids[:-1], targets, positions, tuple(lengths.tolist())


def shrink(spec: RunSpec, *, steps: int) -> RunSpec:
    """Return the same plan and precision on a model, sequence and batch just large enough for every split to be a real one. Without
    warm-up, so that every step moves the weights, and without steps made of rounding."""
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
        precision, tile = precision.model_copy(update=small_choices(spec.train.precision, layers)), SMALL_TILE
        unit = lcm(unit, tile * plan.tensor, tile * plan.expert_tensor)
        if precision.gather != "wide":
            unit = lcm(unit, tile * plan.tensor * plan.dp_shard)
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
    """Return a ramp that doubles the batch after a step, for a run whose batch changes too."""
    changes = len({phase.global_batch for phase in Phases.of(spec).all}) > 1
    return (RampSpec(begin=batch, global_batch=2 * batch),) if changes else ()


def clearly_routed(model: Model, precision: str) -> Model:
    """Return the model with balanced routing if the precision is rounded: otherwise rounding would send some tokens to other
    experts, which could hide errors of a plan."""
    dealt = isinstance(PRECISIONS[precision].parity, Rounded) and hasattr(model, "balanced")
    return model.model_copy(update={"balanced": True} if dealt else {})


def _multiple(least: int, of: int) -> int:
    return -(-least // of) * of


def reference(spec: RunSpec, *, device: torch.device) -> Recording:
    """The run on one process: plain modules, no groups, torch's AdamW and clipping. It takes the samples of microbatch i of all data ranks
    together at once, since balance losses may be over these. In a rounded precision, weights are kept and gradients added up in fp32."""
    model = spec.model.build()
    with device:
        stage = Stage(model)
    if spec.train.loss is not None:
        use_loss([stage], spec.train.loss)
    recipe, choices = recipe_of(spec.precision, spec.train.precision), settled(spec.precision, spec.train.precision)
    narrow = dict[nn.Module, Narrow]()
    for name, part in stage.parts():
        narrow |= apply_precision(part, recipe, name=name, blocks=len(model.blocks), choices=choices)
        initialise(part, name=name, spec=model, seed=spec.train.seed)
    computes = stage.parameters_by_name()
    parameters = {name: nn.Parameter(p.detach().clone()) for name, p in computes.items()}
    faces = {name: (p, parameters[name]) for name, p in computes.items()}
    for p in computes.values():
        p.data = p.data.to(Dtypes.of(spec.train.precision).compute)
    kept, phases, samples = Recording(), Phases.of(spec), 0
    o = spec.optimizer
    advance, clipping = update_of(parameters, o, model), Clipping(o, model, stage, parameters)
    for step in range(spec.train.steps):
        now = during(spec, phases.at(samples))
        for multiply in narrow.values():
            multiply.microbatch = spec.plan.microbatch * now.train.seq_len
        kept.losses.append(_reference_step(stage, faces, now, first=samples, device=device, kept=kept))
        samples += now.train.global_batch
        grads = {name: _gradient(p).clone() for name, p in parameters.items()}
        norm = sum(float(grad.double().square().sum()) for grad in grads.values()) ** 0.5  # torch's norm drifts in a large tensor
        clipping.clip(norm, number=step)
        advance(step, learning_rate(step, spec=o, steps=spec.train.steps))
        clipping.scale_heads()
        for parameter in parameters.values():
            parameter.grad = None
        for p, parameter in faces.values():
            p.data.copy_(parameter.data)
        for module in stage.modules():
            if isinstance(module, Moe):
                module.end_of_step(module.router.counts)
        for recipe in narrow.values():
            if recipe.latest is not None:
                recipe.take_in(recipe.latest.clone())
                kept.maxima |= {} if step else recipe.followed()
        kept.norms.append(norm)
        kept.gradients.append({name: g.cpu() for name, g in grads.items()})
    kept.weights = {name: t.detach().cpu() for name, t in (parameters | stage.lasting_buffers()).items()}
    return kept


def _reference_step(
    stage: Stage,
    faces: dict[str, tuple[nn.Parameter, nn.Parameter]],
    spec: RunSpec,
    *,
    first: int,
    device: torch.device,
    kept: Recording,
) -> float:
    """Compute the gradients of the step that begins with sample `first`; return its loss. `faces`: for each parameter the
    computing form, and the stored fp32 form, which gets the gradient."""
    text, head = RandomText(spec), stage.spec.head
    rows = spec.plan.set_sequences
    sets = [text.batch(range(first + i * rows, first + (i + 1) * rows)) for i in range(spec.microbatches)]
    valid = sum(int((samples.targets >= 0).sum()) for samples in sets)
    cut = Cut(spec.data.document_mask, head.ahead.depth if head.ahead else 0)
    scale = gradient_scale_of(spec)
    total = 0.0
    with recording(stage) as routings, maxima() as seen:
        for samples in sets:
            batch = to_batch(
                samples,
                cut,
                device=device,
                loss_scale=1 / valid,
                z_loss=spec.train.z_loss,
                sequences=spec.train.global_batch,
                gradient_scale=scale,
            )
            with working_on(batch.work):
                loss = stage(batch.tokens, batch)
                loss.objective.backward()
            total += float(loss.nll)
            grads = {name: _gradient(computes).float() / scale for name, (computes, _) in faces.items()}
            for name, (computes, parameter) in faces.items():
                computes.grad = None
                parameter.grad = grads[name] if parameter.grad is None else parameter.grad + grads[name]
            if first == 0:
                kept.microbatches.append({name: grad.to("cpu", copy=True) for name, grad in grads.items()})
    kept.routing.append({name: StepRouting.of(records) for name, records in routings.items()})
    kept.maxima = kept.maxima if first else seen
    return total


def gradient_scale_of(spec: RunSpec) -> float:
    """Return the loss scale of the first step, which a compared run keeps throughout."""
    return float(spec.loss_scale.initial) if PRECISIONS[spec.train.precision].scaled else 1.0


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def record(trainer: Trainer) -> Recording:
    """The run under its plan, on all ranks together. The first rank returns the whole model's recording, the others their
    parts."""
    spec, kept, phases, first = trainer.run, Recording(), Phases.of(trainer.run), 0
    totals: list[StepTotals] = []
    late: Unchecked | None = None
    for step in range(spec.train.steps):
        if phases.at(first).first == first > 0:
            totals += _settled(late)
            late = None
            trainer.enter(phases.at(first))
        text = RandomText(trainer.spec)
        numbers = indices(trainer.spec, first=first, data_rank=trainer.groups.coordinates["data"])
        samples = [text.batch(part) for part in numbers]
        first += trainer.spec.train.global_batch
        with ExitStack() as stack:
            routings = [stack.enter_context(recording(stage)) for stage in trainer.stages.values()]
            seen = stack.enter_context(maxima())
            accumulated = accumulate(trainer, samples, check=late)
        totals += [late.totals] if late else []
        kept.gradients.append(_together({name: _gradient(p) for name, p in trainer.parameters.items()}, trainer))
        kept.routing.append(_all_routed(trainer, accumulated, routings))
        kept.maxima = kept.maxima if step else _noted(seen, trainer)
        if trainer.release is not None:
            totals.append(_released(trainer, samples, step))
        elif spec.plan.post_validation:
            late = Unchecked(trainer, accumulated, step=step)
        else:
            computed = conclude(trainer, accumulated, step=step)
            totals.append(computed.totals)
            update(trainer, computed, step=step)
        if step == 0:
            followed = {name: one for recipe in trainer.delayed() for name, one in recipe.followed().items()}
            kept.maxima |= _noted(followed, trainer)
    totals += _settled(late)
    kept.losses, kept.norms = [each.loss for each in totals], [each.norm for each in totals]
    weights = trainer.state.laid("weights")
    kept.weights = _together({key.removeprefix("weights."): each for key, each in weights.items()}, trainer)
    return kept


def _released(trainer: Trainer, samples: list[Samples], step: int) -> StepTotals:
    """Train a step that frees its gradients, after a pass that kept them for the recording; return its totals."""
    trainer.drop()
    trainer.noise.take(trainer.device)
    done = train_step(trainer, samples, step=step)
    return StepTotals(squares=done.grad_norm**2, loss=done.loss, stop=False, resident=0)


def _noted(seen: dict[str, TrackedMaxima], trainer: Trainer) -> dict[str, TrackedMaxima]:
    """Collect on the first rank the maxima that the scales of all ranks followed."""
    everyone: list[dict[str, TrackedMaxima]] | None = (
        [{} for _ in range(trainer.groups.world.size())] if trainer.groups.rank == 0 else None
    )
    dist.gather_object(seen, everyone, group=trainer.groups.world, group_dst=0)
    found: dict[str, TrackedMaxima] = {}
    for name, one in ((name, one) for each in everyone or () for name, one in each.items()):
        found[name] = one.joined(found.get(name))
    return found


def _settled(late: Unchecked | None) -> list[StepTotals]:
    """Check an update that was made before its norm was known, if there is one; return the totals of its step."""
    if late is None:
        return []
    late.settle()
    return [late.totals]


def _all_routed(
    trainer: Trainer, accumulated: StepGradients, routings: list[dict[str, list[RoutingRecord]]]
) -> dict[str, StepRouting]:
    """Collect the destination of every token of the step on the first rank."""
    moes, here = trainer.routers(), trainer.groups.coordinates["data"]
    spec, order = trainer.spec, [id(batch.tokens) for batch in accumulated.batches]
    rows = indices(spec, first=0, data_rank=here)
    mine: dict[str, list[tuple[range, list[int], Tensor, Tensor]]] = {}
    for name, records in ((name, records) for found in routings for name, records in found.items()):
        spans = moes[name.removesuffix(".router")].sets.spans
        mine[name] = [
            (rows[order.index(id(r.batch.tokens))], [p for s in spans(r.choices.shape[1]) for p in s], r.choices, r.margins)
            for r in records
        ]
    everyone: list[dict[str, Any]] | None = [{} for _ in range(trainer.groups.world.size())] if trainer.groups.rank == 0 else None
    dist.gather_object(mine, everyone, group=trainer.groups.world, group_dst=0)
    whole: dict[str, StepRouting] = {}
    for name, parts in ((name, parts) for found in everyone or () for name, parts in found.items()):
        for numbers, positions, choices, margins in parts:
            if name not in whole:
                shape = (spec.train.global_batch, spec.train.seq_len)
                whole[name] = StepRouting(torch.full((*shape, choices.shape[-1]), -1), torch.full(shape, torch.inf))
            for row, number in enumerate(numbers):
                whole[name].choices[number, positions] = choices[row]
                whole[name].margins[number, positions] = margins[row]
    return whole


def _together(tensors: Mapping[str, Tensor | OffDeviceShare], trainer: Trainer) -> dict[str, Tensor]:
    """Return whole tensors of the whole model on the first rank. Elements on which ranks disagree become NaN."""
    mine = [(name, share.held.shape, share.held.offset, as_tensor(share).cpu()) for name, share in shares(tensors).items()]
    everyone: list[Any] | None = [None] * trainer.groups.world.size() if trainer.groups.rank == 0 else None
    dist.gather_object(mine, everyone, group=trainer.groups.world, group_dst=0)
    whole: dict[str, Tensor] = {}
    boxes: dict[tuple[str, tuple[int, ...]], Tensor] = {}
    for name, shape, offset, data in (box for part in everyone or () for box in part):
        known = boxes.setdefault((name, offset), data)
        target = whole.setdefault(name, torch.full(shape, torch.nan))
        where = tuple(slice(start, start + size) for start, size in zip(offset, data.shape, strict=True))
        target[where] = data if torch.equal(known, data) else torch.nan
    return whole


def main(run_dir: str, steps: int) -> None:
    """A rank of `megalith parity`: shrink the run in `run_dir/spec.json`, record it, and on the first rank compare it with one process
    and write `run_dir/parity.json`."""
    folder, heartbeat = Path(run_dir), Heartbeat.find()
    spec = shrink(RunSpec.model_validate_json((folder / "spec.json").read_text()), steps=steps)
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
        verdict = judge(found, spec=spec, alone=partial(reference, device=device))
        report = {
            "equal": verdict.equal,
            "precision": spec.train.precision,
            "rows": [asdict(row) | {"equal": row.equal} for row in verdict.rows],
            "model": spec.model.model_dump(),
            "steps": steps,
        }
        (folder / "parity.json").write_text(json.dumps(report, indent=1))
    dist.barrier(group=world)
    dist.destroy_process_group()

"""The proof that a plan changes where the work happens, never the result: a small run under the plan beside plain PyTorch on one process.

The reference shares the model's modules with the plan's run and nothing else: no process group, no pipeline, torch's own AdamW.
"""

import json
from dataclasses import asdict, dataclass, field
from math import gcd
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megalith.data.stream import Batch as Samples
from megalith.fleet import environment
from megalith.fleet.heartbeat import Heartbeat
from megalith.models.init import initialise, seed_of
from megalith.models.stage import Stage
from megalith.spec.run import RunSpec
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.batches import indices, to_batch
from megalith.train.join import choose_device, join
from megalith.train.optimizer import learning_rate
from megalith.train.step import compute, update

LOSS_LIMIT = 1e-5  # |difference|
NORM_LIMIT = 1e-5  # |difference| / reference
GRADIENT_LIMIT = 1e-4  # max |difference| / max |reference| of a tensor
WEIGHT_LIMIT = 0.05  # |difference| in learning rates, summed over the steps, ...
CLEAR_GRADIENT = 1e-6  # ... where every step's |g| is more than this share of the tensor's largest: Adam's step has the sign of g


@dataclass
class Recording:
    """What a run did, step by step; tensors whole, by their name in the model."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """One quantity compared: the worst gap, where it was, and the limit."""

    quantity: str
    gap: float
    limit: float
    where: str

    @property
    def equal(self) -> bool:
        return self.gap <= self.limit  # a NaN gap is not


class RandomText:
    """Random tokens in documents of random lengths, as a pure function of (seed, sample): a run needs no data to be checked."""

    def __init__(self, spec: RunSpec) -> None:
        self.vocab, self.seq_len, self.seed = spec.model.vocab, spec.train.seq_len, spec.train.seed
        self.masked = spec.data.document_mask

    def batch(self, numbers: range) -> Samples:
        """Samples `numbers`; about one target in eight is missing, so that a mean taken over the wrong set shows."""
        rows = [self._row(number) for number in numbers]
        tokens, targets, positions = (np.stack([row[i] for row in rows]) for i in range(3))
        return Samples(tokens, targets, positions, tuple(row[3] for row in rows), ("random",) * len(rows))

    def _row(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...]]:
        random = np.random.default_rng(seed_of(self.seed, f"sample {number}"))
        ids = random.integers(0, self.vocab, self.seq_len + 1)
        targets = np.where(random.random(self.seq_len) < number % 3 / 8, -100, ids[1:])
        cuts = np.unique(random.integers(1, self.seq_len, random.integers(0, 4))) if self.masked else np.array([], int)
        lengths = np.diff(np.concatenate(([0], cuts, [self.seq_len])))
        positions = np.concatenate([np.arange(length) for length in lengths])
        return ids[:-1], targets, positions, tuple(lengths.tolist())


def shrink(spec: RunSpec, *, steps: int) -> RunSpec:
    """The same plan and numerics on a model, sequence and batch just large enough for every split to be a real one. In fp32, where
    equality has a meaning; no warm-up, so that every step moves the weights."""
    plan, model = spec.plan, spec.model
    unit = plan.tensor * plan.shards  # a weight is split by tensor ranks and then by data ranks
    kv_heads = plan.tensor * (plan.shards // gcd(plan.shards, 8))
    group = 2 if model.kv_heads and model.kv_heads < model.heads else 1
    layers = sum(plan.layers) if plan.layers else min(model.layers, plan.stages * (1 if plan.stages > 4 else 2))
    small = model.model_copy(
        update={
            "layers": max(layers, plan.stages) + (model.layers % plan.stages > 0 and not plan.layers),
            "dim": _multiple(32, unit),
            "heads": kv_heads * group,
            "kv_heads": kv_heads,
            "head_dim": 8,
            "ffn": _multiple(48, unit),
            "vocab": _multiple(96, unit),
            "context": 64,
        }
    )
    microbatches = min(spec.microbatches, 2 * plan.pipeline)
    microbatch = min(plan.microbatch, 2)
    return spec.model_copy(
        update={
            "model": small,
            "plan": plan.model_copy(update={"microbatch": microbatch}),
            "train": spec.train.model_copy(
                update={
                    "steps": steps,
                    "seq_len": _multiple(24, plan.tensor),
                    "global_batch": plan.data * microbatch * microbatches,
                    "precision": "fp32",
                    "init_from": None,
                }
            ),
            "optimizer": spec.optimizer.model_copy(update={"warmup": 0, "lr": 1e-3, "schedule": "constant"}),
        }
    )


def _multiple(least: int, of: int) -> int:
    return -(-least // of) * of


def reference(spec: RunSpec, *, device: torch.device) -> Recording:
    """The run on one process: plain modules, the whole global batch at once, torch's AdamW and clipping."""
    model = spec.model.build()
    with device:
        stage = Stage(model)
    for name, part in stage.parts():
        initialise(part, name=name, spec=model, seed=spec.train.seed)
    parameters = stage.parameters_by_name()
    text, kept = RandomText(spec), Recording()
    o = spec.optimizer
    groups = [
        {"params": [p for p in parameters.values() if p.dim() >= 2], "weight_decay": o.weight_decay},
        {"params": [p for p in parameters.values() if p.dim() < 2], "weight_decay": 0.0},
    ]
    adam = torch.optim.AdamW(groups, lr=o.lr, betas=(o.beta1, o.beta2), eps=o.eps, foreach=False)
    for step in range(spec.train.steps):
        samples = text.batch(range(step * spec.train.global_batch, (step + 1) * spec.train.global_batch))
        valid = int((samples.targets >= 0).sum())
        batch = to_batch(samples, masked=spec.data.document_mask, device=device, loss_scale=1 / valid, z_loss=spec.train.z_loss)
        loss = stage(batch.tokens, batch)
        loss.objective.backward()
        grads = {name: _gradient(p).clone() for name, p in parameters.items()}
        norm = nn.utils.clip_grad_norm_(parameters.values(), o.clip or float("inf"))
        for group in adam.param_groups:
            group["lr"] = learning_rate(step, spec=o, steps=spec.train.steps)
        adam.step()
        adam.zero_grad()
        kept.losses.append(float(loss.nll))
        kept.norms.append(float(norm))
        kept.gradients.append({name: g.cpu() for name, g in grads.items()})
    kept.weights = {name: p.detach().cpu() for name, p in parameters.items()}
    return kept


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def record(trainer: Trainer) -> Recording:
    """The run under its plan, all ranks together; what the whole model did is told on the first rank, others know their part."""
    spec, kept, text = trainer.spec, Recording(), RandomText(trainer.spec)
    for step in range(spec.train.steps):
        numbers = indices(spec, first=step * spec.train.global_batch, data_rank=trainer.groups.coordinates["data"])
        computed = compute(trainer, [text.batch(part) for part in numbers], step=step)
        kept.losses.append(computed.loss)
        kept.norms.append(computed.grad_norm)
        kept.gradients.append(_together({name: _gradient(p) for name, p in trainer.parameters.items()}, trainer))
        update(trainer, computed, step=step)
    kept.weights = _together({name: p.detach() for name, p in trainer.parameters.items()}, trainer)
    return kept


def _together(shares: dict[str, Tensor], trainer: Trainer) -> dict[str, Tensor]:
    """Whole tensors of the whole model on the first rank. A tied tensor that its holders disagree on becomes NaN."""
    whole = {name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu().clone() for name, t in shares.items()}
    here = trainer.groups.coordinates
    mine = whole if here["data"] == here["tensor"] == 0 else {}
    everyone: list[dict[str, Tensor]] | None = [{} for _ in range(dist.get_world_size())] if trainer.groups.rank == 0 else None
    dist.gather_object(mine, everyone)
    found: dict[str, Tensor] = {}
    for part in everyone or ():
        for name, tensor in part.items():
            found[name] = tensor if name not in found or torch.equal(found[name], tensor) else torch.full_like(tensor, torch.nan)
    return found


def compare(expected: Recording, found: Recording, *, spec: RunSpec) -> list[Row]:
    """The worst gap of each quantity."""
    assert expected.weights.keys() == found.weights.keys(), expected.weights.keys() ^ found.weights.keys()
    steps = range(len(expected.losses))
    losses = [(abs(expected.losses[s] - found.losses[s]), f"step {s + 1}") for s in steps]
    norms = [(abs(expected.norms[s] - found.norms[s]) / expected.norms[s], f"step {s + 1}") for s in steps]
    grads = [
        (float((found.gradients[s][name] - g).abs().max() / g.abs().max()), f"{name}, step {s + 1}")
        for s in steps
        for name, g in expected.gradients[s].items()
    ]
    rates = sum(learning_rate(s, spec=spec.optimizer, steps=spec.train.steps) for s in steps)
    weights = []
    for name, weight in expected.weights.items():
        clear = torch.stack([e[name].abs() > CLEAR_GRADIENT * e[name].abs().max() for e in expected.gradients]).all(0)
        weights.append((float(((found.weights[name] - weight).abs() * clear).max()) / rates, name))
    return [
        Row("loss, |difference|", *_worst(losses, LOSS_LIMIT)),
        Row("gradient norm, relative", *_worst(norms, NORM_LIMIT)),
        Row("gradients, of the tensor's largest", *_worst(grads, GRADIENT_LIMIT)),
        Row(f"weights after {len(steps)} steps, in learning rates", *_worst(weights, WEIGHT_LIMIT)),
    ]


def _worst(gaps: list[tuple[float, str]], limit: float) -> tuple[float, float, str]:
    """A NaN is worse than anything."""
    gap, where = max(gaps, key=lambda found: (found[0] != found[0], found[0]))
    return gap, limit, where


def main(run_dir: str, steps: int) -> None:
    """A rank of `megalith parity`: shrink the run in `run_dir/spec.json`, record it, and on the first rank compare it with the reference
    and write `run_dir/parity.json`."""
    folder, heartbeat = Path(run_dir), Heartbeat.find()
    spec = shrink(RunSpec.model_validate_json((folder / "spec.json").read_text()), steps=steps)
    place = environment.find()
    assert place is not None, "no rank in the environment: `megalith parity` starts ranks"
    device = choose_device(spec.train.device, place.local_rank, place.local_world)
    join(place, launch=spec.launch, device=device)
    heartbeat.beat("building")
    trainer = assemble(spec, groups=mesh_groups(spec, device), device=device)
    heartbeat.beat("ready")
    found = record(trainer)
    if place.rank == 0:
        rows = compare(reference(spec, device=device), found, spec=spec)
        report = {"equal": all(row.equal for row in rows), "rows": [asdict(row) | {"equal": row.equal} for row in rows]}
        (folder / "parity.json").write_text(json.dumps(report | {"model": spec.model.model_dump(), "steps": steps}, indent=1))
    dist.barrier()
    dist.destroy_process_group()

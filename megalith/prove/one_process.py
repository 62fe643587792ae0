"""A small run in plain PyTorch on one process, as the reference for a run under a plan, and the random text on which both train.

The reference has the same modules of the model, but no process group and no pipeline. The reference's updates are those of `prove.updates`
(for AdamW and SGD, torch's own).
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor, nn

from megalith.data.stream import Batch as Samples
from megalith.kernels.chunks import tile_rows
from megalith.kernels.draws import working_on
from megalith.kernels.narrow import Narrow, maxima
from megalith.kernels.numbers import Dtypes
from megalith.models.init import initialise, seed_of
from megalith.models.moe import Moe
from megalith.models.router import recording
from megalith.models.stage import Stage
from megalith.parallel.precision import apply_precision, with_own_narrow
from megalith.parallel.recompute import apply_rounding
from megalith.parallel.tables import use_tiles
from megalith.prove.clipping import Clipping
from megalith.prove.compare import Recording, StepRouting
from megalith.prove.updates import update_of
from megalith.spec.numbers import PRECISIONS, recipe_of
from megalith.spec.phases import Phases, during
from megalith.spec.run import RunSpec
from megalith.train.batches import Cut, to_batch
from megalith.train.optimizers.rates import learning_rate
from megalith.train.own.loss import use_loss


class RandomText:
    """Random tokens in documents of random lengths, as a pure function of (seed, sample): a run needs no data to be checked."""

    def __init__(self, spec: RunSpec) -> None:
        self.vocab, self.seq_len, self.seed = spec.model.vocab, spec.train.seq_len, spec.train.seed
        self.masked = spec.data.document_mask

    def batch(self, numbers: range) -> Samples:
        """Return the samples with these numbers. About one target in eight is missing, so that a mean over the wrong set of
        targets is detected."""
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


def reference(spec: RunSpec, *, device: torch.device, parts: int = 1) -> Recording:
    """Return the recording of the run on one process. `parts`: as in `SingleProcess.step`."""
    alone, phases, samples = SingleProcess(spec, device=device), Phases.of(spec), 0
    for _ in range(spec.train.steps):
        now = during(spec, phases.at(samples))
        alone.step(now, first=samples, parts=parts)
        samples += now.train.global_batch
    return alone.finish()


class SingleProcess:
    """A run on one process: plain modules, no groups, the updates of `prove.updates` and the clipping of `prove.clipping`. The
    process computes microbatch i of all data ranks at once, because balance losses may be computed over all these samples. In
    every precision, master weights and sums of gradients are in fp32."""

    def __init__(self, spec: RunSpec, *, device: torch.device) -> None:
        self.spec, self.device = spec, device
        model = spec.model.build()
        with device:
            self.stage = Stage(model)
        if spec.train.loss is not None:
            use_loss([self.stage], spec.train.loss)
        use_tiles([self.stage], tile_rows(spec.train.vocab_tile, model.dim))
        recipe, choices = recipe_of(spec.precision, spec.train.precision), with_own_narrow(spec.precision, spec.train.precision)
        self._narrow = list[Narrow]()
        for name, part in self.stage.parts():
            narrow = apply_precision(part, recipe, name=name, blocks=len(model.blocks), choices=choices)
            self._narrow += (each for recipes in narrow.values() for each in recipes)
            apply_rounding(part, spec.plan, choices)
            initialise(part, name=name, spec=model, seed=spec.train.seed)
        computes = self.stage.parameters_by_name()
        self.parameters = {name: nn.Parameter(p.detach().clone()) for name, p in computes.items()}
        self._faces = {name: (p, self.parameters[name]) for name, p in computes.items()}
        for p in computes.values():
            p.data = p.data.to(Dtypes.of(spec.train.precision).compute)
        self.kept = Recording()
        o = spec.optimizer
        self._advance = update_of(self.parameters, o, model)
        self._clipping = Clipping(o, model, self.stage, self.parameters)

    def step(self, now: RunSpec, *, first: int, parts: int = 1) -> None:
        """Train a step on the samples from number `first` on. `now`: the run with the settings of its current phase. The samples
        are divided into `parts`; the loss is the mean of the parts' losses, and the loss of a part is the mean over its targets.
        """
        kept, step, o = self.kept, len(self.kept.losses), self.spec.optimizer
        for multiply in self._narrow:
            multiply.microbatch = self.spec.plan.microbatch * now.train.seq_len
        kept.losses.append(_reference_step(self.stage, self._faces, now, first=first, parts=parts, device=self.device, kept=kept))
        grads = {name: gradient_of(p).clone() for name, p in self.parameters.items()}
        norm = sum(float(grad.double().square().sum()) for grad in grads.values()) ** 0.5  # torch's norm errs in a large tensor
        self._clipping.clip(norm, number=step)
        self._advance(step, learning_rate(step, spec=o, steps=self.spec.train.steps))
        self._clipping.scale_heads()
        for p, parameter in self._faces.values():
            parameter.grad = None
            p.data.copy_(parameter.data)
        for module in self.stage.modules():
            if isinstance(module, Moe):
                module.end_of_step(module.router.counts)
        for recipe in self._narrow:
            if recipe.latest is not None:
                recipe.take_in(recipe.latest.clone())
                kept.maxima |= {} if step else recipe.followed()
        kept.norms.append(norm)
        kept.gradients.append({name: g.cpu() for name, g in grads.items()})

    def weights(self) -> dict[str, Tensor]:
        """Return copies on the CPU, by name, of the fp32 parameters and of the buffers that training changes."""
        return {name: t.detach().to("cpu", copy=True) for name, t in (self.parameters | self.stage.lasting_buffers()).items()}

    @torch.no_grad()
    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Continue training with these weights and buffers in place of the present ones."""
        buffers = self.stage.lasting_buffers()
        for name, tensor in weights.items():
            (buffers[name] if name in buffers else self.parameters[name]).copy_(tensor)
        for p, parameter in self._faces.values():
            p.data.copy_(parameter.data)

    def finish(self) -> Recording:
        """Return the recording of all steps, with the final weights."""
        self.kept.weights = self.weights()
        return self.kept


def _reference_step(
    stage: Stage,
    faces: dict[str, tuple[nn.Parameter, nn.Parameter]],
    spec: RunSpec,
    *,
    first: int,
    parts: int,
    device: torch.device,
    kept: Recording,
) -> float:
    """Compute the gradients of the step that begins with sample `first`; return the step's loss. `faces`: for each parameter, the tensor
    that computes, and the fp32 tensor, which receives the gradient."""
    text, head = RandomText(spec), stage.spec.head
    rows = spec.plan.set_sequences
    sets = [text.batch(range(first + i * rows, first + (i + 1) * rows)) for i in range(spec.microbatches)]
    each = len(sets) // parts
    valid = [sum(int((samples.targets >= 0).sum()) for samples in sets[i : i + each]) for i in range(0, len(sets), each)]
    cut = Cut(spec.data.document_mask, head.ahead.depth if head.ahead else 0)
    scale = gradient_scale_of(spec)
    total = 0.0
    with recording(stage) as routings, maxima() as seen:
        for number, samples in enumerate(sets):
            batch = to_batch(
                samples,
                cut,
                device=device,
                loss_scale=1 / (parts * valid[number // each]),
                z_loss=spec.train.z_loss,
                sequences=spec.train.global_batch,
                gradient_scale=scale,
            )
            with working_on(batch.work):
                loss = stage(batch.tokens, batch)
                loss.objective.backward()
            total += float(loss.nll)
            grads = {name: gradient_of(computes).float() / scale for name, (computes, _) in faces.items()}
            for name, (computes, parameter) in faces.items():
                computes.grad = None
                parameter.grad = grads[name] if parameter.grad is None else parameter.grad + grads[name]
            if not kept.routing:
                kept.microbatches.append({name: grad.to("cpu", copy=True) for name, grad in grads.items()})
    kept.maxima = kept.maxima if kept.routing else seen
    kept.routing.append({name: StepRouting.of(records) for name, records in routings.items()})
    return total


def gradient_scale_of(spec: RunSpec) -> float:
    """Return the initial loss scale; 1 if the precision has none. A run that is compared keeps the initial loss scale in all steps."""
    return float(spec.loss_scale.initial) if PRECISIONS[spec.train.precision].scaled else 1.0


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad

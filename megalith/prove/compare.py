"""Recording of a run, step by step, and the distance of two runs that differ only in the order of sums."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalith.kernels.narrow import HISTORY, TrackedMaxima
from megalith.models.router import RoutingRecord
from megalith.spec.numbers import Reordered
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.run import RunSpec
from megalith.spec.treatment import amplifies, kinds
from megalith.train.optimizers.rates import learning_rate

USUAL = Reordered()
CANCELLED = 1e-7
"""The largest gradient of a tensor, relative to the model's largest, that counts as a rounding error."""

AMPLIFIED_LIMIT = 1e-3
"""Limit of a loss's relative difference for optimizers that amplify rounding."""
Gap = tuple[float, str]
"""The difference of a quantity between two runs, and where it was found."""


@dataclass(frozen=True)
class StepRouting:
    """One router's experts for every token of a global batch, and the margin of each choice."""

    choices: Tensor  # [samples, seq, active], ascending
    margins: Tensor  # [samples, seq]

    @classmethod
    def of(cls, records: list[RoutingRecord]) -> "StepRouting":
        return cls(torch.cat([r.choices for r in records]), torch.cat([r.margins for r in records]))


@dataclass
class Recording:
    """Recording of a run, step by step. Tensors are whole (not sharded), and have their names in the model."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    routing: list[dict[str, StepRouting]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    microbatches: list[dict[str, Tensor]] = field(default_factory=list)
    """Gradient of each microbatch in the first step. Only a run on one process records the gradients of microbatches."""
    maxima: dict[str, TrackedMaxima] = field(default_factory=dict)
    """The largest values that rows and tensors had when they were scaled in the first step, by layer and factor
    (`kernels.narrow.maxima`). The maxima that delayed scales follow in the second step are included."""

    def first(self) -> "Recording":
        """The recording of the first step alone, but with the weights from the end of the run."""
        return Recording(self.losses[:1], self.norms[:1], self.gradients[:1], self.routing[:1], self.weights)


@dataclass(frozen=True)
class Row:
    """The comparison of one quantity: its largest difference, the place of that difference, and the limit."""

    quantity: str
    gap: float
    limit: float
    where: str

    @property
    def equal(self) -> bool:
        return self.gap <= self.limit  # a NaN gap is not


def ties(expected: Recording, found: Recording, *, tie: float) -> int:
    """Count the tokens that went to other experts than in the reference because scores were nearly equal: those of the last chosen
    expert and of the next one differ by at most `tie`. A run in which nearly equal scores sent tokens to other experts proves
    nothing, and another run must be drawn."""
    return sum(int((moved & ~clear).sum()) for moved, clear, _ in moved_tokens(expected, found, tie=tie))


def moved_tokens(expected: Recording, found: Recording, *, tie: float) -> Iterator[tuple[Tensor, Tensor, str]]:
    """For each router and step, yield which tokens went to other experts than in the reference, and for which tokens the reference's
    choice was clear: the last chosen expert's score was above the next one's by more than `tie`. Steps after the first one in which
    a token went to another expert are left out, because they differ anyway."""
    for step, (theirs, ours) in enumerate(zip(expected.routing, found.routing, strict=True)):
        moves = []
        for name, routed in theirs.items():
            moved = (routed.choices != ours[name].choices).any(-1)
            moves.append((moved, routed.margins > tie, f"{name}, step {step + 1}"))
        yield from moves
        if any(bool(moved.any()) for moved, _, _ in moves):
            return


def compare(expected: Recording, found: Recording, *, spec: RunSpec, limits: Reordered = USUAL) -> list[Row]:
    """Return the largest difference of each quantity between two runs that differ only in the order of sums.

    A run with an optimizer that amplifies rounding (`spec.treatment.amplifies`) is compared completely in its first step, and
    only by its losses after that.
    """
    if len(expected.losses) > 1 and amplifies(spec.optimizer):
        return _by_losses(expected, found, spec=spec, limits=limits)
    assert expected.weights.keys() == found.weights.keys(), expected.weights.keys() ^ found.weights.keys()
    steps = range(len(expected.losses))
    losses = [(abs(expected.losses[s] - found.losses[s]), f"step {s + 1}") for s in steps]
    norms = [(abs(expected.norms[s] - found.norms[s]) / expected.norms[s], f"step {s + 1}") for s in steps]
    grads = [
        gap for s in steps for gap in _gradient_gaps(expected.gradients[s], found.gradients[s], limits.floor, f"step {s + 1}")
    ]
    rates, cancelling = learning_rates(spec), cancelled(expected.gradients)
    weights = [
        (float((found.weights[name] - expected.weights[name]).abs().max()) / rates, name)
        for name in expected.gradients[0]
        if name not in cancelling
    ]
    moved = [(float((gone & clear).sum()), where) for gone, clear, where in moved_tokens(expected, found, tie=limits.tie)]
    measured = [
        ("routing, tokens sent elsewhere", moved, 0.0),
        ("routers' loads and biases, |difference|", router_gaps(expected, found), limits.router),
        ("loss, |difference|", losses, limits.loss),
        ("gradient norm, relative", norms, limits.norm),
        ("gradients, of the tensor's largest", grads, limits.gradient),
        (f"weights after {len(steps)} steps, |difference| over the sum of learning rates", weights, limits.weights),
    ]
    return [Row(quantity, *worst(gaps, limit)) for quantity, gaps, limit in measured if gaps]


def _by_losses(expected: Recording, found: Recording, *, spec: RunSpec, limits: Reordered) -> list[Row]:
    one = compare(expected.first(), found.first(), spec=spec, limits=limits)
    losses = [
        (abs(theirs - ours) / abs(theirs), f"step {step + 1}")
        for step, (theirs, ours) in enumerate(zip(expected.losses, found.losses, strict=True))
    ]
    signs = any(OPTIMIZERS[kind].amplifies for kind in kinds(spec.optimizer))  # also in the first update
    kept = [row for row in one if row.quantity.startswith(("loss", "gradient")) or not signs]
    return [*kept, Row("loss of all steps, relative", *worst(losses, AMPLIFIED_LIMIT))]


def learning_rates(spec: RunSpec) -> float:
    """Return the sum of the learning rates of all steps, which is about the largest possible change of a weight."""
    return sum(learning_rate(step, spec=spec.optimizer, steps=spec.train.steps) for step in range(spec.train.steps))


def router_gaps(expected: Recording, found: Recording) -> list[Gap]:
    """Return the largest |difference| of each buffer that checkpoints hold: loads and biases of routers."""
    names = sorted(name for name in expected.weights.keys() - expected.gradients[0].keys() if not name.endswith(HISTORY))
    return [(float((found.weights[name] - expected.weights[name]).abs().max()), name) for name in names]


def cancelled(steps: Sequence[Mapping[str, Tensor]]) -> set[str]:
    """Return the names of the tensors whose gradients cancel out in every step, so that only rounding errors remain (see
    `_gradient_gaps`). Adafactor divides a gradient by its size, however small, so a weight whose gradients cancel out moves by
    rounding errors alone."""
    most = [CANCELLED * max(float(g.abs().max()) for g in gradients.values()) for gradients in steps]
    return {name for name in steps[0] if all(float(g[name].abs().max()) <= end for g, end in zip(steps, most, strict=True))}


def _gradient_gaps(expected: dict[str, Tensor], found: dict[str, Tensor], floor: float, step: str) -> Iterator[Gap]:
    """Yield the differences of gradients, relative to each tensor's largest gradient. If the gradients of a tensor cancel out (as
    for a bias of keys, which shifts all scores alike), the tensor has only rounding errors, so its differences are measured
    against the model's largest gradient."""
    least = floor * max(float(g.abs().max()) for g in expected.values())
    for name, g in expected.items():
        yield float((found[name] - g).abs().max()) / max(float(g.abs().max()), least), f"{name}, {step}"


def worst(gaps: list[Gap], limit: float) -> tuple[float, float, str]:
    """Return the largest gap, `limit`, and the place of this gap. A NaN counts as the largest gap."""
    gap, where = max(gaps, key=lambda found: (found[0] != found[0], found[0]))
    return gap, limit, where

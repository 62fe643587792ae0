"""What a run did, step by step, and how far two runs are apart that differ in the order of sums alone."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalith.models.router import Record
from megalith.spec.run import RunSpec
from megalith.train.optimizers.rates import learning_rate

LOSS_LIMIT = 1e-5  # |difference|
NORM_LIMIT = 1e-5  # |difference| / reference
GRADIENT_LIMIT = 1e-4  # max |difference| / max |reference| of a tensor
WEIGHT_LIMIT = 0.05  # |difference| in learning rates, summed over the steps
FLOOR = 1e-3  # of the largest gradient: below it, GRADIENT_LIMIT is finer than the rounding of that gradient in fp32
ROUTER_LIMIT = 1e-6
TIE = 1e-5  # scores closer than this may be ranked either way


@dataclass(frozen=True)
class Routed:
    """Where a router sent every token of a global batch, and by how much the choice was clear."""

    choices: Tensor  # [samples, seq, active], ascending
    margins: Tensor  # [samples, seq]

    @classmethod
    def of(cls, records: list[Record]) -> "Routed":
        return cls(torch.cat([r.choices for r in records]), torch.cat([r.margins for r in records]))


@dataclass
class Recording:
    """What a run did, step by step; tensors whole, by their name in the model."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    routing: list[dict[str, Routed]] = field(default_factory=list)
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


def ties(expected: Recording, found: Recording) -> int:
    """Tokens that went elsewhere than in the reference where the choice was closer than TIE: such a run proves nothing, draw another."""
    return sum(int((moved & ~clear).sum()) for moved, clear, _ in moved_tokens(expected, found))


def moved_tokens(expected: Recording, found: Recording, *, tie: float = TIE) -> Iterator[tuple[Tensor, Tensor, str]]:
    """Of each router and step: which tokens went elsewhere, and where the choice was clear, by more than `tie`. After the first tie,
    later steps differ anyway: they are left out."""
    for step, (theirs, ours) in enumerate(zip(expected.routing, found.routing, strict=True)):
        moves = []
        for name, routed in theirs.items():
            moved = (routed.choices != ours[name].choices).any(-1)
            moves.append((moved, routed.margins > tie, f"{name}, step {step + 1}"))
        yield from moves
        if any(bool(moved.any()) for moved, _, _ in moves):
            return


def compare(expected: Recording, found: Recording, *, spec: RunSpec, floor: float = FLOOR) -> list[Row]:
    """The worst gap of each quantity. `floor`: the share of the model's largest gradient that a tensor's own counts as at least."""
    assert expected.weights.keys() == found.weights.keys(), expected.weights.keys() ^ found.weights.keys()
    steps = range(len(expected.losses))
    losses = [(abs(expected.losses[s] - found.losses[s]), f"step {s + 1}") for s in steps]
    norms = [(abs(expected.norms[s] - found.norms[s]) / expected.norms[s], f"step {s + 1}") for s in steps]
    grads = [gap for s in steps for gap in _gradient_gaps(expected.gradients[s], found.gradients[s], floor, f"step {s + 1}")]
    rates = sum(learning_rate(s, spec=spec.optimizer, steps=spec.train.steps) for s in steps)
    weights = [
        (float((found.weights[name] - expected.weights[name]).abs().max()) / rates, name) for name in expected.gradients[0]
    ]
    kept = expected.weights.keys() - expected.gradients[0].keys()
    routers = [(float((found.weights[name] - expected.weights[name]).abs().max()), name) for name in sorted(kept)]
    moved = [(float((gone & clear).sum()), where) for gone, clear, where in moved_tokens(expected, found)]
    routing = [
        Row(quantity, *worst(gaps, limit))
        for quantity, gaps, limit in (
            ("routing, tokens sent elsewhere", moved, 0.0),
            ("routers' loads and biases, |difference|", routers, ROUTER_LIMIT),
        )
        if gaps
    ]
    return [
        *routing,
        Row("loss, |difference|", *worst(losses, LOSS_LIMIT)),
        Row("gradient norm, relative", *worst(norms, NORM_LIMIT)),
        Row("gradients, of the tensor's largest", *worst(grads, GRADIENT_LIMIT)),
        Row(f"weights after {len(steps)} steps, in learning rates", *worst(weights, WEIGHT_LIMIT)),
    ]


def _gradient_gaps(expected: dict[str, Tensor], found: dict[str, Tensor], floor: float, step: str) -> Iterator[tuple[float, str]]:
    """Differences as a share of each tensor's largest gradient. A tensor whose gradients cancel out (a bias of keys, which shifts all
    scores alike) holds rounding errors only: it is measured against the model's largest."""
    least = floor * max(float(g.abs().max()) for g in expected.values())
    for name, g in expected.items():
        yield float((found[name] - g).abs().max()) / max(float(g.abs().max()), least), f"{name}, {step}"


def worst(gaps: list[tuple[float, str]], limit: float) -> tuple[float, float, str]:
    """The largest gap, its limit, where it is. A NaN is worse than anything."""
    gap, where = max(gaps, key=lambda found: (found[0] != found[0], found[0]))
    return gap, limit, where

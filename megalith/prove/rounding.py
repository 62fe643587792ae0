"""What bf16 costs under a plan: about what it costs one process.

In bf16 a plan's numbers are not those of one process: each rounds to 8 bits, where its own partial sums end. So both are measured from the
same run in fp32, which is exact beside them. One process in bf16 lies some way from it (a hundredth of a gradient, a few hundred
roundings that mostly cancel out), and a plan rounds as often as one process does but for the partial sums of a few ranks: it lies about
as far, elsewhere. What is wrong lies far beyond: a microbatch lost of eight, or ranks not added up, is an eighth of a gradient or more.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalith.prove.compare import Recording, Row, moved_tokens, worst

FARTHER = (
    2.0  # how much farther from fp32 than one process a tensor's gradient may lie; found: 1.4, for norms over eight channels
)
ROUNDING = 2.0**-9  # of a number in bf16, relative: what a gradient may always be off
LOSS_LIMIT = 1e-3  # |difference| from fp32; found: 1e-4
TIE = 2.0**-8  # scores closer than this, two roundings, may be ranked either way; found: 1e-3


def compare(exact: Recording, alone: Recording, found: Recording) -> list[Row]:
    """A run in bf16 beside one process in fp32 (`exact`) and in bf16 (`alone`). That the gradient norm is off by no more than the
    gradients' distances follows."""
    moved = [(float((gone & clear).sum()), where) for gone, clear, where in moved_tokens(exact, found, tie=TIE)]
    losses = [(abs(e - f), f"step {s + 1}") for s, (e, f) in enumerate(zip(exact.losses, found.losses, strict=True))]
    return [
        *([Row("routing, tokens sent elsewhere than in fp32", *worst(moved, 0.0))] if moved else []),
        Row("loss, |difference| from fp32", *worst(losses, LOSS_LIMIT)),
        Row("gradients' distance from fp32, in that of one process", *worst(list(_farther(exact, alone, found)), FARTHER)),
    ]


def _farther(exact: Recording, alone: Recording, found: Recording) -> Iterator[tuple[float, str]]:
    """How much farther from fp32, tensor by tensor; once a token went elsewhere than alone, to the gradient of whose experts it is now
    missing, all tensors at once."""
    together = False
    for step, gradients in enumerate(exact.gradients):
        ours, theirs = found.gradients[step], alone.gradients[step]
        routes = zip(found.routing[step].values(), alone.routing[step].values(), strict=True)
        together = together or not all(torch.equal(one.choices, other.choices) for one, other in routes)
        for names in [[*gradients]] if together else [[name] for name in gradients]:
            where = f"{'all' if together else names[0]}, step {step + 1}"
            yield _distance(ours, gradients, names) / max(_distance(theirs, gradients, names), ROUNDING), where


def _distance(gradients: dict[str, Tensor], exact: dict[str, Tensor], names: Sequence[str]) -> float:
    """Of some tensors, as a share of their norm."""
    apart = sum(float((gradients[name] - exact[name]).square().sum()) for name in names)
    return (apart / sum(float(exact[name].square().sum()) for name in names)) ** 0.5

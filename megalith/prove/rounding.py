"""Compare a run in a rounded precision with one process in the same precision, both measured from one process in fp32.

In bf16, a plan's numbers differ from those of one process, because the two round different partial sums to 8 bits of mantissa.
The gradient of one process in bf16 differs from that in fp32 by about a hundredth: the error of a few hundred roundings, most of
which cancel out. A run under a plan rounds about as often (only the partial sums of a few ranks are added), so its distance from
the exact result is similar, though in another direction. A larger distance therefore shows an error beyond rounding, such as a
missing reduction or a shifted tensor.

Errors that are smaller than the rounding of a gradient show in quantities in which rounding cancels out. One quantity in which rounding
cancels out is the projection of the plan's gradient on that of one process: it turns thousands of roundings into one factor, which is 1
within a thousandth. Rounding also cancels out in the weight of each microbatch in the sum of gradients.
"""

from collections.abc import Iterator, Sequence
from itertools import takewhile
from math import log2

import torch
from torch import Tensor

from megalith.prove.compare import Gap, Recording, Row, cancelled, learning_rates, moved_tokens, router_gaps, worst
from megalith.spec.numbers import Rounded
from megalith.spec.run import RunSpec

NOISE = 0.25
"""If the relative error of one process's gradient is larger than this, the gradient is mostly rounding, and its length means
nothing."""
CHANCE = 4
"""Number of standard errors by which a factor between gradients may differ from 1. A run has some hundred tensors, so the factors of some
are far from 1 by chance."""
FEW = 64
"""Number of elements below which the roundings of a tensor hardly cancel out (norms of eight channels, decays of four heads):
random differences grow as one over the root of the number of elements. The differences of tensors with fewer elements are weighted down
accordingly."""


def compare(exact: Recording, alone: Recording, found: Recording, *, spec: RunSpec, limits: Rounded) -> list[Row]:
    """Compare a run (`found`) with one process in fp32 (`exact`) and with one in the run's precision (`alone`).

    If a token goes to another expert than in `alone`, the gradients of both experts differ. From the first step on in which a token
    goes to another expert than in `alone`, only the distance of all gradients together is compared.
    """
    steps = range(len(exact.losses))
    alike = [*takewhile(lambda step: _routed_alike(alone, found, step), steps)]
    moved = [(float((gone & clear).sum()), where) for gone, clear, where in moved_tokens(exact, found, tie=limits.tie)]
    measured = [
        ("routing, tokens sent elsewhere than in fp32", moved, 0.0),
        ("loss, excess distance from fp32 over one process", [*_losses(exact, alone, found)], limits.loss),
        (
            "gradients' distance from fp32, relative to that of one process",
            [*_distances(exact, alone, found, alike=len(alike), least=limits.least)],
            limits.distance,
        ),
        ("gradients' length, |factor - 1| beyond chance", [*_scales(exact, alone, found, alike)], limits.scale),
        ("maxima from which scales are computed, |log2| of run over one process", _maxima(alone, found), limits.maxima),
        (
            "weight of a microbatch, |difference| from 1 beyond chance",
            _microbatches(alone, found) if alike else [],
            limits.microbatch,
        ),
        ("gradient norm, relative", [(abs(found.norms[s] / alone.norms[s] - 1), f"step {s + 1}") for s in alike], limits.norm),
    ]
    if len(alike) == len(steps):
        rates, cancelling = learning_rates(spec), cancelled(exact.gradients)
        names = [name for name in exact.gradients[0] if name not in cancelling]
        apart = [(float(_rms(found.weights[name] - alone.weights[name])) / rates, name) for name in names]
        measured += [
            ("routers' loads and biases, |difference|", router_gaps(alone, found), limits.router),
            (
                f"weights after {len(steps)} steps, root mean square difference over the sum of learning rates",
                apart,
                limits.weights,
            ),
        ]
    return [Row(quantity, *worst(gaps, limit)) for quantity, gaps, limit in measured if gaps]


def _routed_alike(alone: Recording, found: Recording, step: int) -> bool:
    return all(torch.equal(routed.choices, found.routing[step][name].choices) for name, routed in alone.routing[step].items())


def _losses(exact: Recording, alone: Recording, found: Recording) -> Iterator[Gap]:
    for step, (exactly, one, ours) in enumerate(zip(exact.losses, alone.losses, found.losses, strict=True)):
        farther = abs(ours - exactly) - abs(one - exactly)
        yield 0.0 if farther < 0 else farther, f"step {step + 1}"  # not max(): that could drop a NaN


def _distances(exact: Recording, alone: Recording, found: Recording, *, alike: int, least: float) -> Iterator[Gap]:
    """Yield the run's distance from fp32 divided by one process's distance from fp32: for each tensor in the first `alike` steps,
    then for all tensors together."""
    for step, gradients in enumerate(exact.gradients):
        ours, theirs = found.gradients[step], alone.gradients[step]
        for names in [[name] for name in gradients] if step < alike else [[*gradients]]:
            where = f"{names[0] if step < alike else 'all'}, step {step + 1}"
            ratio = _distance(ours, gradients, names) / max(_distance(theirs, gradients, names), least)
            yield ratio * _confidence(sum(gradients[name].numel() for name in names)), where


def _confidence(numbers: int) -> float:
    return min(1.0, (numbers / FEW) ** 0.5)


def _distance(gradients: dict[str, Tensor], exact: dict[str, Tensor], names: Sequence[str]) -> float:
    """Return the distance of some gradients from the exact ones, relative to the norm of the exact ones."""
    apart = sum(float((gradients[name] - exact[name]).square().sum()) for name in names)
    return (apart / sum(float(exact[name].square().sum()) for name in names)) ** 0.5


def _scales(exact: Recording, alone: Recording, found: Recording, steps: Sequence[int]) -> Iterator[Gap]:
    """For each tensor, yield how far the length of the run's gradient, relative to the length of one process's gradient, is from 1, beyond
    chance (`_longer`)."""
    for step in steps:
        for name, theirs in alone.gradients[step].items():
            if _distance(alone.gradients[step], exact.gradients[step], [name]) <= NOISE:
                beyond = _longer(found.gradients[step][name].double(), theirs.double())
                yield 0.0 if beyond < 0 else beyond * _confidence(theirs.numel()), f"{name}, step {step + 1}"


def _longer(ours: Tensor, theirs: Tensor) -> float:
    """Return how far the factor between `theirs` and `ours` is from 1, less CHANCE standard errors.

    The factor comes from a regression through the origin on the mean of `theirs` and `ours`. If `ours` and `theirs` differ only in their
    roundings, neither is longer on average, so the expected factor between them is 1. A regression on only `ours` or only `theirs` would
    give a smaller factor, because rounding errors in the regressor lower the slope. A rounded activation moves the gradients of a whole row
    or column together, so the standard error is the largest of three: by numbers, by rows and by columns (cluster-robust: Cameron, Gelbach
    and Miller 2011, https://doi.org/10.1198/jbes.2010.07136).
    """
    apart, middle = ours - theirs, (ours + theirs) / 2
    size = middle.square().sum()
    factor = (apart * middle).sum() / size
    errors = _variances((apart - factor * middle) * middle)  # of what the factor does not explain
    return float(factor.abs() - CHANCE * max(errors) ** 0.5 / size) if theirs.numel() > 1 else 0.0


def _variances(left: Tensor) -> list[float]:
    """Return the variance of the sum of a tensor's elements, if chance drew elements, rows or columns (0 if there is only one)."""
    sums = [left] if left.dim() < 2 else [left, left.sum(-1), left.sum(-2)]
    return [float(each.square().sum()) * each.numel() / (each.numel() - 1) if each.numel() > 1 else 0.0 for each in sums]


def _maxima(alone: Recording, found: Recording) -> list[Gap]:
    """Return the distance between the maxima that a run's scales tracked and those of one process. A rank that mistakes its part
    for the whole tensor has a lower maximum. Gradients that are partial sums on each rank are not compared."""
    names = [name for name in alone.maxima if name in found.maxima]
    return [(abs(log2(found.maxima[name].value / alone.maxima[name].value)), name) for name in names]


def _microbatches(alone: Recording, found: Recording) -> list[Gap]:
    """Return |weight - 1| of each microbatch, less CHANCE standard errors as in `_longer`. One process computes the gradient of each
    microbatch separately. The weights are those with which the sum of the microbatches' gradients is closest to the run's first
    gradient."""
    parts = alone.microbatches
    apart = {name: found.gradients[0][name] - whole for name, whole in alone.gradients[0].items()}
    products = torch.tensor([[_dot(one, other) for other in parts] for one in parts], dtype=torch.float64)
    projections = torch.tensor([_dot(one, apart) for one in parts], dtype=torch.float64)
    inverse = torch.linalg.pinv(products, hermitian=True)
    weights = inverse @ projections  # least squares; a NaN found stays one
    left = {name: gap.double() - _mixed(weights, parts, name) for name, gap in apart.items()}  # what the weights do not explain
    gaps = list[Gap]()
    for number, (weight, row) in enumerate(zip(weights, inverse, strict=True)):
        errors = [_variances(rest * _mixed(row, parts, name)) for name, rest in left.items()]
        by_kind = [sum(each[min(kind, len(each) - 1)] for each in errors) for kind in range(3)]
        beyond = abs(float(weight)) - CHANCE * max(by_kind) ** 0.5
        gaps.append((0.0 if beyond < 0 else beyond, f"microbatch {number}"))
    return gaps


def _mixed(weights: Tensor, parts: Sequence[dict[str, Tensor]], name: str) -> Tensor:
    """Return the sum of a tensor over `parts`, multiplied by their weights."""
    return sum(
        (weight * part[name].double() for weight, part in zip(weights, parts, strict=True)), torch.zeros((), dtype=torch.float64)
    )


def _dot(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return sum(float((tensor * other[name]).sum()) for name, tensor in one.items())


def _rms(tensor: Tensor) -> Tensor:
    return tensor.square().mean().sqrt()

"""The arithmetic of a merge. All operations in this module are elementwise, so each rank can compute its own share, and every site gets the
same bits. An anchor and its velocity may be in host memory (`sites.place`); their arithmetic is then done on the host, with the same bits.

A site sends the difference between the weights of the newest merge (the anchor) and its own weights. The mean of the differences over sites
is the outer gradient, with which SGD updates the anchor; with Nesterov's momentum, this is DiLoCo (arXiv:2311.08105, algorithm 1).
Multiplications and additions are separate operations, because fused ones would round differently.
"""

from collections.abc import Sequence

from torch import Tensor

from megalith.spec.sites import SitesSpec


def difference(anchor: Tensor, weight: Tensor, feedback: Tensor | None) -> Tensor:
    """Return a site's weight difference: the anchor minus the site's own weights, plus the remainder of earlier roundings."""
    found = anchor - weight.to(anchor.device)
    return found if feedback is None else found + feedback


def mean(differences: Sequence[Tensor], shares: Sequence[int]) -> Tensor:
    """Return the mean of the sites' differences, weighted by `shares`. The sum is computed in fp32, in the order of the sites' numbers."""
    total = differences[0].float() * shares[0]
    for each, share in zip(differences[1:], shares[1:], strict=True):
        total += each * share
    return total / sum(shares)


def outer_step(anchor: Tensor, velocity: Tensor | None, gradient: Tensor, sites: SitesSpec) -> None:
    """Update an anchor in place, and also its velocity if there is one."""
    if velocity is not None:
        velocity.mul_(sites.momentum)
        velocity.add_(gradient)
        gradient = gradient + velocity * sites.momentum if sites.nesterov else velocity
    anchor.sub_(gradient * sites.lr)


def average(anchor: Tensor, gradient: Tensor) -> None:
    """Set the anchor of a tensor without gradients, in place, to the mean of the sites' values."""
    anchor.sub_(gradient)


def correct(weight: Tensor, anchor: Tensor, early: Tensor) -> None:
    """Correct a site's weights in place: replace the outer step that the site took early and alone, to `early`, by the outer step of all
    sites, to `anchor`. The site's training since its early step is kept."""
    weight.add_((anchor - early).to(weight.device))


def mix(weight: Tensor, anchor: Tensor, own_share: float) -> None:
    """Set a site's weights, in place, to a weighted mean of the merged weights and its own weights (Streaming DiLoCo, equation 4)."""
    if own_share:
        weight.mul_(own_share)
        weight.add_((anchor * (1 - own_share)).to(weight.device))
    else:
        weight.copy_(anchor)

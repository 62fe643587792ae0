"""Computes the orthogonal factor of a matrix by an iteration that only multiplies matrices. Muon applies this iteration to its moments."""

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Step: TypeAlias = tuple[float, float, float]
"""The coefficients a, b, c of one step X <- a X + (b A + c A A) X, where A = X X^T."""

NEWTON_SCHULZ: Step = (3.4445, -4.7750, 2.0315)
"""The coefficients of Jordan's quintic iteration (kellerjordan.github.io/posts/muon, 2024), the same in every step. The result has singular
values between 0.7 and 1.2."""

POLAR_EXPRESS: tuple[Step, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845749493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""The coefficients of each step, chosen optimally for the result of the previous step (Amsel et al. 2025, arXiv:2505.16932, Algorithm 1);
further steps repeat the last row."""

SAFETY = 1.01
"""The steps of "polar-express", except those with the last row, divide singular values by this factor first, so that singular values
slightly above 1, from rounding, do not grow (section 4 of the same paper)."""

MINIMUM = 1e-7
"""The lower bound of the norm by which a matrix is divided: torch.optim.Muon's eps."""


def steps_of(coefficients: str, iterations: int) -> tuple[Step, ...]:
    """Return the steps of an iteration: `coefficients` is "newton-schulz" or "polar-express"."""
    if coefficients == "newton-schulz":
        return (NEWTON_SCHULZ,) * iterations
    last = len(POLAR_EXPRESS) - 1
    found = [POLAR_EXPRESS[min(number, last)] for number in range(iterations)]
    return tuple(
        (a / SAFETY, b / SAFETY**3, c / SAFETY**5) if number < last else (a, b, c) for number, (a, b, c) in enumerate(found)
    )


def orthogonal(matrix: Tensor, steps: Sequence[Step]) -> Tensor:
    """Return an approximation of U V^T for a matrix [m, n] = U S V^T, in the dtype of `matrix`, which is overwritten.

    Matrices are processed one at a time, even with many experts: batched products sum in another order, so the bits would depend on the
    plan. The operations are those of torch.optim.Muon, in their order.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x.div_(x.norm().clamp(min=MINIMUM))
    for a, b, c in steps:
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x

"""The gradient noise scale of McCandlish et al. 2018 (arXiv:1812.06162, appendix A.1), and the plans under which it can be
measured. No torch. Gradients of two batch sizes give an unbiased estimate: here, the partial gradients of the ranks before
the reduction, and their sum.
"""

from typing import NamedTuple

from megalith.spec.plan import Plan

SMOOTHED = 0.98
"""Decay of the moving average in each step; it averages over about 50 steps."""


class Noise(NamedTuple):
    """Estimates of one step. Signal and noise are unbiased, but their ratio is not. The noise scale is therefore the ratio of
    their averages over steps."""

    signal: float
    """The squared norm of the true gradient; an estimate of it may be negative."""
    noise: float
    """The trace of the covariance of one sequence's gradient."""


def estimate(*, small: float, large: float, part: float, batch: float) -> Noise:
    """Return the estimates from the mean squared norm `small` of gradients over `part` sequences and the squared norm `large`
    of the gradient over `batch` sequences."""
    signal = (batch * large - part * small) / (batch - part)
    return Noise(signal, (small - large) / (1 / part - 1 / batch))


def parts(plan: Plan, microbatches: int) -> int:
    """Return the number of partial gradients of different sequences that a reduction sums in a step; 1 if none can be
    compared."""
    if plan.context > 1:
        return 1
    each = microbatches if plan.zero >= 2 and plan.sides == 1 else 1
    return plan.dp_size * each


def absent(plan: Plan, microbatches: int) -> str:
    """Return the reason why a run under a plan has no gradient noise scale; empty if it has one."""
    if parts(plan, microbatches) > 1:
        return ""
    if plan.context > 1:
        return "each context rank has a part of the gradient of the same sequences"
    if microbatches == 1:
        return "one data rank computes one microbatch a step"
    return "the one data rank adds up its microbatches before the reduction; plan.zero = 2 would give an estimate"

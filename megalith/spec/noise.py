"""The gradient noise scale of McCandlish et al. 2018 (arXiv:1812.06162, appendix A.1), and the plans under which it can be
measured. No torch. Gradients of two batch sizes give an unbiased estimate: the partial gradients of a step, and their sum. A rank
has its partial gradient just before the reduction.
"""

from typing import NamedTuple

from megalith.spec.plan import Plan

SMOOTHED = 0.98
"""Share of the moving average that each step keeps: about 50 steps count."""


class Noise(NamedTuple):
    """Estimates of one step. Each is unbiased, but their ratio is not, so the ratio of their averages over steps is used."""

    signal: float
    """The squared norm of the true gradient; an estimate of it may be negative."""
    noise: float
    """The trace of the covariance of one sequence's gradient."""


def estimate(*, small: float, large: float, part: float, batch: float) -> Noise:
    """Return the estimates from the mean squared norm `small` of gradients over `part` sequences and the squared norm `large` of the one
    over `batch` sequences."""
    signal = (batch * large - part * small) / (batch - part)
    return Noise(signal, (small - large) / (1 / part - 1 / batch))


def parts(plan: Plan, microbatches: int) -> int:
    """Return the number of partial gradients, each from other sequences, that a reduction sums in a step; 1 if there are none to
    compare."""
    if plan.context > 1:
        return 1
    each = microbatches if plan.zero >= 2 and plan.sides == 1 else 1
    return plan.dp_size * each


def absent(plan: Plan, microbatches: int) -> str:
    """Return why a run under a plan has no gradient noise scale; empty if it has one."""
    if parts(plan, microbatches) > 1:
        return ""
    if plan.context > 1:
        return "context ranks have parts of the same sequences' gradients"
    if microbatches == 1:
        return "one data rank computes one microbatch a step"
    return "one data rank adds its microbatches up before anything is reduced; with plan.zero = 2 there would be an estimate"

"""The gradient noise scale of McCandlish et al. 2018 (arXiv:1812.06162, appendix A.1), and the plans under which it can be
measured. No torch. The estimate compares gradients of two batch sizes: the ranks' partial gradients before the reduction, and
their sum.
"""

from typing import NamedTuple

from megalith.spec.plan import Plan

SMOOTHED = 0.98
"""Decay per step of a moving average over about 50 steps."""


class Noise(NamedTuple):
    """Unbiased estimates from one step. The ratio of `noise` to `signal` in one step is biased, so the noise scale is the ratio
    of their averages over steps."""

    signal: float
    """The squared norm of the true gradient; an estimate of it may be negative."""
    noise: float
    """The trace of the covariance of one sequence's gradient."""


def estimate(*, small: float, large: float, part: float, batch: float) -> Noise:
    """Estimate signal and noise from `small`, the mean squared norm of gradients over `part` sequences, and `large`, the squared
    norm of the gradient over `batch` sequences."""
    signal = (batch * large - part * small) / (batch - part)
    return Noise(signal, (small - large) / (1 / part - 1 / batch))


def parts(plan: Plan, microbatches: int) -> int:
    """Return the number of partial gradients, each from other sequences, that the reductions of a step add up; 1 if the ranks'
    gradients are not from different sequences."""
    if plan.context > 1:
        return 1
    each = microbatches if plan.zero >= 2 and plan.sides == 1 else 1
    return plan.dp_size * each


def absent(plan: Plan, microbatches: int) -> str:
    """Return the reason why a run under a plan has no gradient noise scale; empty if it has one."""
    if parts(plan, microbatches) > 1:
        return ""
    if plan.context > 1:
        return "with plan.context > 1, ranks have parts of the gradient of the same sequences, so these parts give no noise scale"
    if microbatches == 1:
        return "a step has only one microbatch, so there are no two gradients that could be compared for the noise scale"
    return "the only data rank adds up its microbatches' gradients before the reduction; plan.zero = 2 would give a noise scale"

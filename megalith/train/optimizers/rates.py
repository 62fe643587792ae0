"""The learning rate over the updates of a run."""

import math

from megalith.spec.run import OptimizerSpec


def learning_rate(update: int, *, spec: OptimizerSpec, steps: int) -> float:
    """The rate of update `update` (0 is the first) of `steps`: linear warm-up, then the schedule down to `min_lr * lr` at the last one."""
    if update < spec.warmup:
        return spec.lr * (update + 1) / spec.warmup
    low = spec.lr * spec.min_lr
    done = (update - spec.warmup) / max(1, steps - 1 - spec.warmup)
    match spec.schedule:
        case "constant":
            return spec.lr
        case "linear":
            return spec.lr - (spec.lr - low) * done
        case "cosine":
            return low + (spec.lr - low) * 0.5 * (1 + math.cos(math.pi * done))
        case "wsd":  # warm up, stay, decay linearly over the last share of all updates (Hu et al. 2024)
            left = (steps - 1 - update) / max(1.0, spec.decay * steps)
            return low + (spec.lr - low) * min(1.0, left)

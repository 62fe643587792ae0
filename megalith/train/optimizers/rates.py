"""The learning rate of each update of a run."""

import math

from megalith.spec.lengths import DECAYING, decay_updates
from megalith.spec.run import BranchSpec, OptimizerSpec


def learning_rate(update: int, *, spec: OptimizerSpec, steps: int, branch: BranchSpec | None = None) -> float:
    """Return the learning rate of update `update` (counted from 0) of `steps`: a linear warm-up, and then the schedule, which
    (unless it is constant) ends at `min_lr_ratio * lr` in the last update. The first update of the warm-up has the rate lr / warmup, as in
    torchtitan; in Megatron-LM and transformers, its rate is 0.

    A `branch` follows the schedule of its original run. If the branch has its own decay, its rate decays from its first update on
    instead."""
    if branch is not None:
        return _branched(update, branch, spec)
    warmup = spec.warmup_updates(steps)
    if update < warmup:
        return spec.lr * (update + 1) / warmup
    low = spec.lr * spec.min_lr_ratio
    done = (update - warmup) / max(1, steps - 1 - warmup)
    match spec.schedule:
        case "constant":
            return spec.lr
        case "linear":
            return spec.lr - (spec.lr - low) * done
        case "cosine":
            return low + (spec.lr - low) * 0.5 * (1 + math.cos(math.pi * done))
        case "wsd":  # warm up, stay, decay linearly over the last share of all updates (Hu et al. 2024)
            return low + (spec.lr - low) * _left(update, spec=spec, steps=steps)
        case "1-sqrt":  # the same, but 1 - sqrt of the share that is done (Hägele et al. 2024, arXiv:2405.18392)
            return low + (spec.lr - low) * (1 - math.sqrt(1 - _left(update, spec=spec, steps=steps)))


def _branched(update: int, branch: BranchSpec, spec: OptimizerSpec) -> float:
    """Return the rate of an update of a branch. A branch's own decay goes from the original schedule's rate in the branch's first update to
    the minimum in the decay's last update. A branch's own decay has the form 1 - sqrt if the schedule is `1-sqrt`; otherwise it is
    linear."""
    begins = branch.updates if branch.decay else update
    start = learning_rate(min(begins, update, branch.steps - 1), spec=spec, steps=branch.steps)
    if update < branch.updates or not branch.decay:
        return start
    left = max(0, branch.updates + branch.decay - 1 - update) / branch.decay
    low = spec.lr * spec.min_lr_ratio
    return low + (start - low) * (1 - math.sqrt(1 - left) if spec.schedule == "1-sqrt" else left)


def decays(update: int, *, spec: OptimizerSpec, steps: int, branch: BranchSpec | None = None) -> bool:
    """Return True if an update lies in the final decay of the schedules `wsd` or `1-sqrt`, or in a branch's own decay. `update`: the
    update's number, counted from 0. `steps`: the number of all updates of the run."""
    if branch is not None and branch.decay:
        return update >= branch.updates
    total = steps if branch is None else branch.steps
    return spec.schedule in DECAYING and _left(update, spec=spec, steps=total) < 1


def _left(update: int, *, spec: OptimizerSpec, steps: int) -> float:
    return min(1.0, (steps - 1 - update) / max(1.0, decay_updates(spec, steps)))

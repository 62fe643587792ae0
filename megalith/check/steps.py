"""Rules about the length of a run."""

from megalith.check.case import Case, Found, advice, error
from megalith.spec.lengths import DECAYING, decay_updates


def warmup_and_decay_fit(case: Case) -> Found:
    """Warm-up, and the decay after warm-up, end before the run ends."""
    steps, optimizer, branch = case.spec.train.steps, case.spec.optimizer, case.spec.branch
    if branch is not None:  # whose schedule is the other run's
        steps = branch.steps
    warmup = optimizer.warmup_updates(steps)
    if warmup > steps:
        reason = f"is longer than the learning rate's schedule of {steps} steps, so the run would never reach optimizer.lr"
        yield error("optimizer.warmup", optimizer.warmup, reason, f'Use warmup <= {steps}, or a share of the steps such as "2%".')
    if optimizer.schedule not in DECAYING:
        return
    if warmup <= steps < warmup + round(decay_updates(optimizer, steps)):
        reason = f"of a run of {steps} steps overlaps the {warmup} steps of warm-up"
        left = steps - warmup  # 1 would mean all updates, so a share says it
        most = left if optimizer.decay > 1 and left > 1 else f"{1000 * left // steps / 1000:g}"
        yield error("optimizer.decay", optimizer.decay, reason, f"Use decay <= {most}, or less warm-up.")
    elif optimizer.decay > 1 and optimizer.decay % 1:
        reason = "is above 1, so it is a number of updates, but not a whole number"
        way_out = f"Use {max(2, round(optimizer.decay))}, or a share of the updates up to 1."
        yield error("optimizer.decay", optimizer.decay, reason, way_out)


def long_runs_save(case: Case) -> Found:
    """Long runs save: a run that only saves at its end loses everything if it dies."""
    steps, every = case.spec.train.steps, case.spec.checkpoint.every
    if every == 0 and steps >= 1000:
        way_out = f"For example, use checkpoint.every = {max(1, steps // 20)}."
        yield advice("checkpoint.every", 0, f"saves nothing before step {steps}; a run that dies starts over", way_out)

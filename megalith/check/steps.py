"""Rules about the length of a run."""

from megalith.check.case import Case, Found, advice, error


def warmup_and_decay_fit(case: Case) -> Found:
    """Warm-up, and decay after it, end before the run does."""
    steps, optimizer = case.spec.train.steps, case.spec.optimizer
    warmup = optimizer.warmup_updates(steps)
    if warmup > steps:
        reason = f"is longer than the run's train.steps = {steps}, which would never reach optimizer.lr"
        yield error("optimizer.warmup", optimizer.warmup, reason, f'Use warmup <= {steps}, or a share of the steps such as "2%".')
    elif optimizer.schedule in ("wsd", "1-sqrt") and warmup + round(optimizer.decay * steps) > steps:
        reason = f"of {steps} steps overlaps the {warmup} of warm-up"
        way_out = f"Use decay <= {1 - warmup / steps:.3g}, or less warm-up."
        yield error("optimizer.decay", optimizer.decay, reason, way_out)


def long_runs_save(case: Case) -> Found:
    """A long run that saves only at its end loses everything when it dies."""
    steps, every = case.spec.train.steps, case.spec.checkpoint.every
    if every == 0 and steps >= 1000:
        way_out = f"Use checkpoint.every = {max(1, steps // 20)}, say."
        yield advice("checkpoint.every", 0, f"saves nothing before step {steps}; a run that dies starts over", way_out)

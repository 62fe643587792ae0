"""The critical batch size by its definition: the largest batch with no worse loss after the same number of tokens. No torch.

From one checkpoint, branches train on the same samples with 0.5, 1, 2 and 4 times the batch size (Merrill et al. 2025, arXiv:2505.23971).
If a branch with a larger batch ends with a worse loss, the model learned less from each token. Replicas of a branch begin later in the
data, which shows how much the loss varies between samples.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import pairwise
from statistics import mean, stdev
from typing import Any, Literal

from megalith.spec.phases import Phases
from megalith.spec.run import BranchSpec, RampSpec, RunSpec

T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t for two-sided 95 % intervals with 1, 2, ... degrees of freedom; with more degrees than are listed, t is taken as 2."""

Scaling = Literal["root", "linear", "none"]


@dataclass(frozen=True)
class Trial:
    """One branch: its batch size as a factor of the run's batch size, the number of its replica, and the run that trains it."""

    factor: float
    replica: int
    spec: RunSpec

    @property
    def name(self) -> str:
        """The name of the branch's folder."""
        return f"batch-{self.spec.train.batch_ramp[-1].global_batch}-replica-{self.replica}"


def rate_factor(factor: float, scaling: Scaling) -> float:
    """Return the factor of the learning rate for a batch that is `factor` times as large."""
    return {"root": factor**0.5, "linear": factor, "none": 1.0}[scaling]


def trials(
    spec: RunSpec,
    *,
    checkpoint: str,
    updates: int,
    samples: int,
    steps: int,
    factors: Sequence[float],
    replicas: int,
    scaling: Scaling,
) -> Iterator[Trial]:
    """Yield the branches that start from a checkpoint of a run. Each branch trains on as many samples as the run in `steps` steps.

    Raises ValueError if a batch is not a whole number, or does not divide the samples of a branch.
    """
    phases = Phases.of(spec)
    now = phases.at(samples)
    length = steps * now.global_batch
    kept = {key for phase in phases.all[: now.number + 1] for key in phase.keys}
    ramp = tuple(point for i, point in enumerate(spec.train.batch_ramp) if f"train.batch_ramp[{i}]" in kept)
    data = tuple(phase for i, phase in enumerate(spec.data.phases) if f"data.phases[{i}]" in kept)
    for replica in range(replicas):
        for factor in factors:
            batch = now.global_batch * factor
            if batch != int(batch) or length % int(batch):
                whole = all(now.global_batch * each == int(now.global_batch * each) for each in factors)
                least = math.lcm(*(Fraction(each).limit_denominator(64).numerator for each in factors))
                raise ValueError(
                    f"{factor:g} times the batch of {now.global_batch} does not divide the {length} samples of a branch "
                    f"({steps} steps of the run's batch). Use other --factors{f', or --steps {least}' * whole}."
                )
            skip = replica * length
            branch = BranchSpec(
                checkpoint=checkpoint, updates=updates, samples=samples, steps=_schedule(spec), decay=0, skip=skip
            )
            point = RampSpec(begin=samples + skip, global_batch=int(batch))
            train = {
                "steps": updates + length // int(batch),
                "batch_ramp": (*ramp, point),
                "init_from": None,
                "init_from_changes": (),
            }
            tables: dict[str, dict[str, Any]] = {
                "train": train,
                "data": {"phases": data},
                "optimizer": {"lr": spec.optimizer.lr * rate_factor(factor, scaling)},
                "validation": {"every": 10**9 if spec.validation.every else 0},  # validate only at the end
                "checkpoint": {"every": 0, "keep": 1},
                "log": {"tensorboard": False},
            }
            changed = {name: getattr(spec, name).model_copy(update=values) for name, values in tables.items()}
            yield Trial(factor, replica, spec.model_copy(update={**changed, "branch": branch}))


def _schedule(spec: RunSpec) -> int:
    return spec.branch.steps if spec.branch else spec.train.steps


@dataclass(frozen=True)
class BatchJudgement:
    """Judgement of one batch size: the mean loss of its branches; `excess`, this loss minus the loss of the run's batch (paired by
    replica); `error`, half of the excess's 95 % interval (None: one replica); and the verdict."""

    factor: float
    batch: int
    tokens: int
    loss: float
    excess: float
    error: float | None
    verdict: Literal["as good", "worse", "not decided"]


@dataclass(frozen=True)
class Advice:
    """The judged batch sizes in ascending order, and the largest batch size whose loss after the same tokens is as good as with the run's
    batch."""

    rows: tuple[BatchJudgement, ...]
    tolerance: float
    critical: int
    """The largest batch, in sequences, with a loss as good as with the run's batch; batches above `begins` do not count."""
    begins: int | None
    """The smallest batch above the run's own whose loss is worse; None: no batch above the run's own is worse."""

    @property
    def words(self) -> str:
        """The advice in a sentence."""
        own = next(row.batch for row in self.rows if row.factor == 1)
        if self.begins is None and self.critical <= own:
            return (
                f"Whether the loss is as good with batches above the run's own {own} sequences is not certain: "
                "use more --replicas, or more --steps with another --out."
            )
        if self.begins is None:
            return (
                f"With {self.critical} sequences a step, the loss after the same number of tokens is as good as with the run's "
                f"batch. Whether it is as good with more than {self.critical} sequences is not certain."
            )
        return (
            f"With {self.critical} sequences a step, the loss after the same number of tokens is as good as with the run's batch; with "
            f"{self.begins}, it is worse."
        )

    def to_json(self) -> dict[str, Any]:
        """All fields, by name."""
        return asdict(self) | {"words": self.words}


def judge(losses: Mapping[float, Sequence[float]], *, batch: int, seq_len: int, tolerance: float) -> Advice:
    """Return the advice from the losses of each factor's replicas, in the order of replicas; factor 1 is required. `batch`: the run's
    batch, in sequences. The limit is the loss of the run's batch, times 1 + `tolerance`. A loss is worse if its whole interval is above the
    limit, and as good if no part of the interval is above the limit."""
    own = losses[1.0]
    rows = list[BatchJudgement]()
    for factor in sorted(losses):
        gaps = [loss - mine for loss, mine in zip(losses[factor], own, strict=True)]
        excess, limit = mean(gaps), tolerance * mean(own)
        error = _half_width(gaps) if len(gaps) > 1 else None
        verdict = "worse" if excess - (error or 0.0) > limit else "as good" if excess + (error or 0.0) <= limit else "not decided"
        size = round(batch * factor)
        rows.append(BatchJudgement(factor, size, size * seq_len, mean(losses[factor]), excess, error, verdict))
    critical, begins = batch, None
    for row in rows:
        if row.verdict == "as good":
            critical = row.batch
        elif row.verdict == "worse" and row.factor > 1:
            begins = row.batch
            break
    assert all(before.factor < after.factor for before, after in pairwise(rows))
    return Advice(tuple(rows), tolerance, critical, begins)


def _half_width(gaps: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean."""
    freedom = len(gaps) - 1
    t = T_95[freedom - 1] if freedom <= len(T_95) else 2.0
    return t * stdev(gaps) / len(gaps) ** 0.5

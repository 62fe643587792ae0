"""Precision watch: compares the gradients that low-precision products give with those of high-precision products, and can switch the block
with the largest error to high precision."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.data.stream import Batch as Samples
from megalith.events import EventLog, PrecisionWatched
from megalith.kernels.narrow import losses
from megalith.parallel import gradients
from megalith.parallel.data import local
from megalith.spec.numbers import is_narrow
from megalith.spec.sites.cut import part_of
from megalith.train.assemble import Trainer
from megalith.train.batches import count_valid
from megalith.train.measure.aside import smallest, uncounted, unobserved
from megalith.train.step import seed_step, to_batches

Read = Callable[[int], Sequence[Samples]]
Beat = Callable[[str, int], object]
Gradients = Mapping[str, Tensor]
"""This rank's shares of gradients, by name of the parameter."""


class GradientComparison(NamedTuple):
    """The gradients of one comparison on this rank, computed with high-precision (`wide`) and with low-precision products (`narrow`)."""

    wide: Gradients
    narrow: Gradients
    lost: Mapping[str, Tensor]
    """Counts of numbers that low precision saturated or set to zero, by part of the model."""


class PartError(NamedTuple):
    """The errors of a part of the model, the same on all ranks."""

    error: float | None
    """The relative error of the part's gradient: infinite if only the low-precision gradient is not finite; None if the high-precision
    gradient is 0 or not finite."""
    narrow: bool
    """True if the part has low-precision products now."""
    saturated: float
    zeroed: float


class PrecisionWatch:
    """Measures, between steps, the rounding errors of low-precision products on one rank. Construction and every method are collective.

    A comparison computes the same microbatches twice, as few as the schedule allows: once with all products in high precision, and once as
    the next step will compute them. The relative error of a part's gradient is the norm of the difference, divided by the norm of the
    high-precision gradient.
    """

    def __init__(
        self, trainer: Trainer, read: Read, *, log: EventLog | None = None, beat: Beat = lambda phase, step: None
    ) -> None:
        """`read` returns this rank's microbatches of a step. `beat` sends a heartbeat with a phase and a step."""
        self.trainer, self.read, self.log, self.beat = trainer, read, log, beat
        self.executor = smallest(trainer)

    @classmethod
    def of(cls, trainer: Trainer, read: Read, **how: Any) -> "PrecisionWatch | None":
        """Return the watch of a run; None if the run requests none (`precision.watch_every`) or has no low-precision products. `how`:
        further arguments of the constructor."""
        spec = trainer.spec
        asked = spec.precision.watch_every > 0 and is_narrow(spec.train.precision)
        return cls(trainer, read, **how) if asked else None

    def due(self, step: int) -> bool:
        """True if gradients must be compared after `step` steps."""
        return step > 0 and step % self.trainer.spec.precision.watch_every == 0 and not self.trainer.wide

    def measure(self, step: int) -> None:
        """Compare gradients if a comparison is due after `step` steps, and switch the block with the largest error to high precision if
        `precision.auto` requires this. Call this when all steps are verified and the last gradients are dropped."""
        if not self.due(step):
            return
        self.beat("precision", step)
        found = self.compare(step)
        if found.raised:
            state, block = self.trainer.state, int(found.raised.removeprefix("blocks."))
            state.history = replace(state.history, raised=(*state.history.raised, (block, step)))
        if self.log is not None:
            self.log.write(found)

    def compare(self, step: int) -> PrecisionWatched:
        """Compare gradients after `step` steps; return the errors of all parts, and the block to switch to high precision."""
        began, limit = time.perf_counter(), self.trainer.spec.precision.auto
        found = self._found(self.gradients(step))
        errors = {part: one.error for part, one in found.items() if one.error is not None}
        raised = worst(errors, frozenset(part for part, one in found.items() if one.narrow), limit)
        return PrecisionWatched(
            step=step,
            errors={part: error if math.isfinite(error) else None for part, error in errors.items()},
            seconds=time.perf_counter() - began,
            limit=limit,
            raised=raised,
            saturated={part: one.saturated for part, one in found.items() if one.narrow},
            zeroed={part: one.zeroed for part, one in found.items() if one.narrow},
        )

    def gradients(self, step: int) -> GradientComparison:
        """Compute gradients with high-precision products, and with the products of the next step; return those of the weights that this
        rank counts in sums over ranks."""
        trainer, count = self.trainer, self.executor.program.microbatches
        if self.executor.hidden != trainer.executor.hidden:  # the run is in another phase
            self.executor.adopt(self.executor.program, trainer.executor.hidden)
        samples = self.read(step)
        valid = count_valid(samples, groups=trainer.groups)  # of the whole step, so that balance losses weigh as much as in it
        with uncounted(trainer), unobserved(trainer), losses() as lost:
            wide, narrow = (self._once(samples[:count], step, valid=valid, wide=wide) for wide in (True, False))
        return GradientComparison(wide, narrow, lost)

    def _once(self, samples: Sequence[Samples], step: int, *, valid: int, wide: bool) -> Gradients:
        trainer = self.trainer
        seed_step(trainer, step)
        self.executor.run(to_batches(trainer, samples, valid=valid, wide=wide))
        gradients.add_up(trainer.parameters, trainer.shared, trainer.groups)
        names = gradients.counted(trainer.parameters, trainer.shared, trainer.groups)
        found = {name: local(grad) for name in names if (grad := trainer.parameters[name].grad) is not None}
        trainer.state.drop_gradients()
        return found

    def _found(self, mine: GradientComparison) -> dict[str, PartError]:
        trainer, parts = self.trainer, self.trainer.model.part_names
        here = {recipe.part for recipe in trainer.narrow()} - trainer.raised
        table = torch.zeros(len(parts), 6, dtype=torch.float64, device=trainer.device)
        for row, part in zip(table, parts, strict=True):
            names = [name for name in mine.wide if part_of(name) == part]
            differences = (mine.narrow[name].float() - mine.wide[name].float() for name in names)
            row[0] = gradients.sum_of_squares(differences)
            row[1] = gradients.sum_of_squares(mine.wide[name] for name in names)
            row[2] = part in here
            row[3:] = mine.lost.get(part, 0)
        everyone = table.new_empty(trainer.groups.world.size(), *table.shape)
        dist.all_gather_into_tensor(everyone, table, group=trainer.groups.world)
        rows = everyone.sum(0).tolist()  # added in the order of ranks: the same bits on all of them
        return {part: _figures(*row) for part, row in zip(parts, rows, strict=True)}


def _figures(difference: float, wide: float, ranks: float, numbers: float, saturated: float, zeroed: float) -> PartError:
    error = None
    if math.isfinite(wide) and wide > 0:
        error = (difference / wide) ** 0.5 if math.isfinite(difference) else math.inf
    return PartError(error, ranks > 0, saturated / max(1.0, numbers), zeroed / max(1.0, numbers))


def worst(errors: Mapping[str, float], candidates: frozenset[str], limit: float) -> str:
    """Return the candidate with the largest error; of equal errors, the first candidate in the order of backward. Empty if no candidate's
    error is above `limit`, or if `limit` is 0."""
    above = [part for part in reversed([*errors]) if part in candidates and errors[part] > limit > 0]
    return max(above, key=lambda part: errors[part], default="")

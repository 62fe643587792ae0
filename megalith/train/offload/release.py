"""Updates inside the backward: each part is updated as soon as its gradients are reduced, while the backward of the part before it
computes. Then these gradients are freed, so that a step never holds all gradients.

The global norm, which decides whether gradients are clipped, is known only after the last backward. If all that an update changes is on
disk, an update can be undone, and most steps do not clip. So a first pass (forwards and backwards of the step) updates without clipping,
and writes the new state to the unused slots on disk. If the gradients must be clipped, the contents of these slots are discarded, and a
second pass computes the same gradients and updates with the clip factor, which is now known. The result is bitwise equal to that of an
update after the backward. While most steps clip, the first pass only measures the norm, so that no update is written in vain. If state is
in memory, an update cannot be undone, and each first pass only measures the norm.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from megalith.parallel import gradients
from megalith.parallel.clock import Clock
from megalith.parallel.data import Bucket, Weight, local
from megalith.parallel.gradients import Norms, SharedParameters
from megalith.parallel.tables import StreamedTable
from megalith.train.decide import EarlyUpdates
from megalith.train.offload.behind import Behind
from megalith.train.optimizers.rule import Optimizer, Part
from megalith.train.state import State


@dataclass(frozen=True)
class UpdateRequest:
    """A request for one pass over the step. `factor`: the factor for all gradients; None: only measure the gradients. `number`, `lr`: the
    number and the learning rate of the update."""

    factor: float | None
    number: int
    lr: float


class UnequalPassesError(RuntimeError):
    """The second pass over a step had NaN or Inf, unlike the first, which decided about the update."""

    def __init__(self, names: Sequence[str], *, step: int) -> None:
        """`names`: the parameters whose gradients were not finite in the second pass over step `step` + 1."""
        super().__init__(
            f"step {step + 1}: NaN or Inf in gradients of {', '.join(names)} in the second pass over the step, but not in the first: this "
            "rank's device may be faulty. Its weights have changed, so the run resumes from a copy or checkpoint"
        )


class Release:
    """Makes a rank's updates inside the backward. The update rules must be elementwise."""

    def __init__(
        self,
        weights: Mapping[str, Weight],
        stages: Iterable[Iterable[Bucket]],
        shared: SharedParameters,
        *,
        state: State,
        rule: Optimizer,
        parameters: Mapping[str, nn.Parameter],
        clock: Clock,
        tables: Mapping[str, StreamedTable],
        undone: bool,
    ) -> None:
        """`stages`: for each of this rank's stages, the buckets that it uses. `tables`: the tables that are updated tile by tile. `undone`:
        True if an update can be undone (`spec.treatment.can_undo_on_disk`)."""
        self.state, self.rule, self.parameters, self.clock = state, rule, parameters, clock
        used = Counter(bucket for buckets in stages for bucket in {*buckets})
        # a gradient to which other ranks or another stage of this rank add is complete only after the last backward
        apart = {*shared.partial, *shared.tied}
        apart |= {name for name, weight in weights.items() if any(weight in b.weights for b, times in used.items() if times > 1)}
        self._names = {weight: name for name, weight in weights.items() if name not in apart}
        self._late = [name for name in weights if name in apart]
        self._tables = {name: table for name, table in tables.items() if name not in apart}
        self._buckets = tuple(used)
        self.early = EarlyUpdates("plan.state.release", undone=undone)
        self.norms: dict[str, Norms] = {}
        """For each parameter, the norms of the last pass's gradient, before any clipping."""
        self.odd: dict[str, Tensor] = {}
        """For each parameter, the number of non-finite elements in the last pass's gradient."""
        self.marks: list[tuple[str, object, object]] = []
        """Start and end times of the last pass's updates."""
        self._behind = Behind(local(next(iter(parameters.values()))))
        self.asked: UpdateRequest | None = None
        """The request of the last pass; None if the pass was undone, or if its update was counted."""

    @contextmanager
    def during(self, asked: UpdateRequest, *, loss_scale: float) -> Iterator[None]:
        """Inside the `with` block, update each parameter when its gradient is reduced, and free the gradient. `loss_scale`: the factor by
        which gradients are divided."""
        self.norms, self.odd, self.marks = {}, {}, []

        def reduced(bucket: Bucket) -> None:
            names = [self._names[weight] for weight in bucket.weights if weight in self._names]
            self._take(names, asked, loss_scale)

        for bucket in self._buckets:
            bucket.done = reduced
        for name, table in self._tables.items():
            table.taken = partial(self._take_tile, name, asked, loss_scale)
        try:
            yield
        except BaseException:
            with suppress(Exception):  # the backward's own error is the cause
                self._behind.wait()
            raise
        finally:
            for bucket in self._buckets:
                bucket.done = None
            for table in self._tables.values():
                table.taken = None
        self._take(self._late, asked, 1.0)
        self.wait()
        self.asked = asked

    @torch.no_grad()
    def _take(self, names: Sequence[str], asked: UpdateRequest, loss_scale: float) -> None:
        """Measure gradients. Then start to update their parameters, once the update that runs has ended; the gradients are freed at the
        update's end. So a rank holds the gradients of two parts at most."""
        there = {name: grad for name in names if (grad := self.parameters[name].grad) is not None}
        if not there:
            return
        gradients.scale(there.values(), 1 / loss_scale)
        self.norms |= zip(there, gradients.norms_of(there.values()), strict=True)
        self.odd |= {name: gradients.odd_elements(grad) for name, grad in there.items()}
        self.wait()
        if asked.factor is None:
            self._free(there)
        else:
            self._start(partial(self._parts, [*there]), asked, asked.factor)

    @torch.no_grad()
    def _take_tile(self, name: str, asked: UpdateRequest, loss_scale: float, first: int, gradient: Tensor) -> None:
        """Do what `_take` does with one tile of a table; a rank holds the gradients of two tiles at most."""
        gradients.scale([gradient], 1 / loss_scale)
        before = self.norms.get(name)
        self.norms[name] = gradients.norms_of_piece(gradient, before)
        odd = gradients.odd_elements(gradient)
        self.odd[name] = odd if before is None else self.odd[name] + odd
        self.wait()
        if asked.factor is not None:
            self._start(lambda: [self.state.tile(name, first, gradient)], asked, asked.factor)

    def _parts(self, names: Sequence[str]) -> list[Part]:
        return [self.state.part(name) for name in names]

    def _start(self, parts: Callable[[], list[Part]], asked: UpdateRequest, factor: float) -> None:
        self._behind.start(partial(self._update, parts, asked, factor))

    def wait(self) -> None:
        """Wait until the update that runs has ended. Raises what it raised."""
        start = self.clock.mark()
        self._behind.wait()
        self.marks.append(("UPDATE_WAIT", start, self.clock.mark()))

    @torch.no_grad()
    def _update(self, parts_of: Callable[[], list[Part]], asked: UpdateRequest, factor: float) -> None:
        start = self.clock.mark()
        parts = parts_of()
        names = [part.name for part in parts]
        gradients.scale([part.gradient for part in parts], factor)
        self.rule.update(parts, number=asked.number, lr=asked.lr)
        del parts
        self._behind.synchronize()  # freed memory goes back to the stream that computes
        self._free(names)
        self.marks.append(("UPDATE", start, self.clock.mark()))

    def _free(self, names: Iterable[str]) -> None:
        for name in names:
            self.parameters[name].grad = None

    def not_finite(self) -> list[str]:
        """Return the parameters whose gradients had elements in the last pass that were not finite. In a dry run, numbers have no
        values."""
        return [] if self._behind.dry else [name for name, count in self.odd.items() if int(count)]

    def take_back(self) -> None:
        """Undo the last pass: discard its update, if the pass made one."""
        if self.asked is not None and self.asked.factor is not None:
            self.state.drop_update()
        self.asked, self.norms = None, {}

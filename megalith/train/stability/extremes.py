"""Measures extremes of a model's layers: the largest output of each part, and a bound of each attention layer's logits.

Extremes are measured once in several steps, on the first microbatch of each rank. One all-reduce combines the maxima. The bound of logits
is the largest query norm times the largest key norm times the softmax scale, so kernels need not return maxima. Some extremes are not
measured: the head's output, which is the loss; the logits of a user's own attention that does not use the core; the output of a block that
sends tokens to experts on other ranks, because no single module computes it; and all extremes of compiled blocks, because adding and
removing hooks would recompile them.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.models.core import CausalCore
from megalith.models.stage import Stage
from megalith.parallel.context import ContextCore
from megalith.parallel.groups import Groups
from megalith.spec.model import ModelSpec
from megalith.spec.treatment import attentions

KEPT = 8  # earlier measurements that a new one is compared with
JUDGED_FROM = 4  # earlier measurements without which nothing is compared
RISEN = 1.5  # factor above the largest of them from which a number has risen
LOGITS = "logits of "


class StepExtremes(NamedTuple):
    """The extremes of one step, equal on all ranks: the largest output of each part of the model, and each bound of logits, under the name
    `logits of LAYER`."""

    step: int
    largest: dict[str, float]


class FirstRise(NamedTuple):
    """The first extreme, in the model's order, that is far above its earlier values."""

    name: str
    step: int
    was: float
    now: float


class Extremes:
    """Measures the extremes of this rank's parts. All ranks call `begin`, `end` and `demand` together.

    Modules have hooks only in measured steps, so other steps have no overhead.
    """

    def __init__(
        self, model: ModelSpec, stages: Mapping[int, Stage], *, every: int, groups: Groups, device: torch.device, compiled: bool
    ) -> None:
        """`every`: the number of steps between regular measurements; 0: measure only after `demand`. `compiled`: blocks are compiled, so
        nothing is measured."""
        self.every, self._groups, self._compiled = every, groups, compiled
        self.measurements = deque[StepExtremes](maxlen=KEPT + 1)
        """Regular measurements, newest last."""
        self.last = StepExtremes(-1, {})
        """The newest measurement, either regular or after `demand`."""
        self._parts, self._layers = list(model.part_names), [name for name, _ in attentions(model)]
        self._stages, self._hooks = stages, list[Any]()
        self._looking, self._demanded = False, False
        self._device = device
        self._found = torch.empty(0)
        """The numbers of a measured step: the largest output of each part; then, for each attention layer, the largest query norm times the
        softmax scale, and the largest key norm."""
        self._seen = set[int]()

    def demand(self) -> None:
        """Measure the next step, in addition to the regular measurements."""
        self._demanded = True

    def begin(self, step: int) -> None:
        """Before the forwards of step `step`, add the hooks if this step must be measured."""
        self._unhook()
        # nothing but the step decides: ranks that joined later have no measurements, and take part in the same all-reduces
        regular = self.every > 0 and (step + 1) % self.every == 0
        self._looking = (regular or self._demanded) and not self._compiled
        if self._looking:
            self._found = torch.zeros(len(self._parts) + 2 * len(self._layers), device=self._device)
            self._seen.clear()
            self._hooks = list(self._hooked())

    def _hooked(self) -> Iterator[Any]:
        for stage in self._stages.values():
            for name, part in stage.parts():
                yield part.register_forward_hook(self._of_output(self._parts.index(name)))
            for name, module in stage.named_modules():
                core: Any = getattr(module, "core", None)  # a user's own attention may have none
                causal = core.causal if isinstance(core, ContextCore) else core
                if name in self._layers and isinstance(causal, CausalCore):
                    place = len(self._parts) + 2 * self._layers.index(name)
                    yield core.register_forward_pre_hook(self._of_scores(place, causal))

    def _of_output(self, place: int) -> Any:
        def look(module: nn.Module, given: Any, out: object) -> None:
            if isinstance(out, Tensor) and place not in self._seen:
                self._note(place, torch.linalg.vector_norm(out.detach(), torch.inf, dtype=torch.float32))

        return look

    def _of_scores(self, place: int, core: CausalCore) -> Any:
        def look(module: nn.Module, given: tuple[Any, ...]) -> None:
            if place not in self._seen:  # else it is a later microbatch, or a recomputation of this one
                q, k = (torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float32).amax() for x in given[:2])
                self._note(place, q * core.scale_of(given[0]))
                self._note(place + 1, k)

        return look

    def _note(self, place: int, largest: Tensor) -> None:
        self._seen.add(place)
        self._found[place] = torch.nan_to_num(largest, nan=torch.inf, posinf=torch.inf)  # NaN in a maximum of ranks gets lost

    def clear(self) -> None:
        """Discard the numbers of this step, because its forwards will run again."""
        if self._looking:
            self._found.zero_()
            self._seen.clear()

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    @torch.no_grad()
    def end(self, step: int) -> None:
        """If step `step` was measured, remove the hooks, and combine the numbers over all ranks."""
        looking, demanded = self._looking, self._demanded
        self._looking, self._demanded = False, False
        if not looking:
            return
        self._unhook()
        dist.all_reduce(self._found, op=dist.ReduceOp.MAX, group=self._groups.world)
        found, parts = self._found.tolist(), len(self._parts)
        self._found = torch.empty(0)
        outputs = {name: value for name, value in zip(self._parts, found, strict=False) if value}
        bounds = zip(self._layers, found[parts::2], found[parts + 1 :: 2], strict=True)
        self.last = StepExtremes(step, outputs | {LOGITS + name: q * k for name, q, k in bounds if q and k})
        if not demanded:
            self.forget(step)
            self.measurements.append(self.last)

    def forget(self, first: int) -> None:
        """Forget the regular measurements from step `first` on, because the run was rewound to this step."""
        self.measurements = deque((one for one in self.measurements if one.step < first), maxlen=self.measurements.maxlen)

    def risen(self, *, before: int | None = None) -> FirstRise | None:
        """Return the first extreme of the newest measurement that exceeds RISEN times its largest value in earlier regular measurements;
        None if there is none, or if there are too few measurements. `before`: instead of the newest measurement, use the last regular one
        before this step.
        """
        regular = [one for one in self.measurements if before is None or one.step < before]
        newest = self.last if before is None else regular[-1] if regular else None
        past = [look.largest for look in regular if newest and look.step < newest.step][-KEPT:]
        if newest is None or len(past) < JUDGED_FROM:
            return None
        for name in self._order():
            was = max((largest[name] for largest in past if name in largest), default=0.0)
            if was and name in newest.largest and not newest.largest[name] <= RISEN * was:
                return FirstRise(name, newest.step, was, newest.largest[name])
        return None

    def _order(self) -> Iterator[str]:
        """Yield the names of all extremes in the order in which damage spreads, so that the logits of a part's layers come before the
        part's output."""
        for part in self._parts:
            yield from (LOGITS + layer for layer in self._layers if layer.startswith(f"{part}."))
            yield part

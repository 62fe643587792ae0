"""Loading of a checkpoint whose moments have another number format than this run's: moments are read as saved, and then converted."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.load import LoadResult, State, Wanted, Warn, silent
from megalith.kernels.numbers import DTYPE
from megalith.parallel.data import local
from megalith.spec.run import RunSpec
from megalith.spec.state import Slot, lasting
from megalith.spec.treatment import treatments
from megalith.train.assemble import Trainer
from megalith.train.optimizers.small import keep, rows_of, wide
from megalith.train.state import like


def receive(trainer: Trainer, load: Callable[[Wanted], LoadResult | None], warn: Warn = silent) -> LoadResult | None:
    """Fill a trainer's state with `load`, and convert moments that were saved in another number format. `warn` is called with a description
    of the conversions."""
    received = _Received(trainer)
    loaded = load(received.wanted)
    if loaded is not None and received.scratch:
        received.convert(loaded.meta["position"].get("updates", loaded.step))
        warn(_converted(loaded, trainer))
    if loaded is not None and (text := _split(loaded, trainer)):
        warn(text)
    return loaded


class _Received:
    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.scratch: dict[tuple[Slot, Slot, str], Tensor] = {}
        """This rank's saved moments, by saved slot, this run's slot, and parameter."""

    def wanted(self, meta: Mapping[str, Any]) -> State:
        state, treated = self.trainer.state, self.trainer.rule.treated
        saved = RunSpec.model_validate(meta["spec"]).optimizer
        found, self.scratch = state.laid(), {}
        if saved.small == self.trainer.spec.optimizer.small:
            return found
        before = treatments(self.trainer.model, saved)
        for name, parameter in state.parameters.items():
            share = local(parameter)
            for was, now in zip(lasting(before[name].slots), lasting(treated[name].slots), strict=True):
                if was != now:
                    made = torch.zeros(was.shape_of(share.shape), dtype=DTYPE[was.number], device=share.device)
                    self.scratch[was, now, name] = made
                    found[f"{was.name}.{name}"] = like(was, made, parameter)
        return found

    @torch.no_grad()
    def convert(self, number: int) -> None:
        """Convert all received moments to this run's number format. `number`: the number of updates made, which seeds the rounding, so that
        the rounding is the same under every plan."""
        for (was, now, name), share in self.scratch.items():
            cut = self.trainer.rule.whole.cuts[name]
            kept = torch.zeros(now.shape_of(cut.sizes), dtype=DTYPE[now.number], device=share.device)
            if kept.numel():
                columns, rows = cut.sizes[-1], rows_of(cut, share.device)
                moment = wide(was, share.view(len(rows), -1), columns)
                keep(moment, kept.view(len(rows), -1), now, name=name, number=number, rows=rows, first=cut.offset[-1])
            self.trainer.state.put(now, name, kept)


def _split(loaded: LoadResult, trainer: Trainer) -> str:
    """Describe the change if this run stores master weights in another format than the checkpoint; else return an empty text."""
    was, now = RunSpec.model_validate(loaded.meta["spec"]).optimizer.master, trainer.spec.optimizer.master
    how = "the master weights are rounded to 24 bits" if now == "split8" else "the values of the master weights do not change"
    return "" if was == now else f"optimizer.master was {was} when step {loaded.step} was saved and is now {now}: {how}"


def _converted(loaded: LoadResult, trainer: Trainer) -> str:
    was, now = (RunSpec.model_validate(loaded.meta["spec"]).optimizer.small, trainer.spec.optimizer.small)
    how = "the moments are converted exactly" if now.number == "fp32" else "the moments are converted and rounded as in an update"
    return f"optimizer.moments was {was.number} when step {loaded.step} was saved and is now {now.number}: {how}"

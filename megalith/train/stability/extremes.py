"""The largest output of each part of the model, in a step that is computed to find the cause of a spike."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.train.assemble import Trainer


class PartExtremes:
    """Watches the outputs of this rank's parts, from now until `close`. A part that runs as several graphs, since tokens travel within it,
    and the head, whose output is the loss, are not seen."""

    def __init__(self, trainer: Trainer) -> None:
        self._world = trainer.groups.world
        self._largest: dict[str, Tensor] = {}
        parts = [(name, module) for stage in trainer.stages.values() for name, module in stage.parts()]
        self._hooks = [module.register_forward_hook(self._watch(name)) for name, module in parts]

    def _watch(self, name: str) -> Any:
        def look(module: Any, given: Any, out: object) -> None:
            if isinstance(out, Tensor):
                here = torch.linalg.vector_norm(out.detach().float(), torch.inf)
                self._largest[name] = torch.maximum(self._largest[name], here) if name in self._largest else here

        return look

    def close(self) -> dict[str, float]:
        """The largest magnitude of each part's output over all ranks and microbatches. All ranks call it together."""
        for hook in self._hooks:
            hook.remove()
        everyone: list[Any] = [None] * self._world.size()
        dist.all_gather_object(everyone, {name: float(largest) for name, largest in self._largest.items()}, group=self._world)
        found = dict[str, float]()
        for each in everyone:
            for name, largest in each.items():
                found[name] = largest if largest != largest else max(largest, found.get(name, 0.0))  # NaN is the largest
        return found

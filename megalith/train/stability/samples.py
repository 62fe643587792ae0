"""Measures the loss of each sample of a step on request: the head computes its loss again, separately for each row of a microbatch."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from megalith.kernels.cross_entropy import Loss
from megalith.models.batch import Batch
from megalith.models.head import Head
from megalith.train.assemble import Trainer


class SampleLosses:
    """Collects the losses of this rank's samples until `close`; a rank without the head collects none. If several ranks split a sequence,
    each collects the loss of its part."""

    def __init__(self, trainer: Trainer, *, count: int) -> None:
        """`count`: the number of this rank's samples in the step. After the losses of this many samples, further losses are ignored."""
        # later losses may be those of other ranks' samples, which verification computes before the losses are requested
        self._count = count
        self._losses: list[tuple[float, int]] = []
        self._calls = 0
        heads = [module for stage in trainer.stages.values() for module in stage.modules() if isinstance(module, Head)]
        self._every = (
            1 + len(heads[0].ahead) if heads else 1
        )  # after the loss of the next token, multi-token prediction computes its losses with the same output layer
        self._hooks = [head.output.loss.register_forward_hook(self._take, with_kwargs=True) for head in heads]
        self._busy = False

    @torch.no_grad()
    def _take(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], out: object) -> None:
        if len(self._losses) == self._count:
            return
        if self._busy or self._calls % self._every:
            self._calls += not self._busy
            return
        self._calls += 1
        self._busy = True
        x, weight, batch = given
        assert isinstance(batch, Batch) and batch.targets is not None
        for row in range(x.shape[0]):
            targets = batch.targets[row : row + 1]
            loss = module(x[row : row + 1], weight, replace(batch, targets=targets, loss_scale=1.0), **named)
            assert isinstance(loss, Loss) and isinstance(targets, Tensor)
            self._losses.append((float(loss.nll), int((targets >= 0).sum())))
        self._busy = False

    def close(self) -> list[tuple[float, int]]:
        """Stop collecting. Return, for each sample in the order of the microbatches, the summed loss of this rank's targets, and their
        number."""
        for hook in self._hooks:
            hook.remove()
        return self._losses

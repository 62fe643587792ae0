"""Adaptive clipping (AdaGC, Wang et al. 2025, arXiv:2502.11034, Algorithm 1): each parameter's gradient is limited to a multiple of its
usual norm. The usual norm is a moving average of clipped norms, so one extreme gradient hardly changes it. Norms are taken over whole
parameters, with all experts of a layer together, because the usual norm of a single expert that gets no tokens would go to 0 and stay
there.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.parallel import gradients
from megalith.parallel.data import local
from megalith.parallel.gradients import SharedParameters
from megalith.parallel.groups import Groups
from megalith.spec.run import OptimizerSpec

UNKNOWN = float("inf")
"""The usual norm of a parameter that has had no gradient yet."""


class AdaptiveClip:
    """Limits each parameter's gradient to a multiple of its usual norm. Every method is collective."""

    def __init__(
        self,
        spec: OptimizerSpec,
        usual: Tensor,
        names: Sequence[str],
        *,
        parameters: Mapping[str, nn.Parameter],
        shared: SharedParameters,
        groups: Groups,
    ) -> None:
        """`usual`: the usual gradient norm of each parameter of the model, fp32, in the order of `names`; this tensor is a part of the
        state, and `commit` changes it. `parameters`: this rank's parameters; `shared`: those of them that several ranks hold."""
        self.spec, self.usual, self.groups, self.parameters = spec, usual, groups, parameters
        self._place = {name: number for number, name in enumerate(names)}
        self._counted = gradients.counted(parameters, shared, groups)
        self._next = usual

    @torch.no_grad()
    def clip(self, *, number: int) -> None:
        """Multiply each gradient whose norm is above its limit by a factor below 1. `number`: the number of updates made so far. Before
        update `adaptive_clip_after`, no gradient is changed, and each parameter's smallest norm so far becomes its usual norm."""
        norms, usual = self._norms(), self.usual.double()
        factors = torch.ones_like(norms)
        if number < self.spec.adaptive_clip_after:
            after = torch.minimum(usual, norms)
        else:
            limits = self.spec.adaptive_clip * usual
            factors = torch.where(norms > limits, limits / norms, 1.0)
            decay = self.spec.adaptive_clip_decay
            after = torch.where(usual == UNKNOWN, norms, decay * usual + (1 - decay) * norms * factors)
            for name, parameter in self.parameters.items():
                if parameter.grad is not None:
                    local(parameter.grad).mul_(factors[self._place[name]].float())
        self._next = torch.where(norms > 0, after, usual).float()

    @torch.no_grad()
    def commit(self) -> None:
        """Store the new usual norms in the state, after the update with the clipped gradients was made."""
        self.usual.copy_(self._next)

    def _norms(self) -> Tensor:
        grads = {name: grad for name in self._counted if (grad := self.parameters[name].grad) is not None}
        squares = torch.zeros(len(self._place), dtype=torch.float64, device=self.usual.device)
        if grads:
            places = torch.tensor([self._place[name] for name in grads], device=squares.device)
            squares[places] = torch.stack([gradients.sum_of_squares([grad]) for grad in grads.values()]).to(squares.device)
        dist.all_reduce(squares, group=self.groups.world)
        return squares.sqrt()

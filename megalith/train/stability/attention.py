"""QK-clip (Kimi K2, arXiv:2507.20534, section 2.1): after an update, the weights of heads whose attention logits were too large are scaled.

Instead of a head's largest logit, an upper bound is used: the largest norm of a query, times the largest norm of a key, times the softmax
scale. The bound needs no seq x seq matrix, works with every attention kernel, and has the same value under every plan.
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalith.models.core import CausalCore
from megalith.models.stage import Stage
from megalith.parallel.context import ContextCore
from megalith.parallel.groups import Groups
from megalith.spec.model import ModelSpec
from megalith.spec.treatment import Heads, heads_of
from megalith.train.optimizers.global_tensors import Cut
from megalith.train.optimizers.rule import Part, opened


class HeadClip:
    """Measures the queries and keys of this rank's layers, and scales the weights that produce queries and keys. `clear`, `gather` and
    `apply` are collective."""

    def __init__(self, limit: float, model: ModelSpec, stages: Iterable[Stage], *, groups: Groups, device: torch.device) -> None:
        """`limit`: the largest allowed logit of a head."""
        self.limit, self.groups = limit, groups
        self.layers = heads_of(model)
        most = max((layer.queries for layer in self.layers), default=0)
        self._longest = torch.zeros(2, len(self.layers), most, device=device)
        """The largest query norm times the softmax scale, and the largest key norm, of each head: [2, layers, heads]."""
        self.factors = torch.ones(len(self.layers), most, device=device)
        """The factor by which `apply` changes each head's logits: [layers, heads]."""
        self._rows = {name: (number, layer) for number, layer in enumerate(self.layers) for name in layer.rows}
        numbers = {layer.name: number for number, layer in enumerate(self.layers)}
        for stage in stages:
            for name, module in stage.named_modules():
                if name in numbers:
                    self._watch(module, numbers[name])

    def _watch(self, attention: nn.Module, number: int) -> None:
        core, layer = attention.core, self.layers[number]
        causal = core.causal if isinstance(core, ContextCore) else core
        assert isinstance(core, nn.Module) and isinstance(causal, CausalCore)
        first = [self._first(heads) for heads in (layer.queries, layer.keys)]

        def look(_: nn.Module, given: tuple[Any, ...]) -> None:
            if torch.is_grad_enabled():  # else it is validation, or a pass that will be recomputed before its backward
                for which, factor in ((0, causal.scale_of(given[0])), (1, 1.0)):
                    self._see(self._longest[which, number], first[which], given[which], factor)  # pyright: ignore[reportAttributeAccessIssue]

        core.register_forward_pre_hook(look)

    @torch.compiler.disable  # it is not part of the model, since its changes would make a compiled block compile again
    def _see(self, longest: Tensor, first: int, x: Tensor, factor: float) -> None:
        found = torch.linalg.vector_norm(x.detach(), dim=-1, dtype=torch.float32).amax((0, 1)) * factor
        here = longest[first : first + len(found)]
        here.copy_(torch.maximum(here, found))

    def _first(self, heads: int) -> int:
        tensor = self.groups.tensor
        return tensor.rank() * heads // tensor.size()

    def clear(self) -> None:
        """Reset the maxima when a step begins or its results are dropped."""
        self._longest.zero_()

    @torch.no_grad()
    def gather(self) -> None:
        """Set `factors` from the maxima over all ranks since `clear`, with one all-reduce. A rank contributes zeros for heads that it does
        not have."""
        dist.all_reduce(self._longest, op=dist.ReduceOp.MAX, group=self.groups.world)
        bounds = torch.zeros_like(self.factors)
        for number, layer in enumerate(self.layers):
            queries, keys = self._longest[0, number, : layer.queries], self._longest[1, number, : layer.keys]
            bounds[number, : layer.queries] = queries * keys.repeat_interleave(layer.queries // layer.keys)
        self.factors = torch.where(bounds > self.limit, self.limit / bounds, 1.0)

    @property
    def acts(self) -> bool:
        """True if a head of the model must be scaled."""
        return bool((self.factors < 1).any())

    @torch.no_grad()
    def apply(self, parts: Iterable[Part], cuts: Mapping[str, Cut]) -> None:
        """Scale this rank's shares of the weights that make queries and keys."""
        mine = [part for part in parts if part.name in self._rows and part.weight.numel()]
        if not mine or not self.acts:
            return
        for part in opened(mine, weights_alone=True):
            number, layer = self._rows[part.name]
            cut = cuts[part.name]
            rows = self._of_rows(number, layer, part.name)[cut.offset[0] :][: cut.sizes[0]].to(part.weight.device)
            if part.weight.shape == cut.sizes:
                part.weight.mul_(rows.view(-1, *(1 for _ in cut.sizes[1:])))
            else:  # a flat piece of the share
                numbers = torch.arange(part.first, part.first + part.weight.numel(), device=rows.device)
                part.weight.view(-1).mul_(rows[numbers // prod(cut.sizes[1:])])

    def _of_rows(self, number: int, layer: Heads, name: str) -> Tensor:
        runs = layer.rows[name].runs
        powers = torch.tensor([power for rows, power in runs for _ in range(rows)], dtype=torch.float64)
        heads = self.factors[number, : layer.queries].double().cpu()
        return (heads[:, None] ** powers).flatten().float()

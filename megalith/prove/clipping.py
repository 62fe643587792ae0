"""Clipping on one process, as a reference for clipping under a plan. This implementation shares no code with the trainer's, and
clips whole tensors, one after another."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalith.models.block import Attention
from megalith.models.core import CausalCore
from megalith.models.latent import LatentAttention
from megalith.models.stage import Stage
from megalith.spec.model import ModelSpec
from megalith.spec.run import OptimizerSpec
from megalith.spec.sizes import tied_names


class Clipping:
    """Clips the gradients of a whole model, and the logits of its attention."""

    def __init__(self, spec: OptimizerSpec, model: ModelSpec, stage: Stage, parameters: Mapping[str, nn.Parameter]) -> None:
        """`parameters`: the updated parameters, by their names in the whole model."""
        self.spec, self.parameters = spec, parameters
        self._usual = dict[str, float]()
        self._longest = dict[str, list[Tensor]]()
        self._attentions = dict[str, Attention | LatentAttention]()
        assert not set(tied_names(model)) & {name for name in parameters if "attention" in name}
        for name, module in stage.named_modules():
            if isinstance(module, Attention | LatentAttention) and spec.qk_clip:
                self._attentions[name] = module
                module.core.register_forward_pre_hook(partial(self._see, name))

    def _see(self, name: str, core: nn.Module, given: tuple[Any, ...]) -> None:
        seen = [x.detach().float().square().sum(-1).flatten(0, 1).amax(0) for x in given[:2]]
        known = self._longest.setdefault(name, seen)
        self._longest[name] = [torch.maximum(one, other) for one, other in zip(seen, known, strict=True)]

    def clip(self, norm: float, *, number: int) -> None:
        """Clip the gradients before update `number`; `norm` is their global norm."""
        ratio, after = self.spec.adaptive_clip, self.spec.adaptive_clip_after
        if not ratio or number < after:
            limit = self.spec.clip or float("inf")
            nn.utils.clip_grads_with_norm_(self.parameters.values(), limit, torch.tensor(norm))
        for name, parameter in self.parameters.items() if ratio else ():
            assert parameter.grad is not None
            found, usual = float(parameter.grad.double().square().sum()) ** 0.5, self._usual.get(name)
            if usual is None or number < after:
                self._usual[name] = found if usual is None else min(usual, found)
            else:
                if found > ratio * usual:
                    parameter.grad *= ratio * usual / found
                decay = self.spec.adaptive_clip_decay
                self._usual[name] = decay * usual + (1 - decay) * min(found, ratio * usual)
            if not found:
                del self._usual[name]
                if usual is not None:
                    self._usual[name] = usual

    @torch.no_grad()
    def scale_heads(self) -> None:
        """Scale the weights of queries and keys of heads whose logits may have exceeded `qk_clip` since the last call."""
        for name, module in self._attentions.items():
            queries, keys = self._longest[name]
            group = len(queries) // len(keys)
            for head in range(len(queries)):
                assert isinstance(module.core, CausalCore)
                scale = module.core.scale or self._channels(module) ** -0.5
                bound = float((queries[head] * keys[head // group]).sqrt()) * scale
                if bound > self.spec.qk_clip:
                    self._scale(name, module, head, factor=self.spec.qk_clip / bound, alone=group == 1)
        self._longest.clear()

    def _channels(self, module: Attention | LatentAttention) -> int:
        return module.head_dim if isinstance(module, Attention) else module.spec.nope_dim + module.spec.rope_dim

    def _scale(self, name: str, module: Attention | LatentAttention, head: int, *, factor: float, alone: bool) -> None:
        if isinstance(module, Attention):
            size = module.head_dim
            here = slice(head * size, (head + 1) * size)
            for child, power in (("q", 0.5), ("k", 0.5)) if alone else (("q", 1.0),):
                for end in ("weight", "bias"):
                    if (parameter := self.parameters.get(f"{name}.{child}.{end}")) is not None:
                        parameter[here] *= factor**power
            return
        spec = module.spec
        queries = self.parameters[f"{name}.{'q' if spec.q_rank is None else 'q_up'}.weight"]
        both, size = queries.unflatten(0, (spec.heads, -1)), spec.nope_dim
        both[head, :size] *= factor**0.5
        both[head, size:] *= factor
        self.parameters[f"{name}.kv_up.weight"].unflatten(0, (spec.heads, -1))[head, :size] *= factor**0.5

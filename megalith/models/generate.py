"""Text generation, token by token, with a whole model on one device. Keys and values are cached if only attention mixes tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from megalith.kernels.attention import kernel_for
from megalith.models.batch import Batch
from megalith.models.block import Block
from megalith.models.core import CausalCore
from megalith.models.own import mixes_in_core
from megalith.models.stage import Stage


class CachedCore(nn.Module):
    """Runs `core` with a cache of the keys and values that later tokens can attend to. The first call reads the prompt; each later call
    reads one token."""

    def __init__(self, core: CausalCore) -> None:
        super().__init__()
        self.core = core
        self.kept: tuple[Tensor, Tensor] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        if self.kept is None:
            self.kept = k, v
            return self.core(q, k, v, batch)
        assert q.shape[1] == 1, q.shape
        window = self.core.window or 0  # [-0:] is everything
        keys, values = (torch.cat(both, dim=1)[:, -window:] for both in zip(self.kept, (k, v), strict=True))
        self.kept = keys, values
        q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
        kernel = kernel_for(q, values, self.core.softcap)
        return kernel.forward(q, keys, values, False, self.core.scale_of(q))[0].to(q.dtype).transpose(1, 2)


@torch.no_grad()
def generate(
    model: Stage,
    prompt: Sequence[int],
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop: int | None = None,
) -> Iterator[int]:
    """Yield up to `tokens` token ids that follow `prompt` (at least one id); end early after the token `stop`. Temperature 0 takes the most
    likely token each time (greedy). `top_k` and `top_p` (nucleus, Holtzman et al. 2020) limit the choice.

    A model with Mamba-2, or with a user's own attention that does not declare `core = True`, caches no keys and values: it reads all tokens
    again for each new one.

    Raises ValueError if the prompt is empty, or if the prompt and the new tokens exceed the model's context.
    """
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token (the end-of-text token begins a new document)")
    if len(prompt) + tokens > model.spec.context:
        raise ValueError(
            f"{len(prompt)} prompt tokens and {tokens} new tokens exceed the model's context of {model.spec.context} tokens; "
            f"ask for at most {model.spec.context - len(prompt)} new tokens, or shorten the prompt"
        )
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)
    blocks = [block for block in model.modules() if isinstance(block, Block)]
    keeps = all(block.mamba is None and (block.attention is None or mixes_in_core(block.attention)) for block in blocks)
    cores: list[tuple[Any, Any]] = [
        (block.attention, block.attention.core) for block in blocks if keeps and block.attention is not None
    ]
    for attention, core in cores:
        attention.core = CachedCore(core)
    try:
        ids, start = list(prompt), 0
        for _ in range(tokens):
            x = torch.tensor([ids[start:]], device=device)
            positions = torch.arange(start, len(ids), device=device)[None]
            logits = model(x, Batch(x, positions=positions))
            assert isinstance(logits, Tensor)
            start = len(ids) if keeps else 0
            ids.append(_choose(logits[0, -1].float(), temperature, top_k, top_p, generator))
            yield ids[-1]
            if ids[-1] == stop:
                return
    finally:
        for attention, core in cores:
            attention.core = core


def _choose(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    values, order = (logits / temperature).sort(descending=True)
    if top_k is not None:
        values, order = values[:top_k], order[:top_k]
    chances = values.softmax(-1)
    if top_p is not None:  # keep the fewest tokens that hold `top_p` of the probability, at least one
        kept = chances.cumsum(-1) - chances < top_p
        kept[0] = True
        chances = chances * kept
    return int(order[torch.multinomial(chances, 1, generator=generator)])

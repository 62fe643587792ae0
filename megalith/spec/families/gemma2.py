"""The Gemma 2 family as a user writes it (`[model] family = "gemma2"`)."""

from math import sqrt
from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt

from megalith.spec.families.common import attention_of, few_heads, model_of, multiple, shrunk
from megalith.spec.families.own import OwnPartsSpec
from megalith.spec.model import BlockSpec, MlpSpec, ModelSpec, NormSpec


class Gemma2(OwnPartsSpec):
    """Sizes of a Gemma 2 (Gemma Team 2024, arXiv:2408.00118, section 2). The first layer and every second layer after it attend
    only to a window of tokens. Attention scores and logits are capped. Attention and the GeGLU MLP have a norm before and a norm
    after them; a norm's stored weight is the weight minus one."""

    family: Literal["gemma2"] = "gemma2"
    name: str = "gemma2"
    layers: PositiveInt
    dim: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt = 256
    query_scalar: PositiveInt | None = None
    ffn: PositiveInt
    vocab: PositiveInt
    context: PositiveInt = 8192
    window: PositiveInt = 4096
    attention_softcap: PositiveFloat | None = 50.0
    logit_softcap: PositiveFloat | None = 30.0
    rope_theta: PositiveFloat = 10_000.0
    norm_eps: PositiveFloat = 1e-6
    tied: bool = True
    init_std: PositiveFloat = 0.02

    def build(self) -> ModelSpec:
        """The model as a tuple of parts. Attention scores are scaled by 1 / sqrt(query_scalar); query_scalar is head_dim unless
        given."""
        norm = NormSpec(eps=self.norm_eps, offset=True)

        def block(window: int | None) -> BlockSpec:
            return BlockSpec(
                attention=attention_of(
                    self, window=window, softcap=self.attention_softcap, scale=1 / sqrt(self.query_scalar or self.head_dim)
                ),
                mlp=MlpSpec(hidden=self.ffn, activation="gelu_tanh"),
                norm=norm,
                post_norms=True,
            )

        alternating = (block(self.window), block(None))
        blocks = (alternating[layer % 2] for layer in range(self.layers))
        return model_of(self, blocks, norm, embedding_scale=sqrt(self.dim), softcap=self.logit_softcap)

    def small(self, layers: int, unit: int, heads_unit: int) -> Self:
        """Return a small model of this family (`common.shrunk`), with a multiple of `heads_unit` heads. The attention window is
        shorter than the shortest sequence, so that it has an effect."""
        own = {"query_scalar": 12, "window": 9, "ffn": multiple(48, unit)}
        return shrunk(self, layers=layers, unit=unit, **own, **few_heads(self.heads, self.kv_heads, unit=heads_unit))

"""The PaLM family as a user writes it (`[model] family = "palm"`)."""

from math import sqrt
from typing import Literal, Self

from pydantic import PositiveFloat, PositiveInt

from megalith.spec.families.common import attention_of, few_heads, model_of, multiple, shrunk
from megalith.spec.families.own import OwnPartsSpec
from megalith.spec.model import BlockSpec, MlpSpec, ModelSpec, NormSpec


class Palm(OwnPartsSpec):
    """Sizes of a PaLM: attention and MLP side by side on one LayerNorm, multi-query attention with rotary positions, SwiGLU, no biases,
    one matrix for input and output (Chowdhery et al. 2022, arXiv:2204.02311, section 2)."""

    family: Literal["palm"] = "palm"
    name: str = "palm"
    layers: PositiveInt
    dim: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt = 1
    head_dim: PositiveInt = 256
    ffn: PositiveInt | None = None
    vocab: PositiveInt
    context: PositiveInt = 2048
    rope_theta: PositiveFloat = 10_000.0
    norm_eps: PositiveFloat = 1e-6
    tied: bool = True
    init_std: PositiveFloat = 0.02

    def build(self) -> ModelSpec:
        """The model as a tuple of parts; `ffn` is 4 * `dim` unless given. Embeddings start with unit variance, because nothing
        normalises them; the logits are therefore scaled by 1 / sqrt(dim) (section 5)."""
        norm = NormSpec(kind="layer", eps=self.norm_eps)
        block = BlockSpec(
            attention=attention_of(self),
            mlp=MlpSpec(hidden=self.ffn or 4 * self.dim),
            norm=norm,
            parallel=True,
        )
        return model_of(self, (block,) * self.layers, norm, embedding_std=1.0, output_scale=1 / sqrt(self.dim))

    def small(self, layers: int, unit: int, heads_unit: int) -> Self:
        """Return a small model of this family (`common.shrunk`), with a multiple of `heads_unit` heads."""
        return shrunk(
            self, layers=layers, unit=unit, ffn=multiple(48, unit), **few_heads(self.heads, self.kv_heads, unit=heads_unit)
        )

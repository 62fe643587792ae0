"""What a model is: an embedding, a tuple of blocks, a head. Each part says all its sizes, so a pipeline stage is a slice."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from megalith.spec.base import Spec


class RopeScaling(Spec):
    """Llama 3.1's stretch of the rotary frequencies for contexts longer than the one first trained on."""

    kind: Literal["llama3"] = "llama3"
    factor: PositiveFloat = 8.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_context: PositiveInt = 8192


class RopeSpec(Spec):
    """Rotary position embedding (Su et al. 2021): rotation of channel pairs by position * theta^(-2i/head_dim)."""

    theta: PositiveFloat = 10_000.0
    scaling: RopeScaling | None = None


class AttentionSpec(Spec):
    """Grouped-query causal attention; `kv_heads == heads` is multi-head, `kv_heads == 1` is multi-query."""

    kind: Literal["attention"] = "attention"
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    rope: RopeSpec = RopeSpec()


class MlpSpec(Spec):
    """SwiGLU: down(silu(gate(x)) * up(x)), `hidden` wide."""

    kind: Literal["swiglu"] = "swiglu"
    hidden: PositiveInt


class BlockSpec(Spec):
    """One pre-norm transformer block."""

    attention: AttentionSpec
    mlp: MlpSpec
    norm_eps: PositiveFloat = 1e-5


class EmbeddingSpec(Spec):
    """Token embedding."""

    vocab: PositiveInt


class HeadSpec(Spec):
    """Final norm and the projection onto the vocabulary; `tied` shares the embedding's weight."""

    vocab: PositiveInt
    tied: bool = False
    norm_eps: PositiveFloat = 1e-5


class ModelSpec(Spec):
    """The whole model as a run of parts: part 0 is the embedding, parts 1..n the blocks, the last part the head."""

    name: str
    dim: PositiveInt
    context: PositiveInt = Field(description="longest sequence the positions are meant for")
    embedding: EmbeddingSpec
    blocks: tuple[BlockSpec, ...]
    head: HeadSpec
    init_std: PositiveFloat = 0.02

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts in order; also the prefixes of their parameters."""
        return ("embedding", *(f"blocks.{i}" for i in range(len(self.blocks))), "head")

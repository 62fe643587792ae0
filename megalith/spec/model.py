"""Model: an embedding, a tuple of blocks, a head. Each part states all its sizes, so a pipeline stage is a slice."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Tag, model_validator

from megalith.spec.base import Spec


class RopeScaling(Spec):
    """Llama 3.1's scaling of rotary frequencies for contexts longer than that of pretraining."""

    kind: Literal["llama3"] = "llama3"
    factor: PositiveFloat = 8.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_context: PositiveInt = 8192


class YarnScaling(Spec):
    """YaRN (Peng et al. 2023, arXiv:2309.00071): high frequencies are kept, low ones interpolated, and attention scores
    multiplied by a factor."""

    kind: Literal["yarn"] = "yarn"
    factor: PositiveFloat
    original_context: PositiveInt
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    mscale: NonNegativeFloat = 1.0
    mscale_all_dim: NonNegativeFloat = 0.0


class LinearScaling(Spec):
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595): every position is divided by `factor`."""

    kind: Literal["linear"] = "linear"
    factor: PositiveFloat


def _kind_of_scaling(value: Any) -> str:
    """Return the kind of a rotary scaling; Llama 3.1's if a table names none."""
    kind = value.get("kind", "llama3") if isinstance(value, Mapping) else getattr(value, "kind", "llama3")
    return str(kind)


Scaling = Annotated[
    Annotated[RopeScaling, Tag("llama3")] | Annotated[YarnScaling, Tag("yarn")] | Annotated[LinearScaling, Tag("linear")],
    Discriminator(_kind_of_scaling),
]
"""A scaling of rotary frequencies for contexts longer than that of pretraining."""


class RopeSpec(Spec):
    """Rotary position embedding (Su et al. 2021): rotation of channel pairs by position * theta^(-2i/head_dim)."""

    theta: PositiveFloat = 10_000.0
    scaling: Scaling | None = None


class AttentionSpec(Spec):
    """Grouped-query causal attention; `kv_heads == heads` is multi-head, `kv_heads == 1` is multi-query."""

    kind: Literal["attention"] = "attention"
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    rope: RopeSpec | None = Field(default=RopeSpec(), description="rotary positions; None: no rotation (learned positions)")
    rope_dim: PositiveInt | None = Field(
        default=None, description="number of a head's last channels that are rotated; None: all (Nemotron-4: half)"
    )
    bias: bool | Literal["qkv"] = Field(
        default=False, description="biases on the four projections (GPT-3), or on queries, keys and values only (Qwen2)"
    )
    qk_norm: PositiveFloat | None = Field(
        default=None, description="eps of an RMS norm over each head of q and k (Qwen3); None: no norm"
    )
    window: PositiveInt | None = Field(default=None, description="a token sees itself and the window - 1 before it (Gemma 2)")
    softcap: PositiveFloat | None = Field(default=None, description="scores become cap * tanh(scores / cap) (Gemma 2, Grok-1)")
    scale: PositiveFloat | None = Field(default=None, description="factor of the scores; None: 1 / sqrt(head_dim)")
    alibi: bool = Field(
        default=False, description="scores fall with the distance of two tokens, at a rate that differs between heads (BLOOM)"
    )
    own: str | None = Field(default=None, description="own module in place of this part, `module:object` (`spec.parts`)")


class LatentAttentionSpec(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values from a small latent vector."""

    kind: Literal["latent"] = "latent"
    heads: PositiveInt
    q_rank: PositiveInt | None = Field(description="width of the queries' latent; None: queries straight from x")
    kv_rank: PositiveInt
    nope_dim: PositiveInt = Field(description="channels of a head's queries and keys that are not rotated")
    rope_dim: PositiveInt = Field(
        description="channels of a head's queries and keys that are rotated; all heads share these channels of the keys"
    )
    v_dim: PositiveInt = Field(description="channels of a head's values")
    norm_eps: PositiveFloat = 1e-6
    rope: RopeSpec = RopeSpec()


class MambaSpec(Spec):
    """Mamba-2 (Dao & Gu 2024, arXiv:2405.21060): each head has a state of `head_dim` x `state` numbers, which decays, and to
    which each token adds. Heads of a group share the vectors that write to the state and read from it (B and C).
    """

    heads: PositiveInt
    head_dim: PositiveInt
    state: PositiveInt = Field(default=128, description="size of the state of each channel of a head")
    groups: PositiveInt = Field(default=1, description="groups of heads")
    conv: PositiveInt = Field(default=4, description="tokens that the convolution before the state sees")
    chunk: PositiveInt = Field(default=128, description="tokens computed at once; the result is the same for any number")
    norm_eps: PositiveFloat = 1e-5

    @model_validator(mode="after")
    def _groups_are_even(self) -> Self:
        if self.heads % self.groups:
            raise ValueError(f"groups = {self.groups} does not divide heads = {self.heads}: use a divisor")
        return self


Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


class MlpSpec(Spec):
    """MLP of width `hidden`: down(activation(gate(x)) * up(x)) if `gated` (Shazeer 2020), else down(activation(up(x)))."""

    kind: Literal["mlp"] = "mlp"
    hidden: PositiveInt
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    own: str | None = Field(default=None, description="own module in place of this part, `module:object` (`spec.parts`)")


class RouterSpec(Spec):
    """Router: it chooses the experts of a token and their weights, and balances the load.

    `balance_set` is the set of tokens over which load is measured: "sequence", "batch" (microbatch i of all data ranks) or
    "global" (the whole global batch of the step before). The run fixes it: for "batch", the first plan decides the number of
    sequences, and no later plan may change it.
    """

    active: PositiveInt = Field(description="experts a token goes to")
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = Field(default=False, description="the chosen experts' weights sum to 1")
    scale: PositiveFloat = Field(default=1.0, description="factor of the weights (DeepSeek's routed scaling)")
    groups: PositiveInt = Field(default=1, description="number of groups of experts; a token may go to a few of the groups")
    active_groups: PositiveInt = Field(default=1, description="groups whose experts a token may go to")
    group_score: Literal["max", "top2"] = Field(
        default="max", description="score of a group: that of its best expert (DeepSeek-V2), or the sum of its best two (V3)"
    )
    bias_rate: NonNegativeFloat = Field(default=0.0, description="step of the auxiliary-loss-free bias (DeepSeek-V3); 0: no bias")
    balance_weight: NonNegativeFloat = Field(default=0.0, description="weight of the load-balancing loss")
    balance_set: Literal["sequence", "batch", "global"] = "sequence"
    z_weight: NonNegativeFloat = Field(default=0.0, description="weight of the router z-loss (ST-MoE)")
    capacity: PositiveFloat | None = Field(
        default=None,
        description="an expert takes the first capacity * seq_len * active / experts of a sequence's tokens that chose it; None: all",
    )
    balanced: bool = Field(
        default=False, description="ignore the scores and distribute tokens evenly, for benchmarks and dry runs"
    )


class MoeSpec(Spec):
    """Mixture of experts: each token goes through `router.active` of `experts` small MLPs, and through a shared one if
    `shared` > 0."""

    kind: Literal["moe"] = "moe"
    experts: PositiveInt
    hidden: PositiveInt = Field(description="width of one expert")
    shared: NonNegativeInt = Field(default=0, description="width of the expert every token goes through; 0: none")
    shared_gate: bool = Field(default=False, description="the shared expert's output is weighted by sigmoid(w x) (Qwen2-MoE)")
    activation: Activation = "silu"
    gated: bool = True
    router: RouterSpec


class NormSpec(Spec):
    """Normalisation over channels."""

    kind: Literal["rms", "layer"] = "rms"
    eps: PositiveFloat = 1e-5
    offset: bool = Field(default=False, description="the weight is 1 + the stored number (Gemma, Nemotron-4)")
    bias: bool = Field(default=False, description='only for "layer": add a bias')
    own: str | None = Field(default=None, description="own module in place of this part, `module:object` (`spec.parts`)")


class BlockSpec(Spec):
    """One block: x + mixer(norm(x)), then x + mlp(norm(x)). With `parallel`, both read the same norm (PaLM).

    The mixer is attention or Mamba-2. A block may also have a mixer or an MLP alone, like the layers of hybrids (Nemotron-H,
    arXiv:2504.03624).
    """

    attention: AttentionSpec | LatentAttentionSpec | None = Field(default=None, discriminator="kind")
    mamba: MambaSpec | None = None
    mlp: MlpSpec | MoeSpec | None = Field(default=None, discriminator="kind")
    norm: NormSpec = NormSpec()
    parallel: bool = Field(default=False, description="x + attention(norm(x)) + mlp(norm(x)), one norm for both (PaLM)")
    post_norms: bool = Field(default=False, description="outputs of attention and MLP are normalised too (Gemma 2, Grok-1)")
    residual: PositiveFloat = Field(
        default=1.0, description="factor of the outputs of mixer and MLP (`spec.families.parametrization`)"
    )

    @model_validator(mode="after")
    def _halves_make_a_block(self) -> Self:
        if self.attention and self.mamba:
            raise ValueError("attention and mamba are both given, but a block has one mixer: use two blocks")
        if not (self.attention or self.mamba or self.mlp):
            raise ValueError("the block is empty: give attention, mamba or mlp")
        if (self.parallel or self.post_norms) and not (self.attention and self.mlp):
            raise ValueError("parallel and post_norms need a block with attention and mlp: leave them out of other blocks")
        return self


class EmbeddingSpec(Spec):
    """Token embedding."""

    vocab: PositiveInt
    positions: PositiveInt | None = Field(
        default=None, description="length of the table of learned positions (GPT-3); none: no table"
    )
    scale: PositiveFloat = Field(default=1.0, description="factor of the embeddings (Gemma: sqrt(dim))")
    norm: NormSpec | None = Field(default=None, description="norm after the embedding (BLOOM); None: no norm")
    init_std: PositiveFloat | None = Field(
        default=None, description="standard deviation of the initial embeddings (PaLM: 1); None: the model's init_std"
    )


class MtpSpec(Spec):
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): `depth` tokens after the next one, each predicted
    by a block of its own."""

    depth: PositiveInt = 1
    block: BlockSpec
    weight: PositiveFloat = Field(default=0.1, description="weight of the mean of the losses of multi-token prediction")


class HeadSpec(Spec):
    """Final norm and the projection onto the vocabulary; `tied` shares the embedding's weight."""

    vocab: PositiveInt
    tied: bool = False
    norm: NormSpec = NormSpec()
    scale: PositiveFloat = Field(default=1.0, description="factor of the logits (PaLM: 1 / sqrt(dim); Grok-1)")
    softcap: PositiveFloat | None = Field(default=None, description="logits become cap * tanh(logits / cap) (Gemma 2)")
    ahead: MtpSpec | None = None


class Growth(Spec):
    """A model's sizes, divided by those at which its learning rates were tuned (`spec.families.parametrization`)."""

    width: PositiveFloat = 1.0
    depth: PositiveFloat = 1.0
    base_layers: PositiveInt | None = Field(
        default=None, description="number of blocks at the base sizes; None: depth scales nothing"
    )


class ModelSpec(Spec):
    """The whole model as a sequence of parts: part 0 is the embedding, parts 1..n are the blocks, and the last part is the
    head."""

    name: str
    dim: PositiveInt
    context: PositiveInt = Field(description="longest sequence that the positions are made for, in tokens")
    embedding: EmbeddingSpec
    blocks: tuple[BlockSpec, ...]
    head: HeadSpec
    init_std: PositiveFloat = 0.02
    scaling: Growth = Growth()

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts in order; also the prefixes of their parameters."""
        return ("embedding", *(f"blocks.{i}" for i in range(len(self.blocks))), "head")

    @property
    def balances_microbatches(self) -> bool:
        """True if a balance loss measures loads over microbatch i of all data ranks. The result then depends on the sequences
        per microbatch."""
        blocks = [*self.blocks, *([self.head.ahead.block] if self.head.ahead else [])]
        routers = [block.mlp.router for block in blocks if isinstance(block.mlp, MoeSpec) and not block.mlp.router.balanced]
        return any(router.balance_set == "batch" and router.balance_weight > 0 for router in routers)

"""Model: an embedding, a tuple of blocks, a head. Each part states all its sizes, so any slice of the parts can be a pipeline
stage."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Tag, model_validator

from megalith.spec.base import Spec


class RopeScaling(Spec):
    """Scaling of rotary frequencies for contexts longer than in pretraining, as in Llama 3.1."""

    kind: Literal["llama3"] = "llama3"
    factor: PositiveFloat = 8.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_context: PositiveInt = 8192


class YarnScaling(Spec):
    """YaRN (Peng et al. 2023, arXiv:2309.00071): high rotary frequencies are kept, low frequencies are interpolated, and
    attention scores are multiplied by a factor."""

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
    kind = value.get("kind", "llama3") if isinstance(value, Mapping) else getattr(value, "kind", "llama3")
    return str(kind)


Scaling = Annotated[
    Annotated[RopeScaling, Tag("llama3")] | Annotated[YarnScaling, Tag("yarn")] | Annotated[LinearScaling, Tag("linear")],
    Discriminator(_kind_of_scaling),
]
"""Any scaling of rotary frequencies for contexts longer than in pretraining."""


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
    rope: RopeSpec | None = Field(
        default=RopeSpec(),
        description="rotary position embedding; None: queries and keys are not rotated, as with learned positions",
    )
    rope_dim: PositiveInt | None = Field(
        default=None,
        description="number of channels, the last ones of a head, that are rotated; None: all of them (Nemotron-4 rotates half)",
    )
    bias: bool | Literal["qkv"] = Field(
        default=False, description="biases on the four projections (GPT-3), or on queries, keys and values only (Qwen2)"
    )
    qk_norm: PositiveFloat | None = Field(
        default=None, description="eps of an RMS norm over each head of q and k (Qwen3); None: no norm"
    )
    window: PositiveInt | None = Field(
        default=None, description="number of tokens that a token attends to: itself and the window - 1 tokens before it (Gemma 2)"
    )
    softcap: PositiveFloat | None = Field(
        default=None, description="cap of the attention scores, which become cap * tanh(scores / cap) (Gemma 2, Grok-1)"
    )
    scale: PositiveFloat | None = Field(default=None, description="factor of the attention scores; None: 1 / sqrt(head_dim)")
    alibi: bool = Field(
        default=False,
        description="reduce attention scores in proportion to the distance of two tokens, with a slope for each head (BLOOM)",
    )
    own: str | None = Field(default=None, description="own module in place of this part, `module:object` (`spec.parts`)")


class LatentAttentionSpec(Spec):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values from a small latent vector."""

    kind: Literal["latent"] = "latent"
    heads: PositiveInt
    q_rank: PositiveInt | None = Field(
        description="width of the latent vector from which queries are computed; None: queries are computed from x directly"
    )
    kv_rank: PositiveInt
    nope_dim: PositiveInt = Field(description="channels of a head's queries and keys that are not rotated")
    rope_dim: PositiveInt = Field(
        description="channels of a head's queries and keys that are rotated; all heads share these channels of the keys"
    )
    v_dim: PositiveInt = Field(description="channels of a head's values")
    norm_eps: PositiveFloat = 1e-6
    rope: RopeSpec = RopeSpec()


class MambaSpec(Spec):
    """Mamba-2 (Dao & Gu 2024, arXiv:2405.21060): each head has a state of `head_dim` x `state` numbers; at each token the state
    decays, and the token's contribution is added. The heads of a group share the vectors B, which writes to the state, and C,
    which reads from it.
    """

    heads: PositiveInt
    head_dim: PositiveInt
    state: PositiveInt = Field(default=128, description="size of the state of each channel of a head")
    groups: PositiveInt = Field(default=1, description="groups of heads")
    conv: PositiveInt = Field(default=4, description="number of tokens in the window of the convolution before the state")
    chunk: PositiveInt = Field(default=128, description="number of tokens computed at once; it does not change the result")
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
    "global" (the whole global batch of the step before). The set is fixed for a run: with "batch", the first plan decides the
    number of sequences in it, and no later plan may change that number.
    """

    active: PositiveInt = Field(description="number of experts that each token goes to")
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = Field(default=False, description="divide the weights of a token's experts by their sum")
    scale: PositiveFloat = Field(
        default=1.0, description="factor by which the weights of a token's experts are multiplied (DeepSeek's routed scaling)"
    )
    groups: PositiveInt = Field(default=1, description="number of groups into which experts are divided")
    active_groups: PositiveInt = Field(default=1, description="number of groups whose experts a token may go to")
    group_score: Literal["max", "top2"] = Field(
        default="max",
        description="score of a group: the score of its best expert (DeepSeek-V2), or the sum of its two best experts' scores (V3)",
    )
    bias_rate: NonNegativeFloat = Field(
        default=0.0, description="change of the auxiliary-loss-free bias in each step (DeepSeek-V3); 0: no bias"
    )
    balance_weight: NonNegativeFloat = Field(default=0.0, description="weight of the load-balancing loss")
    balance_set: Literal["sequence", "batch", "global"] = "sequence"
    z_weight: NonNegativeFloat = Field(default=0.0, description="weight of the router z-loss (ST-MoE)")
    capacity: PositiveFloat | None = Field(
        default=None,
        description="an expert accepts the first capacity * seq_len * active / experts tokens of a sequence that chose it; "
        "None: it accepts all",
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
    shared: NonNegativeInt = Field(
        default=0, description="width of the shared expert, which every token goes through; 0: no shared expert"
    )
    shared_gate: bool = Field(default=False, description="the shared expert's output is weighted by sigmoid(w x) (Qwen2-MoE)")
    activation: Activation = "silu"
    gated: bool = True
    router: RouterSpec


class NormSpec(Spec):
    """Normalisation over channels."""

    kind: Literal["rms", "layer"] = "rms"
    eps: PositiveFloat = 1e-5
    offset: bool = Field(default=False, description="the stored number is the norm's weight minus 1 (Gemma, Nemotron-4)")
    bias: bool = Field(default=False, description='add a bias; only for a norm of kind "layer"')
    own: str | None = Field(default=None, description="own module in place of this part, `module:object` (`spec.parts`)")


class BlockSpec(Spec):
    """One block: x + mixer(norm(x)), then x + mlp(norm(x)). With `parallel`, mixer and MLP read the output of one norm (PaLM).

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
        default=1.0, description="factor by which the outputs of mixer and MLP are multiplied (`spec.families.parametrization`)"
    )

    @model_validator(mode="after")
    def _halves_make_a_block(self) -> Self:
        if self.attention and self.mamba:
            raise ValueError("attention and mamba are both given, but a block has one mixer: use two blocks")
        if not (self.attention or self.mamba or self.mlp):
            raise ValueError("the block is empty: give attention, mamba or mlp")
        if (self.parallel or self.post_norms) and not (self.attention and self.mlp):
            raise ValueError("parallel and post_norms need a block with both attention and mlp: leave them out of this block")
        return self


class EmbeddingSpec(Spec):
    """Token embedding."""

    vocab: PositiveInt
    positions: PositiveInt | None = Field(
        default=None, description="length of the table of learned positions (GPT-3); none: no table"
    )
    scale: PositiveFloat = Field(default=1.0, description="factor by which embeddings are multiplied (Gemma: sqrt(dim))")
    norm: NormSpec | None = Field(default=None, description="norm after the embedding (BLOOM); None: no norm")
    init_std: PositiveFloat | None = Field(
        default=None, description="standard deviation of the initial embeddings (PaLM: 1); None: the model's init_std"
    )


class MtpSpec(Spec):
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): it predicts `depth` tokens after the next one, each
    with a separate block."""

    depth: PositiveInt = 1
    block: BlockSpec
    weight: PositiveFloat = Field(default=0.1, description="weight of the mean of the losses of multi-token prediction")


class HeadSpec(Spec):
    """Final norm and the projection onto the vocabulary; `tied` shares the embedding's weight."""

    vocab: PositiveInt
    tied: bool = False
    norm: NormSpec = NormSpec()
    scale: PositiveFloat = Field(default=1.0, description="factor by which logits are multiplied (PaLM: 1 / sqrt(dim); Grok-1)")
    softcap: PositiveFloat | None = Field(
        default=None, description="cap of the logits, which become cap * tanh(logits / cap) (Gemma 2)"
    )
    ahead: MtpSpec | None = None


class Growth(Spec):
    """A model's sizes, divided by those at which its learning rates were tuned (`spec.families.parametrization`)."""

    width: PositiveFloat = 1.0
    depth: PositiveFloat = 1.0
    base_layers: PositiveInt | None = Field(
        default=None, description="number of blocks at the base sizes; None: no multiplier depends on the depth"
    )


class ModelSpec(Spec):
    """The whole model as a sequence of parts: part 0 is the embedding, parts 1..n are the blocks, and the last part is the
    head."""

    name: str
    dim: PositiveInt
    context: PositiveInt = Field(description="longest sequence, in tokens, for which the model has positions")
    embedding: EmbeddingSpec
    blocks: tuple[BlockSpec, ...]
    head: HeadSpec
    init_std: PositiveFloat = 0.02
    scaling: Growth = Growth()

    @property
    def part_names(self) -> tuple[str, ...]:
        """Names of the parts in order; the names of a part's parameters begin with its name."""
        return ("embedding", *(f"blocks.{i}" for i in range(len(self.blocks))), "head")

    @property
    def balances_microbatches(self) -> bool:
        """True if a balance loss measures loads over microbatch i of all data ranks. If it is True, the result of training
        depends on the number of sequences in a microbatch."""
        blocks = [*self.blocks, *([self.head.ahead.block] if self.head.ahead else [])]
        routers = [block.mlp.router for block in blocks if isinstance(block.mlp, MoeSpec) and not block.mlp.router.balanced]
        return any(router.balance_set == "batch" and router.balance_weight > 0 for router in routers)

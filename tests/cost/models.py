"""Small models and workloads for the tests of costs."""

from megalith.cost.workload import SoftwareProfile, Workload
from megalith.spec import cluster as clusters
from megalith.spec.model import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RopeSpec,
    RouterSpec,
)
from megalith.spec.plan import Plan

DIM, HEADS, HEAD_DIM, HIDDEN, VOCAB = 256, 4, 64, 512, 1024


def dense(blocks: int = 4, *, gated: bool = True) -> ModelSpec:
    """A small Llama, or a small GPT with LayerNorm, GELU and learned positions."""
    norm = NormSpec() if gated else NormSpec(kind="layer", bias=True)
    attention = AttentionSpec(heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM, rope=RopeSpec() if gated else None, bias=not gated)
    mlp = MlpSpec(hidden=HIDDEN if gated else 4 * DIM, gated=gated, activation="silu" if gated else "gelu", bias=not gated)
    return ModelSpec(
        name="small", dim=DIM, context=2048, embedding=EmbeddingSpec(vocab=VOCAB, positions=None if gated else 2048),
        blocks=(BlockSpec(attention=attention, mlp=mlp, norm=norm),) * blocks, head=HeadSpec(vocab=VOCAB, norm=norm),
    )  # fmt: skip


def mixture(blocks: int = 2, experts: int = 8, *, hidden: int = 128) -> ModelSpec:
    """A small mixture of experts."""
    model = dense(blocks)
    mlp = MoeSpec(experts=experts, hidden=hidden, router=RouterSpec(active=2))
    block = model.blocks[0].model_copy(update={"mlp": mlp})
    return model.model_copy(update={"blocks": (block,) * blocks})


def workload(model: ModelSpec, plan: Plan, *, seq_len: int = 256, global_batch: int = 16, **values) -> Workload:
    """Return a step of `model` on as many H100 as `plan` has ranks."""
    cluster = clusters.load(f"h100:{plan.ranks}")
    return Workload(
        model, plan, cluster, seq_len, global_batch, software_profile=values.pop("software_profile", SoftwareProfile()), **values
    )

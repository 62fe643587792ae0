"""Conversion of a published row to workloads: its model, plan and cluster in Megalith's types.

If a source does not state recomputation, the microbatch, or the chunks of an interleaved schedule, each usual choice is a workload of its
own, and the prediction is that of the fastest workload that fits. A row that cannot be converted has the reason instead of workloads.
"""

import re
from dataclasses import dataclass
from itertools import product
from typing import Any

from megalith.cost.profile import DENSE_MLP
from megalith.cost.software import FUSED_2024
from megalith.cost.workload import Workload
from megalith.planner.published.flops import step_flops
from megalith.planner.published.rows import CannotSayError, Row
from megalith.planner.published.software import SOFTWARE, cluster_of, format_of, software_profile_of
from megalith.spec.model import (
    AttentionSpec,
    BlockSpec,
    EmbeddingSpec,
    HeadSpec,
    LatentAttentionSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    MtpSpec,
    NormSpec,
    RopeSpec,
    RouterSpec,
)
from megalith.spec.plan import EXPERTS_ACTIVATION, UP_PROJECTION, Plan
from megalith.spec.presets import presets

GROUPS = {"deepseek-v3": {"groups": 8, "active_groups": 4}}
"""Groups of experts, of which a token uses a few (arXiv:2412.19437, section 2.1.2). The file of measurements does not state groups of
experts."""

HYBRIDS = {"mamba2+moe+attn pattern MEMEM*EMEMEM*...": "nemotron3-nano-30b-a3b"}
"""Abbreviated layers of a hybrid in the file of measurements -> the preset with these layers."""

PARTS = {  # a recomputed part, as Megatron-Core names it -> the modules of a block here
    "core_attn": ("attention.core",),
    "mlp": (DENSE_MLP,),
    "moe": ("mlp",),
    "moe_act": (EXPERTS_ACTIVATION,),
    "layernorm": ("attention_norm", "mlp_norm"),
    "mla_up_proj": (UP_PROJECTION,),
    "shared_experts": ("mlp.shared",),
}


@dataclass(frozen=True)
class ExpressedRow:
    """A row in Megalith's types: `choices` has one workload, or several if the source leaves settings open. A row with a
    `reason` has no workload."""

    row: Row
    choices: tuple[Workload, ...] = ()
    reason: str = ""
    transformer: bool = True
    """True for a transformer, dense or with experts; False for hybrids, which are predicted but not used in fits."""

    @property
    def expert(self) -> bool:
        """True for a mixture of experts."""
        return any(isinstance(block.mlp, MoeSpec) for choice in self.choices[:1] for block in choice.model.blocks)


def express(row: Row) -> ExpressedRow:
    """Convert a row to workloads; the result has the reason if this is not possible."""
    try:
        transformer = "hybrid" not in row.model
    except ValueError as error:  # of another file: sizes that are no JSON
        return ExpressedRow(row, reason=f"model_spec cannot be read: {error}")
    try:
        return ExpressedRow(row, _choices(row), transformer=transformer)
    except CannotSayError as reason:
        return ExpressedRow(row, reason=str(reason), transformer=transformer)
    except (KeyError, TypeError, ValueError, AttributeError, AssertionError) as error:  # of another file: sizes we never saw
        return ExpressedRow(row, reason=f"cannot be read ({type(error).__name__}: {_brief(error)})", transformer=transformer)


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def measured_seconds(row: Row, workload: Workload) -> float | None:
    """Return the measured seconds of a step: as stated, from tokens/s, or from TFLOP/s or MFU by the source's convention; None if the row
    has none of these."""
    if (seconds := row.number("step_time_s")) is not None:
        return seconds
    tokens, devices = workload.tokens, workload.cluster.count
    if (rate := row.number("tokens_per_s_per_gpu")) is not None:
        return tokens / (rate * devices)
    flops = row.number("tflops_per_gpu")
    hardware = row.text("tflops_kind") == "hardware"
    if flops is None and (share := row.number("mfu")) is not None:
        flops = share * workload.cluster.accelerator.wide / 1e12
    if flops is None:
        return None
    half = "halved" in row.text("flops_convention") or row.group in ("mbridge", "mbridge-cards", "mbridge-skills", "dsv3-gb200")
    counted = step_flops(
        workload.model, tokens=tokens, seq_len=workload.seq_len, causal="half" if half else "full",
        recomputed=hardware and row.text("recompute").startswith("full"),
    )  # fmt: skip
    return counted / (flops * 1e12 * devices)


def _choices(row: Row) -> tuple[Workload, ...]:
    model, seq_len = _model(row), row.whole("seq_len") or row.model.get("seq_len") or 0
    if not seq_len or (row.whole("seq_len") is None and (row.whole("global_batch") is None or row.whole("micro_batch") is None)):
        raise CannotSayError("sequence length and batch are not stated")
    cluster, software_profile = cluster_of(row), software_profile_of(row)
    sizes = _sizes(row)
    data = row.whole("dp") or cluster.count // (sizes["tensor"] * sizes["pipeline"] * sizes["context"])
    global_batch = row.whole("global_batch")
    if global_batch is None:
        count = row.options.get("micro_num") or row.options.get("grad_accum")
        if count is None or row.whole("micro_batch") is None:
            raise CannotSayError("the global batch is not stated")
        global_batch = count * row.whole("micro_batch") * data
    if global_batch % data:
        raise CannotSayError(f"global batch {global_batch} is not a multiple of the {data} data ranks")
    if data * sizes["tensor"] * sizes["pipeline"] * sizes["context"] != cluster.count:
        raise CannotSayError(f"the layout's number of ranks differs from the {cluster.count} devices")
    found = []
    for micro, chunks, (policy, parts) in product(_micro(row, global_batch // data), _chunks(row, model), _recompute(row)):
        values = {**sizes, **_sharding(row, data * sizes["context"])}
        plan = Plan.model_validate(
            values | {
                "data": data, "chunks": chunks, "microbatch": micro, "schedule": "interleaved" if chunks > 1 else "1f1b",
                "sequence": _sequence(row, sizes["tensor"]), "recompute": policy, "recompute_parts": parts,
                "layers": _layers(row, model, sizes["pipeline"] * chunks),
            }
        )  # fmt: skip
        found.append(
            Workload(model, plan, cluster, int(seq_len), global_batch, format_of(row), software_profile, frozen=_frozen(row))
        )
    return tuple(found)


# --- the model


def _model(row: Row) -> ModelSpec:
    sizes: dict[str, Any] = row.model
    if not sizes:
        raise CannotSayError(f"the source gives no sizes of {row.text('model')}")
    if "hybrid" in sizes:
        return _hybrid(row, sizes)
    vocab = sizes.get("vocab")
    if isinstance(vocab, str) and (padding := re.search(r"divisible-by (\d+)", vocab)):
        vocab = -(-50257 // int(padding[1])) * int(padding[1])  # Megatron's GPT-2 tokenizer, padded
    if not isinstance(vocab, int):
        raise CannotSayError("the vocabulary's size is not stated")
    gated, moe = sizes["gated_mlp"], sizes.get("moe")
    norm = NormSpec() if gated else NormSpec(kind="layer", bias=True)
    attention = _attention(sizes, gated)
    dense = BlockSpec(
        attention=attention, norm=norm,
        mlp=MlpSpec(hidden=sizes["ffn"], gated=gated, activation="silu" if gated else "gelu", bias=not gated),
    )  # fmt: skip
    blocks = (dense,) * sizes["layers"]
    if moe:
        first = moe.get("first_dense", 0)
        block = dense.model_copy(update={"mlp": _experts(moe, gated, GROUPS.get(row.text("model"), {}))})
        blocks = (dense,) * first + (block,) * (sizes["layers"] - first)
    ahead = MtpSpec(depth=depth, block=blocks[-1]) if (depth := _ahead(row, sizes)) else None
    return ModelSpec(
        name=row.text("model"),
        dim=sizes["hidden"],
        context=max(row.whole("seq_len") or 0, sizes.get("seq_len") or 2048),
        embedding=EmbeddingSpec(vocab=vocab, positions=None if gated else (row.whole("seq_len") or sizes["seq_len"])),
        blocks=blocks,
        head=HeadSpec(vocab=vocab, tied=bool(sizes.get("tied_emb")), norm=norm, ahead=ahead),
    )


def _hybrid(row: Row, sizes: dict[str, Any]) -> ModelSpec:
    if not isinstance(sizes["hybrid"], str):
        raise CannotSayError(
            f"the source states the layers of {row.text('model')} as a JSON object, for which Megalith has no preset"
        )
    if sizes["hybrid"] not in HYBRIDS:
        raise CannotSayError(f"{row.text('model')} has experts on a latent, which Megalith does not support")
    if "mtp" in sizes:
        raise CannotSayError(
            f"{row.text('model')} has multi-token prediction with blocks of two layers, which Megalith does not support"
        )
    model = presets()[HYBRIDS[sizes["hybrid"]]].build()
    return model.model_copy(update={"balanced": True}).build()


def _attention(sizes: dict[str, Any], gated: bool) -> AttentionSpec | LatentAttentionSpec:
    if latent := sizes.get("mla"):
        return LatentAttentionSpec(
            heads=sizes["heads"], q_rank=latent["q_lora"], kv_rank=latent["kv_lora"], nope_dim=latent["nope"],
            rope_dim=latent["rope"], v_dim=latent["v"],
        )  # fmt: skip
    rope = RopeSpec() if gated else None
    return AttentionSpec(heads=sizes["heads"], kv_heads=sizes["kv_heads"], head_dim=sizes["head_dim"], rope=rope, bias=not gated)


def _experts(moe: dict[str, Any], gated: bool, groups: dict[str, int]) -> MoeSpec:
    return MoeSpec(
        experts=moe["experts"], hidden=moe["moe_ffn"], gated=gated, shared=moe.get("shared_ffn") or 0,
        router=RouterSpec.model_validate({"active": moe["topk"], "balanced": True} | groups),
    )  # fmt: skip


def _ahead(row: Row, sizes: dict[str, Any]) -> int:
    """Return the depth of multi-token prediction: as the row states, else as the sizes of its model state, else 1 for DeepSeek-V3 in rows
    of Megatron-Bridge, and 0 in other rows."""
    if "mtp" in row.options:
        return int(row.options["mtp"])
    if "variant" in row.options:
        return 1 if row.options["variant"] == "w/ MTP" else 0
    if "mtp" in sizes:
        return int(sizes["mtp"])
    return 1 if row.text("model") == "deepseek-v3" and row.group in ("mbridge", "mbridge-cards") else 0


def _frozen(row: Row) -> bool:
    return row.options.get("task") == "LoRA"


# --- the plan


def _sizes(row: Row) -> dict[str, int]:
    given = {axis: row.whole(column) for axis, column in (("tensor", "tp"), ("pipeline", "pp"))}
    if missing := [axis for axis, size in given.items() if size is None]:
        raise CannotSayError(f"the layout is not stated ({', '.join(missing)})")
    found = {axis: size for axis, size in given.items() if size is not None}
    found |= {"context": row.whole("cp") or 1, "expert": row.whole("ep") or 1, "expert_tensor": row.whole("etp") or 1}
    return found


def _sharding(row: Row, holders: int) -> dict[str, int]:
    """Return `zero` and `replicate` from the source's name for its sharding."""
    text = row.text("shard")
    names = (("zero2", 2), ("zero3", 3), ("fsdp", 3), ("zero1", 1))
    zero = next((stage for name, stage in names if name in text), 0)
    group = re.fullmatch(r"zero1\((\d+)\)", text)
    replicate = max(1, holders // int(group[1])) if group else 1
    return {"zero": zero, "replicate": replicate}


def _sequence(row: Row, tensor: int) -> bool:
    if tensor == 1:
        return True
    if "sequence_parallel" in row.options:
        return bool(row.options["sequence_parallel"])
    if row.group == "korthikanti22":
        return "seq-parallel" in row.text("recompute")
    return SOFTWARE.get(row.group, FUSED_2024).overheads != "plain"


def _micro(row: Row, per_rank: int) -> list[int]:
    if (size := row.whole("micro_batch")) is not None:
        if per_rank % size:
            raise CannotSayError(f"{per_rank} sequences a data rank are not a multiple of the microbatch of {size}")
        return [size]
    return [size for size in (1, 2, 4, 8) if per_rank % size == 0]


def _chunks(row: Row, model: ModelSpec) -> list[int]:
    pipeline = row.whole("pp") or 1
    if pipeline == 1:
        return [1]
    if (chunks := row.whole("vpp")) is not None:
        return [chunks]
    if "interleaved" in str(row.options.get("schedule", "")) or row.group == "mcore-h100":
        each = len(model.blocks) // pipeline
        return [chunks for chunks in (1, 2, 3, 4, 6) if each % chunks == 0]
    return [1]


def _recompute(row: Row) -> list[tuple[str, tuple[str, ...]]]:
    """Return (policy, parts) of recomputation as the source states it; otherwise every usual choice."""
    text = row.text("recompute")
    core = ("attention.core",)
    if text.startswith("full"):
        return [("full", core)]
    if text.startswith("none"):
        return [("none", core)]
    if text.startswith("selective by"):  # torchtitan's: some operations, or every second layer; what is nearest
        return [("selective", ("mlp",))]
    if selected := re.match(r"selective\(([^)]*)\)", text):
        names = [name.strip() for name in selected[1].split(",")]
        parts = tuple(module for name in names for module in PARTS.get(name, ()))
        return [("selective", tuple(part for part in parts if part.rpartition(".")[0] not in parts))]
    lighter = [("selective", PARTS["mla_up_proj"])] if "mla" in row.model else []
    if "moe" in row.model:
        lighter += [("selective", (*parts, EXPERTS_ACTIVATION)) for _, parts in (*lighter, ("", ()))]
    return [("none", core), *lighter, ("selective", ("mlp",)), ("full", core)]


def _layers(row: Row, model: ModelSpec, stages: int) -> tuple[int, ...] | None:
    """Return the blocks of uneven stages: divided by cost, or with embedding and head counted as blocks if this gives equal
    stages (Llama 3); None for an even division."""
    blocks = len(model.blocks)
    if stages == 1:
        return None
    if blocks < stages:
        raise CannotSayError(f"{blocks} blocks do not fill {stages} stages")
    if row.options.get("method") == "redis":
        return _by_cost(model, stages)
    each, left = divmod(blocks + 2, stages)
    if blocks % stages and left == 0 and each > 1:
        return (each - 1, *(each,) * (stages - 2), each - 1)
    return None


def _by_cost(model: ModelSpec, stages: int) -> tuple[int, ...]:
    """Divide the blocks as evenly as possible; the head counts as the number of blocks with the same cost."""
    one = model.model_copy(update={"blocks": model.blocks[:1]})
    block = step_flops(one, tokens=1, seq_len=model.context, causal="full", recomputed=False, head=False)
    head = 6 * model.dim * model.head.vocab / block
    counts = [len(model.blocks) // stages] * stages
    counts[0] += len(model.blocks) - sum(counts)
    while counts[-1] > 1 and counts[-1] + head > max(counts[:-1]) + 1:
        counts[-1] -= 1
        counts[_last(counts[:-1], min(counts[:-1]))] += 1  # late stages keep the fewest microbatches in flight
    return tuple(counts)


def _last(counts: list[int], value: int) -> int:
    return len(counts) - 1 - counts[::-1].index(value)

"""Cluster, software profile and number format of a published row."""

import re
from dataclasses import replace
from typing import Any, Literal

from megalith.cost.software import COMPILED_2024, EAGER_2023, FUSED_2024, PLAIN_2021, TRAINER
from megalith.cost.workload import SoftwareProfile
from megalith.planner.published.rows import CannotSayError, Row
from megalith.spec import cluster as clusters
from megalith.spec.cluster import ClusterSpec

HARDWARE = {
    "A100-40GB-SXM": "a100-40gb",
    "A100-80GB-SXM": "a100-80gb",
    "A100-SXM (memory size not stated)": "a100-80gb",
    "A100 (README says 40GB)": "a100-80gb",  # Selene, where this model was trained, has 80 GB a GPU
    "A800-80GB-SXM": "a800-80gb",
    "H100-80GB-SXM": "h100",
    "H100-96GB-SXM (500 W)": "h100-96gb",
    "H200-141GB-SXM": "h200",
    "H800-80GB-SXM": "h800",
    "GB200": "gb200-nvl72",
    "GB300": "gb300-nvl72",
    "B200": "b200",
    "B300": "b300",
    "TPU-v6e": "tpu-v6e",
    "TPU-v5p": "tpu-v5p",
    "TPU-v4": "tpu-v4",
}

NETWORK = (  # (what the column says, bytes/s out of a device)
    ("1600 Gb/s RoCE per node", 25e9),
    ("4x100Gb RoCE per node", 6.25e9),
    ("800Gb/s IB per node", 12.5e9),
    ("8x200", 25e9),
    ("8x400Gb", 50e9),
)

FLAT_ADAMW = 4 + 2 * 4
"""Temporary bytes for each parameter while InternEvo updates all parameters as one flat tensor in fp32
(solver/optimizer/hybrid_zero_optim.py and fsdp_optimizer.py): the gradient in fp32, and two temporary tensors of torch's AdamW
(`_single_tensor_adamw`: the root of the second moment, and this root divided by its correction)."""

SOFTWARE = {  # source group -> the software its runs used
    "sc21": PLAIN_2021,
    "korthikanti22": PLAIN_2021,
    "mt-nlg": PLAIN_2021,
    "vtrain-single": PLAIN_2021,
    "vtrain-multi": PLAIN_2021,
    "ds-azure": replace(PLAIN_2021, overlap_data=True, gradient_bytes=2, gathers="module"),
    "internevo": replace(EAGER_2023, gradient_bytes=2, update_bytes=FLAT_ADAMW, flash=1, gathers="rank"),
    "mosaic": replace(EAGER_2023, loss="fused", flash=1),  # llm-foundry of 2023: flash-attn 1, its cross-entropy
    "nanotron": replace(EAGER_2023, loss="copied"),
    "vocab-pp": EAGER_2023,
    "nemo2407": replace(FUSED_2024, gradient_bytes=2, master_bytes=2),  # bf16 gradients, Apex's distributed Adam
    "mlm-llama": replace(FUSED_2024, gradient_bytes=2, master_bytes=2),
    "mbridge": replace(FUSED_2024, gradient_bytes=2),  # its recipes reduce in bf16
    "mbridge-cards": replace(FUSED_2024, gradient_bytes=2),
    "mbridge-skills": replace(FUSED_2024, gradient_bytes=2),
    "dsv3-gb200": replace(FUSED_2024, gradient_bytes=2),
    "torchtitan": replace(COMPILED_2024, gradient_bytes=4),
    "torchtitan-a100": replace(EAGER_2023, gradient_bytes=4, loss="copied"),
    "torchtitan-h200": replace(COMPILED_2024, gradient_bytes=4),
    "megalith": replace(TRAINER, overheads="compiled"),
}

_BY_SENDER = {"deduplicated": False, "router": "plain"}
"""Megatron-Core's defaults: NCCL's all-to-all, and a router made of torch operations."""

_AHEAD = {"overlap_expert": True, "moment_bytes": 4}

EXPERTS: dict[tuple[str, str, str], dict[str, Any]] = {  # missing in rows of experts, and taken from their sources' programs
    # Megatron-Bridge src/megatron/bridge/recipes/moonlight/h100/moonlight_16b.py, for 8 GPUs and for 16
    ("mbridge-skills", "moonlight-16b-a3b", "H100-80GB-SXM"): _BY_SENDER | {"moment_bytes": 4},
    ("mbridge-cards", "moonlight-16b-a3b", "H100-80GB-SXM"): _AHEAD,
    # recipes/qwen/gb200/qwen3_moe.py: NVTE_CUTEDSL_FUSED_GROUPED_MLP
    ("mbridge-cards", "qwen3-30b-a3b", "GB200"): {"overlap_expert": True, "grouped": True},
    # Megatron-LM tests/functional_tests/test_cases/moe/gpt3_mcore_te_tp2_pp2_ep4_etp1_memory_speed/model_config.yaml
    ("mlm-golden", "mlm-moe-mla-small", "H100-80GB-SXM"): _BY_SENDER | {"rotary": False},
}

GRAPHED = 26.04
"""Release of the NeMo container from which Megatron-Bridge's MXFP8 recipes record whole steps in CUDA graphs
(scripts/performance/configs)."""

PARTLY = 25.11
"""Release from which Megatron-Bridge's MXFP8 recipes record attention and router, except on H100."""

RECORDED = ("GB200", "GB300", "B300")
"""Hardware for which Megatron-Bridge's MXFP8 recipes record attention."""

FORMATS: dict[str, str] = {
    "bf16": "bf16", "bf16-amp": "bf16", "fp16": "fp16", "fp16/bf16 (not stated)": "bf16", "fp8": "fp8", "fp8-cs": "fp8",
    "fp8-amp": "fp8", "mxfp8": "mxfp8", "nvfp4": "nvfp4", "fp32": "fp32",
}  # fmt: skip


def cluster_of(row: Row) -> ClusterSpec:
    """Return the cluster of a row. Raises CannotSayError for hardware outside the catalogue, or an unstated number of devices."""
    if row.text("hardware") not in HARDWARE:
        raise CannotSayError(f"the catalogue has no {row.text('hardware')}")
    accelerator = clusters.catalogue()[HARDWARE[row.text("hardware")]]
    network = next((rate for text, rate in NETWORK if text in row.text("interconnect")), accelerator.scale_out)
    count = row.whole("n_gpus")
    if count is None:
        raise CannotSayError("the number of devices is not stated")
    per_node = row.whole("gpus_per_node") or accelerator.per_node
    return ClusterSpec(accelerator=accelerator, count=count, per_node=per_node, scale_out=network)


def software_profile_of(row: Row) -> SoftwareProfile:
    """Return the software profile of a row."""
    software_profile = SOFTWARE.get(row.group, FUSED_2024)
    options = row.options
    if options.get("compile") is False and software_profile.overheads == "compiled":  # torch's own loss, which copies its logits
        software_profile = replace(software_profile, overheads="eager", loss="copied")
    if options.get("async_tp"):
        software_profile = replace(software_profile, overlap_tensor=True)
    if software_profile.overheads == "plain" and row.text("precision") == "fp16":
        software_profile = replace(
            software_profile, gradient_bytes=2
        )  # Megatron sums gradients in fp32 for bf16 alone, unless told to
    if software_profile.overheads == "fused" and _untuned(row):
        software_profile = replace(software_profile, overheads="packaged", overlap_tensor=False)
        if row.group == "mlm-golden":  # Megatron-Bridge's recipes have Transformer Engine's fused cross-entropy
            software_profile = replace(software_profile, loss="whole")
    elif software_profile.overheads == "fused" and "moe" in row.model:
        software_profile = _tuned_experts(row, software_profile)
    if scopes := _graphed(options):
        software_profile = replace(software_profile, graphs="parts" if "attn" in scopes else "router")
    if options.get("attention") == "unfused":
        software_profile = replace(software_profile, attention="plain", causal_half=False)
    if software_profile.overheads == "packaged":
        software_profile = replace(software_profile, **EXPERTS.get((row.group, row.text("model"), row.text("hardware")), {}))
    if options.get("step") == "baseline":  # sections 2.1.2 to 2.1.4 of its document: two kernels zero scales, two order them
        software_profile = replace(software_profile, router="plain", quantise_kernels=4)
    if options.get("dispatcher") == "alltoall":
        software_profile = replace(software_profile, deduplicated=False)
    if options.get("router") == "token-drop":  # each expert takes a fixed number, with torch's own all-to-all
        software_profile = replace(software_profile, waits=False, deduplicated=False)
    if options.get("moe_permute_fusion") is False:
        software_profile = replace(software_profile, permute=False)
    if options.get("ep_overlap"):
        software_profile = replace(software_profile, overlap_expert=True)
    if options.get("adam_moments") == "bf16":
        software_profile = replace(software_profile, moment_bytes=4)
    if options.get("deterministic"):
        software_profile = replace(software_profile, overlap_data=False, overlap_tensor=False)
    return software_profile


def _tuned_experts(row: Row, software_profile: SoftwareProfile) -> SoftwareProfile:
    """Apply the CUDA graphs of Megatron-Bridge's tuned recipes for experts, and their overlap: only the recipes that train DeepSeek in
    MXFP8 overlap the all-to-all."""
    release = re.match(r"(\d+\.\d+)", str(row.options.get("release", "")))
    early = row.group == "dsv3-gb200" or bool(_graphed(row.options)) or (release is not None and float(release[1]) < GRAPHED)
    blocks = row.text("precision") == "mxfp8" and not early
    if row.text("hardware") in RECORDED and blocks:
        return replace(software_profile, graphs="whole", overlap_expert="mla" in row.model)
    eager = row.text("hardware").startswith("H100") or (release is not None and float(release[1]) < PARTLY)
    if row.options.get("router") == "token-drop" and "mla" not in row.model and row.text("hardware") in (*RECORDED, "B200"):
        return replace(software_profile, graphs="whole")  # qwen3_30b_a3b_llm_pretrain.py: fixed numbers of tokens, full_iteration
    small = row.text("hardware") in RECORDED and "mla" not in row.model  # qwen3_workload_base_configs.py: attention is left out
    across = (row.whole("ep") or 1) > (row.whole("gpus_per_node") or 8)
    graphs: Literal["none", "router", "parts"] = "none" if eager else "router" if small else "parts"
    return replace(software_profile, graphs=graphs, overlap_expert=blocks and across and "mla" in row.model)


def _graphed(options: dict[str, Any]) -> str:
    """The names that the row gives to the parts of a block that CUDA graphs launch; "" if the row names no part."""
    feature = options.get("feat") or {}
    graph = feature.get("cuda_graph") if isinstance(feature, dict) else None
    return ",".join(graph.get("scopes", ())) if graph else options.get("cuda_graphs", "")


def _untuned(row: Row) -> bool:
    """True for untuned runs of Megatron-Core, such as functional tests."""
    notes = row.text("notes")
    return (
        row.options.get("tuned") is False
        or row.options.get("step") == "baseline"
        or "not tuned" in notes
        or "launch bound" in notes
    )


def format_of(row: Row) -> str:
    """Return the number format of a row's products. Raises CannotSayError for an unknown format."""
    if row.text("precision") not in FORMATS:
        raise CannotSayError(f"no such precision: {row.text('precision')!r}")
    return FORMATS[row.text("precision")]

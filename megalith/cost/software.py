"""Software whose steps can be predicted, by name: Megalith's trainer, and the programs behind published figures. No
torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megalith.cost.workload import SoftwareProfile
from megalith.schedule.table import kind
from megalith.spec.plan import Plan

PLAIN_2021 = SoftwareProfile(
    overheads="plain",
    attention="plain",
    overlap_data=False,
    overlap_tensor=False,
    deduplicated=False,
    causal_half=False,
    loss="whole",
    adds_gradients=True,
)
"""Megatron-LM adds a microbatch's gradients in a hook of each weight (its megatron/model/distributed.py of 2022, `_make_param_hook`); with
fp16 no product adds them (arguments.py, `gradient_accumulation_fusion`)."""
EAGER_2023 = SoftwareProfile(overheads="eager", overlap_tensor=False, deduplicated=False, loss="whole", adds_gradients=True)
FUSED_2024 = SoftwareProfile(overheads="fused")
COMPILED_2024 = replace(EAGER_2023, overheads="compiled")

MEGATRON_DEEPSPEED = replace(PLAIN_2021, microbatch_gradient_bytes=2, keeps_outputs=True)
"""The software of BLOOM. DeepSpeed adds the gradients of a microbatch, in bf16, to sums in fp32, and clears them only before the next
backward (runtime/bf16_optimizer.py and runtime/pipe/engine.py, `update_hp_grads(clear_lp_grads=False)`). DeepSpeed's pipeline drops a
stage's output after the backward of the microbatch (`pipe_buffers["outputs"]`)."""

META_2023 = replace(EAGER_2023, flash=1)
"""The software of LLaMA: xformers' attention of the first generation; activations that are expensive to recompute are kept
(arXiv:2302.13971, section 2.4)."""

META_2024 = SoftwareProfile(overlap_tensor=False, reduces="run")
"""Llama 3's software. Llama 3's paper says that communication of ZeRO and messages between stages are hidden. The paper does not mention
the communication of tensor parallelism, and says that gathers of keys and values are exposed (section 3.3.2). Gradients are added up in
fp32 over microbatches, and then reduced."""

HAI_LLM_V2 = replace(EAGER_2023, grouped=True, deduplicated=True)
"""The software of DeepSeek-V2. The experts' products are fused (arXiv:2405.04434, section 3.1.3), and a token is sent once to each device
that has some of its experts (section 2.2.3). DeepSeek-V2's software hides the all-to-all behind the shared experts, which is not
modelled."""

HAI_LLM_V3 = SoftwareProfile(overlap_expert=True, senders=20, moment_bytes=4, low_precision_kept=True)
"""The software of DeepSeek-V3. DualPipe hides the experts' exchange behind the other direction's computation (arXiv:2412.19437, section
3.2.1), with 20 processors of each device (section 3.2.2); moments are in bf16, and activations are kept in few bits (section 3.3.3)."""

TRAINER = SoftwareProfile(overheads="eager", loss="chunked", overlap_tensor=False, adds_gradients=True)
"""Megalith's trainer without compilation: plain PyTorch, fp32 gradients, and a loss that is computed for a few rows at a time."""
COMPILED_TRAINER = replace(TRAINER, overheads="compiled")

OURS = "megalith"
"""The name of Megalith's trainer, the default software of plans."""


@dataclass(frozen=True)
class Software:
    """A training program: its full name and its profile."""

    title: str
    software_profile: SoftwareProfile


SOFTWARE: Mapping[str, Software] = {
    OURS: Software("Megalith", TRAINER),
    "megatron-te": Software("tuned recipes with Transformer Engine", FUSED_2024),
    "megatron-core": Software("Megatron-Core as it comes", replace(FUSED_2024, overheads="packaged", overlap_tensor=False)),
    "torchtitan": Software("compiled PyTorch, as in torchtitan", COMPILED_2024),
    "pytorch": Software("PyTorch programs of 2023", EAGER_2023),
    "megatron-2021": Software("Megatron-LM of 2021", PLAIN_2021),
    "megatron-deepspeed": Software("Megatron-DeepSpeed of 2022", MEGATRON_DEEPSPEED),
    "llama1": Software("the software of LLaMA", META_2023),
    "llama3": Software("the software of Llama 3", META_2024),
    "deepseek-v2": Software("HAI-LLM as it trained DeepSeek-V2", HAI_LLM_V2),
    "deepseek-v3": Software("HAI-LLM as it trained DeepSeek-V3", HAI_LLM_V3),
}


def software_profile_of(name: str, plan: Plan) -> SoftwareProfile:
    """Return the profile of the software with this name under a plan. Megalith's trainer compiles blocks if `plan.compile`
    is set; other profiles do not depend on the plan."""
    found = SOFTWARE[name].software_profile
    return COMPILED_TRAINER if name == OURS and plan.compile else found


def assumed(plan: Plan, software: str = OURS) -> SoftwareProfile:
    """Return the profile of the software with this name under a plan, including what the plan's schedule hides (`hiding`)."""
    return hiding(plan, software_profile_of(software, plan))


def hiding(plan: Plan, known: SoftwareProfile) -> SoftwareProfile:
    """Return the software profile under a plan's schedule: with two microbatches in flight, the token dispatch of one overlaps the other's
    computation."""
    return replace(known, overlap_expert=True) if kind(plan.schedule).hides_exchange else known

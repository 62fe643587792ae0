"""Software whose steps can be predicted, by name: Megalith's trainer, and the programs behind published figures. No
torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from megalith.cost.workload import SoftwareProfile
from megalith.spec.plan import Plan

PLAIN_2021 = SoftwareProfile(
    overheads="plain",
    attention="plain",
    overlap_data=False,
    overlap_tensor=False,
    deduplicated=False,
    causal_half=False,
    loss="whole",
)
EAGER_2023 = SoftwareProfile(overheads="eager", overlap_tensor=False, deduplicated=False, loss="whole")
FUSED_2024 = SoftwareProfile(overheads="fused")
COMPILED_2024 = replace(EAGER_2023, overheads="compiled")

TRAINER = SoftwareProfile(overheads="eager", loss="chunked", overlap_tensor=False)
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
}


def software_profile_of(name: str, plan: Plan) -> SoftwareProfile:
    """Return the profile of the software with this name under a plan. Megalith's trainer compiles blocks if the plan does;
    other profiles do not depend on the plan."""
    found = SOFTWARE[name].software_profile
    return COMPILED_TRAINER if name == OURS and plan.compile else found

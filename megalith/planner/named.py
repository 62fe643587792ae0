"""Predictions for published trainings of named models in their own layouts. `python -m megalith.planner.named` prints both
figures side by side.

No torch unless a part must be traced. For settings that a source leaves open (chunks, the microbatch), every choice is
predicted, and the fastest that fits counts, as for the rows of measurements.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megalith.cost.calibrate import choose
from megalith.cost.constants import calibration
from megalith.cost.estimate import Estimate
from megalith.cost.parts import parts
from megalith.cost.prefill import prefill
from megalith.cost.software import EAGER_2023, PLAIN_2021
from megalith.cost.workload import SoftwareProfile, Workload
from megalith.planner.candidates import even_layers
from megalith.planner.published.flops import step_flops
from megalith.schedule.table import SCHEDULES, interleaving
from megalith.spec import cluster as clusters
from megalith.spec.plan import EXPERTS_ACTIVATION, UP_PROJECTION, Plan
from megalith.spec.presets import presets

Unit = Literal["TFLOP/s", "hardware TFLOP/s", "tokens/s", "% MFU", "GPU-hours a trillion tokens", "s"]
"""Unit of a figure: per device, except for the last two. `hardware` counts recomputation, by the source's formula."""


@dataclass(frozen=True)
class NamedRun:
    """A published training. `plans` are all plans that its description allows."""

    name: str
    preset: str
    cluster: str
    plans: tuple[Plan, ...]
    seq_len: int
    global_batch: int
    published: float
    unit: Unit
    source: str
    format: str = "bf16"
    software_profile: SoftwareProfile = field(default_factory=SoftwareProfile)
    sizes: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values of `[model]` that differ from the preset's."""
    forward_only: bool = False
    network: dict[str, float] = field(default_factory=dict[str, float])
    """Values of the cluster that differ from the catalogue's, such as bytes/s out of a device."""

    def workloads(self) -> list[Workload]:
        """One for each choice."""
        known = presets()[self.preset]
        model = replace(known, values=known.values | self.sizes).build().build()
        cluster = clusters.changed(clusters.load(self.cluster), self.network)
        return [
            Workload(model, plan, cluster, self.seq_len, self.global_batch, self.format, self.software_profile)
            for plan in self.plans
        ]


@dataclass(frozen=True)
class PredictedRun:
    """Prediction for the fastest plan that fits."""

    named: NamedRun
    workload: Workload
    estimate: Estimate

    @property
    def figure(self) -> float:
        """The predicted figure, in the source's unit."""
        return UNITS[self.named.unit](self.workload, self.estimate)

    @property
    def error(self) -> float:
        """Relative error of the predicted figure."""
        return self.figure / self.named.published - 1


def _hardware(workload: Workload, found: Estimate) -> float:
    flops = step_flops(workload.model, tokens=workload.tokens, seq_len=workload.seq_len, causal="full", recomputed=True)
    return flops / found.time.step / found.devices / 1e12


UNITS: dict[Unit, Callable[[Workload, Estimate], float]] = {
    "TFLOP/s": lambda _, found: found.flops_per_second / 1e12,
    "hardware TFLOP/s": _hardware,
    "tokens/s": lambda _, found: found.tokens_per_second,
    "% MFU": lambda _, found: 100 * found.mfu,
    "GPU-hours a trillion tokens": lambda _, found: 1e12 / found.tokens_per_second / 3600,
    "s": lambda _, found: found.time.step,
}


def replay(named: NamedRun) -> PredictedRun:
    """Predict it."""
    choices = named.workloads()
    if named.forward_only:
        (workload,) = choices
        return PredictedRun(named, workload, prefill(workload))
    return PredictedRun(named, *choose([(workload, parts(workload)) for workload in choices], calibration()))


def _plan(name: str = "1f1b", **sizes: Any) -> Plan:
    """Return a plan of these sizes; by default with ZeRO 1 and one sequence at a time."""
    plan = Plan(schedule=name, **sizes)
    assert plan.schedule in SCHEDULES, plan.schedule
    return plan


def _chunked(*chunks: int, **sizes: Any) -> tuple[Plan, ...]:
    """Return one plan for each number of chunks."""
    return tuple(_plan(interleaving(n), chunks=n, **sizes) for n in chunks)


LLAMA3 = "arXiv:2407.21783, table 4"

PYTORCH_2024 = SoftwareProfile(overlap_tensor=False, reduces="run")
"""Llama 3's software. According to its paper, it hides the communication of ZeRO and the messages between stages, but exposes
the gather of keys and values (section 3.3.2); the paper does not mention hidden communication of tensor parallelism.
Gradients are added up in fp32 over microbatches, and then reduced."""

DEEPSEEK = SoftwareProfile(overlap_expert=True, senders=20, moment_bytes=4, low_precision_kept=True)
"""DualPipe hides the experts' exchange behind the other direction's computation (arXiv:2412.19437, section 3.2.1), with 20
SMs of each device (section 3.2.2). Moments are in bf16, and activations are kept in few bits (section 3.3.3)."""

CHECKPOINTED_2023 = replace(EAGER_2023, flash=1)
"""LLaMA's software: xformers' attention of the first generation; expensive activations are kept, others recomputed
(arXiv:2302.13971, section 2.4)."""


def _llama3(devices: int, published: float, *, seq_len: int = 8192, context: int = 1) -> NamedRun:
    """One of the layouts of Llama 3's paper. Optimizer states and gradients are sharded, weights are not. The first chunk has
    only the embedding and the last only the output, so each of the other 126 chunks has one block (section 3.3.2)."""
    data = devices // (8 * 16 * context)
    plan = _plan(
        "interleaved", data=data, zero=2, context=context, context_method="gather", tensor=8, pipeline=16, chunks=8,
        layers=even_layers(126, 128),
    )  # fmt: skip
    batch = 2**24 // seq_len
    layout = f"TP8 CP{context} PP16 DP{data}"
    name = f"Llama 3.1 405B, {devices:,} H100, {layout}, sequences of {seq_len:,}"
    return NamedRun(
        name,
        "llama3.1-405b",
        f"h100:{devices}",
        (plan,),
        seq_len,
        batch,
        published,
        "TFLOP/s",
        LLAMA3,
        software_profile=PYTORCH_2024,
    )


NAMED: tuple[NamedRun, ...] = (
    _llama3(8192, 430),
    _llama3(16_384, 400),
    _llama3(16_384, 380, seq_len=131_072, context=16),
    NamedRun(
        "DeepSeek-V3, 2,048 H800, PP16 (DualPipe) EP64 DP128, ZeRO 1, 8 bits", "deepseek-v3", "h800:2048",
        tuple(
            _plan(
                "dualpipe", data=128, expert=64, pipeline=16, recompute="selective", layers=layers,
                recompute_parts=("attention_norm", "mlp_norm", UP_PROJECTION, EXPERTS_ACTIVATION),  # sections 3.2.3 and 3.3.3
            )
            for layers in (None, *((first, *(4,) * 14, 5 - first) for first in range(1, 5)))  # 61 blocks
        ),
        4096, 15_360, 180e3, "GPU-hours a trillion tokens", "arXiv:2412.19437, sections 1, 3.2 and 4.2", "mxfp8", DEEPSEEK,
    ),
    NamedRun(
        "GPT-3 175B, 1,024 A100, TP8 PP16 DP8, everything recomputed", "gpt3-175b", "a100-80gb:1024",
        _chunked(1, 3, data=8, tensor=8, pipeline=16, recompute="full"),
        2048, 1536, 140, "hardware TFLOP/s", "arXiv:2104.04473, section 5.1", "fp16", PLAIN_2021, {"vocab": 51_200},
    ),
    NamedRun(
        "BLOOM 176B, 384 A100, TP4 PP12 DP8, ZeRO 1, everything recomputed", "bloom-176b", "a100-80gb:384",
        (_plan(data=8, tensor=4, pipeline=12, microbatch=2, recompute="full", layers=even_layers(70, 12)),),
        2048, 2048, 156, "hardware TFLOP/s", "arXiv:2211.05100, section 3.4", software_profile=PLAIN_2021,
        network={"scale_out": 50e9 / 8},  # four links of 100 Gbit/s a node
    ),
    NamedRun(
        "Nemotron-4 340B, 6,144 H100, TP8 PP12 DP64", "nemotron4-340b", "h100:6144",
        _chunked(8, 1, 2, 4, data=64, tensor=8, pipeline=12),
        4096, 2304, 8.0, "s", "arXiv:2406.11704, table 2",
    ),
    NamedRun(
        "LLaMA 65B, 1,024 A100, TP8 PP8 DP16", "llama1-65b", "a100-80gb:1024",
        tuple(plan for m in (1, 2) for plan in _chunked(1, 2, 5, data=16, tensor=8, pipeline=8, microbatch=m)),
        2048, 2048, 380, "tokens/s", "arXiv:2302.13971, section 2.4, there on 2,048", software_profile=CHECKPOINTED_2023,
    ),
    NamedRun(
        "Llama 2 70B, 2,048 A100 (layout unpublished: TP8, PP2 to 8)", "llama2-70b", "a100-80gb:2048",
        tuple(
            plan for pipeline in (4, 2, 8) for m in (1, 2)
            for plan in _chunked(1, 2, 5, data=256 // pipeline, tensor=8, pipeline=pipeline, microbatch=m)
        ),
        4096, 1024, 860e3, "GPU-hours a trillion tokens", "arXiv:2307.09288, section 2.2.1 and table 2", software_profile=EAGER_2023,
    ),
    NamedRun(
        "DeepSeek 67B, 512 H800 (number and layout unpublished: TP1 to 8, PP2 to 8)", "deepseek-llm-67b", "h800:512",
        tuple(
            _plan(data=512 // (tensor * pipeline), tensor=tensor, pipeline=pipeline, recompute=recompute)
            for tensor in (1, 2, 4, 8) for pipeline in (8, 4, 2) if tensor * pipeline >= 8 for recompute in ("none", "full")
        ),
        4096, 4608, 300.6e3, "GPU-hours a trillion tokens", "arXiv:2405.04434, section 3.2.3", software_profile=EAGER_2023,
    ),
    NamedRun(
        "PaLM 540B, 6,144 TPU v4, TP12, ZeRO 3 over 256, two copies, everything recomputed", "palm-540b", "tpu-v4:6144",
        (_plan(data=512, replicate=2, zero=3, tensor=12, sequence=False, recompute="full"),),
        2048, 2048, 46.2, "% MFU", "arXiv:2204.02311, section 4 and table 3", sizes={"vocab": 256_008},
    ),
    NamedRun(
        "Llama 3 405B, prefill of 2^20 tokens, 128 H100, TP8 CP16, 8 bits", "llama3.1-405b", "h100:128",
        (_plan(tensor=8, context=16, zero=0),),
        2**20, 1, 77, "s", "arXiv:2411.01783, figure 8", "fp8", forward_only=True,
    ),
)  # fmt: skip
"""The published trainings. If no source states the number of chunks, several are tried."""


def table() -> str:
    """Return all predictions as a Markdown table."""
    lines = ["| run | published | predicted | | GiB of the worst rank |", "|---|---|---|---|---|"]
    for named in NAMED:
        found = replay(named)
        limit = (found.estimate.limit or 0.0) / 2**30
        over = "" if found.estimate.fits else ", **does not fit**"
        chunks = f" ({found.workload.plan.chunks} chunks)" if len({plan.chunks for plan in named.plans}) > 1 else ""
        published = f"{_digits(named.published)} {named.unit} ({named.source})"
        held = f"{found.estimate.memory.total / 2**30:.0f} of {limit:.0f}{over}"
        lines.append(f"| {named.name} | {published} | {_digits(found.figure)}{chunks} | {found.error:+.1%} | {held} |")
    return "\n".join(lines)


def _digits(value: float) -> str:
    return f"{value / 1e3:,.0f}K" if value >= 1e4 else f"{value:.3g}"


if __name__ == "__main__":
    print(table())

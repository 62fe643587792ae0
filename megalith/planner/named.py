"""Predictions for published trainings of named models in their own layouts. `python -m megalith.planner.named` prints published and
predicted figures side by side.

Imports torch only to trace parts. Where a source leaves open chunks, the microbatch, the layout or recomputation, several choices are
predicted, and the fastest that fits is compared with the published figure, as for the rows of the file of measurements. Batches and numbers
of devices that no source gives are assumed. A run whose sources give no speed is also predicted.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megalith.cost import predicted
from megalith.cost.calibrate import choose
from megalith.cost.constants import calibration
from megalith.cost.doubt import Interval
from megalith.cost.estimate import Estimate, estimate
from megalith.cost.parts import parts
from megalith.cost.prefill import prefill
from megalith.cost.software import OURS, SOFTWARE, software_profile_of
from megalith.cost.workload import Workload
from megalith.planner.candidates import Space, even_layers
from megalith.planner.confidence import expected
from megalith.planner.published.flops import step_flops
from megalith.schedule.table import SCHEDULES, interleaving
from megalith.spec import cluster as clusters
from megalith.spec.numbers import is_narrow
from megalith.spec.plan import EXPERTS_ACTIVATION, UP_PROJECTION, Plan
from megalith.spec.presets import presets

GIB = 2**30

Unit = Literal["TFLOP/s", "hardware TFLOP/s", "tokens/s", "% MFU", "GPU-hours a trillion tokens", "s"]
"""Unit of a figure; the figure is per device, except in the last two units. Hardware TFLOP/s count
recomputed FLOPs too, by the source's formula."""


@dataclass(frozen=True)
class NamedRun:
    """A published training. `plans` are all plans that the description of the training allows."""

    name: str
    preset: str
    cluster: str
    plans: tuple[Plan, ...]
    seq_len: int
    global_batch: int
    published: float | None
    """None if the sources of the run give no speed."""
    unit: Unit
    source: str
    software: str
    """The software whose steps are predicted: a name in `cost.software`."""
    program: str
    """The software that ran the training, as its source calls it."""
    format: str = "bf16"
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    """Fields of the software's profile that are different for this run."""
    published_gib: float | None = None
    """Published memory of a device, in GiB."""
    sizes: dict[str, Any] = field(default_factory=dict[str, Any])
    """Values of `[model]` that differ from the preset's."""
    forward_only: bool = False
    network: dict[str, float] = field(default_factory=dict[str, float])
    """Values of the cluster that differ from the catalogue's, such as bytes/s out of a device."""

    def workloads(self) -> list[Workload]:
        """Return a workload for each plan."""
        known = presets()[self.preset]
        model = replace(known, values=known.values | self.sizes).build().build()
        cluster = clusters.changed(clusters.load(self.cluster), self.network)
        profile = replace(SOFTWARE[self.software].software_profile, **self.facts)
        return [Workload(model, plan, cluster, self.seq_len, self.global_batch, self.format, profile) for plan in self.plans]


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
    def error(self) -> float | None:
        """Relative error of the predicted figure; None if no figure was published."""
        return None if self.named.published is None else self.figure / self.named.published - 1

    @property
    def interval(self) -> tuple[float, float]:
        """The figure's 80 % interval."""
        factors = self._expected[0]
        low, high = (UNITS[self.named.unit](self.workload, self._after(factor)) for factor in (factors.low, factors.high))
        return min(low, high), max(low, high)

    @property
    def gib(self) -> float:
        """GiB of the worst rank."""
        return self.estimate.memory.total / GIB

    @property
    def gib_interval(self) -> tuple[float, float]:
        """The 80 % interval of `gib`."""
        factors = self._expected[1]
        return factors.low * self.gib, factors.high * self.gib

    @property
    def _expected(self) -> tuple[Interval, Interval]:
        errors = expected(self.workload.model, self.workload.cluster, self.workload.seq_len)
        return errors.time.interval(), errors.memory.interval()

    def _after(self, factor: float) -> Estimate:
        return replace(self.estimate, time=self.estimate.time * factor)


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
    """Predict a published training, with the fastest of its plans that fits."""
    choices = named.workloads()
    if named.forward_only:
        (workload,) = choices
        return PredictedRun(named, workload, prefill(workload))
    return PredictedRun(named, *choose([(workload, parts(workload)) for workload in choices], calibration()))


def ours(found: PredictedRun) -> Estimate | None:
    """Predict the same layout run by this project's trainer, in bf16 if the source used fewer bits; None for runs that the trainer does
    not support."""
    workload, plan = found.workload, found.workload.plan
    if found.named.forward_only or workload.cluster.accelerator.vendor != "NVIDIA":
        return None
    compiles = Space(compile=True).compiles(plan.schedule, split=True)
    plan = plan.model_copy(update={"compile": compiles})
    format = "bf16" if is_narrow(workload.format) else workload.format
    workload = replace(workload, plan=plan, format=format, software_profile=software_profile_of(OURS, plan))
    return estimate(workload, space=predicted.held(workload))


def _plan(name: str = "1f1b", **sizes: Any) -> Plan:
    """Return a plan of these sizes; by default with ZeRO 1 and one sequence at a time."""
    plan = Plan(schedule=name, **sizes)
    assert plan.schedule in SCHEDULES, plan.schedule
    return plan


def _chunked(*chunks: int, **sizes: Any) -> tuple[Plan, ...]:
    return tuple(_plan(interleaving(n), chunks=n, **sizes) for n in chunks)


LLAMA3 = "arXiv:2407.21783, table 4"

FP16 = {"gradient_bytes": 2}
"""By default, Megatron accumulates gradients in fp32 only if it trains in bf16; in fp16 it accumulates them in fp16."""


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
        "llama3",
        "PyTorch with Meta's own parallelism",
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
        4096, 15_360, 180e3, "GPU-hours a trillion tokens", "arXiv:2412.19437, sections 1, 3.2 and 4.2",
        "deepseek-v3", "HAI-LLM", "mxfp8",
    ),
    NamedRun(
        "DeepSeek-V2, 512 H800 (number unpublished), PP16 (zero bubble) EP8, ZeRO 1", "deepseek-v2", "h800:512",
        tuple(  # "a portion of the operators are recomputed" (section 3.1.3)
            _plan(
                "zb-h1", data=32, expert=8, pipeline=16, layers=even_layers(60, 16), recompute="selective", recompute_parts=names,
            )
            for names in (
                ("attention_norm", "mlp_norm", UP_PROJECTION, EXPERTS_ACTIVATION),
                ("attend", "mlp.activation", EXPERTS_ACTIVATION),
                ("attend", "mlp.experts", "mlp.shared"),
            )
        ),
        4096, 9216, 172.8e3, "GPU-hours a trillion tokens", "arXiv:2405.04434, sections 3.1 and 3.2.3", "deepseek-v2", "HAI-LLM",
    ),
    NamedRun(
        "DeepSeek 67B, 512 H800 (number and layout unpublished: TP1 to 8, PP2 to 8)", "deepseek-llm-67b", "h800:512",
        tuple(
            _plan(data=512 // (tensor * pipeline), tensor=tensor, pipeline=pipeline, recompute=recompute)
            for tensor in (1, 2, 4, 8) for pipeline in (8, 4, 2) if tensor * pipeline >= 8 for recompute in ("none", "full")
        ),
        4096, 4608, 300.6e3, "GPU-hours a trillion tokens", "arXiv:2405.04434, section 3.2.3", "pytorch", "HAI-LLM",
    ),
    NamedRun(
        "GPT-3 175B, 1,024 A100, TP8 PP16 DP8, everything recomputed", "gpt3-175b", "a100-80gb:1024",
        _chunked(1, 3, data=8, tensor=8, pipeline=16, sequence=False, recompute="full"),
        2048, 1536, 140, "hardware TFLOP/s", "arXiv:2104.04473, section 5.1", "megatron-2021", "Megatron-LM", "fp16", FP16,
        sizes={"vocab": 51_200},
    ),
    NamedRun(
        "GPT-3 175B, 1,024 V100 (number and layout unpublished: TP8 PP16 DP8, everything recomputed)", "gpt3-175b", "v100:1024",
        _chunked(1, 3, data=8, tensor=8, pipeline=16, sequence=False, recompute="full"),
        2048, 1536, None, "hardware TFLOP/s", "arXiv:2005.14165, section 2.3: V100", "megatron-2021", "OpenAI's own", "fp16", FP16,
        sizes={"vocab": 51_200},
    ),
    NamedRun(
        "BLOOM 176B, 384 A100, TP4 PP12 DP8, ZeRO 1, everything recomputed", "bloom-176b", "a100-80gb:384",
        (_plan(
            data=8, tensor=4, pipeline=12, microbatch=2, sequence=False, recompute="full", layers=even_layers(70, 12),
        ),),
        2048, 2048, 156, "hardware TFLOP/s", "arXiv:2211.05100, section 3.4", "megatron-deepspeed", "Megatron-DeepSpeed",
        published_gib=60e9 / GIB, network={"scale_out": 50e9 / 8},  # four links of 100 Gbit/s a node
    ),
    NamedRun(
        "Nemotron-4 340B, 6,144 H100, TP8 PP12 DP64", "nemotron4-340b", "h100:6144",
        _chunked(8, 1, 2, 4, data=64, tensor=8, pipeline=12),
        4096, 2304, 8.0, "s", "arXiv:2406.11704, table 2", "megatron-te", "Megatron-Core",
    ),
    NamedRun(
        "LLaMA 65B, 1,024 A100, TP8 PP8 DP16", "llama1-65b", "a100-80gb:1024",
        tuple(plan for m in (1, 2) for plan in _chunked(1, 2, 5, data=16, tensor=8, pipeline=8, microbatch=m)),
        2048, 2048, 380, "tokens/s", "arXiv:2302.13971, section 2.4, measured on 2,048", "llama1", "PyTorch with xformers",
    ),
    NamedRun(
        "Llama 2 70B, 2,048 A100 (layout unpublished: TP8, PP2 to 8)", "llama2-70b", "a100-80gb:2048",
        tuple(
            plan for pipeline in (4, 2, 8) for m in (1, 2)
            for plan in _chunked(1, 2, 5, data=256 // pipeline, tensor=8, pipeline=pipeline, microbatch=m)
        ),
        4096, 1024, 860e3, "GPU-hours a trillion tokens", "arXiv:2307.09288, section 2.2.1 and table 2", "pytorch", "PyTorch",
    ),
    NamedRun(
        "PaLM 540B, 6,144 TPU v4, TP12, ZeRO 3 over 256, two copies, everything recomputed", "palm-540b", "tpu-v4:6144",
        (_plan(data=512, replicate=2, zero=3, tensor=12, sequence=False, recompute="full"),),
        2048, 2048, 46.2, "% MFU", "arXiv:2204.02311, section 4 and table 3", "megatron-te", "JAX and T5X with Pathways",
        sizes={"vocab": 256_008},
    ),
    NamedRun(
        "Gemma 2 27B, 6,144 TPU v5p, TP8, ZeRO 3 over 768 (batch unpublished: 768)", "gemma2-27b", "tpu-v5p:6144",
        tuple(_plan(data=768, zero=3, tensor=8, recompute=recompute) for recompute in ("none", "full")),
        8192, 768, None, "% MFU", "arXiv:2408.00118, table 3: devices and shards", "megatron-te", "JAX with Pathways",
    ),
    NamedRun(
        "Llama 3 405B, prefill of 2^20 tokens, 128 H100, TP8 CP16, 8 bits", "llama3.1-405b", "h100:128",
        (_plan(tensor=8, context=16, zero=0),),
        2**20, 1, 77, "s", "arXiv:2411.01783, figure 8", "megatron-te", "PyTorch", "fp8", forward_only=True,
    ),
)  # fmt: skip
"""The published trainings. If no source states the number of chunks, several are tried."""


HEAD = ("run", "software, predicted as", "published", "predicted", "", "GiB of the worst rank", "Megalith, the same layout")


def table() -> str:
    """All rows, as lines of a Markdown table."""
    return "\n".join([f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *(row(replay(named)) for named in NAMED)])


def row(found: PredictedRun) -> str:
    """Return the table line of one run."""
    named, plans = found.named, found.named.plans
    published = "none" if named.published is None else f"{_digits(named.published)} {named.unit}"
    chunks = f", {found.workload.plan.chunks} chunks" if len({plan.chunks for plan in plans}) > 1 else ""
    low, high = map(_digits, found.interval)
    unit = f" {named.unit}" if named.published is None else ""
    cells = (
        named.name,
        f"{named.program}, `{named.software}`",
        f"{published} ({named.source})",
        f"{_digits(found.figure)}{unit} ({low} to {high}{chunks})",
        "–" if found.error is None else f"{found.error:+.1%}",
        _held(found),
        _ours(found),
    )
    return f"| {' | '.join(cells)} |"


def _held(found: PredictedRun) -> str:
    limit, gib = (found.estimate.limit or 0.0) / GIB, found.named.published_gib
    over = "" if found.estimate.fits else ", **does not fit**"
    published = "" if gib is None else f"; published {gib:.0f}, {found.gib / gib - 1:+.1%}"
    low, high = found.gib_interval
    return f"{found.gib:.0f} of {limit:.0f} ({low:.0f} to {high:.0f}){over}{published}"


def _ours(found: PredictedRun) -> str:
    megalith = ours(found)
    if megalith is None:
        return "–"
    over = "" if megalith.fits else ", **does not fit**"
    return f"{megalith.time.step / found.estimate.time.step:.2f} times as long, {megalith.memory.total / GIB:.0f} GiB{over}"


def _digits(value: float) -> str:
    return f"{value / 1e3:,.0f}K" if value >= 1e4 else f"{value:.3g}"


if __name__ == "__main__":
    print(table())

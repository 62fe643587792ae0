"""Choices that can be combined, the small run of each combination, and the reasons why a combination cannot run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from math import prod
from typing import Any

from megalith.check import Problem, check
from megalith.prove.parity import LOSS_SCALE, OPTIMIZER, SMALL_MOMENTS, SMALL_TILE, clearly_routed, small_choices
from megalith.schedule.table import SCHEDULES
from megalith.spec.families import read
from megalith.spec.numbers import PRECISIONS, TRAINED, PrecisionSpec, Rounded, is_narrow
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.plan import EXPERTS_ACTIVATION, UP_PROJECTION, Plan
from megalith.spec.presets import presets
from megalith.spec.run import RunSpec
from megalith.spec.sites import at_site
from megalith.spec.state import LOWER

MAX_RANKS = 8
LAYERS = 4
SAMPLES = 8
"""Number of samples in a site's batch. These samples give each data rank two microbatches; in a pipeline, four (with four data
ranks, two); if gradients are released, one."""

PHASES = ({"begin": SAMPLES, "global_batch": 2 * SAMPLES}, {"begin": 3 * SAMPLES, "global_batch": SAMPLES, "seq_len": 24})
"""The phases of a run with phases: each of its three steps is in a different phase."""

ROUND = {"inner_steps": 2}
"""With this setting, the sites of a drawn run merge weights after the second and after the last of its three steps."""

GRACE = {"grace": 600.0}
"""With this grace period, no site of a drawn run is left out of a merge, however slow the machine is."""

SECOND = {"data": 2, "zero": 2, "microbatch": 2}
"""The plan of the second of two unequal sites; the first site has the drawn plan."""

UNEVEN = {"interleaved": {"layers": (0, LAYERS // 2, LAYERS // 2, 0)}}
"""Layers per stage for schedules that are drawn with stages that hold only the embedding or only the head."""

Axes = Mapping[str, Mapping[str, dict[str, Any]]]

AXES: Axes = {
    "model": {
        "dense": {"preset": "tiny"},
        "experts": {"preset": "mixtral-8x7b"},
        "latent attention, experts, MTP": {"preset": "deepseek-tiny"},
        "latent attention, experts by softmax": {"preset": "deepseek-v2"},
        "ALiBi": {"preset": "bloom-560m"},
        "half rotary": {"preset": "nemotron4-15b"},
        "windows, soft caps": {"preset": "gemma2-2b"},
    },
    "dp_shard": {"1": {}, "2": {"data": 2}},
    "dp_replicate": {"1": {}, "2": {"replicate": 2}},  # each of this many shards: `run_of` multiplies
    "zero": {str(stage): {"zero": stage} for stage in range(4)},
    "tensor": {
        "1": {},
        "2": {"tensor": 2},
        "2, whole sequence, in pieces": {"tensor": 2, "sequence": False, "overlap_tensor": 2},
    },
    "context": {
        "1": {},
        "ring of 2": {"context": 2},
        "gather of 2": {"context": 2, "context_method": "gather"},
        "ulysses of 2": {"context": 2, "ulysses": 2},
    },
    "pipeline": {
        "1": {},
        **{
            name: {"pipeline": 2, "schedule": name, "chunks": row.chunks.usual} | UNEVEN.get(name, {})
            for name, row in SCHEDULES.items()
        },
    },
    "expert": {
        "1": {},
        "2": {"expert": 2},
        "2, each of 2": {"expert": 2, "expert_tensor": 2},
        "each of 2": {"expert_tensor": 2},
    },
    "recompute": {
        "none": {},
        "selective": {"recompute": "selective", "recompute_parts": ("attend", "mlp.experts", "mlp.shared")},
        "selective, the activation": {"recompute": "selective", "recompute_parts": ("attention.core", "mlp.activation")},
        "selective, heads": {"recompute": "selective", "recompute_parts": (UP_PROJECTION, EXPERTS_ACTIVATION)},
        **{policy: {"recompute": policy} for policy in ("full", "sqrt")},
    },
    "retain": {
        "kept": {},
        "on the host": {"retain": {"blocks": "host"}},
        "half on disk": {"retain": {"blocks": "disk", "share": 0.5}},
        "parts on the host": {"retain": {"parts": {"attention": "host", "attention.core": "keep", "mlp.activation": "host"}}},
        "parts on disk and again": {"retain": {"blocks": "disk", "parts": {"attention": "keep", "mlp_norm": "recompute"}}},
        "parts in both places": {"retain": {"blocks": "disk", "parts": {"attention": "host", "mlp.activation": "host"}}},
    },
    "state": {
        "on the device": {},
        "half on the host": {"state": {"optimizer": "host", "share": 0.5}},
        "on disk": {"state": {"optimizer": "disk"}},
        "on disk, weights too": {"state": {"optimizer": "disk", "weights": "disk"}},
        "half on the host, weights too": {"state": {"optimizer": "host", "weights": "host", "share": 0.5}},
    },
    "norm": {"known at once": {}, "known late": {"post_validation": True}},
    "sites": {
        "one": {},
        "one that merges": {"sites": {"count": 1, "lr": 1.0}},
        "two": {"sites": {"count": 2}},
        "two, fragments of 4 bits": {"sites": {"count": 2, "fragments": 2, "overlap": 1, "bits": 4}},
        "two, eager, the largest": {
            "sites": {"count": 2, "overlap": 1, "eager": True, "top_k": 64, "bits": 2, "momentum": 0.0, "feedback_decay": 0.95}
        },
        "two, asynchronous": {"sites": {"count": 2, "fragments": 2, "bits": 8, "staleness": 1}},
        "three, at each step": {"sites": {"count": 3, "inner_steps": 1, "nesterov": False}},
        "two, unequal": {"sites": {"count": 2, "each": ({"share": 1}, {"share": 2, "plan": SECOND})}},
        "two, data parallel": {"sites": {"count": 2, "method": "data-parallel"}},
    },
    "phases": {"none": {}, "a larger batch, then shorter sequences": {"phases": PHASES}},
    "optimizer": {kind: {"kind": kind} for kind in OPTIMIZERS},
    "moments": {number: {"moments": number} for number in ("fp32", "bf16", "fp8")},
    "clipping": {
        "by the global norm": {},
        "each gradient": {"adaptive_clip": 1.01},
        "each gradient and attention": {"adaptive_clip": 1.01, "qk_clip": 1e-3},
    },
    "precision": {name: {"precision": name} for name in TRAINED}
    | {f"fp8, a scale for each {what}": {"precision": "fp8", "granularity": what} for what in ("row", "tensor")}
    | {"fp8, scales in fp32": {"precision": "fp8", "scale": "fp32"}}
    | {"fp8, forward in bf16": {"precision": "fp8", "forward": "wide"}}
    | {"fp8, backward in mxfp8": {"precision": "fp8", "input_gradient": "mxfp8", "weight_gradient": "mxfp8"}}
    | {"nvfp4, gradients of weights in fp8": {"precision": "nvfp4", "weight_gradient": "fp8", "expert_weight_gradient": "fp8"}}
    | {"fp8, forward in mxfp4": {"precision": "fp8", "forward": "mxfp4", "weight_gradient": "wide"}}
    | {"fp8, weights' gradients of experts too": {"precision": "fp8", "expert_weight_gradient": "narrow"}}
    | {"fp8, tokens sent in fp8": {"precision": "fp8", "dispatch": "fp8"}}
    | {"fp8, also gradients of results": {"precision": "fp8", "dispatch": "fp8", "combine_gradients": "fp8"}}
    | {"fp8, inputs kept in fp8": {"precision": "fp8", "kept": "fp8"}}
    | {"fp8, weights gathered in fp8": {"precision": "fp8", "gather": "fp8"}}
    | {"fp8, weights gathered with scales in fp32": {"precision": "fp8", "gather": "fp8", "scale": "fp32"}}
    | {"fp8, delayed scales of tensors": {"precision": "fp8", "granularity": "tensor", "history": 2}}
    | {f"bf16, master {form}": {"precision": "bf16", "master": form} for form in LOWER}
    | {"bf16, inputs kept in fp8": {"precision": "bf16", "kept": "fp8"}}
    | {"bf16, attention kept in fp8": {"precision": "bf16", "parts": {"attention.core": "compress"}}}
    | {"bf16, blocks kept in fp8": {"precision": "bf16", "parts": {"attend": "compress", "mlp": "compress"}}}
    | {
        "bf16, norms and activations kept in fp8": {
            "precision": "bf16",
            "parts": {"attention_norm": "compress", "mlp_norm": "compress", "mlp.activation": "compress"},
        }
    }
    | {"bf16, also gradients": {"precision": "bf16", "gradients": "bf16"}}
    | {"bf16, gradients released": {"precision": "bf16", "release": True}},
}


def axes_with_precisions(*precisions: str) -> Axes:
    """Return the axes with some precisions only."""
    return {**AXES, "precision": {name: AXES["precision"][name] for name in precisions}}


DEFAULTS = ("1", "one", "none", "kept", "known at once", "on the device", "adamw", "fp32", "by the global norm")
"""Default values of the axes, which the names of combinations leave out."""

STEP_COST = {
    "tiny": 1.0, "mixtral-8x7b": 1.2, "deepseek-tiny": 1.5, "deepseek-v2": 1.4, "bloom-560m": 1.0, "nemotron4-15b": 1.0,
    "gemma2-2b": 1.1,
}  # fmt: skip
"""Relative cost of a step of each model, with differences made smaller than they are, as for numbers of ranks in `cost_of`."""

Choice = tuple[str, str]  # axis and value
Choices = tuple[Choice, ...]
Pair = frozenset[Choice]


@dataclass(frozen=True)
class ParityCase:
    """One combination of choices, and the small run that uses it."""

    choices: Choices
    spec: RunSpec

    @property
    def name(self) -> str:
        """The choices of the combination in words, without default values."""
        return "; ".join(value if axis == "model" else f"{axis} {value}" for axis, value in self.choices if value not in DEFAULTS)

    @property
    def ranks(self) -> int:
        """The number of ranks of all sites together."""
        return sum(site.plan.ranks for site in sites_of(self.spec))

    @property
    def pairs(self) -> frozenset[Pair]:
        """Pairs of choices that a run of this combination proves to work together."""
        return pairs_of(self.choices)


def sites_of(spec: RunSpec) -> list[RunSpec]:
    """Return the run as each of its sites trains it; the run itself if it has no sites."""
    return [at_site(spec, site) for site in range(spec.sites.count)] if spec.sites is not None else [spec]


ROUNDED = frozenset(
    ("precision", name) for name, asked in AXES["precision"].items() if isinstance(PRECISIONS[asked["precision"]].parity, Rounded)
)

BELOW_FP32 = ROUNDED | {("state", name) for name, asked in AXES["state"].items() if "weights" in asked.get("state", {})}
"""Choices that cannot be compared in fp32, because they round: for example, weights that are made from fp32 state at each gather.
"""


def pairs_of(choices: Choices) -> frozenset[Pair]:
    """Return the pairs that a combination proves. Rounding may hide a fault, so a rounded precision proves only pairs with
    choices that always round."""
    rounded = ROUNDED.intersection(choices) and BELOW_FP32
    return frozenset(_pair(*two) for two in combinations(choices, 2) if not rounded or rounded.intersection(two))


@cache
def _pair(one: Choice, other: Choice) -> Pair:
    return frozenset((one, other))


def cost_of(choices: Choices) -> float:
    """Return the relative processor time of a combination. Differences of cost are made smaller than they are (the square root of
    the number of ranks counts), so that many pairs can justify a costly combination."""
    asked = _plan_keys(choices)
    return _ranks(asked) ** 0.5 * STEP_COST[asked["preset"]]


def valid_run(choices: Choices) -> RunSpec | None:
    """Return the run of a combination; None if there are conflicts."""
    return None if any(True for _ in conflicts(choices)) else run_of(choices)


def conflicts(choices: Choices) -> Iterator[Problem]:
    """Yield the reasons why a combination is not drawn: it has too many ranks, its optimizer would amplify the rounding of a narrow
    format, or `check` refuses it."""
    if (ranks := _ranks(_plan_keys(choices))) > MAX_RANKS:
        yield Problem("error", "ranks", ranks, f"a drawn run may have at most {MAX_RANKS} ranks", "Split fewer axes.")
    spec = run_of(choices)
    kind, precision = spec.optimizer.kind, spec.train.precision
    if OPTIMIZERS[kind].amplifies and precision != "fp32":
        reason = f"amplifies the rounding of {precision}, so that no comparison is possible"
        yield Problem("error", "optimizer.kind", kind, reason, "Compare it in fp32.")
    yield from (problem for problem in check(spec, files=False) if problem.severity == "error")


def halvings(choices: Choices) -> int:
    """Return how often the number of ranks of a combination must be halved until it is at most MAX_RANKS."""
    return max(0, -(-_ranks(_plan_keys(choices)) // MAX_RANKS) - 1).bit_length()


def _plan_keys(choices: Choices) -> dict[str, Any]:
    return {key: value for axis, name in choices for key, value in AXES[axis][name].items()}


def _ranks(asked: Mapping[str, Any]) -> int:
    plan = prod(asked.get(name, 1) for name in ("data", "replicate", "tensor", "context", "pipeline"))
    sites = asked.get("sites", {})
    others = [one["plan"] for one in sites.get("each", ()) if "plan" in one]
    return plan * (sites.get("count", 1) - len(others)) + sum(map(_ranks, others))


def run_of(choices: Choices) -> RunSpec:
    """Return the small run of a combination, whether valid or not."""
    asked = _plan_keys(choices)
    preset, precision, kind, phases, moments = (
        asked.pop(name, ()) for name in ("preset", "precision", "kind", "phases", "moments")
    )
    sites = asked.pop("sites", {})
    shares = [one["share"] for one in sites.get("each", ())]
    batch = SAMPLES * (sum(shares) or sites.get("count", 1))  # the first site has a run's without sites
    keys = PrecisionSpec.model_fields.keys() & asked.keys() - {"gradients"}  # a drawn `gradients` is that of the sums
    narrow = {key: asked.pop(key) for key in keys}
    summed = asked.pop("gradients", "fp32")
    master = asked.pop("master", "fp32")
    clipping = {name: asked.pop(name) for name in ("adaptive_clip", "qk_clip") if name in asked}
    data = asked.get("data", 1) * asked.get("replicate", 1)
    microbatches = 4 if "pipeline" in asked else 2
    if "parts" in asked:
        retain = asked.get("retain", {})
        asked["retain"] = retain | {"parts": retain.get("parts", {}) | asked.pop("parts")}
    if asked.pop("release", False):  # a key of the drawn state
        asked["state"], microbatches = asked.get("state", {}) | {"release": True}, 1
    plan = Plan.model_validate(asked | {"data": data, "microbatch": max(1, SAMPLES // data // microbatches)})
    run = RunSpec.model_validate(
        {
            "name": preset,
            "model": _small(preset, precision).model_dump(),
            "plan": plan.model_dump(),
            "data": {"path": "none", "phases": [one | _times(one, batch // SAMPLES) for one in phases]},
            "precision": small_choices(precision, LAYERS, PrecisionSpec.model_validate(narrow)) | narrow
            if narrow or is_narrow(precision)
            else {"tile": SMALL_TILE}
            if plan.rounding
            else {},
            "train": {"steps": 3, "global_batch": batch, "seq_len": 48, "precision": precision, "gradients": summed},
            "optimizer": OPTIMIZER
            | {"kind": kind, "moments": moments, "master": master}
            | clipping
            | (SMALL_MOMENTS if moments != "fp32" else {}),
            "loss_scale": {"initial": LOSS_SCALE},
            **({"sites": ({} if "method" in sites else GRACE | ROUND) | sites} if sites else {}),
        }
    )
    return at_site(run)


def _times(phase: Mapping[str, int], sites: int) -> dict[str, int]:
    """Return the begin and the batch of a phase for this many sites; each site gets as many samples as a run without sites."""
    return {key: sites * phase[key] for key in ("begin", "global_batch")}


@cache
def _small(preset: str, precision: str) -> Any:
    """Return a small model of the preset's family with sizes that every combination can split, so that all plans have the same
    reference."""
    return clearly_routed(read(presets()[preset].values).small(layers=LAYERS, unit=4, heads_unit=4), precision)


def reference_key(spec: RunSpec) -> Any:
    """Return everything on which the reference run on one process depends: the model, the precision, the optimizer and the
    phases; also the samples of a microbatch, if balance losses are computed over them or the gradients of microbatches are
    compared one by one; and in narrow precisions the tokens that share a scale."""
    rounded = isinstance(PRECISIONS[spec.train.precision].parity, Rounded)
    sequences = spec.plan.set_sequences if rounded or spec.model.build().balances_microbatches else 0
    choices = spec.precision, spec.plan.microbatch if is_narrow(spec.train.precision) else None
    kept = tuple(spec.plan.rounding.items())
    return spec.model, spec.train.precision, choices, spec.optimizer, spec.data.phases, sequences, kept

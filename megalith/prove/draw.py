"""Plans drawn at random so that every compatible pair of choices occurs: `parity --random` runs them to prove any combination.

Most faults of combinations need two things to meet (Kuhn et al. 2004, "Software fault interactions"), so a sample in which every pair of
values of any two axes occurs finds most of them; further draws look for faults that need three.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import heapify, heappop, heapreplace
from itertools import combinations
from random import Random
from typing import Any

from megalith.check import check
from megalith.prove.parity import LOSS_SCALE, OPTIMIZER, SMALL_MOMENTS, clearly_routed, small_choices
from megalith.schedule.table import SCHEDULES
from megalith.spec.families import read
from megalith.spec.numbers import PRECISIONS, TRAINED, Rounded, is_narrow
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.plan import Plan
from megalith.spec.presets import presets
from megalith.spec.run import RunSpec
from megalith.spec.state import LOWER

MOST_RANKS = 8
LAYERS = 4
SAMPLES = 8
"""Samples of a global batch: a rank's are two microbatches, in a pipeline four, or two for four data ranks; one where gradients are
released."""

PHASES = ({"begin": SAMPLES, "global_batch": 2 * SAMPLES}, {"begin": 3 * SAMPLES, "global_batch": SAMPLES, "seq_len": 24})
"""Each of the three steps is in a different phase."""

UNEVEN = {"interleaved": {"layers": (0, LAYERS // 2, LAYERS // 2, 0)}}
"""Schedules that are drawn with the embedding and the head in stages of their own."""

Axes = Mapping[str, Mapping[str, dict[str, Any]]]

AXES: Axes = {
    "model": {
        "dense": {"preset": "tiny"},
        "experts": {"preset": "mixtral-8x7b"},
        "latent attention, experts, tokens ahead": {"preset": "deepseek-tiny"},
    },
    "shards": {"1": {}, "2": {"data": 2}},
    "copies": {"1": {}, "2": {"replicate": 2}},  # each of so many shards: `run_of` multiplies
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
        **{policy: {"recompute": policy} for policy in ("full", "sqrt")},
    },
    "retain": {
        "kept": {},
        "on the host": {"retain": {"blocks": "host"}},
        "half on disk": {"retain": {"blocks": "disk", "share": 0.5}},
    },
    "state": {
        "on the device": {},
        "half on the host": {"state": {"optimizer": "host", "share": 0.5}},
        "on disk": {"state": {"optimizer": "disk"}},
        "on disk, weights too": {"state": {"optimizer": "disk", "weights": "disk"}},
        "half on the host, weights too": {"state": {"optimizer": "host", "weights": "host", "share": 0.5}},
    },
    "norm": {"known at once": {}, "known late": {"post_validation": True}},
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
    | {"fp8, tokens sent in fp8": {"precision": "fp8", "dispatch": "fp8"}}
    | {"fp8, also gradients of results": {"precision": "fp8", "dispatch": "fp8", "combine_gradients": "fp8"}}
    | {"fp8, inputs kept in fp8": {"precision": "fp8", "kept": "fp8"}}
    | {"fp8, weights gathered in fp8": {"precision": "fp8", "gather": "fp8"}}
    | {"fp8, weights gathered with scales in fp32": {"precision": "fp8", "gather": "fp8", "scale": "fp32"}}
    | {"fp8, delayed scales of tensors": {"precision": "fp8", "granularity": "tensor", "history": 2}}
    | {f"bf16, master {form}": {"precision": "bf16", "master": form} for form in LOWER}
    | {"bf16, also gradients": {"precision": "bf16", "gradients": "bf16"}}
    | {"bf16, gradients released": {"precision": "bf16", "release": True}},
}

PLAIN = ("1", "none", "kept", "known at once", "on the device", "adamw", "fp32", "by the global norm")
"""Values that ask for nothing, which names leave out."""

FIRST = dict.fromkeys(
    ("shards", "copies", "tensor", "context", "pipeline", "expert", "retain", "phases", "moments", "clipping"), 0.5
) | {"precision": 0.9}
"""Probability that an axis keeps its first value without a draw. Without it, hardly any combination would have few enough ranks; and
faults show best in the first precision."""

EFFORT = {"tiny": 1.0, "mixtral-8x7b": 1.2, "deepseek-tiny": 1.5}
"""Relative cost of a step of each model, softened like the cost of ranks."""

Choice = tuple[str, str]  # axis and value
Pair = frozenset[Choice]


@dataclass(frozen=True)
class Draw:
    """One combination and the small run that has it."""

    choices: tuple[Choice, ...]
    spec: RunSpec

    @property
    def name(self) -> str:
        """The choices in words, without the default ones."""
        return "; ".join(value if axis == "model" else f"{axis} {value}" for axis, value in self.choices if value not in PLAIN)

    @property
    def effort(self) -> float:
        """Processor time, softened, so that enough pairs make up for it."""
        return self.spec.plan.ranks**0.5 * EFFORT[self.spec.name]

    @property
    def pairs(self) -> frozenset[Pair]:
        """Pairs of choices that this draw proves to work together. Rounding may hide a fault: a rounded precision proves only its
        own pairs with the other choices."""
        return _pairs(self.choices)


_ROUNDED = frozenset(
    ("precision", name) for name, asked in AXES["precision"].items() if isinstance(PRECISIONS[asked["precision"]].parity, Rounded)
)


@cache
def _pairs(choices: tuple[Choice, ...]) -> frozenset[Pair]:
    pairs = frozenset(map(frozenset, combinations(choices, 2)))
    rounded = _ROUNDED.intersection(choices)
    return frozenset(pair for pair in pairs if rounded & pair) if rounded else pairs


def draw(count: int, seed: int, *, precisions: Sequence[str] = (*AXES["precision"],)) -> list[Draw]:
    """`count` valid combinations on at most MOST_RANKS ranks, none twice, those that show most new pairs for their effort first: all
    pairs that can go together, as far as `count` reaches. The same for the same seed. `precisions`: those to draw from."""
    random = Random(seed)
    axes = {**AXES, "precision": {name: AXES["precision"][name] for name in precisions}}
    pool = _pool(random, max(3000, 8 * count), axes)
    chosen = _cover(pool, count)
    rest = [one for number, one in enumerate(pool) if number not in chosen]
    further = random.sample(rest, max(0, min(len(rest), count - len(chosen))))
    return [pool[number] for number in chosen] + sorted(further, key=lambda one: one.name)


def _cover(pool: list[Draw], count: int) -> list[int]:
    """Choose draws of a pool that show all pairs it has, as far as `count` reaches: each time the one that shows most new pairs for its
    effort.

    That number only falls as others are chosen, so an earlier value is an upper bound, and few draws are examined again (Minoux
    1978).
    """
    left = frozenset[Pair]().union(*(one.pairs for one in pool))
    bounds = [(-len(one.pairs) / one.effort, number) for number, one in enumerate(pool)]
    heapify(bounds)
    chosen: list[int] = []
    while left and len(chosen) < count:
        number = bounds[0][1]
        one = pool[number]
        now = (-len(one.pairs & left) / one.effort, number)
        if now > bounds[0]:
            heapreplace(bounds, now)
            continue
        heappop(bounds)
        chosen.append(number)
        left -= one.pairs
    return chosen


def uncovered(draws: list[Draw]) -> list[tuple[str, str]]:
    """Pairs of choices, in words, that no draw shows."""
    shown = frozenset[Pair]().union(*(one.pairs for one in draws))
    every = (
        frozenset({(axis, value), (other, theirs)})
        for axis, other in combinations(AXES, 2)
        for value in AXES[axis]
        for theirs in AXES[other]
    )
    return [_words(pair) for pair in every if pair not in shown]


def _words(pair: Pair) -> tuple[str, str]:
    first, second = sorted(pair, key=lambda choice: list(AXES).index(choice[0]))
    return f"{first[0]} {first[1]}", f"{second[0]} {second[1]}"


def _pool(random: Random, tries: int, axes: Axes) -> list[Draw]:
    """Return valid combinations among `tries` random ones, and among further ones for each missing pair."""
    found: dict[tuple[Choice, ...], Draw] = {}
    shown: set[Pair] = set()

    def attempt(fixed: Mapping[str, str]) -> bool:
        choices = tuple((axis, fixed.get(axis) or _any(random, axis, axes)) for axis in axes)
        if choices not in found and (spec := legal(choices)) is not None:
            found[choices] = Draw(choices, spec)
            shown.update(found[choices].pairs)
        return choices in found

    for _ in range(tries):
        attempt({})
    for axis, other in combinations(axes, 2):
        for value in axes[axis]:
            for theirs in axes[other]:
                if frozenset({(axis, value), (other, theirs)}) not in shown:
                    any(attempt({axis: value, other: theirs}) for _ in range(100))
    return list(found.values())


def _any(random: Random, axis: str, axes: Axes) -> str:
    """A value of an axis."""
    values = list(axes[axis])
    return values[0] if random.random() < FIRST.get(axis, 0.0) else random.choice(values)


def legal(choices: tuple[Choice, ...]) -> RunSpec | None:
    """The run of a combination, or None where it has too many ranks, `check` refuses it, or its optimizer would amplify the rounding of a
    narrow format."""
    asked = {key: value for axis, name in choices for key, value in AXES[axis][name].items()}
    preset, precision, kind, phases, moments = (
        asked.pop(name, ()) for name in ("preset", "precision", "kind", "phases", "moments")
    )
    narrow = {
        key: asked.pop(key)
        for key in ("granularity", "scale", "history", "dispatch", "combine_gradients", "gather", "kept")
        if key in asked
    }
    summed = asked.pop("gradients", "fp32")
    master = asked.pop("master", "fp32")
    clipping = {name: asked.pop(name) for name in ("adaptive_clip", "qk_clip") if name in asked}
    data = asked.get("data", 1) * asked.get("replicate", 1)
    microbatches = 4 if "pipeline" in asked else 2
    if asked.pop("release", False):  # `check` refuses it in any other place
        asked["state"], microbatches = asked.get("state", {}) | {"release": True}, 1
    plan = Plan.model_validate(asked | {"data": data, "microbatch": max(1, SAMPLES // data // microbatches)})
    if plan.ranks > MOST_RANKS or (OPTIMIZERS[kind].amplifies and precision != "fp32"):
        return None
    optimizer = {"kind": kind, "moments": moments, "master": master} | clipping | (SMALL_MOMENTS if moments != "fp32" else {})
    spec = _run(preset, {"precision": precision, "gradients": summed}, narrow, plan, optimizer, phases)
    return None if any(problem.severity == "error" for problem in check(spec, files=False)) else spec


def _run(
    preset: str,
    numbers: dict[str, str],
    narrow: dict[str, Any],
    plan: Plan,
    optimizer: dict[str, Any],
    phases: Sequence[Mapping[str, int]],
) -> RunSpec:
    precision = numbers["precision"]
    return RunSpec.model_validate(
        {
            "name": preset,
            "model": _small(preset, precision).model_dump(),
            "plan": plan.model_dump(),
            "data": {"path": "none", "phases": phases},
            "precision": small_choices(precision, LAYERS) | narrow if is_narrow(precision) else {},
            "train": {"steps": 3, "global_batch": SAMPLES, "seq_len": 48, **numbers},
            "optimizer": OPTIMIZER | optimizer,
            "loss_scale": {"initial": LOSS_SCALE},
        }
    )


@cache
def _small(preset: str, precision: str) -> Any:
    """The preset's family in sizes that every combination can split: one reference serves all its plans."""
    return clearly_routed(read(presets()[preset].values).small(layers=LAYERS, unit=4, heads_unit=4), precision)


def key_of(spec: RunSpec) -> Any:
    """Return all that a run on one process depends on: the model, the precision, the optimizer, the phases, and the samples of a
    microbatch where balance losses are over these, or if their gradients are compared one by one. Scales that span tokens span
    those
    of one rank's microbatch."""
    rounded = isinstance(PRECISIONS[spec.train.precision].parity, Rounded)
    sequences = spec.plan.set_sequences if rounded or spec.model.build().balances_microbatches else 0
    choices = (spec.precision, spec.plan.microbatch) if is_narrow(spec.train.precision) else None
    return spec.model, spec.train.precision, choices, spec.optimizer, spec.data.phases, sequences

"""The coordinate check: it tests whether a model's outputs, and their changes by an update, keep their size as the model grows
(Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466, appendix D.1). If outputs keep their size, a learning rate tuned on a
small model suits a large one.

Models of several widths, or depths, are trained for a few steps on the same random tokens, in one process and in fp32. After each
step the check takes the root mean square of the output of the first half of the blocks, of the output of all blocks, of the
attention scores, and of the change of the logits since the start. The slope is the change of the logarithm of a root mean square
with the logarithm of the model's size; 0 means that the quantity does not grow.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalith.models.batch import Batch
from megalith.models.core import CausalCore
from megalith.models.init import initialise
from megalith.models.stage import Stage
from megalith.prove.parity import RandomText
from megalith.prove.updates import update_of
from megalith.spec.families import Model
from megalith.spec.families.parametrization import Parametrization
from megalith.spec.run import RunSpec
from megalith.train.batches import Cut, to_batch

Axis = Literal["width", "depth"]
SEQUENCES, LENGTH, VOCAB = 2, 16, 64
"""Sequences, length and vocabulary of the random tokens on which all models are trained. The tokens are few, because an update is
the sum of every token's gradient: with more tokens than a small model's width, the random parts of this sum would hide how the
update grows."""

WIDTHS = ("heads", "kv_heads", "ffn", "expert_ffn", "shared_ffn")
"""The sizes in a family's description that grow with its width. The size of a head stays the same."""
PLACES = ("half way", "last block")
QUANTITIES = (*PLACES, "attention scores", "change of logits")
"""The measured quantities. Outputs are taken after half of the blocks and after all blocks: a block with a fixed number would be
at another relative depth in a deeper model."""


class Series(NamedTuple):
    """One quantity after one step: its root mean square at each size, and the slope."""

    quantity: str
    step: int
    rms: tuple[float, ...]
    slope: float


@dataclass(frozen=True)
class CoordinateCheck:
    """Result of one parametrization along one axis. `sizes`: the widths, or the numbers of blocks, of the models."""

    parametrization: Parametrization
    axis: Axis
    sizes: tuple[int, ...]
    series: tuple[Series, ...]

    @property
    def worst(self) -> Series:
        """The series with the steepest slope."""
        return max(self.series, key=lambda one: abs(one.slope))

    def to_json(self, limit: float) -> dict[str, Any]:
        """Return all values for JSON; "flat" is True if no slope is steeper than `limit`."""
        series = [{**one._asdict(), "slope": one.slope if np.isfinite(one.slope) else None} for one in self.series]
        named = {"parametrization": self.parametrization, "axis": self.axis, "sizes": list(self.sizes)}
        return {**named, "flat": abs(self.worst.slope) <= limit, "worst": self.worst.quantity, "series": series}

    def steepest(self, quantity: str) -> Series:
        """Return the series of one quantity at the step where its slope is steepest."""
        return max((one for one in self.series if one.quantity == quantity), key=lambda one: abs(one.slope))


def sized(model: Model, axis: Axis, size: int, base: int, parametrization: Parametrization) -> Model:
    """Return the model with another width or number of blocks, parametrized from `base` (a width or a number of blocks).

    Raises ValueError if a width does not hold a whole number of heads.
    """
    changes: dict[str, Any] = {"parametrization": parametrization}
    changes |= {"base_dim": None, "base_layers": None}
    if parametrization != "standard":
        changes |= {"base_dim": base if axis == "width" else model.dim}
        changes |= {"base_layers": base if axis == "depth" else model.layers} if parametrization == "completep" else {}
    changes |= {"layers": size} if axis == "depth" else _widened(model, size)
    return model.model_copy(update=changes)


def _widened(model: Model, dim: int) -> dict[str, Any]:
    head_dim = getattr(model, "head_dim", None) or model.dim // model.heads
    found: dict[str, Any] = {"dim": dim}
    for name in WIDTHS:
        usual = getattr(model, name, None)
        if usual is not None:
            found[name] = max(1, round(usual * dim / model.dim))
    if dim % head_dim or model.heads * dim % model.dim:
        raise ValueError(
            f"a width of {dim} does not hold a whole number of heads of size {head_dim}: use multiples of "
            f"{np.lcm(head_dim, model.dim // np.gcd(model.dim, model.heads))}"
        )
    kv = found.get("kv_heads")
    if kv is not None and found["heads"] % kv:
        raise ValueError(
            f"a width of {dim} gives {found['heads']} query heads and {kv} key heads; the query heads cannot be "
            f"divided evenly among the key heads"
        )
    return found


def check(
    spec: RunSpec,
    *,
    axis: Axis,
    sizes: Sequence[int],
    parametrization: Parametrization,
    steps: int,
    seeds: Sequence[int],
    on_start: Callable[[int, int], None] = lambda size, seed: None,
) -> CoordinateCheck:
    """Train a model of every size with every seed, and return the slopes. `on_start` is called before each training. The base of
    the parametrization is the smallest size, unless the run names another base. Raises ValueError if a size is impossible."""
    model = spec.model
    named = model.base_dim if axis == "width" else model.base_layers
    base = named or min(sizes)
    small = model.model_copy(update={"vocab": VOCAB, "context": max(LENGTH, 64)})
    models = {size: sized(small, axis, size, base, parametrization) for size in sizes}  # all problems before any work
    found: dict[tuple[str, int], list[float]] = {(name, step): [] for step in range(1, steps + 1) for name in QUANTITIES}
    for size, one in models.items():
        runs = []
        for seed in seeds:
            on_start(size, seed)
            runs.append(measure(spec, one, steps=steps, seed=seed))
        for key, values in found.items():
            values.append(fmean(run[key] for run in runs))
    logs = np.log2(np.array(sizes, dtype=np.float64))
    series = [Series(*key, tuple(values), _slope(logs, values)) for key, values in found.items()]
    return CoordinateCheck(parametrization, axis, tuple(sizes), tuple(series))


def _slope(logs: np.ndarray, values: Sequence[float]) -> float:
    if not np.isfinite(values).all() or min(values) <= 0:
        return float("inf")
    return float(np.polyfit(logs, np.log2(np.array(values)), 1)[0])


def measure(spec: RunSpec, model: Model, *, steps: int, seed: int) -> dict[tuple[str, int], float]:
    """Train one model for `steps` steps; return the root mean square of each quantity after each step."""
    torch.manual_seed(seed)
    parts, stage = model.build(), Stage(model.build())
    for name, part in stage.parts():
        initialise(part, name=name, spec=parts, seed=seed)
    batch = _batch(spec, model, seed)
    parameters = stage.parameters_by_name()
    advance = update_of(parameters, spec.optimizer, parts)
    found: dict[tuple[str, int], float] = {}
    first: Tensor | None = None
    for step in range(steps + 1):
        with _watched(stage) as seen, torch.no_grad():
            logits = stage(batch.tokens, replace(batch, targets=None))
        first = logits.clone() if first is None else first
        if step:
            found |= {(name, step): value for name, value in seen.items()}
            found["change of logits", step] = _rms(logits - first)
        if step == steps:
            break
        stage(batch.tokens, batch).objective.backward()
        advance(step, spec.optimizer.lr)
        for parameter in parameters.values():
            parameter.grad = None
    return found


def _batch(spec: RunSpec, model: Model, seed: int) -> Batch:
    train = spec.train.model_copy(update={"seq_len": LENGTH, "seed": seed, "global_batch": SEQUENCES})
    text = RandomText(spec.model_copy(update={"model": model, "train": train}))
    samples = text.batch(range(SEQUENCES))
    valid = int((samples.targets >= 0).sum())
    cut = Cut(spec.data.document_mask, 0)
    return to_batch(samples, cut, device=torch.device("cpu"), loss_scale=1 / valid, sequences=SEQUENCES)


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


@contextmanager
def _watched(stage: Stage) -> Iterator[dict[str, float]]:
    """Set hooks that take the root mean square of block outputs, and of the attention scores of all blocks together."""
    seen: dict[str, float] = {}
    scores: list[float] = []
    blocks = list(stage.blocks.values())

    def block(name: str, module: Any, given: Any, out: Tensor) -> None:
        seen[name] = _rms(out)

    def core(module: CausalCore, given: tuple[Tensor, ...]) -> None:
        q, k = given[0], given[1]
        k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
        scores.append(_rms(torch.einsum("bqhc,bkhc->bhqk", q, k) * module.scale_of(q)))

    places: Mapping[str, int] = dict(zip(PLACES, (max(0, len(blocks) // 2 - 1), len(blocks) - 1), strict=True))
    hooks = [blocks[at].register_forward_hook(partial(block, name)) for name, at in places.items()]
    hooks += [module.register_forward_pre_hook(core) for module in stage.modules() if isinstance(module, CausalCore)]
    try:
        yield seen
        seen["attention scores"] = fmean(value**2 for value in scores) ** 0.5
    finally:
        for hook in hooks:
            hook.remove()

"""Time that 8-bit products save or cost in each layer of a run on its devices, from shapes and the calibration. No torch."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from megalith.check.case import Case
from megalith.check.narrow import on_a_rank
from megalith.cost.constants import calibration
from megalith.cost.narrow.ways import Ways
from megalith.cost.profile import PHASES, Phase, Product
from megalith.cost.software import OURS, software_profile_of
from megalith.cost.time import Setting, multiplying, rounding, router_of
from megalith.cost.workload import EXPERTS, Workload, computed
from megalith.spec.cluster import ClusterSpec
from megalith.spec.numbers import PrecisionSpec
from megalith.spec.run import RunSpec
from megalith.spec.sizes import layer_of, multiplied


@dataclass(frozen=True)
class Layer:
    """Seconds of the three products of a layer's weights (forward, input and weight gradients), for one microbatch on one
    rank."""

    name: str
    """The layer's name within a block: `attention.q`."""
    blocks: tuple[int, ...]
    """Numbers of the blocks with this layer."""
    tokens: int
    shape: tuple[int, int]
    """Numbers of outputs and inputs on a rank; for experts, the numbers of each expert."""
    experts: int
    """Number of experts on a rank; 0: not a layer of experts."""
    wide: float
    """Seconds of the products in the wide format."""
    products: float
    """Seconds of the narrow products, without the rounding of their factors."""
    rounding: float
    """Seconds of the rounding."""
    kernels: int
    """Number of kernels that the rounding launches."""
    codes: bool
    """True if 8-bit codes are multiplied; otherwise rounded factors are multiplied in bf16 or fp32."""

    @property
    def module(self) -> str:
        """The name of the layer's module within a block; all weights of the experts are one module."""
        return EXPERTS if self.experts else self.name

    @property
    def seconds(self) -> float:
        """Seconds of the layer in the narrow format."""
        return self.products + self.rounding

    @property
    def gain(self) -> float:
        """Time of the wide products divided by the time of the narrow products; above 1, narrow products pay."""
        return self.wide / self.seconds

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "shape": list(self.shape), "blocks": list(self.blocks), "gain": self.gain}


def pays(spec: RunSpec, cluster: ClusterSpec, choices: PrecisionSpec, *, precision: str = "fp8") -> tuple[Layer, ...]:
    """Predict the time of a run's layers with wide and with narrow products, for a narrow precision with these choices on a cluster's
    devices; returns one Layer for each name and shape. Layers that stay wide by name (`choices.wide`) are included; first and last blocks
    that stay wide are not."""
    case, plan, train = Case(spec, None, files=False), spec.plan, spec.train
    model = spec.model.build()
    format, narrow = computed(precision, choices.model_copy(update={"wide": ()}))
    assert narrow is not None, precision
    load = Workload(
        model, plan, cluster, train.seq_len, train.global_batch, format, software_profile_of(OURS, plan), narrow=narrow
    )
    setting = Setting.of(load, calibration())
    bare = Ways.on(cluster.accelerator, narrow, format, ranks=plan.tensor * plan.context)
    blocks = dict[tuple[str, tuple[int, ...]], list[int]]()
    for number, (block, layers) in enumerate(zip(model.blocks, load.narrow_layers, strict=True)):
        for weight in multiplied(block, model.dim):
            if (layer := layer_of(weight)) in layers:
                name = weight.name if weight.role == "experts" else layer
                blocks.setdefault((name, on_a_rank(weight, block, case)), []).append(number)
    tokens = plan.microbatch * train.seq_len // plan.context
    return tuple(_layer(name, shape, tuple(numbers), tokens, setting, bare) for (name, shape), numbers in blocks.items())


def _layer(name: str, shape: tuple[int, ...], blocks: tuple[int, ...], tokens: int, setting: Setting, bare: Ways) -> Layer:
    """Predict the products of a layer whose weight has this shape on a rank."""
    *experts, outputs, inputs = shape
    count, plan = (experts[0] if experts else 1), setting.workload.plan
    if experts:  # each token goes to some experts; they come from the ranks that share the experts out, and are as many in all
        router = router_of(setting.workload)
        assert router is not None
        tokens = max(1, tokens * router.active // plan.tensor * plan.expert // (count * plan.expert))
    sizes: dict[Phase, tuple[int, int, int]] = {
        "F": (tokens, inputs, outputs),
        "I": (tokens, outputs, inputs),
        "W": (outputs, tokens, inputs),
    }
    products = [Product(phase, *sizes[phase], count=count, expert=bool(experts)) for phase in PHASES]
    ways = bare.alone(outputs, inputs)
    return Layer(
        name, blocks, tokens, (outputs, inputs), experts[0] if experts else 0,
        multiplying(products, setting, ways.wide, None), multiplying(products, setting, ways.wide, ways),
        rounding(products, setting, ways), round(sum(one.kernels for one in ways.roundings(products))),
        all(map(ways.multiplies_codes, products)),
    )  # fmt: skip


def losers(layers: Iterable[Layer]) -> tuple[str, ...]:
    """Return the layers that narrow products make slower, as patterns for `precision.wide`. A block's experts are one layer."""
    seconds, everywhere = defaultdict[tuple[str, int], float](float), defaultdict[str, set[int]](set)
    for layer in layers:
        everywhere[layer.module].update(layer.blocks)
        for block in layer.blocks:
            seconds[layer.module, block] += layer.seconds - layer.wide
    found = list[str]()
    for name, blocks in everywhere.items():
        lost = [block for block in sorted(blocks) if seconds[name, block] >= 0]
        found += [f"*.{name}"] if len(lost) == len(blocks) else [f"blocks.{block}.{name}" for block in lost]
    return tuple(found)


def gained(layers: Iterable[Layer], wide: Iterable[str] = ()) -> float:
    """Return the seconds per microbatch that narrow products save in these layers, except layers whose names match `wide`."""
    wide = tuple(wide)
    return sum(
        layer.wide - layer.seconds
        for layer in layers
        for block in layer.blocks
        if not any(fnmatchcase(f"blocks.{block}.{layer.module}", pattern) for pattern in wide)
    )

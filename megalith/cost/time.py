"""Seconds of one part's forward and backward on one rank, from its profile. No torch."""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

from megalith.cost import network
from megalith.cost.constants import Calibration, Device, SoftwareOverheads
from megalith.cost.narrow.ways import Ways
from megalith.cost.network import Line, Wires
from megalith.cost.profile import AMONG_EXPERTS, Collective, Core, Phase, Product, Profile
from megalith.cost.workload import SoftwareProfile, Workload
from megalith.spec.cluster import Accelerator
from megalith.spec.model import MoeSpec, RouterSpec
from megalith.spec.numbers import BF16, PRECISIONS

TILE = (128, 128)
"""Rows and columns of the tile of a product that one processor computes at a time, in usual large kernels."""

FLASH = {1: 0.5, 2: 1.0}
"""Efficiency of each generation of fused attention, relative to the second generation."""

GPUS = ("NVIDIA", "AMD")
"""Vendors of devices with compiled kernels of fused attention."""

CHANNELS = (32, 64, 96, 128, 192, 256)
"""Channels of a head for which fused attention is compiled on GPUs (FlashAttention, csrc/flash_attn/src/static_switch.h)."""

CONVERSION = {"none": 0.0, "tensor": 6.0, "block": 4.0}
"""Bytes moved to convert one number of a factor, by the unit that shares a scale. With one scale per tensor, a number is read twice: for
the maximum, and for the conversion; with blocks, a number is read once. The converted number is written twice: for products along rows,
and for products along columns."""

UNFUSED = 72 - 31
"""Number of kernels that fusing a router's arithmetic saves (Megatron-LM, docs/discussions/deepseek-v3-gb200-optimization,
2.1.4)."""


@dataclass(frozen=True)
class SpentSeconds:
    """Seconds of one phase, by purpose. For collectives: the exposed seconds."""

    products: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    host: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    expert: float = 0.0

    @property
    def total(self) -> float:
        return self.products + self.attention + self.memory + self.host + self.tensor + self.context + self.expert

    def __add__(self, other: "SpentSeconds") -> "SpentSeconds":
        return SpentSeconds(
            self.products + other.products, self.attention + other.attention, self.memory + other.memory, self.host + other.host,
            self.tensor + other.tensor, self.context + other.context, self.expert + other.expert,
        )  # fmt: skip

    def __mul__(self, factor: float) -> "SpentSeconds":
        return SpentSeconds(
            factor * self.products, factor * self.attention, factor * self.memory, factor * self.host,
            factor * self.tensor, factor * self.context, factor * self.expert,
        )  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A workload with the calibrated figures that apply to it."""

    workload: Workload
    accelerator: Accelerator
    device: Device
    overheads: SoftwareOverheads
    slower: float
    """Launch time of the device's host, relative to an x86 host."""
    wires: Wires

    @classmethod
    def of(cls, workload: Workload, calibration: Calibration) -> "Setting":
        cluster = workload.cluster
        accelerator, device = cluster.accelerator, calibration.device_of(cluster).without(workload.software_profile.senders)
        return cls(
            workload,
            accelerator,
            device,
            calibration.overheads_of(workload.software_profile.overheads, cluster, ours=workload.software_profile.ours),
            1.0 if cluster.measured and workload.software_profile.ours else calibration.slower(accelerator),
            Wires.of(cluster, device),
        )

    @property
    def in_turn(self) -> bool:
        """True if the processor that launches an operation also computes it."""
        return self.workload.cluster.measured is not None and self.workload.cluster.measured.in_turn

    @property
    def bandwidth(self) -> float:
        """Bytes/s that element-wise kernels achieve."""
        assert self.accelerator.memory_bandwidth is not None, self.accelerator.name
        return self.accelerator.memory_bandwidth * self.device.memory


def product_seconds(product: Product, setting: Setting, format: str, *, rate: float = 1.0) -> float:
    """Return the seconds of one product: the longer of the time for its arithmetic, at the rate that its shape allows, and the time for
    its bytes. `rate`: rate of large products, relative to the device's usual rate.

    The last wave of tiles leaves processors idle, and a short inner dimension does not fill their pipelines; filling takes a
    constant time, so a faster format needs a longer inner dimension.
    """
    device, accelerator = setting.device, setting.accelerator
    factors = PRECISIONS[format].factors if product.weight else BF16
    peak = accelerator.peak.get(factors.rate) or accelerator.wide
    share = {4: device.quarter, 8: device.narrow}.get(factors.bits, device.wide)
    tiles = ceil(product.rows / TILE[0]) * ceil(product.columns / TILE[1]) * product.count
    filled = tiles / (tiles + device.idle * device.units)
    partial = min(1.0, product.rows / TILE[0]) * min(
        1.0, product.columns / TILE[1]
    )  # a tile that is not full costs as one that is
    ramp = product.inner / (product.inner + device.ramp * peak / accelerator.wide)
    flops = 2.0 * product.rows * product.inner * product.columns * product.count
    numbers = product.rows * product.inner + product.inner * product.columns
    moved = product.count * (factors.width * numbers + 2 * product.rows * product.columns)
    seconds = max(flops / (peak * share * rate * filled * partial**0.5 * ramp), moved / setting.bandwidth)
    return product.times * max(seconds, setting.device.gap)


def _converted(products: list[Product], format: str, phase: Phase) -> list[tuple[Product, int]]:
    """Return the conversions to a narrow format: for each converted factor, a product that reads it, and the number of conversions.
    One conversion of an activation serves all its products in forward and for weight gradients; every gradient needs a conversion of
    its own."""
    if PRECISIONS[format].factors.scale == "none" or phase == "W":
        return []
    weighted = [product for product in products if product.weight]
    if phase == "F":
        return [(product, 1) for product in {(p.rows, p.inner, p.count): p for p in weighted}.values()]
    return [(product, product.times) for product in weighted]


def multiplying(products: list[Product], setting: Setting, format: str, ways: Ways | None) -> float:
    """Return the seconds of products. `ways`: how Megalith's trainer computes the products of a block with narrow layers; None for other
    blocks and software."""
    if ways is None:
        return sum(product_seconds(product, setting, format) for product in products)
    each = ways.computed(products)
    return sum(one.share * product_seconds(one.product, setting, one.format, rate=one.rate) for one in each)


def quantising(products: list[Product], setting: Setting, format: str, phase: Phase) -> float:
    """Return the seconds to convert activations and gradients to the products' format."""
    numbers = sum(p.rows * p.inner * p.count * times for p, times in _converted(products, format, phase))
    return CONVERSION[PRECISIONS[format].factors.scale] * numbers / setting.bandwidth


def rounding(products: list[Product], setting: Setting, ways: Ways) -> float:
    """Return the seconds in which Megalith's trainer rounds factors of narrow products, including the exchange of maxima
    between ranks."""
    each = list(ways.roundings(products))
    moved = setting.overheads.passes * sum(one.numbers * one.bytes for one in each) / setting.bandwidth
    return moved + sum(one.kernels * setting.device.gap * 0.5 + one.messages * setting.device.latency for one in each)


def core_seconds(core: Core, setting: Setting) -> float:
    """Return the seconds of one fused attention. Half of the scores are masked, and some kernels skip them."""
    device, software_profile = setting.device, setting.workload.software_profile
    share = device.attention_forward if core.forward else device.attention_backward
    core = _compiled(core, ours=software_profile.ours) if setting.accelerator.vendor in GPUS else core
    return core_flops(core, causal_half=software_profile.causal_half) / (
        setting.accelerator.wide * share * FLASH[software_profile.flash]
    )


def _compiled(core: Core, *, ours: bool) -> Core:
    """Return the attention that a GPU computes: head sizes are padded to the next compiled size. Megalith's trainer also pads
    values to the channels of keys."""
    values = max(core.qk_dim, core.v_dim) if ours else core.v_dim
    qk, v = (next((size for size in CHANNELS if size >= channels), channels) for channels in (core.qk_dim, values))
    return replace(core, qk_dim=qk, v_dim=v)


def core_flops(core: Core, *, causal_half: bool = True) -> float:
    """Return the equivalent FLOPs at a kernel's full rate. The equivalent FLOPs exceed the real FLOPs, because blocks on the diagonal are
    computed whole and short sequences occupy few processors."""
    return core.flops * (0.5 if causal_half else 1.0) * (core.queries + 256) / core.queries


def line(axis: str, workload: Workload) -> Line:
    """The ranks of an axis, in the numbering of `mesh.py`."""
    plan = workload.plan
    return _lines(plan.tensor, plan.ulysses, plan.context, plan.data, plan.pipeline, plan.expert, plan.expert_tensor)[axis]


@lru_cache(1 << 14)
def _lines(tensor: int, ulysses: int, context: int, data: int, pipeline: int, expert: int, expert_tensor: int) -> dict[str, Line]:
    experts = expert * expert_tensor
    return {
        "tensor": Line(tensor, 1),
        "ulysses": Line(ulysses, tensor),
        "context": Line(context // ulysses, tensor * ulysses),
        "data": Line(data, tensor * context),
        "pipeline": Line(pipeline, tensor * context * data),
        "expert": Line(expert, expert_tensor),
        "expert_tensor": Line(expert_tensor, 1),
        "dp": Line(data * context, tensor),
        "expert_dp": Line(max(1, data * context * tensor // experts), experts),
    }


def exchange_seconds(exchange: Collective, setting: Setting, router: RouterSpec | None) -> float:
    """Seconds of one collective, without contention."""
    where, wires = line(_way(exchange), setting.workload), setting.wires
    if exchange.kind == "sum":
        once = network.reduce(exchange.size, where, wires)
    elif exchange.kind == "all_to_all":
        spread = _spread(setting, router) if exchange.axis == "expert" else {}
        once = network.all_to_all(exchange.size, where, wires, **spread)
    elif exchange.kind == "ring":
        once = (where.size - 1) * network.message(exchange.size, where, wires)
    else:
        once = network.gather(exchange.size, where, wires)
    return exchange.times * once


def _way(exchange: Collective) -> str:
    """Return the axis of an exchange. An all-to-all of context ranks is on the axis of Ulysses."""
    return "ulysses" if exchange.axis == "context" and exchange.kind == "all_to_all" else exchange.axis


def _spread(setting: Setting, router: RouterSpec | None) -> dict[str, Any]:
    """Return the arguments of `all_to_all`: the number of copies of a token, and the number of domains that they may reach."""
    if router is None or not setting.workload.software_profile.deduplicated:
        return {}
    return {"copies": router.active, "reach": router.active_groups if router.groups > 1 else None}


def spend(
    profile: Profile,
    phases: tuple[Phase, ...],
    setting: Setting,
    *,
    format: str,
    router: RouterSpec | None = None,
    ways: Ways | None = None,
) -> SpentSeconds:
    """Return the seconds of successive phases of a part. `ways`: how the part's products are computed if some of its layers are narrow."""
    device = SpentSeconds()
    for phase in phases:
        device = device + _on_device(profile, phase, setting, format, router, ways)
    return replace(device, host=_lag(profile, phases, setting, device.total, format, router, ways))


def _lag(
    profile: Profile,
    phases: tuple[Phase, ...],
    setting: Setting,
    device: float,
    format: str,
    router: RouterSpec | None,
    ways: Ways | None,
) -> float:
    """Return the seconds that the device waits for the host. The host works ahead, so only the slower of host and device counts.

    In the forward of a layer of experts, the host cannot work ahead: it waits until the device knows how many tokens arrived, and only
    then launches the experts' kernels. In forward, earlier work of the device does not hide the launches of the experts' kernels. Backward
    reuses the numbers of tokens from forward.
    """
    software_profile = setting.workload.software_profile
    around, inside = (setting.slower * seconds for seconds in _started(profile, phases, setting, format, ways))
    if setting.in_turn:
        return around + inside
    behind = around + inside - device
    ahead = (
        not software_profile.waits or software_profile.graphs == "whole" or software_profile.overlap_expert
    )  # another microbatch's work is there
    if not profile.expert_weights or "F" not in phases or ahead:
        return max(0.0, behind)
    mine = replace(profile, products=tuple(p for p in profile.products if p.expert), cores=(), moved=profile.apart_moved,
                   kernels=profile.apart, exchanges=tuple(e for e in profile.exchanges if e.axis in AMONG_EXPERTS))  # fmt: skip
    experts = _on_device(mine, "F", setting, format, router, ways).total
    return setting.overheads.routing + max(0.0, inside - experts, behind)


def _on_device(
    profile: Profile, phase: Phase, setting: Setting, format: str, router: RouterSpec | None, ways: Ways | None
) -> SpentSeconds:
    software_profile, overheads = setting.workload.software_profile, setting.overheads
    gathered = setting.workload.plan.context_method == "gather"
    mine = [product for product in profile.products if product.phase == phase]
    attention = sum(core_seconds(core, setting) for core in profile.cores if core.phase == phase)
    added = _added(profile, setting) if phase == "W" else _NOTHING
    moved = profile.moved[phase] + _sorted(profile, phase, software_profile) + added.moved
    passing = moved / setting.bandwidth + (quantising(mine, setting, format, phase) if ways is None else 0.0)
    rounded = rounding(mine, setting, ways) if ways is not None else 0.0
    waits: dict[str, float] = dict.fromkeys(("tensor", "context", "ulysses", "expert", "expert_tensor"), 0.0)
    for exchange in profile.exchanges:
        if exchange.phase == phase:
            waits[_way(exchange)] += exchange_seconds(exchange, setting, router)
    return SpentSeconds(
        products=multiplying(mine, setting, format, ways),
        attention=attention,
        memory=overheads.passes * passing + (profile.kernels[phase] + added.kernels) * setting.device.gap * 0.5 + rounded,
        tensor=waits["tensor"] * (overheads.tensor_exposed if software_profile.overlap_tensor else 1.0),
        # keys and values on their way around a ring hide behind attention with those that are there; gathered or dealt out by heads, they
        # come first
        context=waits["ulysses"] + (waits["context"] if gathered else max(waits["context"] - attention, 0.1 * waits["context"])),
        expert=(waits["expert"] + waits["expert_tensor"])
        * overheads.expert_exposed
        * (0.3 if software_profile.overlap_expert else 1.0),
    )


class _Added(NamedTuple):
    """The sums of gradients over microbatches: bytes moved and kernels, for each microbatch of a step."""

    moved: float
    kernels: float


_NOTHING = _Added(0.0, 0.0)


def _added(profile: Profile, setting: Setting) -> _Added:
    """Return what it takes to add the gradients of a microbatch to the sums, in a kernel for each weight: of each number the gradient and
    the sum are read, and the sum is written. Gradients of a step's only microbatch are not added, but copied if sums have another format.
    Under ZeRO 2 and 3 the sums are shards, which are not counted, but Megalith copies whole gradients before it reduces them."""
    workload, software_profile = setting.workload, setting.workload.software_profile
    sums, whole = workload.gradient_bytes, workload.plan.zero < 2
    if not software_profile.adds_gradients or not (whole or software_profile.ours):
        return _NOTHING
    numbers, again = profile.weights + profile.expert_weights, whole and workload.microbatches > 1
    if workload.width == sums:
        return _Added(numbers * 3 * sums, profile.tensors) if again else _NOTHING
    return _Added(numbers * (workload.width + sums * (2 if again else 1)), profile.tensors)


def _sorted(profile: Profile, phase: Phase, software_profile: SoftwareProfile) -> float:
    """Return the bytes moved to sort rows by expert after a plain all-to-all, which delivers them by sender, and to restore
    their order."""
    if software_profile.deduplicated or not any(product.expert and product.count > 1 for product in profile.products):
        return 0.0
    sent = (exchange for exchange in profile.exchanges if exchange.phase == phase and exchange.axis == "expert")
    return sum(2 * exchange.size * exchange.times for exchange in sent)


def _started(
    profile: Profile, phases: tuple[Phase, ...], setting: Setting, format: str, ways: Ways | None = None
) -> tuple[float, float]:
    """Return the seconds in which an x86 host launches operations one by one: outside of dispatch and combine, and between
    them. A loop over experts counts as one operation that launches further kernels."""
    software_profile, overheads = setting.workload.software_profile, setting.overheads
    if software_profile.graphs == "whole":
        return 0.0, 0.0
    around, inside = _Starts(), _Starts()
    for phase in phases:
        kept = software_profile.graphs == "router"  # its operations are in a recorded graph
        around.operations += profile.kernels[phase] - profile.apart[phase] - profile.routed[phase] * kept
        around.operations += _added(profile, setting).kernels if phase == "W" else 0
        around.launches += 0 if kept or software_profile.router == "fused" else _unfused(profile, phase)
        inside.operations += profile.apart[phase]
        for exchange in (exchange for exchange in profile.exchanges if exchange.phase == phase):
            (inside if exchange.axis in AMONG_EXPERTS else around).operations += exchange.times
        mine = [product for product in profile.products if product.phase == phase]
        for product in mine:
            inside.launches += product.times * (product.count - 1) * (product.expert and not software_profile.grouped)
        for one in ways.roundings(mine) if ways is not None else ():
            (inside if one.product.expert else around).operations += one.kernels + one.messages
        for product, times in _converted(mine, format, phase):
            here = inside if product.expert else around
            here.operations += times
            here.launches += times * (product.count - 1) * (product.expert and not software_profile.grouped)
            here.launches += times * product.count * software_profile.quantise_kernels
    before = 0.0 if software_profile.graphs == "parts" else around.seconds(overheads)
    return before, inside.seconds(overheads)


@dataclass
class _Starts:
    """Launches by a host: operations, and further kernels of these operations."""

    operations: float = 0
    launches: float = 0

    def seconds(self, overheads: SoftwareOverheads) -> float:
        return self.operations * overheads.host + self.launches * overheads.launch


def _unfused(profile: Profile, phase: Phase) -> int:
    """Number of kernels that a router made of torch's operations launches in addition to the kernels of a fused router: UNFUSED (72 - 31)
    in forward; in backward, in proportion to the traced router's kernels."""
    return round(UNFUSED * profile.routed[phase] / profile.routed["F"]) if profile.routed["F"] else 0


def router_of(workload: Workload) -> RouterSpec | None:
    """The router of the model's experts; None in a dense model."""
    return next((block.mlp.router for block in reversed(workload.model.blocks) if isinstance(block.mlp, MoeSpec)), None)

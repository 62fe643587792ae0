"""Measures this machine for predictions of a step: rates of products, attention, memory and collectives, written as a cluster file.

Ranks share processors, memory and links. All ranks therefore measure at once, as they would compute at once in a run.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalith.cost.network import Line, Wires, gather, reduce
from megalith.cost.profile import Core, Layout, Phase
from megalith.cost.time import core_flops
from megalith.cost.trace import trace_block
from megalith.machine import capacity
from megalith.machine.describe import processor
from megalith.models.batch import Batch
from megalith.models.core import attend
from megalith.models.stage import Stage
from megalith.prove import worlds
from megalith.spec.cluster import Accelerator, ClusterSpec, Measured, catalogue, find
from megalith.spec.families.llama import Llama
from megalith.spec.toml import key, literal
from megalith.train.run import choose_device

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LITTLE = Llama(layers=1, dim=16, heads=2, kv_heads=1, ffn=32, vocab=8, context=8)
"""A model so small that its operations take no longer than their launch."""
TRIES = 3
"""Minimum number of repetitions."""


class Sizes(NamedTuple):
    """Sizes of the measured operations for a kind of device, so large that rates would not grow with larger sizes."""

    product: int
    """Rows and columns of the product's result, and its largest inner size."""
    inner: tuple[int, ...]
    """Shorter inner sizes."""
    memory: int
    """Bytes of each of the three tensors of an addition, which measures memory bandwidth."""
    attention: tuple[int, int, int]
    """Tokens, heads and channels of attention."""
    collective: tuple[int, ...]
    """Bytes of the tensors that collectives transfer, in rising order."""


SIZES: Mapping[str, Sizes] = {
    "cpu": Sizes(1024, (64, 128, 256, 512), 32 << 20, (1024, 8, 64), (4 << 10, 256 << 10, 4 << 20, 32 << 20)),
    "cuda": Sizes(8192, (512, 1024, 2048, 4096), 1 << 30, (8192, 16, 128), (64 << 10, 4 << 20, 64 << 20, 512 << 20)),
}


class Point(NamedTuple):
    """One measurement: the seconds that an operation `kind` takes at a size; `of` is its format or number of ranks."""

    kind: str
    of: str
    size: int
    seconds: float


@dataclass(frozen=True)
class CalibrationResult:
    """A measured machine: its cluster, and the measurements from which the cluster's figures were computed."""

    cluster: ClusterSpec
    points: tuple[Point, ...]

    def to_json(self) -> dict[str, Any]:
        """Return cluster and points as a JSON object."""
        return {"cluster": self.cluster.model_dump(mode="json"), "points": [point._asdict() for point in self.points]}


def calibrate(ranks: int, *, seconds: float, wanted: str = "auto", sizes: Sizes | None = None) -> CalibrationResult:
    """Measure this machine with `ranks` processes at work: over NCCL if there is a GPU for each, else over gloo on the processor.

    Each of about thirty measurements is repeated for `seconds`. On the processor each rank computes with its share of the
    processors as threads, as a run's ranks do. The ranks are forked from this process, which must not have used a GPU or more
    than one thread of torch. Raises RuntimeError if a rank fails, TimeoutError if a rank takes far longer than expected.
    """
    found = worlds.run_ranks(_measure, ranks, wanted, ranks, seconds, sizes, timeout=300 + 60 * seconds)
    name, threads, _ = found[0]
    points = tuple(
        same[0]._replace(seconds=statistics.median(point.seconds for point in same))
        for same in zip(*(one for *_, one in found), strict=True)
    )
    sizes = sizes or SIZES["cpu" if name == "cpu" else "cuda"]
    return CalibrationResult(cluster_of(name, points, ranks=ranks, threads=threads, sizes=sizes), points)


def _measure(rank: int, wanted: str, ranks: int, seconds: float, sizes: Sizes | None) -> tuple[str, int, list[Point]]:
    """Measure on one of the ranks, which all call this function. Return the name of its device, its threads, and the points, in the same
    order on each rank."""
    device, group = choose_device(wanted, rank, ranks), dist.group.WORLD
    if device.type == "cuda":
        group = dist.new_group(list(range(ranks)), backend="nccl", device_id=device)
    else:
        torch.set_num_threads(max(1, capacity.processors() // ranks))
    assert isinstance(group, dist.ProcessGroup)
    sizes = sizes or SIZES[device.type]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = [Point(kind, of, size, _timed(work, device, seconds, group)) for kind, of, size, work in _alone(device, name, sizes)]
    return name, torch.get_num_threads(), found + _collectives(device, sizes, seconds, ranks)


def _alone(device: torch.device, name: str, sizes: Sizes) -> Sequence[tuple[str, str, int, Callable[[], Any]]]:
    """Return the measurements without communication, which all ranks make at the same time: kind, format, size, and the function
    to time."""

    def product(dtype: torch.dtype, inner: int) -> Callable[[], Any]:
        left = torch.randn(sizes.product, inner, device=device).to(dtype)
        right = torch.randn(inner, sizes.product, device=device).to(dtype)
        return lambda: left @ right

    def addition() -> Callable[[], Any]:
        one, other, out = (torch.ones(sizes.memory // 4, device=device) for _ in range(3))
        return lambda: torch.add(one, other, out=out)

    tokens, heads, channels = sizes.attention
    dtype = DTYPES[_main(name)]
    q, k, v = (torch.randn(1, heads, tokens, channels, device=device).to(dtype).requires_grad_() for _ in range(3))

    def both() -> None:
        torch.autograd.grad(attend(q, k, v).sum(), (q, k, v))

    @torch.no_grad()
    def forward() -> None:
        attend(q, k, v)

    products = [
        ("product", format, inner, product(DTYPES[format], inner))
        for format in ("fp32", _half(name)) for inner in (*sizes.inner, sizes.product)
    ]  # fmt: skip
    attention = [("attention", way, tokens, work) for way, work in (("forward", forward), ("both", both))]
    return [*products, *attention, ("addition", "fp32", sizes.memory, addition()), _starts(device, dtype)]


def _starts(device: torch.device, dtype: torch.dtype) -> tuple[str, str, int, Callable[[], Any]]:
    """Return the measurement of a block's forward and backward that compute almost nothing, so that their time is the time to
    launch operations, including the Python code. The measurement's size is the number of operations."""
    layout = Layout(microbatch=1, seq_len=LITTLE.context, fused=False, width=dtype.itemsize)
    operations = sum(trace_block(LITTLE.build(), 0, layout).kernels.values())
    stage = Stage(LITTLE.build(), 1, 2).to(device, dtype)
    tokens = torch.zeros(1, LITTLE.context, dtype=torch.long, device=device)
    batch, block = stage.prepare(Batch(tokens, targets=tokens)), stage.blocks["0"]
    x = torch.ones(1, LITTLE.context, LITTLE.dim, device=device, dtype=dtype, requires_grad=True)

    def work() -> None:
        out = block(x, batch)
        torch.autograd.grad(out, (x, *block.parameters()), torch.ones_like(out))

    return "starts", "", operations, work


def _half(name: str) -> str:
    known = find(name)
    return "bf16" if known is None else known.half


def _main(name: str) -> str:
    return "fp32" if name == "cpu" else _half(name)


def _collectives(device: torch.device, sizes: Sizes, seconds: float, ranks: int) -> list[Point]:
    """Measure gathers and sums among all ranks, and then among pairs of ranks, with all pairs at once."""
    found: list[Point] = []
    for count in sorted({2, ranks} if ranks > 1 else ()):
        if ranks % count:
            continue
        backend = "nccl" if device.type == "cuda" else "gloo"
        groups = [dist.new_group(list(range(first, first + count)), backend=backend) for first in range(0, ranks, count)]
        mine = next(group for group in groups if group != dist.GroupMember.NON_GROUP_MEMBER)
        assert isinstance(mine, dist.ProcessGroup)
        for size in sizes.collective:
            whole = torch.ones(size // 4 // count * count, device=device)
            for kind, work in (("gather", _gathering(whole, mine)), ("sum", _summing(whole, mine))):
                found.append(Point(kind, str(count), size, _timed(work, device, seconds, mine, together=True)))
    return found


def _gathering(whole: Tensor, group: dist.ProcessGroup) -> Callable[[], Any]:
    share = whole[: whole.numel() // group.size()].clone()
    return lambda: dist.all_gather_into_tensor(whole, share, group=group)


def _summing(whole: Tensor, group: dist.ProcessGroup) -> Callable[[], Any]:
    return lambda: dist.all_reduce(whole, group=group)


def _timed(
    work: Callable[[], Any], device: torch.device, seconds: float, group: dist.ProcessGroup, *, together: bool = False
) -> float:
    """Return the median seconds of a call of `work`, which is called once unmeasured and then 3 to 1,000 times, for about `seconds`.
    `together`: all ranks make the same number of calls."""

    def once() -> float:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    first = max(once(), 1e-7)
    times = max(TRIES, min(1000, int(seconds / first)))
    if together:
        agreed = torch.tensor([times], device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
        times = int(agreed)
    dist.barrier(group=group)
    return statistics.median(once() for _ in range(times))


def cluster_of(name: str, points: Sequence[Point], *, ranks: int, threads: int, sizes: Sizes) -> ClusterSpec:
    """Return the cluster that the points describe. `name` is torch's name for the device, or "cpu" for the processor.

    A device in the catalogue keeps its published rates, and `Measured` has the fractions of these rates that were reached. Any
    other device gets the measured rates as its rates, and its fractions are 1.
    """
    cpu, links = name == "cpu", _links(points)
    main, rates, ramps = _main(name), dict[str, float](), dict[str, float]()
    for format in ("fp32", _half(name)):
        rates[format], ramps[format] = _rate(points, format, sizes)
    moved = 3 * sizes.memory / _seconds(points, "addition", "fp32")
    known = None if cpu else find(name)
    device = known or _own_device(name, rates, moved, ranks)
    if device.scale_up is None and links is not None:  # nobody published it
        source = device.source | {"links": "measured"}
        device = device.model_copy(update={"scale_up": links.rate, "scale_up_domain": ranks, "source": source})
    assert device.memory_bandwidth is not None
    forward, backward = _attention(points, sizes, device.wide)
    launch = next(point.seconds / point.size for point in points if point.kind == "starts")
    peak = device.peak[main]
    ramp = ramps[main] * device.wide / peak  # as the 16-bit format has it: a slower format's is shorter by the ratio of peaks
    measured = Measured(
        device=name, processor=processor()[0], at=datetime.now(UTC).strftime("%Y-%m-%d %H:%M"), torch=torch.__version__, ranks=ranks,
        threads=threads,
        wide=rates[main] / peak, ramp=ramp, attention_forward=forward, attention_backward=backward,
        memory=moved / device.memory_bandwidth, fast=links and links.rate / (device.scale_up or links.rate),
        latency=links and links.latency, launch=launch, in_turn=cpu,
    )  # fmt: skip
    return ClusterSpec(accelerator=device, count=ranks, per_node=ranks, measured=measured, price_per_hour=device.price_per_hour)


def _own_device(name: str, rates: Mapping[str, float], memory_bandwidth: float, ranks: int) -> Accelerator:
    """Return an entry for a device that is not in the catalogue. Ranks on the processor count as devices that share the machine's
    memory."""
    cpu = name == "cpu"
    return Accelerator(
        name="this-machine",
        title=f"{processor()[0]}, {capacity.processors()} processors, ranks at work: {ranks}" if cpu else name,
        vendor="any" if cpu else "AMD" if torch.version.hip else "NVIDIA", device_names=(name,), peak=dict(rates),
        memory=int(capacity.memory_limit()[0] / ranks) if cpu else torch.cuda.get_device_properties(0).total_memory,
        memory_bandwidth=memory_bandwidth, scale_up_domain=ranks, per_node=ranks,
        source={"peak": "measured", "memory": "measured"},
    )  # fmt: skip


def _seconds(points: Sequence[Point], kind: str, of: str) -> float:
    return next(point.seconds for point in points if (point.kind, point.of) == (kind, of))


def _rate(points: Sequence[Point], format: str, sizes: Sizes) -> tuple[float, float]:
    """Return the FLOP/s that products of a format approach as their inner size grows, and the inner size at which they reach half
    of it. The FLOP/s and the inner size come from a least-squares fit, because seconds per FLOP are linear in the inverse of the
    inner size."""
    mine = [point for point in points if (point.kind, point.of) == ("product", format)]
    inverse = [1 / point.size for point in mine]
    each = [point.seconds / (2 * sizes.product**2 * point.size) for point in mine]
    slope, most = statistics.linear_regression(inverse, each) if len(mine) > 1 else (0.0, each[0])
    if slope <= 0 or most <= 0:  # no shape matters, or they scatter more than they differ
        return 1 / min(each), 0.0
    return 1 / most, slope / most


def _attention(points: Sequence[Point], sizes: Sizes, peak: float) -> tuple[float, float]:
    tokens, heads, channels = sizes.attention
    ways: tuple[Phase, ...] = ("F", "I")
    forward, backward = (core_flops(Core(way, 1, heads, heads, tokens, tokens, channels, channels)) for way in ways)
    alone, both = _seconds(points, "attention", "forward"), _seconds(points, "attention", "both")
    return forward / alone / peak, backward / max(both - alone, 0.1 * both) / peak


class _Links(NamedTuple):
    rate: float
    """Bytes per second that one rank sends."""
    latency: float


def _links(points: Sequence[Point]) -> _Links | None:
    """Return the rate and the latency with which the model of collectives predicts the measured times; None with only one rank.
    The latency is fitted to the smallest tensors, the rate to the largest."""
    mine = [point for point in points if point.kind in ("gather", "sum")]
    if not mine:
        return None
    small, large = min(point.size for point in mine), max(point.size for point in mine)
    starts = Wires(domain=1 << 30, fast=float("inf"), slow=float("inf"), latency=1.0, hop=0.0)
    moves = Wires(domain=1 << 30, fast=1.0, slow=1.0, latency=0.0, hop=0.0)

    def model(point: Point, wires: Wires) -> float:
        return (gather if point.kind == "gather" else reduce)(point.size, Line(int(point.of)), wires)

    def without(point: Point, other: float) -> float:
        return max(point.seconds - other, 0.1 * point.seconds)  # small and large may scatter more than they differ

    latency, rate = 0.0, float("inf")
    for _ in range(5):  # each without the other's share of its points
        latency = statistics.median(
            without(point, model(point, moves) / rate) / model(point, starts) for point in mine if point.size == small
        )
        rate = statistics.median(
            model(point, moves) / without(point, latency * model(point, starts)) for point in mine if point.size == large
        )
    return _Links(rate, latency)


def text(found: CalibrationResult, *, host: str) -> str:
    """Return the cluster file of a measured machine, which `megalith.spec.cluster.load` reads back. `host` names the machine."""
    cluster, measured = found.cluster, found.cluster.measured
    assert measured is not None
    device, ranks = cluster.accelerator, f"{cluster.count} rank{'s' * (cluster.count != 1)}"
    lines = [
        f"# {host}, measured by `megalith doctor --calibrate` at {measured.at} UTC, with {ranks} at work.",
        "# Measure again after a change of the machine, of PyTorch or of the number of ranks.",
        f"count = {cluster.count}",
        f"per_node = {cluster.per_node}",
    ]
    if cluster.price_per_hour is not None:
        lines.append(f"price_per_hour = {cluster.price_per_hour}")
    if device == catalogue().get(device.name):
        lines.append(f"accelerator = {literal(device.name)}")
    else:
        lines += ["", "[accelerator]", *_table(device.model_dump(mode="json"))]
    return "\n".join([*lines, "", "[measured]", *_table(measured.model_dump())]) + "\n"


def _table(values: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {_value(value)}" for name, value in values.items() if value is not None]


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key(name)} = {_value(one)}" for name, one in value.items()) + " }"
    return repr(float(f"{value:.4g}")) if isinstance(value, float) else literal(value)

"""The doctor's checks that need torch: does a device give the same result twice, do ranks agree on a collective, and how fast are links?

All checks return `machine.health.Finding`s. A device with wrong results must not train, because at first its errors do not show
in the loss. A fleet runs this module as a command on an excluded node before the node may return.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from megalith.exchange import ObjectCollectives
from megalith.fleet.environment import Place
from megalith.kernels.numbers import Dtypes
from megalith.machine import parent_watch
from megalith.machine.health import Finding
from megalith.prove import worlds
from megalith.spec.numbers import FAST
from megalith.spec.run import LaunchSpec
from megalith.train.run import choose_device, join

SIZES = (256, 512)
DTYPES = tuple(Dtypes.of(precision).compute for precision in FAST)
GIB = 2.0**30


def burn_in(device: torch.device | str = "cpu", *, seconds: float = 2.0, seed: int = 0) -> list[Finding]:
    """Compute the same matrix products repeatedly and compare them bit for bit; return a finding for each data type.

    A healthy device gives the same bits for the same product in the same process. The burn-in takes `seconds` for each data type.
    """
    return [_repeat(torch.device(device), dtype, seconds, seed) for dtype in DTYPES]


def _repeat(device: torch.device, dtype: torch.dtype, seconds: float, seed: int) -> Finding:
    name = f"burn-in {str(dtype).removeprefix('torch.')}"
    random = torch.Generator().manual_seed(seed)
    pairs = [[torch.randn(size, size, generator=random).to(device, dtype) for _ in range(2)] for size in SIZES]
    first = [left @ right for left, right in pairs]
    products = wrong = 0
    end = time.monotonic() + seconds
    while products == 0 or time.monotonic() < end:
        for (left, right), expected in zip(pairs, first, strict=True):
            products += 1
            wrong += differing(left @ right, expected) > 0
    limit = "the same bits each time"
    if wrong:
        way_out = f"Do not train on this device ({device}): remove the node and replace the device"
        return Finding(name, "fail", f"{wrong:,} of {products:,} products differ", limit, way_out)
    if not all(bool(product.isfinite().all()) for product in first):
        return Finding(
            name, "fail", "a product of finite matrices is not finite", limit, f"Do not train on this device ({device})"
        )
    return Finding(name, "ok", f"{products:,} products", limit)


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """Return how many elements of two tensors of one shape and type differ in their bits: -0.0 differs from 0.0, and a NaN may equal a
    NaN."""
    return int((a.view(_INTEGERS[a.element_size()]) != b.view(_INTEGERS[b.element_size()])).sum())


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def devices(wanted: str = "auto") -> list[str]:
    """Return the devices to burn in: every GPU, or the processor if there is no GPU or if it is `wanted`."""
    gpus = 0 if wanted == "cpu" else torch.cuda.device_count()
    return [f"cuda:{number}" for number in range(gpus)] or ["cpu"]


def burn_in_all(wanted: str = "auto", *, seconds: float) -> list[Finding]:
    """Burn in all devices at the same time, each for `seconds` in total."""

    def burn(device: str) -> list[Finding]:
        try:
            found = burn_in(device, seconds=seconds / len(DTYPES))
        except RuntimeError as error:  # also torch's errors of a GPU that is lost
            found = [
                Finding("burn-in", "fail", str(error).splitlines()[0], "it computes", f"Do not train on this device ({device})")
            ]
        return [replace(one, check=f"{one.check}, {device}") for one in found]

    names = devices(wanted)
    with ThreadPoolExecutor(len(names)) as pool:
        return [finding for found in pool.map(burn, names) for finding in found]


def collectives(device: torch.device | str = "cpu", *, group: dist.ProcessGroup, size: int = 1 << 20) -> list[Finding]:
    """Check an all-reduce of `size` whole numbers, whose sums are known exactly, and measure its speed. Every rank of the group
    must call this function, and gets the same findings, which name the ranks with a wrong result.
    """
    rank, world = group.rank(), group.size()
    device = torch.device(device)
    place = torch.arange(size, dtype=torch.float32, device=device) % 1024
    values, expected = place + rank, place * world + world * (world - 1) / 2  # below 2^24: exact in fp32 for any order of adding
    dist.all_reduce(torch.zeros(1, device=device), group=group)  # connections are made at the first one: no part of its speed
    began = time.perf_counter()
    dist.all_reduce(values, group=group)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    report = torch.tensor([float(differing(values, expected)), seconds], dtype=torch.float64, device=device)
    reports = [torch.zeros_like(report) for _ in range(world)]
    dist.all_gather(reports, report, group=group)
    bad = [number for number, one in enumerate(reports) if one[0] > 0]
    slowest = max(float(one[1]) for one in reports)
    return [_summed(bad, world), _speed(size * 4, slowest, world)]


def _summed(bad: list[int], world: int) -> Finding:
    limit = "the exact sum on every rank"
    if bad:
        ranks = ", ".join(map(str, bad))
        way_out = "Check these ranks' devices and links; if all ranks are named, any one of them may have sent wrong numbers"
        return Finding("all-reduce", "fail", f"wrong on rank {ranks} of {world}", limit, way_out)
    return Finding("all-reduce", "ok", f"{world} ranks agree", limit)


def _speed(size: int, seconds: float, world: int) -> Finding:
    """Report the rate at which each rank sends in a ring all-reduce: at least 2 (n - 1) / n of the data."""
    rate = 2 * (world - 1) / world * size / seconds
    return Finding("all-reduce speed", "ok", f"{rate / GIB:.3g} GiB/s a rank", "no limit: compare the speed with other nodes")


@dataclass(frozen=True)
class Link:
    """The link from one rank to the next: its bytes per second in the best of several rounds, and the number of elements that
    arrived altered."""

    source: int
    target: int
    between_nodes: bool
    speed: float
    wrong: int

    def __str__(self) -> str:
        return f"rank {self.source} to {self.target}"


ROUNDS = 3
SIZES_SENT = {"cpu": 16 << 20, "cuda": 256 << 20}
SLOW = 2.0  # times slower than the median of its kind: a link to look at


def links(
    device: torch.device | str = "cpu", *, group: dist.ProcessGroup, node: str = "", size: int | None = None
) -> list[Finding]:
    """Measure the bandwidth from each rank to the next in a ring, with all ranks at once, and check that the bytes arrive
    unchanged.

    Every rank of the group must call this function. `node`: the machine's name, which identifies links between machines. A ring all-reduce
    over all machines is as slow as the slowest link of the ring.
    """
    rank, world, device = group.rank(), group.size(), torch.device(device)
    if world < 2:
        return []
    size = size or SIZES_SENT[device.type]
    place = torch.arange(size // 4, dtype=torch.int32, device=device)
    before, after = (rank - 1) % world, (rank + 1) % world
    got = torch.empty_like(place)
    seconds = min(_pass_on(place + rank, got, before, after, group) for _ in range(ROUNDS + 1))  # the first makes connections
    mine = torch.tensor([seconds, float((got != place + before).sum())], dtype=torch.float64, device=device)
    everyone = [torch.zeros_like(mine) for _ in range(world)]
    dist.all_gather(everyone, mine, group=group)
    nodes = ObjectCollectives(group).all_gather(node, str)
    found = [
        Link(source, number, nodes[source] != nodes[number], size / float(one[0]), int(one[1]))
        for number, one in enumerate(everyone)
        for source in [(number - 1) % world]
    ]
    kinds = [("links on a machine", False), ("links between machines", True)]
    return [
        _judge_links(name, kind) for name, between in kinds if (kind := [one for one in found if one.between_nodes == between])
    ]


def _pass_on(sent: torch.Tensor, got: torch.Tensor, before: int, after: int, group: dist.ProcessGroup) -> float:
    dist.barrier(group=group)
    began = time.perf_counter()
    both = [
        dist.P2POp(dist.isend, sent, group=group, group_peer=after),
        dist.P2POp(dist.irecv, got, group=group, group_peer=before),
    ]
    for work in dist.batch_isend_irecv(both):
        work.wait()
    if got.device.type == "cuda":
        torch.cuda.synchronize(got.device)
    return time.perf_counter() - began


def _judge_links(name: str, found: Sequence[Link]) -> Finding:
    """Return one finding for all links within nodes, or for all links between nodes. A slow link is only a warning, because
    another program may have used it."""
    slowest, median = min(found, key=lambda one: one.speed), statistics.median(one.speed for one in found)
    limit = f"bytes arrive as sent, no link {SLOW:g} times slower than the median"
    value = f"slowest {slowest.speed / GIB:.3g} GiB/s ({slowest}), median {median / GIB:.3g} GiB/s of {len(found)}"
    if bad := [str(one) for one in found if one.wrong]:
        return Finding(name, "fail", f"wrong bytes from {', '.join(bad)}", limit, "Check these ranks' memory, devices and cables")
    if slowest.speed * SLOW < median:
        return Finding(name, "warn", value, limit, f"Check the hardware of the link {slowest}, and other traffic on it")
    return Finding(name, "ok", value, limit)


def _check_ranks(rank: int, wanted: str, local_world: int) -> list[Finding]:
    device, group = choose_device(wanted, rank, local_world), dist.group.WORLD
    if device.type == "cuda":
        group = dist.new_group(list(range(local_world)), backend="nccl", device_id=device)
    assert isinstance(group, dist.ProcessGroup)
    return [*collectives(device, group=group), *links(device, node=platform.node(), group=group)]


def check_ranks(ranks: int, *, wanted: str = "auto", timeout: float = 120.0) -> list[Finding]:
    """Run the collective checks among `ranks` new processes of this machine: over NCCL if there is a GPU for each, else over gloo.

    The processes are forked from this one, which must not have used a GPU or more than one thread of torch.
    """
    name = "collectives"
    try:
        return worlds.run_ranks(_check_ranks, ranks, wanted, ranks, timeout=timeout)[0]
    except (RuntimeError, TimeoutError) as error:
        last = str(error).strip().splitlines()
        way_out = "Check the loopback interface and the free memory; with GPUs, set NCCL_DEBUG=INFO for details"
        return [Finding(name, "fail", " ... ".join(dict.fromkeys((last[0], last[-1]))), f"{ranks} ranks meet", way_out)]


def check_place(place: Place, own: Sequence[Finding], *, burn_in_seconds: float, wanted: str = "auto") -> list[Finding]:
    """Run the checks of ranks that torchrun, srun or another launcher started, and return the same findings on every rank. The checks are:
    `own`, each rank's findings about its machine; a burn-in of each rank's device; and the collective checks among all ranks. The names of
    the findings of `own` and of burn-ins contain the machine's name."""
    device = choose_device(wanted, place.local_rank, place.local_world)
    patience = LaunchSpec().timeout + 2 * len(DTYPES) * burn_in_seconds  # others compute for as long
    world = join(place, launch=LaunchSpec(timeout=patience), device=device)
    try:
        node = platform.node()
        mine = list(own)
        if burn_in_seconds and (device.type == "cuda" or place.local_rank == 0):
            mine += [replace(one, check=f"{one.check}, {device}") for one in burn_in(device, seconds=burn_in_seconds)]
        told = ObjectCollectives(world).all_gather([replace(one, check=f"{one.check}, {node}") for one in mine], list[Finding])
        found = [finding for one in told for finding in one]
        found += [*collectives(device, group=world), *links(device, group=world, node=node)]
        dist.barrier(group=world)  # a rank that leaves early fails one that still reads
        return found
    finally:
        dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    """Burn in this machine's devices, and print the findings as JSON. The process ends when its parent ends."""
    parent_watch.die_with_parent(os.getppid())
    parser = argparse.ArgumentParser(prog="python -m megalith.prove.doctor", description="Burn in this machine's devices.")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    asked = parser.parse_args(arguments)
    os.nice(19)  # where a node is rehearsed, ranks of others compute on this machine
    print(json.dumps([one.as_json() for one in burn_in_all(asked.device, seconds=asked.seconds)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The doctor's checks that need torch: does this device compute the same twice, and do the ranks agree on a collective?

Both give `fleet.health.Finding`s. A device that fails them must not train: what it gets wrong nobody sees in the loss at first.
"""

import time

import torch
import torch.distributed as dist

from megalith.fleet.health import Finding

SIZES = (256, 512)
DTYPES = (torch.float32, torch.bfloat16)
GIB = 2.0**30


def burn_in(device: torch.device | str = "cpu", *, seconds: float = 2.0, seed: int = 0) -> list[Finding]:
    """Compute the same matrix products over and over and compare them bit for bit; a finding for each data type.

    A healthy device gives the same bits for the same product in the same process. `seconds` for each data type.
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
        way_out = f"Do not train on this device ({device}): take the node out and have it replaced"
        return Finding(name, "fail", f"{wrong:,} of {products:,} products differ", limit, way_out)
    if not all(bool(product.isfinite().all()) for product in first):
        return Finding(
            name, "fail", "a product of finite matrices is not finite", limit, f"Do not train on this device ({device})"
        )
    return Finding(name, "ok", f"{products:,} products", limit)


def differing(a: torch.Tensor, b: torch.Tensor) -> int:
    """Elements of two tensors of one shape and type that differ in their bits: -0.0 is not 0.0 here, and NaN may equal NaN."""
    return int((a.view(_INTEGERS[a.element_size()]) != b.view(_INTEGERS[b.element_size()])).sum())


_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def collectives(device: torch.device | str = "cpu", *, size: int = 1 << 20) -> list[Finding]:
    """An all-reduce of `size` whole numbers whose sum is known exactly, an all-gather, and their speed; alike on every rank.

    Every rank of the default group must call it. The ranks that got something else than the others expected are named.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device(device)
    place = torch.arange(size, dtype=torch.float32, device=device) % 1024
    values, expected = place + rank, place * world + world * (world - 1) / 2  # below 2^24: exact in fp32 for any order of adding
    _warm_up(device)
    began = time.perf_counter()
    dist.all_reduce(values)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - began
    report = torch.tensor([float(differing(values, expected)), seconds], dtype=torch.float64, device=device)
    reports = [torch.zeros_like(report) for _ in range(world)]
    dist.all_gather(reports, report)
    bad = [number for number, one in enumerate(reports) if one[0] > 0]
    slowest = max(float(one[1]) for one in reports)
    return [_summed(bad, world), _speed(size * 4, slowest, world)]


def _warm_up(device: torch.device) -> None:
    """Connections are made at the first collective; that is no part of its speed."""
    dist.all_reduce(torch.zeros(1, device=device))


def _summed(bad: list[int], world: int) -> Finding:
    limit = "the exact sum on every rank"
    if bad:
        ranks = ", ".join(map(str, bad))
        way_out = "Check these ranks' devices and links; if all ranks are named, one of them sent wrong numbers"
        return Finding("all-reduce", "fail", f"wrong on rank {ranks} of {world}", limit, way_out)
    return Finding("all-reduce", "ok", f"{world} ranks agree", limit)


def _speed(size: int, seconds: float, world: int) -> Finding:
    """Bytes a second each rank sends at least in a ring all-reduce: 2 (n - 1) / n of the data."""
    rate = 2 * (world - 1) / world * size / seconds
    return Finding("all-reduce speed", "ok", f"{rate / GIB:.3g} GiB/s a rank", "for comparison with other nodes")

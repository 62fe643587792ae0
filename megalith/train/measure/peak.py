"""The inputs of MFU: FLOP per token, and the peak FLOP/s of the devices."""

import hashlib
import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from megalith import disk
from megalith.kernels.numbers import Dtypes
from megalith.models.flops import flops_per_token
from megalith.spec import cluster
from megalith.spec.numbers import PRECISIONS
from megalith.train.assemble import Trainer


@dataclass(frozen=True)
class Yardstick:
    """Inputs of MFU: FLOP per token, peak FLOP/s of all ranks together or None, and the source of this peak."""

    flops_per_token: float
    peak: float | None
    source: str
    folder: Path | None = None
    """Folder of cached counts."""


def yardstick_of(trainer: Trainer, folder: Path) -> Yardstick:
    """Return the inputs of MFU. The peak is from the catalogue, or measured for a CPU; never guessed."""
    spec, device = trainer.spec, trainer.device
    work = counted_flops(trainer, folder / "ranks")
    precision, ranks = spec.train.precision, trainer.groups.world.size()
    peak = catalogue_peak(spec.cluster, torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", precision)
    if peak.rate is None and device.type == "cpu":
        rate = _measured_peak(trainer, folder / "ranks" / f"peak-{precision}-{ranks}")
        source = f"measured with {precision} matrix products on all ranks at once{peak.instead}"
        return Yardstick(work, rate, source, folder / "ranks")
    return Yardstick(work, peak.rate and peak.rate * ranks, f"{peak.source}{peak.instead}", folder / "ranks")


@dataclass(frozen=True)
class Peak:
    """The peak FLOP/s of one device (None if the catalogue has no figure), the source of this figure, and a note (`instead`) if `cluster`
    names another device."""

    rate: float | None
    source: str
    instead: str = ""


def catalogue_peak(asked: str, device: str, precision: str) -> Peak:
    """Return the peak FLOP/s of the actual device (torch's name). The run's `cluster` (`asked`) is used only if the catalogue does not know
    the actual device, or if `cluster` is a file that describes a device. If the catalogue knows the actual device, a `cluster` that names
    another catalogued device is ignored."""
    known = cluster.find(device)
    named = None if asked == "local" else cluster.load(asked).accelerator
    other = known not in (None, named) and named in cluster.catalogue().values()
    found = known if named is None or other else named
    instead = f"; `cluster` names {asked.partition(':')[0]}, but this machine has another device" if other else ""
    if found is None:
        return Peak(
            None,
            f"unknown device {device!r}: the catalogue has no peak for it, so no MFU; set `cluster` to a device of the catalogue",
        )
    rate = PRECISIONS[precision].rate
    if rate not in found.peak:
        known_rates = ", ".join(found.peak) or "none"
        return Peak(
            None,
            f"{found.title}: the catalogue has no {rate} peak, so no MFU is computed; it has peaks for {known_rates}",
            instead,
        )
    return Peak(found.peak[rate], f"{found.title}, dense {rate}", instead)


def counted_flops(trainer: Trainer, kept: Path) -> float:
    """Return FLOP per token in the current phase. The number is counted once for each sequence length and saved, because counting
    takes longer than the rest of a restart."""
    seq_len = trainer.spec.train.seq_len
    of = hashlib.sha256(f"{seq_len} {trainer.model.model_dump_json()}".encode()).hexdigest()[:12]
    path = kept / f"flops-{of}"
    if known := _number_in(path):
        return known
    work = flops_per_token(trainer.model, seq_len)
    if trainer.groups.rank == 0:
        kept.mkdir(exist_ok=True)
        disk.write_whole(path, str(work))
    return work


def _measured_peak(trainer: Trainer, kept: Path) -> float:
    """Return the measured peak FLOP/s of all ranks together. The peak is measured at the run's first start and saved, so that restarts do
    not have to measure it again."""
    world, leads = trainer.groups.world, trainer.groups.rank == 0
    known = _number_in(kept) if leads else 0.0
    rate = torch.tensor(known, dtype=torch.float64)
    dist.broadcast(rate, group=world, group_src=0)  # one rank looks: over a network, others may not see the file yet
    if float(rate):
        return float(rate)
    dtype = Dtypes.of(trainer.spec.train.precision).compute
    dist.barrier(group=world)  # all ranks measure at once, because all ranks compute at once
    rate = torch.tensor(matmul_rate(dtype, trainer.device), dtype=torch.float64)
    dist.all_reduce(rate, group=world)
    if leads:
        kept.parent.mkdir(exist_ok=True)
        with disk.if_available(kept):
            made = disk.make_new(kept, str(float(rate)))  # the first owner's number stays, whatever a later one measures
            if not made and not _number_in(kept):  # a full disk or a crash left it empty
                disk.write_whole(kept, str(float(rate)))
    return float(rate)


def _number_in(path: Path) -> float:
    """Return the number in a file; 0 if there is none, as after a full disk."""
    try:
        return float(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return 0.0


def matmul_rate(dtype: torch.dtype, device: torch.device, *, seconds: float = 0.25, size: int | None = None) -> float:
    """Return the FLOP/s of square matrix products on this rank now, the best of several products: on a CPU, this is the measured peak.
    `size`: rows of the matrices; None: 8,192 on a GPU and, on a CPU, the largest size up to 1,024 at which two products fit into `seconds`.
    (A CPU without bf16 instructions takes seconds for a bf16 product of size 1,024.)
    """
    if size is None and device.type == "cpu":
        size = 128
        while size < 1024 and 2 * 8 * _product(dtype, device, size, seconds=0.0) < seconds:
            size *= 2
    size = size or 8192
    return 2 * size**3 / _product(dtype, device, size, seconds=seconds)


def _product(dtype: torch.dtype, device: torch.device, size: int, *, seconds: float) -> float:
    """Return the shortest time in seconds of a matrix product, over as many products as fit into `seconds`, after a warm-up product."""
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out, least, end = a @ b, math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end or least == math.inf:
        start = time.perf_counter()
        torch.mm(a, b, out=out)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        least = min(least, time.perf_counter() - start)
    return least

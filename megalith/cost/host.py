"""The host as a place for the optimizer's state: what is assumed of it, as the catalogue of accelerators does not say. No torch."""

from megalith.cost.workload import Workload

MEMORY = 128 * 2**30
"""Bytes of host memory that the state of one device may take: half of its eighth of the 2 TiB that a DGX A100, H100 or B200 has; data,
checkpoints and copies of the state need the rest."""

LINK = 25e9
"""Bytes/s between a device and its host's memory, over PCIe 4 x16 or 5 x16 shared by two."""

RATE = 33e9
"""Bytes/s that an update of one device's state reads and writes in host memory, while those of the seven beside it do the same: two
sockets of eight channels DDR5-4800 have 614 GB/s, of which 43 % are reached. That is what ZeRO-Offload's Adam reaches on a DGX-2: 28
bytes of each of 10 billion parameters in 2.57 s, where the memory has 256 GB/s (Ren et al. 2021, arXiv:2101.06840, table 4)."""


def held(workload: Workload, numbers: float) -> float:
    """Bytes of host memory for so many parameters: their state, and gradients and weights on their way."""
    return numbers * (workload.state_bytes + _carried(workload))


def seconds(workload: Workload, numbers: float) -> float:
    """To update so many parameters there: gradients cross the link, are written and read; the state is read and written; weights are
    written, read, and cross the link."""
    carried = _carried(workload)
    return numbers * (2 * (workload.state_bytes + carried) / RATE + carried / LINK)


def _carried(workload: Workload) -> float:
    """Bytes of one parameter that cross the link in a step."""
    return workload.practice.gradient_bytes + workload.width

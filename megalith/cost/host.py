"""The host and its disk as places for the optimizer's state: what is assumed of them, as the catalogue of accelerators
does not say. No torch."""

from megalith.cost.workload import Workload
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.sizes import model_parameters

MEMORY = 128 * 2**30
"""Bytes of host memory that the state of one device may take: half of its eighth of the 2 TiB that a DGX A100, H100 or B200 has; data,
checkpoints and copies of the state need the rest."""

LINK = 25e9
"""Bytes/s between a device and its host's memory, over PCIe 4 x16 or 5 x16 shared by two."""

RATE = 33e9
"""Bytes/s that an update of one device's state reads and writes in host memory, while those of the seven beside it do the same: two
sockets of eight channels DDR5-4800 have 614 GB/s, of which 43 % are reached. That is what ZeRO-Offload's Adam reaches on a DGX-2: 28
bytes of each of 10 billion parameters in 2.57 s, where the memory has 256 GB/s (Ren et al. 2021, arXiv:2101.06840, table 4)."""


DISK = 2.5e9
"""Bytes/s that a device's share of its host's disks reads, and writes at once: one NVMe drive over four lanes of PCIe 4 for each device,
at about 40 % of its 7 GB/s."""

MIB = 1 << 20
BUFFERS = 3
"""Chunks in memory at once."""
SLOTS = 2
"""Slots of each chunk of state on disk: the one in use and the one that is written."""


def held(workload: Workload, numbers: float) -> float:
    """Bytes of host memory for so many parameters: their state, and gradients and weights on their way."""
    return numbers * (workload.state_bytes + _carried(workload))


def streamed(workload: Workload) -> float:
    """Bytes of the buffers that state on disk passes through: three chunks, each of the same numbers of all of a parameter's tensors."""
    state, plan = workload.plan.state, workload.plan
    if state.optimizer != "disk":
        return 0.0
    split = plan.tensor * (workload.shards[0] if plan.zero else 1)
    largest = max(each.numel for each in model_parameters(workload.model).values()) / split
    piece = largest if OPTIMIZERS[workload.optimizer].unit != "element" else min(largest, state.chunk * MIB / 4)
    return BUFFERS * piece * workload.state_bytes


def seconds(workload: Workload, numbers: float) -> float:
    """To update so many parameters there: gradients cross the link, are written and read; the state is read and written; weights are
    written, read, and cross the link."""
    carried = _carried(workload)
    if workload.plan.state.optimizer == "disk":  # read and written beside each other, and the update beside both
        return numbers * max(workload.state_bytes / DISK, 2 * (2 * workload.state_bytes + carried) / RATE + carried / LINK)
    return numbers * (2 * (workload.state_bytes + carried) / RATE + carried / LINK)


def _carried(workload: Workload) -> float:
    """Bytes of one parameter that cross the link in a step."""
    return workload.gradient_bytes + workload.width

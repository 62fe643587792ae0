"""Offloading to the host's memory and disk: bytes, and seconds of updates and transfers. Bytes and seconds follow from a device's share of
the cluster file's `HostSpec`. Figures of the host that a cluster file lacks, and all figures of hosts in the catalogue's clusters, are
assumed. No torch."""

from megalith.cost.workload import Workload
from megalith.spec.numbers import PRECISIONS
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.sizes import model_parameters
from megalith.spec.state import MASTER, bytes_each

LINK = 25e9
"""Bytes/s between a device and its host's memory, over PCIe 4 x16, or over PCIe 5 x16 shared by two devices."""

REACHED = 0.43
"""Share of the memory bandwidth that an update on the host reaches: the share of ZeRO-Offload's Adam on a DGX-2, which moves 28 bytes of
each of 10 billion parameters in 2.57 s at 256 GB/s (Ren et al. 2021, arXiv:2101.06840, table 4)."""

BANDWIDTH = 614e9 / 8
"""Bytes/s of host memory for each of eight devices: two sockets of eight channels DDR5-4800."""

DISK = 2.5e9
"""Bytes/s that a device's share of its host's disks reads while it writes as much: one NVMe drive over four lanes of PCIe 4
for each device, at about 40 % of its 7 GB/s."""

MIB = 1 << 20
BUFFERS = 3
"""Number of chunks of state that are in memory at once."""


TABLES = ("embedding.weight", "head.output.weight")
"""Parameters whose chunks end where tiles end, if tables are read in tiles."""


def held(workload: Workload, numbers: float) -> float:
    """Bytes of host memory for this many parameters: their state, and the buffers of gradients and weights in transfer."""
    return numbers * (workload.state_bytes + _carried(workload))


def streamed(workload: Workload) -> float:
    """Bytes of the buffers for state on disk: three chunks, each with the same elements of all of a parameter's tensors, and
    the master weights of a chunk if gathers cast weights from them."""
    state, plan = workload.plan.state, workload.plan
    if state.optimizer != "disk":
        return 0.0
    split = plan.tensor * (workload.shards[0] if plan.zero else 1)
    cut = TABLES if workload.cut else ()
    sizes = {name: each.numel / split for name, each in model_parameters(workload.model).items()}
    largest = max(min(size, workload.tile_numbers) if name in cut else size for name, size in sizes.items())
    piece = largest if OPTIMIZERS[workload.optimizer].unit != "element" else min(largest, state.chunk * MIB / 4)
    return piece * (BUFFERS * workload.state_bytes + bytes_each([MASTER]) * bool(state.weights_away))


def has_weights(workload: Workload) -> bool:
    """Return True if gathers can cast weights from master weights on the host or on disk. `megalith check` applies the same rules."""
    narrow = PRECISIONS[workload.format].compute.name != MASTER.number
    return workload.software_profile.ours and narrow and not workload.halved and workload.plan.zero == 3


def read_seconds(workload: Workload, numbers: float) -> float:
    """Return the seconds to read this number of master weights from the host or disk, for a gather."""
    host, devices = workload.cluster.host, workload.cluster.host_devices
    disk = DISK if host.disk_bandwidth is None else host.disk_bandwidth / devices
    rate = disk if workload.plan.state.optimizer == "disk" else host.link or LINK
    return numbers * workload.plan.state.weights_away * bytes_each([MASTER]) / rate


def move_seconds(workload: Workload, size: float, for_disk: float) -> float:
    """Return the seconds to offload this many bytes of activations (`plan.retain`), or to fetch them back."""
    host = workload.cluster.host
    disk = DISK if host.disk_bandwidth is None else host.disk_bandwidth / workload.cluster.host_devices
    return max(size / (host.link or LINK), on_disk(workload, size, for_disk) / disk)


def on_disk(workload: Workload, size: float, for_disk: float) -> float:
    """Return how many of `size` bytes of activations are offloaded to disk. `for_disk`: the bytes for the disk if other activations go to
    host memory."""
    return for_disk if "host" in workload.plan.retain.places else size


def seconds(workload: Workload, numbers: float) -> float:
    """Return the seconds to update this number of parameters on the host: gradients cross the link, and are written and read;
    state is read and written; weights are written, read, and cross the link."""
    carried, host, devices = _carried(workload), workload.cluster.host, workload.cluster.host_devices
    rate = REACHED * (BANDWIDTH if host.memory_bandwidth is None else host.memory_bandwidth / devices)
    link, disk = host.link or LINK, DISK if host.disk_bandwidth is None else host.disk_bandwidth / devices
    if workload.plan.state.optimizer == "disk":  # read and write at the same time, and the update at the same time as both
        return numbers * max(workload.state_bytes / disk, 2 * (2 * workload.state_bytes + carried) / rate + carried / link)
    return numbers * (2 * (workload.state_bytes + carried) / rate + carried / link)


def _carried(workload: Workload) -> float:
    """Bytes of one parameter that cross the link in a step."""
    return workload.gradient_bytes + workload.width

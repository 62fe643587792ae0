"""Join a process group and choose a device, from a place in the environment."""

import ctypes
import platform
import secrets
from datetime import timedelta

import torch
import torch.distributed as dist

from megalith.fleet import rendezvous
from megalith.fleet.environment import Place
from megalith.fleet.secure import key
from megalith.fleet.secure.key import NoKey
from megalith.fleet.secure.store_client import StoreClient
from megalith.machine.capacity import find_gpus
from megalith.parallel import one_round
from megalith.spec.run import LaunchSpec
from megalith.train.store import RunStore, tcp_store

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h


def choose_device(wanted: str, local_rank: int, local_world: int) -> torch.device:
    """Choose the device: `auto` means one GPU for each rank if this machine has GPUs, else the CPU. Raises RuntimeError if a
    machine with GPUs has fewer GPUs than ranks, or if GPUs are requested and missing: a run never uses the CPU because some GPUs
    are missing.
    """
    gpus = torch.cuda.device_count() if wanted in ("auto", "cuda") and torch.cuda.is_available() else 0
    there = 0 if gpus or wanted != "auto" else find_gpus()[0]
    if there:
        raise RuntimeError(
            f'train.device = "auto": this machine has {there} GPUs, and PyTorch {torch.__version__} can use none of them. '
            "Repair the driver, install a PyTorch for it, or use cpu."
        )
    if local_world <= gpus:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if wanted == "cuda" or gpus:
        raise RuntimeError(
            f"train.device = {wanted}: {local_world} ranks on this machine and {gpus} GPUs. Use one rank a GPU, or cpu."
        )
    return torch.device("cpu")


def join(place: Place, *, launch: LaunchSpec, device: torch.device) -> dist.ProcessGroup:
    """Join the other ranks. Returns the group of all, which uses gloo for CPU tensors and NCCL for GPU tensors. Keys contain the
    generation, because after a restart under torchrun the store still holds the addresses of the dead ranks.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = _store(place, timedelta(seconds=launch.start_timeout))
    one_round.install()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(place.generation or _generation(place, store, seconds=launch.start_timeout), store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=launch.timeout),
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _generation(place: Place, store: dist.Store, *, seconds: float) -> str:
    """Return a name for this start of the ranks, because their launcher gives none."""
    meeting = dist.PrefixStore("meeting", store)
    return rendezvous.agree(meeting, secrets.token_hex(8), rank=place.rank, world=place.world, seconds=seconds)


def _store(place: Place, timeout: timedelta) -> dist.Store:
    kind, _, address = place.store.partition("://")
    if kind == "file":
        return dist.FileStore(address, place.world)
    if kind == "tcp":
        return tcp_store(place.store, serves=place.serves, timeout=timeout)
    if (secret := key.given()) is None:
        raise NoKey(f"the ranks meet at {place.store}, and this one was given no key: {key.VARIABLE} is not set")
    return RunStore(StoreClient(place.store, secret, seconds=timeout.total_seconds()))


def keep_memory() -> None:
    """Tell glibc to keep freed memory. A step frees and allocates gigabytes. If they went back to the kernel, every page would be
    zeroed and faulted in again, which on a CPU can cost more than the arithmetic. Without glibc this does nothing."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_ARENA_MAX, 1)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)

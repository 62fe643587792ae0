"""From a place in the environment to a process group and a device."""

import ctypes
import platform
import secrets
from datetime import timedelta

import torch
import torch.distributed as dist

from megalith.fleet import rendezvous
from megalith.fleet.environment import Place
from megalith.parallel import one_round
from megalith.spec.run import LaunchSpec

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h


def choose_device(wanted: str, local_rank: int, local_world: int) -> torch.device:
    """`auto` is a GPU a rank where all ranks of this machine get one, else the CPU for all of them.

    Raises RuntimeError if `cuda` is asked for and there are fewer GPUs than ranks.
    """
    gpus = torch.cuda.device_count() if wanted in ("auto", "cuda") and torch.cuda.is_available() else 0
    if wanted == "cuda" and local_world > gpus:
        raise RuntimeError(
            f"train.device = cuda: {local_world} ranks on this machine and {gpus} GPUs. Use one rank a GPU, or cpu."
        )
    if local_world <= gpus:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def join(place: Place, *, launch: LaunchSpec, device: torch.device) -> dist.ProcessGroup:
    """Meet the other ranks. Returns the group of them all, in which CPU tensors travel by gloo and GPU tensors by NCCL.

    Keys carry the generation: after a restart under torchrun the store still holds the addresses of the dead ranks.
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
    """A name for this start of the ranks, of which their launcher does not tell them one."""
    meeting = dist.PrefixStore("meeting", store)
    return rendezvous.agree(meeting, secrets.token_hex(8), rank=place.rank, world=place.world, seconds=seconds)


def _store(place: Place, timeout: timedelta) -> dist.Store:
    kind, _, address = place.store.partition("://")
    if kind == "file":
        return dist.FileStore(address, place.world)
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=place.serves, timeout=timeout, wait_for_workers=False)


def keep_memory() -> None:
    """Tell glibc to keep freed memory. A step frees and takes gigabytes; given back to the kernel, every page is zeroed and faulted in
    again, which on a CPU can cost more than the arithmetic. Elsewhere than on glibc this does nothing."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_ARENA_MAX, 1)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)

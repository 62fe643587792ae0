"""The memory of this process: its resident size, and a setting to keep freed memory."""

import ctypes
import platform
import resource
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of glibc's malloc.h


def resident_bytes() -> int:
    """Return the resident bytes of this process now (on systems other than Linux, its maximum so far)."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return most_resident_bytes()


def most_resident_bytes() -> int:
    """Return the maximum of this process's resident bytes so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def keep_memory() -> None:
    """Tell glibc to keep freed memory. Each step frees and allocates gigabytes. If freed memory were returned to the kernel,
    every page would be zeroed and faulted in again, which on a CPU can take longer than the arithmetic. Without glibc this
    function does nothing."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_ARENA_MAX, 1)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)

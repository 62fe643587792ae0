"""The memory of this process, as the operating system counts it."""

import resource
import sys


def resident_bytes() -> int:
    """Bytes of this process that are in memory now (Linux; elsewhere the maximum so far)."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except OSError:
        return most_resident_bytes()


def most_resident_bytes() -> int:
    """The maximum bytes of this process in memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

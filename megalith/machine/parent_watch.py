"""Make a process die with its parent: on Linux by the kernel's parent-death signal, and on all systems by a pipe.

Only the supervisor holds the pipe's write end, and it never writes to it. However the supervisor ends, the kernel closes the
write end, and every process with the read end sees the end of the file.
"""

import ctypes
import os
import signal
import sys
import threading
from typing import NoReturn

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(parent: int) -> None:
    """Ask the kernel to SIGKILL this process when its parent (process id `parent`) ends. Outside of Linux, only check that the parent
    exists.

    Must be called again after every fork (a child does not inherit it). If the parent has already ended, no signal would come, so
    this process ends at once.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = [ctypes.c_ulong(value) for value in (signal.SIGKILL, 0, 0, 0)]
        if libc.prctl(_PR_SET_PDEATHSIG, *arguments) != 0:
            reason = os.strerror(ctypes.get_errno())
            print(f"no parent-death signal ({reason}): only the pipe is watched", file=sys.stderr)
    if os.getppid() != parent:
        os._exit(1)


def _end() -> NoReturn:
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # takes along the processes that this one started
    os._exit(1)


def watch(pipe: int) -> None:
    """Start a thread that ends this process when the other end of the pipe `pipe` closes.

    Only ranks call this, because a fork server must not have threads.
    """

    def wait() -> None:
        while os.read(pipe, 1):
            pass
        _end()

    threading.Thread(target=wait, name="parent watch", daemon=True).start()

"""Prints what a process was given by the one that started it, as JSON. Run as `python -m tests.probe [STATUS]`."""

import json
import os
import signal
import sys
from pathlib import Path


def main() -> None:
    """Print the state of this process, and end it with the status, or raise an error without one."""
    mask = os.umask(0)
    numbers = sorted(
        int(each.name) for each in Path("/proc/self/fd").iterdir()
    )  # with that of the listing, which is closed by now
    handled = {
        name: str(signal.getsignal(getattr(signal, name))) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGPIPE", "SIGCHLD")
    }
    found = {
        "argv": sys.argv[1:], "orig_argv": sys.orig_argv[1:], "path": sys.path[:2], "folder": str(Path.cwd()), "stdin": sys.stdin.read(),
        "environment": {name: value for name, value in os.environ.items() if name.startswith("PROBE")},
        "umask": mask, "handled": handled, "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "leads": {"group": os.getpgrp() == os.getpid(), "session": os.getsid(0) == os.getpid()},
        "descriptors": [number for number in numbers if Path(f"/proc/self/fd/{number}").exists()],
        "module": __name__, "main": sys.modules["__main__"].__spec__.name, "processors": sorted(os.sched_getaffinity(0)),
        "lines": [sys.stdout.line_buffering, sys.stderr.line_buffering, sys.stdout.encoding, sys.stderr.errors],
    }  # fmt: skip
    print(json.dumps(found))
    print("to the other stream", file=sys.stderr)
    if sys.argv[1:]:
        sys.exit(int(sys.argv[1]))
    raise ValueError("mine")


if __name__ == "__main__":
    main()

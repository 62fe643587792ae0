"""Evidence about a rank: the end of its output, the stacks that it wrote on request, and the kernel's data about its process."""

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from megalith.fleet import collective_progress

STACKS = signal.SIGUSR2
"""Signal that makes a Megalith process write the stack of every thread into its log; SIGTERM and SIGUSR1 mean "save and stop"."""

POLLING = frozenset({"gloo_tcp_loop"})
"""Names of threads that poll for work all the time; gloo has such a thread for every process group."""

PROC = Path("/proc")
TAIL_LINES = 15
_LOG_BYTES = 1 << 16  # read from the end of a log
_TURN_SECONDS = 0.02
MAX_STARVED = 5  # times a limit that processes without a processor are waited for
_STANDING_SECONDS = 0.3  # that a rank's thread may take to report its position once its stack is written


def tail(text: str) -> str:
    """The last lines of a text."""
    return "\n".join(text.rstrip().splitlines()[-TAIL_LINES:])


def last_words(output: str) -> str:
    """Return the last lines of a process's output. If the process crashed, return the lines before the crash, and the innermost calls
    of the thread that crashed: `faulthandler` lists the innermost call first, so the last lines of its report are the outermost calls."""
    before, crash, report = output.rpartition("Fatal Python error")
    _, thread, calls = report.partition("Current thread 0x")
    if not thread:
        return tail(output)
    kept = [*before.rstrip().splitlines()[-TAIL_LINES // 3 :], crash + report.partition("\n")[0]]
    return "\n".join([*kept, *(thread + calls).splitlines()[:TAIL_LINES]])


def size(path: Path) -> int:
    """Size of a file in bytes; 0 if it is missing or cannot be accessed."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_from(path: Path, offset: int) -> str:
    """Text of a file from byte `offset` on; empty if the file is missing or unreadable."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def output(log: Path, generation: str) -> str:
    """The last part, at most 64 KiB, of a rank's output after the header line of this generation."""
    text = read_from(log, max(0, size(log) - _LOG_BYTES))
    _, found, rest = text.rpartition(f"generation {generation}:")
    return rest.partition("\n")[2] if found else text


def is_stopped(process: int | None) -> bool:
    """True if a process is stopped, by SIGSTOP or a debugger."""
    if process is None:
        return False
    try:
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state in "Tt"


def queued(process: int) -> float:
    """Return the seconds for which a process's threads were ready to run but had no processor; 0 if not reported by the kernel.
    Threads that poll a hundred times per second do not count: a rank has about twenty such threads, and with them every hang on a
    busy machine would look like a lack of processors.
    """
    nanoseconds = 0
    for task in (PROC / str(process) / "task").glob("*"):
        with contextlib.suppress(OSError, IndexError):  # a thread that has ended
            if (task / "comm").read_text(encoding="utf-8").strip() not in POLLING:
                nanoseconds += int((task / "schedstat").read_text(encoding="utf-8").split()[1])
    return nanoseconds / 1e9


def dumps(
    logs: dict[int, Path],
    *,
    ask: Callable[[], None],
    able: Iterable[int],
    seconds: float,
    waited: Callable[[], Mapping[int, float]] = dict,
) -> dict[int, str]:
    """Ask processes for their stacks, wait until the `able` processes have written them to their logs, and read all stacks. A
    rank that trains also writes its progress in collectives soon after its stack; the wait for this is short, because other
    processes do not write it. `waited` returns the seconds for which each process has waited for a processor. The time for which
    a process waits for a processor does not count towards the limit `seconds`, because a rank without a processor cannot answer
    and would be blamed for another rank's hang.
    """
    before = {rank: size(log) for rank, log in logs.items()}
    expected, clock = list(able), _ProcessorClock(waited)
    ask()
    last: dict[int, int] = {}
    written_at: float | None = None
    while clock.now() < seconds:
        time.sleep(_TURN_SECONDS)
        now = {rank: size(logs[rank]) for rank in expected}
        if now != last:  # a stack may be written in pieces
            written_at = None
        elif all(now[rank] > before[rank] for rank in expected):
            written_at = clock.now() if written_at is None else written_at
            told = all(collective_progress.PREFIX in read_from(logs[rank], before[rank]) for rank in expected)
            if told or clock.now() > written_at + _STANDING_SECONDS:
                break
        last = now
    return {rank: read_from(log, before[rank]) for rank, log in logs.items()}


class _ProcessorClock:
    """A clock that does not count the time for which a process waited for a processor, taken from the process that waited
    longest. At least 1/MAX_STARVED of the real time is counted."""

    def __init__(self, waited: Callable[[], Mapping[int, float]]) -> None:
        self._waited, self._before, self._begun = waited, waited(), time.monotonic()

    def now(self) -> float:
        passed = time.monotonic() - self._begun
        starved = max((seconds - self._before.get(rank, seconds) for rank, seconds in self._waited().items()), default=0.0)
        return max(passed - starved, passed / MAX_STARVED)


def main_stack(dump: str) -> str:
    """Return the innermost calls of the main thread from a dump of `faulthandler`. A dump lists the main thread last, and a
    thread's innermost call first."""
    sections = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x|Stack \(most recent)", collective_progress.without(dump))
    return "\n".join(sections[-1].strip().splitlines()[:TAIL_LINES])


def oom_kills() -> int:
    """Return how many processes the kernel's out-of-memory killer has ended since boot; 0 if the kernel does not report the
    number."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

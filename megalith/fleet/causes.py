"""Finds out why ranks ended, and which rank failed first. When one rank fails, others fail as a consequence, because their
connections break or their collectives time out. The user must see the first cause, so an error that only reports a lost peer is
never preferred to another error.
"""

import json
import re
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megalith import disk
from megalith.fleet.evidence import last_words, tail
from megalith.fleet.exit_codes import ORDERLY, ExitCode

SECONDARY_TYPES = frozenset({"DistNetworkError", "DistStoreError", "DistBackendError", "DistQueueEmptyError", "StoreGone"})
"""Names of exceptions that torch.distributed and Megalith's store raise when another rank or the store is gone."""

SECONDARY_TEXTS = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)"  # gloo, sockets: "Connection closed by peer"
    r"|broken pipe|socket (closed|timeout)|peer closed"
    r"|connectFullMesh failed|pair closure|pair is not connected"  # gloo
    r"|timed out waiting \d+ ?ms for (recv|send)"  # gloo collectives
    r"|timed out after \d+ seconds waiting for clients|socket has timed out|waitForInput|wait timeout after"  # stores
    r"|remote process exited|ncclRemoteError|NCCL communicator was aborted|watchdog caught collective operation timeout"
    r"|collective operation timeout|failed to recv, got 0 bytes|recvValue failed",
    re.IGNORECASE,
)
"""Pattern of error messages of ranks that lost a peer."""

DEVICE_FAULTS = re.compile(
    r"uncorrectable ECC error"  # cudaErrorECCUncorrectable
    r"|uncorrectable NVLink error"  # cudaErrorNvlinkUncorrectable
    r"|CUDA-capable device(s|\(s\)) (are|is/are) busy or unavailable"  # cudaErrorDevicesUnavailable
    r"|GPU is lost|fallen off the bus",  # NVML_ERROR_GPU_IS_LOST, and what it means
    re.IGNORECASE,
)
"""Pattern of error messages that report a fault of the device, according to NVIDIA's CUDA Runtime and NVML references.

An unspecified launch failure, a hardware stack error and an illegal memory access are left out, because according to these
references, bugs in a program usually cause them. NCCL's ncclUnhandledCudaError is also left out, because its text quotes the CUDA
error, to which this pattern applies.
"""


@dataclass(frozen=True)
class Exit:
    """The end of one rank's process. `code`: an exit status, or a negative signal number, as in `subprocess`. `time`: seconds
    since the epoch."""

    rank: int
    code: int
    time: float

    @property
    def orderly(self) -> bool:
        """True if the rank ended without a failure: it finished all steps, or saved the state and stopped."""
        return self.code in ORDERLY


@dataclass(frozen=True)
class Failure:
    """A process that failed: a rank, or, if `rank` is None, the process that `process` names. `error`: the Python error in one line; empty
    if there was none. `traceback`: the Python traceback, or the last lines of the log. `code`: exit status that the run should have after
    this failure. `status`: exit status or negative signal number of the process. `hardware`: a device reported a fault of its own.
    """

    rank: int | None
    reason: str
    error: str
    traceback: str
    log: Path
    time: float
    code: int
    secondary: bool = False
    status: int = 0
    hardware: bool = False
    process: str = "the fork server"
    node: str = ""
    """The node of a process that is no rank; empty: unknown, or the only one."""

    @property
    def name(self) -> str:
        """Name of the failed process, for use in a sentence."""
        return self.process if self.rank is None else f"rank {self.rank}"


@dataclass(frozen=True)
class RankError:
    """The Python error that a rank saved before it ended (`rank-R.error.json`)."""

    type: str
    message: str
    traceback: str
    time: float
    phase: str

    @property
    def line(self) -> str:
        """The error in one line."""
        first = self.message.strip().partition("\n")[0]
        return f"{self.type}: {first}" if first else self.type


def signal_name(number: int) -> str:
    """Return a signal's name (9: SIGKILL); most real-time signals have only a number ("signal 40")."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_device_fault(text: str) -> bool:
    """True if an error message reports a fault of the device."""
    return DEVICE_FAULTS.search(text) is not None


def is_secondary(type_name: str, text: str) -> bool:
    """True if an error only reports that another rank is gone."""
    if is_device_fault(text):  # communication fails of it, too
        return False
    return type_name.rpartition(".")[2] in SECONDARY_TYPES or SECONDARY_TEXTS.search(text) is not None


def status(error: BaseException) -> int:
    """Return the exit status for an exception: the one that it carries; else LOST, if another rank or storage was lost; else
    FAILED."""
    code = error.code if isinstance(error, SystemExit) else getattr(error, "exit_code", None)
    if code is None and isinstance(error, SystemExit):
        return ExitCode.FINISHED
    if code is None and (is_secondary(type(error).__name__, str(error)) or disk.is_unavailable(error)):
        return ExitCode.LOST
    return code if isinstance(code, int) and 0 <= code <= 255 else ExitCode.FAILED


def read_error(path: Path) -> RankError | None:
    """Read a rank's error file; None if the rank wrote no file, or the file cannot be read."""
    try:
        return RankError(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):  # also if a full disk cut it off
        return None


def describe(end: Exit, *, error: RankError | None, log: Path, output: str, phase: str, oom_kills: int) -> Failure:
    """Classify a rank's abnormal end.

    `output`: the rank's output. `phase`: the phase in the rank's last heartbeat. `oom_kills`: how many processes the kernel's
    out-of-memory killer ended while the ranks ran.
    """
    if error is not None:
        reason = f"raised {error.type} in phase `{error.phase}`"
        code = end.code if end.code > 0 else ExitCode.LOST  # it may have been killed after it wrote the error down
        secondary, hardware = is_secondary(error.type, error.message), is_device_fault(error.message)
        return Failure(end.rank, reason, error.line, tail(error.traceback), log, error.time, code, secondary, end.code, hardware)
    evidence = last_words(output)
    hardware = is_device_fault(evidence)
    if end.code > 0:
        reason = f"exited with status {end.code} and without a Python error in phase `{phase}`"
        return Failure(end.rank, reason, "", evidence, log, end.time, end.code, is_secondary("", evidence), end.code, hardware)
    reason = f"killed by {signal_name(-end.code)} in phase `{phase}`"
    if end.code == -signal.SIGKILL:
        reason += (
            f" (out of memory: the kernel's out-of-memory killer ended {oom_kills} process{'es' * (oom_kills > 1)} during the "
            "ranks' lifetime)"
            if oom_kills
            else " (not out of memory, as far as the kernel reports; probably `kill -9` by another process)"
        )
    # A C++ thread of gloo or NCCL that loses its peer ends the process with SIGABRT; the text is in the log only.
    secondary = end.code == -signal.SIGABRT and is_secondary("", evidence)
    return Failure(end.rank, reason, "", evidence, log, end.time, ExitCode.LOST, secondary, end.code, hardware)


def first(failures: Iterable[Failure]) -> Failure | None:
    """Return the first cause: the earliest failure that is not a consequence of another one; if all are consequences, the
    earliest of them."""
    return min(failures, key=lambda failure: (failure.secondary, failure.time), default=None)


def conclusive(failures: Sequence[Failure]) -> bool:
    """True if `failures` already include a first cause, so that waiting cannot find a better one."""
    return any(not failure.secondary for failure in failures)

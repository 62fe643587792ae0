"""The only table of a run's exit statuses: their meaning, and whether the same command should be run again."""

from dataclasses import dataclass
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit status of `megalith train` and of each rank. A rank that a signal killed has no exit status, so the supervisor uses
    LOST."""

    FINISHED = 0
    FAILED = 1
    BAD_SPECIFICATION = 2
    LOST = 71  # EX_OSERR of sysexits.h
    STOPPED = 75  # EX_TEMPFAIL of sysexits.h: "the user is invited to retry"
    REPORTED = 76  # of a rank alone: it has told the supervisor what it saw
    INTERRUPTED = 130  # 128 + SIGINT, as shells report it
    TERMINATED = 143  # 128 + SIGTERM, as shells report it


@dataclass(frozen=True)
class Meaning:
    """`text` is for people. `retry` is for schedulers: True if the same command can make progress when it is run again
    unchanged."""

    text: str
    retry: bool


MEANINGS: dict[ExitCode, Meaning] = {
    ExitCode.FINISHED: Meaning("every step was done", retry=False),
    ExitCode.FAILED: Meaning(
        "the program raised an error, or data or checkpoints are damaged; the same command would most likely fail again",
        retry=False,
    ),
    ExitCode.BAD_SPECIFICATION: Meaning(
        "the run file or an option is wrong, or another site has other values; nothing was trained", retry=False
    ),
    ExitCode.LOST: Meaning(
        "a process was killed or stopped responding, or storage was lost; the same command resumes from the newest intact copy of the "
        "state",
        retry=True,
    ),
    ExitCode.STOPPED: Meaning(
        "a signal or an order requested a stop, and the state was saved; the same command resumes the run", retry=True
    ),
    ExitCode.REPORTED: Meaning(
        "a rank detected a fault and reported it in `ranks/reports` and in events of kind `incident`", retry=True
    ),
    ExitCode.INTERRUPTED: Meaning(
        "a second Ctrl-C ended the run at once; the steps since the newest copy of the state are lost", retry=True
    ),
    ExitCode.TERMINATED: Meaning(
        "a stop was requested, but no rank could save, because the ranks were starting or the run waited for a node", retry=True
    ),
}

ORDERLY = frozenset({ExitCode.FINISHED, ExitCode.STOPPED})
"""Exit statuses of a rank that ended without a failure: it finished all steps, or saved the state and stopped."""


def retryable(code: int) -> bool:
    """True if a scheduler may run the same command again; False if MEANINGS does not have the status."""
    return code in MEANINGS and MEANINGS[ExitCode(code)].retry

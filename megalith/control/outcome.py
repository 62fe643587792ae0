"""The outcome of a run, as a value and as text for a person."""

import re
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megalith.fleet.causes import Exit, Failure, RankError
from megalith.fleet.exit_codes import ORDERLY, ExitCode
from megalith.fleet.report import Reported

MAX_LINES = 8
"""Maximum number of lines of a message. With the lines on run folder and report that the command adds, a failure takes ten lines
at most."""

EVIDENCE_LINES = 3
"""Number of lines of evidence in a message; the incident's file has all lines."""

LINE_CHARACTERS = 600
"""Maximum number of characters in a line of a message, because an error may quote a whole tensor."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run. `code`: the exit status (`exit_codes`). `stopped`: a signal requested the run's end. `consequences`:
    failures that followed from the first cause. `ended`: the ranks that the supervisor killed. `ready_seconds`: seconds until all
    ranks were ready (None: never). `report`: the policy's reason to stop the run; empty if it did not. `file`: path of the
    failure's record (`control.incidents`); None if it was not written.
    """

    code: int
    stopped: bool
    first_cause: Failure | None
    consequences: tuple[Failure, ...]
    exits: tuple[Exit, ...]
    ended: tuple[int, ...]
    ready_seconds: float | None
    report: str = ""
    file: Path | None = None

    def message(self) -> str:
        """Return a message of at most MAX_LINES lines: the cause, its consequences, and the file with the details."""
        cause = self.first_cause
        if cause is None:
            return _cut(self.report) or _PEACEFUL[self.code]
        where = [f"output of {cause.name}: {cause.log}"]
        if self.file is not None:
            where.append(f"tracebacks and the output of each rank are in {self.file}")
        after = self._led_to()
        return "\n".join([*self._what_failed(cause)[: MAX_LINES - len(where) - len(after)], *after, *where])

    def _what_failed(self, cause: Failure) -> list[str]:
        if not self.report:
            return [f"{cause.name} {cause.reason}", *_error(cause), *_place(cause)]
        if cause.secondary or _reported(cause):  # lost connections tell nothing; the incident's report has what ranks reported
            return [_cut(self.report)]
        said = (cause.error or cause.reason).rstrip(".") in self.report
        error = _error(cause)
        return [_cut(self.report), *(error[1:] if said else error), *_place(cause)]

    def _led_to(self) -> list[str]:
        said = []
        failed = sorted({failure.rank for failure in self.consequences if failure.rank is not None})
        if failed:
            said.append(f"{_ranks(failed)} failed after it")
        if self.ended:
            said.append(f"{_ranks(self.ended)} {'were' if len(self.ended) > 1 else 'was'} ended")
        early = [end.rank for end in self.exits if end.code in ORDERLY]
        if early:
            said.append(f"{_ranks(early)} had ended normally")
        return ["; ".join(said)] if said else []


_PEACEFUL: dict[int, str] = {
    ExitCode.FINISHED: "finished",
    ExitCode.STOPPED: "stopped on request, and the state was saved: the same command resumes the run",
    ExitCode.INTERRUPTED: "ended at once by a second Ctrl-C: the same command resumes from the newest copy of the state",
    ExitCode.TERMINATED: "stopped on request while no rank could save: the same command resumes from the newest copy of the state",
}

_FRAME = re.compile(r'^\s*File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)$', re.MULTILINE)
_LIBRARY = re.compile(r"/(site|dist)-packages/|/lib/python3")


def _reported(cause: Failure) -> bool:
    return cause.code == ExitCode.REPORTED or cause.error.startswith(f"{Reported.__module__}.{Reported.__qualname__}:")


def _error(cause: Failure) -> list[str]:
    if not cause.error:
        return []
    lines = cause.traceback.splitlines()
    if cause.secondary or cause.error not in lines:  # what follows a lost connection is a stack of C++
        return [_cut(cause.error)]
    begun = len(lines) - 1 - lines[::-1].index(cause.error)
    return [_cut(line) for line in lines[begun : begun + 1 + EVIDENCE_LINES] if line.strip()]


def _place(cause: Failure) -> list[str]:
    """Return the place at which an error was raised, or the most important evidence: the innermost calls of a stack, or the last
    lines of an output."""
    frames = [frame for frame in _FRAME.finditer(cause.traceback) if not _LIBRARY.search(frame["path"])]
    if cause.error and frames:
        code = cause.traceback[frames[-1].end() :].lstrip("\n").partition("\n")[0].strip()
        place = f"  in {frames[-1]['path']}, line {frames[-1]['line']}, in {frames[-1]['function']}"
        return [place + (f": {code}" if code else "")]
    if cause.error:
        return []
    lines = [_cut(line) for line in cause.traceback.splitlines() if line.strip()]
    kept = lines[:EVIDENCE_LINES] if "most recent call first" in cause.traceback else lines[-EVIDENCE_LINES:]
    return [f"  {line.strip()}" for line in kept]


def in_words(error: BaseException, rank: int) -> list[str]:
    """Return the exception that ends a rank of another launcher as at most MAX_LINES lines."""
    kind, text = type(error), "".join(traceback.format_exception(error))
    name = kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    line = RankError(name, str(error), text, 0.0, "").line
    cause = Failure(rank, "failed", line, text, Path(), 0.0, ExitCode.FAILED)
    return [f"{cause.name} failed", *_error(cause), *_place(cause)]


def without_ranks(code: int, *, report: str = "") -> Outcome:
    """Return the outcome of a run that ends at a time when no rank runs."""
    return Outcome(code, code != ExitCode.LOST, None, (), (), (), None, report)


def _cut(text: str) -> str:
    return text if len(text) <= LINE_CHARACTERS else f"{text[: LINE_CHARACTERS - 2]} …"


def _ranks(ranks: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (len(ranks) > 1)} {_cut(', '.join(words))}"

"""Writes an incident's file: a record for a person of everything that is known about a failure of ranks. The terminal shows only
the most important lines."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path

from megalith import disk, epochs, events
from megalith.control.outcome import Outcome
from megalith.fleet import causes
from megalith.fleet.causes import Failure

FOLDER = "incidents"


def write(outcome: Outcome, run_dir: Path, *, number: int | None = None, epoch: int = 0) -> Outcome:
    """Write the record of a run's failure to a file, and return the outcome with the file's name. If there was no failure, or
    storage is unavailable, return the outcome unchanged. `number`: the incident's number in the event log; None: the next free
    number. `epoch`: the number in the file names of the run folder's owner (`megalith.epochs`)."""
    if outcome.first_cause is None:
        return outcome
    folder = run_dir / epochs.name(FOLDER, epoch)
    with disk.if_available():
        folder.mkdir(exist_ok=True)
        number = number if number is not None else 1 + len(list(folder.glob("*.txt")))
        path = folder / f"{number:03}.txt"
        disk.write_whole(path, _text(outcome, outcome.first_cause, number))
        return replace(outcome, file=path)
    return outcome


def _text(outcome: Outcome, cause: Failure, number: int) -> str:
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    parts = [f"incident {number}, {now}", outcome.report, f"first cause: {_told(cause)}"]
    parts += [f"after it: {_told(failure)}" for failure in outcome.consequences]
    parts.append("exit statuses: " + ", ".join(f"rank {end.rank}: {end.code}" for end in outcome.exits))
    if outcome.ended:
        parts.append("ended by the supervisor: rank " + ", ".join(map(str, outcome.ended)))
    return "\n\n".join(part for part in parts if part) + "\n"


def _told(failure: Failure) -> str:
    written = causes.read_error(failure.log.with_name(f"rank-{failure.rank}.error.json"))
    evidence = written.traceback if written is not None and failure.error == written.line else failure.traceback
    lines = [f"{failure.name} {failure.reason}", *([failure.error] if failure.error else []), f"output: {failure.log}"]
    return "\n".join([*lines, *(f"    {line}" for line in evidence.rstrip().splitlines())])


def count(run_dir: Path) -> int:
    """Return the number of incidents in the run's event log; 0 if the log cannot be read."""
    with disk.if_available(run_dir / events.FILE):
        return len(events.of_kind(events.read(run_dir), events.Incident))
    return 0

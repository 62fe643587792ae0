"""Reports of a rank to its supervisor: observations of faults that only the rank itself can detect.

Each report is a separate file, written in full and then renamed, so that readers never see a partial report, and reports remain
after a rank's end.
"""

import contextlib
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from megalith import disk
from megalith.fleet import observations
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.observations import Observation
from megalith.fleet.rank_info import REPORTS, RankInfo, node_folder, ranks_of, slot_of

__all__ = ["RankInfo", "Reported", "collect", "node_folder", "ranks_of", "refusing", "report", "slot_of"]


class Reported(RuntimeError):  # noqa: N818  # it says what was done
    """Exception that ends a rank after it has reported an observation, to which other processes respond."""

    exit_code = ExitCode.REPORTED


class Unreachable(Reported):
    """Exception that ends a rank which cannot access storage that the run has used. The same command can succeed later."""

    exit_code = ExitCode.LOST


def report(observation: Observation, environment: Mapping[str, str] = os.environ) -> None:
    """Report an observation to the supervisor. If another launcher started the ranks, there is no supervisor, and the observation
    is printed."""
    text = json.dumps(observations.dump(observation))
    folder = environment.get(REPORTS)
    if folder is None:
        print(f"seen: {text}", flush=True)
        return
    path = Path(folder) / f"rank-{environment.get('RANK', '0')}-{secrets.token_hex(4)}.json"
    with disk.if_available(path):
        disk.write_whole(path, text)


def report_stop(step: int) -> None:
    """Report that this rank's code stops the run, if a controller started the rank: a controller resumes ranks that stop unasked."""
    if REPORTS in os.environ:
        report(observations.Ordered(time=time.time(), step=step, what="stop"))


@contextlib.contextmanager
def refusing(*errors: type[Exception]) -> Iterator[None]:
    """Report and end this rank if the block raises one of `errors`, which mean that a file or a site does not belong to this run. If
    another launcher started the ranks, the error itself is raised.
    """
    try:
        yield
    except errors as error:
        if REPORTS not in os.environ:
            raise
        code = int(getattr(error, "exit_code", ExitCode.FAILED))
        report(observations.NotThisRun(time=time.time(), error=str(error), code=code))
        raise Reported(str(error)) from error


def collect(folder: Path) -> list[Observation]:
    """Return the reports that have arrived, oldest first, and delete them. An unreadable report is renamed to `*.unreadable`."""
    found: list[Observation] = []
    with disk.if_available():  # a report left there is read by a later call
        for path in sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime_ns):
            try:
                observation = observations.load(json.loads(path.read_text(encoding="utf-8")))
            except ValueError:  # torn JSON, an unknown tag, or fields that do not fit
                path.rename(path.with_suffix(".unreadable"))
                continue
            path.unlink()
            found.append(observation)
    return found

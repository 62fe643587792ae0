"""Checks of a machine before a start, and before it returns from quarantine. A quick look before a first start; all checks before
a node returns that was taken out."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from megalith import disk
from megalith.machine import gpus, health
from megalith.machine.health import MIB, Finding, Needs

MINIMUM = Needs(memory=256 * MIB, disk=64 * MIB, shared_memory=16 * MIB, loopback=10 * MIB, descriptors=256)
"""Minimum resources to start a run; far below what a run should have, by which `megalith doctor` judges."""

ANYWAY = 'To start without this check, set fleet.check to "return"; `megalith doctor` shows more'

CLOCK_SECONDS, LOOPBACK_SECONDS = 0.02, 0.5
FIRST_PAUSE, LAST_PAUSE = 1.0, 10.0  # seconds between checks of a machine that waits to be fit


def before_start(folder: Path, *, needs: Needs = MINIMUM) -> list[Finding]:
    """Check a machine before ranks are first started on it, in a tenth of a second. `folder` is where the run will write.

    Measurements of time never fail here: a machine may be busy, and still be sound.
    """
    if (mount := disk.bare_mount(folder)) is not None:  # nothing may be written there, not even to look
        limit, way_out = "mounted, as /etc/fstab expects", "Mount it, or choose another --run-dir"
        return [Finding("file system", "fail", f"nothing is mounted at {mount}", limit, way_out)]
    return [
        health.memory(needs.memory),
        health.disk_space(folder, needs.disk),
        health.writable(folder),
        _warns(health.shared_memory(needs.shared_memory)),  # a run without has no copies there, and says so
        health.descriptors(needs.descriptors),
        _warns(health.clock(needs.clock, seconds=CLOCK_SECONDS)),
        health.loopback(needs.loopback, size=1 << 20, patience=LOOPBACK_SECONDS, timed=False),
    ]


class UnfitError(RuntimeError):
    """This machine is not fit to start ranks on, and why."""


def admit(folder: Path) -> None:
    """Check this machine `before_start`, and print the resources that are short. Raises UnfitError with all that failed."""
    found = before_start(folder)
    for one in found:
        if one.verdict == "warn":
            print(one, file=sys.stderr, flush=True)
    if wrong := failures(found):
        raise UnfitError(f"this machine ({platform.node()}) is not fit to start on: {wrong}. {ANYWAY}")


def await_fitness(folder: Path, *, seconds: float, notify: Callable[[str], None]) -> bool:
    """Check this machine `before_start` until it passes, for `seconds` at most; return whether it passed. `notify` is
    called
    with the problems whenever they change."""
    end, pause, said = time.monotonic() + seconds, FIRST_PAUSE, list[str]()
    while True:
        found = [one for one in before_start(folder) if one.verdict == "fail"]
        if not found:
            return True
        if (failing := [one.check for one in found]) != said:
            said = failing
            notify(failures(found))
        left = end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(pause, left))
        pause = min(2 * pause, LAST_PAUSE)


def before_return(folder: Path, *, burn_in: Sequence[str] = (), seconds: float = 120.0) -> list[Finding]:
    """Check a node that was taken out, before it returns: the doctor's checks, its GPUs', and `burn_in`, a command that prints findings as
    JSON within `seconds`."""
    found = [*health.doctor(folder), *gpus.doctor()]
    return [*found, *(burnt(burn_in, seconds=seconds) if burn_in else [])]


def burnt(command: Sequence[str], *, seconds: float) -> list[Finding]:
    """The findings of a burn-in, which runs in a separate process because it needs torch. A burn-in without output, or without
    output in time, fails."""
    check, limit = "burn-in", f"done within {seconds:g} s"
    way_out = "`megalith doctor` on this machine shows more"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return [Finding(check, "fail", f"not done in {seconds:g} s", limit, way_out)]
    except OSError as error:
        return [Finding(check, "fail", f"could not be started: {error}", limit, way_out)]
    try:
        found = [Finding(**one) for one in json.loads(done.stdout)]
    except (ValueError, TypeError):
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return [Finding(check, "fail", f"status {done.returncode}: {last[:300]}", limit, way_out)]
    return found or [Finding(check, "fail", "it said nothing", limit, way_out)]


def burn_in(seconds: float, device: str) -> tuple[str, ...]:
    """The command of a burn-in for `before_return`; none for 0 seconds. `device`: as `train.device` says."""
    if not seconds:
        return ()
    return (sys.executable, "-m", "megalith.prove.doctor", "--seconds", str(seconds), "--device", device)


def failures(found: Iterable[Finding]) -> str:
    """List the failed checks in words; empty when none failed."""
    return "; ".join(f"{one.check}: {one.value} (limit: {one.limit}). {one.way_out}" for one in found if one.verdict == "fail")


def _warns(finding: Finding) -> Finding:
    """A finding that does not fail, but warns."""
    return replace(finding, verdict="warn") if finding.verdict == "fail" else finding

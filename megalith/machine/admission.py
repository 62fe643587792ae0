"""Checks of a machine: quick ones before ranks are first started on it, and all checks before a quarantined node returns."""

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
"""Minimum resources to start a run, far below the recommended resources by which `megalith doctor` judges."""

ANYWAY = 'To start without the check of the machine, set fleet.check to "return"; `megalith doctor` makes more checks'

CLOCK_SECONDS, LOOPBACK_SECONDS = 0.02, 0.5
FIRST_PAUSE, LAST_PAUSE = 1.0, 10.0  # seconds between checks of a machine that waits to be fit


def before_start(folder: Path, *, needs: Needs = MINIMUM) -> list[Finding]:
    """Check a machine before ranks are first started on it, in a tenth of a second. `folder` is where the run will write.

    No measurement of time fails here, because a healthy machine may be busy.
    """
    if (mount := disk.bare_mount(folder)) is not None:  # nothing may be written there, not even to look
        limit, way_out = "mounted, as /etc/fstab expects", "Mount the file system, or choose another --run-dir"
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
    """This machine is not fit to start ranks on; the message has the reasons."""


def admit(folder: Path) -> None:
    """Check this machine with `before_start`, and print which resources are low. Raises UnfitError with all failed checks."""
    found = before_start(folder)
    for one in found:
        if one.verdict == "warn":
            print(one, file=sys.stderr, flush=True)
    if wrong := failures(found):
        raise UnfitError(f"this machine ({platform.node()}) is not fit to start ranks: {wrong}. {ANYWAY}")


def await_fitness(folder: Path, *, seconds: float, notify: Callable[[str], None]) -> bool:
    """Check this machine with `before_start` again and again until it passes, for `seconds` at most. Return True if it passed.
    `notify` is called with the failed checks whenever they change."""
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
    """Check a quarantined node before it returns to the run: by the doctor's checks, checks of its GPUs, and `burn_in`, a command
    that prints findings as JSON within `seconds`."""
    found = [*health.doctor(folder), *gpus.doctor()]
    return [*found, *(burnt(burn_in, seconds=seconds) if burn_in else [])]


def burnt(command: Sequence[str], *, seconds: float) -> list[Finding]:
    """Run a burn-in and return its findings. The burn-in is a separate process, because it needs torch. A burn-in that prints
    nothing in time fails."""
    check, limit = "burn-in", f"done within {seconds:g} s"
    way_out = "For more findings, run `megalith doctor` on this machine, which includes a burn-in"
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=seconds, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return [Finding(check, "fail", f"not finished within {seconds:g} s", limit, way_out)]
    except OSError as error:
        return [Finding(check, "fail", f"could not be started: {error}", limit, way_out)]
    try:
        found = [Finding(**one) for one in json.loads(done.stdout)]
    except (ValueError, TypeError):
        last = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return [Finding(check, "fail", f"status {done.returncode}: {last[:300]}", limit, way_out)]
    return found or [Finding(check, "fail", "it printed nothing", limit, way_out)]


def burn_in(seconds: float, device: str) -> tuple[str, ...]:
    """Return the command of a burn-in for `before_return`; an empty command if `seconds` is 0. `device`: a value of
    `train.device`."""
    if not seconds:
        return ()
    return (sys.executable, "-m", "megalith.prove.doctor", "--seconds", str(seconds), "--device", device)


def failures(found: Iterable[Finding]) -> str:
    """Describe the failed checks; empty if none failed."""
    return "; ".join(f"{one.check}: {one.value} (limit: {one.limit}). {one.way_out}" for one in found if one.verdict == "fail")


def _warns(finding: Finding) -> Finding:
    return replace(finding, verdict="warn") if finding.verdict == "fail" else finding

"""`megalith clean`: remove copies of state that ended runs left in this machine's memory and on its disks."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from megalith.commands.shared.arguments import Json
from megalith.commands.shared.output import print_json
from megalith.report.units import counted

if TYPE_CHECKING:
    from megalith.control.leftovers import Leftover


def command(
    run_dirs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN_DIR", help="Run folders. Default: all runs of this user.", show_default=False),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    disk: Annotated[
        list[Path] | None,
        typer.Option("--disk", metavar="FOLDER", help="A folder that a run set as `fleet.disk`. May be repeated."),
    ] = None,
    as_json: Json = False,
) -> int:
    """List and remove copies of state that ended runs left in this machine's memory and on its disks.

    A run copies its state into /dev/shm, and to fleet.disk if set, so that it recovers in seconds. A run that finished, or that was
    stopped and saved, leaves no copies. After any other end, the copies stay in memory until the same command resumes the run from them.
    Remove the copies if the run will not be resumed: the steps since its newest checkpoint are then lost. Checkpoints, and copies of
    running runs, are never touched.

    Example:  megalith clean runs/first --yes
    """
    from megalith.control import leftovers

    wanted = run_dirs or [None]
    found = [one for run_dir in wanted for one in leftovers.find(run_dir=run_dir, disks=disk or ())]
    ended = [one for one in found if one.state != "in use"]
    if not as_json:
        _list(found)
        yes = yes or (bool(ended) and _asked(ended))
    cleared = [one for one in ended if leftovers.clear(one)] if yes else []
    failed = [one for one in ended if one not in cleared] if yes else []
    if as_json:
        rows = [asdict(one) | {"cleared": one in cleared} for one in found]
        print_json({"ok": not failed, "found": rows})
    elif cleared:
        print(f"cleared {counted(len(cleared), 'folder')}, {_size(cleared)}")
    for one in failed:
        print(f"{one.path} was not cleared: a process is using it, or its files cannot be removed", file=sys.stderr)
    return int(bool(failed))


def left_by(run_dir: Path) -> list[str]:
    """Return sentences about the copies of state that an ended run leaves on this machine."""
    from megalith.control import leftovers

    ended = [one for one in leftovers.find(run_dir=run_dir) if one.state == "ended"]
    return [
        (
            f"left in {one.where}: {_describe(one)}. The same command resumes from this copy; `megalith clean {run_dir}` clears "
            "the copy"
        )
        for one in ended
    ]


def _asked(ended: "list[Leftover]") -> bool:
    """Ask for confirmation on a terminal. Without a terminal, print that --yes is needed, and return False."""
    if not sys.stdin.isatty():
        print("nothing was cleared: add --yes to clear the copies that no run uses")
        return False
    return typer.confirm(f"Clear {counted(len(ended), 'folder')}, {_size(ended)}?")


def _list(found: "list[Leftover]") -> None:
    if not found:
        print("no run has left anything in this machine's memory, or in the searched folders of its disks")
    for one in found:
        print(f"{one.state:<9}  {one.where:<6}  {_describe(one)}, of {one.run}{_checkpoint(one)}")


def _describe(one: "Leftover") -> str:
    step = "" if one.step is None else f", the state after step {one.step:,}"
    return f"{_size([one])} in {one.path}{step}"


def _size(found: "list[Leftover]") -> str:
    from megalith.report import units

    return units.memory(sum(one.bytes for one in found))


def _checkpoint(one: "Leftover") -> str:
    from megalith import epochs
    from megalith.checkpoint.folder import FOLDER, latest, read_manifest

    if one.state == "abandoned":
        return " (this run folder is gone, or holds another run)"
    try:
        one.run.stat()
        newest = latest(epochs.newest(one.run, FOLDER))
        return (
            ", whose newest checkpoint is of step " + f"{read_manifest(newest).step:,}" if newest else ", which has no checkpoint"
        )
    except (OSError, ValueError):
        return ", whose folder cannot be read now"

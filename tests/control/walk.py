"""A run without torch: ranks take steps, save their state like checkpoints, and wait for each other after every step."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from megalith.fleet import hooks
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.heartbeat import Heartbeat
from megalith.fleet.observations import CopyCorrupt, Preempted
from megalith.fleet.report import RankInfo, Reported, report
from megalith.fleet.tiers import Copy, Tier


def checkpoints(run_dir: Path) -> tuple[Copy, ...]:
    """Return the steps that all ranks have saved."""
    steps: dict[int, int] = {}
    for path in run_dir.glob("state-*-*"):
        step = int(path.name.split("-")[1])
        steps[step] = steps.get(step, 0) + 1
    world = int((run_dir / "world").read_text()) if (run_dir / "world").exists() else 0
    return tuple(Copy(Tier.STORE, step) for step, count in steps.items() if count == world)


def walk(steps: int, nap: float = 0.02, every: int = 3, source: dict[str, Any] | None = None) -> None:
    """Add up numbers. Each rank's sum depends on that of the rank before, and every step waits for all ranks."""
    folder, rank_info, beats = Path(os.environ["MEGALITH_RUN_DIR"]), RankInfo.find(), Heartbeat.find()
    _put(folder / "world", str(rank_info.world), rank_info)
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    beats.beat("building")
    hooks.at("building")
    step, total = 0, rank_info.rank
    if source and source["tier"] is not None:
        step, total = _restore(folder / f"state-{source['step']}-{rank_info.rank}", step=source["step"])
    beats.beat("ready")
    while step < steps:
        beats.beat("step", step, compute=nap)
        hooks.at("step", step)
        if asked and not (folder / "stop").exists():
            report(Preempted(time=time.time(), step=step, node=rank_info.node, rank=rank_info.rank))
            _put(folder / "stop", str(step + 3), rank_info)  # not this step's file: other ranks may already have read it
        time.sleep(nap)
        total, step = (total * 31 + step + 1) % 1_000_003, step + 1
        stop = (folder / "stop").exists() and (folder / "stop").read_text() == str(step)
        if stop or step == steps or step % every == 0:
            _put(folder / f"state-{step}-{rank_info.rank}", json.dumps([step, total]), rank_info)
        wait_for_all(folder, rank_info, step)
        if stop:
            raise SystemExit(ExitCode.STOPPED)


def _restore(path: Path, *, step: int) -> tuple[int, int]:
    """Return steps and sum. An unreadable file is treated like a copy that fails its digest check."""
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        report(CopyCorrupt(time=time.time(), step=step, tier=Tier.STORE, copy_step=step, error=str(error)))
        raise Reported(str(error)) from error


def _put(path: Path, text: str, rank_info: RankInfo) -> None:
    """Write a file atomically, so that no process reads it half-written."""
    part = path.with_name(f"part-{path.name}-{rank_info.rank}")
    part.write_text(text)
    part.rename(path)


def wait_for_all(folder: Path, rank_info: RankInfo, step: int) -> None:
    """Wait until every rank of this generation has reached this step."""
    name = f"meet-{os.environ['MEGALITH_GENERATION']}-{step}"
    (folder / f"{name}-{rank_info.rank}").touch()
    while len(list(folder.glob(f"{name}-*"))) < rank_info.world:
        time.sleep(0.002)

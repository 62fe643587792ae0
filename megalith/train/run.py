"""A rank of a training run, from its process to its last step. `main` is what every launcher calls."""

import json
import os
import platform
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from megalith import __version__, events
from megalith.checkpoint.checkpointer import Checkpointer
from megalith.data.tokenizer import copy as copy_tokenizer
from megalith.events import EventLog, Holding, Problem, RunFinished, RunStarted
from megalith.fleet import causes, environment, hooks
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.heartbeat import Heartbeat
from megalith.fleet.report import report
from megalith.fleet.seat import REPORTS, Seat, ranks_of
from megalith.fleet.signs import Preempted, RankFailed
from megalith.fleet.tiers import Source
from megalith.machine import link, networks
from megalith.models.flops import CONVENTION
from megalith.parallel.groups import another
from megalith.spec.run import RunSpec
from megalith.spec.sizes import count_model
from megalith.train import inject, standing
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.copies import copies_of
from megalith.train.guard import Guard
from megalith.train.join import choose_device, join, keep_memory
from megalith.train.loop import Loop
from megalith.train.peak import Yardstick, yardstick_of
from megalith.train.profiler import Profile, idle_profile
from megalith.train.restore import first_sample, read_step, restore
from megalith.train.stream import open_stream
from megalith.train.validate import Validator


def main(run_dir: str, profile: str | None = None, source: dict[str, Any] | None = None, *, shrunk: bool = False) -> None:
    """Train the run described by `run_dir/spec.json` until its last step or a signal, continuing from its newest checkpoint.

    `profile` is "A:B": steps A to B - 1, as the event log numbers them, are traced by torch.profiler into `run_dir/profile/`. Exits with
    status STOPPED after a signal, once the state is saved. `source` is what to go on from, as a dictionary of `fleet.tiers.Source`; None:
    the newest intact checkpoint. `shrunk`: under the fleet's fallback plan.
    """
    folder = Path(run_dir)
    stop = _Stop()
    heartbeat = Heartbeat.find()
    heartbeat.beat("joining")
    hooks.at("joining")
    spec = RunSpec.model_validate_json((folder / "spec.json").read_text())
    if shrunk:
        spec = spec.model_copy(update={"plan": spec.fleet.fallback})
    networks.enter(Seat.find().node)
    _watch_link()
    place = environment.find()
    assert place is not None, "no rank in the environment: `megalith train` starts ranks"
    keep_memory()
    device = choose_device(spec.train.device, place.local_rank, place.local_world)
    standing.answer()
    world = join(place, launch=spec.launch, device=device)
    log = _open_log(spec, folder) if place.rank == 0 else None
    try:
        heartbeat.beat("building")
        hooks.at("building")
        loop = prepare(spec, folder, world=world, source=source_of(source), log=log, device=device, heartbeat=heartbeat)
        heartbeat.beat("ready")
        if profile and (idle := idle_profile(profile, done=loop.step, steps=spec.train.steps)):
            _warner(log)(idle)
        with Profile(folder, profile, place.rank, steps=spec.train.steps) as tick:
            reason = loop.run(stop=stop, after_step=tick)
        heartbeat.beat("leaving", loop.step)
        if log:
            log.write(RunFinished(reason=reason, step=loop.step))
    except Exception as error:
        _last_words(error, folder, log, rank=place.rank)
        raise
    if log:
        log.close()
    if loop.guard:
        loop.guard.close()
    dist.barrier(group=world)
    dist.destroy_process_group()
    if reason == "stopped":
        sys.exit(ExitCode.STOPPED)


def _last_words(error: Exception, folder: Path, log: EventLog | None, *, rank: int) -> None:
    """Say why the ranks end. One that lost a peer cannot tell whether to go on makes sense: what the peer said, if anything, stands. Where
    nobody listens (ranks of another launcher) every rank with an error of its own therefore says so."""
    hopeless = causes.status(error) == ExitCode.FAILED
    if log is None and (not hopeless or REPORTS in os.environ):
        return
    said = deque(events.read(folder), maxlen=1)
    peer_failed = bool(said) and isinstance(said[0], RunFinished) and said[0].reason == "failed"
    log = log or EventLog(folder)
    log.write(Problem("error", f"{type(error).__name__}: {error}", rank=rank))
    log.write(RunFinished(reason="failed" if hopeless or peer_failed else "lost", step=-1))


def _watch_link() -> None:
    """Where ranks are told by which interface they communicate, the first one of each node tells of it when it goes down."""
    name, seat = link.named(), Seat.find()
    if (
        name is None
        or REPORTS not in os.environ
        or seat.rank != ranks_of(seat.slot, world=seat.world, slots=len(seat.placement))[0]
    ):
        return

    def tell() -> None:
        text = f"the interface {name} is down"
        known = {"slot": seat.slot, "node": seat.node, "rank": seat.rank}
        report(RankFailed(time=time.time(), **known, signature="interface down", text=text, hardware=True))

    link.watch(name, tell)


def _open_log(spec: RunSpec, folder: Path) -> EventLog:
    if not spec.log.tensorboard:
        return EventLog(folder)
    from megalith.train.tensorboard import BoardLog  # an extra that takes seconds to import

    return BoardLog(folder)


def _warner(log: EventLog | None) -> Callable[[str], None]:
    """Tells the rank's own output, and the log where this rank writes one."""

    def warn(message: str) -> None:
        if log:
            log.write(Problem("warning", message))
        print(message, file=sys.stderr, flush=True)

    return warn


class _Stop:
    """Set by SIGTERM and SIGUSR1, whatever the rank is doing; read at the end of a step, where all ranks agree. Told at once, in case
    it is the scheduler that takes this node away: a supervisor knows whether it asked itself."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        if not self.asked and REPORTS in os.environ:
            seat = Seat.find()
            report(Preempted(time=time.time(), node=seat.node, rank=seat.rank))
        self.asked = True

    def __bool__(self) -> bool:
        return self.asked


def source_of(record: dict[str, Any] | None) -> Source | None:
    """The source that a launcher gave. Raises pydantic's ValidationError for anything else."""
    return None if record is None else TypeAdapter(Source).validate_python(record)


def prepare(
    spec: RunSpec,
    folder: Path,
    *,
    world: dist.ProcessGroup,
    source: Source | None,
    log: EventLog | None,
    device: torch.device,
    heartbeat: Heartbeat,
) -> Loop:
    """Everything up to the first step, on all ranks of `world` together."""

    warn = _warner(log)
    stream = open_stream(spec, "train")
    if stream.unchecked:
        warn(f"{spec.data.path} has no sums, so changes of its bytes are not seen: `megalith data verify` writes them")
    if log:
        copy_tokenizer(Path(spec.data.path), folder)
    held_out = open_stream(spec, "validation") if spec.validation.every else None
    groups = mesh_groups(spec, device, world)
    savers = another(world, timeout=timedelta(seconds=spec.launch.timeout))
    checkpointer = Checkpointer(folder / "checkpoints", keep=spec.checkpoint.keep, group=savers, warn=warn)
    trainer = assemble(spec, groups=groups, device=device)
    if spec.checkpoint.every and spec.checkpoint.asynchronous:
        checkpointer.reserve(trainer.state.tensors())  # now, so that the first save waits no longer than the others
    memory = copies_of(trainer, group=savers, warn=warn) if spec.fleet.recover else None
    heartbeat.beat("restoring")
    hooks.at("restoring")
    position = restore(trainer, checkpointer, stream, group=savers, warn=warn, source=source, memory=memory)
    guard = None
    if spec.fleet.recover:
        guard = Guard(trainer, seat=Seat.find(), read=partial(read_step, stream, spec, position), memory=memory)
        guard.begin(position.step, position.samples)
    yardstick = yardstick_of(trainer, folder)
    _introduce(trainer, yardstick, resumed=position.step, log=log)
    validator = Validator(trainer, held_out) if held_out else None
    injector = inject.watcher(reads=lambda step: stream.bytes_of(first_sample(spec, position, step, groups.coordinates["data"])))
    return Loop(
        trainer,
        stream,
        checkpointer,
        position,
        validator=validator,
        yardstick=yardstick,
        log=log,
        heartbeat=heartbeat,
        guard=guard,
        watchers=[injector] if injector else [],
    )


def holding_of(trainer: Trainer) -> Holding:
    """What this rank holds of the model, and the bytes of its state."""
    sizes = trainer.state.bytes()
    return Holding(
        rank=trainer.groups.rank,
        coordinates=trainer.groups.coordinates,
        parts=[name for stage in trainer.stages.values() for name in stage.part_names],
        parameters=sum(p.numel() for p in trainer.parameters.values()),
        weight_bytes=sizes["weights"],
        gradient_bytes=sizes["gradients"],
        optimizer_bytes=sizes["optimizer"],
    )


def _introduce(trainer: Trainer, yardstick: Yardstick, *, resumed: int, log: EventLog | None) -> None:
    """Tell the log who runs what."""
    spec, groups, mine = trainer.spec, trainer.groups, holding_of(trainer)
    everyone: list[Any] | None = [None] * groups.world.size() if groups.rank == 0 else None
    dist.gather_object(mine, everyone, group=groups.world, group_dst=0)
    if not log or everyone is None:
        return
    log.write(
        RunStarted(
            spec=json.loads(spec.model_dump_json()),
            device=torch.cuda.get_device_name() if trainer.device.type == "cuda" else platform.processor() or platform.machine(),
            world=groups.world.size(),
            resumed_step=resumed,
            versions={"python": platform.python_version(), "torch": torch.__version__, "megalith": __version__},
            peak_flops=yardstick.peak,
            peak_source=yardstick.source,
            flops_per_token=yardstick.flops_per_token,
            flops_convention=CONVENTION,
            parameters=count_model(trainer.model).total,
        )
    )
    for holding in everyone:
        log.write(holding)

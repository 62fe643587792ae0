"""A rank of a training run, from its process to its last step. `main` is what every launcher calls."""

import hashlib
import json
import os
import platform
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from megalith import __version__, events
from megalith.checkpoint.checkpointer import Checkpointer
from megalith.checkpoint.memory import Memory
from megalith.data.stream import Stream
from megalith.data.tokenizer import copy as copy_tokenizer
from megalith.data.whole import Damage
from megalith.events import EventLog, Holding, Problem, RunFinished, RunStarted
from megalith.fleet import causes, environment, link, networks
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.heartbeat import Heartbeat
from megalith.fleet.report import report
from megalith.fleet.seat import REPORTS, Seat, ranks_of
from megalith.fleet.signs import DataDamaged, Preempted, RankFailed, SaveFailed
from megalith.fleet.tiers import Source, Tier
from megalith.models.flops import CONVENTION, flops_per_token
from megalith.models.stage import Stage
from megalith.parallel.groups import MESSAGES_ONLY
from megalith.rehearse import faults
from megalith.spec import cluster
from megalith.spec.run import RunSpec
from megalith.train import inject, standing
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.guard import Guard
from megalith.train.join import choose_device, join, keep_memory, matmul_rate
from megalith.train.loop import Loop, Yardstick
from megalith.train.restore import first_sample, read_step, restore
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
    faults.at("joining")
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
    join(place, launch=spec.launch, device=device)
    log = _open_log(spec, folder) if place.rank == 0 else None
    try:
        heartbeat.beat("building")
        faults.at("building")
        loop = _prepare(spec, folder, source=source_of(source), log=log, device=device, heartbeat=heartbeat)
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
    dist.barrier()
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
    peer_failed = bool(said) and said[0]["type"] == RunFinished.kind and said[0]["reason"] == "failed"
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


def _prepare(
    spec: RunSpec, folder: Path, *, source: Source | None, log: EventLog | None, device: torch.device, heartbeat: Heartbeat
) -> Loop:
    """Everything up to the first step, on all ranks together."""

    warn = _warner(log)
    stream = open_stream(spec, "train")
    if stream.unchecked:
        warn(f"{spec.data.path} has no sums, so changes of its bytes are not seen: `megalith data verify` writes them")
    if log:
        copy_tokenizer(Path(spec.data.path), folder)
    held_out = open_stream(spec, "validation") if spec.validation.every else None
    groups = mesh_groups(spec, device)
    savers = dist.new_group(backend="gloo", timeout=timedelta(seconds=spec.launch.timeout))
    assert isinstance(savers, dist.ProcessGroup)
    checkpointer = Checkpointer(folder / "checkpoints", keep=spec.checkpoint.keep, group=savers, warn=warn)
    trainer = assemble(spec, groups=groups, device=device)
    if spec.checkpoint.every and spec.checkpoint.asynchronous:
        checkpointer.reserve(trainer.state())  # now, so that the first save waits no longer than the others
    memory = copies_of(trainer, group=savers, warn=warn) if spec.fleet.recover else None
    heartbeat.beat("restoring")
    faults.at("restoring")
    position = restore(trainer, checkpointer, stream, group=savers, warn=warn, source=source, memory=memory)
    guard = None
    if spec.fleet.recover:
        guard = Guard(trainer, seat=Seat.find(), read=partial(read_step, stream, spec, position), memory=memory)
        guard.begin(position.step, position.samples)
    yardstick = _yardstick(trainer, folder)
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


def copies_of(trainer: Trainer, *, group: dist.ProcessGroup, warn: Callable[[str], None]) -> Memory | None:
    """Where this rank's copies go; None: nowhere. All ranks of `group` call it together, and go without if one has no room for them."""
    spec, seat = trainer.spec, Seat.find()
    if seat.memory is None or not spec.fleet.memory_every:
        return None
    memory, failed = None, ""
    try:
        memory = Memory(
            trainer.shares(),
            seat=seat,
            keep=spec.fleet.memory_keep,
            pinned=spec.fleet.verify_every > 0,
            disk=seat.disk if spec.fleet.disk_every else None,
            generation=os.environ.get("MEGALITH_GENERATION", ""),
        )
    except OSError as error:
        failed = str(error)
    short = torch.tensor(int(memory is None))
    dist.all_reduce(short, group=group)
    if int(short):
        return _without(Tier.MEMORY, failed or "another rank has no room", seat, warn)
    assert memory is not None
    distance = spec.fleet.buddy_distance(len(seat.placement))
    if distance:
        patience = timedelta(seconds=spec.launch.timeout)
        lanes = dist.new_group(backend="gloo", timeout=patience, group_desc=MESSAGES_ONLY)
        assert isinstance(lanes, dist.ProcessGroup)
        try:
            memory.join(distance, group=lanes)
        except OSError as error:
            _without(Tier.BUDDY, str(error), seat, warn)
    return memory


def _without(tier: Tier, error: str, seat: Seat, warn: Callable[[str], None]) -> None:
    warn(f"no copies of the state are kept in {tier.value}: {error}")
    if seat.rank == 0:
        report(SaveFailed(time=time.time(), tier=tier, error=error))


def open_stream(spec: RunSpec, split: Literal["train", "validation"]) -> Stream:
    """The run's data."""
    return Stream(
        spec.data.path,
        split=split,
        seq_len=spec.train.seq_len,
        seed=spec.train.seed,
        weights=spec.data.weights,
        document_mask=spec.data.document_mask,
        copies=spec.data.copies,
        tell=_tell_of_damage,
    )


def _tell_of_damage(found: Damage) -> None:
    elsewhere = None if found.elsewhere is None else str(found.elsewhere)
    report(DataDamaged(time=time.time(), shard=found.file, error=found.error, other_copy=elsewhere))


def _yardstick(trainer: Trainer, folder: Path) -> Yardstick:
    """What MFU is measured with. The peak is from the catalogue, or measured on a CPU; never guessed."""
    spec, device = trainer.spec, trainer.device
    work = _counted_flops(trainer, folder / "ranks")
    precision, ranks = spec.train.precision, dist.get_world_size()
    peak = catalogue_peak(spec.cluster, torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU", precision)
    if peak.rate is None and device.type == "cpu":
        rate = _measured_peak(precision, device, folder / "ranks" / f"peak-{precision}-{ranks}")
        return Yardstick(work, rate, f"measured with {precision} matrix products on all ranks at once{peak.instead}")
    return Yardstick(work, peak.rate and peak.rate * ranks, f"{peak.source}{peak.instead}")


@dataclass(frozen=True)
class Peak:
    """FLOP/s of one device, None where the catalogue does not say, where that is from, and what was asked for `instead`."""

    rate: float | None
    source: str
    instead: str = ""


def catalogue_peak(asked: str, device: str, precision: Literal["fp32", "bf16"]) -> Peak:
    """Of the device that computes, which torch calls `device`. `asked` is the run's cluster: it says what a device is that the catalogue
    does not know by name, and what a cluster file says of its own device counts; but no name makes a device another one."""
    known = cluster.find(device)
    named = None if asked == "local" else cluster.load(asked).accelerator
    other = known not in (None, named) and named in cluster.catalogue().values()
    found = known if named is None or other else named
    instead = f"; this is no {asked.partition(':')[0]}, which `cluster` says it is" if other else ""
    if found is None:
        return Peak(None, f"unknown device {device!r}: no peak in the catalogue, so no MFU; set `cluster` to a catalogue name")
    if precision not in found.peak:
        known_rates = ", ".join(found.peak) or "none"
        return Peak(None, f"{found.title}: no {precision} peak in the catalogue, so no MFU; it has {known_rates}", instead)
    return Peak(found.peak[precision], f"{found.title}, dense {precision}", instead)


def _counted_flops(trainer: Trainer, kept: Path) -> float:
    """FLOP a token, counted at the run's first start and kept: counting takes longer than the rest of a start after a fault."""
    seq_len = trainer.spec.train.seq_len
    of = hashlib.sha256(f"{seq_len} {trainer.model.model_dump_json()}".encode()).hexdigest()[:12]
    path = kept / f"flops-{of}"
    if path.exists():
        return float(path.read_text())
    work = flops_per_token(trainer.model, seq_len)
    if dist.get_rank() == 0:
        kept.mkdir(exist_ok=True)
        part = path.with_name(f"{path.name}.new")
        part.write_text(str(work))
        part.rename(path)  # whole or not at all, for ranks that look meanwhile
    return work


def _measured_peak(precision: str, device: torch.device, kept: Path) -> float:
    """FLOP/s of all ranks together, measured at the run's first start and kept: a start after a fault need not wait for it."""
    known = float(kept.read_text()) if dist.get_rank() == 0 and kept.exists() else 0.0
    rate = torch.tensor(known, dtype=torch.float64)
    dist.broadcast(rate, 0)  # one rank looks: over a network, others may not see the file yet
    if float(rate):
        return float(rate)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    dist.barrier()  # all ranks measure at once, because all ranks compute at once
    rate = torch.tensor(matmul_rate(dtype, device), dtype=torch.float64)
    dist.all_reduce(rate)
    if dist.get_rank() == 0:
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(str(float(rate)))
    return float(rate)


def _introduce(trainer: Trainer, yardstick: Yardstick, *, resumed: int, log: EventLog | None) -> None:
    """Tell the log who runs what."""
    spec, groups = trainer.spec, trainer.groups
    sizes = trainer.bytes()
    mine = Holding(
        rank=groups.rank,
        coordinates=groups.coordinates,
        parts=[name for stage in trainer.stages.values() for name in stage.part_names],
        parameters=sum(p.numel() for p in trainer.parameters.values()),
        weight_bytes=sizes["weights"],
        gradient_bytes=sizes["gradients"],
        optimizer_bytes=sizes["optimizer"],
    )
    everyone: list[Any] | None = [None] * dist.get_world_size() if groups.rank == 0 else None
    dist.gather_object(mine, everyone)
    if not log or everyone is None:
        return
    log.write(
        RunStarted(
            spec=json.loads(spec.model_dump_json()),
            device=torch.cuda.get_device_name() if trainer.device.type == "cuda" else platform.processor() or platform.machine(),
            world=dist.get_world_size(),
            resumed_step=resumed,
            versions={"python": platform.python_version(), "torch": torch.__version__, "megalith": __version__},
            peak_flops=yardstick.peak,
            peak_source=yardstick.source,
            flops_per_token=yardstick.flops_per_token,
            flops_convention=CONVENTION,
            parameters=_all_parameters(trainer),
        )
    )
    for holding in everyone:
        log.write(holding)


def _all_parameters(trainer: Trainer) -> int:
    """Parameters of the whole model, counted on the meta device."""
    with torch.device("meta"):
        return sum(p.numel() for p in Stage(trainer.model).parameters_by_name().values())


def idle_profile(asked: str, *, done: int, steps: int) -> str | None:
    """Why none of the steps that "A:B" names will be traced, once `done` of a run's steps are done; None if some will be."""
    first, last = map(int, asked.split(":"))
    if done < min(last - 1, steps) and first <= steps:
        return None
    to_come = f"steps {done + 1} to {steps} are" if done < steps else "no step is"
    return f"--profile {asked} traces nothing: {to_come} to come. Name steps among those, or raise train.steps."


class Profile:
    """torch.profiler over some of a run's `steps`; gives a function to call after each step. Spans of the trace name the steps."""

    def __init__(self, folder: Path, asked: str | None, rank: int, *, steps: int) -> None:
        first, last = map(int, asked.split(":")) if asked else (0, 0)
        self.traced = range(first, min(last, steps + 1))
        self.path = folder / "profile" / f"rank-{rank}.json"
        self.profiler: torch.profiler.profile | None = None
        self.span: torch.profiler.record_function | None = None

    def __enter__(self):
        return self.after_step if self.traced else nullcontext

    def after_step(self, done: int) -> None:
        """`done` steps are finished."""
        self._end_span()
        if done + 1 not in self.traced:
            self.__exit__()
            return
        if self.profiler is None:
            self.profiler = torch.profiler.profile(record_shapes=True, acc_events=True)
            self.profiler.__enter__()
        self.span = torch.profiler.record_function(f"step {done + 1}")
        self.span.__enter__()

    def _end_span(self) -> None:
        if self.span is not None:
            self.span.__exit__(None, None, None)
            self.span = None

    def __exit__(self, *_: object) -> None:
        self._end_span()
        if self.profiler is not None:
            self.profiler.__exit__(None, None, None)
            self.path.parent.mkdir(exist_ok=True)
            self.profiler.export_chrome_trace(str(self.path))
            self.profiler = None

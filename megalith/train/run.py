"""The main function of a rank of a training run. Every launcher calls `main`."""

import json
import os
import platform
import secrets
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from megalith import __version__, disk, epochs, events, own
from megalith import sealed as seals
from megalith.checkpoint.checkpointer import Checkpointer
from megalith.checkpoint.folder import FOLDER
from megalith.data.errors import AwayDataError, DataError
from megalith.data.tokenizer import copy as copy_tokenizer
from megalith.events import Event, EventLog, Holding, Problem, RunFinished, RunStarted
from megalith.exchange import ObjectCollectives
from megalith.fleet import causes, environment, hooks, rendezvous
from megalith.fleet.environment import Place
from megalith.fleet.exit_codes import ExitCode
from megalith.fleet.heartbeat import Heartbeat
from megalith.fleet.observations import Preempted, RankFailed, StoreAway
from megalith.fleet.rank import heeded
from megalith.fleet.rank_info import REPORTS, RankInfo, ranks_of
from megalith.fleet.report import Unreachable, refusing, report
from megalith.fleet.secure import key
from megalith.fleet.secure.key import NoKey
from megalith.fleet.secure.store_client import StoreClient
from megalith.fleet.tiers import Source
from megalith.kernels.product import sum_in_fp32
from megalith.machine import link, networks
from megalith.machine.capacity import find_gpus
from megalith.machine.resident import keep_memory
from megalith.models.flops import CONVENTION
from megalith.parallel import one_round
from megalith.parallel.groups import another
from megalith.spec.files import SPEC_FILE
from megalith.spec.run import LaunchSpec, RunSpec
from megalith.spec.sites import kept
from megalith.spec.sizes import count_model
from megalith.train import collective_progress, inject
from megalith.train.assemble import Trainer, assemble, mesh_groups
from megalith.train.copies import copies_of
from megalith.train.guard import StateGuard
from megalith.train.loop import Loop
from megalith.train.measure.peak import Yardstick, yardstick_of
from megalith.train.measure.profiler import Profile, idle_profile
from megalith.train.offload.home import Disk
from megalith.train.own.admit import admit, changes, compare_ranks
from megalith.train.own.callbacks import Callbacks
from megalith.train.restore import OtherRunError, read_share, read_step, restore
from megalith.train.sites.meet import build
from megalith.train.sites.meeting import UnequalSitesError
from megalith.train.sites.merge import Sites
from megalith.train.sites.progress import StopAsked
from megalith.train.store import RunStore, tcp_store
from megalith.train.stream import compare_inputs, open_stream
from megalith.train.validate import Validator


def main(
    run_dir: str,
    profile: str | None = None,
    source: dict[str, Any] | None = None,
    *,
    sealed: Mapping[str, str] = MappingProxyType({}),
    first: Mapping[str, str] = MappingProxyType({}),
    shrunk: bool = False,
) -> None:
    """Train the run described by `run_dir/spec.json` from its newest checkpoint, until its last step or a signal. `profile` "A:B":
    torch.profiler traces steps A to B - 1, as the event log numbers them, into `run_dir/profile/`. Exits with status STOPPED after a
    signal, once the state is saved. `source`: the state from which to continue, a `fleet.tiers.Source` as a dictionary; None: the newest
    intact checkpoint. `sealed`: files that must not have changed since the command began (`megalith.sealed`). `first`: the same for
    the manifest of `train.init_from`, which only a run without checkpoints reads. `shrunk`: the run uses the fleet's fallback plan.
    """
    folder = Path(run_dir)
    stop = _Stop()
    heartbeat = Heartbeat.find()
    heartbeat.beat("joining")
    hooks.at("joining")
    with refusing(seals.AlteredError):
        spec = RunSpec.model_validate_json(seals.read(epochs.own(folder, SPEC_FILE), sealed))
    with refusing(own.OwnPartError):
        parts = admit(spec)
    if shrunk:
        spec = spec.model_copy(update={"plan": spec.fleet.fallback})
    networks.enter(RankInfo.find().node)
    _watch_link()
    place = environment.find()
    assert place is not None, "the environment gives this process no rank. Start the ranks with `megalith train`"
    keep_memory()
    device = choose_device(spec.train.device, place.local_rank, place.local_world)
    collective_progress.answer()
    world = join(place, launch=spec.launch, device=device)
    epoch = _epoch(world)
    log = EventLog(folder, epoch=epoch, existed=True) if place.rank == 0 else None  # the run file was read from there
    try:
        heartbeat.beat("building")
        hooks.at("building")
        given = source_of(source)
        loop = prepare(
            spec,
            folder,
            world=world,
            source=given,
            log=log,
            device=device,
            heartbeat=heartbeat,
            epoch=epoch,
            sealed=sealed,
            first=first,
            parts=parts,
            stop=stop,
        )
        if log and isinstance(home := loop.trainer.state.home, Disk) and home.warning:
            _warner(log)(home.warning)
        heartbeat.beat("ready")
        if profile and (idle := idle_profile(profile, done=loop.step, steps=spec.train.steps)):
            _warner(log)(idle)
        with Profile(folder, profile, place.rank, steps=spec.train.steps, warn=_warner(log)) as tick:
            reason = loop.run(stop=stop, after_step=tick)
        heartbeat.beat("leaving", loop.step)
        if log:
            log.write(RunFinished(reason=reason, step=loop.step))
    except StopAsked:  # before the other sites were met, so there is nothing to save
        sys.exit(ExitCode.STOPPED)
    except Exception as error:
        begins = [Path(path) for path in (spec.train.init_from, spec.branch and spec.branch.checkpoint) if path]
        unreachable = _unreachable(error, [folder, Path(spec.data.path), *map(Path, spec.data.copies), *begins])
        _last_words(unreachable or error, folder, log, rank=place.rank, epoch=epoch)
        if unreachable:
            raise unreachable from error
        raise
    if log:
        log.close()
    if loop.guard:
        loop.guard.close()
    if loop.sites:
        loop.sites.close()
    dist.barrier(group=world)
    dist.destroy_process_group()
    if reason == "stopped":
        sys.exit(ExitCode.STOPPED)


def _unreachable(error: Exception, used: Sequence[Path]) -> Unreachable | None:
    """If an error means that a path in `used` is temporarily unreachable, report this and return the exception that ends the rank; else
    None. All paths in `used` existed when the command started the first ranks."""
    path = error.path if isinstance(error, AwayDataError) else None
    if disk.is_away(error) and isinstance(error, OSError) and isinstance(error.filename, str):
        named = Path(error.filename).absolute()
        path = next((named for one in used if named.is_relative_to(one.absolute())), None)
    if path is None:
        return None
    report(StoreAway(time=time.time(), path=str(path.absolute()), error=str(error)))
    return Unreachable(str(error))


def _last_words(error: Exception, folder: Path, log: EventLog | None, *, rank: int, epoch: int = 0) -> None:
    """Log why this rank ends. A rank that only lost a peer cannot know whether a restart would help, so the peer's own report takes
    precedence; if a supervisor receives that report, the lost connection is not logged. Without a supervisor, as under another launcher,
    rank 0 logs any error, and another rank only an error with the status FAILED."""
    hopeless, heard = causes.status(error) == ExitCode.FAILED, REPORTS in os.environ
    if log is None and (not hopeless or heard):
        return
    lost = causes.is_secondary(type(error).__name__, str(error))
    said = deque[Event](maxlen=1)
    with disk.if_available():
        said.extend(events.read(folder))
    peer_failed = bool(said) and isinstance(said[0], RunFinished) and said[0].reason == "failed"
    log = log or EventLog(folder, epoch=epoch, existed=True)
    if not (lost and heard):
        text = str(error).partition("\n")[0] if lost else str(error)  # what follows a lost connection is a stack of C++
        log.write(Problem("error", f"{type(error).__name__}: {text}", rank=rank))
    log.write(RunFinished(reason="failed" if hopeless or peer_failed else "lost", step=-1))


def _watch_link() -> None:
    """Watch the ranks' network interface, if it is known. The first rank of each node reports when the interface goes down."""
    name, rank_info = link.named(), RankInfo.find()
    if (
        name is None
        or REPORTS not in os.environ
        or rank_info.rank != ranks_of(rank_info.slot, world=rank_info.world, slots=len(rank_info.placement))[0]
    ):
        return

    def tell() -> None:
        text = f"the network interface {name} is down"
        known = {"slot": rank_info.slot, "node": rank_info.node, "rank": rank_info.rank}
        report(RankFailed(time=time.time(), **known, signature="interface down", text=text, hardware=True))

    link.watch(name, tell)


def _epoch(world: dist.ProcessGroup) -> int:
    """Return the number (`megalith.epochs`) of the run folder's present owner on every rank. The launcher passed the owner's number only to
    the first rank."""
    epoch = torch.tensor(epochs.mine())
    dist.broadcast(epoch, group=world, group_src=0)
    return int(epoch)


def _warner(log: EventLog | None) -> Callable[[str], None]:
    def warn(message: str) -> None:
        if log:
            log.write(Problem("warning", message))
        print(message, file=sys.stderr, flush=True)

    return warn


class _Stop:
    """A flag that SIGTERM, SIGUSR1 and SIGHUP (unless SIGHUP is ignored) set at any time. Ranks read the flag before each step, and
    agree during the step whether to stop after it. The signal is reported at once, because a scheduler may be about to take the node away;
    the supervisor knows whether it sent the signal itself."""

    def __init__(self) -> None:
        self.asked = False
        for number in set(heeded()) - {signal.SIGINT}:
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        if not self.asked and REPORTS in os.environ:
            rank_info = RankInfo.find()
            report(Preempted(time=time.time(), node=rank_info.node, rank=rank_info.rank))
        self.asked = True

    def __bool__(self) -> bool:
        return self.asked


_SOURCE, _HOLDING = TypeAdapter(Source), TypeAdapter(Holding)


def source_of(record: dict[str, Any] | None) -> Source | None:
    """Decode the source of the state that a launcher passes. Raises pydantic's ValidationError if `record` describes no source."""
    return None if record is None else _SOURCE.validate_python(record)


def prepare(
    spec: RunSpec,
    folder: Path,
    *,
    world: dist.ProcessGroup,
    source: Source | None,
    log: EventLog | None,
    device: torch.device,
    heartbeat: Heartbeat,
    epoch: int = 0,
    sealed: Mapping[str, str] = MappingProxyType({}),
    first: Mapping[str, str] = MappingProxyType({}),
    parts: Mapping[str, str] = MappingProxyType({}),
    stop: object = False,
) -> Loop:
    """Prepare the first step, on all ranks of `world` together. `parts`: the digests of the user's own parts. `stop` becomes true when this
    rank is asked to stop. Raises StopAsked if the rank is asked to stop while it waits for other sites."""

    warn = _warner(log)
    with refusing(seals.AlteredError), seals.unchanged(sealed):
        leads = world.rank() == 0  # all ranks compare their files with this one's, so only this one checks the tokenizer
        stream = open_stream(spec, "train", tokenizer_is_known=not leads)
        held_out = open_stream(spec, "validation", tokenizer_is_known=True) if spec.validation.every else None
    with refusing(DataError):
        compare_inputs(spec, stream, group=world)
    if stream.unchecked:
        warn(f"{spec.data.path} has no checksums, so changed bytes are not detected. `megalith data verify` writes the checksums")
    if log:
        copy_tokenizer(Path(spec.data.path), folder, warn=warn, epoch=epoch)
    groups = mesh_groups(spec, device, world)
    savers = another(world, timeout=timedelta(seconds=spec.launch.timeout))
    checkpointer = Checkpointer(
        folder / epochs.name(FOLDER, epoch), keep=kept(spec), group=savers, warn=warn, existed=True,
        alive=heartbeat.again, patience=spec.fleet.wait_limit,
    )  # fmt: skip
    with refusing(own.OwnPartError):
        trainer = assemble(spec, groups=groups, device=device, folder=folder, callbacks=Callbacks(spec.train.callbacks))
    told: dict[str, Any] = {"beat": heartbeat.again, "asked": lambda: bool(stop)}
    sites = build(trainer, folder, **told, data=stream.fingerprint) if spec.sites else None
    if spec.checkpoint.every and spec.checkpoint.asynchronous:
        checkpointer.reserve(
            (sites.state if sites else trainer.state).laid()
        )  # now, so that the first save waits no longer than the others
    # all sites repeat a step that exchanges gradients, or none
    guarded = spec.fleet.recover and (spec.sites is None or not spec.sites.exchanges_gradients)
    memory = copies_of(trainer, group=savers, warn=warn) if guarded and sites is None else None
    heartbeat.beat("restoring")
    hooks.at("restoring")
    how: dict[str, Any] = {"group": savers, "warn": warn, "source": source, "memory": memory, "sites": sites, "first": first}
    with refusing(OtherRunError, DataError, UnequalSitesError, seals.AlteredError):
        position = restore(trainer, checkpointer, stream, **how)
    with refusing(own.OwnPartError, DataError):
        compare_ranks(parts, stream, index=position.samples, group=world)
    guard = None
    if guarded:
        read = partial(read_step, stream, spec, position) if sites is None else partial(read_share, stream, spec, sites.share)
        merged = sites.state.kept if sites is not None else ()
        guard = StateGuard(trainer, rank_info=RankInfo.find(), read=read, memory=memory, merged=merged)
        guard.begin(position.step, position.samples)
    yardstick = yardstick_of(trainer, folder)
    if log and parts:
        before = deque(events.of_kind(events.read(folder), RunStarted), maxlen=1)
        for text in changes(parts, before[0].own if before else {}):
            warn(text)
    _introduce(trainer, yardstick, sites, resumed=position.step, log=log, parts=parts)
    validator = Validator(trainer, held_out) if held_out else None
    injector = inject.step_hook(reads=lambda step: stream.bytes_of(loop.reader.first_sample(step)))
    loop = Loop(
        trainer,
        stream,
        checkpointer,
        position,
        validator=validator,
        yardstick=yardstick,
        log=log,
        heartbeat=heartbeat,
        guard=guard,
        step_hooks=[injector] if injector else [],
        sites=sites,
    )
    return loop


def holding_of(trainer: Trainer, sites: Sites | None = None) -> Holding:
    """Describe this rank's part of the model, and the bytes of its state, with the tensors that merges of `sites` keep."""
    sizes = trainer.state.bytes()
    if sites is not None:
        sizes = sites.state.added_to(sizes)
    return Holding(
        rank=trainer.groups.rank,
        coordinates=trainer.groups.coordinates,
        parts=[name for stage in trainer.stages.values() for name in stage.part_names],
        parameters=sum(p.numel() for p in trainer.parameters.values()),
        weight_bytes=sizes["weights"],
        gradient_bytes=sizes["gradients"],
        optimizer_bytes=sizes["optimizer"],
        host_bytes=sizes.get("host", 0),
        disk_bytes=sizes.get("disk", 0),
    )


def _introduce(
    trainer: Trainer, yardstick: Yardstick, sites: Sites | None, *, resumed: int, log: EventLog | None, parts: Mapping[str, str]
) -> None:
    spec, groups, mine = trainer.run, trainer.groups, holding_of(trainer, sites)
    everyone = ObjectCollectives(groups.world).gather(mine, _HOLDING)
    if not log or everyone is None:
        return
    log.write(
        RunStarted(
            spec=json.loads(spec.model_dump_json()),
            device=torch.cuda.get_device_name() if trainer.device.type == "cuda" else platform.processor() or platform.machine(),
            world=spec.ranks,
            resumed_step=resumed,
            versions={"python": platform.python_version(), "torch": torch.__version__, "megalith": __version__},
            peak_flops=yardstick.peak,
            peak_source=yardstick.source,
            flops_per_token=yardstick.flops_per_token,
            flops_convention=CONVENTION,
            parameters=count_model(trainer.model).total,
            own=dict(parts),
        )
    )
    for holding in everyone:
        log.write(holding)


# --- joining the other ranks ---


def choose_device(wanted: str, local_rank: int, local_world: int) -> torch.device:
    """Choose this rank's device: `auto` means one GPU for each rank if this machine has GPUs, else the CPU. Raises RuntimeError if GPUs are
    requested, or `auto` finds GPUs, but PyTorch can use fewer of them than there are ranks. So where a driver reports GPUs, `auto` never
    means the CPU.
    """
    gpus = torch.cuda.device_count() if wanted in ("auto", "cuda") and torch.cuda.is_available() else 0
    there = 0 if gpus or wanted != "auto" else find_gpus()[0]
    if there:
        raise RuntimeError(
            f'train.device = "auto": this machine has {there} GPUs, and PyTorch {torch.__version__} can use none of them. '
            'Repair the driver, install a PyTorch that supports these GPUs, or set train.device = "cpu".'
        )
    if local_world <= gpus:
        sum_in_fp32()
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if wanted == "cuda" or gpus:
        raise RuntimeError(
            f"train.device = {wanted}: this machine has {local_world} ranks, and PyTorch can use {gpus} GPUs. Use one rank per GPU, or set "
            'train.device = "cpu".'
        )
    return torch.device("cpu")


def join(place: Place, *, launch: LaunchSpec, device: torch.device) -> dist.ProcessGroup:
    """Join the other ranks. Return the group of all ranks, which uses gloo for CPU tensors and NCCL for GPU tensors. The keys in the store
    contain the generation, because after a restart under torchrun the store still holds the addresses of the dead ranks. If all ranks are
    on this machine, gloo's ports are on its loopback interface, unless the environment names another.
    """
    if place.local_world == place.world and (interface := link.loopback()) is not None:
        os.environ.setdefault(link.NAMES[0], interface)  # gloo would listen at the address of the machine's host name
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store = _store(place, timedelta(seconds=launch.start_timeout))
    one_round.install()
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(place.generation or _generation(place, store, seconds=launch.start_timeout), store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=launch.timeout),
    )
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _generation(place: Place, store: dist.Store, *, seconds: float) -> str:
    meeting = dist.PrefixStore("meeting", store)
    return rendezvous.agree(meeting, secrets.token_hex(8), rank=place.rank, world=place.world, seconds=seconds)


def _store(place: Place, timeout: timedelta) -> dist.Store:
    kind, _, address = place.store.partition("://")
    if kind == "file":
        return dist.FileStore(address, place.world)
    if kind == "tcp":
        return tcp_store(place.store, serves=place.serves, timeout=timeout)
    if (secret := key.given()) is None:
        raise NoKey(
            f"the ranks' store at {place.store} requires the run's key, but this rank has none: {key.VARIABLE} is not set"
        )
    return RunStore(StoreClient(place.store, secret, seconds=timeout.total_seconds()))

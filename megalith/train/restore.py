"""Loads the state with which a run starts: initial weights, its newest checkpoint, copies in the nodes' memory, or another run's
weights."""

import contextlib
import errno
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from megalith import sealed
from megalith.check.resume import check_branch, check_checkpoint
from megalith.checkpoint.checkpointer import Checkpointer
from megalith.checkpoint.folder import MANIFEST, AwayError, DamagedCheckpointError, committed
from megalith.checkpoint.load import LoadResult, load
from megalith.checkpoint.memory import CopyError, Memory
from megalith.data.stream import Batch as Samples
from megalith.data.stream import Stream
from megalith.fleet.observations import CopyAway, CopyCorrupt
from megalith.fleet.rank_info import RankInfo
from megalith.fleet.report import Reported, report
from megalith.fleet.tiers import Source, Tier
from megalith.kernels.narrow import HISTORY
from megalith.spec.forward import other_rows
from megalith.spec.optimizers import OPTIMIZERS
from megalith.spec.phases import Phases, during
from megalith.spec.run import RunSpec
from megalith.spec.sites import computed_size, within
from megalith.spec.sites.deal import Portion
from megalith.train.assemble import Trainer
from megalith.train.batches import indices, without_targets
from megalith.train.own.callbacks import CALLBACKS
from megalith.train.received import receive
from megalith.train.sites.meet import cuts_in
from megalith.train.sites.merge import Sites
from megalith.train.sites.progress import Progress
from megalith.train.stability.history import History


class OtherRunError(ValueError):
    """The checkpoint to resume from belongs to another run, or this run cannot branch from the checkpoint that `branch` names."""


@dataclass(frozen=True)
class Position:
    """Steps tried, samples consumed, updates made, and the history of spikes. Data order and random numbers depend only on the seed,
    steps and samples; bias correction and the learning rate depend on the updates. A step whose update was skipped also consumed its
    samples."""

    step: int = 0
    samples: int = 0
    updates: int = -1
    """Number of updates made. Checkpoints of earlier versions of Megalith lack the number of updates, which is then set to `step`."""
    history: History = field(default=History(), compare=False)
    callbacks: Mapping[str, Any] = field(default_factory=dict, compare=False)
    """States of the user's own callbacks, by name."""

    def __post_init__(self) -> None:
        if self.updates < 0:
            object.__setattr__(self, "updates", self.step)


def meta(position: Position, *, spec: RunSpec, stream: Stream, sites: Progress | None = None) -> dict[str, Any]:
    """Return the metadata of a checkpoint. `sites`: the progress of a run across sites."""
    return {
        "position": {name: getattr(position, name) for name in ("step", "samples", "updates")},
        "history": asdict(position.history),
        "rng": {
            "seed": spec.train.seed,
            "rule": "every random number is a function of the seed and a name or step",
            "state": _random_state(),
        },
        "data": stream.fingerprint,
        "spec": spec.model_dump(mode="json"),
    } | (
        ({CALLBACKS: dict(position.callbacks)} if position.callbacks else {})
        | ({} if sites is None else {"sites": sites.record()})
    )


def _random_state() -> str:
    """Return a digest of the state of torch's random generators on this rank. A checkpoint does not need the state itself, because each
    step seeds the generators (`train.step.seed_step`)."""
    states = [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]
    return hashlib.sha256(b"".join(state.numpy().tobytes() for state in states)).hexdigest()


def read_step(stream: Stream, spec: RunSpec, position: Position, step: int, data_rank: int) -> list[Samples]:
    """Return the microbatches of a data rank in step `step`, of a run that was at `position` before that step."""
    return [stream.batch(part) for part in read_indices(spec, position, step, data_rank)]


def read_share(stream: Stream, spec: RunSpec, share: Callable[[int], Portion], step: int, data_rank: int) -> list[Samples]:
    """Return the microbatches of a data rank in a step of a site. `share`: returns the samples that the site reads in a step."""
    return read_portion(stream, spec, share(step), data_rank)


def read_numbers(spec: RunSpec, position: Position, step: int) -> range:
    """Return the sample numbers of step `step` on all data ranks, for a run whose position before, in or after that step is `position`."""
    phases = Phases.of(spec)
    if step >= position.step:
        first = phases.after(position.samples, step - position.step)
    else:
        first = phases.before(position.samples, position.step - step)
    return range(first, first + phases.at(first).global_batch)


def read_indices(spec: RunSpec, position: Position, step: int, data_rank: int) -> list[range]:
    """Return the sample numbers of each of a data rank's microbatches in a step."""
    numbers = read_numbers(spec, position, step)
    here = during(spec, Phases.of(spec).at(numbers.start))
    return indices(within(here, len(numbers)), first=numbers.start, data_rank=data_rank)


def read_portion(stream: Stream, spec: RunSpec, portion: Portion, data_rank: int) -> list[Samples]:
    """Return the microbatches of a data rank in a step in which its site reads `portion`. Sequences that fill up the step have no targets,
    so they change neither the loss nor its gradients; but they count in the losses that balance experts, and in the router's z-loss."""
    return [
        without_targets(stream.batch(_numbers_at(portion, places)), [place >= portion.size for place in places])
        for places in places_in(spec, portion, data_rank)
    ]


def indices_in(spec: RunSpec, portion: Portion, data_rank: int) -> list[list[int]]:
    """Return the sample numbers of each of a data rank's microbatches, in a step in which its site reads `portion`. Samples of the portion
    are repeated to fill up the step."""
    return [_numbers_at(portion, places) for places in places_in(spec, portion, data_rank)]


def _numbers_at(portion: Portion, places: range) -> list[int]:
    numbers = portion.numbers
    return [numbers[place % len(numbers)] for place in places]


def places_in(spec: RunSpec, portion: Portion, data_rank: int) -> list[range]:
    """Return the places of each of a data rank's microbatches among the sequences that its site computes in a step."""
    here = during(spec, Phases.of(spec).at(portion.first))
    return indices(within(here, computed_size(here, portion.size)), first=0, data_rank=data_rank)


def restore(
    trainer: Trainer,
    checkpointer: Checkpointer,
    stream: Stream,
    *,
    group: dist.ProcessGroup | None,
    warn: Callable[[str], None],
    source: Source | None = None,
    memory: Memory | None = None,
    sites: Sites | None = None,
    first: Mapping[str, str] = MappingProxyType({}),
) -> Position:
    """Load the state from `source` (None: the newest intact checkpoint of the run). Without such a state, load the checkpoint
    from which the run branches, or the weights of `train.init_from`, or keep the initial weights. Invalidate copies of later steps in
    memory. Sites agree on a common checkpoint that is not newer than `source`. `first`: the digest of the manifest of `train.init_from`.

    Raises OtherRunError if the checkpoint belongs to another run, a data error if the run's data or tokenizer have changed since, and
    Reported if a piece of `source` is damaged (reported as CopyCorrupt) or temporarily unreadable (CopyAway).
    """
    rank_info = memory.rank_info if memory else RankInfo.find()
    position = None
    anew = False
    try:
        if sites is not None:
            position, anew = _with_sites(sites, trainer, checkpointer, stream, at_most=None if source is None else source.step)
        elif source is None or Tier.STORE in (source.tier, *dict(source.elsewhere).values()):
            position = _from_store(trainer, checkpointer, stream, step=None if source is None else source.step, warn=warn)
        if source is not None and memory is not None:
            label = memory.restore(source)
            if label is not None:
                text = memory.text
                position = Position(label.step, label.samples, label.updates, history_in(text), callbacks_in(text))
    except CopyError as error:
        report_copy(CopyCorrupt, error.tier, error.step, error.slot, str(error))
    except (DamagedCheckpointError, FileNotFoundError, AwayError) as error:
        if source is None:
            raise
        if rank_info.rank == 0:
            report_copy(CopyAway if isinstance(error, AwayError) else CopyCorrupt, Tier.STORE, source.step, None, str(error))
        raise Reported(str(error)) from error
    if position is None:
        assert source is None or source.tier is None or sites is not None, f"{source} needs copies in memory, but there are none"
        if trainer.spec.train.init_from:
            loaded = _first_weights(trainer, Path(trainer.spec.train.init_from), first, group=group, warn=warn)
            if rank_info.rank == 0 and (text := _left_behind(loaded, trainer.spec.optimizer.kind)):
                warn(text)
        position = _from_branch(trainer, stream, group, warn) if trainer.run.branch else Position()
        if sites is not None:
            sites.state.begin()
    if memory is not None:
        memory.forget_after(position.step)
    trainer.state.updates = position.updates
    trainer.state.skipped = 0 if sites is not None else position.step - position.updates
    trainer.state.history = position.history
    trainer.state.loaded()
    trainer.callbacks.load(position.callbacks)
    if sites is not None and not anew:
        sites.resume()
    return position


def _with_sites(
    sites: Sites, trainer: Trainer, checkpointer: Checkpointer, stream: Stream, *, at_most: int | None
) -> tuple[Position | None, bool]:
    """Agree with the other sites on a common checkpoint, load it, and return its position; None if there is none. The second result is True
    if this site joins with the others' state instead."""
    beginning = sites.begin(cuts_in(checkpointer.folder, at_most=at_most, total=sites.total) if sites.leads else [])
    if beginning.step is None:
        return None, beginning.anew
    loaded = checkpointer.load(sites.state.laid(), step=beginning.step, accept=partial(_accept, trainer.run))
    assert loaded is not None
    position = position_in(loaded.meta)
    stream.check_same(loaded.meta["data"], samples=position.samples)
    sites.progress = Progress.of(loaded.meta["sites"])
    return position, False


def history_in(text: str) -> History:
    """Return the history of spikes from a copy's `text`."""
    record = json.loads(text) if text else {}
    return History.load({name: value for name, value in record.items() if name != CALLBACKS}) if record else History()


def callbacks_in(text: str) -> dict[str, Any]:
    """Return the callbacks' states from a copy's `text`."""
    return json.loads(text).get(CALLBACKS, {}) if text else {}


def position_in(meta: Mapping[str, Any]) -> Position:
    """Return the position of a run that resumes from a checkpoint with this `meta`. Checkpoints of earlier versions contain no history
    of spikes."""
    known = meta.get("history")
    history = History() if known is None else History.load(known)
    return Position(**meta["position"], history=history, callbacks=meta.get(CALLBACKS, {}))


def _accept(spec: RunSpec, path: Path, meta: Mapping[str, Any]) -> None:
    if problems := check_checkpoint(f"{path.parent.name}/{path.name}", meta, spec):
        raise OtherRunError("\n".join(map(str, problems)))


def _first_weights(
    trainer: Trainer, start: Path, first: Mapping[str, str], *, group: dist.ProcessGroup | None, warn: Callable[[str], None]
) -> LoadResult:
    """Load the weights of the checkpoint `start`. Raises AlteredError if the checkpoint is not the one with which the run began, and as
    `_beginning` does."""

    def accept(path: Path, meta: Mapping[str, Any]) -> None:
        sealed.read(path / MANIFEST, first)

    with _beginning("train.init_from", start):
        return load(
            start,
            {key: each for key, each in trainer.state.laid("weights").items() if not key.endswith(HISTORY)},
            group=group,
            partial=True,
            cast=True,
            rows={f"weights.{name}" for name in other_rows(trainer.spec.train.init_from_changes)},
            accept=accept,
            warn=warn,
        )


@contextlib.contextmanager
def _beginning(key: str, start: Path) -> Iterator[None]:
    """Read the checkpoint with which a run begins. Raises OtherRunError if it was removed, and OSError with its path if it is away."""
    try:
        yield
    except FileNotFoundError as error:
        if committed(start.parent):  # its run keeps the last few only
            reason = f"{key} = {start}: this checkpoint was removed, and the run has not saved one of its own yet"
            raise OtherRunError(
                f"{reason}. Start again with the original run file, or name another checkpoint with --set {key}=FOLDER"
            ) from error
        raise FileNotFoundError(errno.ENOENT, str(error), str(start)) from error
    except AwayError as error:
        raise OSError(errno.EIO, str(error), str(start)) from error


def _left_behind(loaded: LoadResult, kind: str) -> str:
    """Describe the optimizer state of another run that is not loaded with its weights; empty if the checkpoint holds no such state."""
    slots = dict.fromkeys(slot.name for row in OPTIMIZERS.values() for slot in row.slots)
    left = [slot for slot in slots if any(key.startswith(f"{slot}.") for key in loaded.keys)]
    if not left:
        return ""
    return (
        f"train.init_from takes only the weights of {loaded.path}. The checkpoint's optimizer state ({', '.join(left)}) is not carried "
        f"over: {kind} starts with an empty state, at the first update of its schedule."
    )


def _from_store(
    trainer: Trainer,
    checkpointer: Checkpointer,
    stream: Stream,
    *,
    step: int | None,
    warn: Callable[[str], None],
) -> Position | None:
    loaded = receive(trainer, partial(checkpointer.load, step=step, accept=partial(_accept, trainer.run)), warn)
    if loaded is None:
        return None
    position = position_in(loaded.meta)
    stream.check_same(loaded.meta["data"], samples=position.samples)
    return position


def _from_branch(trainer: Trainer, stream: Stream, group: dist.ProcessGroup | None, warn: Callable[[str], None]) -> Position:
    branch = trainer.run.branch
    assert branch is not None

    def accept(path: Path, meta: Mapping[str, Any]) -> None:
        if problems := check_branch(meta, trainer.run):
            raise OtherRunError("\n".join(map(str, problems)))

    start = Path(branch.checkpoint)
    with _beginning("branch.checkpoint", start):
        loaded = receive(trainer, lambda wanted: load(start, wanted, group=group, accept=accept, warn=warn), warn)
    assert loaded is not None
    position = position_in(loaded.meta)
    stream.check_same(loaded.meta["data"], samples=position.samples)
    return replace(position, samples=position.samples + branch.skip)


def report_copy(observation: type[CopyCorrupt | CopyAway], tier: Tier, step: int, slot: int | None, error: str) -> NoReturn:
    """Report that a copy of the state cannot be used, and raise Reported."""
    report(observation(time=time.time(), step=step, tier=tier, copy_step=step, slot=slot, error=error))
    raise Reported(error)

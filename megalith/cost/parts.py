"""Traced profiles of a workload's parts, cached in memory and on disk."""

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from importlib.metadata import version
from itertools import chain
from math import gcd
from pathlib import Path
from typing import Any, Literal, NamedTuple

from megalith import own
from megalith.cost import kept
from megalith.cost.profile import Layout, Profile, twice
from megalith.cost.workload import EXPERTS, Narrow, Workload
from megalith.kernels.chunks import chunk_rows
from megalith.machine import parent_watch
from megalith.spec.model import BlockSpec, ModelSpec, MoeSpec
from megalith.spec.numbers import is_narrow
from megalith.spec.parts import PARTS, named_in
from megalith.spec.plan import recomputed, segment_size

VERSION = 4
"""Version of the figures. Increase this version if the counting changes, so that old files become invalid."""

TRACED = (
    "models/*.py",
    "kernels/*.py",
    "parallel/*.py",
    "mesh.py",
    "own.py",
    "cost/trace.py",
    "cost/recorder.py",
    "cost/exchanges.py",
    "cost/other_software.py",
    "cost/cores.py",
    "cost/profile.py",
)
"""Modules that are traced, and the code that traces them. When one of these modules changes, parts are traced again."""


class Numbers(NamedTuple):
    """Numbers of dense weights, which every token uses, and of experts' weights, on a rank."""

    dense: float
    expert: float


@dataclass(frozen=True, eq=False)
class Segments:
    """Segments of blocks that each keep one input (`spec.plan.segments`)."""

    size: int
    """Blocks of a segment."""
    inside: tuple[Profile, ...]
    """For each block, its profile while its segment is recomputed: with the block's graph, or, in nested segments, with the block's input
    alone."""


@dataclass(frozen=True, eq=False)  # compared by identity, so that results derived from it can be cached
class Parts:
    """Profiles of a model's parts."""

    embedding: Profile
    head: Profile
    blocks: tuple[Profile, ...]
    """The profile of each block, in order; equal blocks share one object."""
    ahead: Profile | None = None
    """The block of the MTP module."""
    depth: int = 0
    """Number of MTP modules."""
    joining: int = 0
    """Number of weights of one MTP module outside its block: the projection of a token's two vectors, and norms."""
    segments: Segments | None = None
    narrow: tuple[tuple[str, ...], ...] = ()
    """For each block, the layers that multiply in a narrow format; empty: no narrow layers."""

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """For each block, the number of the first block that is equal to it."""
        first: dict[tuple[int, tuple[str, ...]], int] = {}
        return tuple(
            first.setdefault((id(block), self.narrow[number] if self.narrow else ()), number)
            for number, block in enumerate(self.blocks)
        )

    @cached_property
    def output(self) -> Numbers:
        """Numbers of weights of the head, including the weights of MTP modules except their embedding."""
        if self.ahead is None:
            return Numbers(self.head.weights, self.head.expert_weights)
        each = self.ahead.weights + self.joining
        return Numbers(self.head.weights + each * self.depth, self.ahead.expert_weights * self.depth)


class Key(NamedTuple):
    """All values that a part's figures depend on."""

    kind: Literal["embedding", "head", "block"]
    model: ModelSpec
    block: BlockSpec | None
    layout: Layout
    folder: str | None
    """Cache folder of the traces; it is part of the key, so that traces are written to each new folder."""


def parts(workload: Workload) -> Parts:
    """Return the profiles of all parts; parts that are not cached are traced."""
    embedding, head, blocks, ahead, inside = _keys(workload)
    found = {id(key): _found(key) for key in _once([*blocks, *inside])}
    more, size = workload.model.head.ahead, _segment_size(workload)
    nested = {id(key): twice(found[id(key)]) for key in _once(blocks)} if size and not inside else found
    return Parts(
        _found(embedding),
        _found(head),
        tuple(nested[id(key)] for key in blocks),
        _found(ahead) if ahead else None,
        more.depth if more else 0,
        _joining(workload.model) if more else 0,
        Segments(size, tuple(found[id(key)] for key in inside or blocks)) if size else None,
        workload.narrow_layers if workload.narrow is not None else (),
    )


def _segment_size(workload: Workload) -> int:
    return segment_size(workload.plan.recompute, blocks=len(workload.model.blocks))


def _joining(model: ModelSpec) -> int:
    """Number of an `MtpModule`'s own weights, which tensor ranks do not split."""
    assert model.head.ahead
    norm = model.dim * (2 if model.head.ahead.block.norm.bias else 1)
    return 2 * model.dim * model.dim + 3 * norm


def prepare(workloads: Iterable[Workload], tick: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Trace the parts of these workloads that are not cached; many parts are traced by several processes. `tick` gets the
    number of traced parts, and of all parts to trace."""
    keys = (key for workload in workloads for key in _every_key(workload))
    unknown = [key for key in dict.fromkeys(keys) if _read(key) is None]
    traced_for = ((on.one, on.other) if (on := _line(key)) else (key,) for key in unknown)
    missing = [key for key in dict.fromkeys(chain.from_iterable(traced_for)) if _read(key) is None]
    with closing(_traced(missing)) as traced:
        for done, (key, profile) in enumerate(zip(missing, traced, strict=True)):
            tick(done, len(missing))
            _keep(key, profile)
    if missing:
        tick(len(missing), len(missing))


def _every_key(workload: Workload) -> list[Key]:
    embedding, head, blocks, ahead, inside = _keys(workload)
    return [embedding, head, *_once([*blocks, *inside]), *([ahead] if ahead else [])]


def _once(keys: list[Key]) -> Iterable[Key]:
    """Return the distinct keys, compared by identity, because comparing whole specs takes long."""
    return {id(key): key for key in keys}.values()


class _Keys(NamedTuple):
    """The keys of a workload's parts. `inside`: the key of each block while its segment is recomputed, if blocks keep their graph then."""

    embedding: Key
    head: Key
    blocks: list[Key]
    ahead: Key | None
    inside: list[Key]


_keyed: dict[tuple[int, int, str, Layout, str | None], tuple[ModelSpec, Narrow | None, _Keys]] = {}
"""By identity, as `_dealt`."""


def _keys(workload: Workload) -> _Keys:
    """Return the keys of a workload's parts."""
    folder = os.environ.get(kept.CACHE)
    known = id(workload.model), id(workload.narrow), workload.plan.recompute, workload.layout, folder
    if known not in _keyed:
        _keyed[known] = workload.model, workload.narrow, _keys_of(workload, folder)
    return _keyed[known][2]


def _keys_of(workload: Workload, folder: str | None) -> _Keys:
    here, bare = workload.layout, _bare(workload.model)  # pyright: ignore[reportArgumentType]
    whole, plain, narrow = replace(here, recompute="full", actions=()), here, workload.narrow
    tile, wide = (narrow.tile, not is_narrow(narrow.precision)) if narrow is not None else (0, False)

    def key(kind: _Kind) -> Key:
        layout = whole if kind.full else plain
        if kind.sends != (0, 0):
            layout = replace(layout, dispatched=kind.sends[0], returned=kind.sends[1])
        layout = replace(layout, packed=kind.keeps, packed_tile=tile, packed_activations=wide) if kind.keeps else layout
        return Key("block", bare, kind.block, _seen(kind.block, layout), folder)

    embedding, head = (Key(end, bare, None, _seen(None, here), folder) for end in ("embedding", "head"))
    kinds = _kinds(workload)
    made = list(map(key, kinds.distinct))
    ahead = None if kinds.ahead is None else key(kinds.ahead)
    return _Keys(embedding, head, [made[at] for at in kinds.blocks], ahead, [made[at] for at in kinds.inside])


class _Kind(NamedTuple):
    """The values that decide on the trace of a block, beside the layout of the workload."""

    block: BlockSpec
    full: bool
    """True if backward runs the whole block again."""
    sends: tuple[int, int] = (0, 0)
    keeps: tuple[str, ...] = ()


class _Kinds(NamedTuple):
    """The distinct kinds of a model's blocks. `blocks`: for each block, the index of its kind in `distinct`. `inside`: for each
    block, the index of its kind while its segment runs again."""

    distinct: tuple[_Kind, ...]
    blocks: tuple[int, ...]
    inside: tuple[int, ...]
    ahead: _Kind | None


# by identity, of models and choices kept with them: hashing whole ones takes long, and a search asks for each of thousands of plans
_dealt: dict[tuple[int, int, str], tuple[ModelSpec, Narrow | None, _Kinds]] = {}


def _kinds(workload: Workload) -> _Kinds:
    """Return the kinds of a workload's blocks."""
    known = id(workload.model), id(workload.narrow), workload.plan.recompute
    if known not in _dealt:
        _dealt[known] = workload.model, workload.narrow, _kinds_of(workload)
    return _dealt[known][2]


def _kinds_of(workload: Workload) -> _Kinds:
    model, policy = workload.model, workload.plan.recompute
    blocks, size, ahead = len(model.blocks), _segment_size(workload), model.head.ahead
    *alone, further = (recomputed(number, blocks=blocks, policy=policy) for number in range(blocks + 1))
    again = [True] * blocks if size else alone
    sent = [_sent_in_tiles(workload, layers) for layers in workload.narrow_layers]
    places: dict[tuple[int, bool, tuple[int, int], tuple[str, ...]], int] = {}
    distinct: list[_Kind] = []

    def place(*kind: Any) -> int:
        block, *rest = kind
        of = id(block), *rest  # comparing whole specs a hundred times would take longest here
        if of not in places:
            places[of] = len(distinct)
            distinct.append(_Kind(*kind))
        return places[of]

    mine = tuple(map(place, model.blocks, again, sent, workload.packed_layers))
    inside = tuple(map(place, model.blocks, alone, sent, workload.packed_layers)) if size and not all(alone) else ()
    return _Kinds(tuple(distinct), mine, inside, _Kind(ahead.block, further) if ahead else None)


def _sent_in_tiles(workload: Workload, layers: tuple[str, ...]) -> tuple[int, int]:
    """Return how many numbers share a scale when a block with these narrow layers sends tokens to its experts in 8 bits, and
    when it sends gradients of results in 8 bits; 0: not sent in 8 bits."""
    narrow = workload.narrow
    if narrow is None or EXPERTS not in layers:
        return 0, 0
    tile = narrow.tile or workload.model.dim
    return tile * (narrow.choices.dispatch != "wide"), tile * (narrow.choices.combine_gradients != "wide")


_bared: dict[int, tuple[ModelSpec, ModelSpec]] = {}  # by identity, of models kept with it: hashing whole ones takes long


def _bare(model: ModelSpec) -> ModelSpec:
    """The model with only the values that affect the figures of single parts."""
    if id(model) not in _bared:
        head = model.head.model_copy(update={"ahead": None, "tied": False})
        bare = {"name": "", "blocks": model.blocks[:1], "head": head, "context": 0, "init_std": 0.02}
        _bared[id(model)] = model, model.model_copy(update=bare)
    return _bared[id(model)][1]


def _seen(block: BlockSpec | None, layout: Layout) -> Layout:
    """The layout without the values that do not affect a part (None: embedding or head), so that one trace serves all layouts that differ
    only in these values."""
    unseen: dict[str, Any] = {}
    if block is None or not isinstance(block.mlp, MoeSpec):
        unseen |= {"expert": 1, "expert_tensor": 1, "permute": True, "dispatched": 0, "returned": 0, "weighs_away": False}
    elif "mlp.experts" not in layout.recompute:
        unseen |= {"weighs_away": False}
    if block is None or block.attention is None:
        unseen |= {"ulysses": 1, "context_method": "ring", "summed": False, "attention": "fused", "rotary": True}
    if block is None or (layout.defers == "others" and layout.recompute == "none"):
        unseen |= {"defers": "all"}
    if block is None:
        unseen |= {"recompute": "none", "actions": (), "rest": "host", "rounded_tile": 128}
    else:  # the head's alone, or the embedding's too
        unseen |= {"loss": "fused", "tile": 0, "cut": False}
    return replace(layout, **unseen)


_known: dict[Key, Profile] = {}


def _found(key: Key) -> Profile:
    """Return the profile of a part: cached, extrapolated from smaller microbatches, or traced now."""
    return _read(key) or _keep(key, _followed(key) or _trace(key))


def _followed(key: Key) -> Profile | None:
    """Return the profile of a part, extrapolated from smaller microbatches; None if the part must be traced."""
    if on := _line(key):
        return _found(on.one).extrapolate(_found(on.other), on.times)
    return None


class _Line(NamedTuple):
    """Two traces for linear extrapolation: a part's figures are the figures of `one` plus `times` the difference between `other` and
    `one`."""

    one: Key
    other: Key
    times: int


def _line(key: Key) -> _Line | None:
    """Return the two smaller traces from which a part's figures are extrapolated; None if the part itself is traced. All
    sequences of a microbatch cost the same, and so do all chunks of a head's loss."""
    layout = key.layout
    if key.kind == "head" and layout.loss == "chunked":
        return _chunks(key)
    if layout.microbatch <= 4 or layout.microbatch % 2:
        return None
    # one sequence alone would not do: what is copied of two can be a mere view of one
    two, four = (key._replace(layout=replace(layout, microbatch=small)) for small in (2, 4))
    return _Line(two, four, (layout.microbatch - 2) // 2)


def _chunks(key: Key) -> _Line | None:
    """Return the traces of a head with fewer chunks of logits and an equally short last chunk. Only the number of tokens affects a head,
    not the division of tokens into sequences or among context ranks."""
    layout, head = key.layout, key.model.head
    tokens = layout.microbatch * (layout.seq_len // layout.context)
    vocab = head.vocab // layout.tensor
    rows = chunk_rows(min(layout.tile, vocab) or vocab, capped=head.softcap is not None)
    sequences = min(layout.microbatch, 2)
    shared = sequences * (layout.tensor if layout.sequence else 1)
    step = shared // gcd(rows, shared)  # chunks that tensor ranks and sequences share evenly
    chunks = tokens // rows
    first = 2 + (chunks - 2) % step
    if chunks <= first + step or tokens % shared:
        return None

    def fewer(count: int) -> Key:
        length = (tokens - (chunks - count) * rows) // sequences
        return key._replace(layout=replace(layout, microbatch=sequences, seq_len=length, context=1, ulysses=1))

    return _Line(fewer(first), fewer(first + step), (chunks - first) // step)


def _read(key: Key) -> Profile | None:
    found = _known.get(key)
    if found is None and (value := kept.read(_path(key))) is not None:
        found = _known[key] = Profile.from_json(value)
    return found


def _keep(key: Key, profile: Profile) -> Profile:
    _known[key] = profile
    kept.write(_path(key), profile.to_json())
    return profile


def _trace(key: Key) -> Profile:
    from megalith.cost import trace  # torch takes seconds to import, and known profiles do not need it

    if key.block is not None:
        return trace.trace_block(key.model.model_copy(update={"blocks": (key.block,)}), 0, key.layout)
    return (trace.trace_head if key.kind == "head" else trace.trace_embedding)(key.model, key.layout)


MANY = 24
"""Number of parts from which several processes are faster than one."""


def _traced(keys: list[Key]) -> Generator[Profile, None, None]:
    """Yield the profile of each key, in order; several processes trace if this is faster and possible."""
    done, processes = 0, min(8, _cores())
    if len(keys) >= MANY and processes > 1:
        from concurrent.futures import ProcessPoolExecutor  # few searches need other processes
        from concurrent.futures.process import BrokenProcessPool
        from multiprocessing import get_context

        from megalith.cost import trace  # noqa: F401  # once, for all of them

        fork = get_context("fork")
        # too little memory for others, or no way to talk to them: the rest is done here
        with suppress(OSError, BrokenProcessPool), ProcessPoolExecutor(processes, fork, _helper, (os.getpid(),)) as pool:
            try:
                for profile in pool.map(_trace, keys, chunksize=4):
                    done += 1
                    yield profile
            finally:
                pool.shutdown(cancel_futures=True)
    yield from map(_trace, keys[done:])


def _cores() -> int:
    """Return the number of processes that may be forked. Only Linux forks safely; with a GPU, a process that is forked after torch ran a
    backward cannot run a backward."""
    torch = sys.modules.get("torch")
    if sys.platform != "linux" or (torch is not None and torch.cuda.device_count()):
        return 1
    return len(os.sched_getaffinity(0))


def _helper(parent: int) -> None:
    """Set up a process that traces: it ends with its parent, ignores interrupts, which the parent handles, and computes in
    one thread, as forked processes must."""
    import torch

    parent_watch.die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


@cache
def _torch() -> str:
    """Version of the installed PyTorch, whose operations a trace counts. The version is read from disk, because importing torch takes
    seconds."""
    return version("torch")


def _path(key: Key) -> Path | None:
    model, block = key.model, key.block
    subject: dict[str, Any] = {"dim": model.dim}
    match key.kind:
        case "block":
            subject |= {"block": None if block is None else block.model_dump()}
        case "head":
            subject |= {"head": model.head.model_dump()}
        case "embedding":
            subject |= {"embedding": model.embedding.model_dump()}
    sources = list[str]()
    for name in named_in(subject):
        _ = PARTS[name]  # AbsentError before anything is looked for: that imports the packages above a module
        sources.append(own.digest(name))
    return kept.file("profiles", [VERSION, kept.code(*TRACED), _torch(), key.kind, subject, asdict(key.layout), *sources])

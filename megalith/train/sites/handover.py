"""Transfers the record of merges and the merged weights to a joining site. The decider sends whole tensors: anchors, and then velocities.
All ranks of a site transfer weights together."""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from megalith import disk
from megalith.events import Merge, dump, load, read_kind
from megalith.spec.sites import Fragment
from megalith.train.sites.council import Council
from megalith.train.sites.messages import FragmentValues, JoinReply, MergeRecord
from megalith.train.sites.record import chain
from megalith.train.sites.state import OuterState
from megalith.train.sites.whole_tensors import WholeTensors

T = TypeVar("T")
TURN_SECONDS = 0.1  # between beats while a thread works


def send_weights(
    fragments: Sequence[Fragment],
    state: OuterState,
    wholes: WholeTensors,
    council: Council | None,
    *,
    sites: Sequence[int],
    beat: Callable[[], object],
) -> None:
    """Send the merged weights to `sites`. `council` is None except on the leading rank. `beat` is called before each fragment."""
    for fragment in fragments:
        beat()
        mine = [piece.name for piece in fragment.pieces if piece.name in state.anchors]
        still = {name: state.velocities.get(name, torch.zeros_like(state.anchors[name])) for name in mine}
        parts = [wholes.gather(fragment, kept) for kept in (state.anchors, still)]
        if council is not None:
            values = torch.cat([whole[piece.name].flatten() for whole in parts for piece in fragment.pieces])
            council.send(sites, FragmentValues(fragment.number, values))


def receive_weights(fragments: Sequence[Fragment], state: OuterState, wholes: WholeTensors, council: Council | None) -> None:
    """Store this rank's shares of the received merged weights. `council` is None except on the leading rank."""
    for fragment in fragments:
        size = sum(piece.numel for piece in fragment.pieces)
        values = torch.empty(2 * size) if council is None else council.fragment_values(fragment.number).values
        wholes.broadcast(values)
        for kept, flat in zip((state.anchors, state.velocities), values.split(size), strict=True):
            for piece, whole in zip(fragment.pieces, flat.split([piece.numel for piece in fragment.pieces]), strict=True):
                if piece.name in kept:
                    kept[piece.name].copy_(wholes.share(piece.name, whole.view(piece.shape)))


def logged(folder: Path) -> list[Merge] | None:
    """Return the merges that the log in `folder` has; None while the log cannot be read, because no run ends for that."""
    try:
        return read_kind(folder, Merge)
    except OSError as error:
        if not disk.is_away(error):
            raise
        return None


def known_marks(folder: Path) -> tuple[str, ...]:
    """Return marks by which another site finds out which merges the log in `folder` has, and so need not send: those of the newest merge
    before which the log lacks none, and of ever fewer earlier ones, because the newest may have been undone."""
    marks = {one.number: one.mark for one in logged(folder) or ()}
    whole = next(number for number in itertools.count() if number not in marks)
    back = itertools.takewhile(lambda gap: gap <= whole, (1 << i for i in itertools.count()))
    return tuple(marks[whole - gap] for gap in back)


def merges_made(merges: Sequence[Merge], number: int, mark: str, *, known: Collection[str] = ()) -> list[Merge]:
    """Return the run's merges, oldest first: the `number` merges whose digest is `mark`, back to the newest that the other site has by its
    `known_marks`. Where `merges` lack one, all earlier ones in `merges` count, each number as it was made last."""
    made = list[Merge]()
    for event, _ in chain(merges, number, mark):
        if event.mark in known:
            return made[::-1]
        made.append(event)
    lost = number - 1 - len(made)  # or the one before it
    below = {one.number: one for one in merges if 0 <= one.number <= lost}
    return [*(below[each] for each in sorted(below)), *reversed(made)]


def records(
    folder: Path, reply: JoinReply, newest: Sequence[Merge], known: Mapping[int, Collection[str]]
) -> dict[int, MergeRecord]:
    """Return the record of merges for each site that asks for it, of those before `reply`. `newest`: merges that the log in `folder` does
    not have yet. `known`: the `known_marks` of each site."""
    merges = [*(logged(folder) or ()), *newest]
    return {
        site: MergeRecord.of(reply.line, map(dump, merges_made(merges, reply.number, reply.mark, known=marks)))
        for site, marks in known.items()
    }


def send_progress(records: Mapping[int, MergeRecord], reply: JoinReply, council: Council | None) -> None:
    """Send each joining site its record of merges and the reply. `council` is None except on the leading rank."""
    if council is not None:
        for site, record in records.items():
            council.send([site], record)
            council.send([site], reply)


def merges_missed(folder: Path, record: MergeRecord | None) -> list[Merge]:
    """Return those of the merges of another site's record that the log in `folder` lacks; none while it cannot be read. This site did
    not wait for them; bytes that it sent for one before it was lost are in no log."""
    if record is None or (known := logged(folder)) is None:
        return []
    have = {(one.number, one.mark) for one in known}
    missed = [event for event in map(load, record.merges) if isinstance(event, Merge) and (event.number, event.mark) not in have]
    return [replace(event, bytes_sent=0, bytes_received=0, waited=0.0, seconds=0.0) for event in missed]


def in_thread(work: Callable[[], T] | None, *, tell: Callable[[bool, Any], bool], beat: Callable[[], object]) -> T | None:
    """Return the result of `work`, which the leading rank does in a thread; None on other ranks, whose `work` is None. `tell` broadcasts a
    value of the leading rank, and `beat` is called several times a second on all ranks meanwhile, because a long log takes seconds."""
    if work is not None:
        pool = ThreadPoolExecutor(1)
        future = pool.submit(work)
        pool.shutdown(wait=False)
    else:
        future = None
    while not tell(future is not None and bool(wait([future], timeout=TURN_SECONDS).done), bool):
        beat()
    return None if future is None else future.result()

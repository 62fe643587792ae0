"""Transfers the record of merges and the merged weights to a joining site. The decider sends whole tensors: anchors, and then velocities.
All ranks of a site transfer weights together."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megalith.events import Merge, dump, load, read_kind
from megalith.spec.sites import Fragment
from megalith.train.sites.council import Council
from megalith.train.sites.messages import FragmentValues
from megalith.train.sites.record import chain
from megalith.train.sites.state import OuterState
from megalith.train.sites.whole_tensors import WholeTensors


def send_weights(
    fragments: Sequence[Fragment], state: OuterState, wholes: WholeTensors, council: Council | None, *, sites: Sequence[int]
) -> None:
    """Send the merged weights to `sites`. `council` is None except on the leading rank."""
    for fragment in fragments:
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


def merges_made(folder: Path, number: int, mark: str, newest: Sequence[Merge]) -> list[dict[str, Any]]:
    """Return the events of the run's merges, as JSON and oldest first: the `number` merges whose digest is `mark`, as far back as the log
    in `folder` has them. `newest`: merges that the log does not have yet."""
    return [dump(event) for event, _ in chain([*read_kind(folder, Merge), *newest], number, mark)][::-1]


def merges_missed(folder: Path, made: Sequence[dict[str, Any]]) -> list[Merge]:
    """Return those of the merges `made` (by `merges_made` on another site) that the log in `folder` lacks. This site had no part in them,
    so it neither waited nor sent anything."""
    known = {(one.number, one.mark) for one in read_kind(folder, Merge)}
    events = [event for event in map(load, made) if isinstance(event, Merge) and (event.number, event.mark) not in known]
    return [replace(event, bytes_sent=0, bytes_received=0, waited=0.0, seconds=0.0) for event in events]

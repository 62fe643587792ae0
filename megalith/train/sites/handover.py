"""Transfers the merged weights to a joining site. The decider sends whole tensors: anchors, and then velocities. All ranks of a site call
these functions together."""

from collections.abc import Sequence

import torch

from megalith.spec.sites import Fragment
from megalith.train.sites.council import Council
from megalith.train.sites.messages import FragmentValues
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

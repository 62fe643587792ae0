"""Imports the user's own parts on this rank, and compares their sources between ranks and with the run's previous start."""

import hashlib
from collections.abc import Mapping
from functools import partial

import torch.distributed as dist

from megalith import own
from megalith.data.own import OwnStream
from megalith.data.stream import Stream
from megalith.exchange import ObjectCollectives
from megalith.spec.families.own import OwnPartsSpec
from megalith.spec.optimizers import admit as admit_optimizer
from megalith.spec.parts import admit as admit_part
from megalith.spec.parts import named_by
from megalith.spec.run import RunSpec
from megalith.spec.treatment import kinds
from megalith.train.own.model_trial import try_parts
from megalith.train.own.trial import try_rule


def admit(spec: RunSpec) -> dict[str, str]:
    """Import every own part that a run names, and return the digest of each part's source, by the part's key.

    Raises own.OwnPartError for a part that cannot be imported, and for an optimizer or a part of the model that differs from its
    declaration."""
    for key, name in spec.own_parts.items():
        table, _, rest = key.partition(".")
        {"optimizer": admit_optimizer, "model": partial(admit_part, kind=rest)}.get(table, own.load)(name)
    for kind in kinds(spec.optimizer):
        if own.is_own(kind):
            try_rule(kind, spec.optimizer, away=_opens_state(spec))
    if isinstance(spec.model, OwnPartsSpec) and named_by(spec.model):
        try_parts(spec.model, masked=spec.data.document_mask)
    return own.digests(spec.own_parts)


def _opens_state(spec: RunSpec) -> bool:
    """True if a rule can read and change some tensors only within `opened`, because state is off the device, or state or gradients are in
    few bits."""
    optimizer = spec.optimizer
    few = {optimizer.moments, optimizer.master, spec.train.gradients} != {"fp32"}
    return few or spec.plan.state.optimizer != "device"


def changes(now: Mapping[str, str], before: Mapping[str, str]) -> list[str]:
    """Return a warning, which names the parts, for each source (a module or a package) that changed since the run's previous start."""
    changed = {key: (before[key], digest) for key, digest in now.items() if before.get(key, digest) != digest}
    return [
        f"the source of {', '.join(key for key, pair in changed.items() if pair == (old, new))} has changed since the run was last "
        f"started: its sha256 was {old[:12]}..., and is now {new[:12]}... Earlier steps may have used the old source. Put the "
        "old source back unless the change is intended"
        for old, new in dict.fromkeys(changed.values())
    ]


def compare_ranks(digests: Mapping[str, str], stream: Stream, *, index: int, group: dist.ProcessGroup) -> None:
    """Compare the user's own parts on all ranks: their source code, and, for an own data source, sample `index`, which each rank draws
    twice.

    Raises own.OwnPartError, which names the differing part, on every rank. All ranks of `group` call it together."""
    if not digests:
        return
    mine = {f"the source of {key}": digest for key, digest in digests.items()}
    drawn = f"sample {index} of data.source"
    repeats = True
    if isinstance(stream, OwnStream):
        mine[drawn] = _digest(stream, index)
        repeats = _digest(stream, index) == mine[drawn]
    everyone = ObjectCollectives(group).all_gather((mine, repeats), tuple[dict[str, str], bool])
    if odd := [rank for rank, (_, same) in enumerate(everyone) if not same]:
        raise own.OwnPartError(f"{drawn} differs when ranks {odd} draw it again. A sample must depend only on its number")
    for what, value in mine.items():
        if odd := [rank for rank, (other, _) in enumerate(everyone) if other.get(what) != everyone[0][0][what]]:
            raise own.OwnPartError(
                f"{what} differs between rank 0 and ranks {odd}. Give all ranks the same source code and data (sha256 of {what} on "
                f"this rank: {value[:12]}...)"
            )


def _digest(stream: OwnStream, index: int) -> str:
    found = stream.sample(index)
    return hashlib.sha256(b"".join(array.tobytes() for array in (found.tokens, found.targets, found.positions))).hexdigest()

"""The data of a run, in the form that its ranks read."""

import time
from itertools import pairwise
from typing import Any, Literal

from megalith import own
from megalith.data.own import OwnStream
from megalith.data.stream import PhaseChange, Stream
from megalith.data.verified_files import Damage
from megalith.fleet.observations import DataDamaged
from megalith.fleet.report import report
from megalith.spec.phases import Phases
from megalith.spec.run import RunSpec


def open_stream(spec: RunSpec, split: Literal["train", "validation"]) -> Stream:
    """Open a run's data. Held-out text is cut into sequences in the same way in all phases, so that its losses in different phases can be
    compared."""
    phases = Phases.of(spec).all
    changes = [
        PhaseChange(now.first, now.seq_len, now.weights)
        for before, now in pairwise(phases)
        if (before.seq_len, before.weights) != (now.seq_len, now.weights)
    ]
    how: dict[str, Any] = {
        "split": split,
        "seq_len": phases[0].seq_len,
        "seed": spec.train.seed,
        "weights": phases[0].weights,
        "phases": changes if split == "train" else (),
        "document_mask": spec.data.document_mask,
        "copies": spec.data.copies,
        "on_damage": _log_damage,
    }
    if spec.data.source is None or split == "validation":
        return Stream(spec.data.path, **how)
    return OwnStream(spec.data.path, name=spec.data.source, source=own.load(spec.data.source), **how)


def _log_damage(found: Damage) -> None:
    elsewhere = None if found.elsewhere is None else str(found.elsewhere)
    report(DataDamaged(time=time.time(), shard=found.file, error=found.error, other_copy=elsewhere))

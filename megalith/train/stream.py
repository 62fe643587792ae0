"""The data of a run, opened the way its ranks read it."""

import time
from typing import Literal

from megalith.data.stream import Stream
from megalith.data.whole import Damage
from megalith.fleet.report import report
from megalith.fleet.signs import DataDamaged
from megalith.spec.run import RunSpec


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

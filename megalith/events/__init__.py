"""The event log of a run: an append-only JSON-lines file of typed events, from which all reports are made.

Every line is `{"type": ..., "time": seconds since the epoch, ...fields}`. Times are seconds, memory is bytes, rates are per second.

Logs of other versions can be read (`events.text`).
"""

from megalith.events.kinds import (
    Checkpoint,
    EarlyUpdatesPaused,
    Event,
    Holding,
    Incident,
    Lowered,
    Merge,
    Order,
    PhaseBegan,
    PrecisionWatched,
    Problem,
    Recovery,
    Rewound,
    RunFinished,
    RunStarted,
    Sample,
    Skipped,
    Span,
    Spans,
    Spike,
    Step,
    Unknown,
    Validation,
)
from megalith.events.log import FILE, MAX_WAITING, EventLog, Kind, Reader, of_kind, read, read_kind
from megalith.events.text import dump, load, parse

__all__ = [
    "FILE",
    "MAX_WAITING",
    "Checkpoint",
    "EarlyUpdatesPaused",
    "Event",
    "EventLog",
    "Holding",
    "Incident",
    "Kind",
    "Lowered",
    "Merge",
    "Order",
    "PhaseBegan",
    "PrecisionWatched",
    "Problem",
    "Reader",
    "Recovery",
    "Rewound",
    "RunFinished",
    "RunStarted",
    "Sample",
    "Skipped",
    "Span",
    "Spans",
    "Spike",
    "Step",
    "Unknown",
    "Validation",
    "dump",
    "load",
    "of_kind",
    "parse",
    "read",
    "read_kind",
]

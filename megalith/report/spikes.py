"""Spikes in the log: a table of them, and the numbers of responses."""

from collections.abc import Sequence

from megalith.events import Event, Lowered, Rewound, Skipped, Spike, of_kind

COLUMNS = ("step", "outside its band", "answer", "likely causes, likeliest first")
SHOWN = 50


def rows(events: Sequence[Event]) -> list[tuple[str, ...]]:
    """Return the newest spikes, oldest first: step, numbers outside their band, response, likely causes."""
    answers = {(type(one), one.step): one.words for one in events if isinstance(one, Rewound | Lowered)}
    found = list[tuple[str, ...]]()
    for one in of_kind(events, Spike)[-SHOWN:]:
        left = ", ".join(f"{name} above {end:.4g}" for name, end in one.bands.items())
        more = answers.get((Rewound, one.step)) or answers.get((Lowered, one.step)) or one.answer
        causes = "; ".join(f"{each['cause']}: {each['evidence']}" for each in one.causes)
        found.append((f"{one.step:,}", left or "nothing", more, causes or "unknown"))
    return found


def counted(events: Sequence[Event]) -> str:
    """Return the numbers of spikes and responses in a sentence; empty if there was no spike."""
    found = len(of_kind(events, Spike))
    if not found:
        return ""
    skipped = sum(one.spike for one in of_kind(events, Skipped))
    rewinds, lowered = len(of_kind(events, Rewound)), len(of_kind(events, Lowered))
    words = [_number(found, "spike"), f"{_number(skipped, 'step')} without update", _number(rewinds, "rewind")]
    words += [f"the learning rate lowered {_number(lowered, 'time')}"] if lowered else []
    return ", ".join(words)


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"

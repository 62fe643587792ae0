"""Errors of data that the reader of the message can fix."""

from collections.abc import Sequence
from pathlib import Path


class DataError(ValueError):
    """A source, tokenizer or prepared folder that cannot be used; the message has the value, the reason and the way out. `parts`
    are its problems as (reason, way out); the way out is "" if the reason includes it.
    """

    def __init__(self, reason: str, way_out: str = "") -> None:
        super().__init__(f"{reason}. {way_out}" if way_out else reason)
        self.parts: tuple[tuple[str, str], ...] = ((reason, way_out),)

    @classmethod
    def of(cls, problems: "Sequence[str | DataError]", *, title: str) -> "DataError":
        """All problems at once: a single problem as it is, several as a list under `title`."""
        error = cls(str(problems[0]) if len(problems) == 1 else "\n  - ".join([f"{title}:", *map(str, problems)]))
        error.parts = tuple(part for one in problems for part in (one.parts if isinstance(one, DataError) else ((one, ""),)))
        return error


class AwayDataError(DataError):
    """Prepared data that cannot be reached, but may be intact. `path` is the path that a run which has read it before waits
    for."""

    def __init__(self, path: Path, reason: str, way_out: str = "") -> None:
        super().__init__(reason, way_out)
        self.path = path

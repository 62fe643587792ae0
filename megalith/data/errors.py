"""Errors in data that the user can fix."""

from collections.abc import Sequence
from pathlib import Path


class DataError(ValueError):
    """A source, tokenizer or prepared folder cannot be used; the message has the value, the reason and the way out. `parts`: the problems
    as (reason, way out); the way out is "" if the reason includes it.
    """

    def __init__(self, reason: str, way_out: str = "") -> None:
        super().__init__(f"{reason}. {way_out}" if way_out else reason)
        self.parts: tuple[tuple[str, str], ...] = ((reason, way_out),)

    @classmethod
    def of(cls, problems: "Sequence[str | DataError]", *, title: str) -> "DataError":
        """Combine problems into one error: a single problem unchanged, several as a list under `title`."""
        error = cls(str(problems[0]) if len(problems) == 1 else "\n  - ".join([f"{title}:", *map(str, problems)]))
        error.parts = tuple(part for one in problems for part in (one.parts if isinstance(one, DataError) else ((one, ""),)))
        return error


class AwayDataError(DataError):
    """Prepared data is unreachable, but may be intact. A run that has already read this data waits until `path` is back."""

    def __init__(self, path: Path, reason: str, way_out: str = "") -> None:
        super().__init__(reason, way_out)
        self.path = path

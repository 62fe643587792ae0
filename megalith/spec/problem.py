"""A problem of a specification: the value, the reason why it is wrong, and what to do about it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, Literal

from megalith.spec.toml import literal

Severity = Literal["error", "advice"]


@dataclass(frozen=True)
class Problem:
    """One problem. An "error" stops the run before it starts; an "advice" is only printed.

    `source` is the origin of the value: "file run.toml", "preset tiny", "command line", "default"; "" if several values cause the
    problem. `value` is None if the key is missing.
    """

    severity: Severity
    key: str
    value: Any
    reason: str
    way_out: str
    source: str = ""

    def __str__(self) -> str:
        value = "" if self.value is None else f" = {literal(self.value)}"
        source = f" [{self.source}]" if self.source not in ("", "default") else ""
        return f"{self.key}{value}: {self.reason}. {self.way_out}{source}"


class SpecErrors(Exception):  # noqa: N818  # it holds several errors, and says so
    """Every problem found in a specification, not only the first. `here`: True if some are of this machine, so that other machines may not
    have them."""

    def __init__(self, problems: Sequence[Problem], *, here: bool = False) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems, self.here = list(problems), here


def near(word: str, known: Iterable[str], *, alike: float = 0.6) -> str | None:
    """Return the known word whose spelling is most similar to `word`; None if the similarity (difflib's ratio) is below
    `alike`."""
    spellings = {spelling.lower(): spelling for spelling in known}
    found = get_close_matches(word.lower(), spellings, n=1, cutoff=alike)
    return spellings[found[0]] if found else None

"""What goes wrong with data and can be mended by the person who reads the message."""

from collections.abc import Sequence


class DataError(ValueError):
    """A source, tokenizer or prepared folder that cannot be used; says the value, the reason and the way out."""

    @classmethod
    def of(cls, problems: Sequence[str], *, title: str) -> "DataError":
        """All problems at once: one alone as it is, several as a list under `title`."""
        return cls(problems[0] if len(problems) == 1 else "\n  - ".join([f"{title}:", *problems]))

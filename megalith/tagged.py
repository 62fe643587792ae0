"""Families of dataclasses that are stored as JSON with a tag for the class, such as `{"node": "a", "kind": "node_joined"}`."""

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import TypeAdapter


class Tagged(Protocol):
    """A dataclass with a tag. A class with an empty tag is only a base class."""

    kind: ClassVar[str]


Value = TypeVar("Value", bound=Tagged)


class Family(Generic[Value]):
    """The tagged subclasses of `bases` that are defined when the family is created. `classes` maps each tag to its class.

    In a record, the tag is stored under `key`, as entry number `place` of the dict (None: as the last entry). Raises ValueError
    if two classes share a tag.
    """

    def __init__(self, *bases: type[Value], key: str = "kind", place: int | None = None) -> None:
        self._key, self._place = key, place
        self.classes: dict[str, type[Value]] = {}
        for one in _with_descendants(bases):
            if not one.kind:
                continue
            other = self.classes.setdefault(one.kind, one)
            if other is not one:
                raise ValueError(
                    f"{other.__name__} and {one.__name__} both have the tag {one.kind!r}: give one of them another tag"
                )

    def load(self, record: Mapping[str, Any]) -> Value:
        """Return the value that a record represents. Raises ValueError for an unknown tag, and pydantic's ValidationError (also a
        ValueError) for fields that do not fit the class."""
        tag = record.get(self._key) if isinstance(record, Mapping) else None
        if not isinstance(tag, str) or tag not in self.classes:
            raise ValueError(f"{self._key} = {tag!r} is unknown: it must be one of {', '.join(self.classes)}")
        return _adapter(self.classes[tag]).validate_python({name: value for name, value in record.items() if name != self._key})

    def dump(self, value: Value) -> dict[str, Any]:
        """Return a value as a dict that `json` can write."""
        entries = list(_adapter(type(value)).dump_python(value, mode="json").items())
        entries.insert(len(entries) if self._place is None else self._place, (self._key, value.kind))
        return dict(entries)


def _with_descendants(classes: tuple[type[Value], ...]) -> list[type[Value]]:
    found = list(classes)
    for one in found:  # grows as it is read
        found += one.__subclasses__()
    return found


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)

"""Conversion of events to lines of JSON and back, including events of other versions.

A field that a log lacks gets its default or, without a default, the empty value of its type (None, NaN, 0, "", an empty list or
dict). A field that this version does not know is kept in `Event.extra`, and an event of an unknown kind is an `Unknown`.
"""

from collections.abc import Callable
from dataclasses import MISSING, Field, asdict, fields
from functools import partial
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from megalith import disk
from megalith.events.kinds import Event, Unknown
from megalith.tagged import Family

_NEUTRAL: dict[Any, Callable[[], object]] = {
    NoneType: lambda: None,
    float: partial(float, "nan"),
    int: int,
    str: str,
    list: list,
    dict: dict,
}
_MISSING = object()
_KINDS = Family(Event, key="type").classes

_Reading = tuple[str, frozenset[type], Callable[[], object]]
"""How an event's field is read: its name, the types that its JSON value may have, and a function that returns its value if a log
lacks it."""


def _reading(one: Field[Any], hint: Any) -> _Reading:
    types = [get_origin(each) or each for each in (get_args(hint) if NoneType in get_args(hint) else (hint,))]
    if one.default is not MISSING:
        missing: Callable[[], object] = lambda: one.default  # noqa: E731
    elif one.default_factory is not MISSING:
        missing = one.default_factory
    else:
        missing = _NEUTRAL[NoneType if NoneType in types else types[0]]
    return one.name, frozenset((*types, int) if float in types else types), missing  # JSON may write a whole float as an integer


def _readings(kind: type[Event]) -> tuple[_Reading, ...]:
    hints = get_type_hints(kind)
    return tuple(_reading(one, hints[one.name]) for one in fields(kind) if one.name != "extra")


_READINGS = {kind: _readings(kind) for kind in (Unknown, *_KINDS.values())}
_NAMES = {kind: frozenset(("type", *(name for name, _, _ in readings))) for kind, readings in _READINGS.items()}


def load(record: dict[str, Any]) -> Event | None:
    """Convert a JSON object to an event; None if it has no type or no time, or if a field's type does not match the class.

    Items of lists and dicts are not checked. Speed matters, because a log has a line for every step: pydantic takes five times as
    long as this function, and the `__init__` of a frozen dataclass twice as long.
    """
    tag = record.get("type")
    if not isinstance(tag, str) or "time" not in record:
        return None
    kind = _KINDS.get(tag, Unknown)
    event = object.__new__(kind)
    values = event.__dict__
    for name, types, missing in _READINGS[kind]:
        value = record.get(name, _MISSING)
        if value.__class__ not in types:
            if value is not _MISSING:
                return None
            value = missing()
        values[name] = value
    names = _NAMES[kind]
    values["extra"] = {} if record.keys() <= names else {name: value for name, value in record.items() if name not in names}
    return event


def dump(event: Event) -> dict[str, Any]:
    """Convert an event to a JSON object."""
    record = asdict(event)
    extra = record.pop("extra")
    return {"type": event.kind, **record, **extra}  # an Unknown has its own type among its fields


def parse(line: str) -> Event | None:
    """Return the event in a line of a log; None for an incomplete line, or a line without an event."""
    record = disk.parse(line)
    return None if record is None else load(record)

"""A tree of raw values -> RunSpec, or every problem in it at once, worded for the person who wrote the values."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from megalith.spec.base import Spec
from megalith.spec.presets import presets
from megalith.spec.problem import Problem, SpecErrors, near
from megalith.spec.run import RunSpec
from megalith.spec.toml import dotted, key, literal

Tree = dict[str, Any]

NEEDED: dict[str, str] = {
    "int_type": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_type": "a number is needed",
    "bool_type": "true or false is needed",
    "string_type": 'text is needed, in "quotes"',
    "tuple_type": "a list is needed, in [brackets]",
    "dict_type": "a table is needed",
    "model_type": "a table is needed",
    "finite_number": "a finite number is needed",
    "greater_than": "it must be more than {gt:g}",
    "greater_than_equal": "it must be at least {ge:g}",
    "less_than": "it must be less than {lt:g}",
    "less_than_equal": "it must be at most {le:g}",
    "literal_error": "it must be {expected}",
    "string_pattern_mismatch": "it is none of the forms known here",
    "missing": "a value is needed",
    "extra_forbidden": "unknown key",
}
"""Reasons by pydantic's error type; anything else keeps pydantic's own message."""


def validate(tree: Tree, *, source: Callable[[str], str], preset_failed: bool = False) -> RunSpec:
    """The RunSpec a tree of TOML values describes. `source(key)` tells where a value came from.

    Types are strict: "4" is no number and 4.0 no whole number. "none" stands for no value where a key may have none. Raises
    SpecErrors with every problem; after a misspelt preset (`preset_failed`) the sizes it would have given are not missed.
    """
    whole = {name: {} for name, field in RunSpec.model_fields.items() if field.is_required()} | tree
    try:
        return RunSpec.model_validate_json(json.dumps(_with_nones(RunSpec, whole), default=str), strict=True)
    except ValidationError as error:
        found = list(error.errors())
    meant = {_suggestion(e["loc"]) for e in found if e["type"] == "extra_forbidden"} | ({"model"} if preset_failed else set())
    heard = [
        e for e in found if not (e["type"] == "missing" and {dotted(e["loc"]), dotted(e["loc"][:1])} & meant)
    ]  # what a misspelt key was meant to give is not missing too
    raise SpecErrors([_worded(e, source) for e in heard])


@dataclass(frozen=True)
class Leaf:
    """One value of a spec and the path to it."""

    path: tuple[str, ...]
    value: Any


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Every value of a spec in the order of its fields; tables that hold something are walked, lists are values."""
    inside = value if isinstance(value, Mapping) else dict(value) if isinstance(value, Spec) else {}
    if not inside:
        yield Leaf(path, value)
    for name, child in inside.items():
        yield from leaves(child, (*path, name))


def _with_nones(spec: type[Spec], tree: Tree) -> Tree:
    """The tree with "none" read as None wherever the spec admits None."""

    def read(name: str, value: Any) -> Any:
        field = spec.model_fields.get(name)
        if field is None:
            return value
        if value == "none" and type(None) in get_args(field.annotation):
            return None
        nested = _table(field)
        return _with_nones(nested, value) if nested and isinstance(value, dict) else value

    return {name: read(name, value) for name, value in tree.items()}


def _table(field: FieldInfo) -> type[Spec] | None:
    """The spec a field holds, if it holds one."""
    kinds = get_args(field.annotation) if get_origin(field.annotation) in (Union, UnionType) else (field.annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Spec)), None)


def _spec_at(path: tuple[str | int, ...]) -> type[Spec] | None:
    spec: type[Spec] | None = RunSpec
    for part in path:
        field = spec.model_fields.get(str(part)) if spec else None
        spec = _table(field) if field else None
    return spec


def _known(spec: type[Spec], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The path of every key of a spec."""
    for name, field in spec.model_fields.items():
        yield (*path, name)
        nested = _table(field)
        if nested:
            yield from _known(nested, (*path, name))


def _suggestion(path: tuple[str | int, ...]) -> str | None:
    """The key an unknown one was likely meant to be: a neighbour spelt alike, or the same word in another table."""
    spec, word = _spec_at(path[:-1]), str(path[-1])
    neighbours = [*(spec.model_fields if spec else ()), *(["preset"] if path[0] == "model" else [])]
    nearest = near(word, neighbours)
    if nearest:
        return dotted((*path[:-1], nearest))
    elsewhere = {known[-1]: dotted(known) for known in reversed([*_known(RunSpec)])}
    return elsewhere.get(near(word, elsewhere) or "")


def _worded(error: ErrorDetails, source: Callable[[str], str]) -> Problem:
    path, kind = error["loc"], error["type"]
    name = dotted(path)
    reason = NEEDED.get(kind, error["msg"]).format(**error.get("ctx", {})) if kind in NEEDED else error["msg"]
    missing = kind == "missing"
    return Problem(
        severity="error",
        key=name,
        value=None if missing else error["input"],
        reason=reason,
        way_out=_way_out(path, kind, error["input"]),
        source="" if missing else source(name),
    )


def _way_out(path: tuple[str | int, ...], kind: str, value: Any) -> str:
    if kind == "extra_forbidden":
        suggestion = _suggestion(path)
        return f"Did you mean {suggestion}?" if suggestion else f"Known here: {', '.join(_spec_at(path[:-1]).model_fields)}."  # type: ignore[union-attr]
    spec = _spec_at(path[:-1])
    field = spec.model_fields.get(str(path[-1])) if spec else None
    if field is None:
        return "Correct it."
    about = f" ({field.description})" if field.description else ""
    if kind == "missing":
        preset = f' Or name a preset: preset = "tiny" (known: {", ".join(presets())}).' if path[0] == "model" else ""
        return f'Write "{key(str(path[-1]))} = ..." under [{dotted(path[:-1])}]{about}.{preset}'
    if kind == "literal_error" and isinstance(value, str):
        nearest = near(value, map(str, get_args(field.annotation)))
        return f"Did you mean {literal(nearest)}?" if nearest else "Choose one of them."
    default = "" if field.is_required() else f" or leave it out for the default, {literal(field.default)}"
    return f"Correct it{about}{default}."

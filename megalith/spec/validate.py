"""Validation of raw values, which yields a RunSpec or another spec, or a list of all problems for the person who wrote the
values."""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from types import UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from megalith.spec.base import Spec
from megalith.spec.families import FAMILIES, family_of
from megalith.spec.foreign_names import MEANINGS, Meaning, meaning
from megalith.spec.problem import Problem, SpecErrors, near
from megalith.spec.quantity import Thousand, whole
from megalith.spec.run import RunSpec
from megalith.spec.toml import dotted, key, literal

Tree = dict[str, Any]
S = TypeVar("S", bound=Spec)

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
    "string_pattern_mismatch": "the text does not have one of the known forms",
    "missing": "a value is needed",
    "extra_forbidden": "unknown key",
    "union_tag_invalid": "no {word} has this name",
}
"""Reason by pydantic's error type; other types keep pydantic's own message."""

WRITE: dict[str, str] = {
    "int_type": "Write a whole number without quotes, such as 8",
    "int_from_float": "Write a whole number without a point, such as 8",
    "float_type": "Write a number without quotes, such as 0.1",
    "bool_type": "Write true or false",
    "string_type": 'Write it in "quotes"',
    "tuple_type": "Write a list, such as [1, 2]",
    "dict_type": "Write a table, such as {{ key = value }}",
    "model_type": "Write a table, such as {{ key = value }}",
    "finite_number": "Write a finite number",
    "greater_than": "Use a value above {gt:g}",
    "greater_than_equal": "Use {ge:g} or more",
    "less_than": "Use a value below {lt:g}",
    "less_than_equal": "Use {le:g} or less",
    "string_pattern_mismatch": "Write one of these forms",
    "literal_error": "Choose one of them",
    "updates_or_share": 'Write 100, "2%" or "1B tokens"',
    "own_part": 'Write "package.module:object"',
}
"""Instruction to the user, by pydantic's error type."""

ALIKE = 0.8
"""Similarity (difflib's ratio) from which on an unknown key counts as a misspelling of another key."""


@dataclass(frozen=True)
class ExaminedSpec(Generic[S]):
    """A spec and its problems. The spec lacks invalid values, and values that a misspelt key or preset was probably meant to set;
    reading a missing value raises AbsentError."""

    spec: S
    problems: list[Problem]


def validate(tree: Tree, spec: type[S], *, source: Callable[[str], str]) -> S:
    """Return the spec that a tree of TOML values describes. `source(key)` returns the origin of a value. Raises SpecErrors with
    every
    problem."""
    found = examine(tree, spec, source=source)
    if found.problems:
        raise SpecErrors(found.problems)
    return found.spec


def examine(tree: Tree, spec: type[S], *, source: Callable[[str], str], preset_failed: bool = False) -> ExaminedSpec[S]:
    """Like `validate`, but return the problems together with the valid values.

    Types are strict: "4" is not a number and 4.0 is not a whole number. For keys that may be None, "none" is read as None.
    `preset_failed`: the preset is unknown, so missing model sizes, and sizes of another family, are not reported.
    """
    whole = {name: {} for name, field in spec.model_fields.items() if field.is_required()} | tree
    given = _with_nones(spec, whole)
    try:
        return ExaminedSpec(spec.model_validate_json(json.dumps(given, default=str), strict=True), [])
    except ValidationError as error:
        faults = [_fault(e, whole, spec) for e in error.errors()]
    meant = {_suggestion(f) or "" for f in faults if f.kind == "extra_forbidden"} - {""}
    if preset_failed or "model.preset" in meant:
        meant.add("model")
    heard = [f for f in faults if not _follows(f, meant, preset_failed=preset_failed)]
    sound = _sound(spec, given, wrong={f.leaf for f in faults}, meant=meant)
    return ExaminedSpec(sound, [_worded(f, source) for f in heard])


@dataclass(frozen=True)
class Leaf:
    """One value of a spec and the path to it."""

    path: tuple[str, ...]
    value: Any


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Yield every value of a spec, including those of its tables, in the order of the fields. A list is one value; its tables
    become mappings without keys that are None, because TOML has no None."""
    inside = value if isinstance(value, Mapping) else dict(value) if isinstance(value, Spec) else {}
    if not inside:
        yield Leaf(path, tuple(map(_table, value)) if isinstance(value, tuple) else value)
    for name, child in inside.items():
        yield from leaves(child, (*path, name))


def flat(spec: Spec, table: str = "") -> dict[str, Any]:
    """Return every value of a spec by its dotted key. `table`: the name of the spec's table, if it is not a whole run."""
    return {dotted(leaf.path): leaf.value for leaf in leaves(spec, (table,) if table else ())}


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the keys whose values differ, of two runs as `flat` describes them. A key that one run lacks counts as None."""
    return [key for key in dict.fromkeys([*one, *other]) if one.get(key) != other.get(key)]


def _table(value: Any) -> Any:
    return value.model_dump(exclude_none=True) if isinstance(value, Spec) else value


def _with_nones(spec: type[Spec], tree: Tree) -> Tree:
    """Return the tree with None in place of "none", and with numbers in place of text such as "8k", where the spec accepts
    them."""

    def read(name: str, value: Any) -> Any:
        field = spec.model_fields.get(name)
        if field is None:
            return value
        if value == "none" and type(None) in get_args(field.annotation):
            return None
        mark = next((each for each in field.metadata if isinstance(each, Thousand)), None)
        if mark and isinstance(value, str):
            return whole(value, mark) or value
        if isinstance(value, list):
            kinds = [kind for each in get_args(field.annotation) for kind in kinds_of(each)]
            return [_with_nones(kinds[0], each) if kinds and isinstance(each, dict) else each for each in value]
        nested = _chosen(kinds_of(field.annotation), value)
        return _with_nones(nested, value) if nested and isinstance(value, dict) else value

    return {name: read(name, value) for name, value in tree.items()}


def kinds_of(annotation: Any) -> list[type[Spec]]:
    """Return the Spec classes that a field may hold."""
    if get_origin(annotation) is Annotated:
        return kinds_of(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [kind for member in get_args(annotation) for kind in kinds_of(member)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, Spec) else []


def _kinds_of_items(annotation: Any) -> list[type[Spec]]:
    """Return the Spec classes that an item of a field may be, if the field is a list."""
    return (
        [kind for member in get_args(annotation) for kind in kinds_of(member)] if get_origin(annotation) in (list, tuple) else []
    )


def _item(values: Any, at: str | int) -> Any:
    return values[at] if isinstance(values, list | tuple) and isinstance(at, int) and at < len(values) else None


def _chosen(kinds: list[type[Spec]], value: Any) -> type[Spec] | None:
    if len(kinds) < 2:
        return kinds[0] if kinds else None
    if "family" in kinds[0].model_fields:
        return FAMILIES.get(family_of(value))
    first = kinds[0].model_fields["kind"].default
    word = value.get("kind", first) if isinstance(value, dict) else None
    return next((kind for kind in kinds if kind.model_fields["kind"].default == word), None)


@dataclass(frozen=True)
class _Fault:
    """One error of pydantic, with the `path` of keys as the user wrote it, and the spec of each table on that path."""

    path: tuple[str | int, ...]
    kind: str
    value: Any
    message: str
    context: dict[str, Any]
    tables: tuple[type[Spec] | None, ...]

    @property
    def table(self) -> type[Spec] | None:
        return self.tables[len(self.path) - 1] if self.path else None

    @property
    def leaf(self) -> str:
        """Full key of the innermost known field on the path to the fault."""
        return dotted(tuple(part for part, _ in takewhile(lambda pair: pair[1], zip(self.path, self.tables, strict=False))))


def _follows(fault: _Fault, meant: Collection[str], *, preset_failed: bool) -> bool:
    """Return True if the fault is a consequence of another one: a misspelt key or preset also makes a value missing or a family
    unknown."""
    if fault.kind == "missing":
        return not {dotted(fault.path), dotted(fault.path[:1])}.isdisjoint(meant)
    return (
        preset_failed
        and fault.kind == "extra_forbidden"
        and len(fault.path) == 2
        and fault.path[0] == "model"
        and any(fault.path[1] in family.model_fields for family in FAMILIES.values())
    )


def _sound(spec: type[S], given: Tree, *, wrong: Collection[str], meant: Collection[str], path: tuple[str, ...] = ()) -> S:
    """Return the valid part of a table. The keys in `meant`, which the user probably misspelt, and keys inside them do not get
    defaults."""
    kept: Tree = {}
    absent: list[str] = []
    for name, field in spec.model_fields.items():
        here = (*path, name)
        value = given.get(name, {} if isinstance(field.default, Spec) else None)
        nested = _chosen(kinds_of(field.annotation), value)
        if dotted(here) in wrong or (name not in given and not {dotted(here), dotted(path)}.isdisjoint(meant)):
            absent.append(name)
        elif nested and isinstance(value, dict) and _is_faulty(dotted(here), (*wrong, *meant)):
            kept[name] = _sound(nested, value, wrong=wrong, meant=meant, path=here)
        elif nested and isinstance(value, dict):  # whole, with what its validators fill in
            kept[name] = nested.model_validate_json(json.dumps(value, default=str), strict=True)
        elif name in given:
            as_it_is_kept = TypeAdapter[Any](field.annotation or Any)
            kept[name] = as_it_is_kept.validate_json(json.dumps(value, default=str), strict=True)
    found = spec.model_construct(**kept)
    for name in absent:
        vars(found).pop(name, None)  # which may be its default
    return found


def _is_faulty(table: str, faults: Collection[str]) -> bool:
    """Return True if a table, or a value in it, is among the faults."""
    return any(one == table or one.startswith(f"{table}.") for one in faults)


def _fault(error: ErrorDetails, tree: Tree, spec: type[Spec]) -> _Fault:
    path: list[str | int] = []
    tables: list[type[Spec] | None] = [spec]
    value: Any = tree
    kinds: list[type[Spec]] = []
    parts = iter(error["loc"])
    items: list[type[Spec]] = []
    for part in parts:
        field = tables[-1].model_fields.get(str(part)) if tables[-1] else None
        kinds = items if isinstance(part, int) else kinds_of(field.annotation) if field else []
        items = _kinds_of_items(field.annotation) if field else []
        value = value.get(part) if isinstance(value, dict) else _item(value, part)
        path.append(part)
        tables.append(_chosen(kinds, value))
        if len(kinds) > 1:
            next(parts, None)  # pydantic names the member of the union here, which nobody wrote
    kind, found, context = error["type"], error["input"], dict(error.get("ctx", {}))
    if kind in ("union_tag_invalid", "union_tag_not_found"):  # of the whole table, and the fault of one word in it
        word = "family" if "family" in kinds[0].model_fields else "kind"
        known = [str(member.model_fields[word].default) for member in kinds]
        context = {"word": word, "known": known}
        kind = "union_tag_invalid" if word in found else "missing"
        found, path = found.get(word), [*path, word]
    return _Fault(tuple(path), kind, found, error["msg"], context, tuple(tables))


def _known(spec: type[Spec], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, field in spec.model_fields.items():
        yield (*path, name)
        for nested in kinds_of(field.annotation):
            yield from _known(nested, (*path, name))


def _meaning(fault: _Fault) -> Meaning | None:
    *above, word = map(str, fault.path)
    in_model = above[:1] == ["model"]
    found = meaning(word, table=above[0] if above else "")
    if found is None:
        return None
    first, _, last = found.key.partition(".")
    if not in_model or first != "model" or fault.table is None:
        return found
    return found if last in fault.table.model_fields or last == "preset" else None  # families differ in their keys


def keys_named(word: str) -> list[str]:
    """Return the full names of the keys that users may set and whose last part is `word`: `train.steps` for "steps"."""
    return list(dict.fromkeys(dotted(path) for path in _known(RunSpec) if path[-1] == word and path[0] != "branch"))


def _suggestion(fault: _Fault) -> str | None:
    """Return the key that the user probably meant: the counterpart of another trainer's key, a key of the same table with a
    similar spelling or contained in the unknown key, or a key of another table with nearly the same spelling."""
    if found := _meaning(fault):
        return found.key or None
    word, inside = str(fault.path[-1]), fault.path[0] == "model"
    neighbours = [*(fault.table.model_fields if fault.table else ()), *(["preset"] if inside else [])]
    parts = re.split(r"[_\-.]", word.lower())
    same = [dotted(path) for path in _known(fault.tables[0] or RunSpec) if path[-1] == word and path[0] != "model"]
    slip = near(word, neighbours, alike=ALIKE)  # nearly the same word is a better guess than a part of it
    if same and slip and not inside and len(fault.path) == 1:
        return same[0]  # a key without its table, beside a table that is spelt alike: "steps" and "sites"
    nearest = slip or max((name for name in neighbours if name in parts), key=len, default=None) or near(word, neighbours)
    if nearest:
        return dotted((*fault.path[:-1], nearest))
    others = (
        path for path in _known(fault.tables[0] or RunSpec) if not (inside and path[0] == "model")
    )  # other families' sizes are no help
    elsewhere = {known[-1]: dotted(known) for known in reversed([*others])}
    foreign = near(word, MEANINGS, alike=ALIKE)
    return elsewhere.get(near(word, elsewhere, alike=ALIKE) or "") or (MEANINGS[foreign].key or None if foreign else None)


def _worded(fault: _Fault, source: Callable[[str], str]) -> Problem:
    missing = fault.kind == "missing"
    name = dotted(fault.path)
    together = fault.kind == "value_error"  # of several values of a table, found by the table itself
    own = fault.message.removeprefix("Value error, ")
    return Problem(
        severity="error",
        key=name,
        value=None if missing or together else fault.value,
        reason=NEEDED[fault.kind].format(**fault.context) if fault.kind in NEEDED else own,
        way_out="The values of this table contradict each other: correct one of them." if together else _way_out(fault),
        source="" if missing else source(name),
    )


def _way_out(fault: _Fault) -> str:
    path, kind = fault.path, fault.kind
    if kind == "extra_forbidden":
        if found := _meaning(fault):
            return found.way_out()
        suggestion = _suggestion(fault)
        return f"Did you mean {suggestion}?" if suggestion else f"Known here: {', '.join(fault.table.model_fields)}."  # type: ignore[union-attr]
    if kind == "union_tag_invalid":
        nearest = near(str(fault.value), fault.context["known"])
        return f"{f'Did you mean {literal(nearest)}? ' if nearest else ''}Known: {', '.join(fault.context['known'])}."
    field = fault.table.model_fields.get(str(path[-1])) if fault.table else None
    about = f" ({field.description})" if field and field.description else ""
    if kind == "missing":
        preset = ' Or name a preset: preset = "tiny".' if path[0] == "model" and len(path) == 2 else ""
        return f'Write "{key(str(path[-1]))} = ..." under [{dotted(path[:-1])}]{about}.{preset}'
    tables = isinstance(fault.value, list) and all(isinstance(one, dict) for one in fault.value)
    if tables and path[0] == "sites" and (found := _meaning(fault)):
        return found.way_out()
    write = WRITE.get(kind, "Write another value").format(**fault.context)
    if field is None:
        return f"{write}."
    if kind == "literal_error" and isinstance(fault.value, str):
        nearest = near(fault.value, map(str, get_args(field.annotation)))
        if nearest:
            return f"Did you mean {literal(nearest)}?"
    default = "" if field.is_required() else f" or leave it out for the default, {literal(field.default)}"
    return f"{write}{about}{default}."

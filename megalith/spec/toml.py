"""Values and keys as TOML text, for error messages and resolved files."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any


def literal(value: Any) -> str:
    """Return a value as TOML. TOML has no None, so None is written as the text "none", which run files accept for None."""
    match value:
        case None:
            return '"none"'
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str():
            # JSON's escapes are TOML's, but for one control character that JSON leaves as it is
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case Mapping():
            return "{ " + ", ".join(f"{key(k)} = {literal(v)}" for k, v in value.items()) + " }" if value else "{}"
        case list() | tuple():
            return "[" + ", ".join(map(literal, value)) + "]"
    return literal(str(value))


def key(part: str) -> str:
    """Return one key, in quotes where TOML needs them."""
    return part if re.fullmatch(r"[A-Za-z0-9_-]+", part) else literal(part)


def dotted(parts: Iterable[str | int]) -> str:
    """Return a path of keys as `a.b.c`."""
    return ".".join(key(str(part)) for part in parts)

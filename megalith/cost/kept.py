"""Cache on disk of computed results, valid while the code that computed them is unchanged. No torch."""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from megalith import disk

CACHE = "MEGALITH_CACHE"

P = ParamSpec("P")
T = TypeVar("T")


def folder() -> Path | None:
    """Return the cache folder: $MEGALITH_CACHE, or ~/.cache/megalith; None (no cache) if the variable is empty."""
    named = os.environ.get(CACHE)
    if named == "":
        return None
    try:
        return Path(named) if named else Path.home() / ".cache" / "megalith"
    except RuntimeError:  # nobody's: a user without a home
        return None


def file(kind: str, subject: Any) -> Path | None:
    """Return the cache file of one kind for `subject`, a JSON value; None if the cache is off."""
    where = folder()
    if where is None:
        return None
    known = json.dumps(subject, sort_keys=True)
    return where / kind / f"{hashlib.sha256(known.encode()).hexdigest()[:32]}.json"


def read(path: Path | None) -> Any:
    """Return the file's value; None if the file is missing, unreadable or truncated."""
    if path is None:
        return None
    with suppress(ValueError, OSError):
        return json.loads(path.read_text())
    return None


def write(path: Path | None, value: Any) -> None:
    """Store a value for later runs. A folder that cannot be written only means that later runs save no time."""
    if path is None:
        return
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        disk.write_whole(path, json.dumps(value))


@cache
def code(*patterns: str) -> str:
    """A digest of the modules of this package whose paths match one of the patterns."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in (path for pattern in patterns for path in sorted(root.glob(pattern))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def kept(*patterns: str, when: Callable[..., bool]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Cache the results, numbers or tuples of numbers, of a function of plain values. Results are cached in memory, and, if `when` returns
    True for the arguments, also on disk until a module that matches one of the patterns changes."""

    def keeping(function: Callable[P, T]) -> Callable[P, T]:
        @cache
        @wraps(function)
        def found(*args: P.args, **kwargs: P.kwargs) -> T:
            if not when(*args, **kwargs):
                return function(*args, **kwargs)
            path = file(function.__name__.strip("_"), [code(*patterns), args, kwargs])
            known = read(path)
            if known is None:
                known = function(*args, **kwargs)
                write(path, known)
            return cast(T, _as_tuples(known))

        return cast(Callable[P, T], found)

    return keeping


def _as_tuples(value: Any) -> Any:
    """Return a value with tuples in place of lists, because JSON has only lists."""
    return tuple(map(_as_tuples, value)) if isinstance(value, (list, tuple)) else value

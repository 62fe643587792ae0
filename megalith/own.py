"""A user's own parts: objects that a run file names as `module:object`. Own parts are imported only by a command to which this
run file is given.

Code that only opens a checkpoint, a run folder or an exported model never calls `load`, whatever objects these files name.
"""

import hashlib
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path

NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
"""The form of an own part's name: a module, a colon, and an object in the module."""


class OwnPartError(ValueError):
    """A part that cannot be imported, or does not follow its protocol."""


def is_own(name: str) -> bool:
    """True if `name` has the form `module:object`."""
    return NAME.fullmatch(name) is not None


def load(name: str) -> object:
    """Import a part. The module is searched for first on Python's path, and then in the current directory.

    Any exception during the import becomes an OwnPartError with the reason.
    """
    module, _, path = name.partition(":")
    _look_here()
    try:
        found: object = importlib.import_module(module)
    except Exception as error:  # the module's own code runs
        raise OwnPartError(f"the module {module} cannot be imported: {type(error).__name__}: {error}") from error
    for attribute in path.split("."):
        if not hasattr(found, attribute):
            raise OwnPartError(f"the module {module} has no {path}")
        found = getattr(found, attribute)
    return found


def digest(name: str) -> str:
    """Return the sha256 of a part's source code: that of its module or, if the module is in a package, of every Python file of
    the package.

    Raises OwnPartError for a module without a source file. This function imports only the parent packages of the module.
    """
    module = name.partition(":")[0]
    _look_here()
    top = importlib.util.find_spec(module.partition(".")[0])
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None or not Path(found.origin).is_file():
        raise OwnPartError(f"the module {module} has no source file")
    files = [Path(found.origin)]
    if top is not None and top.submodule_search_locations and top.origin:
        files = sorted(Path(top.origin).parent.rglob("*.py"))
    total = hashlib.sha256()
    for file in files:
        total.update(hashlib.sha256(file.read_bytes()).digest())
    return total.hexdigest()


def digests(named: Mapping[str, str]) -> dict[str, str]:
    """Map each key of the run file that names an own part to the digest of the part's source."""
    return {key: digest(name) for key, name in named.items()}


def _look_here() -> None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)

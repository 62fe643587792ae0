"""The package installs the dependencies that it imports, and no others."""

import ast
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEEDS_NO_NAME = {"megalith", "pydantic_core"}
"""The package itself, and pydantic_core, which pydantic installs."""


def _imported() -> set[str]:
    """Return the top-level names of everything that a module of the package imports, at its top or in a function."""
    found: set[str] = set()
    for path in (ROOT / "megalith").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.partition(".")[0])
    return found - sys.stdlib_module_names


def _names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w-]", requirement)[0].replace("-", "_") for requirement in requirements}


def test_every_dependency_is_imported_and_every_import_a_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = _names(project["dependencies"])
    extras = _names([one for extra in project["optional-dependencies"].values() for one in extra])
    imported = _imported()
    assert asked - imported == set()
    assert imported - asked - extras - NEEDS_NO_NAME == set()

"""Docstrings, help and messages follow docs/style.md, as far as a test can tell."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [path for room in ("megalith", "tests", "benchmarks") for path in sorted((ROOT / room).rglob("*.py"))]
PACKAGE = [path for path in SOURCES if path.is_relative_to(ROOT / "megalith")]
PAGES = [ROOT / "README.md", *(path for path in sorted((ROOT / "docs").rglob("*.md")) if path.name != "style.md")]

HEADLESS = re.compile(r"(Of|As|What|Those|Which|Where|Whether|Who)\b")
"""Words that a docstring must not begin with."""

STILTED = re.compile(
    r"\b(so many|so often|none any more|(is|are|was|were) made again|goes on|there is what|(that|what|who) (is|are) to be|let look)\b",
    re.IGNORECASE,
)
"""Phrases that help, messages and pages must not have."""


def _docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every string that is a statement: docstrings, also those below an attribute."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def _messages(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every other string of several words: messages, help of options, descriptions of keys."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone and " " in node.value:
            yield node.lineno, node.value


def _help(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the docstrings that are shown as help of commands."""
    if path.parent.name == "commands":
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_") and (text := ast.get_docstring(node)):
                yield node.lineno, text


def _homonyms(folder: Path) -> dict[str, list[str]]:
    """Return the public classes that two modules of a folder define."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(folder.glob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(path.name)
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_a_docstring_says_what_a_thing_is_or_does() -> None:
    wrong, seen = [], 0
    for path in SOURCES:
        for line, text in _docstrings(ast.parse(path.read_text(encoding="utf-8"))):
            seen += 1
            if HEADLESS.match(text):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {text[:80]}")
    assert seen > 3000
    assert not wrong, "\n".join(["begin with a noun or an imperative (docs/style.md):", *wrong])


def test_help_and_messages_have_no_stilted_phrase() -> None:
    wrong, seen = [], 0
    for path in PACKAGE:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, text in [*_messages(tree), *_help(path, tree)]:
            seen += 1
            if found := STILTED.search(text):
                wrong.append(f"{path.relative_to(ROOT)}:{line}: {found[0]!r} in {text[:80]!r}")
    assert seen > 3000
    assert not wrong, "\n".join(["write plain English (docs/style.md):", *wrong])


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_has_no_stilted_phrase(page: Path) -> None:
    lines = enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
    wrong = [f"{number}: {found[0]!r} in {line[:100]}" for number, line in lines if (found := STILTED.search(line))]
    assert not wrong, "\n".join(["write plain English (docs/style.md):", *wrong])


def test_sibling_modules_have_no_public_class_of_the_same_name() -> None:
    folders = {path.parent for path in PACKAGE}
    assert {folder.name: found for folder in folders if (found := _homonyms(folder))} == {}


def test_the_examples_before_would_be_refused_and_those_after_not() -> None:
    """The rules can fail: in the table of docs/style.md they refuse examples on the left and none on the right."""
    table = (ROOT / "docs" / "style.md").read_text(encoding="utf-8").partition("| before | after |")[2]
    pairs = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")]
    assert len(pairs) >= 20
    assert sum(bool(HEADLESS.match(before) or STILTED.search(before)) for before, _ in pairs) >= 10
    assert not [after for _, after in pairs if HEADLESS.match(after) or STILTED.search(after)]

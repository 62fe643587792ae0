"""The ranks that train are an explicit group: no communication uses torch's default group."""

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2] / "megalith"
ROOMS = ("train", "parallel", "prove", "checkpoint")
MODULES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
TAKES_RANKS = {"new_group": "ranks"}
"""Functions that take ranks instead of a group -> the parameter that names the ranks."""
ENDS = {"destroy_process_group"}
"""Functions that concern a whole process."""
KNOW_IT = {
    "train/run.py",  # `join` makes it
    "parallel/groups.py",  # where none is named it is all ranks that train
    "checkpoint/checkpointer.py",  # the same, for who saves without a trainer
    "prove/worlds.py",  # ranks of a small world, which are all there are
    "prove/sites.py",
    "prove/doctor.py",
    "prove/calibrate.py",
}


def _needed(name: str) -> str | None:
    """Return the parameter that a call of `torch.distributed.NAME` must have, or None if the call does not communicate."""
    function = getattr(dist, name, None)
    if name in TAKES_RANKS or not callable(function) or name in ENDS:
        return TAKES_RANKS.get(name)
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # implemented in C++
        return None
    return "group" if "group" in parameters else None


def _calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls of torch.distributed's functions, by name."""
    imported = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "torch.distributed"
        for alias in node.names
    }  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            match node.func:
                case ast.Attribute(value=ast.Name(id="dist"), attr=name):
                    yield name, node
                case ast.Name(id=name) if name in imported:
                    yield imported[name], node


def _wrong(text: str) -> list[str]:
    """Return the calls without a group."""
    found = []
    for name, call in _calls(ast.parse(text)):
        if needed := _needed(name):
            place = list(inspect.signature(getattr(dist, name)).parameters).index(needed)
            given = next((keyword.value for keyword in call.keywords if keyword.arg == needed), None)
            given = call.args[place] if given is None and len(call.args) > place else given
            if given is None or (isinstance(given, ast.Constant) and given.value is None):
                found.append(f"line {call.lineno}: {ast.unparse(call)}")
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_call_names_its_group(path: Path) -> None:
    text = path.read_text()
    assert _wrong(text) == []
    assert "DeviceMesh(" not in text and "init_device_mesh" not in text, "would make its groups of the default one"
    assert "group.WORLD" not in text or str(path.relative_to(ROOT)) in KNOW_IT


@pytest.mark.parametrize(
    "call",
    [
        "barrier()",
        "all_reduce(x)",
        "isend(x, 1)",
        "P2POp(dist.isend, x, 1)",
        "get_rank()",
        "new_group()",
        "all_reduce(x, group=None)",
    ],
)
def test_a_call_without_a_group_is_found(call: str) -> None:
    assert _wrong(f"import torch.distributed as dist\ndist.{call}")


def test_a_call_in_a_group_is_not() -> None:
    assert not _wrong(
        "dist.barrier(group)\ndist.all_reduce(x, group=one.group)\ndist.new_group([0])\ndist.get_global_rank(group, 0)"
    )

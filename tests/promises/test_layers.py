"""Imports point downwards, siblings do not import each other, and modules that must start fast do not import torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "megalith"
LAYERS = {
    "disk": 0, "epochs": 0, "exchange": 0, "own": 0, "pyramid": 0, "schedule": 0, "sealed": 0, "tagged": 0,
    "events": 1, "spec": 1,
    "mesh": 2, "kernels": 2, "machine": 2,
    "models": 3, "data": 3, "fleet": 3,
    "parallel": 4, "checkpoint": 4, "control": 4,
    "check": 5,
    "train": 6, "cost": 6,
    "prove": 7, "rehearse": 7,
    "planner": 8,
    "report": 9,
    "watch": 10,
    "commands": 11,
    "api": 12, "cli": 12,
}  # fmt: skip
WITHOUT_TORCH = [
    "megalith",
    "megalith.api",
    "megalith.cli",
    "megalith.commands.shared.runs",
    "megalith.check",
    "megalith.mesh",
    "megalith.events",
    "megalith.schedule.simulate",
]
WITHOUT_TORCH += [
    "megalith.control.supervisor",
    "megalith.report.page",
    "megalith.report.live",
    "megalith.watch.server",
    "megalith.spec.files",
    "megalith.data.prepare",
    "megalith.planner.search",
    "megalith.cost.estimate",
]


def _room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def _imports(path: Path) -> list[str]:
    """Return every megalith module that a file imports, including imports inside functions."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [f"{node.module}.{alias.name}" if node.module == "megalith" else node.module for alias in node.names]
    return [name for name in found if name.startswith("megalith.") and name != "megalith.__version__"]


def _wrong(path: Path) -> list[str]:
    here = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if here == "__init__":
        return []
    rooms = {_room(name) for name in _imports(path)} - {here}
    return [
        f"{path.relative_to(ROOT)} (layer {LAYERS[here]}) imports {room} (layer {LAYERS[room]})"
        for room in rooms
        if LAYERS[room] >= LAYERS[here]
    ]


def test_every_room_has_a_layer() -> None:
    rooms = {p.name.removesuffix(".py") for p in ROOT.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()} - {
        "__init__"
    }
    assert rooms == set(LAYERS)


def test_imports_point_downwards() -> None:
    wrong = [line for path in sorted(ROOT.rglob("*.py")) for line in _wrong(path)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("module", WITHOUT_TORCH)
def test_starts_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
